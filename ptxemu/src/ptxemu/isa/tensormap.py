"""Changing tensor maps (PTX ISA, "Data Movement and Conversion Instructions: tensormap.replace" and
"Parallel Synchronization and Communication Instructions: tensormap.cp_fenceproxy")."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors.tensor_map_bits import (
    MAX_RANK,
    REPLACEABLE,
    TENSOR_MAP_BYTES,
    TYPE_NAMES,
    replace_field,
)
from ptxemu.engines.copy_operation import shared_place
from ptxemu.errors import ExecutionError, fault
from ptxemu.events import AccessKind, Fence, FenceKind
from ptxemu.isa.copy_operands import addresses
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lanes import Mask, first_lane
from ptxemu.machine.operands import reader
from ptxemu.machine.regions import report
from ptxemu.machine.state import Cta, Warp
from ptxemu.memory.address import SHARED_WINDOW, in_window
from ptxemu.syntax.ast import Instruction, IntImmediate

Bytes = NDArray[np.uint8]

_OF_DIMENSIONS = {"box_dim": 5, "global_dim": 5, "global_stride": 4, "element_stride": 5}
"""The fields that `ord` selects from, and how many there are."""
_LIMITS = {
    "rank": MAX_RANK,
    "elemtype": len(TYPE_NAMES),
    "interleave_layout": 3,
    "swizzle_mode": 4,
    "swizzle_atomicity": 4,
    "fill_mode": 2,
}
"""Fields whose values are 0 up to this."""
_ALIGNMENT = 64


@visible("tensormap.replace")
def replace(instruction: Instruction, modifiers: Modifiers) -> Step:
    """One field of the map at [addr] becomes new_val."""
    modifiers.one_of("tile")
    field = modifiers.one_of(*REPLACEABLE)
    space = modifiers.one_of("global", "shared::cta", default="generic")
    modifiers.one_of("b1024")
    type_ = modifiers.one_of("b32", "b64")
    if type_ != ("b64" if field in ("global_address", "global_stride") else "b32"):
        unsupported(instruction, f".{field} is not .{type_}")
    target, *rest = instruction.operands
    ordinal = 0
    if field in _OF_DIMENSIONS:
        chosen = rest.pop(0)
        if not isinstance(chosen, IntImmediate) or not 0 <= chosen.value < _OF_DIMENSIONS[field]:
            unsupported(instruction, f"ord {chosen} is not 0 to {_OF_DIMENSIONS[field] - 1}")
        ordinal = chosen.value
    if len(rest) != 1:
        unsupported(instruction, "expected one new value")
    read_address = addresses(instruction, target)
    read_value = reader(rest[0], "u64" if type_ == "b64" else "u32")

    def step(warp: Warp, mask: Mask) -> None:
        targets, values = read_address(warp), read_value(warp)
        for lane in np.flatnonzero(mask).tolist():
            value = int(values[lane])
            if not 0 <= value < _LIMITS.get(field, value + 1):
                fault(instruction, f"{field} {value}: expected less than {_LIMITS[field]}")
            held, owner, at = _map_bytes(warp, space, int(targets[lane]), instruction)
            words = np.frombuffer(held.tobytes(), dtype=np.uint64).copy()
            replace_field(words, field, ordinal, value)
            held[:] = words.view(np.uint8)
            report(warp, owner, at, TENSOR_MAP_BYTES, AccessKind.WRITE, instruction)
        warp.cta.machine.progress += 1

    return step


@visible("tensormap.cp_fenceproxy")
def copy_and_fence(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Copy a map from shared to global memory, then release it to the tensormap proxy."""
    modifiers.expect("global", "shared::cta", "tensormap::generic", "release", "sync", "aligned")
    scope = modifiers.one_of("cta", "cluster", "gpu", "sys")
    fence = Fence(FenceKind.TENSORMAP_RELEASE, scope=scope)
    target, source, size = instruction.operands
    if size != IntImmediate(TENSOR_MAP_BYTES):
        unsupported(instruction, f"expected {TENSOR_MAP_BYTES} bytes; got {size}")
    read_target, read_source = (addresses(instruction, o) for o in (target, source))

    def step(warp: Warp, mask: Mask) -> None:
        lane = first_lane(mask)
        at_source, at_target = int(read_source(warp)[lane]), int(read_target(warp)[lane])
        read, owner, offset = _map_bytes(warp, "shared::cta", at_source, instruction)
        written, _, address = _map_bytes(warp, "global", at_target, instruction)
        written[:] = read
        report(warp, owner, offset, TENSOR_MAP_BYTES, AccessKind.READ, instruction)
        report(warp, None, address, TENSOR_MAP_BYTES, AccessKind.WRITE, instruction)
        machine = warp.cta.machine
        machine.progress += 1
        if machine.observer is not None:
            machine.observer.fenced(warp, fence, instruction)

    return step


def _map_bytes(
    warp: Warp, space: str, address: int, instruction: Instruction
) -> tuple[Bytes, Cta | None, int]:
    """The 128 bytes of a map that is to be changed, whose they are and where observers see them."""
    if address % _ALIGNMENT:
        fault(instruction, f"the tensor map at 0x{address:x} is not aligned to {_ALIGNMENT} bytes")
    if space == "shared::cta" or (space == "generic" and in_window(address, SHARED_WINDOW)):
        owner, offset = shared_place(warp.cta, address, TENSOR_MAP_BYTES, instruction, own=True)
        return owner.shared[offset : offset + TENSOR_MAP_BYTES], owner, offset
    memory = warp.cta.machine.memory
    found = memory.find(address, TENSOR_MAP_BYTES)
    if found is not None and not found.writable:
        fault(instruction, f"the tensor map at 0x{address:x} is in read-only {found.name}")
    try:
        return memory.span(address, TENSOR_MAP_BYTES), None, address
    except ExecutionError as error:
        fault(instruction, str(error))
