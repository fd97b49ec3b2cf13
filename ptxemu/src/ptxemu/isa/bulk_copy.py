"""Bulk copies (PTX ISA, "Data Movement and Conversion Instructions: Bulk copy": cp.async.bulk,
cp.reduce.async.bulk, cp.async.bulk.prefetch, cp.async.bulk.commit_group and wait_group), and tensor
copies."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ptxemu.descriptors.tensor_map import Im2colMap
from ptxemu.engines.copy_operation import (
    Combine,
    GlobalRange,
    Place,
    SharedRange,
    check_unit,
    destinations,
    issue_copy,
    reduction,
    shared_place,
    signal_of,
)
from ptxemu.engines.groups import bulk_groups
from ptxemu.engines.im2col import GlobalColumn
from ptxemu.engines.tma import GlobalTile, SharedTile, fetch_map
from ptxemu.errors import fault
from ptxemu.isa import copy_operands
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import Lanes, Mask, only_lane
from ptxemu.machine.operands import (
    LaneItem,
    LaneReader,
    address_in_lane,
    address_reader,
    in_lane,
    reader,
)
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Address, Instruction, IntImmediate, Operand, Vector

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


@visible("multimem.cp.async.bulk", "multimem.cp.reduce.async.bulk")
def copy_to_all(instruction: Instruction, modifiers: Modifiers) -> Step:
    """The same in all replicas of multicast memory; here there is one."""
    target, source = copy_operands.take_route(modifiers, instruction)
    if target != "global":
        unsupported(instruction, "the destination must be in global memory")
    reduces = "reduce" in instruction.modifiers
    combine = _combination(instruction, modifiers) if reduces else None
    return _to_global(instruction, modifiers, source, False, combine)


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


# Tensor copies (PTX ISA, "Data Movement and Conversion Instructions: Tensor copy":
# cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, cp.async.bulk.prefetch.tensor).

_DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
_IM2COL_OF_WIDTH = ("im2col::w", "im2col::w::128")


@dataclass(frozen=True, slots=True)
class TensorOperand:
    """[map, {coordinates}] of an instruction.

    Attributes:
        four_rows, im2col: the mode; neither is .tile.
        offsets: of the position in im2col mode.
    """

    instruction: Instruction
    map_address: Address
    coordinates: tuple[Operand, ...]
    four_rows: bool
    im2col: bool = False
    offsets: tuple[Operand, ...] = ()
    readers: list[LaneReader] = field(init=False)
    """All of the map's address, the coordinates and the offsets."""
    items: list[LaneItem] = field(init=False)
    """The same in one lane."""

    def __post_init__(self) -> None:
        typed = [(coordinate, "s32") for coordinate in self.coordinates]
        typed += [(offset, "u16") for offset in self.offsets]
        readers = [address_reader(self.map_address), *(reader(*one) for one in typed)]
        items = [address_in_lane(self.map_address), *(in_lane(*one) for one in typed)]
        object.__setattr__(self, "readers", readers)
        object.__setattr__(self, "items", items)

    @classmethod
    def decode(
        cls,
        instruction: Instruction,
        operand: Operand,
        modifiers: Modifiers,
        four_rows: str,
        offsets_at: int = 0,
    ) -> TensorOperand:
        """Take the dimensions and the mode.

        Args:
            four_rows: the mode of four rows that the instruction may have.
            offsets_at: number of the operand with the offsets of .im2col; 0: .im2col_no_offs.
        """
        rank = int(modifiers.one_of(*_DIMENSIONS)[0])
        for name in _IM2COL_OF_WIDTH:
            if modifiers.flag(name):
                unsupported(instruction, f".{name} is not emulated: .im2col and .tile modes are")
        if modifiers.flag("im2col" if offsets_at else "im2col_no_offs"):
            if rank < 3:
                unsupported(instruction, "im2col mode is for 3d, 4d and 5d")
            offsets = _offsets(instruction, offsets_at, rank - 2) if offsets_at else ()
            place = copy_operands.tensor_operand(instruction, operand, rank)
            return cls(instruction, *place, four_rows=False, im2col=True, offsets=offsets)
        is_four = modifiers.flag(four_rows)
        if not is_four:
            modifiers.flag("tile")
        elif rank != 2:
            unsupported(instruction, f".{four_rows} is for 2d")
        count = 5 if is_four else rank
        return cls(instruction, *copy_operands.tensor_operand(instruction, operand, count), is_four)

    def lanes(self, warp: Warp) -> list[Lanes]:
        """All lanes' map addresses, coordinates and offsets."""
        return [read(warp) for read in self.readers]

    def tile(self, warp: Warp, lane: int, *, writes: bool) -> GlobalTile | GlobalColumn:
        """Return the tile or the column that one lane names."""
        address, *numbers = (read(warp, lane) for read in self.items)
        made = fetch_map(warp, address, self.instruction)
        if isinstance(made, Im2colMap) != self.im2col:
            fault(
                self.instruction,
                f"the tensor map at 0x{address:x} is {'not ' if self.im2col else ''}in im2col mode",
            )
        tile: GlobalTile | GlobalColumn
        if isinstance(made, Im2colMap):
            count = len(self.coordinates)
            offsets = tuple(numbers[count:]) or (0,) * (count - 2)
            tile = GlobalColumn(made, tuple(numbers[:count]), offsets, address)
        else:
            tile = GlobalTile(made, tuple(numbers), self.four_rows, address)
        tile.check(self.instruction, writes=writes)
        return tile


