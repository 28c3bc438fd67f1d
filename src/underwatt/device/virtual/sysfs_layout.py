"""Which files a board of each generation has, and what they hold when it starts: the shape, not the life."""

from __future__ import annotations

from dataclasses import dataclass
from posixpath import basename, dirname, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from underwatt.device.virtual.spec import BoardSpec, StockMode

CPU = "sys/devices/system/cpu"
DEBUG = "sys/kernel/debug"
EMC_CAP = "sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
BPMP_EMC = f"{DEBUG}/bpmp/debug/clk/emc"
OVERRIDE_EMC = f"{DEBUG}/clk/override.emc"
BANDWIDTH = f"{DEBUG}/tegra_bwmgr"
NVPMODEL_STATUS = "var/lib/nvpmodel/status"
NVPMODEL_CONF = "etc/nvpmodel.conf"
GPU_COOLING = "sys/class/thermal/cooling_device0"
ZONES = {"CPU-therm": "sys/class/thermal/thermal_zone0", "GPU-therm": "sys/class/thermal/thermal_zone1"}
_FIRST_HWMON = 3  # other sensors of the board come before


def hz(mhz: float) -> int:
    """MHz as the GPU and memory files spell them."""
    return round(mhz * 1e6)


def khz(mhz: float) -> int:
    """MHz as the CPU files spell them."""
    return round(mhz * 1e3)


@dataclass(frozen=True, slots=True)
class EmcFiles:
    """The files of the memory clock: ``lock`` at 1 holds ``rate``, else the firmware chooses."""

    rate: str
    lock: str
    running: str


def gpu_node(spec: BoardSpec) -> str:
    """The devfreq folder of the GPU."""
    return f"sys/devices/{spec.sysfs.gpu_path}/devfreq/{basename(spec.sysfs.gpu_path)}"


def policy(cluster: tuple[int, ...]) -> str:
    """The cpufreq folder that the cores of a cluster share."""
    return f"{CPU}/cpufreq/policy{cluster[0]}"


def emc_files(spec: BoardSpec) -> EmcFiles:
    """Where this board keeps its memory clock."""
    if spec.sysfs.emc == "bpmp":
        return EmcFiles(f"{BPMP_EMC}/rate", f"{BPMP_EMC}/mrq_rate_locked", f"{BPMP_EMC}/rate")
    return EmcFiles(f"{OVERRIDE_EMC}/clk_update_rate", f"{OVERRIDE_EMC}/clk_state", f"{OVERRIDE_EMC}/clk_rate")


def core_order(spec: BoardSpec) -> tuple[int, ...]:
    """The order in which cores come online."""
    return tuple(core for cluster in spec.sysfs.clusters for core in cluster)


def sensor_files(spec: BoardSpec, readings: dict[str, tuple[int, int]]) -> dict[str, str]:
    """The power sensor's files for millivolts and milliamperes of each rail."""
    files: dict[str, str] = {}
    for number, (address, rails) in enumerate(spec.sysfs.sensor_chips):
        for channel, rail in enumerate(rails):
            mv, ma = readings.get(rail, (0, 0))
            if spec.sysfs.generation == "jetpack4":
                folder = f"sys/bus/i2c/drivers/ina3221x/{address}/iio:device{number}"
                files[f"{folder}/rail_name_{channel}"] = rail
                files[f"{folder}/in_voltage{channel}_input"] = str(mv)
                files[f"{folder}/in_current{channel}_input"] = str(ma)
                files[f"{folder}/in_power{channel}_input"] = str(round(mv * ma / 1e3))
            else:
                folder = f"sys/bus/i2c/drivers/ina3221/{address}/hwmon/hwmon{_FIRST_HWMON + number}"
                files[f"{folder}/name"] = "ina3221"
                files[f"{folder}/update_interval"] = str(round(1e3 * spec.sensor.window_s))
                files[f"{folder}/in{channel + 1}_label"] = rail
                files[f"{folder}/in{channel + 1}_input"] = str(mv)
                files[f"{folder}/curr{channel + 1}_input"] = str(ma)
                # The driver's sum of shunt voltages: real boards list it, and a reader has to leave it out.
                files[f"{folder}/in7_label"] = "sum of shunt voltages"
                files[f"{folder}/in7_input"] = "0"
    return files


def first_files(spec: BoardSpec, stock: StockMode) -> dict[str, str]:
    """Every file of the board in a stock mode, by path; sensors are empty until the board lives."""
    return {
        **_device_tree_files(spec),
        **_gpu_files(spec, stock),
        **_cpu_files(spec, stock),
        **_emc_files(spec, stock),
        **_thermal_files(spec),
        **sensor_files(spec, {}),
        NVPMODEL_STATUS: f"pmode:{stock.id:04d}",
        NVPMODEL_CONF: nvpmodel_conf(spec),
    }


def links(spec: BoardSpec) -> dict[str, str]:
    """The links of the board: where they lie, and where they point to from there."""
    node = gpu_node(spec)
    wanted = {
        f"sys/class/devfreq/{basename(node)}": node,
        f"{node}/device": dirname(dirname(node)),
    }
    for cluster in spec.sysfs.clusters:
        wanted |= {f"{CPU}/cpu{core}/cpufreq": policy(cluster) for core in cluster}
    return {path: relpath(target, dirname(path)) for path, target in wanted.items()}


