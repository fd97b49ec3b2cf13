"""Events: accesses of an agent at a point of its own order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptxemu.check.undetermined import adds_floats
from ptxemu.events import Access, AccessKind, Proxy, Space

if TYPE_CHECKING:
    from ptxemu.check.actors import Actor
    from ptxemu.check.shadow import State
    from ptxemu.syntax.ast import Instruction

CTA, CLUSTER, GPU = 1, 2, 3
"""How far a scope reaches."""
TMEM_ROW_BYTES = 2048
_SLOT_BITS, _SPACE_BITS, _PROXY_BITS = 16, 3, 2


def what_of(access: Access, reach: int) -> int:
    """Kind, proxy, reach and whether it is silent as bits of one number."""
    return access.kind.number << 5 | access.proxy.number << 3 | reach << 1 | access.is_silent


def kind_and_proxy(what: int) -> tuple[int, int]:
    """The numbers of the two."""
    return what >> 5, what >> 3 & 3


def _is_quick(what: int) -> bool:
    kind, proxy = kind_and_proxy(what)
    reach = GPU if kind == AccessKind.ATOMIC.number else 0
    return proxy != Proxy.TENSORMAP.number and what & 7 == reach << 1


NUM_FORMS = 1 << 7
"""More than any of `what_of`."""
_IS_QUICK = tuple(map(_is_quick, range(NUM_FORMS)))
"""Whether machine code may judge such an event."""


class Event:
    """One access of an agent. Accesses of one instruction between two ticks are one event."""

    __slots__ = (
        "actor",
        "adds_floats",
        "clock",
        "columns",
        "followers",
        "instruction",
        "is_behind_sc",
        "is_mbarrier",
        "is_non_coherent",
        "is_quick",
        "is_silent",
        "kind",
        "number",
        "proxy",
        "reach",
        "reads_with",
        "since",
        "time",
        "what",
        "write_state",
    )

    def __init__(self, actor: Actor, access: Access, what: int, reach: int, time: int) -> None:
        kind = access.kind
        self.actor = actor
        self.clock = actor.clock
        self.instruction: Instruction = access.instruction
        self.what = what
        """See `what_of`."""
        self.kind = kind
        self.proxy = access.proxy
        self.reach = reach
        """How far the scope of an atomic, or of an access with a memory order, reaches
        (`check.flags`); 0 of a weak access."""
        self.time = time
        """Its place in the run, to tell which of two unordered accesses came first here."""
        self.is_silent = access.is_silent
        """It wrote what was there already."""
        self.is_non_coherent = kind is AccessKind.READ and "nc" in access.instruction.modifiers
        """It reads through the path that sees no write of the same kernel."""
        self.is_mbarrier = False
        """It initialised an mbarrier in these bytes."""
        self.is_behind_sc = actor.has_fenced_sc
        """Its agent has executed a fence.sc."""
        self.adds_floats = kind is AccessKind.ATOMIC and adds_floats(access)
        """It adds to floating-point numbers: in which order decides their last bits."""
        self.write_state: State | None = None
        """The state of bytes that this event was the last to write and nobody read since."""
        self.reads_with: dict[tuple[Event, ...], tuple[Event, ...]] | None = None
        """Of an operation's read: by the reads that there were, those to remember now."""
        self.columns: tuple[int, int] | None = None
        """In TMEM: the first column and the one behind the last."""
        self.since = actor.since
        """Its warp's clock, or its operation's issuer's: what that knew then, it knows; -1 if some
        lanes of the warp know less."""
        self.number = -1
        """Of its row (`check.rows`); -1 if it has none."""
        self.is_quick = _IS_QUICK[what] and not self.is_non_coherent
        """Machine code may judge it."""
        self.followers: dict[int, int] | None = None
        """By warp, space and proxy (`follower`) the clock since which accesses of the warp, and of
        what it issues, may follow."""

    def cover(self, access: Access) -> None:
        """Note the columns of TMEM that the event is of."""
        # An access is of the same columns in all its lanes.
        byte = access.starts.item(0) % TMEM_ROW_BYTES
        first, end = byte >> 2, byte + access.size >> 2
        if self.columns is not None:
            first, end = min(first, self.columns[0]), max(end, self.columns[1])
        self.columns = first, end

    def of_lanes(self, access: Access) -> Event:
        """The same of lanes that know less than their warp: not to be taken for judged before."""
        own = Event(self.actor, access, self.what, self.reach, self.time)
        own.since = -1
        if access.space is Space.TMEM:
            own.cover(access)
        return own

    def follower(self, space: Space) -> int:
        """Whose access it is, and of what kind, for `followers`."""
        origin = self.actor.origin
        bits = space.number << _PROXY_BITS | self.proxy.number
        return (origin.home << _SLOT_BITS | origin.slot) << _SPACE_BITS + _PROXY_BITS | bits

    def is_strong_with(self, other: Event) -> bool:
        """Whether the two are morally strong: each is in the scope of the other."""
        reach = min(self.reach, other.reach)
        if reach == CTA:
            return self.actor.cta == other.actor.cta
        return reach == GPU or (reach == CLUSTER and self.actor.home == other.actor.home)

    @property
    def action(self) -> str:
        """For people: "generic write", "async read"..."""
        if self.is_mbarrier:
            return "mbarrier.init"
        kind = "atomic access" if self.kind is AccessKind.ATOMIC else self.kind.value
        return f"{self.proxy.value} {kind}"
