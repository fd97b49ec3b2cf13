"""The order of asynchronous tcgen05 operations: pipelined pairs, commits and thread fences.

Operations of one thread are unordered but for the pairs that the ISA names ("Pipelined tcgen05
Instructions"): mma to mma on the same accumulator with the same shape and kind; cp to mma; shift
to mma; mma to shift; shift to cp.4x256b; and mma, cp and shift to commit. `operation.after` makes
the scheduler keep them; `operation.ordering` tells a checker all of them, those included that have
completed since. Between threads a pair is pipelined only if the threads synchronise around
tcgen05.fence::before_thread_sync and ::after_thread_sync: `Ordering.if_synced`.

An mma or cp also comes behind the thread's earlier mma's that read operands from TMEM, which it may
overwrite, and a cp behind earlier cp's. The ISA does not say so, but hardware executes them in
order, and kernels rely on it (attention writes S where the product before reads P; block-scaled
kernels copy new scale factors over those in use): `Ordering.in_practice`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ptxemu.engines.mbarrier import mbarriers
from ptxemu.engines.tmem_allocator import pair
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lanes import WARP_SIZE
from ptxemu.machine.state import AsyncOperation, Cta, Ordering, Warp
from ptxemu.syntax.ast import Instruction

AccumulatorKey: TypeAlias = tuple[int, str, int, int, bool, int]
"""cta_group, kind, m, n, is .ws, address of D."""


@dataclass(slots=True)
class Pipeline:
    """The operations that a later one may be pipelined after: one thread's, or those that threads
    of a CTA have fenced."""

    accumulators: dict[AccumulatorKey, AsyncOperation] = field(default_factory=dict)
    """The last mma on each accumulator."""
    copies: dict[tuple[int, int, str], AsyncOperation] = field(default_factory=dict)
    """The last cp to each destination: (cta_group, address, shape)."""
    shifts: dict[tuple[int, int], AsyncOperation] = field(default_factory=dict)
    """The last shift of each address: (cta_group, address)."""

    def copy(self) -> Pipeline:
        """One of its own that holds the same."""
        return Pipeline(dict(self.accumulators), dict(self.copies), dict(self.shifts))

    def merge(self, other: Pipeline) -> None:
        """Add what another one holds."""
        self.accumulators.update(other.accumulators)
        self.copies.update(other.copies)
        self.shifts.update(other.shifts)

    def before_mma(self, key: AccumulatorKey) -> list[AsyncOperation]:
        """Return the operations that an mma comes after."""
        cta_group = key[0]
        found = [op for copy, op in self.copies.items() if copy[0] == cta_group]
        found += [op for shift, op in self.shifts.items() if shift[0] == cta_group]
        same = self.accumulators.get(key)
        return found if same is None else [*found, same]

    def copies_of(self, cta_group: int) -> list[AsyncOperation]:
        """The last cp to each destination."""
        return [op for key, op in self.copies.items() if key[0] == cta_group]

    def before_copy(self, cta_group: int, shape: str) -> list[AsyncOperation]:
        """Return the operations that a cp comes after."""
        if shape != "4x256b":
            return []
        return [op for key, op in self.shifts.items() if key[0] == cta_group]

    def before_shift(self, cta_group: int) -> list[AsyncOperation]:
        """Return the operations that a shift comes after."""
        return [op for key, op in self.accumulators.items() if key[0] == cta_group]


@dataclass(slots=True)
class ThreadState:
    """The tcgen05 operations of one thread."""

    imported: Pipeline
    """Operations of other threads, seen by tcgen05.fence::after_thread_sync; that of the warp's
    threads as long as they have fenced together."""
    own: Pipeline = field(default_factory=Pipeline)
    uncompleted: list[AsyncOperation] = field(default_factory=list)
    since_commit: list[AsyncOperation] = field(default_factory=list)
    last_commit: AsyncOperation | None = None
    tmem_readers: dict[tuple[int, int], AsyncOperation] = field(default_factory=dict)
    """The last mma that read an operand at an address of TMEM: (cta_group, address)."""

    def readers(self, cta_group: int) -> list[AsyncOperation]:
        """Return the operations whose operands an mma or cp may overwrite; it comes after them."""
        found = (op for key, op in self.tmem_readers.items() if key[0] == cta_group)
        return list(dict.fromkeys(found))


@dataclass(slots=True)
class _Threads:
    """The threads of a warp: by lane the state of those that have one."""

    states: dict[int, ThreadState] = field(default_factory=dict)
    imported: Pipeline = field(default_factory=Pipeline)
    """Operations that all threads have imported together."""


_threads: EngineState[Warp, _Threads] = EngineState(lambda warp: _Threads())
_fenced: EngineState[Cta, Pipeline] = EngineState(lambda cta: Pipeline())
"""Operations that threads of a CTA pair fenced with before_thread_sync; the even CTA has them."""


def thread_state(warp: Warp, lane: int) -> ThreadState:
    """The state of a thread."""
    threads = _threads(warp)
    found = threads.states.get(lane)
    if found is None:
        found = threads.states[lane] = ThreadState(threads.imported)
    return found


def fenced_pipeline(cta: Cta) -> Pipeline:
    """Return what threads of the CTA, or of its pair, have fenced with before_thread_sync."""
    return _fenced(cta.cluster.ctas[cta.rank & ~1])


def fence_before(warp: Warp, lanes: Iterable[int]) -> None:
    """tcgen05.fence::before_thread_sync by the threads `lanes`."""
    states = _threads(warp).states
    for lane in lanes:
        if lane in states:
            fenced_pipeline(warp.cta).merge(states[lane].own)


def fence_after(warp: Warp, lanes: Sequence[int]) -> None:
    """tcgen05.fence::after_thread_sync by the threads `lanes`."""
    fenced = fenced_pipeline(warp.cta)
    if not (fenced.accumulators or fenced.copies or fenced.shifts):
        return
    threads = _threads(warp)
    if len(lanes) == WARP_SIZE:
        threads.imported.merge(fenced)
        lanes = [n for n, state in threads.states.items() if state.imported is not threads.imported]
    for lane in lanes:
        state = thread_state(warp, lane)
        if state.imported is threads.imported:
            state.imported = state.imported.copy()
        state.imported.merge(fenced)


def start(
    kind: str,
    warp: Warp,
    lane: int,
    instruction: Instruction,
    own: list[AsyncOperation],
    imported: list[AsyncOperation],
    in_practice: Iterable[AsyncOperation] = (),
) -> AsyncOperation:
    """A new mma, cp or shift of a thread, pipelined after `own` and `imported`; not yet issued."""
    state = thread_state(warp, lane)
    imported = [op for op in imported if op not in own]
    ordering = Ordering(own, imported, [op for op in in_practice if op not in own])
    operation = AsyncOperation(kind, warp, instruction, ordering=ordering)
    state.uncompleted = [op for op in state.uncompleted if not op.completed]
    state.uncompleted.append(operation)
    state.since_commit.append(operation)
    return operation


def start_mma(
    warp: Warp,
    lane: int,
    instruction: Instruction,
    key: AccumulatorKey,
    tmem_operands: Iterable[int] = (),
) -> AsyncOperation:
    """A tcgen05.mma, ordered after what the ISA pipelines.

    Args:
        tmem_operands: addresses of A and of scale factors in TMEM.
    """
    state = thread_state(warp, lane)
    operation = start(
        "tcgen05.mma",
        warp,
        lane,
        instruction,
        state.own.before_mma(key),
        state.imported.before_mma(key),
        state.readers(key[0]),
    )
    for address in tmem_operands:
        state.tmem_readers[key[0], address] = operation
    state.own.accumulators[key] = operation
    return operation


def start_copy(
    warp: Warp, lane: int, instruction: Instruction, cta_group: int, address: int, shape: str
) -> AsyncOperation:
    """A tcgen05.cp, ordered after what the ISA pipelines."""
    state = thread_state(warp, lane)
    operation = start(
        "tcgen05.cp",
        warp,
        lane,
        instruction,
        state.own.before_copy(cta_group, shape),
        state.imported.before_copy(cta_group, shape),
        [*state.readers(cta_group), *state.own.copies_of(cta_group)],
    )
    state.own.copies[cta_group, address, shape] = operation
    return operation


def start_shift(
    warp: Warp, lane: int, instruction: Instruction, cta_group: int, address: int
) -> AsyncOperation:
    """A tcgen05.shift, ordered after what the ISA pipelines."""
    state = thread_state(warp, lane)
    operation = start(
        "tcgen05.shift",
        warp,
        lane,
        instruction,
        state.own.before_shift(cta_group),
        state.imported.before_shift(cta_group),
    )
    state.own.shifts[cta_group, address] = operation
    return operation


def commit(warp: Warp, lane: int, instruction: Instruction, targets: list[tuple[Cta, int]]) -> None:
    """tcgen05.commit: arrive on the mbarriers when the thread's operations have completed.

    Args:
        targets: CTA and offset of each mbarrier.
    """
    state = thread_state(warp, lane)
    tracked = list(state.since_commit)
    if state.last_commit is not None:  # its past is part of this one's
        tracked.append(state.last_commit)
    operation = AsyncOperation(
        "tcgen05.commit", warp, instruction, ordering=Ordering(tracked), after=state.uncompleted
    )
    operation.mbarriers = tuple((cta.index, offset) for cta, offset in targets)
    state.since_commit = []
    state.last_commit = operation

    def arrive() -> None:
        for cta, offset in targets:
            mbarriers(cta).arrive(operation, offset, scope="cluster")

    operation.steps.append(arrive)
    warp.cta.machine.issue(operation)


def ctas_of(cta: Cta, cta_group: int, instruction: Instruction, warp: Warp) -> list[Cta]:
    """The CTAs that an operation of `.cta_group` acts on, the even one first."""
    if cta_group == 1:
        return [cta]
    ctas = pair(cta)
    for peer in ctas:
        if peer.exited:
            message = f"{instruction.opcode} while cta {peer.ctaid} of the pair has exited"
            cta.machine.complain("error", "exited-cta", message, warp, instruction)
    return ctas
