"""The special registers of a warp that never change (PTX ISA, "Special Registers")."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxemu.machine.lanes import LANE_IDS, WARP_SIZE, Lanes
from ptxemu.memory.address import SHARED_BASE

if TYPE_CHECKING:
    from ptxemu.machine.cta import Cta

RESERVED_FOR_LIBRARIES = 0x200
"""Where cooperative groups find scratch space in the reserved part of shared memory."""
_OF_LANES: dict[str, Lanes] = {
    "%laneid": LANE_IDS,
    "%lanemask_eq": np.uint32(1) << LANE_IDS,
    "%lanemask_lt": (np.uint32(1) << LANE_IDS) - np.uint32(1),
    "%lanemask_le": (np.uint32(2) << LANE_IDS) - np.uint32(1),
    "%lanemask_gt": ~((np.uint32(2) << LANE_IDS) - np.uint32(1)),
    "%lanemask_ge": ~((np.uint32(1) << LANE_IDS) - np.uint32(1)),
}


def constant_special(cta: Cta, warp_index: int, name: str) -> Lanes | None:
    """The value in every lane of a warp; None for a register that changes or does not exist."""
    of_lanes = _OF_LANES.get(name)
    if of_lanes is not None:
        return of_lanes
    register, _, axis = name.partition(".")
    if axis and axis in "xyz":
        place = "xyz".index(axis)
        if register == "%tid":
            return _thread_index(cta, warp_index, place)
        axes = _by_axis(cta, register)
        return None if axes is None else _all_lanes(axes[place])
    value = _number(cta, warp_index, name)
    return None if value is None else _all_lanes(value)


def _thread_index(cta: Cta, warp_index: int, axis: int) -> Lanes:
    bx, by, _ = cta.machine.launch.block
    thread = LANE_IDS + np.uint32(warp_index * WARP_SIZE)
    if axis == 0:
        return thread % np.uint32(bx)
    return thread // np.uint32(bx) % np.uint32(by) if axis == 1 else thread // np.uint32(bx * by)


def _by_axis(cta: Cta, register: str) -> tuple[int, int, int] | None:
    launch, cluster = cta.machine.launch, cta.cluster
    cx, cy, _ = cluster.shape
    rank = cta.rank
    return {
        "%ntid": launch.block,
        "%ctaid": cta.ctaid,
        "%nctaid": launch.grid,
        "%clusterid": cluster.ctaid,
        "%nclusterid": launch.clusters,
        "%cluster_ctaid": (rank % cx, rank // cx % cy, rank // (cx * cy)),
        "%cluster_nctaid": cluster.shape,
    }.get(register)


def _number(cta: Cta, warp_index: int, name: str) -> int | None:
    machine, (cx, cy, cz) = cta.machine, cta.cluster.shape
    launch = machine.launch
    return {
        "%warpid": warp_index,
        "%nwarpid": -(-cta.num_threads // WARP_SIZE),
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": cx * cy * cz,
        "%is_explicit_cluster": int(launch.explicit_cluster),
        "%smid": cta.index % machine.device.num_sms,
        "%nsmid": machine.device.num_sms,
        "%gridid": 0,
        "%dynamic_smem_size": launch.dynamic_shared_bytes,
        "%total_smem_size": machine.layout.shared_bytes,
        "%aggr_smem_size": machine.layout.shared_bytes,
        "%reserved_smem_offset_begin": 0,
        "%reserved_smem_offset_end": SHARED_BASE,
        "%reserved_smem_offset_cap": SHARED_BASE,
        "%reserved_smem_offset_0": 0,
        "%reserved_smem_offset_1": RESERVED_FOR_LIBRARIES,
    }.get(name)


def _all_lanes(value: int) -> Lanes:
    return np.full(WARP_SIZE, value, dtype=np.uint32)
