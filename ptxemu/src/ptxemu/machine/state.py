"""A launch in progress: its machine, clusters, CTAs, warps and asynchronous operations.

They know one another; `grid`, `warp` and the engines start and run them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ptxemu.events import Agent, Observer, Space
from ptxemu.machine import lanes
from ptxemu.machine.device import Device
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lane_group import Group, LanesApart, Sleepers
from ptxemu.machine.layout import Layout
from ptxemu.machine.register_file import RegisterFile, RegisterLayout
from ptxemu.memory.address import SHARED_BASE, SHARED_RANK_SHIFT
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.memory.words import Words
from ptxemu.syntax.ast import Function, Guard, Instruction

# The shape and the parameters of a launch.


@dataclass(frozen=True, slots=True)
class Launch:
    """The shape of a launch; `cluster` divides `grid`."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    parameters: bytes
    explicit_cluster: bool = False

    @property
    def clusters(self) -> tuple[int, int, int]:
        """Clusters along each axis."""
        gx, gy, gz = self.grid
        cx, cy, cz = self.cluster
        return gx // cx, gy // cy, gz // cz


# The asynchronous operations that have not completed, and which of them may take a step now.


class Ordered(Protocol):
    """An operation that others may have to complete before."""

    agent_id: int
    completed: bool
    after: list[Any]
    """Operations that complete before it may take a step."""


OperationT = TypeVar("OperationT", bound=Ordered)


class PendingOperations(Generic[OperationT]):
    """Operations in order of issue."""

    def __init__(self) -> None:
        self.ready: list[OperationT] = []
        """Those that wait for no other operation, in order of issue."""
        self._ids: list[int] = []
        """Their agent ids, which grow."""
        self._count = 0
        self._behind: dict[OperationT, list[OperationT]] = {}
        """Operations that wait for an operation, and perhaps for others, by that operation."""

    def __len__(self) -> int:
        return self._count

    def add(self, operation: OperationT) -> None:
        """An operation was issued; it is the last."""
        self._count += 1
        if operation.after:
            operation.after = [other for other in operation.after if not other.completed]
        for other in operation.after:
            self._behind.setdefault(other, []).append(operation)
        if not operation.after:
            self.ready.append(operation)
            self._ids.append(operation.agent_id)

    def keep(self, is_kept: Callable[[OperationT], bool]) -> None:
        """Forget the others, for which none of these waits."""
        self.ready = [operation for operation in self.ready if is_kept(operation)]
        self._ids = [operation.agent_id for operation in self.ready]
        behind = {op: followers for op, followers in self._behind.items() if is_kept(op)}
        self._behind = behind
        waiting = {follower for followers in behind.values() for follower in followers}
        self._count = len(self.ready) + len(waiting)

    def remove(self, operation: OperationT) -> None:
        """An operation that was ready has completed."""
        self._count -= 1
        place = bisect_left(self._ids, operation.agent_id)
        del self.ready[place], self._ids[place]
        for follower in self._behind.pop(operation, ()):
            follower.after.remove(operation)
            if not follower.after:
                place = bisect_left(self._ids, follower.agent_id)
                self.ready.insert(place, follower)
                self._ids.insert(place, follower.agent_id)


LOOP_ROUNDS = 64
"""Rounds of a loop of pure instructions after which other warps have their turn."""
PATIENCE = 256
"""Times that lanes go round a loop, nothing changing, before the other lanes of the warp run."""
WORD_BYTES = 4
TMEM_LANES = 128
TMEM_COLUMNS = 512
_ALIGNMENT = 256


