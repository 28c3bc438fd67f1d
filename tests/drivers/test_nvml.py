from __future__ import annotations

import time
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

import pynvml
import pytest
from busy_gpu import BusyGpu, SharedClock
from fake_nvml import FakeNvml

from underwatt.device import session as session_module
from underwatt.device.base import Device
from underwatt.device.session import Session, restore, set_mode
from underwatt.device.several import together
from underwatt.drivers import nvml as nvml_module
from underwatt.drivers.nvml import NvmlBackend, NvmlDevice
from underwatt.errors import ApplyError, DeviceError, JournalError, NoDeviceError, NotPermittedError, SensorError
from underwatt.helper.journal import Journal, state_dir
from underwatt.records import PowerMode
from underwatt.testing.devices import DeviceConformance

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED


@pytest.fixture
def library() -> FakeNvml:
    return FakeNvml()


@pytest.fixture(autouse=True)
def _as_administrator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_module, "_may_administer", lambda: True)


class TestNvmlConformance(DeviceConformance):
    @pytest.fixture
    def device(self, library: FakeNvml) -> NvmlDevice:
        return NvmlDevice("GPU-1", nvml=library)


def test_apply_locks_clocks_and_restore_unlocks_and_brings_the_old_limit_back(library: FakeNvml) -> None:
    device = NvmlDevice("0", nvml=library)
    found = device.snapshot()
    device.apply(PowerMode(gpu_mhz=1200, mem_mhz=405, power_limit_w=150))
    assert (library.gpu_lock, library.mem_lock, library.limit_mw) == ((1200, 1200), (405, 405), 150_000)
    device.restore(found)
    assert (library.gpu_lock, library.mem_lock, library.limit_mw) == (None, None, 250_000)


def test_refused_write_says_what_would_permit_it(library: FakeNvml) -> None:
    library.failing["nvmlDeviceSetPowerManagementLimit"] = pynvml.NVML_ERROR_NO_PERMISSION
    with pytest.raises(NotPermittedError, match="sudo"):
        NvmlDevice("0", nvml=library).apply(PowerMode(power_limit_w=150))


def test_silently_rounded_limit_is_an_error(library: FakeNvml) -> None:
    library.limit_step_mw = 100_000
    with pytest.raises(ApplyError, match="reads back 100 W"):
        NvmlDevice("0", nvml=library).apply(PowerMode(power_limit_w=150))


def test_missing_sensor_is_an_error_never_zero_watts(library: FakeNvml) -> None:
    library.failing |= {"nvmlDeviceGetPowerUsage": NOT_SUPPORTED, "nvmlDeviceGetFieldValues": NOT_SUPPORTED}
    device = NvmlDevice("0", nvml=library)
    with pytest.raises(SensorError, match="does not report its power"):
        device.read_power()
    power = next(item for item in device.capabilities() if item.name == "power")
    assert not power.usable


@pytest.mark.parametrize("reading_mw", [0, 9_000_000])
def test_garbage_reading_is_an_error(library: FakeNvml, reading_mw: int) -> None:
    device = NvmlDevice("0", nvml=library)
    library.power_mw = reading_mw
    with pytest.raises(SensorError, match="cannot be"):
        device.read_power()


def test_joules_are_read_at_the_moment_the_counter_moves(library: FakeNvml) -> None:
    moves_each_s = 0.05
    library.nvmlDeviceGetTotalEnergyConsumption = lambda _: int(time.monotonic() / moves_each_s) * 5000  # type: ignore[method-assign]
    device = NvmlDevice("0", nvml=library)
    ages_s = []
    for _ in range(5):
        time.sleep(0.013)
        sample = device.read_power()
        assert sample.energy_j is not None
        ages_s.append(sample.at_s - sample.energy_j / 5 * moves_each_s)
    assert sorted(ages_s)[2] < 0.02  # read at any moment, half of them would be older than 0.025 s


def test_joules_are_of_the_moment_the_counter_moved_however_late_that_was_seen() -> None:
    """On a busy machine every fourth reading was 17 ms late and some 75 ms: at 600 W, percents of a window of 5 s."""
    clock = SharedClock()
    library = BusyGpu(clock, seed=3)
    device = NvmlDevice("0", nvml=library, clock=clock)
    library.drawn_w = 400.0
    samples = []
    for _ in range(600):
        clock.sleep(0.05)
        samples.append(device.read_power())
    moved_s = {round(energy_j, 3): at_s for at_s, energy_j in library.moves}
    late_s = [s.at_s - moved_s[round(s.energy_j, 3)] for s in samples[20:] if s.energy_j is not None]
    assert len(late_s) == 580
    assert max(late_s) - min(late_s) < 0.008
    assert -0.005 < sum(late_s) / len(late_s) < 0.01
    assert all(after.at_s > before.at_s for before, after in pairwise(samples))