def nvpmodel_conf(spec: BoardSpec) -> str:
    """A configuration of stock modes in nvpmodel's format, in our own words."""
    online = [f"CORE_{core} /{CPU}/cpu{core}/online" for core in range(spec.cpu_cores)]
    lines = ["# Written for a virtual board by Underwatt.", "< PARAM TYPE=FILE NAME=CPU_ONLINE >", *online]
    clusters = spec.sysfs.clusters
    for number, cluster in enumerate(clusters):
        folder = f"/{CPU}/cpu{cluster[0]}/cpufreq"
        lines += [f"< PARAM TYPE=CLOCK NAME=CPU_CLUSTER_{number} >", f"MAX_FREQ {folder}/scaling_max_freq"]
    lines += ["< PARAM TYPE=CLOCK NAME=GPU >", f"MAX_FREQ /{gpu_node(spec)}/max_freq"]
    lines += ["< PARAM TYPE=CLOCK NAME=EMC >", f"MAX_FREQ /{EMC_CAP}"]
    for stock in spec.stock_modes:
        on, cpu_mhz, gpu_mhz, mem_mhz = _values(stock)
        order = core_order(spec)
        lines += [f"< POWER_MODEL ID={stock.id} NAME={stock.name} >"]
        lines += [f"CPU_ONLINE CORE_{core} {int(core in order[:on])}" for core in range(spec.cpu_cores)]
        lines += [f"CPU_CLUSTER_{number} MAX_FREQ {khz(cpu_mhz)}" for number in range(len(clusters))]
        lines += [f"GPU MAX_FREQ {hz(gpu_mhz)}", f"EMC MAX_FREQ {_cap(spec, mem_mhz)}"]
    default = spec.stock_mode(spec.default_mode)
    return "\n".join([*lines, f"< PM_CONFIG DEFAULT={default.id} >"])


def _values(stock: StockMode) -> tuple[int, float, float, float]:
    knobs = stock.mode.knobs()
    return int(knobs["cpu_cores"]), knobs["cpu_mhz"], knobs["gpu_mhz"], knobs["mem_mhz"]


def _cap(spec: BoardSpec, mem_mhz: float) -> int:
    return 0 if mem_mhz >= spec.mem_mhz[-1] else hz(mem_mhz)


def _device_tree_files(spec: BoardSpec) -> dict[str, str]:
    device = f"sys/devices/{spec.sysfs.gpu_path}"
    return {
        "proc/device-tree/model": f"{spec.sysfs.model}\0",
        "proc/device-tree/compatible": "".join(f"{name}\0" for name in (*spec.sysfs.compatible, "underwatt,virtual")),
        f"{device}/of_node/name": f"{spec.sysfs.gpu_name}\0",
        f"{device}/of_node/compatible": f"{spec.sysfs.gpu_compatible}\0",
    }


def _gpu_files(spec: BoardSpec, stock: StockMode) -> dict[str, str]:
    node = gpu_node(spec)
    top = str(hz(_values(stock)[2]))
    return {
        f"sys/devices/{spec.sysfs.gpu_path}/railgate_enable": "0",
        f"{node}/available_frequencies": " ".join(str(hz(mhz)) for mhz in spec.gpu_mhz),
        f"{node}/min_freq": str(hz(spec.gpu_mhz[0])),
        f"{node}/max_freq": top,
        f"{node}/cur_freq": top,
    }


def _cpu_files(spec: BoardSpec, stock: StockMode) -> dict[str, str]:
    on, cpu_mhz, _, _ = _values(stock)
    low, high = (str(khz(mhz)) for mhz in (spec.cpu_mhz[0], spec.cpu_mhz[-1]))
    online = core_order(spec)[:on]
    files = {f"{CPU}/cpu{core}/online": str(int(core in online)) for core in range(spec.cpu_cores)}
    files |= {f"{CPU}/{name}": f"0-{spec.cpu_cores - 1}" for name in ("present", "possible")}
    for cluster in spec.sysfs.clusters:
        folder = policy(cluster)
        cores = " ".join(str(core) for core in cluster)
        files |= {
            f"{folder}/scaling_available_frequencies": " ".join(str(khz(mhz)) for mhz in spec.cpu_mhz),
            f"{folder}/scaling_min_freq": low,
            f"{folder}/scaling_max_freq": str(khz(cpu_mhz)),
            f"{folder}/scaling_cur_freq": str(khz(cpu_mhz)),
            f"{folder}/cpuinfo_min_freq": low,
            f"{folder}/cpuinfo_max_freq": high,
            f"{folder}/scaling_governor": "schedutil",
            f"{folder}/related_cpus": cores,
            f"{folder}/affected_cpus": " ".join(str(core) for core in cluster if core in online),
        }
    return files


def _emc_files(spec: BoardSpec, stock: StockMode) -> dict[str, str]:
    mem_mhz = _values(stock)[3]
    low, high = (str(hz(mhz)) for mhz in (spec.mem_mhz[0], spec.mem_mhz[-1]))
    names = emc_files(spec)
    files = {names.rate: str(hz(mem_mhz)), names.lock: "0", names.running: str(hz(mem_mhz))}
    if spec.sysfs.emc == "override":
        return files | {f"{BANDWIDTH}/emc_min_rate": low, f"{BANDWIDTH}/emc_max_rate": high}
    return files | {
        f"{BPMP_EMC}/min_rate": low,
        f"{BPMP_EMC}/max_rate": high,
        EMC_CAP: str(_cap(spec, mem_mhz)),
    }


def _thermal_files(spec: BoardSpec) -> dict[str, str]:
    files = {
        f"{GPU_COOLING}/type": "gpu-balanced",
        f"{GPU_COOLING}/cur_state": "0",
        f"{GPU_COOLING}/max_state": str(len(spec.gpu_mhz) - 1),
    }
    for name, zone in ZONES.items():
        trip = str(round(1e3 * spec.thermal.throttle_c))
        files |= {f"{zone}/type": name, f"{zone}/temp": "25000", f"{zone}/trip_point_0_temp": trip}
        files[f"{zone}/trip_point_0_type"] = "passive"
    return files
