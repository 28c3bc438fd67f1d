"""Putting a Jetson back as it was found, from nothing but the files and texts of a snapshot."""

import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .board_facts import STATUS_FILE, active_id
from .errors import ApplyError, DeviceError, NotPermittedError
from .knobs import BPMP, CPU_FOLDER, OVERRIDE, Cluster, Gpu, find_cpu, tells_rate
from .sysfs import PATIENCE_S, Presence, Wanted, Writes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from .knobs import EmcNode
    from .sysfs import Sysfs

NVPMODEL_KEY = "nvpmodel"
_ONLINE = re.compile(re.escape(CPU_FOLDER) + r"/cpu([1-9]\d*)/online")
_CORES_CLOCK = re.compile(rf"({re.escape(CPU_FOLDER)}/cpu\d+)/cpufreq/\w+")
_CLOCK_MIN = re.compile(
    rf"(?:{re.escape(CPU_FOLDER)}/cpu\d+/cpufreq/scaling_|sys/(?:class|devices)/(?:[\w.@:-]+/)*)min_freq"
)


def take_snapshot(sysfs: "Sysfs", files: "tuple[str, ...]") -> "dict[str, str]":
    """The exact text of each file that can be read, and the number of the active nvpmodel mode."""
    found: dict[str, str] = {}
    for path in files:
        try:
            found[path] = sysfs.read(path, patience_s=PATIENCE_S)
        except DeviceError:
            continue  # never written either: setting a mode asks for files that can be read first
    mode_id = active_id(sysfs)
    if mode_id is not None:
        found[NVPMODEL_KEY] = str(mode_id)
    return found


def first_found(earlier: "Mapping[str, str]", now: "Mapping[str, str]") -> "dict[str, str]":
    """What is to be put back of two snapshots, between which things may have been set: of each file what came first.

    The clocks of a core that was off at first, and showed none, are not as found: they were set since, or another core
    of its cluster has told them. They need the first snapshot alone, whoever took it.
    """

    def is_as_found(path: str) -> bool:
        core = _CORES_CLOCK.fullmatch(path)
        return core is None or earlier.get(f"{core.group(1)}/online", "1").strip() != "0"

    return {**{path: text for path, text in now.items() if is_as_found(path)}, **earlier}


class Restorer:
    """Writes a snapshot back in an order that the kernel accepts, and goes on past a file that refuses.

    A snapshot comes from a journal on disk and is written with the rights of root, so that only paths of the
    kinds that this driver sets are written. ``touched`` are the files that this process has set: a limit may read as
    it was and still be about to change, so that these are written whatever they read.
    """

    def __init__(self, sysfs: "Sysfs", snapshot: "Mapping[str, str]", touched: "Collection[str]" = ()) -> None:
        self._sysfs = sysfs
        self._texts = {path: text for path, text in snapshot.items() if path != NVPMODEL_KEY}
        self._mode_id = snapshot.get(NVPMODEL_KEY)
        self._touched = frozenset(touched)
        self._writes = Writes(sysfs)
        self._failures: dict[str, DeviceError] = {}

    def run(self) -> None:
        """Cores on, clocks, memory, cores off; raises one ``ApplyError`` that names what is left."""
        online = [path for path in self._texts if _ONLINE.fullmatch(path)]
        ranges = [path for path in self._texts if self._is_range(path)]
        nodes = [node for node in (BPMP, OVERRIDE) if {node.rate, node.lock} <= self._texts.keys()]
        known = {*online, *ranges, *map(_max_of, ranges)}
        known |= {path for node in nodes for path in (node.rate, node.lock, node.running)}
        if ranges and not self._touched:
            time.sleep(PATIENCE_S)  # what a killed process asked for last may still be on its way

        for path in online:
            if self._texts[path].strip() == "1":
                self._attempt(path, self._put, path)
        self._settle()
        for path in ranges:
            self._attempt(path, self._put_range, path)
        self._release_woken_clusters()
        for node in nodes:
            self._attempt(node.rate, self._put_memory, node)
        self._settle()
        for path in online:
            if self._texts[path].strip() != "1":
                self._attempt(path, self._put, path)
        self._settle()

        for path in self._texts.keys() - known:
            self._failures[path] = ApplyError(f"{path} is not a file that this driver sets.")
        self._report()

    def _is_range(self, path: str) -> bool:
        return bool(_CLOCK_MIN.fullmatch(path)) and _max_of(path) in self._texts and ".." not in path

    def _attempt(self, path: str, step: "Callable[..., None]", *args: object) -> None:
        try:
            step(*args)
        except DeviceError as exc:
            self._failures[path] = exc

    def _settle(self) -> None:
        self._failures.update(self._writes.unsettled())

    def _put(self, path: str) -> None:
        if self._sysfs.read(path, patience_s=PATIENCE_S) != self._texts[path]:
            self._writes.put(path, Wanted(self._texts[path]))
            self._writes.rights_late = True

    def _put_range(self, min_path: str) -> None:
        folder, max_path = min_path.rpartition("/")[0], _max_of(min_path)
        clock = Cluster(self._sysfs, folder) if folder.endswith("/cpufreq") else Gpu(self._sysfs, folder)
        if self._sysfs.presence(folder) is Presence.ABSENT and isinstance(clock, Gpu):
            return  # powered down since, and with it went what was set
        always = not self._touched.isdisjoint((min_path, max_path))
        clock.put(self._writes, self._texts[min_path], self._texts[max_path], always=always)

    def _put_memory(self, node: "EmcNode") -> None:
        """The rate while it is still locked, then the lock; a rate that was never locked is the firmware's.

        A lock may count: it is let go once, for the once that it was set, whoever else holds it by now.
        """
        was_locked = self._texts[node.lock].strip() == "1"
        lock_stands = self._sysfs.read(node.lock, patience_s=PATIENCE_S) == self._texts[node.lock]
        if lock_stands and not was_locked:
            return
        rate = self._texts[node.rate]
        if not tells_rate(rate):
            rate = self._texts.get(node.running, "")
        now = self._sysfs.read(node.rate, patience_s=PATIENCE_S)
        now = now if tells_rate(now) else self._sysfs.text_or_empty(node.running)
        if rate and now != rate and (was_locked or tells_rate(self._texts[node.rate])):
            wanted = node.wanted_rate(rate) if was_locked else Wanted(rate, excuse=_anything)
            self._writes.put(node.rate, wanted)
        if not lock_stands:
            counted = node.running != node.rate
            self._writes.put(node.lock, Wanted(self._texts[node.lock], excuse=_anything if counted else None))

    def _release_woken_clusters(self) -> None:
        """Unpin clusters that were asleep, and so invisible, when the snapshot was taken.

        What they held then is not known to anyone; the full range is what the kernel starts them with.
        """
        cpu = find_cpu(self._sysfs)
        for cluster in cpu.clusters() if cpu else ():
            states = [self._texts.get(f"{CPU_FOLDER}/cpu{core}/online", "1").strip() for core in cluster.cores]
            seen = any(f"{CPU_FOLDER}/cpu{core}/cpufreq/scaling_min_freq" in self._texts for core in cluster.cores)
            if not seen and all(state == "0" for state in states):
                self._attempt(cluster.folder, cluster.release, self._writes)

    def _report(self) -> None:
        messages = [f"{path} ({error.message.rstrip('.')})" for path, error in sorted(self._failures.items())]
        hint = "The files named could not be put back; a reboot brings the board's own defaults."
        if any(isinstance(error, NotPermittedError) for error in self._failures.values()):
            hint = "Run it again with the rights that set the mode: sudo underwatt restore."
        now_id = active_id(self._sysfs)
        if self._mode_id is not None and str(now_id) != self._mode_id:
            now = "unknown" if now_id is None else now_id
            messages.append(f"{STATUS_FILE} (nvpmodel mode was {self._mode_id} and is now {now})")
            hint = f"Switch back with: sudo nvpmodel -m {self._mode_id}; then restore again. {hint}"
        if messages:
            raise ApplyError(f"Not as it was found: {'; '.join(messages)}.", hint=hint)


