"""Litmus programs in words, their PTX, and those of classical CUDA.

Of each program in TABLE ptxemu's errors and warnings are given, and its notes of old values and of
the order of additions: none where the PTX memory model orders all. All locations are 0 at first.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NAMES = ("x", "y", "z", "f", "g", "t", "h", "d", "u", "v", "m", "sum", "flag", "in", "out")
TAKEN = "SL-", "Fig4b"
"""Names of programs whose lock begins as taken."""
RESULTS = 512
"""Offset in the array `a` of what loads have read."""
BLOCKS = 1024
"""Offset of what whole blocks write."""


class Verdict(Enum):
    """The verdict of the model."""

    RACE = "a race in every execution"
    SOME = "a race in executions that take one branch, or read one value"
    CLEAN = "no race, and sequentially consistent"
    WEAK = "no race, but an outcome that no interleaving has"
    DEADLOCK = "no execution ends"


class Published(NamedTuple):
    """One program.

    A thread's instructions: `W` store, `R` load, `until` load until a value is there, `A` atomic
    addition, `red` the same without a result, `X` exchange, `take` compare-and-swap (0 to 1, or as
    given) until it succeeds, `if` (the thread ends unless its atomic found the value), `turn` load
    until the thread's ticket is there, `F` fence, `M` membar, `B` bar.sync and `V` bar.arrive with
    a number and maybe the count of warps, `from` the number of the barrier in a register. Order and
    scope follow after dots; a bare `W` or `R` is weak. Behind `!` stands PTX.
    """

    name: str
    ctas: str
    """The CTA of each thread."""
    threads: tuple[str, ...]
    verdict: Verdict = Verdict.CLEAN


class Text:
    """The PTX of a program's threads: each the first lane of a warp."""

    def __init__(self, program: Published) -> None:
        self._program = program
        self._number = 0

    def body(self) -> str:
        """The text of all threads."""
        ctas, width = self._program.ctas, self.width
        parts = ["mov.u32 %r0, %tid.x;\nshr.u32 %r1, %r0, 5;\nmov.u32 %r2, %ctaid.x;\n"]
        parts.append(f"mad.lo.u32 %r3, %r2, {width}, %r1;\n")
        for number, thread in enumerate(self._program.threads):
            before = ctas[:number].count(ctas[number])
            parts.append(f"setp.ne.u32 %p0, %r3, {int(ctas[number]) * width + before};\n")
            parts.append(f"@%p0 bra NEXT{number};\n" + self._thread(thread))
            parts.append(f"bra END;\nNEXT{number}:\n")
        return "".join(parts) + "END:\n"

    @property
    def width(self) -> int:
        """Warps of a CTA."""
        return max(self._program.ctas.count(cta) for cta in self._program.ctas)

    @property
    def grid(self) -> int:
        """CTAs."""
        return 1 + int(max(self._program.ctas))

    def memory(self) -> NDArray[np.uint32]:
        """The array `a` as it is at first."""
        memory = np.zeros(512, np.uint32)
        if any(part in self._program.name for part in TAKEN):
            memory[4 * NAMES.index("m")] = memory[4 * NAMES.index("flag")] = 1
        return memory

    def _thread(self, thread: str) -> str:
        return "".join(
            "".join(f"{line};\n" if not line.endswith(":") else f"{line}\n" for line in lines)
            for word in thread.split(";")
            for lines in [list(self._instruction(word.split()))]
        )

    def _instruction(self, words: list[str]) -> Iterator[str]:
        """PTX of one instruction, for the warp's first lane but for barriers."""
        self._number += 1
        (opcode, *how), rest = words[0].split("."), words[1:]
        if opcode in ("F", "M"):
            yield ".".join(("fence" if opcode == "F" else "membar", *how))
        elif opcode in ("B", "V", "from"):
            yield from self._barrier(opcode, rest)
        else:
            yield "and.b32 %r4, %r0, 31"
            yield "setp.ne.u32 %p1, %r4, 0"
            yield f"@%p1 bra BEHIND{self._number}"
            if opcode.startswith("!"):
                (place,) = (word.strip("[],") for word in words if word.startswith("["))
                yield " ".join(words)[1:].replace(f"[{place}]", _place(place))
            else:
                yield from self._access(opcode, ".".join(how), rest)
            yield f"BEHIND{self._number}:"

    def _barrier(self, opcode: str, rest: list[str]) -> Iterator[str]:
        name = "bar.arrive" if opcode == "V" else "bar.sync"
        where = rest[0]
        if opcode == "from":
            yield f"mov.u32 %r9, {where}"
            where = "%r9"
        threads = f", {32 * int(rest[1])}" if len(rest) > 1 else ""
        yield f"{name} {where}{threads}"

    def _access(self, opcode: str, how: str, rest: list[str]) -> Iterator[str]:
        how = f".{how}" if how else ""
        if opcode == "if":
            yield f"setp.ne.u32 %p2, %r6, {rest[0]}"
            yield "@%p2 bra END"
            return
        place, value = _place(rest[0]), rest[1] if len(rest) > 1 else "0"
        if opcode == "W":
            yield f"st{how}.global.b32 {place}, {value}"
        elif opcode == "R":
            yield f"ld{how}.global.b32 %r5, {place}"
            yield f"st.global.b32 [%rd_a+{RESULTS + 4 * self._number}], %r5"
        elif opcode in ("until", "turn", "take"):
            yield f"SPIN{self._number}:"
            if opcode == "take":
                old, new = rest[1:] or ("0", "1")
                yield f"atom{how}.global.cas.b32 %r7, {place}, {old}, {new}"
            else:
                yield f"ld{how}.global.b32 %r7, {place}"
                old = value if opcode == "until" else "%r6"
            yield f"setp.ne.u32 %p2, %r7, {old}"
            yield f"@%p2 bra SPIN{self._number}"
        elif opcode in ("X", "A"):
            name = {"X": "exch.b32", "A": "add.u32"}[opcode]
            yield f"atom{how}.global.{name} %r6, {place}, {value}"
        else:
            yield f"{opcode}{how}.global.add.u32 {place}, {value}"


