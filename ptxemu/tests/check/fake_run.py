"""A run without a machine: tests call what agents do, the checker hears it as events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxemu.check import Finding
from ptxemu.check.checker import Checker
from ptxemu.check.fixed_values import FixedValues
from ptxemu.errors import Span
from ptxemu.events import Access, AccessKind, Fence, FenceKind, Proxy, Space
from ptxemu.machine.state import NO_ORDER, Ordering
from ptxemu.syntax.ast import Instruction

SHARED, GLOBAL, TMEM = Space.SHARED, Space.GLOBAL, Space.TMEM
FENCES = {
    "proxy.async": Fence(FenceKind.ASYNC_PROXY),
    "proxy.async.shared::cta": Fence(FenceKind.ASYNC_PROXY, spaces=frozenset((SHARED,))),
    "proxy.async.global": Fence(FenceKind.ASYNC_PROXY, spaces=frozenset((GLOBAL,))),
    "acq_rel.cta": Fence(FenceKind.MEMORY, "acq_rel", "cta"),
    "acq_rel.gpu": Fence(FenceKind.MEMORY, "acq_rel", "gpu"),
    "mbarrier_init": Fence(FenceKind.MBARRIER_INIT),
    "tensormap.release": Fence(FenceKind.TENSORMAP_RELEASE, scope="gpu"),
    "tensormap.acquire": Fence(FenceKind.TENSORMAP_ACQUIRE, scope="gpu"),
    "tcgen05.before_thread_sync": Fence(FenceKind.TCGEN05_BEFORE),
    "tcgen05.after_thread_sync": Fence(FenceKind.TCGEN05_AFTER),
}


class Fixed(FixedValues):
    """Every store's value follows from parameters alone."""

    def is_fixed(self, instruction: Instruction) -> bool:
        return True


@dataclass
class FakeWarp:
    """A warp of a fake CTA."""

    agent_id: int
    index: int
    cta: FakeCta

    @property
    def label(self) -> str:
        return f"cta {self.cta.ctaid} warp {self.index}"


@dataclass
class FakeCluster:
    """A cluster along x."""

    index: int
    ctas: list[FakeCta] = field(default_factory=list)


@dataclass
class FakeCta:
    """A CTA along x."""

    index: int
    rank: int
    cluster: FakeCluster
    warps: list[FakeWarp] = field(default_factory=list)
    engines: dict[str, Any] = field(default_factory=dict)
    exited: bool = False

    @property
    def ctaid(self) -> tuple[int, int, int]:
        return (self.index, 0, 0)


@dataclass(eq=False)
class FakeOperation:
    """An asynchronous operation."""

    agent_id: int
    kind: str
    issuer: FakeWarp
    instruction: Instruction
    ordering: Any = NO_ORDER
    registers: tuple[int, ...] = ()
    mbarriers: tuple[tuple[int, int], ...] = ()

    @property
    def label(self) -> str:
        return f"{self.kind} #{self.agent_id}"


