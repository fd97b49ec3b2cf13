"""Events of a run, as calls on an Observer: accesses, synchronisation, asynchronous work.

The machine and the engines report; the checker, the counters and the tracer listen. Observers are
injected, so neither knows the other's code. An *agent* is whoever acts with its own order of
events: a warp, or one asynchronous operation (a TMA copy, an MMA, a group of cp.async of a warp).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ptxemu.syntax.ast import Instruction


class _Quick(Enum):
    """Hashed by identity, for these are keys of dictionaries at every access."""

    __hash__ = object.__hash__

    def __init__(self, _: str) -> None:
        self.number = len(type(self).__members__)
        """Its position among the members."""


EnumT = TypeVar("EnumT", bound=Enum)


def with_quick_members(enum: type[EnumT]) -> type[EnumT]:
    """The members of an enum as plain attributes of its class.

    Python 3.11 has them as properties: there `Space.SHARED` takes 0.2 us, and a step asks dozens.
    """
    for name, member in enum.__members__.items():
        type.__setattr__(enum, name, member)
    return enum


@with_quick_members
class Space(_Quick):
    """Kind of memory. Shared memory and TMEM belong to a CTA, the others to the grid."""

    GLOBAL = "global"
    SHARED = "shared"
    TMEM = "tmem"
    LOCAL = "local"
    PARAM = "param"
    CONST = "const"


@with_quick_members
class AccessKind(_Quick):
    """Effect of an access on the bytes."""

    READ = "read"
    WRITE = "write"
    ATOMIC = "atomic"


@with_quick_members
class Proxy(_Quick):
    """The path of an access (PTX ISA, "Proxies")."""

    GENERIC = "generic"
    ASYNC = "async"
    TENSORMAP = "tensormap"


@with_quick_members
class FenceKind(Enum):
    """Kind of a fence."""

    MEMORY = "memory"
    ASYNC_PROXY = "proxy.async"
    ALIAS_PROXY = "proxy.alias"
    MBARRIER_INIT = "mbarrier_init"
    TENSORMAP_RELEASE = "proxy.tensormap::generic.release"
    TENSORMAP_ACQUIRE = "proxy.tensormap::generic.acquire"
    TCGEN05_BEFORE = "tcgen05.before_thread_sync"
    TCGEN05_AFTER = "tcgen05.after_thread_sync"
    WGMMA = "wgmma"


@dataclass(frozen=True, slots=True)
class Fence:
    """A fence of a warp (PTX ISA, "membar, fence", and those of wgmma and tcgen05)."""

    kind: FenceKind
    order: str = ""
    """acq_rel, sc, acquire or release, for MEMORY."""
    scope: str = ""
    """cta, cluster, gpu or sys, for MEMORY and the tensormap proxy."""
    spaces: frozenset[Space] = frozenset((Space.SHARED, Space.GLOBAL))
    """Memory whose accesses the fence orders, for ASYNC_PROXY."""


class Agent(Protocol):
    """A warp or an asynchronous operation."""

    agent_id: int
    """Unique in a launch, counted from 0 in order of creation."""

    @property
    def label(self) -> str:
        """Name for people: "cta (0,0,0) warp 3" or "cp.async.bulk #17"."""


@dataclass(slots=True)
class Access:
    """One instruction's access to memory, all lanes or all rows of it at once."""

    agent: Agent
    space: Space
    owner: int | None
    """The CTA's index in the grid for SHARED and TMEM, else None."""
    starts: NDArray[np.int64]
    """First byte of each piece: global address, CTA-relative shared offset, or for TMEM
    lane * 2048 + column * 4."""
    size: int
    """Bytes of each piece."""
    kind: AccessKind
    proxy: Proxy
    instruction: Instruction
    order: str = "weak"
    """weak, relaxed, acquire, release, acq_rel, volatile."""
    scope: str = ""
    """cta, cluster, gpu or sys where `order` is not weak."""
    is_silent: bool = False
    """A write of what was there already: whoever comes before or after it sees the same."""
    silent_pieces: NDArray[np.bool_] | None = None
    """True for the pieces that are such writes, where some are and some are not."""
    element: str = ""
    """Type of the elements for a reduction through a tensor map; its instruction lacks the type."""
    is_varied: bool = False
    """The pieces that wrote what was there already are of several values: no coincidence."""

    def by_silence(self) -> tuple[Access, ...]:
        """The silent pieces and the others as accesses of their own; itself where all are alike."""
        silent = self.silent_pieces
        if silent is None:
            return (self,)
        alike = replace(self, silent_pieces=None)
        return (
            replace(alike, starts=self.starts[silent], is_silent=True),
            replace(alike, starts=self.starts[~silent], is_varied=False),
        )


class Stretch(NamedTuple):
    """Loads [begin, end) of `Loads` in one space; `granule`: log2 of the bytes that they are
    multiples of, at most 2."""

    begin: int
    end: int
    space: Space
    granule: int


