"""Why a training step takes as long and draws as much as it does: one model for every board.

Time: the CPU launches kernels, its cores prepare the next batch meanwhile, the GPU computes, memory moves bytes. The
slowest of these sets the pace; a smooth maximum rounds the corners, because none of them overlaps perfectly.
Power: what is always drawn and what work keeps switched on, plus C·V(f)²·f of each clocked part, as busy as the step
keeps it. Cores with nothing to do sleep, unless cpuidle is off, as ``jetson_clocks`` leaves it.

This is the simulator's physics, and the simulator's alone. The predictor has its own (``underwatt.predict.roofline``):
other terms, other constants, its softness fitted instead of fixed. A predictor that shared these formulas would be
examined on its own answers (the inverse crime): it would find on every simulated board exactly the curve it assumes,
and the figures would say nothing about real ones. So neither may import the other, however alike they look; what both
have learned from are the published measurements of real boards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from underwatt.records import WorkloadCost

Floats: TypeAlias = NDArray[np.float64]

# Round numbers, the same for every board and workload, chosen once with the Orin training tables in view: 3 to 6 for
# the first changes the time error there by at most 0.4 points. Larger is sharper: two equally slow arms cost 19% more
# than one alone, and cores beyond the workers' number are lost with a corner of 9%.
STEP_SHARPNESS = 4.0
CORE_SHARPNESS = 8.0
# A core without work draws nothing while it sleeps; the kernel's timers and services wake it for about a tenth of the
# time (estimated), in which it draws what it would draw awake and idle.
AWAKE_WITHOUT_WORK = 0.1


@dataclass(frozen=True, slots=True)
class Clocks:
    """Power modes as columns: one entry a mode, or one number for all of them."""

    cpu_cores: Floats
    cpu_mhz: Floats
    gpu_mhz: Floats
    mem_mhz: Floats


@dataclass(frozen=True, slots=True)
class StepConstants:
    """What one step of a workload costs a board, in millions of cycles (which, over MHz, are seconds).

    A step at batch size b costs ``per_step + b × per_sample``. The fixed GPU cycles of a step are why small batches
    use a GPU badly: its utilisation rises with b as b / (b + per_step / per_sample).
    """

    compute_mcycles_per_sample: float
    launch_mcycles_per_step: float  # CPU, one thread
    load_mcycles_per_sample: float  # CPU, shared by the loading cores
    memory_mcycles_per_sample: float
    compute_mcycles_per_step: float = 0.0
    memory_mcycles_per_step: float = 0.0
    load_workers: float = 4.0  # more cores than this do not load faster
    load_core_exponent: float = 1.0  # above 1 where few cores also fight over caches and the launching thread
    exposed_memory: float = 0.25  # the share of memory time that hides behind neither computing nor loading


@dataclass(frozen=True, slots=True)
class ClockedPart:
    """One clocked part of a chip: C·V(f)²·f, of which ``idle_share`` is drawn even when it has nothing to do."""

    capacitance_nf: float
    top_mhz: float
    low_v: float  # towards clock zero; the voltage rises linearly to high_v at the top clock
    high_v: float
    idle_share: float

    def watts(self, mhz: Floats, busy: Floats) -> Floats:
        """Watts at a clock, for a part that is busy so much of the time (or for so many cores)."""
        return self.watts_of(mhz) * (self.idle_share + (1 - self.idle_share) * busy)

    def watts_of(self, mhz: Floats) -> Floats:
        """Watts at a clock when always busy."""
        volts = self.low_v + (self.high_v - self.low_v) * np.minimum(mhz / self.top_mhz, 1.0)
        return np.asarray(1e-3 * self.capacitance_nf * volts**2 * mhz)


@dataclass(frozen=True, slots=True)
class PowerConstants:
    """What a board draws: a constant, the GPU, each CPU core, the memory, and what work keeps switched on.

    ``working_w`` is drawn while a step is under way, whatever the clocks: the leakage of parts that are gated when
    nothing is queued (the GPU's engines, the fabric, the memory's interface). Tables of measured trainings hold the
    sum of both constants; only what a board draws idle tells them apart.
    """

    static_w: float
    gpu: ClockedPart
    cpu_core: ClockedPart
    mem: ClockedPart
    working_w: float = 0.0


@dataclass(frozen=True, slots=True)
class BoardConstants:
    """What a board does in one cycle, and what a cycle draws; turns counted costs into step and power constants."""

    flops_per_gpu_cycle: float  # reached by large kernels
    bytes_per_mem_cycle: float
    launch_cycles_per_kernel: float
    load_cycles_per_byte: float
    power: PowerConstants
    # Filling and draining the GPU: fitted on the two inference tables, which vary the batch size: 8,000 and 18,000; an
    # H200 gives about 7,000.
    gpu_cycles_per_kernel: float = 12e3
    load_workers: float = 4.0
    load_core_exponent: float = 1.0
    exposed_memory: float = 0.25

    def step_constants(self, cost: WorkloadCost) -> StepConstants:
        """What one step of a counted workload costs this board."""
        return StepConstants(
            compute_mcycles_per_sample=1e-6 * cost.flops_per_sample / self.flops_per_gpu_cycle,
            compute_mcycles_per_step=1e-6 * cost.kernels_per_step * self.gpu_cycles_per_kernel,
            launch_mcycles_per_step=1e-6 * cost.kernels_per_step * self.launch_cycles_per_kernel,
            load_mcycles_per_sample=1e-6 * cost.load_bytes_per_sample * self.load_cycles_per_byte,
            memory_mcycles_per_sample=1e-6 * cost.bytes_per_sample / self.bytes_per_mem_cycle,
            memory_mcycles_per_step=1e-6 * cost.bytes_per_step / self.bytes_per_mem_cycle,
            load_workers=self.load_workers,
            load_core_exponent=self.load_core_exponent,
            exposed_memory=self.exposed_memory,
        )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long a step takes, and how long each part of the board is busy during it."""

    step_s: Floats
    compute_s: Floats  # with filling and draining the GPU for each kernel
    busy_gpu_s: Floats  # without: a GPU that fills and drains draws little
    memory_s: Floats
    launch_s: Floats
    load_s: Floats
    loading_cores: Floats
    work_s: Floats  # the step if its batch were already loaded; the rest is waiting for data