def _offsets(instruction: Instruction, at: int, count: int) -> tuple[Operand, ...]:
    """The offsets of .im2col, 16 bits each, of width first."""
    operand = instruction.operands[at] if at < len(instruction.operands) else None
    if not isinstance(operand, Vector) or len(operand.elements) != count:
        unsupported(instruction, f"expected {count} offsets in braces")
    return tuple(operand.elements)


@visible("cp.async.bulk.tensor")
def copy_tensor(instruction: Instruction, modifiers: Modifiers) -> Step:
    """A box of a tensor to shared memory, or back."""
    has_policy = modifiers.flag("L2::cache_hint")
    route = copy_operands.take_route(modifiers, instruction)
    if route == ("global", "shared::cta"):
        return _store(instruction, modifiers, has_policy, None)
    if route[1] != "global":
        unsupported(instruction, f"there is no copy from {route[1]} to {route[0]}")
    return _load(instruction, modifiers, has_policy, own=route[0] == "shared::cta")


@visible("cp.reduce.async.bulk.tensor")
def reduce_tensor(instruction: Instruction, modifiers: Modifiers) -> Step:
    """A box of shared memory combined into a tensor, whose map gives the type."""
    has_policy = modifiers.flag("L2::cache_hint")
    if copy_operands.take_route(modifiers, instruction) != ("global", "shared::cta"):
        unsupported(instruction, "only from shared::cta to global")
    return _store(instruction, modifiers, has_policy, modifiers.one_of(*OPERATIONS))


def _load(instruction: Instruction, modifiers: Modifiers, has_policy: bool, *, own: bool) -> Step:
    """Elements outside the tensor are filled, and counted as the others are."""
    modifiers.one_of(copy_operands.COMPLETE_TX)
    multicast = modifiers.flag("multicast::cluster")
    group = modifiers.one_of("cta_group::1", "cta_group::2", default="cta_group::1")
    if multicast and own:
        unsupported(instruction, ".multicast::cluster is for shared::cluster")
    operand = TensorOperand.decode(
        instruction, instruction.operands[1], modifiers, "tile::gather4", 3
    )
    optional = copy_operands.trailing(
        instruction, 3 + operand.im2col, {"ctas": multicast, "policy": has_policy}
    )
    target_of = copy_operands.plain_address(instruction, instruction.operands[0])
    barrier_of = copy_operands.plain_address(instruction, instruction.operands[2])
    ctas_of = None if optional["ctas"] is None else in_lane(optional["ctas"], "u16")

    def step(warp: Warp, mask: Mask) -> None:
        cta = warp.cta
        for lane, _ in copy_operands.each_lane(mask):
            source = operand.tile(warp, lane, writes=False)
            owner, offset = shared_place(cta, target_of(warp, lane), 0, instruction, own=own)
            barrier = shared_place(cta, barrier_of(warp, lane), 8, instruction, own=False)
            chosen = None if ctas_of is None else ctas_of(warp, lane)
            for destination in destinations(cta, owner, chosen, instruction):
                target = SharedTile(destination, offset, source.tensor_map, source.rows)
                target.check(instruction)
                signal = signal_of(
                    destination,
                    barrier,
                    source.size,
                    instruction,
                    multicast=multicast,
                    cta_group=int(group[-1]),
                )
                issue_copy(warp, instruction, "cp.async.bulk.tensor", source, target, signal=signal)

    return step


def _store(
    instruction: Instruction, modifiers: Modifiers, has_policy: bool, reduces: str | None
) -> Step:
    """Elements outside the tensor are skipped; completes as part of a bulk group."""
    modifiers.one_of(copy_operands.BULK_GROUP)
    operand = TensorOperand.decode(
        instruction, instruction.operands[0], modifiers, "tile::scatter4"
    )
    copy_operands.trailing(instruction, 2, {"policy": has_policy})
    read_source = copy_operands.addresses(instruction, instruction.operands[1])
    kind = "cp.async.bulk.tensor" if reduces is None else "cp.reduce.async.bulk.tensor"

    def step(warp: Warp, mask: Mask) -> None:
        sources, values = read_source(warp), operand.lanes(warp)
        copies = (
            copy_operands.issues(mask, [sources, *values])
            if reduces is None
            else copy_operands.each_lane(mask)
        )
        for lane, lanes in copies:
            target = operand.tile(warp, lane, writes=True)
            made = target.tensor_map
            combine = None if reduces is None else reduction(reduces, made.dtype)
            if reduces is not None and combine is None:
                fault(instruction, f"there is no .{reduces} of the tensor map's {made.dtype}")
            owner, offset = shared_place(warp.cta, int(sources[lane]), 0, instruction, own=True)
            source = SharedTile(owner, offset, made, target.rows)
            source.check(instruction)
            operation = issue_copy(warp, instruction, kind, source, target, combine=combine)
            bulk_groups(warp).add(operation, lanes)

    return step


@visible("cp.async.bulk.prefetch.tensor")
def prefetch_tensor(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Into the L2 cache: only the operands are checked."""
    has_policy = modifiers.flag("L2::cache_hint")
    modifiers.expect("L2", "global")
    operand = TensorOperand.decode(
        instruction, instruction.operands[0], modifiers, "tile::gather4", 1
    )
    copy_operands.trailing(instruction, 1 + operand.im2col, {"policy": has_policy})

    def step(warp: Warp, mask: Mask) -> None:
        values = operand.lanes(warp)
        for lane, _ in copy_operands.issues(mask, values):
            operand.tile(warp, lane, writes=False)

    return step
