"""Clients that mean no good: what the helper does with them, and what strace saw it do to files meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from helper_world import NOBODY
from kernel_boards import as_user

from underwatt.drivers.helper import HelperDevice
from underwatt.helper.board import JetsonBoard
from underwatt.helper.sysfs import Sysfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Row = tuple[str, str, str]
STRANGER, MEMBER = 4242, 4243
KINDS = ("huge", "slow", "half-open", "wrong user", "second holder", "path tricks", "replayed lease", "deaf", "flood")
CLIENTS = 50
HOSTILE_S = 25.0
_OPENED = re.compile(r'open(?:at)?\((?:AT_FDCWD|\d+), "([^"]*)", (\S+?)[,)]')
_CHANGED = re.compile(
    r"\b(?:unlink|unlinkat|rename|renameat|renameat2|mkdir|mkdirat|chmod|fchmodat|chown|fchownat|truncate|link|symlink|"
    r"mknod|mknodat|rmdir)\((.*)\)\s*="
)
TRACE = ("strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=%file", "-s", "300", "-o")


def hostile(world: Any, messages: int) -> Iterator[Row]:
    """Fuzz, then hostile clients beside a holder, all of it under strace."""
    helper, mount = world.helper, world.mount
    helper.stop()
    trace = world.folder / "strace.txt"
    helper.start(*TRACE, str(trace))
    helper.socket.chmod(0o666)  # so that a wrong user reaches it at all
    pid = _traced(helper.process.pid)
    began_s = time.monotonic()
    answered, refused = fuzz(str(helper.socket), messages, as_members=True)
    took_s = time.monotonic() - began_s
    alive = _lives(pid)
    _until(lambda: mount.settled() == world.found and not helper.journals)
    found = (
        f"{answered} answered, {refused} of them refused, in {took_s:.0f} s; the helper {'lives' if alive else 'DIED'}"
    )
    yield f"{messages} fuzzed messages", found, "no crash"
    same = "as it was" if mount.settled() == world.found else "CHANGED"
    yield "the board after the fuzz", same, "as it was"

    before = mount.settled()
    count = as_user(lambda: strangers(str(helper.socket), messages // 20), STRANGER, [STRANGER])
    same = "as it was" if mount.settled() == before else "CHANGED"
    yield f"{messages // 20} messages without the group", f"{count} did anything; the board is {same}", "no change"

    yield from beside_a_holder(world)
    alive, said = _lives(pid), helper.said().count("error of the helper's own")
    code = _end(helper, pid)
    yield (
        "the helper after all that",
        f"{'lived' if alive else 'DIED'}, {said} errors of its own, exit {code}",
        "no crash",
    )
    knobs = set(JetsonBoard(Sysfs(mount.root))._hardware.files())
    written, others = written_files(trace.read_text(errors="replace"), str(mount.root), knobs, helper.state)
    found = f"{len(written)} knob files, {len(others)} others{': ' + ', '.join(sorted(others)[:5]) if others else ''}"
    yield "files written, as strace saw it", found, "knobs, its journal and lock alone"


def beside_a_holder(world: Any) -> Iterator[Row]:
    """Fifty of them at once, while somebody holds the board and reads it."""
    helper, mount = world.helper, world.mount
    device = HelperDevice(str(helper.socket))
    device.apply(device.space.lowest)
    lease = device._board._lease
    held = mount.settled()
    children = [_fork(kind, str(helper.socket), lease, number) for number, kind in _kinds()]
    took_s, end_s = [], time.monotonic() + HOSTILE_S
    while time.monotonic() < end_s:
        begun_s = time.monotonic()
        device.read_power()
        took_s.append(time.monotonic() - begun_s)
        time.sleep(0.05)
    same = mount.settled() == held
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    done = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    succeeded = sum(code == 1 for code in done)
    took_s.sort()
    found = f"the holder's mode {'stood' if same else 'CHANGED'}; {succeeded} got what is not theirs"
    yield f"{CLIENTS} hostile clients at once", found, "no change"
    share = f"median {1e3 * took_s[len(took_s) // 2]:.0f} ms, worst {1e3 * took_s[-1]:.0f} ms ({len(took_s)} readings)"
    yield "the holder's readings meanwhile, under strace", share, ""
    device.close()
    _until(lambda: mount.settled() == world.found)
    yield "the board after them", "as it was" if mount.settled() == world.found else "CHANGED", "as it was"


def _kinds() -> Iterator[tuple[int, str]]:
    for number in range(CLIENTS):
        yield number, KINDS[number % len(KINDS)]


def _fork(kind: str, path: str, lease: str, number: int) -> int:
    """A hostile client as a process of its own; it ends with 1 where it got something that is not its own."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            group = STRANGER if kind == "wrong user" else NOBODY
            os.setgroups([group])
            os.setgid(group)
            os.setuid(STRANGER if kind == "wrong user" else MEMBER + number)
            code = int(_misbehave(kind, path, lease, Random(number)))
        finally:
            os._exit(code)
    return child


