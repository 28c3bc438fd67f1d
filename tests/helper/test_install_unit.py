"""The units as JetPack 4's systemd 237 reads them: it passes over what it does not know, which must do no harm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
from helper_world import Helper, python_of
from kernel_boards import Boards
from kernel_mount import why_not

from underwatt.drivers.helper import Link
from underwatt.helper.install import SERVICE_UNIT, SOCKET_UNIT

OLDEST = 237  # of Ubuntu 18.04, on which JetPack 4 stands
# Since which version each is known; 200 stands for all that is older than that.
SINCE = {
    **dict.fromkeys(("Description", "Requires", "After", "ListenStream", "SocketMode", "DirectoryMode"), 200),
    **dict.fromkeys(("ExecStart", "WorkingDirectory", "Restart", "RestartPreventExitStatus", "RestartSec"), 200),
    **dict.fromkeys(("TimeoutStopSec", "Nice", "OOMScoreAdjust", "UMask", "CapabilityBoundingSet", "WantedBy"), 200),
    **dict.fromkeys(("NoNewPrivileges", "PrivateTmp", "PrivateNetwork", "SystemCallFilter"), 200),
    "SystemCallErrorNumber": 209,
    "SystemCallArchitectures": 209,
    "PrivateDevices": 209,
    "RestrictAddressFamilies": 211,
    "SocketUser": 214,
    "SocketGroup": 214,
    "RemoveOnStop": 214,
    "ProtectHome": 214,
    "ProtectSystem": 232,
    "TasksMax": 227,
    "StartLimitIntervalSec": 230,
    "ReadOnlyPaths": 231,
    "ReadWritePaths": 231,
    "MemoryMax": 231,
    "RestrictRealtime": 231,
    "ProtectControlGroups": 232,
    "ProtectKernelModules": 232,
    "RestrictNamespaces": 233,
    "StateDirectory": 235,
    "StateDirectoryMode": 235,
    "IPAddressDeny": 235,
    "LockPersonality": 235,
    "ProtectHostname": 242,
    "RestrictSUIDSGID": 242,
    "ProtectKernelLogs": 244,
    "ProtectClock": 245,
}
# Not known to 237, and what there stands for each all the same.
PASSED_OVER = {
    "ProtectHostname": "@privileged denies sethostname and setdomainname",
    "RestrictSUIDSGID": "nothing is run, and NoNewPrivileges keeps such files from giving anything",
    "ProtectKernelLogs": "CapabilityBoundingSet is empty, and the log wants a capability",
    "ProtectClock": "@clock is denied",
}
GROUPS = {  # of system calls, in 237
    *("@aio", "@basic-io", "@chown", "@clock", "@cpu-emulation", "@debug", "@default", "@file-system", "@io-event"),
    *("@ipc", "@keyring", "@memlock", "@module", "@mount", "@network-io", "@obsolete", "@privileged", "@process"),
    *("@raw-io", "@reboot", "@resources", "@setuid", "@signal", "@swap", "@sync", "@timer"),
}
DENIED_THEN = ("prlimit64",)  # in @resources once; glibc asks it how large a stack may be

# Has the kernel refuse this process some system calls, then becomes a program.
FILTERED = """
import ctypes, os, sys
words = sys.argv[1:]
names, program = words[:words.index("--")], words[words.index("--") + 1:]
lib = ctypes.CDLL("libseccomp.so.2")
lib.seccomp_init.restype = ctypes.c_void_p
allow, deny = 0x7FFF0000, 0x00050001  # an error, EPERM
rules = ctypes.c_void_p(lib.seccomp_init(allow))
for name in names:
    number = lib.seccomp_syscall_resolve_name(name.encode())
    if number >= 0:
        assert lib.seccomp_rule_add(rules, deny, number, 0) == 0, name
assert lib.seccomp_load(rules) == 0
os.execvp(program[0], program)
"""


def entries(unit: str) -> list[tuple[str, str]]:
    """All ``name=value`` of a unit, in order; a name may come twice."""
    return [(name, value) for name, equals, value in (line.partition("=") for line in unit.splitlines()) if equals]


def filters() -> list[str]:
    return [value for name, value in entries(SERVICE_UNIT) if name == "SystemCallFilter"]


@pytest.mark.parametrize("unit", [SOCKET_UNIT, SERVICE_UNIT], ids=["socket", "service"])
def test_every_directive_is_known_to_jetpack_4_or_something_else_stands_for_it(unit: str) -> None:
    used = {name for name, _ in entries(unit)}
    assert used <= SINCE.keys(), "say since which version of systemd it is known"
    assert {name for name in used if SINCE[name] > OLDEST} <= PASSED_OVER.keys()


def test_system_calls_are_denied_and_not_allowed_by_groups_that_jetpack_4_knows() -> None:
    """An unknown group is passed over: of a list of what is allowed, next to nothing would be left."""
    assert filters()
    for value in filters():
        assert value.startswith("~"), "a list of what is allowed"
        assert set(value[1:].split()) <= GROUPS


def denied() -> list[str]:
    """The system calls that the unit denies, as this machine's systemd knows their groups."""
    found, todo = [*DENIED_THEN], [group for value in filters() for group in value[1:].split()]
    while todo:
        words = ["systemd-analyze", "syscall-filter", todo.pop()]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
        names = [line.strip() for line in said if line.strip() and not line.strip().startswith("#")]
        todo += [name for name in names if name.startswith("@")]
        found += [name for name in names if not name.startswith("@")]
    return found


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
@pytest.mark.skipif(not find_library("seccomp"), reason="libseccomp is not here")
def test_the_helper_does_all_that_it_does_under_its_filter(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    python = python_of("3.6") or sys.executable
    with Boards() as boards:
        root = boards.board("nano", "4").root
        helper = Helper(tmp_path, root, python)
        helper.socket.parent.mkdir()
        # Where systemd does not hand it a socket it makes its own, which takes a chown.
        names = [name for name in denied() if not name.startswith(("chown", "fchown", "lchown"))]
        assert len(names) > 50
        helper.start(sys.executable, "-c", FILTERED, *names, "--")
        told = helper.ask("describe")
        assert told["ok"]
        knob, values = next((name, values) for name, values in told["values"].items() if len(values) > 1)
        link = Link(str(helper.socket))
        try:
            lease = link.ask("hold")["lease"]
            assert link.ask("apply", lease=lease, mode={knob: values[0]})["ok"]
            assert link.ask("read", what="power")["power_w"] > 0
            assert link.ask("read", what="state")["ok"]
            assert link.ask("release", lease=lease)["ok"]
        finally:
            link.close()
        assert helper.stop() == 0
    assert "error of the helper's own" not in helper.said()