@dataclass(frozen=True, slots=True)
class PowerParts:
    """Mean watts during a step, by the part that draws them."""

    static_w: Floats
    gpu_w: Floats
    cpu_w: Floats
    mem_w: Floats

    @property
    def total_w(self) -> Floats:
        """All parts together."""
        return self.static_w + self.gpu_w + self.cpu_w + self.mem_w


def smooth_max(sharpness: float, *arms: Floats) -> Floats:
    """The largest of positive arms with rounded corners; a negative sharpness gives the smallest."""
    stack = np.stack(np.broadcast_arrays(*arms))
    scale = np.maximum(stack.max(axis=0) if sharpness > 0 else stack.min(axis=0), np.finfo(float).tiny)
    return np.asarray(scale * ((stack / scale) ** sharpness).sum(axis=0) ** (1.0 / sharpness))


def step_times(constants: StepConstants, clocks: Clocks, batch_size: Floats | float) -> StepTimes:
    """Time of one step; never longer at a higher clock or with more cores."""
    batch = np.asarray(batch_size, float)
    busy_gpu_s = batch * constants.compute_mcycles_per_sample / clocks.gpu_mhz
    compute_s = constants.compute_mcycles_per_step / clocks.gpu_mhz + busy_gpu_s
    memory_s = (constants.memory_mcycles_per_step + batch * constants.memory_mcycles_per_sample) / clocks.mem_mhz
    launch_s = constants.launch_mcycles_per_step / clocks.cpu_mhz
    loading_cores = smooth_max(-CORE_SHARPNESS, clocks.cpu_cores, np.asarray(constants.load_workers))
    parallel = loading_cores**constants.load_core_exponent
    load_s = batch * constants.load_mcycles_per_sample / (clocks.cpu_mhz * parallel)
    exposed_s = constants.exposed_memory * memory_s
    work = (compute_s + exposed_s, launch_s, memory_s)
    step_s = smooth_max(STEP_SHARPNESS, *work, load_s + exposed_s)
    work_s = smooth_max(STEP_SHARPNESS, *work)
    return StepTimes(step_s, compute_s, busy_gpu_s, memory_s, launch_s, load_s, loading_cores, work_s)


def busy_cores(times: StepTimes, clocks: Clocks) -> Floats:
    """How many CPU cores are busy, on average over a step: the loading ones, and one that launches or awaits the GPU.

    CUDA waits by asking again and again, which keeps a core as busy as work does: every measured table is explained
    better with this than without.
    """
    busy = (np.maximum(times.launch_s, times.work_s) + times.loading_cores * times.load_s) / times.step_s
    return np.asarray(np.minimum(busy, clocks.cpu_cores))


def step_power(constants: PowerConstants, clocks: Clocks, times: StepTimes, *, cpuidle: bool = True) -> PowerParts:
    """Mean power over a step."""
    return PowerParts(
        static_w=np.asarray(constants.static_w + constants.working_w),
        gpu_w=constants.gpu.watts(clocks.gpu_mhz, times.busy_gpu_s / times.step_s),
        cpu_w=_cpu_w(constants.cpu_core, clocks, busy_cores(times, clocks), cpuidle),
        mem_w=constants.mem.watts(clocks.mem_mhz, times.memory_s / times.step_s),
    )


def idle_power(constants: PowerConstants, clocks: Clocks, *, cpuidle: bool = True) -> PowerParts:
    """Power with nothing to do at these clocks: the GPU is gated, memory refreshes, cores sleep if they may."""
    nothing = np.zeros(())
    return PowerParts(
        static_w=np.asarray(constants.static_w),
        gpu_w=nothing,
        cpu_w=_cpu_w(constants.cpu_core, clocks, nothing, cpuidle),
        mem_w=constants.mem.watts(clocks.mem_mhz, nothing),
    )


def _cpu_w(core: ClockedPart, clocks: Clocks, busy: Floats, cpuidle: bool) -> Floats:
    idle = core.idle_share * (AWAKE_WITHOUT_WORK if cpuidle else 1.0)
    return core.watts_of(clocks.cpu_mhz) * (busy + idle * (clocks.cpu_cores - busy))
