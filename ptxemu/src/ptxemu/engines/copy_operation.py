"""Copies of the async proxy as asynchronous operations: read the source, then write and signal.

A copy has a source and a target, each a range or a tile of shared or global memory. Its two steps
are taken when the scheduler likes, so that a source overwritten too early, or a target read too
early, gives wrong data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ptxemu.engines.mbarrier import mbarriers
from ptxemu.errors import ExecutionError, fault
from ptxemu.events import Access, AccessKind, Proxy, Space
from ptxemu.machine.regions import locate_shared
from ptxemu.machine.state import AsyncOperation, Cta, Warp
from ptxemu.numerics import atomic
from ptxemu.numerics.dtypes import U1, Array
from ptxemu.syntax.ast import Instruction

# Reductions that copies perform: memory's elements combined with those that arrive.
#
# What NaN, zeros and subnormals do was recorded on an H200 (`tests/engines/copies.npz`).

Combine = Callable[[Array, Array], Array]
"""New bytes from the bytes in memory and those that arrive; arrays of any shape, contiguous."""

_EXTREMES = ("u32", "s32", "u64", "s64", "f16", "bf16")
_TYPES = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f32.ftz", "f64"),
    **dict.fromkeys(("min", "max"), _EXTREMES),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64", "u32", "s32", "u64")),
}
"""Types that an operation is of."""


def reduction(operation: str, type_: str) -> Combine | None:
    """Return the operation on bytes that are elements of `type_`; None if hardware lacks it.

    Args:
        operation: add, min, max, inc, dec, and, or, xor.
        type_: u32, s32, u64, s64, b32, b64, f16, bf16, f32, f32.ftz, f64 (and tf32 as f32).
    """
    type_ = type_.replace("tf32", "f32")
    if type_ not in _TYPES[operation]:
        return None
    element = f"b{type_[1:]}" if operation in ("and", "or", "xor") else type_.removesuffix(".ftz")
    is_exact = type_ == "f32"  # an atomic addition to global memory flushes subnormals
    find = atomic.operation if is_exact else atomic.operation_in_global
    function, word = find(operation, element), atomic.WORDS[element]
    assert function is not None

    def combine(held: Array, arriving: Array) -> Array:
        return function(held.view(word), arriving.view(word)).view(U1)

    return combine


# Copies: source, target, steps.

Bytes = NDArray[np.uint8]

ATOMIC_ORDERS = {Space.GLOBAL: ("relaxed", "gpu"), Space.SHARED: ("relaxed", "cluster")}
"""Order and scope of each element's update by a reduction."""
_WEAK = ("weak", "")


class Place(Protocol):
    """Bytes that a copy reads or writes, in an order of their own."""

    def read(self, operation: AsyncOperation) -> Bytes:
        """The bytes, as an array of its own."""
        ...

    def write(self, operation: AsyncOperation, data: Bytes) -> None:
        """Replace the bytes."""
        ...

    def update(self, operation: AsyncOperation, data: Bytes, combine: Combine) -> None:
        """Replace the bytes by what `combine` makes of them and of `data`."""
        ...


@dataclass(frozen=True, slots=True)
class Signal:
    """complete_tx of `count` bytes on the mbarrier at `offset` of a CTA's shared memory."""

    cta: Cta
    offset: int
    count: int

    def send(self, operation: AsyncOperation) -> None:
        """The operation has delivered its bytes."""
        mbarriers(self.cta).complete_tx(operation, self.offset, self.count)


def issue_copy(
    warp: Warp,
    instruction: Instruction,
    kind: str,
    source: Place,
    target: Place,
    *,
    combine: Combine | None = None,
    signal: Signal | None = None,
) -> AsyncOperation:
    """Start a copy, or with `combine` a reduction."""
    operation = AsyncOperation(kind, warp, instruction)
    data: list[Bytes] = []

    def read() -> None:
        data.append(source.read(operation))
        operation.sources_read = True

    def write() -> None:
        if combine is None:
            target.write(operation, data.pop())
        else:
            target.update(operation, data.pop(), combine)
        if signal is not None:
            signal.send(operation)

    operation.steps.append(_named(operation, read))
    operation.steps.append(_named(operation, write))
    warp.cta.machine.issue(operation)
    return operation


