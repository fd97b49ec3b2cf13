"""Published litmus programs: the check's verdict is the model's, on every schedule."""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.check.checked_run import POLICIES, check
from tests.check.published_litmus import PROGRAMS, RACE, SOME, Published, Verdict

from ptxemu.errors import DeadlockError

NAMES = ("x", "y", "z", "f", "g", "t", "h", "d", "u", "v", "m", "sum", "flag", "in", "out")
RESULTS = 512
"""Offset in the array `a` of what loads have read."""
TAKEN = "SL-", "Fig4b"
"""Names of programs whose lock begins as taken."""


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
        if opcode == "F":
            yield f"fence.{how[0]}.{how[1]}"
        elif opcode in ("B", "V", "from"):
            yield from self._barrier(opcode, rest)
        else:
            yield "and.b32 %r4, %r0, 31"
            yield "setp.ne.u32 %p1, %r4, 0"
            yield f"@%p1 bra BEHIND{self._number}"
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
        place = f"[%rd_a+{16 * NAMES.index(rest[0])}]"
        how = f".{how}" if how else ""
        value = rest[1] if len(rest) > 1 else "0"
        if opcode == "W":
            yield f"st{how}.global.b32 {place}, {value}"
        elif opcode == "R":
            yield f"ld{how}.global.b32 %r5, {place}"
            yield f"st.global.b32 [%rd_a+{RESULTS + 4 * self._number}], %r5"
        elif opcode in ("until", "turn"):
            yield f"SPIN{self._number}:"
            yield f"ld{how}.global.b32 %r5, {place}"
            yield f"setp.ne.u32 %p2, %r5, {value if opcode == 'until' else '%r6'}"
            yield f"@%p2 bra SPIN{self._number}"
        elif opcode == "take":
            yield f"SPIN{self._number}:"
            yield f"atom{how}.global.cas.b32 %r5, {place}, 0, 1"
            yield "setp.ne.u32 %p2, %r5, 0"
            yield f"@%p2 bra SPIN{self._number}"
        elif opcode == "X":
            yield f"atom{how}.global.exch.b32 %r6, {place}, {value}"
        elif opcode == "A":
            yield f"atom{how}.global.add.u32 %r6, {place}, {value}"
        else:
            yield f"{opcode}{how}.global.add.u32 {place}, {value}"


def levels(program: Published) -> Iterator[set[str]]:
    """The levels of what is found on every schedule, but for notes; or "deadlock"."""
    text = Text(program)
    for policy in POLICIES:
        memory = np.zeros(512, np.uint32)
        if any(part in program.name for part in TAKEN):
            memory[4 * NAMES.index("m")] = memory[4 * NAMES.index("flag")] = 1
        grid, block = 1 + int(max(program.ctas)), 32 * text.width
        try:
            found = check(text.body(), grid=grid, block=block, policy=policy, a=memory)
        except DeadlockError:
            yield {"deadlock"}
            continue
        yield {f.level for f in found} - {"note"}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_verdict_is_that_of_the_model(program: Published) -> None:
    found = list(levels(program))
    if program.verdict is Verdict.DEADLOCK:
        assert found == [{"deadlock"}] * len(POLICIES)
    elif program.verdict is RACE:
        assert all("error" in one for one in found)
    elif program.verdict is SOME:
        assert any("error" in one for one in found)
    else:
        assert not any(found)
