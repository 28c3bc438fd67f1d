"""What of a check may leave the house, and what it comes to: pure functions over its record."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import underwatt
from underwatt.drivers.check import Level, Verdict
from underwatt.drivers.jetson.kernel_files import mode_name
from underwatt.records import Capability, PowerMode, Status
from underwatt.reports.words import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from underwatt.drivers.check import CheckReport
    from underwatt.records import DeviceInfo

# Of a path only what lies in these places says something of the board; any other says something of its owner.
_OPEN_PLACES = r"(?:sys|proc/device-tree|dev|etc/nvpmodel\.conf|run/underwatt|bin)\b"
_PATH = re.compile(rf"(?<![\w./%])/(?!{_OPEN_PLACES})[\w.~+@-]+(?:/[\w.~+@:-]*)*")
_MAC = re.compile(r"\b[0-9a-fA-F]{2}(?:[:-][0-9a-fA-F]{2}){5}\b")
_AS_ASKED = 0.03  # a clock that runs this close to what was asked is that clock
_SHOWS = 0.05


@dataclass(frozen=True)
class Anonymous:
    """Free text without the names of people, hosts and folders, and modes without names that somebody made up."""

    root: str
    numbers: tuple[str, ...]  # that tell a single device: of its serial number or its UUID
    words: tuple[str, ...]
    modes: Mapping[str, str]  # what a made-up name becomes
    stock_modes: Mapping[str, PowerMode]

    @classmethod
    def of(cls, info: DeviceInfo, stock_modes: Mapping[str, PowerMode]) -> Anonymous:
        """For a device: where it lies, and what its modes are called."""
        named = {name: name if mode_name(name) == name else f"CUSTOM_{at}" for at, name in enumerate(stock_modes)}
        root = info.address.partition(":")[2] if info.backend == "jetson" else ""
        modes = {name: plain for name, plain in named.items() if name != plain}
        whole = info.id.removesuffix(f"@{root}")
        numbers = tuple(part for part in re.findall(r"\w{8,}", whole) if re.search(r"\d", part))
        named_modes = {named[name]: mode for name, mode in stock_modes.items()}
        return cls(root.rstrip("/"), numbers, _names_here(), modes, named_modes)

    def name(self, name: str) -> str:
        """What the device itself calls something, such as a rail or a zone."""
        for number in self.numbers:
            name = name.replace(number, "(number)")
        return _MAC.sub("(address)", name)

    def by_name(self, values: Mapping[str, float]) -> dict[str, float]:
        """Values by such names."""
        return {self.name(name): value for name, value in values.items()}

    def text(self, text: str) -> str:
        """A sentence as others may read it."""
        text = self.name(text.replace(self.root, "") if self.root else text)
        for name, plain in self.modes.items():
            text = re.sub(rf"\b{re.escape(name)}(?!\w)", plain, text)
        text = _PATH.sub("(path)", text)
        for word in self.words:
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "(name)", text)
        return text

    def capability(self, found: Capability) -> Capability:
        """A knob or sensor as others may read of it."""
        return replace(found, detail=self.text(found.detail), remedy=self.text(found.remedy))


def _names_here() -> tuple[str, ...]:
    """Names of this machine and of who uses it, as far as they are told."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    names = (socket.gethostname(), socket.gethostname().partition(".")[0], user, os.environ.get("SUDO_USER", ""))
    return tuple(dict.fromkeys(name for name in names if len(name) > 1 and name != "root"))


def software_of(info: DeviceInfo) -> dict[str, str]:
    """Versions: of the board's own software, and of what looks at it; of the kernel, nothing that its builder added."""
    kernel = re.match(r"[\d.]+", platform.release())
    is_here = info.address in ("jetson:/", "helper:") or info.backend == "nvml"
    here = {"kernel": kernel[0]} if kernel and is_here else {}
    return {**info.software, **here, "python": platform.python_version(), "underwatt": underwatt.__version__}


