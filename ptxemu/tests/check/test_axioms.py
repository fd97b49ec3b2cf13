"""The check against the axioms of the PTX memory model, on every interleaving of small programs.

Behind the first race of an interleaving the model says nothing more of it, so that is what the two
must agree on: up to the first access that races with an earlier one nothing is reported, and that
access is. What is reported behind it must be a race, too.
"""

import random
from collections.abc import Iterator
from typing import TypeAlias

import pytest
from tests.check.axioms import Axioms, Pairs, Verdict
from tests.check.interleavings import Interleaving, orders
from tests.check.small_programs import Event, Program, programs

ALL = list(programs())
SHAPES = sorted({program.shape for program in ALL})
Pair: TypeAlias = tuple[Event, Event]


def sample(shape: str, count: int, seed: int) -> list[Program]:
    """Some programs of a shape."""
    return random.Random(seed).sample([p for p in ALL if p.shape == shape], count)


def is_settled(program: Program, executed: list[Event], verdict: Verdict, pair: Pair) -> bool:
    """Whether the first of two racing writes was overwritten, in causality order, by a strong
    write that the second does not race with: coherence keeps the first from coming back."""
    first, second = sorted(pair, key=executed.index)
    return program.op(first).writes and any(
        program.op(g).writes
        and program.op(g).is_strong
        and (first, g) in verdict.ordered
        and (min(g, second), max(g, second)) not in verdict.races
        for g in executed[executed.index(first) + 1 : executed.index(second)]
        if program.op(g).location == program.op(first).location
    )


def first_racing(program: Program, executed: list[Event], verdict: Verdict) -> Pairs:
    """The races of the first access that races with one before it."""
    races = {p for p in verdict.races if not is_settled(program, executed, verdict, p)}
    for position, event in enumerate(executed):
        before = executed[:position]
        own = {pair for pair in races if event in pair and (pair[0] in before or pair[1] in before)}
        if own:
            return own
    return set()


def verdicts(program: Program) -> Iterator[tuple[tuple[int, ...], Interleaving, Verdict]]:
    """The axioms' verdict of every interleaving of a program."""
    judged: dict[object, Verdict] = {}
    for order, run in orders(program):
        key = tuple(sorted(run.reads_from.items())), tuple(sorted(run.coherence.items()))
        if key not in judged:
            judged[key] = Axioms(program, set(run.executed)).judge(run.reads_from, run.coherence)
            assert judged[key].is_consistent, f"{program}: {key}"
        yield order, run, judged[key]


def disagreements(program: Program) -> tuple[int, list[str]]:
    """The number of a program's interleavings, and those that the two judge differently."""
    count, wrong = 0, []
    for order, plain, verdict in verdicts(program):
        count += 1
        found = Interleaving(program, order, is_checked=True).found()
        first = first_racing(program, plain.executed, verdict)
        if not found <= verdict.races or (first and not first & found):
            wrong.append(f"{program} in the order {order}: {found} for {verdict.races}")
    return count, wrong


@pytest.mark.parametrize("shape", SHAPES)
def test_the_check_finds_the_races_of_the_axioms(shape: str) -> None:
    few = 2 if shape == "IRIW" else 6
    found = [disagreements(program) for program in sample(shape, few, seed=1)]
    assert sum(count for count, _ in found) >= 4
    assert [one for _, wrong in found for one in wrong] == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_check_finds_the_races_of_the_axioms_in_many_programs(shape: str) -> None:
    many = 60 if shape == "IRIW" else 400
    found = [disagreements(program) for program in sample(shape, many, seed=2)]
    assert [one for _, wrong in found for one in wrong] == []


def test_the_sample_has_races_and_programs_without() -> None:
    are_racy = [
        any(verdict.races for _, _, verdict in verdicts(program))
        for shape in SHAPES
        for program in sample(shape, 1 if shape == "IRIW" else 3, seed=1)
    ]
    assert sum(are_racy) >= 10 and len(are_racy) - sum(are_racy) >= 10
