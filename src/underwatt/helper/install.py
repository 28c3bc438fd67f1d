"""Putting the service in place, and taking it away: a list of steps that can be read before anything is done."""

import os
import shutil
import subprocess
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from . import FOLDER, GROUP, NAME, SOCKET
from .errors import InputError, NotPermittedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Run = Callable[[Sequence[str]], object]

PACKAGE = "underwatt_helper"
UNITS = "etc/systemd/system"
PYTHON = "/usr/bin/python3"
NICE = -10  # a training and its loaders may keep every core busy, and what puts back must not wait for them
BY_HAND = f"cd /{FOLDER} && sudo {PYTHON} -sEB -m {PACKAGE}"

SOCKET_UNIT = f"""\
[Unit]
Description=Socket of Underwatt's helper, which sets this Jetson's clocks

[Socket]
ListenStream={SOCKET}
SocketUser=root
SocketGroup={GROUP}
SocketMode=0660
DirectoryMode=0755
RemoveOnStop=yes

[Install]
WantedBy=sockets.target
"""

# It needs no capability: the files that it writes are root's, and it is root. Of /sys it may write devices and the two
# nodes of the memory clock. JetPacks' older systemd (237 on JetPack 4) pass over what they do not know. So system calls
# are denied by groups, and not allowed: a group that is passed over then denies nothing, while of a list of what is
# allowed next to nothing would be left. @process is not denied, as it has pidfd_open in later versions.
SERVICE_UNIT = f"""\
[Unit]
Description=Underwatt's helper: sets this Jetson's clocks for a group, and puts them back
Requires={NAME}.socket
After={NAME}.socket nvpmodel.service sys-kernel-debug.mount
StartLimitIntervalSec=0

[Service]
ExecStart={PYTHON} -sEB -m {PACKAGE} --group {GROUP}
WorkingDirectory=/{FOLDER}
Restart=always
RestartPreventExitStatus=2
RestartSec=100ms
TimeoutStopSec=30
Nice={NICE}
OOMScoreAdjust=-900
StateDirectory=underwatt
StateDirectoryMode=0755
UMask=0022

CapabilityBoundingSet=
NoNewPrivileges=yes
ProtectSystem=strict
ReadOnlyPaths=/sys /proc/sys
ReadWritePaths=-/run/lock -/sys/devices
ReadWritePaths=-/sys/kernel/debug/bpmp/debug/clk/emc -/sys/kernel/debug/clk/override.emc
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
PrivateNetwork=yes
RestrictAddressFamilies=AF_UNIX
IPAddressDeny=any
ProtectControlGroups=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectClock=yes
ProtectHostname=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=~@aio @chown @clock @cpu-emulation @debug @ipc @keyring @memlock @module @mount @obsolete
SystemCallFilter=~@privileged @raw-io @reboot @resources @setuid @swap
SystemCallErrorNumber=EPERM
TasksMax=8
MemoryMax=64M

[Install]
WantedBy=multi-user.target
"""


class Step(NamedTuple):
    """Something that is done, and how it is said before."""

    says: str
    act: "Callable[[], object]"


def install_steps(root: str = "/", user: str = "", run: "Run | None" = None) -> "list[Step]":
    """What installs the helper under a root, for a group and whoever is named; a second time it replaces the first."""
    command = _runner(run)
    folder, units = os.path.join(root, FOLDER), os.path.join(root, UNITS)
    if not os.path.exists(os.path.join(root, PYTHON.lstrip("/"))):
        raise InputError(f"There is no {PYTHON} to run the helper.", hint="Install it: sudo apt install python3.")
    steps = [
        Step(f"copy its own folder, and nothing else of Underwatt, to {folder}", partial(copy_to, folder, root)),
        command(f"add the group {GROUP}, if it is not there", "groupadd", "--system", "--force", GROUP),
    ]
    if user:
        steps.append(command(f"let {user} use it, once they have logged in again", "usermod", "-aG", GROUP, user))
    if not has_systemd(root):
        return steps
    for name, text in ((f"{NAME}.socket", SOCKET_UNIT), (f"{NAME}.service", SERVICE_UNIT)):
        path = os.path.join(units, name)
        steps.append(Step(f"write {path}", partial(_write, path, text)))
    both = (f"{NAME}.socket", f"{NAME}.service")
    return [
        *steps,
        command("have systemd read the two", "systemctl", "daemon-reload"),
        command(
            f"have {SOCKET} there, and the helper run, from now on and after a reboot", "systemctl", "enable", *both
        ),
        command("start it, or start it again", "systemctl", "restart", *both),
    ]