def _misbehave(kind: str, path: str, lease: str, chance: Random) -> bool:
    end_s = time.monotonic() + HOSTILE_S - 1
    succeeded = False
    while time.monotonic() < end_s and not succeeded:
        with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as link:
            link.settimeout(2.0)
            link.connect(path)
            if kind == "huge":
                link.sendall(b'{"do":"apply","mode":{"' + b"x" * chance.randrange(1, 1 << 20))
            elif kind == "slow":
                for byte in b'{"do":"describe"}' * 3:
                    link.sendall(bytes([byte]))
                    time.sleep(0.3)
            elif kind == "half-open":
                link.sendall(b'{"do":')
                time.sleep(5)
            elif kind == "deaf":
                for _ in range(3000):
                    link.sendall(b'{"do":"describe"}\n')
                time.sleep(5)
            elif kind == "flood":
                for _ in range(500):
                    _ask(link, do="describe")
            else:
                succeeded = _greedy(kind, link, lease, chance)
    return succeeded


def _greedy(kind: str, link: socket.socket, lease: str, chance: Random) -> bool:
    """Whether one that asks for what is not its own gets it."""
    if kind == "wrong user":
        return bool(_ask(link, do=chance.choice(["describe", "hold", "read"])).get("ok"))
    if kind == "second holder":
        return bool(_ask(link, do="hold").get("ok"))
    mode = {"cpu_cores": 1}
    if kind == "replayed lease":
        return any(_ask(link, do=do, lease=lease, **more).get("ok") for do, more in REPLAYED)
    name = chance.choice(
        ["../../etc/passwd", "/etc/shadow", "sys/devices/system/cpu/cpu1/online", "cpu_mhz/../x", "\0"]
    )
    return any(
        _ask(link, **message).get("ok")
        for message in (
            {"do": "apply", "lease": lease, "mode": {name: 1, **mode}},
            {"do": "read", "what": name},
            {"do": "describe", "path": name},
            {"do": "hold", "lease": name},
            {"do": name},
        )
    )


REPLAYED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("apply", {"mode": {"cpu_cores": 1}}),
    ("hold", {}),
    ("release", {}),
    ("release", {"hold": True}),
)


def _ask(link: socket.socket, **message: Any) -> dict[str, Any]:
    link.sendall(json.dumps(message).encode() + b"\n")
    heard = b""
    while not heard.endswith(b"\n"):
        more = link.recv(8192)
        if not more:
            raise OSError("it ended the connection")
        heard += more
    answer: dict[str, Any] = json.loads(heard)
    return answer


def strangers(path: str, messages: int) -> int:
    """How many of the messages of somebody who is not in the group had an effect or told anything."""
    got = 0
    for number in range(messages):
        with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as link:
            link.connect(path)
            message = {"do": ("hold", "describe", "read", "apply", "release")[number % 5], "what": "power"}
            got += bool(_ask(link, **message).get("ok"))
    return got