def _named(operation: AsyncOperation, step: Callable[[], None]) -> Callable[[], None]:
    """The step, whose errors say which operation of which instruction it was."""

    def take() -> None:
        try:
            step()
        except ExecutionError as error:
            span = operation.instruction.span
            raise ExecutionError(f"{span}: {operation.label}: {error}") from None

    return take


def report_async(
    operation: AsyncOperation,
    owner: Cta | None,
    starts: int | NDArray[np.int64],
    size: int,
    kind: AccessKind,
    *,
    is_silent: bool = False,
    element: str = "",
) -> None:
    """Tell the observer of an access by an operation through the async proxy; see `report`."""
    machine = operation.cta.machine
    if isinstance(starts, int):
        starts = np.array([starts])
    if machine.observer is None or not size or not len(starts):
        return
    if owner is not None and owner.exited:
        message = f"{operation.label}: shared memory of cta {owner.ctaid}, which has exited"
        machine.complain("error", "exited-cta", message, operation, operation.instruction)
    if owner is not None and kind is not AccessKind.READ:
        offset = mbarriers(owner).overlapping(starts, size)
        if offset is not None:
            machine.complain(
                "error",
                "mbarrier-overwritten",
                f"{operation.label} writes into the mbarrier at shared 0x{offset:x} of cta "
                f"{owner.ctaid}, which mbarrier.inval has not given back",
                operation,
                operation.instruction,
            )
    space, index = (Space.GLOBAL, None) if owner is None else (Space.SHARED, owner.index)
    order = ATOMIC_ORDERS[space] if kind is AccessKind.ATOMIC else _WEAK
    what = (operation, space, index, starts, size, kind, Proxy.ASYNC, operation.instruction)
    machine.observer.accessed(Access(*what, *order, is_silent, element=element))


def holds(operation: AsyncOperation, held: Bytes, data: Bytes) -> bool:
    """Whether `held`, which `data` is to replace, is the same; False if nobody wants to know."""
    return operation.cta.machine.observer is not None and np.array_equal(held, data)


class SharedRange(NamedTuple):
    """`size` bytes of a CTA's shared memory."""

    cta: Cta
    offset: int
    size: int

    @property
    def _bytes(self) -> Bytes:
        return self.cta.shared[self.offset : self.offset + self.size]

    def read(self, operation: AsyncOperation) -> Bytes:
        """The bytes, as an array of its own."""
        report_async(operation, self.cta, self.offset, self.size, AccessKind.READ)
        return self._bytes.copy()

    def write(self, operation: AsyncOperation, data: Bytes) -> None:
        """Replace the bytes."""
        is_silent = holds(operation, self._bytes, data)
        self._bytes[:] = data
        report_async(
            operation, self.cta, self.offset, self.size, AccessKind.WRITE, is_silent=is_silent
        )

    def update(self, operation: AsyncOperation, data: Bytes, combine: Combine) -> None:
        """Replace the bytes by what `combine` makes of them and of `data`."""
        self._bytes[:] = combine(self._bytes.copy(), data)
        report_async(operation, self.cta, self.offset, self.size, AccessKind.ATOMIC)


