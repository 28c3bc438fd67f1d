"""Putting a Jetson back as it was found, from nothing but the files and texts of a snapshot."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from underwatt.drivers.jetson.board_facts import STATUS_FILE, active_id
from underwatt.drivers.jetson.knobs import BPMP, CPU_FOLDER, OVERRIDE, find_cpu
from underwatt.drivers.jetson.sysfs import write_range
from underwatt.errors import ApplyError, DeviceError, NotPermittedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from underwatt.drivers.jetson.sysfs import Sysfs

NVPMODEL_KEY = "nvpmodel"
_ONLINE = re.compile(re.escape(CPU_FOLDER) + r"/cpu([1-9]\d*)/online")
_CLOCK_MIN = re.compile(
    rf"(?:{re.escape(CPU_FOLDER)}/cpu\d+/cpufreq/scaling_|sys/(?:class|devices)/(?:[\w.@:-]+/)*)min_freq"
)


def take_snapshot(sysfs: Sysfs, files: tuple[str, ...]) -> dict[str, str]:
    """The exact text of each file that can be read, and the number of the active nvpmodel mode."""
    found: dict[str, str] = {}
    for path in files:
        try:
            found[path] = sysfs.read(path)
        except DeviceError:
            continue  # never written either: setting a mode asks for files that can be read first
    mode_id = active_id(sysfs)
    if mode_id is not None:
        found[NVPMODEL_KEY] = str(mode_id)
    return found


class Restorer:
    """Writes a snapshot back in an order that the kernel accepts, and goes on past a file that refuses.

    A snapshot comes from a journal on disk and is written with the rights of root, so that only paths of the
    kinds that this driver sets are written.
    """

    def __init__(self, sysfs: Sysfs, snapshot: Mapping[str, str]) -> None:
        self._sysfs = sysfs
        self._texts = {path: text for path, text in snapshot.items() if path != NVPMODEL_KEY}
        self._mode_id = snapshot.get(NVPMODEL_KEY)
        self._failures: dict[str, DeviceError] = {}

    def run(self) -> None:
        """Cores on, clocks, memory, cores off, then check; raises one ``ApplyError`` that names what is left."""
        online = [path for path in self._texts if _ONLINE.fullmatch(path)]
        ranges = [(path, _max_of(path)) for path in self._texts if self._is_range(path)]
        nodes = [node for node in (BPMP, OVERRIDE) if {node.rate, node.lock} <= self._texts.keys()]
        known = {*online, *(path for pair in ranges for path in pair)}
        known |= {path for node in nodes for path in (node.rate, node.lock)}

        for path in online:
            if self._texts[path].strip() == "1":
                self._attempt(path, self._put, path)
        for low, high in ranges:
            self._attempt(low, write_range, self._sysfs, (low, high), self._texts[low], self._texts[high])
        self._release_woken_clusters()
        for node in nodes:
            self._attempt(node.rate, self._put_memory, node.rate, node.lock)
        for path in online:
            if self._texts[path].strip() != "1":
                self._attempt(path, self._put, path)

        for path in self._texts.keys() - known:
            self._failures[path] = ApplyError(f"{path} is not a file that this driver sets.")
        self._check(known - {node.rate for node in nodes})
        self._report()

    def _is_range(self, path: str) -> bool:
        return bool(_CLOCK_MIN.fullmatch(path)) and _max_of(path) in self._texts and ".." not in path

    def _attempt(self, path: str, step: Callable[..., None], *args: object) -> None:
        try:
            step(*args)
        except DeviceError as exc:
            self._failures[path] = exc

    def _put(self, path: str) -> None:
        if self._sysfs.read(path) != self._texts[path]:
            self._sysfs.write_checked(path, self._texts[path])

    def _put_memory(self, rate: str, lock: str) -> None:
        """The rate while it is still locked, then the lock; a rate that was never locked is the firmware's."""
        lock_text = self._texts[lock]
        if self._sysfs.read(lock) == lock_text and lock_text.strip() == "0":
            return
        if self._sysfs.read(rate) != self._texts[rate]:
            self._sysfs.write(rate, self._texts[rate])
        self._put(lock)
        if lock_text.strip() == "1":
            self._put(rate)

    def _release_woken_clusters(self) -> None:
        """Unpin clusters that were asleep, and so invisible, when the snapshot was taken.

        What they held then is not known to anyone; the full range is what the kernel starts them with.
        """
        cpu = find_cpu(self._sysfs)
        for cluster in cpu.clusters() if cpu else ():
            states = [self._texts.get(f"{CPU_FOLDER}/cpu{core}/online", "1").strip() for core in cluster.cores]
            seen = any(f"{CPU_FOLDER}/cpu{core}/cpufreq/scaling_min_freq" in self._texts for core in cluster.cores)
            if not seen and all(state == "0" for state in states):
                self._attempt(cluster.folder, cluster.release)

    def _check(self, paths: set[str]) -> None:
        for path in sorted(paths - self._failures.keys()):
            try:
                found = self._sysfs.read_word(path)
            except DeviceError as exc:
                self._failures[path] = exc
                continue
            if found != self._texts[path].strip():
                self._failures[path] = ApplyError(
                    f"{path} was {self._texts[path].strip()} and is now {found or 'empty'}."
                )

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


def _max_of(min_path: str) -> str:
    return f"{min_path.removesuffix('min_freq')}max_freq"
