"""Bulk copies (PTX ISA, "Data Movement and Conversion Instructions: Bulk copy": cp.async.bulk,
cp.reduce.async.bulk, cp.async.bulk.prefetch, cp.async.bulk.commit_group and wait_group)."""

from __future__ import annotations

import numpy as np

from ptxemu.engines.bulk_copy import check_unit, destinations, shared_place, signal_of
from ptxemu.engines.copy_operation import GlobalRange, Place, SharedRange, issue_copy
from ptxemu.engines.groups import bulk_groups
from ptxemu.engines.reductions import Combine, reduction
from ptxemu.isa import copy_operands
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import Mask, only_lane
from ptxemu.machine.operands import in_lane, reader
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, IntImmediate

OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_BITWISE = ("and", "or", "xor")
_GLOBAL_TYPES = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", "f16", "bf16")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(_BITWISE, ("b32", "b64")),
}
_SHARED_TYPES = {
    "add": ("u32", "s32", "u64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(_BITWISE, ("b32",)),
}


@visible("cp.async.bulk")
def copy(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[dst] = [src] for `size` bytes."""
    has_policy = modifiers.flag("L2::cache_hint")
    target, source = copy_operands.take_route(modifiers, instruction)
    if target == "global":
        return _to_global(instruction, modifiers, source, has_policy, None)
    return _to_shared(instruction, modifiers, (target, source), has_policy, None)


@visible("cp.reduce.async.bulk")
def reduce(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[dst] = [dst] op [src] for the elements in `size` bytes."""
    has_policy = modifiers.flag("L2::cache_hint")
    target, source = copy_operands.take_route(modifiers, instruction)
    if source != "shared::cta":
        unsupported(instruction, "the source must be in shared::cta")
    combine = _combination(instruction, modifiers, target)
    if target == "global":
        return _to_global(instruction, modifiers, source, has_policy, combine)
    return _to_shared(instruction, modifiers, (target, source), has_policy, combine)


@visible("multimem.cp.async.bulk")
def copy_to_all(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[dst] = [src] for `size` bytes in all replicas of multicast memory; here there is one."""
    target, source = copy_operands.take_route(modifiers, instruction)
    if target != "global":
        unsupported(instruction, "the destination must be in global memory")
    return _to_global(instruction, modifiers, source, False, None)


@visible("multimem.cp.reduce.async.bulk")
def reduce_to_all(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[dst] = [dst] op [src] for the elements in `size` bytes in all replicas."""
    target, source = copy_operands.take_route(modifiers, instruction)
    if target != "global":
        unsupported(instruction, "the destination must be in global memory")
    return _to_global(instruction, modifiers, source, False, _combination(instruction, modifiers))


def _combination(instruction: Instruction, modifiers: Modifiers, target: str = "global") -> Combine:
    """Take the operation and the type of a reduction."""
    operation, type_ = modifiers.one_of(*OPERATIONS), modifiers.type()
    has_noftz = modifiers.flag("noftz")
    if has_noftz != (operation == "add" and type_ in ("f16", "bf16")):
        unsupported(instruction, "add of f16 and bf16 is .noftz, nothing else is")
    known = _GLOBAL_TYPES if target == "global" else _SHARED_TYPES
    combine = reduction(operation, type_)
    if type_ not in known[operation] or combine is None:
        unsupported(instruction, f"there is no .{operation}.{type_} to {target}")
    return combine


def _to_shared(
    instruction: Instruction,
    modifiers: Modifiers,
    route: tuple[str, str],
    has_policy: bool,
    combine: Combine | None,
) -> Step:
    """Into shared memory of this or another CTA; completes on an mbarrier."""
    modifiers.one_of(copy_operands.COMPLETE_TX)
    multicast = modifiers.flag("multicast::cluster")
    target, source = route
    if multicast and route != ("shared::cluster", "global"):
        unsupported(instruction, ".multicast::cluster is for global to shared::cluster")
    optional = copy_operands.trailing(instruction, 4, {"ctas": multicast, "policy": has_policy})
    target_of, source_of = (
        copy_operands.plain_address(instruction, o) for o in instruction.operands[:2]
    )
    size_of = in_lane(instruction.operands[2], "u32")
    barrier_of = copy_operands.plain_address(instruction, instruction.operands[3])
    ctas_of = None if optional["ctas"] is None else in_lane(optional["ctas"], "u16")
    kind = "cp.async.bulk" if combine is None else "cp.reduce.async.bulk"

    def step(warp: Warp, mask: Mask) -> None:
        cta = warp.cta
        for lane, _ in copy_operands.each_lane(mask):
            size = size_of(warp, lane)
            check_unit(instruction, "size", size)
            owner, offset = shared_place(
                cta, target_of(warp, lane), size, instruction, own=target == "shared::cta"
            )
            check_unit(instruction, "shared address", offset)
            barrier = shared_place(cta, barrier_of(warp, lane), 8, instruction, own=False)
            at = source_of(warp, lane)
            check_unit(instruction, f"{source} address", at)
            place: Place = GlobalRange(at, size)
            if source != "global":
                place = SharedRange(*shared_place(cta, at, size, instruction, own=True), size)
            chosen = None if ctas_of is None else ctas_of(warp, lane)
            for destination in destinations(cta, owner, chosen, instruction):
                signal = signal_of(
                    destination, barrier, size, instruction, multicast=multicast, cta_group=1
                )
                issue_copy(
                    warp,
                    instruction,
                    kind,
                    place,
                    SharedRange(destination, offset, size),
                    size=size,
                    combine=combine,
                    signal=signal,
                )

    return step


def _to_global(
    instruction: Instruction,
    modifiers: Modifiers,
    source: str,
    has_policy: bool,
    combine: Combine | None,
) -> Step:
    """Copy from the CTA's shared memory to global memory; complete as part of a bulk group."""
    modifiers.one_of(copy_operands.BULK_GROUP)
    has_mask = combine is None and modifiers.flag("cp_mask")
    if source != "shared::cta":
        unsupported(instruction, "the source must be in shared::cta")
    optional = copy_operands.trailing(instruction, 3, {"policy": has_policy, "bytes": has_mask})
    target, place, size_operand = instruction.operands[:3]
    target_of, source_of = (
        copy_operands.plain_address(instruction, target),
        copy_operands.plain_address(instruction, place),
    )
    size_of = in_lane(size_operand, "u32")
    readers = [copy_operands.addresses(instruction, o) for o in (target, place)]
    readers.append(reader(size_operand, "u32"))
    bytes_of = None
    if optional["bytes"] is not None:
        bytes_of = in_lane(optional["bytes"], "u16")
        readers.append(reader(optional["bytes"], "u16"))
    kind = "cp.async.bulk" if combine is None else "cp.reduce.async.bulk"

    def step(warp: Warp, mask: Mask) -> None:
        copies = copy_operands.each_lane(mask)
        if combine is None and only_lane(mask) < 0:
            copies = copy_operands.issues(mask, [read(warp) for read in readers])
        for lane, lanes in copies:
            size, address = size_of(warp, lane), target_of(warp, lane)
            check_unit(instruction, "size", size)
            check_unit(instruction, "global address", address)
            owner, offset = shared_place(
                warp.cta, source_of(warp, lane), size, instruction, own=True
            )
            check_unit(instruction, "shared address", offset)
            chosen = None
            if bytes_of is not None:
                chosen = (bytes_of(warp, lane) >> np.arange(16) & 1).astype(np.bool_)
            operation = issue_copy(
                warp,
                instruction,
                kind,
                SharedRange(owner, offset, size),
                GlobalRange(address, size, chosen),
                size=size,
                combine=combine,
            )
            bulk_groups(warp).add(operation, lanes)

    return step


@visible("cp.async.bulk.prefetch")
def prefetch(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Into the L2 cache: only the operands are checked."""
    has_policy = modifiers.flag("L2::cache_hint")
    modifiers.expect("L2", "global")
    copy_operands.trailing(instruction, 2, {"policy": has_policy})
    read_source = copy_operands.addresses(instruction, instruction.operands[0])
    read_size = reader(instruction.operands[1], "u32")

    def step(warp: Warp, mask: Mask) -> None:
        sources, sizes = read_source(warp), read_size(warp)
        for lane in np.flatnonzero(mask).tolist():
            check_unit(instruction, "global address", int(sources[lane]))
            check_unit(instruction, "size", int(sizes[lane]))

    return step


@visible("cp.async.bulk.commit_group")
def commit_group(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Make a group of what the thread has issued with .bulk_group since its last commit."""

    def step(warp: Warp, mask: Mask) -> None:
        bulk_groups(warp).commit(mask)

    return step


@visible("cp.async.bulk.wait_group")
def wait_group(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Wait until at most the n latest bulk groups of the thread are pending.

    With .read only until their sources have been read.
    """
    reads_only = modifiers.flag("read")
    operand = instruction.operands[0]
    if not isinstance(operand, IntImmediate):
        unsupported(instruction, "the number of groups must be a constant")
    pending = operand.value

    def step(warp: Warp, mask: Mask) -> Blocked | None:
        groups = bulk_groups(warp)
        due = groups.due(mask, pending, reads_only=reads_only)
        return copy_operands.wait(warp, groups, due, mask, reads_only=reads_only)

    return step
