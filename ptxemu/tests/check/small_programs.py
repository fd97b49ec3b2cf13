"""Small programs of two to four threads: every shape with each order, fence and scope in it.

They are judged twice: by the axioms of the PTX memory model (`axioms`), and by the check, for each
order in which their accesses can come.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

CTA, CLUSTER, GPU = 1, 2, 3
LEVELS = (CTA, CLUSTER, GPU)
SCOPES = {CTA: "cta", CLUSTER: "cluster", GPU: "gpu"}
Place: TypeAlias = tuple[int, int]
"""CTA and cluster of a thread."""
Event: TypeAlias = tuple[int, int]
"""Thread, and the position in its program."""


@dataclass(frozen=True)
class Op:
    """One instruction."""

    kind: str
    """read, write, atomic (adds), fence, barrier (of the CTA)."""
    location: str = ""
    value: int = 0
    order: str = "weak"
    """weak, relaxed, acquire, release, acq_rel, sc."""
    scope: int = 0
    register: str = ""
    """That a read's value goes to; an atomic without one is a `red`."""
    guard: tuple[str, int] | None = None
    """Register and value: the instruction is executed only if the register has it."""

    @property
    def is_access(self) -> bool:
        return self.kind in ("read", "write", "atomic")

    @property
    def reads(self) -> bool:
        return self.kind in ("read", "atomic")

    @property
    def writes(self) -> bool:
        return self.kind in ("write", "atomic")

    @property
    def is_red(self) -> bool:
        return self.kind == "atomic" and not self.register

    @property
    def is_strong(self) -> bool:
        return self.kind == "fence" or self.order != "weak"

    @property
    def acquires(self) -> bool:
        return self.order in ("acquire", "acq_rel", "sc")

    @property
    def releases(self) -> bool:
        return self.order in ("release", "acq_rel", "sc")


@dataclass(frozen=True)
class Program:
    """Threads at their places."""

    shape: str
    places: tuple[Place, ...]
    threads: tuple[tuple[Op, ...], ...]

    def op(self, event: Event) -> Op:
        """The instruction of an event."""
        return self.threads[event[0]][event[1]]


def distance(one: Place, other: Place) -> int:
    """The smallest level of scopes that holds both."""
    if one[0] == other[0]:
        return CTA
    return CLUSTER if one[1] == other[1] else GPU


def write(at: str, value: int, order: str = "weak", scope: int = 0, guard: object = None) -> Op:
    """A store."""
    return Op("write", at, value, order, scope, guard=guard)  # type: ignore[arg-type]


def read(at: str, to: str, order: str = "weak", scope: int = 0, guard: object = None) -> Op:
    """A load."""
    return Op("read", at, 0, order, scope, to, guard)  # type: ignore[arg-type]


def atomic(at: str, to: str, order: str = "relaxed", scope: int = GPU) -> Op:
    """An atomic addition of one."""
    return Op("atomic", at, 1, order, scope, to)


def fence(order: str, scope: int) -> Op:
    """A fence."""
    return Op("fence", order=order, scope=scope)


BARRIER = Op("barrier")
Style: TypeAlias = tuple[tuple[Op, ...], str, int]
"""How a thread signals or looks: fences, the order of the access itself and its scope."""
_FENCES = (
    *((fence(order, scope),) for order in ("acq_rel", "sc") for scope in LEVELS),
    (fence("acq_rel", GPU), fence("acq_rel", CTA)),
    (fence("release", GPU),),
    (fence("acquire", GPU),),
)
STYLES: tuple[Style, ...] = (
    *(((), order, scope) for order in ("relaxed", "ordered") for scope in LEVELS),
    *((fences, "relaxed", GPU) for fences in _FENCES),
)
_TWO: tuple[tuple[Place, ...], ...] = (((0, 0), (0, 0)), ((0, 0), (1, 0)), ((0, 0), (1, 1)))
_THREE: tuple[tuple[Place, ...], ...] = (
    ((0, 0), (1, 1), (2, 2)),
    ((0, 0), (0, 0), (1, 1)),
    ((0, 0), (1, 1), (1, 1)),
)
_FOUR: tuple[tuple[Place, ...], ...] = (
    ((0, 0), (1, 1), (2, 2), (3, 3)),
    ((0, 0), (0, 0), (1, 1), (2, 2)),
)