def fuzz(path: str, messages: int, *, as_members: bool) -> tuple[int, int]:
    """Messages of all kinds, from several members at once; how many were answered, and how many refused."""
    users = 4
    counts: list[tuple[int, int]] = []

    def member(number: int) -> None:
        user = MEMBER + number if as_members else 0
        counts.append(as_user(lambda: _fuzz(path, messages // users, number), user, [NOBODY]))

    threads = [threading.Thread(target=member, args=(number,)) for number in range(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(count[0] for count in counts), sum(count[1] for count in counts)


def _fuzz(path: str, messages: int, seed: int) -> tuple[int, int]:
    chance = Random(seed)
    answered = refused = 0
    link: socket.socket | None = None
    lease = ""
    for _ in range(messages):
        try:
            if link is None:
                link = socket.socket(socket.AF_UNIX)
                link.settimeout(60.0)
                link.connect(path)
                heard = link.makefile("rb")
            link.sendall(line_of(chance, lease) + b"\n")
            answer = json.loads(heard.readline())
            answered += 1
            refused += not answer["ok"]
            lease = answer.get("lease", lease)
        except (OSError, ValueError):
            if link is not None:
                link.close()
            link = None
    return answered, refused


def line_of(chance: Random, lease: str) -> bytes:
    """One line: mostly nearly right, for what is quite wrong is refused at the first look."""
    kind = chance.random()
    if kind < 0.15:
        return bytes(chance.randrange(256) for _ in range(chance.randrange(200))).replace(b"\n", b"")
    if kind < 0.16:
        return b"{" * chance.randrange(1, 5000)
    message: dict[str, Any] = {"do": chance.choice(["hold", "apply", "apply", "apply", "release", "formatted", ""])}
    if chance.random() < 0.002:
        message["do"] = chance.choice(["describe", "read"])
    for _ in range(chance.randrange(4)):
        name = chance.choice(["lease", "lease_s", "mode", "what", "hold", "id", "path", "do"])
        message[name] = _value(chance, lease)
    if message.get("do") == "apply" and chance.random() < 0.6:
        message["lease"] = lease
        knobs = ["cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz", "../x", "nvpmodel", "power_limit_w", ""]
        message["mode"] = {chance.choice(knobs): _value(chance, lease) for _ in range(chance.randrange(4))}
    text = json.dumps(message)
    if chance.random() < 0.2:
        cut = chance.randrange(len(text))
        text = text[:cut] + chance.choice(["", "\0", "}", '"', "\ud800", "9" * 50]) + text[cut + 1 :]
    return text.encode("utf-8", "surrogatepass")


def _value(chance: Random, lease: str) -> Any:
    return chance.choice(
        [
            *(0, 1, 2, -1, 1e308, float("nan"), float("inf"), True, None, "", "1", lease, [], {}, [[]], {"a": 1}),
            *("/etc/passwd", "\ud800", "x" * 500, 10**100, chance.uniform(0, 3000), chance.randrange(12)),
        ]
    )


def written_files(trace: str, root: str, knobs: set[str], state: Path) -> tuple[set[str], set[str]]:
    """Of the files that a process opened to write, made, removed or renamed: knobs, and what is none of its own."""
    changed = {path for path, flags in _OPENED.findall(trace) if re.search(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC", flags)}
    for words in _CHANGED.findall(trace):
        changed |= set(re.findall(r'"([^"]*)"', words))
    own = {str(path) for path in (state, state.parent / "run" / "helper.sock", state.parent / "run")}
    others = {path for path in changed if not any(path == one or path.startswith(f"{one}/") for one in own)}
    written = {path for path in others if path.removeprefix(f"{root}/") in knobs}
    return written, others - written


def _traced(strace: int) -> int:
    """The process that strace started."""
    (child,) = Path(f"/proc/{strace}/task/{strace}/children").read_text().split()
    return int(child)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _end(helper: Any, pid: int) -> int:
    os.kill(pid, signal.SIGTERM)
    return int(helper.process.wait(30))


def _until(done: Callable[[], bool], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not done() and time.monotonic() < end_s:
        time.sleep(0.05)