class FakeRun:
    """A launch of `clusters` clusters of `ctas` CTAs of `warps` warps.

    Args:
        fixed_values: no data decide which values are stored.
    """

    def __init__(
        self, *, clusters: int = 1, ctas: int = 1, warps: int = 2, fixed_values: bool = False
    ) -> None:
        self.checker = Checker("fake")
        self._agents = 0
        self._instructions: dict[str, Instruction] = {}
        self.ctas: list[FakeCta] = []
        for number in range(clusters):
            self.start_cluster(number, ctas=ctas, warps=warps)
        if fixed_values:
            self.checker._races.values = Fixed()

    @property
    def warps(self) -> list[FakeWarp]:
        return [warp for cta in self.ctas for warp in cta.warps]

    def start_cluster(self, number: int, *, ctas: int = 1, warps: int = 2) -> None:
        """The CTAs of a cluster become resident."""
        cluster = FakeCluster(number)
        for rank in range(ctas):
            cta = FakeCta(len(self.ctas), rank, cluster)
            cluster.ctas.append(cta)
            self.ctas.append(cta)
        for cta in cluster.ctas:
            cta.warps = [FakeWarp(self._agent_id(), w, cta) for w in range(warps)]
            self.checker.cta_started(cta)

    def _agent_id(self) -> int:
        self._agents += 1
        return self._agents - 1

    def instruction(self, text: str) -> Instruction:
        """One instruction a text; the n-th new one stands in PTX line 10 * n."""
        found = self._instructions.get(text)
        if found is None:
            pc = len(self._instructions) + 1
            opcode = text.split(" ", 1)[0]
            found = Instruction(
                opcode, tuple(opcode.split(".")), (), None, pc, Span(10 * pc, "kernel.py", pc), text
            )
            self._instructions[text] = found
        return found

    def access(
        self,
        agent: FakeWarp | FakeOperation,
        text: str,
        kind: str,
        starts: int | list[int],
        size: int = 4,
        *,
        space: Space = SHARED,
        owner: int | None = None,
        order: str = "weak",
        scope: str = "",
        is_silent: bool = False,
    ) -> None:
        """`agent` reads, writes or updates (kind) memory; operations through the async proxy."""
        is_warp = isinstance(agent, FakeWarp)
        cta = agent.cta if is_warp else agent.issuer.cta
        instruction = self.instruction(text)
        generic = is_warp or (agent.kind.startswith("cp.async") and "bulk" not in agent.kind)
        self.checker.instruction_executed(agent, instruction, 32)
        self.checker.accessed(
            Access(
                agent, space, None if space is GLOBAL else (cta.index if owner is None else owner),
                np.atleast_1d(np.array(starts, dtype=np.int64)), size, AccessKind(kind),
                Proxy.GENERIC if generic else Proxy.ASYNC, instruction, order, scope, is_silent,
            )
        )  # fmt: skip

    def read(self, agent: Any, starts: Any, size: int = 4, **rest: Any) -> None:
        """A load (of an operation: of its instruction)."""
        self.access(agent, self._text(agent, "ld"), "read", starts, size, **rest)

    def write(self, agent: Any, starts: Any, size: int = 4, **rest: Any) -> None:
        """A store (of an operation: of its instruction)."""
        self.access(agent, self._text(agent, "st"), "write", starts, size, **rest)

    def _text(self, agent: Any, opcode: str) -> str:
        if isinstance(agent, FakeOperation):
            return agent.instruction.text
        return f"{opcode}.b32 of warp {agent.agent_id}"

    def issue(
        self,
        warp: FakeWarp,
        text: str,
        *,
        kind: str = "",
        ordered_after: list[FakeOperation] | None = None,
    ) -> FakeOperation:
        """`warp` starts an operation; its kind is the instruction's opcode."""
        instruction = self.instruction(text)
        operation = FakeOperation(self._agent_id(), kind or instruction.opcode, warp, instruction)
        if ordered_after is not None:
            operation.ordering = Ordering(ordered_after)  # type: ignore[arg-type]
        self.checker.instruction_executed(warp, instruction, 1)
        self.checker.async_issued(operation, warp)
        return operation

    def barrier(self, *warps: FakeWarp, use: int = 0, number: int = 0) -> None:
        """bar.sync of `warps`."""
        token = ("barrier", warps[0].cta.index, number, use)
        for warp in warps:
            self.checker.released(warp, token, "cta")
        for warp in warps:
            self.checker.acquired(warp, token, "cta")

    def cluster_barrier(self, *, use: int = 0, relaxed: bool = False) -> None:
        """barrier.cluster of all warps of cluster 0."""
        token = ("cluster_barrier", 0, use)
        for warp in self.warps:
            self.checker.released(warp, token, "relaxed" if relaxed else "cluster")
        for warp in self.warps:
            self.checker.acquired(warp, token, "cluster")

    def arrive(self, agent: Any, *, offset: int = 0, phase: int = 0, cta: int = 0) -> None:
        """An arrival at an mbarrier, or a complete_tx."""
        self.checker.released(agent, ("mbarrier", cta, offset, phase), "cta")

    def wait(self, warp: FakeWarp, *, offset: int = 0, phase: int = 0, cta: int = 0) -> None:
        """A successful wait on an mbarrier."""
        self.checker.acquired(warp, ("mbarrier", cta, offset, phase), "cta")

    def see(self, warp: FakeWarp, *, offset: int = 0, phase: int = 0, cta: int = 0) -> None:
        """A wait on an mbarrier that has seen the phase complete."""
        instruction = self.instruction(f"mbarrier.try_wait of warp {warp.agent_id}")
        self.checker.phase_seen(warp, cta, offset, phase, instruction)
        self.wait(warp, offset=offset, phase=phase, cta=cta)

    def fence(self, warp: FakeWarp, kind: str) -> None:
        """A fence, one of FENCES."""
        self.checker.fenced(warp, FENCES[kind], self.instruction(f"fence.{kind}"))

    def join(self, warp: FakeWarp, operation: FakeOperation, *, reads: bool = False) -> None:
        """A wait_group."""
        self.checker.async_joined(warp, operation, reads)

    def touch(self, warp: FakeWarp, operation: FakeOperation) -> None:
        """A pure instruction computes with the registers that `operation` loads."""
        self.checker.async_result_touched(warp, operation)

    def use(self, warp: FakeWarp, operation: FakeOperation) -> None:
        """An instruction cannot go on without the registers that `operation` loads."""
        self.touch(warp, operation)
        self.checker.async_result_used(warp, operation)

    def exit(self, cta: FakeCta) -> None:
        """All warps of a CTA exit."""
        cta.exited = True
        self.checker.cta_exited(cta)

    def finish(self) -> None:
        """The run is over."""
        self.checker.finish()

    @property
    def findings(self) -> list[Finding]:
        return self.checker.findings

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.findings]


STORE = "cp.async.bulk.global.shared::cta.bulk_group [out], [buf], 64"