def _program(shape: str, places: tuple[Place, ...], *threads: tuple[Op, ...]) -> Program:
    return Program(shape, places, threads)


def _put(at: str, value: int, style: Style, guard: object = None) -> Op:
    order = "release" if style[1] == "ordered" else "relaxed"
    return write(at, value, order, style[2], guard)


def _get(at: str, to: str, style: Style, guard: object = None) -> Op:
    order = "acquire" if style[1] == "ordered" else "relaxed"
    return read(at, to, order, style[2], guard)


def _take(at: str, style: Style, ordered: str = "acq_rel") -> Op:
    return atomic(at, "a", ordered if style[1] == "ordered" else "relaxed", style[2])


def _data(op: Op, *, weak: bool) -> Op:
    return op if weak else replace(op, order="relaxed", scope=GPU)


def _messages(places: tuple[Place, ...], a: Style, b: Style) -> Iterator[Program]:
    """Message passing: data, and a flag."""
    for weak in (True, False):
        put = _data(write("x", 1), weak=weak)
        yield _program(
            "MP",
            places,
            (put, *a[0], _put("y", 1, a)),
            (_get("y", "a", b), *b[0], _data(read("x", "b", guard=("a", 1)), weak=weak)),
        )
        got = _data(read("x", "b", guard=("a", 2)), weak=weak)
        yield _program(
            "MP, an atomic between",
            (*places, places[0]),
            (put, *a[0], _put("y", 1, a)),
            (_get("y", "a", b), *b[0], got),
            (atomic("y", "c"),),
        )
        yield _program(
            "MP, two writes",
            places,
            (put, _put("y", 1, a), *a[0], write("y", 2, "relaxed", GPU)),
            (read("y", "c", "relaxed", GPU), _get("y", "a", b), *b[0], got),
        )


def _counters(places: tuple[Place, ...], a: Style, b: Style) -> Iterator[Program]:
    """Counters, by which the last one knows that it is the last."""
    for resets in (False, True):
        threads = []
        for number, style in enumerate((a, b)):
            reset = (write("c", 0, guard=("a", 1)),) if resets else ()
            looked = read("z" if number else "x", "b", guard=("a", 1))
            mine = write("x" if number else "z", 1)
            threads.append((mine, *style[0], _take("c", style), *style[0], looked, *reset))
        yield Program("last block", places, tuple(threads))
    yield Program(
        "reset",
        places,
        tuple(
            (atomic("c", "a", "relaxed", s[2]), *s[0], write("c", 0, guard=("a", 1)))
            for s in (a, b)
        ),
    )
    yield _program(
        "reset, seen by a read",
        places,
        (atomic("c", ""), *a[0], _put("y", 1, a)),
        (read("c", "a", "relaxed", b[2]), *b[0], write("c", 0, guard=("a", 1))),
    )
    yield _program(
        "reset, a store seen by an atomic",
        places,
        (_put("c", 1, a),),
        (atomic("c", "a", "relaxed", b[2]), *b[0], write("c", 0, guard=("a", 1))),
    )
    yield _program(
        "red and fence",
        places,
        (write("x", 1), *a[0], _put("y", 1, a)),
        (atomic("y", "", "relaxed", b[2]), *b[0], read("x", "b")),
    )
    yield Program(
        "lock",
        places,
        tuple(
            (_take("l", s, "acquire"), *s[0], write("x", 1, guard=("a", 0)), *s[0], _put("l", 0, s))
            for s in (a, b)
        ),
    )


