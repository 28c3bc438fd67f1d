"""Faults of what lasts, on disk: checkpoints, logs, stores, imports."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sqlite3
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import profile_child
from run_world import virtual
from train_world import state_in, train

import underwatt
from _damage import damaged
from _faults_device import damage
from _faults_loop import SEARCHES, log_in, some_s
from _faults_training import any_step, interrupted
from _faults_world import (
    LIMIT,
    Child,
    Faults,
    Found,
    Loop,
    Try,
    any_board,
    caught,
    differs_when_resumed,
    ended_as,
    endless_job,
    files,
    notes_in,
    told,
    wait_until,
    words_of,
)
from fuzz import DEVICE, WORKLOAD, _measurements, imports
from underwatt.budget import Budget, read_schedule
from underwatt.cli import main as command_line
from underwatt.control.live_budget import LiveBudget
from underwatt.errors import InputError, StoreError, UnderwattError
from underwatt.events import Measured, Noted
from underwatt.jobs import checkpoint, training_loop
from underwatt.jobs.runs import Run, RunOptions
from underwatt.live.feed import LogReader
from underwatt.records import Profile
from underwatt.runlog.log import follow, read_log
from underwatt.store import schema, store as store_module
from underwatt.store.store import Store

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

    from underwatt.jobs.job import Job

faults = Faults()


def said_by_command(*arguments: str) -> tuple[int, str]:
    """The exit code of a command and all that it prints."""
    text = io.StringIO()
    try:
        with redirect_stdout(text), redirect_stderr(text):
            command_line(list(arguments))
    except SystemExit as exc:
        return int(exc.code or 0), text.getvalue()
    return 0, text.getvalue()


# Checkpoints and logs of a run that is gone on with


def stopped_run(at: Try, job: Job) -> bool:
    """A run that was ended at some step, with two checkpoints and more; whether the board is as before."""
    training_loop.CHECKPOINT_PERIOD_S = 0.0
    step = max(3, any_step(at.chance))

    def stop(pilot: Any) -> None:
        if pilot.steps >= step:
            raise KeyboardInterrupt

    restored, _ = interrupted(at, job, KeyboardInterrupt, watch=stop)
    training_loop.CHECKPOINT_PERIOD_S = 60.0
    return bool(restored)


def flip(path: Path, chance: Random) -> None:
    """Change a bit, or cut the file short."""
    content = bytearray(path.read_bytes())
    if chance.random() < 0.2:
        content = content[: chance.randrange(len(content))]
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


@faults("a checkpoint with a flipped bit")
def flipped_checkpoint(at: Try) -> Found:
    job, folder = endless_job(), at.folder / "run"
    restored = stopped_run(at, job)
    flip(folder / checkpoint.NAME, at.chance)
    lost = differs_when_resumed(at, job)
    said = any("Going on from the one before it" in text for text in notes_in(folder))
    return Found(restored, said, lost, str(notes_in(folder)))


@faults("two damaged checkpoints")
def flipped_checkpoints(at: Try) -> Found:
    job, folder = endless_job(), at.folder / "run"
    restored = stopped_run(at, job)
    for name in (checkpoint.NAME, checkpoint.PREVIOUS):
        flip(folder / name, at.chance)
    before = files(folder)
    with caught(UnderwattError) as errors:
        train(folder, job, limit=LIMIT, resume=True)
    return Found(restored, told(errors, "cannot be read", "--resume"), files(folder) != before, words_of(errors))


@faults("a full disk under checkpoints")
def full_disk(at: Try) -> Found:
    job, folder, step = endless_job(), at.folder / "run", any_step(at.chance)
    training_loop.CHECKPOINT_PERIOD_S = 0.0
    device, full = virtual("nano"), [False]
    before = dict(device.snapshot())

    def fill(pilot: Any) -> None:
        if pilot.steps == step and not full[0]:
            full[0] = True
            (folder / "checkpoint.tmp").symlink_to("/dev/full")

    trained = train(folder, job, limit=LIMIT, device=device, watch=fill)
    training_loop.CHECKPOINT_PERIOD_S = 60.0
    said = any("No space left" in text for text in notes_in(folder)) and ended_as(folder, "limit")
    lost = state_in(folder)["samples"] != trained.samples
    return Found(dict(device.snapshot()) == before, said, lost, str(notes_in(folder)))


@faults("a damaged log of a run that goes on")
def damaged_log(at: Try) -> Found:
    job, folder = endless_job(), at.folder / "run"
    restored, log = stopped_run(at, job), at.folder / "run" / "log.jsonl"
    whole = log.read_bytes()
    log.write_bytes(content := damage(whole, at.chance))
    harmless = not read_log_damage(log)
    lost = differs_when_resumed(at, job)
    said = harmless or bool(notes_in_any(folder))
    return Found(restored, said or content == whole, lost, str(notes_in_any(folder)))


def read_log_damage(log: Path) -> bool:
    """Whether a log says that it is damaged."""
    try:
        return read_log(log).warning is not None
    except InputError:
        return True


def notes_in_any(folder: Path) -> list[str]:
    """The warnings of a log whose beginning may be lost, line by line."""
    lines, _ = follow(folder / "log.jsonl")
    return [line.text for line in lines if isinstance(line, Noted) and line.level == "warning"]


@faults("a log that is damaged while it is watched")
def watched_log(at: Try) -> Found:
    job, chance = endless_job(), at.chance
    restored = stopped_run(at, job)
    lines = (at.folder / "run" / "log.jsonl").read_bytes().splitlines(keepends=True)
    log = at.folder / "watched.jsonl"
    spoilt = chance.randrange(1, len(lines) - 1)
    bad = chance.choice((b"{\n", b"[1, 2]\n", chance.randbytes(60).replace(b"\n", b"") + b"\n", b"[" * 99_999 + b"\n"))
    log.write_bytes(lines[0])
    reader = LogReader(log)
    reader.open()
    for number, line in enumerate(lines[1:], 1):
        with log.open("ab") as file:
            file.write(bad if number == spoilt else b"")
            file.write(line)
        while reader.advance():
            pass
    facts = reader.view.facts
    told_of = reader.error is None and "damaged" in str(vars(reader.view))
    ended = facts["phase"] not in ("running", "waiting")
    return Found(restored, told_of and ended, lost=not ended, words=f"{facts['phase']} {reader.error}")


# Stores and imports


def kept_store(at: Try) -> Path:
    path = at.folder / "store.db"
    with Store(path) as store:
        store.take_in([Profile(DEVICE, WORKLOAD, _measurements())], [])
    return path


def held_in(path: Path) -> list[Any]:
    with Store(path, create=False) as store:
        return [store.measurements(one.id) for one in store.summaries()]


def held_at_death(path: Path) -> list[Any]:
    """What a store holds whose process was killed; nothing, and said so, where it was killed while it was made."""
    try:
        return held_in(path) if path.stat().st_size else []
    except StoreError as exc:
        if "is an empty database" in str(exc):
            return []
        raise


@faults("an import of damaged records")
def damaged_import(at: Try) -> Found:
    store, file = kept_store(at), at.folder / "import.json"
    before = held_in(store)
    file.write_bytes(damaged(at.chance.choice(imports()), at.chance))
    with caught(UnderwattError) as errors:
        underwatt.import_file(file, store=store)
    after = held_in(store)
    kept = after[: len(before)] == before or all(set(one) <= set(two) for one, two in zip(before, after, strict=False))
    listed, text = said_by_command("store", "ls", "--store", str(store))
    if errors:
        return Found(after == before, told(errors), lost=not kept, words=words_of(errors))
    return Found(listed == 0, "Traceback" not in text, lost=not kept, words=text)


@faults("a schedule that makes no sense")
def damaged_schedule(at: Try) -> Found:
    """Given to a run, which must not begin."""
    file, device = at.folder / "schedule.csv", virtual("nano")
    before = dict(device.snapshot())
    file.write_bytes(damaged(at.chance.choice((b"at,watts\n0,10\n1h,7\n", b"at_s,power_w\n0,10\n60,7.5\n")), at.chance))
    with caught(UnderwattError) as errors:
        str(read_schedule(file))
    return Found(dict(device.snapshot()) == before, told(errors) or not errors, words=words_of(errors))


@faults("a damaged store")
def damaged_store(at: Try) -> Found:
    path = kept_store(at)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = bytearray(path.read_bytes())
    if at.chance.random() < 0.5:
        content = content[: at.chance.randrange(1, len(content))]
    else:
        begin = at.chance.randrange(len(content))
        content[begin : begin + 2000] = at.chance.randbytes(len(content[begin : begin + 2000]))
    path.write_bytes(content)
    code, text = said_by_command("store", "ls", "--store", str(path))
    shown, more = said_by_command("store", "show", "1", "--store", str(path))
    said = "Traceback" not in text + more and all(number in (0, 1, 2) for number in (code, shown))
    device = virtual("nano")
    before = dict(device.snapshot())
    with caught(UnderwattError) as errors, Store(path) as store:
        Run(RunOptions(), device, LiveBudget(Budget(power_w=3.0)), at.folder / "run", store, (8,))
        held_in(path)
    unchanged = path.read_bytes() == bytes(content) or not errors
    said = said and (told(errors) or not errors)
    return Found(dict(device.snapshot()) == before, said, lost=not unchanged, words=text + more + words_of(errors))


@faults("names with markup")
def markup(at: Try) -> Found:
    os.environ["COLUMNS"] = "300"
    name = at.chance.choice(("[red]", "[/]", "[/nope]", "[bold", "]", "[link=x]", "\\[/]")) + str(at.chance.random())
    with Store(at.folder / "store.db") as store:
        info = replace(DEVICE, name=f"board {name}")
        store.take_in([Profile(info, replace(WORKLOAD, name=name), _measurements())], [])
    before = held_in(at.folder / "store.db")
    texts = [
        said_by_command("store", *words, "--store", str(at.folder / "store.db"))
        for words in (("ls",), ("show", "1"), ("ls", "--json"))
    ]
    said = all(code == 0 and name.replace("\\", "") in text.replace("\\", "") for code, text in texts)
    return Found(held_in(at.folder / "store.db") == before, said, words=str(texts)[:500])


@faults("kill -9 of a profile")
def killed_profile(at: Try) -> Found:
    path = at.folder / "store.db"
    settings = profile_child.settings()
    child = Child(lambda: profile_child.work(str(path)))
    wait_until(path.exists)
    time.sleep(at.chance.random() * 0.5)
    child.send(signal.SIGKILL)
    child.wait()
    kept = held_at_death(path)
    with sqlite3.connect(path) as connection:
        [whole] = connection.execute("PRAGMA integrity_check").fetchone()
    connection.close()
    _, words = Child(lambda: profile_child.work(str(path))).wait()
    [after] = held_in(path)
    lost = [m for one in kept for m in one if m not in after] or len({m.setting for m in after}) != len(after)
    said = {m.setting for m in after} <= set(settings) and len(after) >= len(settings) // 2
    return Found(whole == "ok", said, bool(lost), words)


@faults("two processes that store at once, one killed")
def shared_store(at: Try) -> Found:
    path, measured = kept_store(at), _measurements()

    def add(board: str) -> None:
        with Store(path) as store:
            number = store.profile_id(replace(DEVICE, id=board), WORKLOAD)
            for _ in range(30):
                store.add(number, measured[:2])

    children = [Child(lambda: add("one")), Child(lambda: add("two"))]
    time.sleep(at.chance.random() * 0.1)
    children[0].send(signal.SIGKILL)
    ends = [child.wait() for child in children]
    counts = [len(one) for one in held_in(path)]
    with sqlite3.connect(path) as connection:
        [whole] = connection.execute("PRAGMA integrity_check").fetchone()
    connection.close()
    return Found(whole == "ok", ends[1][0] == 0, lost=60 not in counts or counts[0] != len(measured), words=str(ends))


@faults("a folder that cannot be written to")
def blocked_folder(at: Try) -> Found:
    device, folder = virtual("nano"), at.folder / "run"
    before = dict(device.snapshot())
    kind = at.chance.choice(("file", "log is a folder", "dangling"))
    if kind == "file":
        folder.write_text("")
    elif kind == "dangling":
        folder.symlink_to(at.folder / "not" / "there")
    else:
        (folder / "log.jsonl" / "x").mkdir(parents=True)
    with caught(UnderwattError) as errors:
        train(folder, endless_job(), limit=LIMIT, device=device)
    return Found(dict(device.snapshot()) == before, told(errors), words=f"{kind}: {words_of(errors)}")


@faults("a folder that a finished run left")
def mixed_runs(at: Try) -> Found:
    job, folder = endless_job(), at.folder / "run"
    restored = stopped_run(at, job)
    copy = at.folder / "copy"
    shutil.copytree(folder, copy)
    with caught(UnderwattError) as errors:
        train(folder, job, limit=LIMIT)
    unchanged = files(folder) == files(copy)
    return Found(restored, told(errors, "There is a run in", "--resume"), lost=not unchanged, words=words_of(errors))


def kept_or_told(loop: Loop, path: Path) -> Found:
    """Whether all that was measured is in the store, or the log says that it alone holds the rest."""
    with Store(path, create=False) as kept:
        complete = sum(one.measured for one in kept.summaries()) == len(log_in(loop).of(Measured))
    told_of = any("could not be stored; this log holds them" in text for text in notes_in(loop.folder))
    return loop.found(said=complete or told_of, lost=not (complete or told_of))


@faults("a store that somebody locks")
def locked_store(at: Try) -> Found:
    schema.BUSY_TIMEOUT_S = 0.05
    device, power_w = any_board(at.chance)
    path, to_the_end = at.folder / "store.db", at.chance.random() < 0.3
    loop = Loop(at, device, power_w, store=path, name="numbers", options=SEARCHES)
    other = sqlite3.connect(path, isolation_level=None)
    with loop as looped:
        looped.train(some_s(at.chance, 5.0))
        other.execute("BEGIN IMMEDIATE")
        looped.train(some_s(at.chance))
        time.sleep(0.2)
        if not to_the_end:
            other.execute("ROLLBACK")
        looped.train(some_s(at.chance))
    other.close()
    return kept_or_told(loop, path)


@faults("a store without room")
def full_store(at: Try) -> Found:
    device, power_w = any_board(at.chance)
    path = at.folder / "store.db"
    loop = Loop(at, device, power_w, store=path, name="numbers", options=SEARCHES)
    with sqlite3.connect(path) as connection:
        [pages] = connection.execute("PRAGMA page_count").fetchone()
    connection.close()
    connect = store_module.connect

    def limited(name: Path, **options: bool) -> sqlite3.Connection:
        connection = connect(name, **options)
        connection.execute(f"PRAGMA max_page_count = {pages + at.chance.randrange(2)}")
        return connection

    with loop as looped:
        looped.train(some_s(at.chance, 5.0))
        kept = looped.tuner._pilot._publisher._keeper._store  # type: ignore[union-attr]
        store_module.connect = limited
        kept.close()
        looped.train(some_s(at.chance))
        store_module.connect = connect
        kept.close()
        looped.train(some_s(at.chance))
    return kept_or_told(loop, path)
