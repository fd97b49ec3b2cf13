"""The axioms of the PTX memory model, for the events of one execution of a small program.

Sources: PTX ISA, "Memory Consistency Model"; NVlabs/ptxmemorymodel. Relations are lists
of sets of successors, each set the bits of an integer.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import combinations, permutations
from typing import NamedTuple, TypeAlias

from tests.check.small_programs import Event, Op, Place, Program, distance

ReadsFrom: TypeAlias = dict[Event, Event | None]
"""The write that each read gives the value of; None for the initial value."""
Coherence: TypeAlias = dict[str, tuple[Event, ...]]
"""The writes of each location in order."""
Pairs: TypeAlias = set[tuple[Event, Event]]
_Node: TypeAlias = tuple[int, float, Op]
"""Thread, position (a barrier's end half a step behind its begin), instruction."""


def are_morally_strong(a: Op, at: Place, b: Op, bt: Place) -> bool:
    """Whether two instructions of different threads are, each in the scope of the other."""
    if not (a.is_strong and b.is_strong) or min(a.scope, b.scope) < distance(at, bt):
        return False
    return not (a.is_access and b.is_access and a.location != b.location)


class Verdict(NamedTuple):
    """What the axioms say of an execution."""

    is_consistent: bool
    """It is consistent with some order of the fence.sc."""
    races: Pairs
    """Its races in any of those orders."""
    ordered: Pairs
    """Accesses of one location that causality orders in all of them, the earlier one first."""


class Axioms:
    """Judges executions of a program in which the same accesses are executed."""

    def __init__(self, program: Program, executed: set[Event]) -> None:
        self._places = program.places
        self._nodes: list[_Node] = [
            (thread, position + half, op)
            for thread, ops in enumerate(program.threads)
            for position, op in enumerate(ops)
            for half in ((0.0, 0.5) if op.kind == "barrier" else (0.0,))
            if not op.is_access or (thread, position) in executed
        ]
        self._all = range(len(self._nodes))
        self._at = {(thread, int(at)): n for n, (thread, at, _) in enumerate(self._nodes)}
        self._ops = [op for _, _, op in self._nodes]
        self._po = [[self._is_before(m, n) for n in self._all] for m in self._all]
        self._strong = [[self._is_strong(m, n) for n in self._all] for m in self._all]
        self._base = [sum(1 << n for n in self._all if self._po[m][n]) for m in self._all]
        self._add_barriers(program)
        self._firsts = {n: self._release_patterns(n) for n in self._all}
        self._lasts = {n: self._acquire_patterns(n) for n in self._all}
        self._sc = [n for n in self._all if self._ops[n].kind == "fence" and self._is_sc(n)]

    def _is_sc(self, n: int) -> bool:
        return self._ops[n].order == "sc"

    def _is_before(self, m: int, n: int) -> bool:
        return self._nodes[m][0] == self._nodes[n][0] and self._nodes[m][1] < self._nodes[n][1]

    def _same_location(self, m: int, n: int) -> bool:
        a, b = self._ops[m], self._ops[n]
        return m != n and a.is_access and b.is_access and a.location == b.location

    def _is_strong(self, m: int, n: int) -> bool:
        (one, _, a), (other, _, b) = self._nodes[m], self._nodes[n]
        if one == other:
            return m != n and not (a.is_access and b.is_access and a.location != b.location)
        return are_morally_strong(a, self._places[one], b, self._places[other])

    def _add_barriers(self, program: Program) -> None:
        """All that arrive come before all that leave."""
        sides: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
        for n, (thread, position, op) in enumerate(self._nodes):
            if op.kind == "barrier":
                before = program.threads[thread][: int(position)]
                use = sum(one.kind == "barrier" for one in before)
                sides[self._places[thread][0], use, position % 1 > 0].append(n)
        for (cta, use, leaves), nodes in sides.items():
            if not leaves:
                for n in nodes:
                    self._base[n] |= sum(1 << other for other in sides[cta, use, True])

    def _release_patterns(self, w: int) -> list[int]:
        """The first operations of the patterns whose strong write is `w`."""
        ops = self._ops
        if not (ops[w].writes and ops[w].is_strong):
            return []
        return [
            f
            for f in self._all
            if (f == w or self._po[f][w])
            and ops[f].releases
            and (ops[f].kind == "fence" or (ops[f].writes and ops[f].location == ops[w].location))
        ]

    def _acquire_patterns(self, r: int) -> list[int]:
        """The last operations of the patterns whose strong read is `r`."""
        ops = self._ops
        if not (ops[r].reads and ops[r].is_strong) or ops[r].is_red:
            return []
        return [
            last
            for last in self._all
            if (last == r or self._po[r][last])
            and ops[last].acquires
            and (
                ops[last].kind == "fence"
                or (ops[last].reads and ops[last].location == ops[r].location)
            )
        ]

    def _closed(self, relation: list[int]) -> list[int]:
        closed = relation[:]
        for k in self._all:
            for a in self._all:
                if closed[a] >> k & 1:
                    closed[a] |= closed[k]
        return closed

    def _has_cycle(self, closed: list[int]) -> bool:
        return any(closed[n] >> n & 1 for n in self._all)

    def _observed(self, source: dict[int, int | None]) -> Callable[[int], frozenset[int]]:
        """The writes that a read observes: what it reads, and through atomics what they read."""
        known: dict[int, frozenset[int]] = {}

        def observed(r: int) -> frozenset[int]:
            if r not in known:
                w = source.get(r)
                known[r] = frozenset()
                if w is not None and self._strong[w][r]:
                    through = observed(w) if self._ops[w].kind == "atomic" else frozenset()
                    known[r] = frozenset((w,)) | through
            return known[r]

        return observed

    def judge(self, reads_from: ReadsFrom, coherence: Coherence) -> Verdict:
        """The verdict of an execution."""
        source = {self._at[r]: None if w is None else self._at[w] for r, w in reads_from.items()}
        rank = {self._at[w]: k for ws in coherence.values() for k, w in enumerate(ws)}
        observed = self._observed(source)
        base = self._base[:]
        for r in source:
            for w in observed(r):
                for first in self._firsts[w]:
                    for last in self._lasts[r]:
                        if first != last and self._strong[first][last]:
                            base[first] |= 1 << last
        is_consistent, races = False, set()
        ordered_in_all: Pairs | None = None
        for order in permutations(self._sc):
            ordered = base[:]
            for f, g in combinations(order, 2):
                if self._strong[f][g]:
                    ordered[f] |= 1 << g
            ordered = self._closed(ordered)
            if self._has_cycle(ordered):
                continue
            before = self._causality(ordered, source, observed)
            if self._is_consistent(before, source, rank):
                is_consistent = True
                races |= self._unordered(before)
                now = self._ordered(before)
                ordered_in_all = now if ordered_in_all is None else ordered_in_all & now
        return Verdict(is_consistent, races, ordered_in_all or set())

    def _ordered(self, before: list[int]) -> Pairs:
        """Accesses of one location that causality orders, the earlier one first."""
        return {
            (self._event(x), self._event(y))
            for x in self._all
            for y in self._all
            if before[x] >> y & 1
        }

    def _causality(
        self,
        base: list[int],
        source: dict[int, int | None],
        observed: Callable[[int], frozenset[int]],
    ) -> list[int]:
        """Causality of accesses of one location: base causality, or observation before it."""
        before = base[:]
        for z in source:
            for x in observed(z):
                before[x] |= base[z]
        return [
            sum(1 << y for y in self._all if before[x] >> y & 1 and self._same_location(x, y))
            for x in self._all
        ]

    def _is_consistent(
        self, before: list[int], source: dict[int, int | None], rank: dict[int, int]
    ) -> bool:
        """Coherence, Atomicity, Causality and SC per location, for an executed interleaving."""
        if any(before[x] >> y & 1 and rank[x] > rank[y] for x in rank for y in rank):
            return False
        later = [
            sum(
                1 << y
                for y in rank
                if x in rank
                and self._same_location(x, y)
                and rank[x] < rank[y]
                and (self._strong[x][y] or before[x] >> y & 1)
            )
            for x in self._all
        ]
        later = self._closed(later)
        from_reads = [0] * len(self._nodes)
        for r, w in source.items():
            from_reads[r] = sum(
                1 << y
                for y in rank
                if y != r and self._same_location(r, y) and (w is None or later[w] >> y & 1)
            )
        for r, w in source.items():
            if w is not None and before[r] >> w & 1:
                return False
            for y in rank:
                if not from_reads[r] >> y & 1:
                    continue
                if before[y] >> r & 1:
                    return False
                is_atomic = self._ops[r].kind == "atomic"
                if is_atomic and self._strong[y][r] and rank[y] < rank[r]:
                    return False
        return not self._has_cycle(self._per_location(later, from_reads, source))

    def _per_location(
        self, later: list[int], from_reads: list[int], source: dict[int, int | None]
    ) -> list[int]:
        return self._closed(
            [
                sum(
                    1 << y
                    for y in self._all
                    if self._same_location(x, y)
                    and (
                        self._po[x][y]
                        or (
                            self._strong[x][y]
                            and ((later[x] | from_reads[x]) >> y & 1 or source.get(y, -1) == x)
                        )
                    )
                )
                for x in self._all
            ]
        )

    def _unordered(self, before: list[int]) -> Pairs:
        """Conflicts that are neither morally strong nor ordered."""
        return {
            (min(one, other), max(one, other))
            for x, y in combinations(self._all, 2)
            if self._same_location(x, y)
            and (self._ops[x].writes or self._ops[y].writes)
            and not self._strong[x][y]
            and not (before[x] >> y & 1 or before[y] >> x & 1)
            for one, other in [(self._event(x), self._event(y))]
        }

    def _event(self, n: int) -> Event:
        thread, position, _ = self._nodes[n]
        return thread, int(position)