def _place(name: str) -> str:
    return f"[%rd_a+{16 * NAMES.index(name)}]"


def last_block(fence: str, behind: str = "", *, after: str, end: str = "") -> str:
    """Every thread of two blocks writes, `fence`; barrier; `behind` by thread 0, its ticket; the
    last block reads what all wrote.

    Args:
        after: the fence before it reads.
        end: what it does then.
    """
    counter = _place("f")
    reads = "".join(f"ld.global.b32 %r6, [%rd_a+{BLOCKS + 4 * n}];\n" for n in range(0, 128, 16))
    return f"""
    mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; mov.u32 %r1, %ctaid.x;
    mad.lo.u32 %r1, %r1, 64, %r0; mul.wide.u32 %rd0, %r1, 4; add.s64 %rd1, %rd_a, %rd0;
    st.global.b32 [%rd1+{BLOCKS}], %r0; {fence} bar.sync 0; {behind} mov.u32 %r8, smem;
    @!%p0 bra SKIP; atom.global.add.u32 %r5, {counter}, 1; st.shared.b32 [%r8], %r5;
    SKIP: bar.sync 0; ld.shared.b32 %r5, [%r8]; setp.eq.u32 %p2, %r5, 0; @%p2 bra OUT;
    {after} {reads} {end.format(counter)}
    OUT:"""


FENCE, MEMBAR = "fence.acq_rel.gpu;", "membar.gl;"
BLOCK_PROGRAMS = {
    "membar.gl, barrier, atomic; barrier, membar.gl": (last_block(MEMBAR, after=MEMBAR), ""),
    "fence.acq_rel before the barrier only": (last_block(FENCE, after=FENCE), "race"),
    "fence.acq_rel by thread 0 behind the barrier": (last_block("", FENCE, after=FENCE), "race"),
    "the same with membar.gl, read behind membar.gl": (last_block("", MEMBAR, after=MEMBAR), ""),
    "no fence": (last_block("", after=MEMBAR), "race"),
    "no fence before the reads": (last_block(MEMBAR, after=""), "race"),
    "the last block resets the counter by a plain store":
    (last_block(MEMBAR, after=MEMBAR, end="@%p0 st.global.b32 {}, 0;"), ""),
}  # fmt: skip
"""Programs of whole blocks, of which the one with the last ticket reads what all have written."""

SEE = "until.acquire.gpu f 1"
RAISE = "W.relaxed.gpu f 1"
PASSED = f"W x 7; {{0}} {RAISE} | {{1}} R x"
"""Message passing."""
FLAGGED = "W.volatile x 7; M.gl; W.volatile f 1 | until.volatile f 1; {0}"
LOCK = "take f; {0}R x; W x %r3; {1}{2}"
GIVE, EXCHANGE = "W.volatile f 0", "X f 0"


def twice(thread: str) -> str:
    """Two threads that do the same."""
    return f"{thread} | {thread}"


