"""A tree of files that behaves as a Jetson's kernel has it: what a read gives and what a write does, without a mount.

A limit arrives after the write, rates are counted or cannot be read, nodes and rights appear later, and now and then
the answer is "busy". ``Manners`` says which of it a release does. Beside the board's own files there are some under
``.kernel``, by which a test looks behind the files and makes the world happen: heat, a load, nvpmodel run by another.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from board_matrix import BPMP, CPU, OVERRIDE, Manners

CONTROL = ".kernel"
CONTROLS = ("state", "drawn", "faults", "lag", "heat", "load", "loader", "use_gpu", "nvpmodel", "jetson_clocks", "boot")
STATUS, CONF, RELEASE = "var/lib/nvpmodel/status", "etc/nvpmodel.conf", "etc/nv_tegra_release"
_SENSOR = re.compile(r".*/(?:in_(?:power|current)\d_input|curr\d_input|power1_input)")
_NO_CAP = (0, 2**31 - 1, -1)
OC3_PER_S, OC3_LOADED_PER_S = 1.5, 7.6  # seen on an Orin Nano Super, idle and loaded


def refuse(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_bytes()


@dataclass
class Limits:
    """The two limits of a clock: as asked for, and as they read."""

    folder: str
    prefix: str
    table: tuple[int, ...]
    cores: tuple[int, ...] = ()  # of a cluster; the GPU has none
    heat: int = 0  # entries that heat has taken from the top
    asked: dict[str, int] = field(default_factory=dict)
    shown: dict[str, int] = field(default_factory=dict)
    due_s: float | None = None
    rights_s: float = 0.0  # until then nobody's right to write has come

    def effective(self, nearest: bool) -> dict[str, int]:
        high, low = self._round(self.asked["max"], down=True, nearest=nearest), self.asked["min"]
        high = min(high, self.table[max(0, len(self.table) - 1 - self.heat)])
        return {"max": high, "min": min(self._round(low, down=False, nearest=nearest), high)}

    def _round(self, value: int, *, down: bool, nearest: bool) -> int:
        if nearest:
            return min(self.table, key=lambda entry: abs(entry - value))
        if down:
            return max((entry for entry in self.table if entry <= value), default=self.table[0])
        return min((entry for entry in self.table if entry >= value), default=self.table[-1])


class Kernel:
    """All files by their path from the root; ``now_s`` is the time of this machine unless a test has its own."""

    def __init__(
        self, tree: Path, manners: Manners, *, seed: int = 0, faults: float = 0.02, now_s: Callable[[], float]
    ):
        self.manners, self._faults, self.now_s = manners, faults, now_s
        self.random = Random(seed)
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.folders: dict[str, set[str]] = {"": set()}
        for path in sorted(tree.rglob("*")):
            self._add(path.relative_to(tree).as_posix(), path)
        for name in [
            "state",
            "drawn",
            "faults",
            "lag",
            "heat",
            "load",
            "loader",
            "use_gpu",
            "nvpmodel",
            "jetson_clocks",
            "boot",
        ]:
            self._enter(f"{CONTROL}/{name}")
            self.files[f"{CONTROL}/{name}"] = b"\n"
        self._found = dict(self.files)
        self.boot()

    def boot(self) -> None:
        """Stand as after a start into the active mode, whatever was done before."""
        self.files = dict(self._found)
        self.lag_s, self.faults = self.manners.lag_s, self._faults
        self.clusters = [self._limits(path) for path in sorted(self.files) if path.endswith("/related_cpus")]
        gpus = [
            p for p in self.files if p.endswith("/available_frequencies") and ".vic" not in p and "scaling" not in p
        ]
        self.gpu = self._limits(gpus[0]) if gpus else None
        self.gpu_awake = not self.manners.gpu_sleeps
        self.online = {int(m[1]): True for p in self.files if (m := re.fullmatch(rf"{CPU}/cpu(\d+)/online", p))}
        self.switching_s = 0.0  # until then a core is being switched
        self.enables, self.unbalanced, self.override_hz = 0, 0, 0
        self.locked, self.locked_hz = False, 0
        bounds = (f"{BPMP}/max_rate", "sys/kernel/debug/tegra_bwmgr/emc_max_rate")
        self.emc_max_hz = next((int(self.files[path]) for path in bounds if path in self.files), 0)
        self.load, self.started_s, self.oc3 = 0.3, self.now_s(), 0.0
        self._oc3_s = self.started_s
        self._loader, self._looked_s = b"", 0.0
        self._drawn_s, self._drawn_to_s = 0.0, self.now_s()
        self.run_nvpmodel(self._active_mode())

    # The shape of the tree

    def _add(self, name: str, path: Path) -> None:
        if path.is_symlink():
            self._enter(name)
            self.links[name] = str(path.readlink())
        elif path.is_dir():
            self.folders.setdefault(name, set())
            self._enter(name)
        else:
            self._enter(name)
            self.files[name] = path.read_bytes()

    def _enter(self, name: str) -> None:
        parent, _, base = name.rpartition("/")
        if base not in self.folders.setdefault(parent, set()):
            self.folders[parent].add(base)
            if parent:
                self._enter(parent)

    def _limits(self, path: str) -> Limits:
        folder = path.rsplit("/", 1)[0]
        prefix = "scaling_" if path.endswith("related_cpus") else ""
        table = tuple(sorted(map(int, self.files[f"{folder}/{prefix}available_frequencies"].split())))
        cores = tuple(map(int, self.files[path].split())) if prefix else ()
        limits = Limits(folder, prefix, table, cores)
        limits.asked = {end: int(self.files[f"{folder}/{prefix}{end}_freq"]) for end in ("min", "max")}
        limits.shown = dict(limits.asked)
        return limits

    def hidden(self, path: str) -> bool:
        """Whether a file is away for now: the GPU's before its first use, those of a cluster that is off."""
        if self.gpu and not self.gpu_awake and self._leads_to(path, self.gpu.folder):
            return True
        if self.manners.off_clusters_stay:
            return False
        core = re.match(rf"{CPU}/cpu(\d+)/cpufreq", path)
        if core:
            return not self.online[int(core[1])]
        return any(path.startswith(c.folder) for c in self.clusters if not self._awake(c))

    def _leads_to(self, path: str, folder: str) -> bool:
        parent, base = path.rpartition("/")[::2]
        is_link = parent == "sys/class/devfreq" and base == folder.rsplit("/", 1)[1]
        return is_link or path == folder or path.startswith(f"{folder}/")

    def mode_of(self, path: str) -> int:
        """Type and rights of a path; raises ``ENOENT`` for what is not there."""
        if self.hidden(path):
            raise refuse(errno.ENOENT)
        if path in self.links:
            return stat.S_IFLNK | 0o777
        if path in self.files:
            if path.startswith(CONTROL):
                return stat.S_IFREG | 0o666
            sealed = self.manners.sealed_names and "/rail_name_" in path
            return stat.S_IFREG | (0o600 if sealed else 0o644)
        if path in self.folders:
            return stat.S_IFDIR | (0o700 if path == "sys/kernel/debug" else 0o755)
        raise refuse(errno.ENOENT)

    def names_in(self, path: str) -> list[str]:
        """What a folder lists now."""
        prefix = f"{path}/" if path else ""
        return sorted(name for name in self.folders[path] if not self.hidden(prefix + name))

    # Reading

    def read(self, path: str) -> bytes:
        """The text of a file at this moment."""
        self.mode_of(path)
        self._draw()
        self._let_limits_arrive()
        if path == f"{CONTROL}/drawn":
            return b"%.6f\n" % self._drawn_s
        if path == f"{CONTROL}/state":
            return json.dumps(self.state(), indent=1, sort_keys=True).encode() + b"\n"
        if _SENSOR.fullmatch(path):
            self._fault_now_and_then(errno.EAGAIN)
            noise = self.random.gauss(1.0, 0.01) if self._loader else 1.0
            self._look_for_loader()
            return b"%d\n" % round(int(self.files[path]) * self._drawing() * noise)
        number = self._number(path)
        return self.files[path] if number is None else b"%d\n" % number

    def _number(self, path: str) -> int | None:
        for limits in self._all_limits():
            if path.startswith(f"{limits.folder}/"):
                name = path.rsplit("/", 1)[1].removeprefix(limits.prefix)
                if name in ("min_freq", "max_freq"):
                    return limits.shown[name[:3]]
                if name == "cur_freq":
                    return self._running(limits)
        core = re.fullmatch(rf"{CPU}/cpu(\d+)/online", path)
        if core:
            return int(self.online[int(core[1])])
        if path.endswith("/oc3_event_cnt"):
            return int(self._oc3_now())
        memory = {
            f"{BPMP}/rate": self.emc_hz(),
            f"{BPMP}/mrq_rate_locked": int(self.locked),
            f"{OVERRIDE}/clk_rate": self.emc_hz(),
            f"{OVERRIDE}/clk_update_rate": int(self.enables > 0),  # a rate goes in, the enable state comes out
            f"{OVERRIDE}/clk_state": int(self.enables > 0),
        }
        return memory.get(path)

    def _all_limits(self) -> list[Limits]:
        return [*self.clusters, *([self.gpu] if self.gpu else [])]

    def _running(self, limits: Limits) -> int:
        low, high = limits.shown["min"], limits.shown["max"]
        wish = low + (high - low) * self.load
        return max((entry for entry in limits.table if low <= entry <= wish), default=low)

    def emc_hz(self) -> int:
        """The memory clock as it runs."""
        cap = int(self.files.get(self.manners.emc_cap, b"0")) or self.emc_max_hz
        if self.enables and self.override_hz:
            return self.override_hz
        return self.locked_hz if self.locked else min(cap, self.emc_max_hz)

    def activity(self) -> float:
        """How much of what it can draw the board draws, 0 to 1: grows with every clock and core that is set."""
        cpu = sum(
            (c.shown["max"] / c.table[-1]) ** 2 * sum(self.online[core] for core in c.cores) for c in self.clusters
        ) / max(1, len(self.online))
        gpu = (self.gpu.shown["max"] / self.gpu.table[-1]) ** 2 if self.gpu else 0.0
        memory = self.emc_hz() / self.emc_max_hz if self.emc_max_hz else 0.0
        return (0.2 + 0.8 * self.load) * (0.25 * cpu + 0.55 * gpu + 0.2 * memory)

    def _drawing(self) -> float:
        """What the sensors read now, as a multiple of what stands in their files."""
        return 0.6 + 1.6 * self.activity()

    def _draw(self) -> None:
        """Nothing has changed since the last time that anybody read or wrote: so much was drawn meanwhile."""
        now_s = self.now_s()
        self._drawn_s += self._drawing() * (now_s - self._drawn_to_s)
        self._drawn_to_s = now_s

    def _look_for_loader(self) -> None:
        """Be under load while a process runs whose command line has the word in it that a test has named."""
        if self._loader and self.now_s() - self._looked_s > 0.02:
            self._looked_s = self.now_s()
            self.load = 0.9 if self._loader in b"".join(_command_lines()) else 0.05

    def _oc3_now(self) -> float:
        now_s = self.now_s()
        per_s = OC3_LOADED_PER_S if self.load > 0.5 else OC3_PER_S
        self.oc3 += per_s * (now_s - self._oc3_s)
        self._oc3_s = now_s
        return self.oc3

    def state(self) -> dict[str, object]:
        """What is behind the files: limits as asked for, cores, enables as counted."""
        clocks = {c.folder: dict(c.asked) for c in self._all_limits()}
        memory = {"locked": self.locked, "enables": self.enables, "unbalanced": self.unbalanced}
        held_hz = (self.override_hz if self.enables else 0) or (self.locked_hz if self.locked else 0)
        on = sorted(core for core, state in self.online.items() if state)
        return {"clocks": clocks, "online": on, "memory": {**memory, "held_hz": held_hz}}

    # Writing

    def write(self, path: str, data: bytes) -> None:
        """What the kernel does with one write; raises ``OSError`` where it refuses."""
        self.mode_of(path)
        self._draw()
        self._let_limits_arrive()
        text = data.decode("latin-1").strip()
        if path.startswith(f"{CONTROL}/"):
            self._control(path.rsplit("/", 1)[1], text)
            return
        if path.endswith("railgate_enable"):
            self.gpu_awake = self.gpu_awake or text == "0"
            self.files[path] = data
            return
        try:
            value = int(text)
        except ValueError:
            raise refuse(errno.EINVAL) from None
        self._fault_now_and_then(errno.EBUSY, errno.EAGAIN)
        self._write_number(path, value)

    def _write_number(self, path: str, value: int) -> None:
        core = re.fullmatch(rf"{CPU}/cpu(\d+)/online", path)
        limits = next((c for c in self._all_limits() if path.startswith(f"{c.folder}/")), None)
        if core:
            self._switch(int(core[1]), on=value != 0)
        elif limits and path.endswith(("min_freq", "max_freq")):
            self._ask(limits, path.removesuffix("_freq")[-3:], value)
        elif path == f"{BPMP}/mrq_rate_locked":
            self.locked_hz = self.emc_hz()
            self.locked = value != 0
        elif path == f"{BPMP}/rate":
            self.locked_hz = min(value, self.emc_max_hz)
        elif path == f"{OVERRIDE}/clk_update_rate":
            self.override_hz = min(value, self.emc_max_hz)
        elif path == f"{OVERRIDE}/clk_state":
            self.unbalanced += int(not value and not self.enables)
            self.enables = max(0, self.enables + (1 if value else -1))
        elif path == self.manners.emc_cap:
            self.files[path] = b"%d\n" % value
        else:
            raise refuse(errno.EACCES)

    def _ask(self, limits: Limits, end: str, value: int) -> None:
        now_s = self.now_s()
        if limits.cores and now_s < self.switching_s:
            raise refuse(errno.EBUSY)
        if now_s < limits.rights_s:
            raise refuse(errno.EPERM)
        if limits.cores and not self._awake(limits):
            raise refuse(errno.EBUSY if self.lag_s else errno.EINVAL)
        if self.manners.crossing_refused and (
            value > limits.shown["max"] if end == "min" else value < limits.shown["min"]
        ):
            raise refuse(errno.EINVAL)
        limits.asked[end] = value
        if limits.cores and self.lag_s:
            limits.due_s = max(limits.due_s or 0.0, now_s + self.random.uniform(*self.lag_s))
        else:
            limits.shown = limits.effective(self.manners.nearest)

    def _switch(self, core: int, *, on: bool) -> None:
        if core == 0 and not on:
            raise refuse(errno.EBUSY)
        now_s = self.now_s()
        for limits in self.clusters:
            if core in limits.cores and on and not self._awake(limits):
                limits.rights_s = now_s + self.random.uniform(0.005, 0.040)
        if self.online[core] != on:
            self.switching_s = now_s + self.random.uniform(0.002, 0.020)
        self.online[core] = on

    def _awake(self, limits: Limits) -> bool:
        return any(self.online[core] for core in limits.cores)

    def _let_limits_arrive(self) -> None:
        for limits in self.clusters:
            # What waits when a cluster is switched off waits until it is on again.
            if limits.due_s is not None and self.now_s() >= limits.due_s and self._awake(limits):
                limits.due_s = None
                limits.shown = limits.effective(self.manners.nearest)

    def _fault_now_and_then(self, *codes: int) -> None:
        if self.random.random() < self.faults:
            raise refuse(self.random.choice(codes))

    # The world

    def _control(self, name: str, text: str) -> None:
        actions: dict[str, Callable[[str], object]] = {
            "faults": lambda share: setattr(self, "faults", float(share)),
            "lag": lambda seconds: setattr(self, "lag_s", (float(seconds), float(seconds))),
            "heat": self._heat,
            "load": lambda share: setattr(self, "load", (self._oc3_now(), float(share))[1]),
            "loader": lambda word: setattr(self, "_loader", word.encode()),
            "use_gpu": lambda _: setattr(self, "gpu_awake", True),
            "nvpmodel": lambda mode: self.run_nvpmodel(int(mode)),
            "jetson_clocks": lambda _: self._jetson_clocks(),
            "boot": lambda _: self.boot(),
        }
        if name not in actions:
            raise refuse(errno.EACCES)
        actions[name](text)

    def _heat(self, text: str) -> None:
        """``cpu 3``: the CPU loses the three highest clocks; ``gpu 0``: the GPU has all of its own again."""
        part, state = text.split()
        for limits in self.clusters if part == "cpu" else [self.gpu] if self.gpu else []:
            limits.heat = int(state)
            limits.shown = limits.effective(self.manners.nearest)
        word = "cpufreq" if part == "cpu" else "devfreq"
        for path, kind in list(self.files.items()):
            if path.endswith("/type") and "/cooling_device" in path and word.encode() in kind:
                self.files[path.replace("/type", "/cur_state")] = f"{state}\n".encode()

    def _active_mode(self) -> int:
        found = re.search(r"pmode:0*(\d+)", self.files.get(STATUS, b"").decode())
        default = re.search(r"PM_CONFIG\s+DEFAULT=(\d+)", self.files.get(CONF, b"").decode())
        return int(found[1]) if found else int(default[1]) if default else -1

    def run_nvpmodel(self, mode: int) -> None:
        """Set a mode as nvpmodel does, by whoever runs it: cores and maxima, at once, the mode's number as it is."""
        text = self.files.get(CONF, b"").decode()
        cores = {m[1]: int(m[2]) for m in re.finditer(r"(CPU_\w+).*?>\s+MAX_FREQ\s+\S*/cpu(\d+)/", text)}
        block = re.search(rf"< POWER_MODEL ID={mode} [^>]*>([^<]*)", text)
        for param, arg, value in (line.split()[:3] for line in (block[1] if block else "").strip().splitlines()):
            number = int(value, 0)
            if arg.startswith("CORE_") and int(arg[5:]) in self.online:
                self.online[int(arg[5:])] = bool(number)
            elif arg == "MAX_FREQ" and param == "EMC":
                if self.manners.emc_cap in self.files:
                    self.files[self.manners.emc_cap] = b"%d\n" % (0 if number in _NO_CAP else number)
            elif arg == "MAX_FREQ":
                for limits in self._all_limits():
                    mine = cores.get(param) in limits.cores if limits.cores else param == "GPU"
                    if mine:
                        top = limits.table[-1] if number in _NO_CAP else number
                        self._set(limits, limits.table[0], top)

    def _jetson_clocks(self) -> None:
        for limits in self._all_limits():
            self._set(limits, limits.shown["max"], limits.shown["max"])

    def _set(self, limits: Limits, low: int, high: int) -> None:
        limits.asked, limits.due_s = {"min": low, "max": high}, None
        limits.shown = limits.effective(self.manners.nearest)
        limits.asked = dict(limits.effective(self.manners.nearest)) if not limits.heat else limits.asked
