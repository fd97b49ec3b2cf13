"""Litmus programs: the check's verdict is the model's, on every schedule."""

from collections.abc import Iterator

import pytest
from tests.check.checked_run import POLICIES, check
from tests.check.litmus import BLOCK_PROGRAMS, TABLE, Published, Text, Verdict
from tests.check.published_litmus import PROGRAMS, RACE, SOME, WEAK

from ptxemu.check import Finding
from ptxemu.errors import DeadlockError
from ptxemu.sched.policy import Policy


def found(one: Published, policies: list[Policy] = POLICIES) -> Iterator[list[Finding] | None]:
    """What is found on every schedule; None where it is a deadlock."""
    text = Text(one)
    for policy in policies:
        try:
            yield check(
                text.body(), grid=text.grid, block=32 * text.width, policy=policy, a=text.memory()
            )
        except DeadlockError:
            yield None


def verdict(findings: list[Finding] | None) -> set[str]:
    """The codes of a row of the table."""
    assert findings is not None
    notes = ("missing-acquire", "stale-read", "unordered-float-additions")
    return {f.code for f in findings if f.level != "note" or f.code in notes}


@pytest.mark.parametrize("name", TABLE)
def test_the_verdict_is_that_of_the_table(name: str) -> None:
    threads, codes = TABLE[name]
    parts = tuple(threads.split("|"))
    ctas = "0" * len(parts) if "between warps" in name else "012"[: len(parts)]
    for findings in found(Published(name, ctas, parts)):
        assert verdict(findings) == set(codes.split())


@pytest.mark.parametrize("name", BLOCK_PROGRAMS)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_last_block_reads_what_all_wrote(name: str, policy: Policy) -> None:
    body, codes = BLOCK_PROGRAMS[name]
    findings = check(body, grid=2, block=64, policy=policy, how={"shared": 1024}, a=512)
    assert verdict(findings) == set(codes.split())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_verdict_is_that_of_the_model(program: Published) -> None:
    all_found = list(found(program))
    if program.verdict is Verdict.DEADLOCK:
        assert all_found == [None] * len(POLICIES)
        return
    levels = [{f.level for f in one or ()} - {"note"} for one in all_found]
    assert None not in all_found
    if program.verdict is RACE:
        assert all("error" in one for one in levels)
    elif program.verdict is SOME:
        assert any("error" in one for one in levels)
    else:
        assert not any(levels)


# Weak outcomes of strong accesses: noted on some schedule, and not where they are forbidden.

SEEDS = [Policy(seed=seed) for seed in range(16)]
SHAPES = {
    "2+2W": "W x 1; {f}; W y 2 | W y 1; {f}; W x 2",
    "SB": "W x 1; {f}; R y | W y 1; {f}; R x",
    "R": "W x 1; {f}; W y 1 | W y 2; {f}; R x",
    "S": "W x 2; {f}; W y 1 | R y; {f}; W x 1",
    "LB": "R x; {f}; W y 1 | R y; {f}; W x 1",
    "MP": "W x 2; {f}; W y 1 | R y; {f}; R x",
    "WRC": "W x 1 | R x; {f}; W y 1 | R y; {f}; R x",
    "IRIW": "W x 1 | W y 1 | R x; {f}; R y | R y; {f}; R x",
    # It races in no interleaving: each looks at the other's flag once, behind setting its own.
    "exclusion by flags": "W f 1; {f}; R g | W g 1; {f}; R f",
}
NO_FENCE = "F.acquire.cta"
"""A fence that orders nothing here."""


def is_noted(threads: str) -> bool:
    """Whether any seed shows a weak order of relaxed accesses."""
    parts = tuple(
        threads.replace("W ", "W.relaxed.gpu ").replace("R ", "R.relaxed.gpu ").split("|")
    )
    runs = found(Published("", "0123"[: len(parts)], parts, WEAK), SEEDS)
    return any(f.code == "weak-order" for one in runs for f in one or ())


@pytest.mark.parametrize("shape", SHAPES)
def test_some_schedule_shows_what_hardware_may_do(shape: str) -> None:
    fence = "F.acq_rel.gpu" if shape.startswith("exclusion") else NO_FENCE
    assert is_noted(SHAPES[shape].format(f=fence))


NOTED_TOO = ("IRIW", "WRC")
"""Shapes that a read which would itself synchronise, had it read another write, is noted in."""


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in NOTED_TOO])
def test_no_schedule_does_where_fences_forbid_it(shape: str) -> None:
    assert not is_noted(SHAPES[shape].format(f="F.sc.gpu"))


@pytest.mark.parametrize(
    "threads",
    [
        # Both tell, and wait for the other.
        "W.release.gpu x 1; until.acquire.gpu y 1|W.release.gpu y 1; until.acquire.gpu x 1",
        # A flag that goes back and forth, relaxed.
        "W x 1; until.relaxed.gpu x 2|until.relaxed.gpu x 1; W x 2",
        # Two counters, which each adds to in its own order.
        "red.relaxed.gpu x 1; red.relaxed.gpu y 1|red.relaxed.gpu y 1; red.relaxed.gpu x 1",
        # Release and acquire, through a third.
        "W x 1; W.release.gpu y 1|until.acquire.gpu y 1; W.release.gpu z 1|"
        "until.acquire.gpu z 1; R x",
    ],
    ids=["handshake", "ping-pong", "counters", "relay"],
)
def test_what_waits_or_is_ordered_is_not_noted(threads: str) -> None:
    assert not is_noted(threads)
