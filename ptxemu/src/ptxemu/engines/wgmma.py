"""wgmma: products of a warpgroup, one asynchronous operation a warp for its 16 rows of D.

INVARIANT: between issue and the operation's step the registers of D and A are the operation's; the
step reads them and writes D.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from ptxemu import machine_code
from ptxemu.descriptors import WgmmaDescriptor
from ptxemu.descriptors.matrix_layout import CHUNK, Major
from ptxemu.engines.forms import Accumulator, WgmmaForm
from ptxemu.engines.shared_matrix import Placed, address_of_shared, place, read_matrix, report_read
from ptxemu.engines.sparse_metadata import expanded, rows_of_metadata, warn_of_undefined
from ptxemu.events import Fence, FenceKind
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.in_flight import claim, release
from ptxemu.machine.register_file import RegisterLayout
from ptxemu.machine.state import NO_ORDER, AsyncOperation, Cta, Ordering, Warp
from ptxemu.numerics import dot
from ptxemu.syntax.ast import Instruction

# A warp's part of a wgmma in machine code, for the types that it knows.

_K, _PER_CHUNK = 16, 8
_ROWS, _ALL_ROWS, _MOST_COLUMNS = 16, 64, 256
_DOUBLE = 8
_left = np.empty(_ALL_ROWS * _K)
_right = np.empty(_MOST_COLUMNS * _K)
_LEFT, _RIGHT = int(_left.ctypes.data), int(_right.ctypes.data)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Reads and product of one warp of four, wherever its registers and its CTA are.

    Attributes:
        a, b: where the matrices are; `a` is None where A is in registers.
        chunks_of_a: addresses of the numbers of A's chunks, and how many; chunks_of_b: of B's.
        left, right: first element, bytes between rows and between columns, of A's 16 rows, and
            between columns and between rows of B, which has been read.
        d: address of the offsets of D's registers; kept: arrays whose addresses these are.
    """

    a: Placed | None
    b: Placed
    chunks_of_a: tuple[int, int]
    chunks_of_b: tuple[int, int]
    left: tuple[int, int, int]
    right: tuple[int, int, int]
    d: int
    kept: object


def _execute_in_machine_code(
    operation: AsyncOperation, form: WgmmaForm, a: int | None, b: int, accumulate: bool
) -> bool:
    """Read A, B and D and write D; False, and nothing done, where machine code is not to do it.

    Args:
        a, b: descriptors, as their bits; `a` is None where A is in registers.
    """
    warp = operation.issuer
    registers, cta = warp.registers, warp.cta
    if not form.is_plain:
        return False
    code = machine_code.products(cta)
    if code is None:
        return False
    part = _part(registers.layout, form, a, b, warp.index % 4)
    read = code.chunk_reader(form.atype)
    shared = address_of_shared(cta)
    if part.a is None:
        read(registers.address, *part.chunks_of_a, _LEFT)
    else:
        report_read(operation, cta, part.a)
        read(shared + part.a.base, *part.chunks_of_a, _LEFT)
    report_read(operation, cta, part.b)
    code.chunk_reader(form.btype)(shared + part.b.base, *part.chunks_of_b, _RIGHT)
    operation.sources_read = True
    code.fragment_product(_K)(
        *part.left,
        *part.right,
        form.n,
        registers.address,
        part.d,
        accumulate,
        form.negate_a != form.negate_b,
    )
    return True