def test_a_counter_with_no_beat_is_stamped_when_it_was_seen_to_move() -> None:
    clock = SharedClock()
    library = BusyGpu(clock, busy=False)
    moves_s = [100.0]
    while moves_s[-1] < 140.0:
        moves_s.append(moves_s[-1] + 0.031 + 0.06 * (len(moves_s) * 0.618 % 1.0))
    library.nvmlDeviceGetTotalEnergyConsumption = lambda _: 1000 * bisect_right(moves_s, clock.now_s())  # type: ignore[method-assign]
    device = NvmlDevice("0", nvml=library, clock=clock)
    for _ in range(200):
        sample = device.read_power()
        assert sample.energy_j is not None
        assert -0.03 <= sample.at_s - moves_s[round(sample.energy_j) - 1] <= 0.01


def test_counter_that_stands_still_holds_nobody_up(library: FakeNvml) -> None:
    library.nvmlDeviceGetTotalEnergyConsumption = lambda _: 7000  # type: ignore[method-assign]
    device = NvmlDevice("0", nvml=library)
    begun_s = time.monotonic()
    assert device.read_power().energy_j == 7
    assert time.monotonic() - begun_s < 1


def test_sensor_that_vanishes_is_an_error(library: FakeNvml) -> None:
    device = NvmlDevice("0", nvml=library)
    assert device.read_power().power_w == pytest.approx(123.456)
    library.failing["nvmlDeviceGetFieldValues"] = pynvml.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(SensorError, match="stopped reporting"):
        device.read_power()


def test_usual_reading_where_there_is_no_instant_one(library: FakeNvml) -> None:
    library.failing["nvmlDeviceGetFieldValues"] = NOT_SUPPORTED
    library.power_mw = 77_000
    assert NvmlDevice("0", nvml=library).read_power().power_w == 77


def test_each_call_is_probed_on_its_own(library: FakeNvml) -> None:
    library.failing["nvmlDeviceGetSupportedMemoryClocks"] = NOT_SUPPORTED
    library.failing["nvmlDeviceGetTotalEnergyConsumption"] = NOT_SUPPORTED
    device = NvmlDevice("0", nvml=library)
    assert [knob.name for knob in device.space.knobs] == ["power_limit_w"]
    assert device.read_power().energy_j is None
    missing = {item.name: item.detail for item in device.capabilities() if not item.usable}
    assert set(missing) == {"gpu_mhz", "mem_mhz", "energy"}
    assert "Not Supported" in missing["mem_mhz"]


def test_init_works_and_queries_fail_is_reported_as_such(library: FakeNvml) -> None:
    library.failing = {name: NOT_SUPPORTED for name in dir(FakeNvml) if name.startswith("nvmlDeviceGet")}
    del library.failing["nvmlDeviceGetHandleByIndex"], library.failing["nvmlDeviceGetCount"]
    backend = NvmlBackend(library)
    assert backend.affinity() == 0.0
    with pytest.raises(DeviceError, match="NVML starts here but does not answer"):
        backend.open("")


SETTERS = {
    "gpu_mhz": ("nvmlDeviceSetGpuLockedClocks", "nvmlDeviceResetGpuLockedClocks"),
    "mem_mhz": ("nvmlDeviceSetMemoryLockedClocks", "nvmlDeviceResetMemoryLockedClocks"),
    "power_limit_w": ("nvmlDeviceSetPowerManagementLimit",),
}