def _pairs(places: tuple[Place, ...], a: Style, b: Style) -> Iterator[Program]:
    """Two threads and two locations, all strong; and exclusion by flags."""
    x, y = "x", "y"
    shapes = {
        "SB": ((_put(x, 1, a), *a[0], _get(y, "a", a)), (_put(y, 1, b), *b[0], _get(x, "b", b))),
        "LB": ((_get(x, "a", a), *a[0], _put(y, 1, a)), (_get(y, "b", b), *b[0], _put(x, 1, b))),
        "S": (
            (_put(x, 2, a), *a[0], _put(y, 1, a)),
            (_get(y, "b", b), *b[0], write(x, 1, "relaxed", GPU, ("b", 1))),
        ),
        "R": ((_put(x, 1, a), *a[0], _put(y, 1, a)), (_put(y, 2, b), *b[0], _get(x, "b", b))),
        "2+2W": ((_put(x, 1, a), *a[0], _put(y, 2, a)), (_put(y, 1, b), *b[0], _put(x, 2, b))),
        "CoRR": ((_put(x, 1, a), *a[0], _put(x, 2, a)), (_get(x, "a", b), *b[0], _get(x, "b", b))),
        "flags": tuple(
            (_put("f" + own, 1, s), *s[0], _get("f" + other, "a", s), write(x, 1, guard=("a", 0)))
            for s, own, other in ((a, "0", "1"), (b, "1", "0"))
        ),
    }
    for shape, threads in shapes.items():
        yield Program(shape, places, threads)


def _triples(places: tuple[Place, ...], a: Style, b: Style) -> Iterator[Program]:
    """Three threads."""
    yield _program(
        "WRC",
        places,
        (write("x", 1),),
        (read("x", "c"), *a[0], _put("y", 1, a)),
        (_get("y", "a", b), *b[0], read("x", "b", guard=("a", 1))),
    )
    yield _program(
        "WRC, strong",
        places,
        (write("x", 1, "relaxed", GPU),),
        (read("x", "c", "relaxed", GPU), *a[0], _put("y", 1, a)),
        (_get("y", "a", b), *b[0], read("x", "b", "relaxed", GPU, ("a", 1))),
    )
    yield _program(
        "observed, then told",
        places,
        (write("x", 1, "relaxed", GPU),),
        (read("x", "c", "relaxed", GPU), *a[0], _put("y", 1, a)),
        (_get("y", "a", b), *b[0], write("x", 2, guard=("a", 1))),
    )
    yield _program(
        "ISA2",
        places,
        (write("x", 1), *a[0], _put("y", 1, a)),
        (_get("y", "a", b), *b[0], _put("z", 1, b, ("a", 1))),
        (_get("z", "b", a), *a[0], read("x", "c", guard=("b", 1))),
    )
    yield _program(
        "reset, a store seen by an atomic through another",
        places,
        (_put("c", 1, a),),
        (atomic("c", "b", "relaxed", a[2]),),
        (atomic("c", "a", "relaxed", b[2]), *b[0], write("c", 0, guard=("a", 2))),
    )
    told = write("s", 1, guard=("a", 1))
    beside = ((0, 0), (1, places[1][1]), (1, places[1][1]))
    looked = (read("s", "c"), read("x", "b", guard=("c", 1)))
    first = (write("x", 1), *a[0], _put("y", 1, a))
    second = _get("y", "a", b)
    yield _program("barrier", beside, first, (second, told, *b[0], BARRIER), (BARRIER, *looked))
    yield _program(
        "barrier, fence", beside, first, (second, told, BARRIER), (BARRIER, *b[0], *looked)
    )


def programs() -> Iterator[Program]:
    """All programs."""
    for places, a, b in product(_TWO, STYLES, STYLES):
        yield from _messages(places, a, b)
        yield from _counters(places, a, b)
        yield from _pairs(places, a, b)
    for places, a, b in product(_THREE, STYLES, STYLES):
        yield from _triples(places, a, b)
    for places, a, b in product(_FOUR, STYLES, STYLES):
        looks = (
            (_get("x", "a", a), *a[0], _get("y", "b", a)),
            (_get("y", "c", b), *b[0], _get("x", "d", b)),
        )
        yield _program("IRIW", places, (_put("x", 1, a),), (_put("y", 1, b),), *looks)
