"""Order of an access after earlier events, in machine code: `known_order` and `proxies`."""

from __future__ import annotations

from typing import Any, NamedTuple

from ptxemu.compiled.judge_rows import I32, KIND, PROXY, Flag, OfEvent, What, field, has, wide
from ptxemu.compiled.loops import at, constant, require
from ptxemu.compiled.python_objects import bit_of, data_of, row_bytes_of

READ, WRITE, ATOMIC = range(3)
"""`events.AccessKind.number`."""
GENERIC = 0
"""`events.Proxy.number`, and the first row of clocks."""
_TWO_BITS = 3


class First(NamedTuple):
    """An event that came before."""

    agent: Any
    home: Any
    slot: Any
    clock: Any
    what: Any
    warp: Any

    @classmethod
    def load(cls, b: Any, row: Any) -> First:
        """Load the event from its row."""
        names = (OfEvent[name.upper()] for name in cls._fields)
        return cls(*(wide(b, b.load(field(b, row, name))) for name in names))

    def kind(self, b: Any) -> Any:
        """Its AccessKind's number."""
        return b.and_(b.lshr(self.what, constant(KIND)), constant(_TWO_BITS))

    def proxy(self, b: Any) -> Any:
        """Its Proxy's number."""
        return b.and_(b.lshr(self.what, constant(PROXY)), constant(_TWO_BITS))


class Second:
    """The event that is judged, and what its agent knows."""

    def __init__(self, b: Any, row: Any, given: dict[str, Any], by_python: Any) -> None:
        self.row = First.load(b, row)
        self.kind, self.proxy = self.row.kind(b), self.row.proxy(b)
        self._given, self._by_python = given, by_python
        flags = given["flags"]
        self.is_in_tmem = has(b, flags, Flag.TMEM)
        self._is_unfenced = has(b, flags, Flag.UNFENCED)
        self._knows_others = has(b, flags, Flag.KNOWS_OTHERS)
        self._clocks = data_of(b, given["clocks"])
        row_bytes = row_bytes_of(b, given["clocks"])
        self._fenced_clocks = b.add(self._clocks, b.mul(row_bytes, given["fence_row"]))
        self._is_generic = b.icmp_signed("==", self.proxy, constant(GENERIC))

    def is_agent_of(self, b: Any, first: First) -> Any:
        """Whether an agent did both."""
        return b.icmp_signed("==", first.agent, self.row.agent)

    def is_in_order_with(self, b: Any, first: First) -> Any:
        """Whether an agent did both by the same path, in its own order."""
        same_proxy = b.icmp_signed("==", first.proxy(b), self.proxy)
        return b.and_(self.is_agent_of(b, first), same_proxy)

    def knows(self, b: Any, first: First) -> Any:
        """Do the same as `Actor.knows`. Python judges events of other clusters if any are known."""
        same_home = b.icmp_signed("==", first.home, self.row.home)
        require(b, b.or_(same_home, b.not_(self._knows_others)), self._by_python)
        is_warp = has(b, first.what, What.WARP)
        is_ours = b.and_(same_home, is_warp)
        clock = self._clock(b, self._clocks, first, is_ours)
        by_clock = b.icmp_signed(">=", clock, first.clock)
        has_read = b.and_(
            b.icmp_signed("==", first.kind(b), constant(READ)), self._bit(b, "reads", first)
        )
        by_bit = b.or_(self._bit(b, "done", first), has_read)
        known = b.and_(same_home, b.select(is_warp, by_clock, by_bit))
        return b.or_(self.is_agent_of(b, first), known)

    def may_follow(self, b: Any, first: First) -> Any:
        """Whether `first` is known to come before, with nothing to report."""
        known = self.knows(b, first)
        in_memory = b.and_(known, self._is_fenced(b, first))
        in_tmem = b.and_(known, self._is_sound_in_tmem(b, first))
        return b.select(self.is_in_tmem, in_tmem, in_memory)

    def _is_fenced(self, b: Any, first: First) -> Any:
        """Whether it is ordered for the path of this access, too."""
        is_warp = has(b, first.what, What.WARP)
        is_ours = b.and_(is_warp, b.icmp_signed("==", first.home, self.row.home))
        clock = self._clock(b, self._fenced_clocks, first, is_ours)
        by_clock = b.icmp_signed(">=", clock, first.clock)
        by_bit = b.or_(self.is_agent_of(b, first), self._bit(b, "fenced", first))
        needs_none = b.or_(self._is_generic, b.icmp_signed("!=", first.proxy(b), constant(GENERIC)))
        return b.or_(needs_none, b.select(is_warp, by_clock, by_bit))

    def _is_sound_in_tmem(self, b: Any, first: First) -> Any:
        """Return whether the ISA, with its fences, orders an operation in tensor memory."""
        same_warp = b.icmp_signed("==", first.warp, self.row.warp)
        is_copy = has(b, first.what, What.TMEM_COPY)
        handed_on = b.or_(b.not_(is_copy), self._bit(b, "handed_on", first))
        is_fenced = b.or_(same_warp, b.and_(b.not_(self._is_unfenced), handed_on))
        is_operation = b.not_(has(b, first.what, What.WARP))
        by_isa = b.not_(self._bit(b, "in_practice", first))
        return b.and_(is_operation, b.and_(by_isa, is_fenced))

    def _clock(self, b: Any, clocks: Any, first: First, is_ours: Any) -> Any:
        """A warp's clock; of others any."""
        return wide(b, b.load(at(b, clocks, I32, b.select(is_ours, first.slot, constant(0)))))

    def _bit(self, b: Any, name: str, first: First) -> Any:
        return bit_of(b, self._given[name], first.slot)
