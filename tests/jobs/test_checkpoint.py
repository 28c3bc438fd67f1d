from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from train_world import blobs, same

from underwatt.errors import InputError
from underwatt.jobs import checkpoint
from underwatt.jobs.checkpoint import Progress
from underwatt.jobs.training import Training

PROGRESS = Progress("who", 12.5, 40.0, 0.25, 96, 0.5)


@pytest.fixture
def training() -> Training:
    made = Training(blobs(), 16)
    for _ in range(7):
        made.step()
    return made


def test_what_was_saved_goes_on_bit_by_bit(tmp_path: Path, training: Training) -> None:
    checkpoint.save(tmp_path, training, PROGRESS)
    for _ in range(20):
        training.step()
    other = Training(blobs(), 4)
    state, progress, note = checkpoint.load(tmp_path, "who")
    assert note == ""
    assert progress == PROGRESS
    other.restore(state)
    for _ in range(20):
        other.step()
    assert same(other.state(), training.state())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_numbers_of_numpy_come_back_as_plain_ones(tmp_path: Path, training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = np.float64(0.0125)
    training.optimizer.param_groups[0]["seen"] = [np.int64(3), (np.float32(0.5), np.bool_(True)), None]
    checkpoint.save(tmp_path, training, PROGRESS)
    state, _, _ = checkpoint.load(tmp_path, "who")
    other = Training(blobs(), 16)
    other.restore(state)
    group = other.optimizer.param_groups[0]
    assert group["lr"] == 0.0125
    assert group["seen"] == [3, (0.5, True), None]
    other.step()


def test_without_one_it_is_said(tmp_path: Path) -> None:
    assert not checkpoint.exists(tmp_path)
    with pytest.raises(InputError, match="There is no checkpoint in"):
        checkpoint.load(tmp_path, "who")


def test_one_of_another_job_is_refused(tmp_path: Path, training: Training) -> None:
    checkpoint.save(tmp_path, training, PROGRESS)
    assert checkpoint.exists(tmp_path)
    with pytest.raises(InputError, match="of another job"):
        checkpoint.load(tmp_path, "somebody else")


def test_a_damaged_one_is_refused_in_one_sentence(tmp_path: Path, training: Training) -> None:
    checkpoint.save(tmp_path, training, PROGRESS)
    path = tmp_path / checkpoint.NAME
    whole = path.read_bytes()
    damaged = [b"", b"garbage", whole[:100], whole[: len(whole) // 2], whole[:-30]]
    chance = random.Random(0)
    for _ in range(20):
        at = chance.randrange(64)
        damaged.append(whole[:at] + chance.randbytes(200) + whole[at + 200 :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(InputError, match="cannot be read") as caught:
            checkpoint.load(tmp_path, "who")
        assert "\n" not in caught.value.message
    with path.open("wb") as file:
        checkpoint._write({"training": {}}, file)
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.load(tmp_path, "who")


def test_one_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "pwned",))

    with (tmp_path / checkpoint.NAME).open("wb") as file:
        checkpoint._write({"training": Evil(), "progress": {}}, file)
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.load(tmp_path, "who")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_the_last_one_stays_where_the_next_cannot_be_written(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    checkpoint.save(tmp_path, training, PROGRESS)
    before = (tmp_path / checkpoint.NAME).read_bytes()
    training.step()

    def half(_: object, file: object) -> None:
        file.write(b"half of it")  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(type(error)):
        checkpoint.save(tmp_path, training, PROGRESS)
    assert (tmp_path / checkpoint.NAME).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.NAME]


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def test_every_flipped_bit_is_found(tmp_path: Path, training: Training) -> None:
    checkpoint.save(tmp_path, training, PROGRESS)
    path, chance = tmp_path / checkpoint.NAME, random.Random(0)
    whole = path.read_bytes()
    for _ in range(300):
        flip(path, chance)
        with pytest.raises(InputError, match="cannot be read") as caught:
            checkpoint.load(tmp_path, "who")
        assert "--resume" in caught.value.hint
        path.write_bytes(whole)


def test_a_damaged_one_is_put_aside_and_the_one_before_it_is_taken(tmp_path: Path, training: Training) -> None:
    checkpoint.save(tmp_path, training, PROGRESS)
    before = training.samples
    training.step()
    checkpoint.save(tmp_path, training, replace(PROGRESS, elapsed_s=20.0))
    flip(tmp_path / checkpoint.NAME, random.Random(0))
    state, progress, note = checkpoint.load(tmp_path, "who")
    assert (state["samples"], progress) == (before, PROGRESS)
    assert "checksum does not match" in note
    assert checkpoint.load(tmp_path, "who")[1] == PROGRESS, "whoever is killed now goes on from there too"
    checkpoint.save(tmp_path, training, replace(PROGRESS, elapsed_s=30.0))
    flip(tmp_path / checkpoint.NAME, random.Random(1))
    assert checkpoint.load(tmp_path, "who")[1] == PROGRESS, "the damaged one did not push it out"


def test_two_damaged_ones_are_an_error_that_says_what_to_do(tmp_path: Path, training: Training) -> None:
    for _ in range(2):
        checkpoint.save(tmp_path, training, PROGRESS)
    for name in (checkpoint.NAME, checkpoint.PREVIOUS):
        flip(tmp_path / name, random.Random(0))
    with pytest.raises(InputError, match="Nor can the one before it") as caught:
        checkpoint.load(tmp_path, "who")
    assert "without --resume" in caught.value.hint


def test_a_file_system_without_links_keeps_the_one_before_it_too(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links on a memory card")

    monkeypatch.setattr(os, "link", refuse)
    for elapsed_s in (1.0, 2.0, 3.0):
        checkpoint.save(tmp_path, training, replace(PROGRESS, elapsed_s=elapsed_s))
    (tmp_path / checkpoint.NAME).unlink()
    assert checkpoint.exists(tmp_path)
    assert checkpoint.load(tmp_path, "who")[1].elapsed_s == 2.0
