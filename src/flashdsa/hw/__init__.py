"""Facts about the architectures: numbers with the manual's section, no logic."""

from flashdsa.hw.arch import (
    ARCHITECTURES,
    BULK_ALIGNMENT,
    MAX_CLUSTER_SIZE,
    MAX_MBARRIER_COUNT,
    MAX_REGISTERS,
    MBARRIER_BYTES,
    REGISTER_STEP,
    SECTOR_BYTES,
    SM90,
    SM100,
    SM_PARTITIONS,
    TMEM_LANES,
    TMEM_LEAST_ALLOCATION,
    WARP_SIZE,
    WARPGROUP_SIZE,
    ArchSpec,
)

__all__ = [
    "ARCHITECTURES",
    "BULK_ALIGNMENT",
    "MAX_CLUSTER_SIZE",
    "MAX_MBARRIER_COUNT",
    "MAX_REGISTERS",
    "MBARRIER_BYTES",
    "REGISTER_STEP",
    "SECTOR_BYTES",
    "SM90",
    "SM100",
    "SM_PARTITIONS",
    "TMEM_LANES",
    "TMEM_LEAST_ALLOCATION",
    "WARPGROUP_SIZE",
    "WARP_SIZE",
    "ArchSpec",
]