class Kernel(Protocol):
    """The decoded instructions that warps execute: a `machine.program.Program`."""

    function: Function
    nodes: list[Any]
    layout: RegisterLayout
    plain: tuple[set[int], set[int]]
    """Pcs where no chain begins: of those that nobody hears, and of those that are heard."""

    def chain(self, first: int, *, is_heard: bool) -> Any:
        """Give the `machine.program.Chain` that begins at a pc, or None."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """One run of bytes and whose it is."""

    words: Words
    space: Space
    owner: Cta | None
    """The CTA of shared memory."""
    origin: int
    """Difference between an address and the one that observers see (`events.Access.starts`)."""
    is_writable: bool = True

    @property
    def is_observed(self) -> bool:
        """Whether accesses are reported: other agents can reach the bytes and change them."""
        return self.space in (Space.GLOBAL, Space.SHARED)


class Ordering(NamedTuple):
    """Operations that come before an operation, including those that have completed since.

    A checker takes its verdicts from it: the issue orders no operation outside the three.
    """

    after: Sequence[AsyncOperation] = ()
    """Operations after which the ISA executes it."""
    if_synced: Sequence[AsyncOperation] = ()
    """More of these, if the issuing threads have synchronised around tcgen05.fence."""
    in_practice: Sequence[AsyncOperation] = ()
    """Operations after which hardware executes it, though the ISA does not say so."""


NO_ORDER = Ordering()


class AsyncOperation:
    """One copy, reduction, matrix product or commit that runs beside the warps.

    Its `steps` are taken in order, each at a moment of the scheduler's choice, none before every
    operation in `after` has completed (pipelined tcgen05 instructions). Typical steps: read the
    source and write the destination; then signal an mbarrier. `sources_read` turns true when the
    step that reads the sources is done, `completed` after the last.
    """

    def __init__(
        self,
        kind: str,
        issuer: Warp,
        instruction: Instruction,
        *,
        ordering: Ordering = NO_ORDER,
        after: Iterable[AsyncOperation] | None = None,
    ) -> None:
        """`after`: what the scheduler completes before; by default all of `ordering`."""
        self.agent_id = -1
        """Set by Machine.issue."""
        self.kind = kind
        """Name in messages and counters: "cp.async.bulk.tensor", "wgmma", "tcgen05.mma"..."""
        self.issuer = issuer
        self.cta = issuer.cta
        self.instruction = instruction
        self.ordering = ordering
        self.completed: bool = False
        if after is None:
            after = (*ordering.after, *ordering.if_synced, *ordering.in_practice)
        self.after = [operation for operation in after if not operation.completed] if after else []
        """Those of them that have not completed yet."""
        self.steps: deque[Callable[[], None]] = deque()
        self.sources_read = False
        self.steps_taken = Sleepers()
        """Woken by every step."""
        self.registers: tuple[int, ...] = ()
        """Slots of the issuer's registers that a product reads or writes until it is waited for."""
        self.mbarriers: tuple[tuple[int, int], ...] = ()
        """The mbarriers that a commit arrives on: index of the CTA and offset."""
        self.shape: tuple[int, ...] | str | None = None
        """Shape in messages: (m, n, k) of a product, .shape of a copy to TMEM."""
        self.result_touched = False
        """Something was computed with its result before it was waited for, and that was told."""

    @property
    def label(self) -> str:
        """Name in messages: "tcgen05.mma #17 issued by cta (0,0,0) warp 12"."""
        return f"{self.kind} #{self.agent_id} issued by {self.issuer.label}"

    def take_step(self) -> None:
        """Take the next step; complete with the last."""
        if self.steps:
            self.steps.popleft()()
        if not self.steps:
            self.sources_read = True
            self.completed = True
        self.steps_taken.wake()


@dataclass(frozen=True, slots=True)
class Claim:
    """Operations that a register belongs to: for what tcgen05.ld's results made, these."""

    operations: tuple[AsyncOperation, ...]
    is_result: bool
    """The operation writes the register; otherwise it only reads it."""

    @property
    def operation(self) -> AsyncOperation:
        """The operation, or the first one."""
        return self.operations[0]


@dataclass(slots=True)
class Cluster:
    """CTAs that can reach each other's shared memory; `ctas[r]` has %cluster_ctarank r."""

    index: int
    shape: tuple[int, int, int]
    ctaid: tuple[int, int, int]
    ctas: list[Cta] = field(default_factory=list)
    lanes_exited: Sleepers = field(default_factory=Sleepers)
    """Woken whenever lanes exit."""


