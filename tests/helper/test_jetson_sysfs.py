from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from underwatt.errors import ApplyError, NotPermittedError, SensorError
from underwatt.helper.sysfs import PATIENCE_S, Presence, Sysfs, Wanted, Writes

if TYPE_CHECKING:
    from pathlib import Path


class Failing(Sysfs):
    """Every system call fails with one error."""

    def __init__(self, number: int) -> None:
        super().__init__("/")
        self.number = number

    def _pull(self, path: str) -> bytes:
        raise OSError(self.number, os.strerror(self.number))

    def _push(self, path: str, data: bytes) -> None:
        raise OSError(self.number, os.strerror(self.number))


class Bounds(Sysfs):
    """A minimum and a maximum in memory, of a kernel that refuses to let them cross."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__("/")
        self.values = {"min": low, "max": high}

    def _pull(self, path: str) -> bytes:
        return f"{self.values[path]}\n".encode()

    def _push(self, path: str, data: bytes) -> None:
        after = self.values | {path: int(data)}
        if after["min"] > after["max"]:
            raise OSError(errno.EINVAL, "crossed")
        self.values = after


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_forbidden_says_what_would_permit(number: int) -> None:
    with pytest.raises(NotPermittedError, match=r"sudo.* helper install"):
        Failing(number).read("a")
    with pytest.raises(NotPermittedError, match=r"sudo.* helper install"):
        Failing(number).write("a", "1")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV, errno.EINVAL, errno.EBUSY, errno.EIO])
def test_other_failures_name_the_file_and_the_reason(number: int) -> None:
    with pytest.raises(SensorError, match=f"/some/file.*{os.strerror(number).lower()}"):
        Failing(number).read("some/file")
    with pytest.raises(ApplyError, match=f"'5' to /some/file.*{os.strerror(number).lower()}"):
        Failing(number).write("some/file", "5\n")


def test_a_first_try_that_took_all_the_patience_is_not_the_last(tmp_path: Path) -> None:
    class HeldUp(Sysfs):
        """Busy once, on a machine that lets nobody run for a while."""

        tries = 0

        def _push(self, path: str, data: bytes) -> None:
            self.tries += 1
            if self.tries == 1:
                time.sleep(1.5 * PATIENCE_S)
                raise OSError(errno.EBUSY, "busy")
            super()._push(path, data)

    (tmp_path / "clock").write_text("500\n")
    HeldUp(tmp_path).write("clock", "700\n")
    assert (tmp_path / "clock").read_text() == "700\n"


def test_a_missing_file_is_never_created(tmp_path: Path) -> None:
    with pytest.raises(ApplyError, match="no such file"):
        Sysfs(tmp_path).write("absent", "1\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "\n", "garbage\n", "1.5\n", "0x10\n", "12 13\n", "\xff\xfe"])
def test_what_is_not_a_number_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "value").write_bytes(text.encode("latin-1"))
    with pytest.raises(SensorError, match="not a number"):
        Sysfs(tmp_path).read_int("value")


def test_what_is_no_list_of_numbers_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "table").write_text('100 "00 300\n')
    with pytest.raises(SensorError, match="no list of numbers") as caught:
        Sysfs(tmp_path).read_ints("table")
    assert caught.value.hint


def test_a_silently_rounded_write_names_both_values(tmp_path: Path) -> None:
    class Rounding(Sysfs):
        def _push(self, path: str, data: bytes) -> None:
            super()._push(path, b"700\n")

    (tmp_path / "clock").write_text("500\n")
    writes = Writes(Rounding(tmp_path))
    writes.put("clock", Wanted("750\n"))
    with pytest.raises(ApplyError, match="asked for 750 and took 700"):
        writes.settle()
    for wanted in (
        Wanted("700\n"),
        Wanted("701\n", tolerance=1),
        Wanted("900\n", excuse=lambda found, asked: found < asked),
    ):
        writes.put("clock", wanted)
        writes.settle()


def test_bytes_survive_reading_and_writing(tmp_path: Path) -> None:
    every_byte = bytes(range(256))
    (tmp_path / "a").write_bytes(every_byte)
    (tmp_path / "b").write_bytes(b"longer than what comes, to be cut" * 20)
    sysfs = Sysfs(tmp_path)
    sysfs.write("b", sysfs.read("a"))
    assert (tmp_path / "b").read_bytes() == every_byte


@pytest.mark.parametrize("length", [4095, 4096, 4097, 50_000])
def test_long_files_are_read_whole(tmp_path: Path, length: int) -> None:
    (tmp_path / "long").write_bytes(b"x" * length)
    assert len(Sysfs(tmp_path).read("long")) == length


def test_a_file_that_never_ends_is_cut() -> None:
    assert len(Sysfs("/").read("dev/zero")) == 1 << 20


def test_presence_and_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a1").write_text("")
    (tmp_path / "a0").write_text("")
    sysfs = Sysfs(tmp_path)
    assert sysfs.glob("a*") == ("a0", "a1")
    assert sysfs.presence("a0") is Presence.PRESENT
    assert sysfs.presence("b") is Presence.ABSENT

    def forbidden(_path: str) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "stat", forbidden)
    assert sysfs.presence("a0") is Presence.HIDDEN


_values = st.integers(min_value=0, max_value=10)


@given(_values, _values, _values, _values)
def test_a_range_is_set_from_anywhere_to_anywhere_without_crossing(a: int, b: int, c: int, d: int) -> None:
    sysfs = Bounds(min(a, b), max(a, b))
    Writes(sysfs).put_range(("min", "max"), Wanted(f"{min(c, d)}\n"), Wanted(f"{max(c, d)}\n"))
    assert sysfs.values == {"min": min(c, d), "max": max(c, d)}
