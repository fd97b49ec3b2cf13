"""The special registers of a warp (PTX ISA, "Special Registers")."""

from __future__ import annotations

import numpy as np

from ptxemu.errors import ExecutionError
from ptxemu.machine.lanes import LANE_IDS, WARP_SIZE, Lanes
from ptxemu.machine.state import Cta, Machine, Warp
from ptxemu.memory.address import SHARED_BASE
from ptxemu.syntax.ast import SpecialRegister

NANOSECONDS_PER_INSTRUCTION = 1
_GRID_WORKSPACE_BYTES = 8
"""Its size and the barrier, a number of 32 bits each."""
RESERVED_FOR_LIBRARIES = 0x200
"""Offset of the scratch space of cooperative groups in the reserved part of shared memory."""
_PARAMETER = "%parameter "
_OF_WARPS = ("%tid", "%warpid")
OF_CTAS = ("%ctaid", "%clusterid", "%cluster_ctaid", "%cluster_ctarank", "%smid")
"""Registers that are not the same in all warps of a CTA, and in all CTAs."""
_OF_LANES: dict[str, Lanes] = {
    "%laneid": LANE_IDS,
    "%lanemask_eq": np.uint32(1) << LANE_IDS,
    "%lanemask_lt": (np.uint32(1) << LANE_IDS) - np.uint32(1),
    "%lanemask_le": (np.uint32(2) << LANE_IDS) - np.uint32(1),
    "%lanemask_gt": ~((np.uint32(2) << LANE_IDS) - np.uint32(1)),
    "%lanemask_ge": ~((np.uint32(1) << LANE_IDS) - np.uint32(1)),
}


def special(warp: Warp, name: str) -> Lanes:
    """Give the value of a special register in every lane.

    Raises:
        ExecutionError: there is no such register.
    """
    value = warp.constants.get(name)
    if value is None:
        alike = warp.cta.machine.constants
        key = name, warp.index if name.startswith(_OF_WARPS) else 0
        value = alike.get(key)
        if value is None:
            value = _constant(warp.cta, warp.index, name)
        if value is None:
            return _changing(warp, name)
        if not name.startswith(OF_CTAS):
            alike[key] = value
        warp.constants[name] = value
    return value


def parameter_word(offset: int, size: int) -> SpecialRegister:
    """A name among special registers for `size` bytes of the kernel's parameters."""
    return SpecialRegister(f"{_PARAMETER}{offset}+{size}")


def _changing(warp: Warp, name: str) -> Lanes:
    """Clocks count the warp's instructions."""
    machine = warp.cta.machine
    ticks = warp.instruction_count * NANOSECONDS_PER_INSTRUCTION + machine.skipped_time
    machine.clock_was_read = machine.clock_was_read or name.startswith(("%clock", "%globaltimer"))
    if name in ("%clock", "%clock_hi"):
        return np.full(WARP_SIZE, ticks & 0xFFFFFFFF if name == "%clock" else 0, np.uint32)
    if name in ("%clock64", "%globaltimer"):
        return np.full(WARP_SIZE, ticks, np.uint64)
    if name in ("%globaltimer_lo", "%globaltimer_hi"):
        return np.full(WARP_SIZE, ticks & 0xFFFFFFFF if name.endswith("lo") else 0, np.uint32)
    if name.startswith("%envreg"):
        return np.full(WARP_SIZE, _environment(machine, int(name[7:])), np.uint32)
    raise ExecutionError(f"special register {name} is not known")


def _environment(machine: Machine, number: int) -> int:
    """%envreg1 and 2 hold the address of the workspace of cooperative groups' grid barrier."""
    if number not in (1, 2):
        return 0
    if machine.grid_workspace is None:
        machine.grid_workspace = machine.allocate(_GRID_WORKSPACE_BYTES, "the grid's workspace")
    return machine.grid_workspace >> 32 if number == 1 else machine.grid_workspace & 0xFFFFFFFF


def _constant(cta: Cta, warp_index: int, name: str) -> Lanes | None:
    """The value in every lane of a warp; None for a register that changes or does not exist."""
    of_lanes = _OF_LANES.get(name)
    if of_lanes is not None:
        return of_lanes
    if name.startswith(_PARAMETER):
        start, size = map(int, name.removeprefix(_PARAMETER).split("+"))
        word = np.frombuffer(cta.machine.launch.parameters, f"u{size}", 1, start)
        return np.repeat(word, WARP_SIZE)
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
