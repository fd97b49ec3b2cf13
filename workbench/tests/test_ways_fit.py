"""The constants of the choice are held by the documents of ways, and can be fitted to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.sparse_mla_ways import Call, Way, choose
from flashdsa.heuristics.h200 import SPARSE_MLA
from workbench.draws.distribution import draw
from workbench.draws.inputs import make_task
from workbench.draws.run import read_document
from workbench.pretended_gpu import pretended_gpu
from workbench.ways.fit import call_of, changed, fitted, loss, paths, tried
from workbench.ways.measure import CHOICES

DOCUMENTS = sorted(Path(__file__).parents[1].glob("results/ways/*.json.gz"))
MOST_LOSS = 1.03
"""Time that the choice takes of each draw's fastest way, in the mean of all documents. New
constants, or new documents, must not choose worse."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [row for path in DOCUMENTS for row in read_document(path)["draws"]]


def test_todays_choice_is_nearly_the_fastest_of_recorded_ways(rows: list[dict[str, Any]]) -> None:
    calls = tried(rows)
    assert len(calls) > 200
    assert 1 < loss(calls, SPARSE_MLA) < MOST_LOSS
    worse = replace(SPARSE_MLA, forward_gain=10.0, dealt_gain=10.0)
    assert loss(calls, worse) > MOST_LOSS


@pytest.mark.parametrize("operation", ["forward", "prompts", "decode", "chats"])
def test_a_draw_says_its_call(operation: str) -> None:
    """As the backend describes the operands, of which it needs the values of none."""
    seen: list[Any] = []

    def asked(runner: Runner, call: Call) -> Way:
        seen.append(call)
        return choose(runner, call)

    with pretended_gpu():
        for number in range(6):
            small = draw(operation, 5, number).small()
            task = make_task(small, "", "cpu", "sm90")
            with CHOICES[operation].replaced(asked):
                task.call()
            assert seen.pop() == call_of(small) and not seen


def test_constants_are_fitted(rows: list[dict[str, Any]]) -> None:
    calls = tried(rows)[:30]
    spoilt = replace(SPARSE_MLA, dealt_gain=SPARSE_MLA.dealt_gain * 3)
    assert loss(calls, fitted(calls, spoilt)) < loss(calls, spoilt)
    path = ("dealt", "packed", "tile")
    assert path in set(paths(SPARSE_MLA))
    assert changed(SPARSE_MLA, path, 2).dealt["packed"].tile == 2 * SPARSE_MLA.dealt["packed"].tile