class GlobalRange(NamedTuple):
    """`size` bytes of global memory; with `byte_mask` only some of every 16 are written."""

    address: int
    size: int
    byte_mask: NDArray[np.bool_] | None = None

    def read(self, operation: AsyncOperation) -> Bytes:
        """The bytes, as an array of its own."""
        data = readable(operation, self.address, self.size).copy()
        report_async(operation, None, self.address, self.size, AccessKind.READ)
        return data

    def write(self, operation: AsyncOperation, data: Bytes) -> None:
        """Replace the bytes."""
        held = writable(operation, self.address, self.size)
        if self.byte_mask is None:
            is_silent = holds(operation, held, data)
            held[:] = data
            report_async(
                operation, None, self.address, self.size, AccessKind.WRITE, is_silent=is_silent
            )
            return
        chosen = np.tile(self.byte_mask, self.size // len(self.byte_mask))
        held[chosen] = data[chosen]
        starts = self.address + np.flatnonzero(chosen)
        report_async(operation, None, starts, 1, AccessKind.WRITE)

    def update(self, operation: AsyncOperation, data: Bytes, combine: Combine) -> None:
        """Replace the bytes by what `combine` makes of them and of `data`."""
        held = writable(operation, self.address, self.size)
        held[:] = combine(held.copy(), data)
        report_async(operation, None, self.address, self.size, AccessKind.ATOMIC)


def readable(operation: AsyncOperation, address: int, size: int) -> Bytes:
    """Bytes of global memory to read.

    Raises:
        ExecutionError: they are outside every allocation.
    """
    return operation.cta.machine.memory.span(address, size)


def writable(operation: AsyncOperation, address: int, size: int) -> Bytes:
    """Bytes of global memory to write to.

    Raises:
        ExecutionError: they are outside every allocation, or read-only.
    """
    memory = operation.cta.machine.memory
    found = memory.find(address, size)
    if found is not None and not found.writable:
        raise ExecutionError(f"write to read-only memory {found.name}")
    operation.cta.machine.progress += 1
    return memory.span(address, size)


# Bulk copies: where they may read and write, and whom they signal.

UNIT = 16
"""Bulk copies move multiples of this many bytes between multiples of it."""
LOW_WORD = 0xFFFF_FFFF


def check_unit(instruction: Instruction, what: str, value: int) -> None:
    """Refuse an address or a size that is no multiple of 16."""
    if value % UNIT:
        kind = "is not a multiple of" if what == "size" else "is not aligned to"
        shown = str(value) if what == "size" else f"0x{value:x}"
        fault(instruction, f"{what} {shown} {kind} {UNIT} bytes (CUDA_ERROR_MISALIGNED_ADDRESS)")


def shared_place(
    cta: Cta, address: int, size: int, instruction: Instruction, *, own: bool
) -> tuple[Cta, int]:
    """The CTA and the offset that a shared address names.

    Args:
        own: the operand is of shared::cta, so another CTA's address is an error.
    """
    owner, offset = locate_shared(cta, address & LOW_WORD, size, instruction)
    if own and owner is not cta:
        fault(
            instruction,
            f"shared::cta address 0x{address & LOW_WORD:x} is that of cta {owner.ctaid}, not of "
            f"the executing cta {cta.ctaid}",
        )
    return owner, offset


def destinations(cta: Cta, owner: Cta, cta_mask: int | None, instruction: Instruction) -> list[Cta]:
    """The CTAs that a copy writes to: `owner`, or with .multicast::cluster those of the mask.

    An empty mask is none; one of CTAs that the cluster does not have traps (both on an H200).
    """
    if cta_mask is None:
        return [owner]
    ctas = cta.cluster.ctas
    if cta_mask >> len(ctas):
        fault(instruction, f"CTA mask 0x{cta_mask:x} for a cluster of {len(ctas)} CTAs")
    return [c for c in ctas if cta_mask >> c.rank & 1]


def signal_of(
    destination: Cta,
    barrier: tuple[Cta, int],
    count: int,
    instruction: Instruction,
    *,
    multicast: bool,
    cta_group: int,
) -> Signal:
    """The mbarrier that a copy into `destination` completes `count` bytes on.

    With multicast each destination's own, at the same offset. The mbarrier must be in the
    destination's CTA, or with .cta_group::2 in its pair: then the parity of the rank that the
    address names chooses the CTA of the pair.
    """
    owner, offset = barrier
    if not multicast:
        apart = owner.rank ^ destination.rank
        if apart > (1 if cta_group == 2 else 0):
            fault(
                instruction,
                f"the mbarrier is in cta {owner.ctaid}, the destination in cta "
                f"{destination.ctaid}: "
                + ("not of its pair" if cta_group == 2 else "not the same"),
            )
        return Signal(owner, offset, count)
    if cta_group == 2:
        rank = destination.rank & ~1 | owner.rank & 1
        return Signal(destination.cluster.ctas[rank], offset, count)
    return Signal(destination, offset, count)