def uninstall_steps(root: str = "/", run: "Run | None" = None) -> "list[Step]":
    """What removes the helper again; stopping it puts the board back."""
    command = _runner(run)
    folder, units = os.path.join(root, FOLDER), os.path.join(root, UNITS)
    paths = [os.path.join(units, f"{NAME}.{kind}") for kind in ("service", "socket")]
    steps = []
    if any(map(os.path.exists, paths)):
        names = [os.path.basename(path) for path in paths]
        stop = command("stop it, which puts the board back", "systemctl", "disable", "--now", *names)
        steps = [stop, *(Step(f"remove {path}", partial(_remove, path)) for path in paths)]
        steps.append(command("have systemd forget the two", "systemctl", "daemon-reload"))
    steps.append(Step(f"remove {folder}", partial(shutil.rmtree, folder, ignore_errors=True)))
    # Not by force: it may have been there before, as the own group of a user of that name.
    steps.append(command(f"remove the group {GROUP}", "groupdel", GROUP))
    return steps


def copy_to(parent: str, root: str = "/") -> str:
    """Copy this folder, alone, to where root's Python finds it and nobody else may write; where that is."""
    _require_roots(parent, root)
    target = os.path.join(parent, PACKAGE)
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    for folder in (parent, target):
        os.chmod(folder, 0o755)  # noqa: S103 - for all to read: nothing in it is secret
    here = os.path.dirname(os.path.abspath(__file__))
    for name in sorted(os.listdir(here)):
        if name.endswith(".py") and name != os.path.basename(__file__):
            with open(os.path.join(here, name), "rb") as file:
                _write(os.path.join(target, name), file.read().decode())
    return parent


def is_current(root: str = "/") -> "bool | None":
    """Whether what is installed is this version; ``None`` where nothing is."""
    here, there = os.path.dirname(os.path.abspath(__file__)), os.path.join(root, FOLDER, PACKAGE)
    if not os.path.isdir(there):
        return None
    names = [name for name in os.listdir(here) if name.endswith(".py") and name != os.path.basename(__file__)]
    return all(_bytes(os.path.join(here, name)) == _bytes(os.path.join(there, name)) for name in names)


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def has_systemd(root: str) -> bool:
    """Whether systemd runs here."""
    return os.path.isdir(os.path.join(root, "run/systemd/system"))


def _require_roots(path: str, root: str) -> None:
    """Nobody but root may be able to put something else in the place of what root runs."""
    while len(path) > len(root.rstrip("/")) + 1:
        if os.path.lexists(path):
            found = os.lstat(path)
            if os.path.islink(path) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise NotPermittedError(
                    f"Others may change {path}, so nothing that root runs can be put there.",
                    hint=f"Give it to root alone: sudo chown root: {path}; sudo chmod go-w {path}.",
                )
        path = os.path.dirname(path)


def _runner(run: "Run | None") -> "Callable[..., Step]":
    def checked(words: "Sequence[str]") -> None:
        ended = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip()
            raise InputError(
                f"`{' '.join(words)}` failed: {said or ended.returncode}.", hint="Mend it and run it again."
            )

    do = run or checked
    return lambda says, *words: Step(f"{says}: {' '.join(words)}", partial(do, words))


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = f"{path}.new"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644), "wb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(text.encode())
    os.rename(draft, path)


def _remove(path: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)
