"""Asynchronous copies of threads (PTX ISA, "Data Movement and Conversion Instructions: Asynchronous
copy": cp.async, cp.async.commit_group, cp.async.wait_group and wait_all; and
"cp.async.mbarrier.arrive")."""

from __future__ import annotations

import numpy as np

from ptxemu.engines.cp_async import ThreadCopies, checked_copies, issue_arrival
from ptxemu.engines.groups import copy_groups
from ptxemu.errors import fault
from ptxemu.isa.copy_operands import wait
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import Mask
from ptxemu.machine.operands import LaneReader, address_reader, reader
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, IntImmediate, NegatedRegister, Operand, Register


@visible("cp.async")
def copy(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[dst] = [src] for cp-size bytes; those beyond src-size, or all with ignore-src, are zero."""
    has_policy = modifiers.flag("L2::cache_hint")
    cache = modifiers.one_of("ca", "cg")
    modifiers.drop_hints()
    modifiers.one_of("shared", "shared::cta")
    modifiers.one_of("global")
    target, source, size_operand, *rest = instruction.operands
    size = _constant(instruction, size_operand)
    if size not in (4, 8, 16) or (cache == "cg" and size != 16):
        unsupported(instruction, f"cp-size {size} with .{cache}")
    if len(rest) - has_policy not in (0, 1):
        unsupported(instruction, "too many operands")
    limit = rest[0] if len(rest) > has_policy else None
    read_target, read_source = address_reader(target), address_reader(source)
    read_counts = None if limit is None else _counts(limit, size)

    def step(warp: Warp, mask: Mask) -> None:
        counts = None if read_counts is None else read_counts(warp)[mask]
        targets, sources = read_target(warp)[mask], read_source(warp)[mask]
        copies = checked_copies(warp.cta, targets, sources, counts, size, instruction)
        operation = ThreadCopies(warp, instruction, copies, size)
        warp.cta.machine.issue(operation)
        copy_groups(warp).add(operation, mask)

    return step


def _counts(limit: Operand, size: int) -> LaneReader:
    """Bytes that each lane reads, from src-size or the predicate ignore-src."""
    is_predicate = isinstance(limit, NegatedRegister) or (
        isinstance(limit, Register) and limit.type == "pred"
    )
    if is_predicate:
        ignored = reader(limit, "pred")
        return lambda warp: np.where(ignored(warp), 0, size)
    read = reader(limit, "u32")
    return lambda warp: read(warp).astype(np.int64)


def _constant(instruction: Instruction, operand: Operand) -> int:
    if not isinstance(operand, IntImmediate):
        unsupported(instruction, f"operand {operand} must be a constant")
    return operand.value


@visible("cp.async.commit_group")
def commit_group(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Make a group of what the thread has issued since its last commit."""

    def step(warp: Warp, mask: Mask) -> None:
        copy_groups(warp).commit(mask)

    return step


@visible("cp.async.wait_group")
def wait_group(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Wait until at most the n latest groups of the thread are incomplete."""
    pending = _constant(instruction, instruction.operands[0])

    def step(warp: Warp, mask: Mask) -> Blocked | None:
        groups = copy_groups(warp)
        return wait(warp, groups, groups.due(mask, pending), mask)

    return step


@visible("cp.async.wait_all")
def wait_all(instruction: Instruction, modifiers: Modifiers) -> Step:
    """commit_group, then wait_group 0."""

    def step(warp: Warp, mask: Mask) -> Blocked | None:
        groups = copy_groups(warp)
        groups.commit(mask)
        return wait(warp, groups, groups.due(mask, 0), mask)

    return step


@visible("cp.async.mbarrier.arrive")
def arrive(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Arrive on the mbarrier when the thread's prior cp.async have completed.

    Without .noinc the current phase waits for one arrival more, so that the count stays balanced.
    """
    counted = modifiers.flag("noinc")
    modifiers.one_of("shared", "shared::cta", default="shared::cta")
    modifiers.one_of("b64")
    read = address_reader(instruction.operands[0])

    def step(warp: Warp, mask: Mask) -> None:
        addresses = read(warp)[mask]
        if ((addresses & 0xFFFF_FFFF) >> 24 != warp.cta.rank).any():
            fault(instruction, "the mbarrier is not in the executing CTA's shared memory")
        issue_arrival(warp, instruction, mask, addresses, counted=counted)

    return step
