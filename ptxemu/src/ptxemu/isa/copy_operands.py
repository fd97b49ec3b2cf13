"""Common parts of decoders of asynchronous copies: operands, lanes that issue a copy, waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.isa.registry import Modifiers, unsupported
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import LANE_IDS, Lanes, Mask, first_lane, only_lane
from ptxemu.machine.operands import LaneItem, LaneReader, address_in_lane, address_reader
from ptxemu.syntax.ast import Address, Instruction, Operand

if TYPE_CHECKING:
    from ptxemu.engines.groups import Groups, Member
    from ptxemu.machine.state import AsyncOperation, Warp

_SPACES = ("shared::cluster", "shared::cta", "global")
COMPLETE_TX = "mbarrier::complete_tx::bytes"
BULK_GROUP = "bulk_group"


def take_route(modifiers: Modifiers, instruction: Instruction) -> tuple[str, str]:
    """The destination's and the source's state space, which the opcode names in this order."""
    named = [m for m in instruction.modifiers if m in _SPACES]
    if len(named) != 2:
        unsupported(instruction, "expected the state spaces of destination and source")
    for space in named:
        modifiers.flag(space)
    return named[0], named[1]


def addresses(instruction: Instruction, operand: Operand) -> LaneReader:
    """The addresses of an operand `[a]`."""
    _check_plain(instruction, operand)
    return address_reader(operand)


def plain_address(instruction: Instruction, operand: Operand) -> LaneItem:
    """The address of an operand `[a]` in one lane."""
    _check_plain(instruction, operand)
    return address_in_lane(operand)


def _check_plain(instruction: Instruction, operand: Operand) -> None:
    if not isinstance(operand, Address) or operand.coordinates is not None:
        unsupported(instruction, f"expected an address; got {operand}")


def tensor_operand(
    instruction: Instruction, operand: Operand, count: int
) -> tuple[Address, tuple[Operand, ...]]:
    """The map's address and the coordinates of an operand `[map, {c0, ...}]`."""
    if not isinstance(operand, Address) or operand.coordinates is None:
        unsupported(instruction, f"expected a tensor map with coordinates; got {operand}")
    if len(operand.coordinates) != count:
        unsupported(instruction, f"expected {count} coordinates; got {len(operand.coordinates)}")
    return Address(operand.base, operand.offset), tuple(operand.coordinates)


def trailing(
    instruction: Instruction, start: int, present: dict[str, bool]
) -> dict[str, Operand | None]:
    """The optional operands from `start` on, by name, in order; those not `present` are None."""
    left = list(instruction.operands[start:])
    if len(left) != sum(present.values()):
        unsupported(
            instruction,
            f"expected {start + sum(present.values())} operands; got {len(instruction.operands)}",
        )
    return {name: left.pop(0) if here else None for name, here in present.items()}


def issues(mask: Mask, operands: Sequence[Lanes]) -> Iterator[tuple[int, Mask]]:
    """The distinct copies that the lanes of `mask` ask for: a lane of each, and all its lanes.

    Lanes with the same operands issue one copy: stores without elect.sync write the same bytes
    32 times.
    """
    lane = first_lane(mask)
    alike = mask.copy()
    for values in operands:
        alike &= values == values[lane]
    yield lane, alike
    rest = mask & ~alike
    if rest.any():
        yield from issues(rest, operands)


def each_lane(mask: Mask) -> Iterator[tuple[int, Mask]]:
    """Every lane of `mask` by itself: what counts how often it is done is never merged."""
    only = only_lane(mask)
    if only >= 0:
        yield only, mask
        return
    for lane in np.flatnonzero(mask).tolist():
        yield lane, np.equal(LANE_IDS, lane)


def wait(
    warp: Warp, groups: Groups, members: Sequence[Member], lanes: Mask, *, reads_only: bool = False
) -> Blocked | None:
    """Block until `members` have completed, or with `reads_only` have read their sources."""
    if not members:
        return None
    operations = [member.operation for member in members]

    def is_done(operation: AsyncOperation) -> bool:
        return operation.sources_read if reads_only else operation.completed

    def resume() -> None:
        groups.join(members, lanes, reads_only=reads_only)
        observer = warp.cta.machine.observer
        if observer is not None:
            for operation in operations:
                observer.async_joined(warp, operation, reads_only)

    return Blocked(
        lambda: all(map(is_done, operations)),
        lambda: "waits for " + _names(o for o in operations if not is_done(o)),
        resume,
        until=tuple(operation.steps_taken for operation in operations),
    )


def _names(operations: Iterable[AsyncOperation]) -> str:
    return ", ".join(operation.label for operation in operations)
