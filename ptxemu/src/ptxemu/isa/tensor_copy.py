"""Tensor copies (PTX ISA, "Data Movement and Conversion Instructions: Tensor copy":
cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, cp.async.bulk.prefetch.tensor)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ptxemu.descriptors.im2col_map import Im2colMap
from ptxemu.engines.bulk_copy import destinations, shared_place, signal_of
from ptxemu.engines.copy_operation import issue_copy
from ptxemu.engines.groups import bulk_groups
from ptxemu.engines.im2col import GlobalColumn
from ptxemu.engines.reductions import reduction
from ptxemu.engines.tma import GlobalTile, SharedTile, fetch_map
from ptxemu.errors import fault
from ptxemu.isa import copy_operands
from ptxemu.isa.bulk_copy import OPERATIONS
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lanes import Lanes, Mask
from ptxemu.machine.operands import (
    LaneItem,
    LaneReader,
    address_in_lane,
    address_reader,
    in_lane,
    reader,
)
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Address, Instruction, Operand, Vector

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
def copy(instruction: Instruction, modifiers: Modifiers) -> Step:
    """A box of a tensor to shared memory, or back."""
    has_policy = modifiers.flag("L2::cache_hint")
    route = copy_operands.take_route(modifiers, instruction)
    if route == ("global", "shared::cta"):
        return _store(instruction, modifiers, has_policy, None)
    if route[1] != "global":
        unsupported(instruction, f"there is no copy from {route[1]} to {route[0]}")
    return _load(instruction, modifiers, has_policy, own=route[0] == "shared::cta")


@visible("cp.reduce.async.bulk.tensor")
def reduce(instruction: Instruction, modifiers: Modifiers) -> Step:
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
                issue_copy(
                    warp,
                    instruction,
                    "cp.async.bulk.tensor",
                    source,
                    target,
                    size=source.size,
                    signal=signal,
                )

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
            operation = issue_copy(
                warp, instruction, kind, source, target, size=target.size, combine=combine
            )
            bulk_groups(warp).add(operation, lanes)

    return step


@visible("cp.async.bulk.prefetch.tensor")
def prefetch(instruction: Instruction, modifiers: Modifiers) -> Step:
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