class Cta:
    """One CTA of a launch."""

    def __init__(
        self, machine: Machine, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]
    ) -> None:
        self.machine = machine
        self.cluster = cluster
        self.rank = rank
        """%cluster_ctarank"""
        self.ctaid = ctaid
        gx, gy, _ = machine.launch.grid
        self.index = ctaid[0] + gx * (ctaid[1] + gy * ctaid[2])
        """CTA number in the grid."""
        size = SHARED_BASE + machine.layout.shared_bytes
        whole = np.full(-(-size // WORD_BYTES) * WORD_BYTES, machine.fill, dtype=np.uint8)
        self.shared: NDArray[np.uint8] = whole[:size]
        """Bytes by CTA-relative shared address; the first SHARED_BASE are reserved."""
        self.shared_words: NDArray[np.uint32] = whole.view(np.uint32)
        """The same in words; the last may lie partly beyond."""
        self._tmem: NDArray[np.uint32] | None = None
        self.warps: list[Warp] = []
        self.exited = False
        self.engines: dict[EngineState[Cta, Any], Any] = {}
        """The engines' state of this CTA: mbarriers, named barriers, TMEM allocations."""
        self.exit_checks: list[Callable[[], None]] = []
        """Called when all warps have exited: engines report what was left undone."""

    @property
    def tmem(self) -> NDArray[np.uint32]:
        """Tensor memory (128 lanes, 512 columns) of 32-bit cells."""
        if self._tmem is None:
            word = self.machine.fill * 0x01010101
            self._tmem = np.full((TMEM_LANES, TMEM_COLUMNS), word, dtype=np.uint32)
        return self._tmem

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        x, y, z = self.machine.launch.block
        return x * y * z

    def symbol_address(self, name: str) -> int:
        """Address of a symbol; shared addresses carry this CTA's rank."""
        layout = self.machine.layout
        offset = layout.shared_offsets.get(name)
        if offset is not None:
            return (self.rank << SHARED_RANK_SHIFT) | (SHARED_BASE + offset)
        return layout.symbol_address(name)


class Warp:
    """One warp of a CTA: 32 lanes and their registers; `machine.warp` runs it.

    Lanes that diverge form groups.
    """

    def __init__(
        self, agent_id: int, cta: Cta, index: int, num_lanes: int, registers: RegisterFile
    ) -> None:
        self.agent_id = agent_id
        self.cta = cta
        self.index = index
        """Warp number in the CTA, threadIdx / 32."""
        self.program: Kernel = cta.machine.program
        self.registers = registers
        alive = lanes.FULL if num_lanes == lanes.WARP_SIZE else np.less(lanes.LANE_IDS, num_lanes)
        self.alive: lanes.Mask = alive
        """Lanes that have not exited."""
        self.groups: list[Group] = [Group(0, alive)]
        self.group = self.groups[0]
        """The group that executes now, or executed last."""
        self.instruction_count = 0
        self.engines: dict[EngineState[Warp, Any], Any] = {}
        """The engines' state of this warp: groups of cp.async, bulk copies, wgmma."""
        self.last_regions: dict[int, Region] = {}
        """Region of an instruction's last access to global memory, by pc."""
        self.in_flight: dict[int, Claim] = {}
        """Registers of wgmma and tcgen05.ld operations under way, by slot."""
        self.constants: dict[str, lanes.Lanes] = {}
        """Special registers that never change, once they have been asked for."""
        self.patience = PATIENCE
        self.access_alone = -1
        """The pc of an access that machine code could not do."""

    @property
    def label(self) -> str:
        """Name in messages: "cta (0,0,0) warp 3"."""
        x, y, z = self.cta.ctaid
        return f"cta ({x},{y},{z}) warp {self.index}"

    def symbol_address(self, name: str) -> int:
        """The address of a variable or a parameter, in its own state space's form."""
        return self.cta.symbol_address(name)

    def guarded(self, guard: Guard | None, mask: lanes.Mask) -> lanes.Mask:
        """The lanes of `mask` whose guard holds."""
        if guard is None:
            return mask
        return lanes.held_lanes(mask, self.registers[guard.register.slot], negated=guard.negated)

    def lanes_now(self) -> tuple[int, int]:
        """Lanes that execute the visible instruction now, or meet there, and that have not exited,
        as bits."""
        guard = self.program.function.instructions[self.group.pc - 1].guard
        alive = lanes.bits_of(self.alive)
        if guard is None and len(self.groups) == 1:
            return alive, alive
        return lanes.bits_of(self.guarded(guard, self.group.mask)) | self.group.joined, alive

    def wake(self) -> None:
        """Something that this warp waits for has changed."""
        self.cta.machine.woken.append(self)


class Machine:
    """Everything that a launch's warps and engines share."""

    def __init__(
        self,
        program: Kernel,
        layout: Layout,
        launch: Launch,
        device: Device,
        memory: GlobalMemory,
        observer: Observer | None = None,
        fill: int = 0,
    ) -> None:
        self.program = program
        self.layout = layout
        self.launch = launch
        self.device = device
        self.memory = memory
        self.observer = observer
        self.fill = fill
        """The byte that shared memory and TMEM hold at first."""
        self.pending = PendingOperations[AsyncOperation]()
        self.woken: list[Warp] = []
        """Warps whose sleep ended, for the scheduler to take out."""
        self.progress = 0
        """Grows with every change that another agent could wait for; a scheduler that sees it
        stand still while warps run knows that they only spin."""
        self.step_share = LOOP_ROUNDS
        """Share of a warp's turn that a visible instruction takes, out of LOOP_ROUNDS."""
        self.stops: frozenset[int] = frozenset()
        """Pcs in front of which a warp's turn ends."""
        self.lanes_apart: LanesApart | None = None
        """Choice of the lanes of a warp that go first, if they need not go in step."""
        self.naps = 0
        """Grows with every nanosleep: the warp expects to wait."""
        self.warp_instructions = 0
        """Instructions of the warps that have exited."""
        self.async_operations = 0
        self._num_agents = 0
        self.constants: dict[tuple[str, int], lanes.Lanes] = {}
        """Special registers that are the same in all CTAs, by name and, of some, the warp."""
        self.clock_was_read = False
        self.skipped_time = 0
        """Added to clocks that count instructions: time that passed while nobody could go on."""
        self.skips, self.skips_since = 0, -1
        """Number of times that time was skipped since `progress` had the second value."""
        self.printed: list[str] = []
        """Output of the kernel's calls of vprintf, one string for each thread's call."""
        self.elect: Callable[[lanes.Mask], int] = lanes.first_lane
        """Function that chooses the leader of elect.sync among the lanes."""
        self.cancelled_clusters = 0
        """Clusters that clusterlaunchcontrol.try_cancel kept from starting."""
        self.next_cluster = 0
        self.share, self.shares, self.dealt_from = 0, 1, 0
        self.grid_workspace: int | None = None
        layout.register(memory, launch.parameters)

    def new_agent_id(self) -> int:
        """A number for the next warp or asynchronous operation."""
        self._num_agents += 1
        return self._num_agents - 1

    def issue(self, operation: AsyncOperation) -> None:
        """Start an asynchronous operation; the scheduler takes its steps from now on."""
        operation.agent_id = self.new_agent_id()
        self.pending.add(operation)
        self.async_operations += 1
        self.progress += 1
        if self.observer is not None:
            self.observer.async_issued(operation, operation.issuer)

    def take_step(self, operation: AsyncOperation) -> None:
        """Take an operation's next step."""
        operation.take_step()
        self.progress += 1
        if operation.completed:
            self.pending.remove(operation)
            if self.observer is not None:
                self.observer.async_completed(operation)

    def allocate(self, size: int, name: str) -> int:
        """Zeroed global memory for the rest of the launch; its address."""
        block = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
        start = -int(block.ctypes.data) % _ALIGNMENT
        return self.memory.register(block[start : start + size], name).base

    def complain(
        self,
        level: str,
        code: str,
        message: str,
        agent: Agent | None,
        instruction: Instruction | None,
    ) -> None:
        """Report a fault that does not stop the run (level error, warning or note)."""
        if self.observer is not None:
            self.observer.complained(level, code, message, agent, instruction)
