"""The state that follows another one, in machine code: `check.known_order` and `check.races` for
what is known to be in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ptxemu.compiled.judge_rows import (
    I1,
    I32,
    KIND,
    MOST_READS,
    MOST_WRITES,
    PROXY,
    UNTOUCHED,
    Flag,
    Made,
    OfEvent,
    OfState,
    Tables,
    What,
    Work,
    field,
    has,
    wide,
)
from ptxemu.compiled.loops import I64, at, constant, counted, local, require, word_at
from ptxemu.compiled.python_objects import bit_of, data_of, row_bytes_of

# Order of an access after earlier events, in machine code: `known_order` and `proxies`.

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


class Following:
    """Finds the state that follows a state, or leaves all to Python.

    Args:
        given: the access's arguments by name.
        by_python: the block that leaves it.
    """

    def __init__(
        self, tables: Tables, made: Made, second: Second, given: dict[str, Any], by_python: Any
    ) -> None:
        self._tables, self._made, self._second, self._given = tables, made, second, given
        self._by_python = by_python
        self._event = given["event"]

    def of(self, b: Any, state: Any) -> Any:
        """The number of the state that follows the one with the number `state`."""
        found = local(b, I64)
        before = self._field(b, state, OfState.NEXT_EVENT)
        is_same = b.icmp_signed("==", before, self._event)
        with b.if_else(is_same) as (same, other):
            with same:
                b.store(self._field(b, state, OfState.NEXT_STATE), found)
            with other:
                self._judge(b, state, found)
        return b.load(found)

    def _judge(self, b: Any, state: Any, found: Any) -> None:
        done = b.append_basic_block("judged")
        ways: dict[int, Callable[[Any, Any], Any]] = {
            READ: self._read,
            WRITE: self._write,
            ATOMIC: self._atomic,
        }
        choice = b.switch(self._second.kind, self._by_python)
        for kind, way in ways.items():
            block = b.append_basic_block("kind")
            choice.add_case(constant(kind), block)
            b.position_at_end(block)
            b.store(way(b, state), found)
            b.branch(done)
        b.position_at_end(done)

    def _field(self, b: Any, state: Any, which: OfState) -> Any:
        return wide(b, b.load(self._tables.state(b, state, which)))

    def _first(self, b: Any, index: Any) -> tuple[Any, First]:
        """Return number and row of the event at an offset of the pool; no mbarrier."""
        number = self._tables.pooled(b, index)
        first = First.load(b, self._tables.event(b, number))
        require(b, b.not_(has(b, first.what, What.MBARRIER)), self._by_python)
        return number, first

    @contextmanager
    def _events(self, b: Any, begin: Any, count: Any) -> Iterator[tuple[Any, First]]:
        """A loop over events in the pool."""
        with b.if_then(b.icmp_signed(">", count, constant(0))), counted(b, count) as place:
            yield self._first(b, b.add(begin, place))

    def _read(self, b: Any, state: Any) -> Any:
        tables, second = self._tables, self._second
        writes, reads = (self._field(b, state, which) for which in (OfState.WRITES, OfState.READS))
        begin = self._field(b, state, OfState.AT)
        is_simple = b.and_(
            b.icmp_signed(">=", writes, constant(0)), b.icmp_signed("<=", writes, constant(1))
        )
        require(b, is_simple, self._by_python)
        with self._events(b, begin, writes) as (_, write):
            require(b, second.may_follow(b, write), self._by_python)
        of_reads = b.add(begin, writes)
        result = local(b, I64)
        b.store(state, result)
        with b.if_then(b.not_(self._is_only_read(b, of_reads, reads))):
            first = b.load(self._made.used)
            last = local(b, I64)
            b.store(b.add(first, writes), last)
            with b.if_then(b.icmp_signed("==", writes, constant(1))):
                tables.pool_one(b, first, tables.pooled(b, begin))
            with self._events(b, of_reads, reads) as (number, read):
                self._keep_if(b, b.not_(second.knows(b, read)), number, last)
            tables.pool_one(b, b.load(last), self._event)
            count = b.sub(b.add(b.load(last), constant(1)), b.add(first, writes))
            # The oldest is forgotten: the state begins after it.
            too_many = b.zext(b.icmp_signed(">", count, constant(MOST_READS)), I64)
            with b.if_then(b.icmp_signed("==", b.mul(too_many, writes), constant(1))):
                tables.pool_one(b, b.add(first, too_many), tables.pooled(b, begin))
            new = self._made.state(b, b.add(first, too_many), writes, b.sub(count, too_many))
            b.store(new, result)
        return b.load(result)

    def _is_only_read(self, b: Any, place: Any, reads: Any) -> Any:
        """Whether the only read was the agent's, at the same time and by the same path."""
        found = local(b, I1)
        b.store(I1(0), found)
        with b.if_then(b.icmp_signed("==", reads, constant(1))):
            _, only = self._first(b, place)
            same_clock = b.icmp_signed("==", only.clock, self._second.row.clock)
            is_weak = b.not_(has(b, only.what, What.STRONG))
            in_order = self._second.is_in_order_with(b, only)
            b.store(b.and_(in_order, b.and_(same_clock, is_weak)), found)
        return b.load(found)

    def _write(self, b: Any, state: Any) -> Any:
        second = self._second
        writes, reads = (self._field(b, state, which) for which in (OfState.WRITES, OfState.READS))
        is_untouched = b.icmp_signed("==", writes, constant(UNTOUCHED))
        writes = b.select(is_untouched, constant(0), writes)
        require(b, b.icmp_signed(">=", writes, constant(0)), self._by_python)
        begin = self._field(b, state, OfState.AT)
        with self._events(b, begin, b.add(writes, reads)) as (_, first):
            is_fine = b.or_(second.is_in_order_with(b, first), second.may_follow(b, first))
            require(b, is_fine, self._by_python)
        # In tensor memory what nobody has read since may be overlapped by something else.
        is_unread = b.and_(
            b.icmp_signed("==", reads, constant(0)), b.icmp_signed(">", writes, constant(0))
        )
        with b.if_then(b.and_(is_unread, second.is_in_tmem)):
            last = self._tables.pooled(b, b.sub(b.add(begin, writes), constant(1)))
            columns, own = (
                b.load(field(b, self._tables.event(b, number), OfEvent.COLUMNS))
                for number in (last, self._event)
            )
            require(b, b.icmp_signed("==", columns, own), self._by_python)
        return self._made.own_write(b, self._event)

    def _atomic(self, b: Any, state: Any) -> Any:
        """Return the state after an atomic that follows atomics of the whole device.

        Other accesses before it are left to Python.
        """
        tables, second = self._tables, self._second
        writes, reads = (self._field(b, state, which) for which in (OfState.WRITES, OfState.READS))
        is_simple = b.and_(
            b.icmp_signed(">=", writes, constant(0)), b.icmp_signed("==", reads, constant(0))
        )
        require(b, is_simple, self._by_python)
        first = b.load(self._made.used)
        last = local(b, I64)
        b.store(first, last)
        with self._events(b, self._field(b, state, OfState.AT), writes) as (number, before):
            is_atomic = b.icmp_signed("==", before.kind(b), constant(ATOMIC))
            reaches = has(b, before.what, What.DEVICE)
            require(b, b.and_(is_atomic, reaches), self._by_python)
            is_unknown = b.not_(second.knows(b, before))
            is_other = b.not_(second.is_in_order_with(b, before))
            both = b.and_(before.what, second.row.what)
            adds = b.and_(is_other, has(b, both, What.ADDS_FLOATS))
            self._keep_if(b, is_unknown, number, last)
            with b.if_then(b.and_(is_unknown, adds)):
                self._note(b, number)
        result = local(b, I64)
        count = b.sub(b.load(last), first)
        with b.if_else(b.icmp_signed("==", count, constant(0))) as (none, some):
            with none:
                b.store(self._made.own_write(b, self._event), result)
            with some:
                tables.pool_one(b, b.load(last), self._event)
                too_many = b.zext(b.icmp_signed("==", count, constant(MOST_WRITES)), I64)
                kept = b.sub(b.add(count, constant(1)), too_many)
                b.store(self._made.state(b, b.add(first, too_many), kept, constant(0)), result)
        return b.load(result)

    def _keep_if(self, b: Any, condition: Any, number: Any, last: Any) -> None:
        """Put an event after those of a new state in the pool, if a condition holds."""
        with b.if_then(condition):
            self._tables.pool_one(b, b.load(last), number)
            b.store(b.add(b.load(last), constant(1)), last)

    def _note(self, b: Any, number: Any) -> None:
        """An addition is in no order with the event."""
        work = self._given["work"]
        noted = word_at(b, work, Work.NUM_UNORDERED)
        b.store(b.trunc(number, I32), at(b, self._tables.unordered, I32, noted))
        b.store(b.add(noted, constant(1)), at(b, work, I64, Work.NUM_UNORDERED))