class Pinned:
    """The files that were set and what they were set to: who else is at the same knobs shows by comparing."""

    def __init__(self, sysfs: "Sysfs") -> None:
        self._sysfs = sysfs
        self._wanted: dict[str, Wanted] = {}
        self._told: dict[str, str] = {}
        self._mode_id: int | None = None
        self._unsaid: list[str] = []  # found when setting again, which has overwritten it

    @property
    def paths(self) -> "frozenset[str]":
        """The files that were or may have been written."""
        return frozenset(self._wanted)

    @contextmanager
    def changed_by(self, writes: Writes, mode_id: "int | None") -> "Iterator[None]":
        """While a mode is set: what others have changed before is kept to be said, and what is written from now on."""
        self._unsaid += self._look(mode_id)
        try:
            yield
        finally:
            self._wanted.update(writes.wanted)
            self._told = {path: found for path, found in self._told.items() if path not in writes.wanted}
            self._mode_id = mode_id

    def forget(self) -> None:
        """Everything was put back: nothing is set any more."""
        self._wanted.clear()
        self._told.clear()

    def foreign_changes(self, mode_id: "int | None") -> "tuple[str, ...]":
        """What others have changed since it was set, in sentences, each said once."""
        said, self._unsaid = [*self._unsaid, *self._look(mode_id)], []
        return tuple(said)

    def _look(self, mode_id: "int | None") -> "list[str]":
        changes: list[str] = []
        if self._wanted and mode_id != self._mode_id:
            changes.append(f"Nvpmodel mode was {self._mode_id} and is now {mode_id}.")
            self._mode_id = mode_id
        for path, wanted in self._wanted.items():
            shown = [self._sysfs.text_or_empty(file) for file in (path, wanted.shown_by) if file]
            found = shown[-1].strip()
            if not found or any(wanted.fits(text) for text in shown):
                self._told.pop(path, None)  # files of a cluster that is off are away
            elif self._told.get(path) != found:
                self._told[path] = found
                changes.append(f"{self._sysfs.full(path)} was set to {wanted.text.strip()} and now reads {found}.")
        return changes


def _anything(_found: int, _wanted: int) -> bool:
    """Whatever it reads: a rate that is about to be let go, a lock that others may hold."""
    return True


def _max_of(min_path: str) -> str:
    return f"{min_path[: -len('min_freq')]}max_freq"
