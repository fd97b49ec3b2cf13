"""Work and data of other CTAs (PTX ISA, "Parallel Synchronization and Communication Instructions:
clusterlaunchcontrol, red.async", "Data Movement and Conversion Instructions: st.async").

A response of try_cancel is opaque to programs: three words are the first CTA's ctaid, the fourth
tells success from failure.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ptxemu.engines.mbarrier import mbarriers
from ptxemu.errors import fault
from ptxemu.events import AccessKind, Proxy, Space
from ptxemu.isa.copy_operands import COMPLETE_TX
from ptxemu.isa.memory_operands import Values, source, take_order, take_shape, take_space
from ptxemu.isa.registry import Modifiers, pure, unsupported, visible
from ptxemu.machine.decoded import PureOp, Step
from ptxemu.machine.grid import cancel_cluster
from ptxemu.machine.lane_memory import LaneMemory
from ptxemu.machine.lanes import FULL, Lanes, Mask
from ptxemu.machine.operands import address_reader
from ptxemu.machine.regions import locate_shared, report
from ptxemu.machine.state import AsyncOperation, Cta, Warp
from ptxemu.memory.address import SHARED_OFFSET_MASK, SHARED_RANK_SHIFT
from ptxemu.numerics import atomic
from ptxemu.syntax.ast import Instruction, Register, Sink, Vector

_RESPONSE_BYTES = 16
_NAMES = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_SUCCESS, _FAILURE = 0xC1A1_0001, 0xC1A1_0000


@visible("clusterlaunchcontrol.try_cancel")
def try_cancel(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Ask for the work of a cluster that has not started; 16 bytes and 16 tx come back later."""
    modifiers.one_of("async")
    modifiers.one_of("shared::cta", default="shared::cta")
    modifiers.one_of("mbarrier::complete_tx::bytes")
    multicast = modifiers.flag("multicast::cluster::all")
    modifiers.one_of("b128")
    read_response, read_barrier = (address_reader(operand) for operand in instruction.operands)

    def step(warp: Warp, mask: Mask) -> None:
        responses, barriers = read_response(warp), read_barrier(warp)
        for lane in np.flatnonzero(mask).tolist():
            response, barrier = int(responses[lane]), int(barriers[lane])
            _, offset = locate_shared(warp.cta, response, _RESPONSE_BYTES, instruction)
            _, barrier_offset = locate_shared(warp.cta, barrier, 8, instruction)
            if offset % _RESPONSE_BYTES:
                fault(
                    instruction,
                    f"{warp.label}: response at "
                    f"0x{offset:x}: expected {_RESPONSE_BYTES}-byte alignment",
                )
            receivers = warp.cta.cluster.ctas if multicast else [warp.cta]
            _cancel(warp, instruction, receivers, offset, barrier_offset)

    return step


def _cancel(
    warp: Warp, instruction: Instruction, receivers: list[Cta], offset: int, barrier: int
) -> None:
    machine = warp.cta.machine
    operation = AsyncOperation("clusterlaunchcontrol.try_cancel", warp, instruction)

    def answer() -> None:
        first = cancel_cluster(machine)
        words = (*first, _SUCCESS) if first is not None else (0, 0, 0, _FAILURE)
        data = np.array(words, dtype=np.uint32).view(np.uint8)
        for cta in receivers:
            cta.shared[offset : offset + _RESPONSE_BYTES] = data
            written, proxy = AccessKind.WRITE, Proxy.ASYNC
            report(operation, cta, offset, _RESPONSE_BYTES, written, proxy=proxy)

    def signal(cta: Cta) -> Callable[[], None]:
        return lambda: mbarriers(cta).complete_tx(operation, barrier, _RESPONSE_BYTES)

    operation.steps.append(answer)
    operation.steps.extend(signal(cta) for cta in receivers)
    machine.issue(operation)


def _is_canceled(response: Lanes) -> Lanes:
    result: Lanes = response[:, 1] >> np.uint64(32) == np.uint64(_SUCCESS)
    return result


