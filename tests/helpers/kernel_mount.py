"""The kernel's model as a mount that every process sees, served by a process of its own.

    with mounted(CELLS["nano", "4"], folder) as root: ...

A driver that is killed leaves it as it was at that moment, as it would a board. Where FUSE cannot be used, ``why_not``
says why, and tests that need it skip with that.
"""

from __future__ import annotations

import argparse
import glob
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from board_matrix import CELLS, KERNELS, Cell, plant
from kernel_model import CONTROL, Kernel

START_S = 20.0
ENDED_BY_SIGNAL = 8  # what libfuse returns then, which is how a mount is told to end


def why_not() -> str:
    """Why nothing can be mounted here, or nothing."""
    if os.geteuid() != 0:
        return "only root mounts a board for all users to see"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as exc:
        return f"/dev/fuse cannot be opened: {exc.strerror}"
    try:
        import mfusepy  # noqa: F401
    except ImportError:
        return "mfusepy is not installed"
    except OSError:
        return "libfuse is not installed"
    return ""


class Mount:
    """A mounted board, from outside."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def tell(self, name: str, text: str = "1") -> None:
        """Make the world do something: ``heat``, ``load``, ``use_gpu``, ``nvpmodel``, ``jetson_clocks``, ``boot``.

        ``loader``: be under load while a process runs that has this word in its command line.
        """
        (self.root / CONTROL / name).write_text(text)

    def state(self) -> str:
        """What is behind the files."""
        return (self.root / CONTROL / "state").read_text()

    def drawn(self) -> float:
        """What was drawn since the boot: seconds of a sensor that reads what stands in its file, exact at any load."""
        return float((self.root / CONTROL / "drawn").read_text())

    def settled(self, wait_s: float = 0.08) -> tuple[str, dict[str, bytes]]:
        """What is behind the files and what they read, when everything that was asked for has arrived."""
        time.sleep(wait_s)
        shown: dict[str, bytes] = {}
        cpus = "sys/devices/system/cpu/cpu*"
        for pattern in (f"{cpus}/online", f"{cpus}/cpufreq/scaling_m*_freq", "sys/class/devfreq/*/m*_freq"):
            # A core that goes offline this moment takes its files along: unlike a Path's, this glob bears that.
            for name in sorted(glob.glob(pattern, root_dir=self.root)):  # noqa: PTH207
                with suppress(FileNotFoundError):
                    shown[name] = (self.root / name).read_bytes()
        return self.state(), shown


@contextmanager
def mounted(cell: Cell, folder: Path, *, seed: int = 0, faults: float = 0.02) -> Iterator[Mount]:
    """A board of the matrix at ``folder``, until the block ends."""
    arguments = ["--board", cell.board, "--release", cell.release]
    with _served(folder, [*arguments, "--seed", str(seed), "--faults", str(faults)]) as mount:
        yield mount


@contextmanager
def mounted_over(tree: Path, kernel: str, folder: Path, *, faults: float = 0.0) -> Iterator[Mount]:
    """Any tree at ``folder``, with the manners of a release: ``4``, ``5``, ``6`` or ``7``."""
    with _served(folder, ["--over", str(tree), "--release", kernel, "--faults", str(faults)]) as mount:
        yield mount


@contextmanager
def _served(folder: Path, arguments: list[str]) -> Iterator[Mount]:
    folder.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen([sys.executable, str(Path(__file__)), str(folder), *arguments])
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, server.pid, -15)  # it stands for the kernel, which waits for no process
    try:
        end_s = time.monotonic() + START_S
        while not (folder / CONTROL / "state").exists():
            if server.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the mount at {folder} did not come up")
            time.sleep(0.01)
        yield Mount(folder)
    finally:
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(10)
        if server.poll() is None or os.path.ismount(folder):
            server.kill()
            subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)
        server.wait()


class Files:
    """The operations that FUSE asks for."""

    use_ns = True

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._texts: dict[int, bytes] = {}  # of files that are open, as they were at the first read
        self._next = 0

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        mode = self._kernel.mode_of(path[1:])
        return {"st_mode": mode, "st_nlink": 1, "st_size": 0 if stat.S_ISDIR(mode) else 4096}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self._kernel.names_in(path[1:])]

    def readlink(self, path: str) -> str:
        return self._kernel.links[path[1:]]

    def open(self, path: str, flags: int) -> int:
        self._next += 1
        return self._next

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if offset == 0:
            self._texts[fh] = self._kernel.read(path[1:])
        return self._texts.get(fh, b"")[offset : offset + size]

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._kernel.write(path[1:], bytes(data))
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        """Files of a kernel have no length to change."""

    def release(self, path: str, fh: int) -> int:
        self._texts.pop(fh, None)
        return 0


def serve(kernel: Kernel, folder: Path) -> None:
    """Mount it and answer until this process is told to end."""
    import mfusepy

    class Board(Files, mfusepy.Operations):  # type: ignore[misc]
        """What is not defined above is refused, as the library does."""

    try:
        mfusepy.FUSE(
            Board(kernel),
            str(folder),
            foreground=True,
            nothreads=True,
            allow_other=True,
            default_permissions=True,
            direct_io=True,
            attr_timeout=0,
            entry_timeout=0,
            negative_timeout=0,
        )
    except RuntimeError as exc:
        if exc.args != (ENDED_BY_SIGNAL,):
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--board", default="")
    parser.add_argument("--release", required=True)
    parser.add_argument("--over", type=Path, help="a tree of plain files instead of a board of the matrix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=float, default=0.0, help="share of writes that find the kernel busy")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tree = options.over or plant(Path(scratch), CELLS[options.board, options.release])
        manners = KERNELS[options.release[0]]
        kernel = Kernel(tree, manners, seed=options.seed, faults=options.faults, now_s=time.monotonic)
    serve(kernel, options.folder)


if __name__ == "__main__":
    main()