def judge(report: CheckReport) -> Verdict:
    """What it all comes to, in words for its owner."""
    power = next((sensor for sensor in report.sensors if sensor.name == "power"), None)
    broken: list[tuple[str, str]] = []
    if not report.idle_w > 0:
        why = report.notes[-1] if report.notes else "its sensor does not answer"
        broken.append((f"its power cannot be read ({why.rstrip('.')})", power.remedy if power else ""))
    for trial in report.trials:
        if not trial.put_back:
            text = f"{trial.knob} could not be put back ({trial.note.rstrip('.')})"
            broken.append((text, "Run `underwatt restore`, or restart the board; then tell us, with this file."))
    if broken:
        return _verdict(Level.UNUSABLE, "Not usable", broken)
    limits = [*_rights(report), *_behaviour(report)]
    done = _done(report)
    if limits:
        return _verdict(Level.LIMITED, "Works, but", limits, f" {done}")
    return Verdict(Level.READY, f"Ready: {done[0].lower()}{done[1:]}")


def _verdict(level: Level, word: str, found: list[tuple[str, str]], more: str = "") -> Verdict:
    texts = list(dict.fromkeys(text for text, _ in found))
    remedies = tuple(dict.fromkeys(remedy for _, remedy in found if remedy))
    return Verdict(level, f"{word}: {'; '.join(texts)}.{more}", remedies)


def _rights(report: CheckReport) -> Iterator[tuple[str, str]]:
    barred = [knob for knob in report.knobs if knob.values and not knob.usable]
    if barred:
        yield f"you may not set {listed([knob.name for knob in barred])}", ""
        for knob in barred:
            yield f"you may not set {listed([knob.name for knob in barred])}", knob.remedy
    for knob in report.knobs:
        if not knob.values:
            yield f"{knob.name} cannot be set here ({knob.detail.rstrip('.')})", knob.remedy
    if not report.knobs:
        yield "it has no knobs, so that only batch sizes and pauses can be chosen", ""


def _behaviour(report: CheckReport) -> Iterator[tuple[str, str]]:
    for trial in report.trials:
        if trial.note:
            yield f"{trial.knob} could not be moved ({trial.note.rstrip('.')})", ""
        for move in trial.moves:
            if abs(move.ran / move.asked - 1) > _AS_ASKED:
                hint = "Something else sets it too (see what others hold), or heat does; stop it and check again."
                yield f"{trial.knob} was set to {move.asked:g} and ran at {move.ran:g}", hint
    for note in report.notes:
        yield note.rstrip("."), ""
    if not report.load_on_gpu and any(knob.name == "gpu_mhz" for knob in report.knobs):
        hint = "Install a PyTorch that can use the GPU (docs/jetson.md says which on a Jetson), and check again."
        yield "the GPU was not tried under load, as no Python here has a PyTorch that can use it", hint
    elif abs(report.load_w / report.idle_w - 1) < _SHOWS:
        yield "a load did not show in the watts", "Check that the sensor is that of the device the load runs on."
    failed = [m for m in report.measurements if not m.usable]
    if failed:
        yield f"{counted(len(failed), 'setting')} of {len(report.measurements)} could not be measured", ""
    slowed = [m for m in report.measurements if m.status is Status.THROTTLED]
    if slowed:
        hint = "Better cooling or a stronger supply would help; the plans take it as it is."
        yield f"it slowed itself down at {counted(len(slowed), 'setting')} ({slowed[0].note})", hint


def _done(report: CheckReport) -> str:
    usable = [m for m in report.measurements if m.usable]
    settable = listed([knob.name for knob in report.knobs if knob.usable and knob.values])
    if not report.set_tried:
        if settable:
            return f"Power is read and {settable} may be set. `underwatt check --set` tries it."
        if any(knob.values for knob in report.knobs):
            return "Power is read. `underwatt check --set`, run with the right to set, tries the knobs."
        return "Power is read. `underwatt check --set` measures some settings."
    moved = f"{settable} were set under load and put back" if settable else "Nothing could be set"
    measured = (
        f"; {counted(len(usable), 'setting')} measured, {min(m.power_w for m in usable):.1f} to "
        f"{max(m.power_w for m in usable):.1f} W"
        if usable
        else ""
    )
    return f"{moved}{measured}."