def _coordinate(axis: int) -> Callable[[Lanes], Lanes]:
    half, shift = divmod(axis, 2)

    def word(response: Lanes) -> Lanes:
        words: Lanes = (response[:, half] >> np.uint64(32 * shift)).astype(np.uint32)
        return words

    return word


def _all_coordinates(response: Lanes) -> tuple[Lanes, ...]:
    return (*(_coordinate(axis)(response) for axis in range(3)), np.zeros(32, dtype=np.uint32))


@pure("clusterlaunchcontrol.query_cancel")
def query_cancel(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """Read a response: whether a cluster was cancelled, and the ctaid of its first CTA."""
    wanted = modifiers.one_of(
        "is_canceled",
        "get_first_ctaid::x",
        "get_first_ctaid::y",
        "get_first_ctaid::z",
        "get_first_ctaid",
    )
    destination, response = instruction.operands
    if not isinstance(response, Register):
        unsupported(instruction, "expected a register")
    if wanted == "get_first_ctaid":
        modifiers.expect("v4", "b32", "b128")
        if not isinstance(destination, Vector):
            unsupported(instruction, "expected a vector")
        return PureOp(_all_coordinates, ("b32",) * 4, ("b128",), destination.elements, (response,))
    modifiers.one_of("pred" if wanted == "is_canceled" else "b32")
    modifiers.one_of("b128")
    if not isinstance(destination, Register | Sink):
        unsupported(instruction, "expected a register")
    if wanted == "is_canceled":
        return PureOp(_is_canceled, ("pred",), ("b128",), (destination,), (response,))
    function = _coordinate("xyz".index(wanted[-1]))
    return PureOp(function, ("b32",), ("b128",), (destination,), (response,))


@visible("st.async")
def store_async(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[a] = b in another CTA's shared memory some time later, then complete-tx on its mbarrier.

    "st.async is performed in the generic proxy", says its section, and so does red.async's.

    Without an mbarrier (sm_100) to global memory, which is done here as a store at once: any
    later time would need a way to wait for it, and there is none.
    """
    if COMPLETE_TX not in instruction.modifiers:
        return _to_global(instruction, modifiers, None)
    modifiers.flag("weak")
    return _remote(instruction, modifiers, None)


@visible("red.async")
def reduce_async(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[a] = [a] op b in another CTA's shared memory some time later, then complete-tx."""
    if COMPLETE_TX not in instruction.modifiers:
        return _to_global(instruction, modifiers, modifiers.one_of(*_NAMES))
    modifiers.flag("relaxed")
    modifiers.flag("cluster")
    name = modifiers.one_of(*_NAMES)
    return _remote(instruction, modifiers, name)


def _to_global(instruction: Instruction, modifiers: Modifiers, name: str | None) -> Step:
    """The forms without mbarrier, whose order is .release."""
    space = take_space(modifiers)
    is_mmio = modifiers.flag("mmio")
    order = take_order(modifiers, ("release", "sys" if is_mmio else "gpu"))
    type_, shape = take_shape(modifiers, instruction)
    target, value = instruction.operands
    if space not in ("global", "generic"):
        unsupported(instruction, "without an mbarrier the destination is in global memory")
    memory = LaneMemory(instruction, target, space, shape.element, shape.count, order=order)
    read = source(value, type_, shape)
    function = None if name is None else atomic.operation_in_global(name, type_)
    if name is not None and function is None:
        unsupported(instruction, f"there is no .{name} for .{type_}")

    def step(warp: Warp, mask: Mask) -> None:
        values = read(warp, mask)
        if function is None:
            memory.store(warp, mask, values)
            return

        def combine(old: Values, lanes: NDArray[np.intp], where: Space) -> Values:
            assert function is not None
            return function(old, np.ascontiguousarray(values[..., lanes]))

        memory.update(warp, mask, combine)

    return step


def _remote(instruction: Instruction, modifiers: Modifiers, name: str | None) -> Step:
    modifiers.one_of("shared::cluster", default="generic")
    modifiers.one_of(COMPLETE_TX)
    type_, shape = take_shape(modifiers, instruction)
    function = None if name is None else atomic.operation(name, type_)
    if name is not None and function is None:
        unsupported(instruction, f"there is no .{name} for .{type_}")
    target, value, barrier = instruction.operands
    read_target, read_barrier = address_reader(target), address_reader(barrier)
    read = source(value, type_, shape)
    size = shape.element * shape.count

    def step(warp: Warp, mask: Mask) -> None:
        targets, bars = read_target(warp), read_barrier(warp)
        if mask is not FULL:
            targets, bars = targets[mask], bars[mask]
        values = read(warp, mask)
        words_of_lanes = values[:, None] if values.ndim == 1 else values.T
        operation = AsyncOperation(".".join(instruction.modifiers[:2]), warp, instruction)
        for numbers in _at_once(targets, bars, is_reduction=function is not None):
            addresses = targets[numbers]  # in one CTA: where the last one lies, all do
            cta, _ = locate_shared(warp.cta, max(addresses.tolist()), size, instruction)
            offsets = addresses & SHARED_OFFSET_MASK
            owner, bar = locate_shared(warp.cta, int(bars[numbers][0]), 8, instruction)
            if int(np.bitwise_or.reduce(offsets)) & (size - 1) or owner is not cta:
                misaligned = offsets % size != 0
                fault(
                    instruction,
                    f"{warp.label}: "
                    f"0x{int(addresses[misaligned.argmax()]):x}: "
                    + ("misaligned" if misaligned.any() else "the mbarrier is in another CTA"),
                )
            words = np.ascontiguousarray(words_of_lanes[numbers])
            operation.steps.append(_late_write(operation, cta, offsets, words, function))
            operation.steps.append(_late_signal(operation, cta, bar, size, len(addresses)))
        operation.sources_read = True
        warp.cta.machine.issue(operation)

    return step


def _at_once(
    targets: NDArray[np.int64], barriers: NDArray[np.int64], *, is_reduction: bool
) -> list[NDArray[np.intp] | slice]:
    """The numbers of the lanes whose words arrive in one step: those with one mbarrier.

    Of a reduction each is by itself, for two may be of one word.
    """
    numbers = np.arange(len(targets))
    if is_reduction:
        return list(numbers[:, None])
    ranks = targets >> SHARED_RANK_SHIFT
    if len(set(barriers.tolist())) == len(set(ranks.tolist())) == 1:
        return [slice(None)]
    keys = np.stack([barriers, ranks])
    _, firsts, which = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    which = which.reshape(-1)
    return [numbers[which == which[first]] for first in np.sort(firsts).tolist()]


def _late_write(
    operation: AsyncOperation,
    cta: Cta,
    offsets: NDArray[np.int64],
    words: Values,
    function: atomic.Operation | None,
) -> Callable[[], None]:
    """Args: words: (lanes, words of each), for the places at `offsets`; with a function one lane.

    Of equal offsets the last lane's words stay.
    """
    size = words.shape[1] * words.itemsize

    def write() -> None:
        whole = len(cta.shared) // size * size
        rows = cta.shared[:whole].view(words.dtype).reshape(-1, words.shape[1])
        places = offsets // size
        rows[places] = words if function is None else function(rows[places[0]], words[0])
        kind = AccessKind.WRITE if function is None else AccessKind.ATOMIC
        report(operation, cta, offsets, size, kind)

    return write


def _late_signal(
    operation: AsyncOperation, cta: Cta, barrier: int, size: int, count: int
) -> Callable[[], None]:
    """complete_tx of `size` bytes `count` times: what completes a phase between counts in it."""

    def signal() -> None:
        target = mbarriers(cta)
        if target.at(barrier).tx_count in range(size, size * count):
            for _ in range(count):
                target.complete_tx(operation, barrier, size)
        else:
            target.complete_tx(operation, barrier, size * count)

    return signal