@pytest.mark.parametrize("knob", SETTERS)
@pytest.mark.parametrize("error", [NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
def test_a_knob_that_is_listed_and_not_supported_stops_nothing(
    library: FakeNvml, tmp_path: Path, knob: str, error: int
) -> None:
    library.failing |= dict.fromkeys(SETTERS[knob], error)
    everything = PowerMode(gpu_mhz=1200, mem_mhz=405, power_limit_w=150)
    for _ in range(2):  # the next session finds nothing to put back
        device = NvmlDevice("0", nvml=library)
        with Session(device, tmp_path) as session:
            assert not session.recovered
            session.apply(everything)
            assert device.space.knob(knob) is None
            assert {kept.name for kept in device.space.knobs} == SETTERS.keys() - {knob}
            told = {item.name: item for item in device.capabilities()}
            assert not told[knob].usable
            assert "not on this card" in told[knob].detail
            found = {"gpu_mhz": library.gpu_lock, "mem_mhz": library.mem_lock, "power_limit_w": library.limit_mw}
            wanted = {"gpu_mhz": (1200, 1200), "mem_mhz": (405, 405), "power_limit_w": 150_000}
            assert all(found[name] == wanted[name] for name in wanted.keys() - {knob})
            session.apply(everything)
        assert (library.gpu_lock, library.mem_lock, library.limit_mw) == (None, None, 250_000)
        assert not list(tmp_path.glob("*.json"))


def test_a_mode_of_nothing_but_what_is_not_supported_is_refused(library: FakeNvml, tmp_path: Path) -> None:
    library.failing |= dict.fromkeys(SETTERS["mem_mhz"], NOT_SUPPORTED)
    device = NvmlDevice("0", nvml=library)
    for _ in range(2):
        with pytest.raises(ApplyError, match="does not let anybody set"):
            set_mode(device, PowerMode(mem_mhz=405), tmp_path)
    assert restore(tmp_path, open_address=lambda _: NvmlDevice("0", nvml=library)) == []


def test_a_journal_of_a_knob_that_is_not_supported_is_finished(library: FakeNvml) -> None:
    """What the version before left behind on such a card."""
    library.failing |= dict.fromkeys(SETTERS["mem_mhz"], NOT_SUPPORTED)
    library.gpu_lock, library.limit_mw = (1200, 1200), 150_000
    NvmlDevice("0", nvml=library).restore({"mem_mhz": "unlocked", "gpu_mhz": "unlocked", "power_limit_mw": "250000"})
    assert (library.gpu_lock, library.limit_mw) == (None, 250_000)


def test_looking_at_a_card_writes_nothing(library: FakeNvml) -> None:
    library.gpu_lock = (900, 900)  # somebody else's
    device = NvmlBackend(library).open(NvmlBackend(library).find()[0])
    assert device.capabilities()
    assert len(device.space) > 1
    assert not [name for name in library.calls if "Set" in name or "Reset" in name]


def test_a_limit_that_cannot_be_read_is_not_set(library: FakeNvml) -> None:
    library.failing["nvmlDeviceGetPowerManagementLimit"] = NOT_SUPPORTED
    device = NvmlDevice("0", nvml=library)
    assert device.space.knob("power_limit_w") is None  # nobody could put it back
    assert device.space.knob("gpu_mhz") is not None


def test_a_board_that_knows_its_name_and_nothing_else_is_no_gpu(library: FakeNvml) -> None:
    """Orin under JetPack 6: NVML starts, lists one GPU, and tells nothing of it."""
    known = {"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetCount"}
    known |= {"nvmlDeviceGetUUID", "nvmlDeviceGetName"}
    queries = {name for name in dir(FakeNvml) if name.startswith("nvmlDeviceGet")} - known
    library.failing = dict.fromkeys(queries, NOT_SUPPORTED)
    backend = NvmlBackend(library)
    assert backend.find() == ()
    assert backend.affinity() == 0.0
    with pytest.raises(DeviceError, match="does not answer") as caught:
        backend.open("GPU-1")
    assert "jetson" in caught.value.hint


def test_no_driver_is_no_device(library: FakeNvml) -> None:
    library.failing["nvmlInit"] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert NvmlBackend(library).find() == ()
    with pytest.raises(NoDeviceError, match="does not start"):
        NvmlBackend(library).open("")


def test_unknown_card_is_named(library: FakeNvml) -> None:
    with pytest.raises(NoDeviceError, match="'GPU-7'"):
        NvmlBackend(library).open("GPU-7")


def test_backend_lists_cards(library: FakeNvml) -> None:
    backend = NvmlBackend(library)
    assert backend.find() == ("GPU-1",)
    assert backend.affinity() > 0.5
    assert backend.open("").info.address == "nvml:GPU-1"
    assert "GPU and its memory" in backend.open("").info.about_watts


def test_throttling_has_reasons_and_the_power_limit_is_none(library: FakeNvml) -> None:
    device = NvmlDevice("0", nvml=library)
    library.throttle_bits = library.nvmlClocksThrottleReasonSwPowerCap
    assert device.read_state().throttle_reasons == ()
    library.throttle_bits |= library.nvmlClocksThrottleReasonHwThermalSlowdown
    assert device.read_state().throttle_reasons == ("too hot (hardware)",)


def test_restoring_leaves_alone_what_was_not_locked_here(library: FakeNvml, tmp_path: Path) -> None:
    library.gpu_lock = (900, 900)  # somebody else's lock, which NVML cannot show
    mode = PowerMode(power_limit_w=150)
    set_mode(NvmlDevice("0", nvml=library), mode, tmp_path)
    assert library.limit_mw == 150_000
    [(_, error)] = restore(tmp_path, open_address=lambda _: NvmlDevice("0", nvml=library))
    assert error is None
    assert library.gpu_lock == (900, 900)
    assert library.limit_mw == 250_000


def test_another_process_unlocks_what_was_locked(library: FakeNvml, tmp_path: Path) -> None:
    set_mode(NvmlDevice("0", nvml=library), PowerMode(gpu_mhz=1200), tmp_path)
    set_mode(NvmlDevice("0", nvml=library), PowerMode(mem_mhz=405), tmp_path)
    assert (library.gpu_lock, library.mem_lock) == ((1200, 1200), (405, 405))
    restore(tmp_path, open_address=lambda _: NvmlDevice("0", nvml=library))
    assert library.gpu_lock is library.mem_lock is None


def test_a_user_who_may_not_unlock_keeps_the_journal(library: FakeNvml, tmp_path: Path) -> None:
    set_mode(NvmlDevice("0", nvml=library), PowerMode(gpu_mhz=1200), tmp_path)
    library.failing["nvmlDeviceResetGpuLockedClocks"] = pynvml.NVML_ERROR_NO_PERMISSION
    [(_, error)] = restore(tmp_path, open_address=lambda _: NvmlDevice("0", nvml=library))
    assert isinstance(error, NotPermittedError)
    del library.failing["nvmlDeviceResetGpuLockedClocks"]
    [(_, error)] = restore(tmp_path, open_address=lambda _: NvmlDevice("0", nvml=library))
    assert error is None
    assert library.gpu_lock is None


def test_reading_needs_no_permission_and_capabilities_say_what_would(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_module, "_may_administer", lambda: False)
    device = NvmlDevice("0", nvml=library)
    library.calls.clear()
    with Session(device) as session:
        session.apply(PowerMode())
        device.read_power()
    assert not [name for name in library.calls if "Set" in name or "Reset" in name]
    assert all(item.remedy for item in device.capabilities() if item.kind == "knob")


@pytest.mark.parametrize("refused", ["nvmlDeviceResetMemoryLockedClocks", "nvmlDeviceResetGpuLockedClocks"])
def test_a_clock_that_cannot_be_unlocked_keeps_nothing_else_from_being_put_back(
    library: FakeNvml, refused: str
) -> None:
    device = NvmlDevice(nvml=library)
    mode = PowerMode(**{k.name: k.values[0] for k in device.space.knobs})
    found = device.snapshot(mode)
    device.apply(mode)
    assert library.limit_mw != 250_000
    library.failing[refused] = pynvml.NVML_ERROR_UNKNOWN
    with pytest.raises(ApplyError, match="refused"):
        device.restore(found)
    assert library.limit_mw == 250_000
    assert (library.gpu_lock is None) or (library.mem_lock is None)


class Card(FakeNvml):
    """One of several cards, at 300 W."""

    def __init__(self, uuid: str) -> None:
        super().__init__()
        self.uuid, self.limit_mw = uuid, 300_000

    def nvmlDeviceGetUUID(self, _: str) -> bytes:
        return self.uuid.encode()


class Cards:
    """Two cards that are opened by their addresses, alone or as one."""

    def __init__(self) -> None:
        self.cards = {f"nvml:GPU-{name}": Card(f"GPU-{name}") for name in "ab"}

    def open(self, address: str) -> Device:
        return together([NvmlDevice("0", nvml=self.cards[part]) for part in address.split(",")])

    def set(self, address: str, limit_w: float, folder: Path | None = None) -> None:
        set_mode(self.open(address), PowerMode(power_limit_w=limit_w), folder)

    @property
    def limits_w(self) -> list[float]:
        return [card.limit_mw / 1000 for card in self.cards.values()]


A, B = "nvml:GPU-a", "nvml:GPU-b"


@pytest.mark.parametrize("first", [A, B])
@pytest.mark.parametrize("several_first", [False, True])
def test_what_was_set_alone_and_with_another_comes_back_as_it_was_first(first: str, several_first: bool) -> None:
    cards = Cards()
    for address, limit_w in [(first, 150.0), (f"{A},{B}", 200.0)][:: -1 if several_first else 1]:
        cards.set(address, limit_w)
    assert [error for _, error in restore(open_address=cards.open)] == [None, None]
    assert cards.limits_w == [300, 300]
    assert restore(open_address=cards.open) == []


def test_a_journal_of_several_from_before_each_had_its_own_is_finished_in_its_turn() -> None:
    cards = Cards()
    cards.set(A, 150.0)
    time.sleep(0.02)
    both, mode = cards.open(f"{A},{B}"), PowerMode(power_limit_w=200.0)
    Journal.of(both.info, "set", state_dir()).write(both.info, dict(both.snapshot(mode)))
    both.apply(mode)
    time.sleep(0.02)
    cards.set(B, 250.0)
    assert [error for _, error in restore(open_address=cards.open)] == [None, None, None]
    assert cards.limits_w == [300, 300]


def test_where_one_of_several_refuses_to_be_set_each_keeps_what_was_found_of_it_before() -> None:
    cards = Cards()
    cards.set(A, 150.0)
    cards.cards[B].failing["nvmlDeviceSetPowerManagementLimit"] = pynvml.NVML_ERROR_NO_PERMISSION
    with pytest.raises(NotPermittedError):
        cards.set(f"{A},{B}", 200.0)
    assert cards.limits_w == [150, 300]
    assert [path.name for path in state_dir().glob("*.json")] == ["nvml-GPU-a.set.json"]
    restore(open_address=cards.open)
    assert cards.limits_w == [300, 300]


def test_where_the_journal_of_one_of_several_cannot_be_written_none_is_set_or_unlocked() -> None:
    cards = Cards()
    state_dir().mkdir(parents=True, exist_ok=True)
    (state_dir() / "nvml-GPU-b.set.tmp").mkdir()
    cards.cards[A].calls.clear()
    with pytest.raises(JournalError, match="nothing was changed"):
        cards.set(f"{A},{B}", 200.0)
    assert not list(state_dir().glob("*.json"))
    assert not [call for call in cards.cards[A].calls if "DeviceSet" in call or "DeviceReset" in call]


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who looks into root's folder as well, as everybody does."""
    monkeypatch.setattr(session_module, "journal_folders", lambda: (tmp_path / "user", tmp_path / "root"))
    return tmp_path


@pytest.mark.parametrize(
    "who", [("user", "root"), ("root", "user"), ("user", "root", "user"), ("root", "user", "root")]
)
def test_what_a_user_and_root_have_set_comes_back_as_it_was_first(users: Path, who: tuple[str, ...]) -> None:
    cards = Cards()
    for number, name in enumerate(who):
        time.sleep(0.02)  # as long as the clock of some disks stands still
        cards.set(A, 150.0 + 50 * number, users / name)
    assert [error for _, error in restore(open_address=cards.open)] == [None, None]
    assert cards.limits_w == [300, 300]


def test_what_was_found_before_waits_until_what_was_set_on_top_is_put_back(users: Path) -> None:
    cards = Cards()
    cards.set(A, 150.0, users / "user")
    cards.set(B, 250.0, users / "user")
    time.sleep(0.02)
    cards.set(A, 200.0, users / "root")
    (roots,) = (users / "root").glob("*.json")
    whole = roots.read_text()
    roots.write_text(whole[:-9])
    outcomes = restore(open_address=cards.open)
    assert ["damaged" in str(error) for _, error in outcomes].count(True) == 1
    (waits,) = [str(error) for name, error in outcomes if error and "damaged" not in str(error)]
    assert "on top" in waits
    assert cards.limits_w == [200, 300], "nothing of that card is put back out of turn, and all of the other"
    roots.write_text(whole)
    assert [error for _, error in restore(open_address=cards.open)] == [None, None]
    assert cards.limits_w == [300, 300]


def test_where_what_was_set_on_top_is_given_up_what_was_found_before_comes_back(users: Path) -> None:
    cards = Cards()
    cards.set(A, 150.0, users / "user")
    time.sleep(0.02)
    cards.set(A, 200.0, users / "root")
    (roots,) = (users / "root").glob("*.json")
    roots.write_text("damaged")
    assert [error for _, error in restore(open_address=cards.open, discard=True)] == [None, None]
    assert cards.limits_w == [300, 300]


def test_what_two_users_killed_sessions_left_is_put_back_in_turn(users: Path) -> None:
    cards, mode = Cards(), PowerMode(power_limit_w=150.0)
    device = cards.open(A)
    for name, limit_w in (("user", 150.0), ("root", 200.0)):
        Journal.of(device.info, "session", users / name).write(device.info, dict(device.snapshot(mode)))
        device.apply(PowerMode(power_limit_w=limit_w))  # and then it was killed
        time.sleep(0.02)
    assert session_module.finish_killed(device, session_module.journal_folders())
    assert cards.limits_w == [300, 300]