TABLE = {
    "message passing, plain flag":
    ("W x 7; W f 1 | until.volatile f 1; R x", "race mixed-race"),
    "message passing, relaxed flag, no fence":
    (PASSED.format("", "until.relaxed.gpu f 1;"), "race"),
    "message passing of a counter, all relaxed":
    (f"red.relaxed.gpu x 1; {RAISE} | until.relaxed.gpu f 1; R.relaxed.gpu x", "stale-read"),
    "message passing of a counter, release and acquire":
    (f"red.relaxed.gpu x 1; W.release.gpu f 1 | {SEE}; R.relaxed.gpu x", ""),
    "a counter that nothing orders": ("red.relaxed.gpu x 1 | R.relaxed.gpu x", "stale-read"),
    "message passing, release and acquire": (f"W x 7; W.release.gpu f 1 | {SEE}; R x", ""),
    "message passing, release without acquire":
    ("W x 7; W.release.gpu f 1 | until.relaxed.gpu f 1; R x", "race"),
    "message passing, relaxed flag between fences":
    (PASSED.format("F.acq_rel.gpu;", "until.relaxed.gpu f 1; F.acq_rel.gpu;"), ""),
    "message passing, volatile flag between membar's":
    ("W x 7; M.gl; W.volatile f 1 | until.volatile f 1; M.gl; R x", ""),
    "volatile data that two write": ("W.volatile x 1 | W.volatile x 2", "volatile-race"),
    "volatile data that two write alike": ("W.volatile x 7 | W.volatile x 7", ""),
    "volatile data that one writes and one reads":
    ("W.volatile x 7 | R.volatile x", "volatile-race"),
    "message passing of volatile data, membar.cta between CTAs":
    (FLAGGED.format("M.cta; R.volatile x"), "volatile-race"),
    "message passing of volatile data, volatile flag between membar's":
    (FLAGGED.format("M.gl; R.volatile x"), ""),
    "a volatile flag that goes back and forth":
    ("W.volatile f 1; until.volatile f 2 | until.volatile f 1; W.volatile f 2", ""),
    "a volatile store and an exchange": ("W.volatile x 7 | X.relaxed.gpu x 1", "volatile-race"),
    "a volatile store and an exchange between warps":
    ("W.volatile x 7 | X.relaxed.gpu x 1", "volatile-race"),
    "a volatile store, a volatile flag between membar's, an exchange":
    (FLAGGED.format("M.gl; X.relaxed.gpu x 1"), ""),
    "volatile data, a membar, an atomic, and an atomic that sees it":
    ("W.volatile x 7; M.gl; red f 1 | take f 1 2; R.volatile x", "missing-acquire"),
    "volatile data, a membar, an atomic; who sees it writes":
    ("W.volatile x 7; M.gl; A f 1 | take f 1 2; W.volatile x 8", "volatile-race"),
    "volatile data, a membar, an atomic; who sees it reads, then writes":
    ("W.volatile x 7; M.gl; A f 1 | take f 1 2; R.volatile x; W.volatile x 8", "missing-acquire"),
    "volatile data, an atomic, and an atomic that sees it":
    ("W.volatile x 7; red f 1 | take f 1 2; R.volatile x", "volatile-race"),
    "message passing, .cta scope between CTAs":
    ("W x 7; W.release.cta f 1 | until.acquire.cta f 1; R x", "race scope-race"),
    "message passing, .cta scope between warps":
    ("W x 7; W.release.cta f 1 | until.acquire.cta f 1; R x", ""),
    "release sequence: an atomic between release and acquire":
    ("W x 7; W.release.gpu f 1 | until.relaxed.gpu f 1; red.relaxed.gpu f 1 | "
     "until.acquire.gpu f 2; R x", ""),
    "no release sequence: a store between release and acquire":
    ("W x 7; W.release.gpu f 1 | until.relaxed.gpu f 1; W.relaxed.gpu f 2; W.relaxed.gpu g 1 | "
     "until.relaxed.gpu g 1; !ld.acquire.gpu.global.b32 %r7, [f]; R x", "race"),
    "a store between the release and the acquire, a strong read before it":
    ("W x 7; W.release.gpu f 1 | until.relaxed.gpu g 1; W.relaxed.gpu f 2; W.relaxed.gpu y 1 | "
     "until.relaxed.gpu f 1; W.relaxed.gpu g 1; until.relaxed.gpu y 1; "
     "!ld.acquire.gpu.global.b32 %r7, [f]; R x", ""),
    "three threads, release and acquire twice":
    (f"W x 7; W.release.gpu f 1 | {SEE}; W.release.gpu g 1 | until.acquire.gpu g 1; R x", ""),
    "a counter that the last of two resets": (twice("A f 1; if 1; W f 0"), ""),
    "a counter that the last of three resets": (" | ".join(["A f 1; if 2; W f 0"] * 3), ""),
    "a counter that the last resets, behind a fence":
    (twice("A f 1; if 1; F.acq_rel.gpu; W f 0"), ""),
    "a counter that the last resets, and each has read before":
    (twice("R f; A f 1; if 1; W f 0"), "race mixed-race"),
    "a relaxed store that an atomic observes, then a plain store":
    (f"{RAISE} | take.relaxed.gpu f 1 2; W f 0", ""),
    **{
        f"release fences {fences}": (PASSED.format(fences, f"{SEE};"), found)
        for fences, found in (
            ("F.acq_rel.gpu; F.acq_rel.cta;", ""), ("F.acq_rel.cta; F.acq_rel.gpu;", ""),
            ("F.acq_rel.gpu; F.acq_rel.sys; F.acq_rel.cta;", ""),
            ("M.gl; F.acq_rel.cta;", ""), ("F.acq_rel.cta;", "race"),
        )
    },
    **{
        f"acquire fences {fences}":
        (PASSED.format(before, f"until.relaxed.gpu f 1; {fences}"), found)
        for before, fences, found in (
            ("F.acq_rel.gpu;", "F.acq_rel.cta;", "race"), ("F.acq_rel.gpu;", "F.sc.cta;", "race"),
            ("F.acq_rel.gpu;", "F.acquire.cta;", "race"), ("M.gl;", "M.cta;", "race"),
            ("F.acq_rel.gpu;", "F.acq_rel.cta; F.acq_rel.gpu;", ""),
        )
    },
    "a release, then a relaxed store of the same flag":
    ("W x 7; W.release.gpu f 1; W.relaxed.gpu f 2 | until.acquire.gpu f 2; R x", ""),
    "red, then a fence: no acquire":
    ("W x 7; W.release.gpu f 1; W.relaxed.gpu g 1 | until.relaxed.gpu g 1; red.relaxed.gpu f 1; "
     "F.acq_rel.gpu; R x", "race"),
    "atom, then a fence: an acquire":
    ("W x 7; W.release.gpu f 1; W.relaxed.gpu g 1 | until.relaxed.gpu g 1; A.relaxed.gpu f 1; "
     "F.acq_rel.gpu; R x", ""),
    "an atomic of cta scope of another CTA between release and acquire":
    ("W x 7; W.release.gpu f 1 | until.relaxed.gpu f 1; red.relaxed.cta f 1; W.relaxed.gpu g 1 | "
     "until.relaxed.gpu g 1; !ld.acquire.gpu.global.b32 %r7, [f]; R x", "race scope-race"),
    "a release of 8 bytes, an acquire of 4":
    (f"W x 7; !st.release.gpu.global.b64 [f], 1 | {SEE}; R x", "race"),
    "spin lock, acquire and release":
    (twice("take.acquire.gpu f; R x; W x %r3; X.release.gpu f 0"), ""),
    "spin lock, relaxed between membar's": (twice(LOCK.format("M.gl; ", "M.gl; ", EXCHANGE)), ""),
    "spin lock, given back by a volatile store between membar's":
    (twice(LOCK.format("M.gl; ", "M.gl; ", GIVE)), ""),
    "spin lock, given back by a volatile store and by an exchange":
    (" | ".join(LOCK.format("M.gl; ", "M.gl; ", give) for give in (GIVE, EXCHANGE)), ""),
    "spin lock, no membar before it is given back":
    (twice(LOCK.format("M.gl; ", "", EXCHANGE)), "race"),
    "spin lock, no membar behind its taking": (twice(LOCK.format("", "M.gl; ", EXCHANGE)), "race"),
    "store buffering, relaxed":
    ("W.relaxed.gpu x 1; R.relaxed.gpu y | W.relaxed.gpu y 1; R.relaxed.gpu x", "stale-read"),
    "store buffering, fence.sc": ("W.relaxed.gpu x 1; F.sc.gpu; R.relaxed.gpu y | "
                                  "W.relaxed.gpu y 1; F.sc.gpu; R.relaxed.gpu x", ""),
    "load buffering, relaxed":
    ("R.relaxed.gpu y; W.relaxed.gpu x 1 | R.relaxed.gpu x; W.relaxed.gpu y 1", "stale-read"),
    "a plain store and atomics on one word": ("W x 0; red x 1 | red x 1", "lost-update"),
    "atomics of .cta scope from two CTAs": (twice("red.relaxed.cta x 1"), "scope-race"),
    "additions of floats from two CTAs":
    (twice("!red.global.add.f32 [x], 1.0"), "unordered-float-additions"),
    "additions of floats, release and acquire between them":
    (f"!red.global.add.f32 [x], 1.0; W.release.gpu f 1 | {SEE}; !red.global.add.f32 [x], 1.0", ""),
    "additions of floats, a relaxed flag between them":
    (f"!red.global.add.f32 [x], 1.0; {RAISE} | until.relaxed.gpu f 1; "
     "!red.global.add.f32 [x], 1.0", "unordered-float-additions"),
    "additions of integers from two CTAs": (twice("red x 1"), ""),
    "ld.global.nc of what the kernel wrote":
    (f"W x 7; W.release.gpu f 1 | {SEE}; !ld.global.nc.b32 %r5, [x]", "non-coherent-read"),
}  # fmt: skip
"""Threads, each in a CTA of its own but `between warps`, and what is found."""
