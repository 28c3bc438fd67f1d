from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from underwatt._files import write_atomically


@pytest.mark.parametrize("content", ["twö", "twö".encode(), lambda file: file.write("twö".encode())])
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_file_is_written_whole_and_no_draft_is_left(
    tmp_path: Path, content: object, durable: bool, shared: bool
) -> None:
    path = tmp_path / "file.json"
    path.write_text("one")
    write_atomically(path, content, durable=durable, shared=shared)  # type: ignore[arg-type]
    assert path.read_text(encoding="utf-8") == "twö"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shared", [False, True])
def test_a_writer_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "file.json"
    path.write_text("one")

    def fail(file: BinaryIO) -> None:
        file.write(b"tw")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail, shared=shared)
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_durable_file_and_its_folder_are_on_disk_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    synced: list[tuple[bool, bool]] = []

    def sync(file: int) -> None:
        synced.append((Path(f"/proc/self/fd/{file}").resolve().is_dir(), path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    write_atomically(path, "text", durable=True)
    assert synced == [(False, False), (True, True)], "the file before it has its name, the folder after"


def test_many_writers_of_a_shared_file_leave_one_of_their_texts(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    texts = [str(number) * 10_000 for number in range(8)]

    def write(text: str) -> None:
        for _ in range(20):
            write_atomically(path, text, shared=True)

    threads = [threading.Thread(target=write, args=[text]) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert path.read_text() in texts
    for thread in threads:
        thread.join()
    assert list(tmp_path.iterdir()) == [path]
