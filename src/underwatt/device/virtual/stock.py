"""The vendor's own power modes of each board: what a user has without Underwatt, and the baseline it is judged by.

Written down from NVIDIA's developer guides (tables of supported modes), clocks rounded to the boards' tables. Masks of
GPU units, which need a reboot, are left out.
"""

from __future__ import annotations

from underwatt.device.virtual.spec import StockMode
from underwatt.records import PowerMode


def _stock(number: int, name: str, cores: int, cpu_mhz: float, gpu_mhz: float, mem_mhz: float) -> StockMode:
    return StockMode(number, name, PowerMode(cpu_cores=cores, cpu_mhz=cpu_mhz, gpu_mhz=gpu_mhz, mem_mhz=mem_mhz))


NANO = (
    _stock(0, "MAXN", 4, 1479.0, 921.6, 1600.0),
    _stock(1, "5W", 2, 921.6, 614.4, 1600.0),
)
TX2_NX = (
    _stock(0, "MAXN", 6, 2035.2, 1300.5, 1600.0),
    _stock(1, "MAXQ", 4, 1267.2, 854.25, 1331.2),
    _stock(2, "MAXP_CORE_ALL", 6, 1420.8, 1122.0, 1600.0),
    _stock(3, "MAXP_CORE_ARM", 4, 2035.2, 1122.0, 1600.0),
)
XAVIER_AGX = (
    _stock(0, "MAXN", 8, 2265.6, 1377.0, 2133.0),
    _stock(1, "MODE_10W", 2, 1190.4, 522.75, 1065.6),
    _stock(2, "MODE_15W", 4, 1190.4, 675.75, 1331.2),
    _stock(3, "MODE_30W_ALL", 8, 1190.4, 905.25, 1600.0),
    _stock(4, "MODE_30W_6CORE", 6, 1420.8, 905.25, 1600.0),
    _stock(5, "MODE_30W_4CORE", 4, 1804.8, 905.25, 1600.0),
    _stock(6, "MODE_30W_2CORE", 2, 2112.0, 905.25, 1600.0),
)
ORIN_NANO = (
    _stock(0, "15W", 6, 1510.4, 624.75, 2133.0),
    _stock(1, "7W", 4, 960.0, 408.0, 2133.0),
)
ORIN_AGX = (
    _stock(0, "MAXN", 12, 2201.6, 1300.5, 3199.0),
    _stock(1, "MODE_15W", 4, 1113.6, 420.75, 2133.0),
    _stock(2, "MODE_30W", 8, 1728.0, 624.75, 3199.0),
    _stock(3, "MODE_50W", 12, 1497.6, 828.75, 3199.0),
)