@lru_cache(maxsize=4096)
def _part(layout: RegisterLayout, form: WgmmaForm, a: int | None, b: int, warp: int) -> _Part:
    """Return the part of warp `warp` of a warpgroup."""
    first = _ROWS * warp
    left, row_bytes, column_bytes = _LEFT, _K * _DOUBLE, _DOUBLE
    placed, chunks = None, _chunks_in_registers(layout, form)
    if a is not None:
        matrix = WgmmaDescriptor.decode(a)
        if form.a_major is Major.K:
            offset = first // 8 * matrix.stride_dimension_byte_offset
            matrix = replace(matrix, start_address=matrix.start_address + offset)
            placed = place(matrix, Major.K, _ROWS, _K // _PER_CHUNK)
        else:
            placed = place(matrix, Major.MN, _K, _ALL_ROWS // _PER_CHUNK)
            left += first * _DOUBLE
            row_bytes, column_bytes = _DOUBLE, _ALL_ROWS * _DOUBLE
        chunks = placed.plan.chunks
    is_k = form.b_major is Major.K
    lines, along = (form.n, _K) if is_k else (_K, form.n)
    right = place(WgmmaDescriptor.decode(b), form.b_major, lines, along // _PER_CHUNK)
    d = layout.byte_offsets(form.d)
    return _Part(
        placed,
        right,
        (int(chunks.ctypes.data), chunks.size),
        (right.plan.address, right.plan.chunks.size),
        (left, row_bytes, column_bytes),
        (_RIGHT, *((_K * _DOUBLE, _DOUBLE) if is_k else (_DOUBLE, form.n * _DOUBLE))),
        int(d.ctypes.data),
        (d, chunks),
    )


def _chunks_in_registers(layout: RegisterLayout, form: WgmmaForm) -> NDArray[np.int64]:
    """Numbers of A's chunks; register 2j + h of A holds chunk j of rows 8h to 8h + 7."""
    a = np.zeros((_ROWS, _K // _PER_CHUNK), np.int64)
    for number, offset in enumerate(layout.byte_offsets(form.a).tolist()):
        half, chunk = number % 2, number // 2
        a[8 * half : 8 * half + 8, chunk] = offset // CHUNK + np.arange(8)
    return a


ROWS = 16
"""Rows of D of one warp."""
WARPS = 4
"""Warps of a warpgroup."""
WARP_SIZE = 32
_FENCE = Fence(FenceKind.WGMMA)
_SIXTEEN = np.uint32(16)
_LOW_HALF = np.uint32(0xFFFF)


@cache
def _overlap(one: Accumulator, other: Accumulator) -> bool:
    return not one.slots.isdisjoint(other.slots)


class WgmmaOperation(AsyncOperation):
    """One warp's part of a product; its registers are those of D and of what it reads."""

    number: int
    """The warp has started so many products before."""
    parts: list[WgmmaOperation]
    """Those of all warps of the warpgroup that have started it, this one included."""


@dataclass(slots=True)
class WgmmaState:
    """A warp's wgmma operations that it has not waited for."""

    uncommitted: list[WgmmaOperation] = field(default_factory=list)
    groups: deque[list[WgmmaOperation]] = field(default_factory=deque)
    """Committed groups, the oldest first."""
    num_issued: int = 0
    latest: dict[Accumulator, WgmmaOperation] = field(default_factory=dict)
    """The last operation on each D: the next one comes after it."""
    num_fenced: int = 0
    """Operations issued before the last wgmma.fence."""


wgmma_state: EngineState[Warp, WgmmaState] = EngineState(lambda warp: WgmmaState())
"""The wgmma state of a warp."""
_started: EngineState[Cta, dict[tuple[int, int], list[WgmmaOperation]]] = EngineState(
    lambda cta: {}
)
"""The products that not all warps of their warpgroup have started: by warpgroup and number."""


def fence(warp: Warp, instruction: Instruction) -> None:
    """wgmma.fence: register accesses before it are ordered before wgmma's."""
    state = wgmma_state(warp)
    state.num_fenced = state.num_issued
    observer = warp.cta.machine.observer
    if observer is not None:
        observer.fenced(warp, _FENCE, instruction)


def issue(
    warp: Warp, instruction: Instruction, form: WgmmaForm, a: int | None, b: int, accumulate: bool
) -> None:
    """Start one product of matrices by their descriptors; `a` is None where A is in registers."""
    machine = warp.cta.machine
    state = wgmma_state(warp)
    before = _before(state, form)
    ordering = Ordering(before) if before else NO_ORDER
    operation = WgmmaOperation("wgmma", warp, instruction, ordering=ordering)
    operation.shape = (64, form.n, form.k)
    operation.registers = (*form.d, *form.sources)
    operation.number = state.num_issued
    operation.parts = _join_warpgroup(operation)
    state.num_issued += 1
    state.latest[form.accumulator] = operation

    def execute() -> None:
        _execute(operation, form, a, b, accumulate)

    operation.steps.append(execute)
    state.uncommitted.append(operation)
    if machine.observer is not None:
        claim(warp, operation, form.d, form.sources)
    machine.issue(operation)


def _before(state: WgmmaState, form: WgmmaForm) -> list[WgmmaOperation]:
    """Return the operations that come before one: those of its shape on its D, and, if a
    wgmma.fence is in between, those of other shapes that have some of its registers."""
    own, fenced = form.accumulator, state.num_fenced
    return [
        operation
        for d, operation in state.latest.items()
        if d is own or (operation.number < fenced and _overlap(d, own))
    ]


def _join_warpgroup(operation: WgmmaOperation) -> list[WgmmaOperation]:
    """The operations that are one product of a warpgroup, this one included; its warps' n-th."""
    warp = operation.issuer
    started = _started(warp.cta)
    key = (warp.index // WARPS, operation.number)
    found = started.setdefault(key, [])
    found.append(operation)
    operation.steps_taken = found[0].steps_taken
    if len(found) == WARPS:
        del started[key]
    return found


def is_complete(operation: WgmmaOperation) -> bool:
    """Whether the product is complete in all warps of the warpgroup: it is one operation of all.

    Once it is, it stays so.

    PTX ISA, "wgmma.mma_async": the four warps execute it together, so that one that has waited for
    it may overwrite what the others' parts read.
    """
    if not all([part.completed for part in operation.parts]):
        return False
    if len(operation.parts) == WARPS:
        return True
    group, number = operation.issuer.index // WARPS, operation.number
    return not any(
        warp.index // WARPS == group and warp.groups and wgmma_state(warp).num_issued <= number
        for warp in operation.cta.warps
    )


def commit(warp: Warp) -> None:
    """wgmma.commit_group: the operations since the last one form a group."""
    state = wgmma_state(warp)
    state.groups.append(state.uncommitted)
    state.uncommitted = []


def oldest_groups(warp: Warp, keep: int) -> list[WgmmaOperation]:
    """The operations of all groups but the `keep` latest."""
    groups = wgmma_state(warp).groups
    return [op for index in range(len(groups) - keep) for op in groups[index]]


def join(warp: Warp, keep: int) -> None:
    """wgmma.wait_group has waited: all groups but the `keep` latest are done."""
    state = wgmma_state(warp)
    observer = warp.cta.machine.observer
    while len(state.groups) > keep:
        for operation in state.groups.popleft():
            release(warp, operation, operation.registers)
            if observer is not None:
                for part in operation.parts:
                    observer.async_joined(warp, part, False)


def _execute(
    operation: AsyncOperation, form: WgmmaForm, a: int | None, b: int, accumulate: bool
) -> None:
    """Read A, B and D, write D."""
    if _execute_in_machine_code(operation, form, a, b, accumulate):
        return
    warp = operation.issuer
    first = ROWS * (warp.index % WARPS)
    if a is None:
        left = _fragment_a(warp, form)
    elif form.a_major is Major.K:
        matrix = WgmmaDescriptor.decode(a)
        start = matrix.start_address + first // 8 * matrix.stride_dimension_byte_offset
        rows = replace(matrix, start_address=start)
        left = read_matrix(operation, warp.cta, rows, Major.K, (ROWS, form.kept), form.atype)
    else:
        matrix = WgmmaDescriptor.decode(a)
        whole = read_matrix(operation, warp.cta, matrix, Major.MN, (64, form.kept), form.atype)
        left = whole[first : first + ROWS]
    if form.metadata is not None:
        words = warp.registers[form.metadata]
        metadata = rows_of_metadata(words, slice(*form.givers), dot.BITS[form.atype])
        warn_of_undefined(warp.cta, operation, operation.instruction, metadata, form.atype)
        left = expanded(left, metadata, form.atype)
    shape = (form.n, form.k)
    matrix = WgmmaDescriptor.decode(b)
    right = read_matrix(operation, warp.cta, matrix, form.b_major, shape, form.btype)
    operation.sources_read = True
    sums = dot.product(left, right)
    if form.negate_a != form.negate_b:
        sums = -sums
    before = _read_d(warp, form) if accumulate else None
    cells = dot.accumulated(before, _fragment_d(sums), form.dtype, saturate=form.saturate)
    if form.dtype == "f16":
        cells = cells[0::2] | cells[1::2] << _SIXTEEN
    warp.registers.set_words(form.d, cells)


def _fragment_d(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """(16, n) as (n / 2, 32): element 4j + 2h + q of lane l is row 8h + l / 4, column
    8j + 2(l % 4) + q (PTX ISA, "Register Fragments for wgmma.mma_async")."""
    n = sums.shape[1]
    parts = sums.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3)
    return np.ascontiguousarray(parts).reshape(n // 2, WARP_SIZE)


def _read_d(warp: Warp, form: WgmmaForm) -> NDArray[np.uint32]:
    """D as 32-bit cells (n / 2, 32); of f16 two lie in a register."""
    words = warp.registers.words(form.d)
    if form.dtype != "f16":
        return words
    return np.stack([words & _LOW_HALF, words >> _SIXTEEN], axis=1).reshape(-1, WARP_SIZE)


def _fragment_a(warp: Warp, form: WgmmaForm) -> NDArray[np.float64]:
    """The warp's 16 rows of A from its four registers: register 2j + h of lane l holds the four
    bytes of row 8h + l / 4 from byte 16j + 4(l % 4) on."""
    words = warp.registers.words(form.a)
    parts = words.view(np.uint8).reshape(2, 2, 8, 4, 4).transpose(1, 2, 0, 3, 4)
    raw = np.ascontiguousarray(parts).reshape(ROWS, 32)
    return dot.numbers(raw, form.atype)