class Loads:
    """Weak loads that stand in a row in a kernel, with nothing between them that others could see.

    Attributes:
        first, end: pcs of the instructions, those between the loads included.
        instructions: the loads; sizes: bytes of a lane; spaces: GLOBAL, or SHARED of the own CTA.
        stretches: the loads by space.
        starts: what the lanes of the last warp loaded, (loads, 32), as in `Access.starts`.
    """

    def __init__(
        self, first: int, end: int, loads: Sequence[tuple[Instruction, int, Space]]
    ) -> None:
        self.first, self.end = first, end
        self.instructions, self.sizes, self.spaces = zip(*loads, strict=True)
        self.stretches: list[Stretch] = []
        for number, (_, size, space) in enumerate(loads):
            granule = 0 if size & 1 else 1 if size & 2 else 2
            begin = number
            if self.stretches and self.stretches[-1].space is space:
                begin, _, _, before = self.stretches.pop()
                granule = min(granule, before)
            self.stretches.append(Stretch(begin, number + 1, space, granule))
        self.starts: NDArray[np.int64] = np.zeros((len(loads), 32), np.int64)
        self._sizes = np.array(self.sizes, np.int64)
        self.addresses = int(self.starts.ctypes.data), int(self._sizes.ctypes.data)
        """Addresses in this process of `starts` and of the sizes, as words of 64 bits."""

    def end_of(self, count: int) -> int:
        """The pc after the first `count` loads and the blocks between them and the next one."""
        return self.end if count == len(self.instructions) else self.instructions[count].pc

    def access(self, agent: Agent, owner: int, number: int) -> Access:
        """One of the loads, of a warp of the CTA `owner`."""
        space = self.spaces[number]
        return Access(
            agent,
            space,
            owner if space is Space.SHARED else None,
            self.starts[number].copy(),
            self.sizes[number],
            AccessKind.READ,
            Proxy.GENERIC,
            self.instructions[number],
        )


class LaunchProgress(NamedTuple):
    """Progress of a launch: finished clusters, all clusters, and warp instructions."""

    finished: int
    clusters: int
    warp_instructions: int


OnProgress = Callable[[LaunchProgress], None]
"""Called now and then during a launch, and whenever a cluster has finished."""


class Observer:
    """Listens to a run. Every method does nothing here; override what is needed."""

    takes_loads = False
    """Loads in a row are told by `loaded` where that is quicker; else each by itself."""

    def cta_started(self, cta: Any) -> None:
        """A CTA became resident."""

    def cta_exited(self, cta: Any) -> None:
        """All warps of a CTA have exited."""

    def instruction_executed(self, agent: Agent, instruction: Instruction, lanes: int) -> None:
        """A visible instruction ran with `lanes` active lanes (pure ones come in blocks)."""

    def block_executed(self, agent: Agent, first_pc: int, count: int, lanes: int) -> None:
        """`count` pure instructions from `first_pc` on ran."""

    def accessed(self, access: Access) -> None:
        """Memory was read or written."""

    def loaded(self, agent: Agent, owner: int, loads: Loads, count: int) -> None:
        """A whole warp of the CTA `owner` has done the first `count` of `loads`, and the blocks
        between them.

        That stands for `instruction_executed`, `accessed` and `block_executed` of each."""

    def released(self, agent: Agent, token: Hashable, scope: str) -> None:
        """`agent`'s past is now known to whoever acquires `token` (an arrival on a barrier).

        With scope "relaxed" (barrier.cluster.arrive.relaxed) only what its earlier fences
        released: fence.mbarrier_init and fence.acq_rel.
        """

    def acquired(self, agent: Agent, token: Hashable, scope: str) -> None:
        """`agent` has learnt what was released into `token` (a wait that succeeded).

        Scope "relaxed": with its next fence only; "" of an mbarrier: the instruction names none."""

    def phase_seen(
        self, agent: Agent, owner: int, offset: int, phase: int, instruction: Instruction
    ) -> None:
        """A warp's wait has seen phase `phase` of an mbarrier complete, -1 of a fresh one; `owner`:
        index of the CTA. What it has learnt by that is told with `acquired`."""

    def phases_missed(
        self, agent: Agent, owner: int, offset: int, last: int, phase: int, instruction: Instruction
    ) -> None:
        """A warp's wait for a parity is answered by `phase`, and the last one that it saw of that
        mbarrier was `last`: the same answer could have come earlier. Told before `phase_seen`."""

    def fenced(self, agent: Agent, fence: Fence, instruction: Instruction) -> None:
        """A warp executed a fence."""

    def async_issued(self, operation: Any, issuer: Agent) -> None:
        """`issuer` started an asynchronous operation, which is an agent of its own."""

    def async_completed(self, operation: Any) -> None:
        """All of the operation's reads and writes are done."""

    def async_joined(self, agent: Agent, operation: Any, reads_only: bool) -> None:
        """`agent` knows that the operation has completed (its group was waited for), or with
        `reads_only` only that it has read its sources (wait_group.read)."""

    def async_result_touched(self, agent: Agent, operation: Any) -> None:
        """`agent` computes with registers that the operation writes (tcgen05.ld), without a wait:
        it has completed here, but the ISA orders no access to memory by that."""
        self.async_joined(agent, operation, False)

    def async_result_used(self, agent: Agent, operation: Any) -> None:
        """`agent` acts on what it computed with those registers, so it has waited for them on
        hardware too; told behind `async_result_touched`."""

    def blocked(self, agent: Agent, instruction: Instruction, reason: Callable[[], str]) -> None:
        """`agent` (some lanes of a warp) must wait at `instruction`; `reason` says for what."""

    def unblocked(self, agent: Agent, instruction: Instruction) -> None:
        """The wait is over; what it acquired or joined has been told between the two calls."""

    def complained(
        self,
        level: str,
        code: str,
        message: str,
        agent: Agent | None,
        instruction: Instruction | None,
    ) -> None:
        """The machine itself found a fault that does not stop it: level error, warning or note."""


# Several observers that act as one.


class FanOut(Observer):
    """Tells every event to each observer, in the order in which they were given."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers


def _tell_all(event: str) -> Callable[..., None]:
    def tell(self: FanOut, *facts: Any) -> None:
        for observer in self.observers:
            getattr(observer, event)(*facts)

    return tell


for _event, _method in vars(Observer).items():
    if callable(_method) and not _event.startswith("_"):
        setattr(FanOut, _event, _tell_all(_event))
