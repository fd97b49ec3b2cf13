"""A launch in progress: the grid's clusters, memory, asynchronous operations and observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.errors import ExecutionError
from ptxemu.events import Agent, Observer
from ptxemu.machine.cta import Cluster, Cta
from ptxemu.machine.device import Device
from ptxemu.machine.lanes import WARP_SIZE, Lanes, Mask, first_lane
from ptxemu.machine.lanes_apart import LanesApart
from ptxemu.machine.layout import Layout
from ptxemu.machine.operation import AsyncOperation
from ptxemu.machine.pending import PendingOperations
from ptxemu.machine.program import Program
from ptxemu.machine.warp import LOOP_ROUNDS, Warp
from ptxemu.memory.address import PARAM_WINDOW
from ptxemu.memory.global_memory import GlobalMemory

if TYPE_CHECKING:
    from ptxemu.syntax.ast import Instruction

NANOSECONDS_PER_INSTRUCTION = 1
FIRST_SKIP = 1000
MOST_SKIPS = 50
"""Skips of time, each twice as long, after which a wait for a clock is one that never ends."""
_GRID_WORKSPACE_BYTES = 8
"""Its size and the barrier, a number of 32 bits each."""
_ALIGNMENT = 256


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


class Machine:
    """Everything that a launch's warps and engines share."""

    def __init__(
        self,
        program: Program,
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
        self.pending = PendingOperations()
        self.woken: list[Warp] = []
        """Warps whose sleep ended, for the scheduler to take out."""
        self.progress = 0
        """Grows with every change that another agent could wait for; a scheduler that sees it
        stand still while warps run knows that they only spin."""
        self.step_share = LOOP_ROUNDS
        """What a visible instruction takes of a warp's turn, of LOOP_ROUNDS."""
        self.lanes_apart: LanesApart | None = None
        """Which lanes of a warp go first, where they need not go in step."""
        self.naps = 0
        """Grows with every nanosleep: the warp expects to wait."""
        self.warp_instructions = 0
        """Instructions of the warps that have exited."""
        self.async_operations = 0
        self._num_agents = 0
        self._clock_was_read = False
        self._skipped_time = 0
        """Added to clocks that count instructions: time that passed while nobody could go on."""
        self._skips, self._skips_since = 0, -1
        """How often time was skipped since `progress` had the second value."""
        self.printed: list[str] = []
        """What the kernel's calls of vprintf wrote, one string a thread's call."""
        self.elect: Callable[[Mask], int] = first_lane
        """Which of the lanes elect.sync makes the leader."""
        self.cancelled_clusters = 0
        """Clusters that clusterlaunchcontrol.try_cancel kept from starting."""
        self._next_cluster = 0
        self._share, self._shares, self._dealt_from = 0, 1, 0
        self._grid_workspace: int | None = None
        block = np.frombuffer(bytearray(launch.parameters), dtype=np.uint8)
        if len(block):
            memory.register(block, "kernel parameters", base=PARAM_WINDOW, writable=False)
        for variable, address in layout.constants:
            initial = layout.initial_bytes(variable)
            data = np.zeros(max(variable.size, 1), dtype=np.uint8)
            data[: len(initial)] = np.frombuffer(initial, dtype=np.uint8)
            memory.register(data, variable.name, base=address)

    def new_agent_id(self) -> int:
        """A number for the next warp or asynchronous operation."""
        self._num_agents += 1
        return self._num_agents - 1

    def clusters(self) -> Iterator[Cluster]:
        """The grid's clusters in launch order, each with its CTAs and warps ready to run."""
        cx, cy, cz = self.launch.cluster
        while (where := self._take_cluster()) is not None:
            cluster = Cluster(self._next_cluster - 1, self.launch.cluster, where)
            for rank in range(cx * cy * cz):
                ctaid = (
                    where[0] * cx + rank % cx,
                    where[1] * cy + rank // cx % cy,
                    where[2] * cz + rank // (cx * cy),
                )
                cluster.ctas.append(Cta(self, cluster, rank, ctaid))
            for cta in cluster.ctas:
                threads = cta.num_threads
                for warp in range(-(-threads // WARP_SIZE)):
                    lanes = min(WARP_SIZE, threads - warp * WARP_SIZE)
                    cta.warps.append(Warp(self.new_agent_id(), cta, warp, lanes))
                    if self.observer is None:
                        self.program.stretches.started()
                if self.observer is not None:
                    self.observer.cta_started(cta)
            yield cluster

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        """Keep the next cluster from starting: the ctaid of its first CTA; None: all have."""
        where = self._take_cluster()
        if where is None:
            return None
        self.cancelled_clusters += 1
        x, y, z = (a * b for a, b in zip(where, self.launch.cluster, strict=True))
        return x, y, z

    def _take_cluster(self) -> tuple[int, int, int] | None:
        """%clusterid of the next cluster in launch order, which whoever asks now owns."""
        nx, ny, nz = self.launch.clusters
        while (self._next_cluster - self._dealt_from) % self._shares != self._share:
            self._next_cluster += 1  # another process has it
        index = self._next_cluster
        if index >= nx * ny * nz:
            return None
        self._next_cluster += 1
        return index % nx, index // nx % ny, index // (nx * ny)

    @property
    def clusters_left(self) -> int:
        """Clusters that nobody has started or cancelled, those of other processes included."""
        nx, ny, nz = self.launch.clusters
        return max(nx * ny * nz - self._next_cluster, 0)

    def deal(self, share: int, shares: int) -> None:
        """Of the clusters that are left start only every `shares`-th, from number `share` on."""
        self._share, self._shares, self._dealt_from = share, shares, self._next_cluster

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

    def dynamic_special(self, warp: Warp, name: str) -> Lanes:
        """Special registers whose value changes: clocks count the warp's instructions."""
        ticks = warp.instruction_count * NANOSECONDS_PER_INSTRUCTION + self._skipped_time
        self._clock_was_read = self._clock_was_read or name.startswith(("%clock", "%globaltimer"))
        if name in ("%clock", "%clock_hi"):
            return np.full(WARP_SIZE, ticks & 0xFFFFFFFF if name == "%clock" else 0, np.uint32)
        if name in ("%clock64", "%globaltimer"):
            return np.full(WARP_SIZE, ticks, np.uint64)
        if name in ("%globaltimer_lo", "%globaltimer_hi"):
            return np.full(WARP_SIZE, ticks & 0xFFFFFFFF if name.endswith("lo") else 0, np.uint32)
        if name.startswith("%envreg"):
            return np.full(WARP_SIZE, self._environment(int(name[7:])), np.uint32)
        raise ExecutionError(f"special register {name} is not known")

    def skip_time(self) -> bool:
        """Let time pass where warps only look at a clock; False where it would help nobody."""
        if self.progress != self._skips_since:
            self._skips, self._skips_since = 0, self.progress
        if not self._clock_was_read or self._skips == MOST_SKIPS:
            return False
        self._clock_was_read = False
        self._skips += 1
        self._skipped_time = 2 * self._skipped_time + FIRST_SKIP
        return True

    def _environment(self, number: int) -> int:
        """%envreg1 and 2 hold the address of the workspace of cooperative groups' grid barrier."""
        if number not in (1, 2):
            return 0
        if self._grid_workspace is None:
            self._grid_workspace = self.allocate(_GRID_WORKSPACE_BYTES, "the grid's workspace")
        return self._grid_workspace >> 32 if number == 1 else self._grid_workspace & 0xFFFFFFFF

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
