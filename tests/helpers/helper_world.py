"""The service as it is installed: a copy of its folder alone, run by some Python, on a board that is mounted."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from underwatt.drivers.helper import Link
from underwatt.helper.install import NICE, copy_to

JETPACKS = {"3.6": "JetPack 4", "3.8": "JetPack 5", "3.10": "JetPack 6"}
NOBODY = 65534


def python_of(version: str) -> str:
    """The Python of a version: the system's or pyenv's; nothing where there is none."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}") or ""


class Helper:
    """A service that can be killed and started again."""

    def __init__(self, folder: Path, root: Path, python: str = sys.executable, group: int = NOBODY, *more: str) -> None:
        self.socket = folder / "run" / "helper.sock"
        self.state = folder / "state"
        self._log = folder / "helper.log"
        self._parent = copy_to(str(folder / "lib"), str(folder))
        self._command = [python, "-sEB", "-m", "underwatt_helper", "--socket", str(self.socket), "--root", str(root)]
        self._command += ["--group", str(group), *more]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *before: str) -> None:
        """Start it and wait until it answers; ``before`` is put in front of its command."""
        environment = {"PATH": os.environ["PATH"], "UNDERWATT_STATE": str(self.state)}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([*before, *self._command], cwd=self._parent, stderr=log, env=environment)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, NICE)  # as its unit has it
        end_s = time.monotonic() + 15.0
        while time.monotonic() < end_s:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as link:
                link.connect(str(self.socket))
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.005)
        raise RuntimeError(f"the helper did not come up: {self.said()}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal and wait for its end."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(10)

    def said(self) -> str:
        return self._log.read_text()

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """One message on a connection of its own."""
        link = Link(str(self.socket))
        try:
            return link.ask(do, **more)
        finally:
            link.close()

    @property
    def journals(self) -> list[Path]:
        return sorted(self.state.glob("*.json"))


@contextmanager
def serving(
    folder: Path, root: Path, python: str = sys.executable, group: int = NOBODY, *more: str
) -> Iterator[Helper]:
    """A helper for a board, until the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    helper = Helper(folder, root, python, group, *more)
    helper.start()
    try:
        yield helper
    finally:
        if helper.process is not None and helper.process.poll() is None:
            helper.stop()


def sandboxed(helper: Helper, root: Path, *words: str, groups: tuple[int, ...] = (NOBODY,)) -> list[str]:
    """A command as a container runs it for an ordinary user: no right of root's, the board's /sys but not to write.

    Of this machine's /run only the helper's folder is there, where a container would have it mounted.
    """
    home = Path(sys.base_prefix).resolve()  # where the Python lies may be somebody's home, closed to others
    hidden = next((part for part in reversed(home.parents) if not part.stat().st_mode & 0o001), None)
    steps = [
        "mount -t tmpfs -o mode=755 none /run",
        "mkdir /run/underwatt",
        f"mount --bind {helper.socket.parent} /run/underwatt",
        f"mount --bind {root}/sys /sys && mount -o remount,bind,ro /sys",
    ]
    if hidden:
        steps += [f"mount --bind {home} /mnt", f"mount -t tmpfs -o mode=755 none {hidden}", f"mkdir -p {home}"]
        steps.append(f"mount --bind /mnt {home}")
    who = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--groups", ",".join(map(str, groups))]
    rights = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    inside = f'set -e; {"; ".join(steps)}; exec setpriv {" ".join([*who, *rights])} "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside, "sandbox", *words]
