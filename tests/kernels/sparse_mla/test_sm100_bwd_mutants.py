"""The Blackwell backward with synchronisation removed or weakened: ptxemu notices it.

`make mutate` tries all mutants; here is a draw of those that it found to be noticed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from workbench.mutation.tables import read_table

from ptxemu.cli.main import main as ptxemu
from ptxemu.mutate import (
    Equivalents,
    Mutation,
    Replay,
    Trial,
    fingerprint,
    measure,
    mutations_of,
)
from ptxemu.mutate.runner import CAUGHT, NOTED, POLICIES, SURVIVED
from ptxemu.saved_launch import load_launch
from tests.kernels.findings import ORDER_OF_SUMS

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "workbench/results/mutation"
DOCUMENT = read_table(RESULTS / "mutation-mla-bwd-sm_100a.json")
SCORE: list[dict[str, Any]] = DOCUMENT["mutants"]
SEED, COUNT = 6, 20
QUICK = (POLICIES[2], POLICIES[0])
"""Copies at once, which costs a quarter, then at random."""


def name_of(category: str, number: int, mutation: str) -> str:
    """As `ptxemu mutate` lists it: "barrier#3 removed"."""
    return f"{category}#{number} {mutation}"


def drawn() -> list[str]:
    """Of those that the first launch caught one of each category, then any.

    The others are redundant, which is measured, or equivalent, each of which is argued in
    `equivalent/mla-bwd-sm_100a.txt`, or need the second, longer launch.
    """
    draw = random.Random(SEED)
    caught = [m for m in SCORE if (m["verdict"], m.get("launch")) == (CAUGHT, 0)]
    picked = [
        draw.choice([mutant for mutant in caught if mutant["category"] == category])
        for category in sorted({mutant["category"] for mutant in caught})
    ]
    others = [mutant for mutant in caught if mutant not in picked]
    picked += draw.sample(others, COUNT - len(picked))
    return [name_of(m["category"], m["number"], m["mutation"]) for m in picked]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """The first launch of `make mutate`."""
    folder = tmp_path_factory.mktemp("launches")
    script = str(ROOT / "workbench/launches/launch_sm100_backward.py")
    save = ["--arch", "sm_100a", "--quiet", "--no-check", "--save", str(folder)]
    size = ["--topk", "64", "--queries", "2", "--index-stages", "4"]
    assert ptxemu(["exec", *save, script, *size]) == 0
    (path,) = folder.glob("backward_kernel*.launch")
    return Replay(load_launch(path), ignored=(ORDER_OF_SUMS,))


@pytest.fixture(scope="module")
def mutants(launch: Replay) -> dict[str, Mutation]:
    """All mutants of the kernel by name."""
    found = mutations_of(launch.module.syntax.functions[launch.kernel])
    return {name_of(m.site.category, m.site.number, m.name): m for m in found}


@pytest.fixture(scope="module")
def trial(launch: Replay, mutants: dict[str, Mutation]) -> Trial:
    """Runs them; another note is enough, for the kernel's other tests allow none."""
    baseline = measure(launch, QUICK)
    assert baseline.faults == set()
    return Trial([launch], [baseline], QUICK, list(mutants.values()), Equivalents(), notes=True)


@pytest.mark.parametrize("name", drawn())
def test_a_mutant_is_noticed(name: str, mutants: dict[str, Mutation], trial: Trial) -> None:
    result = trial.judge(list(mutants).index(name))
    assert (result.verdict, result.message != "") == (CAUGHT, True)


def test_the_score_and_the_arguments_are_of_this_kernel(
    launch: Replay, mutants: dict[str, Mutation]
) -> None:
    """If not: `make mutate`, and argue again what survives."""
    assert DOCUMENT["ptx"] == fingerprint(launch.module.syntax.functions[launch.kernel])
    scored = [name_of(m["category"], m["number"], m["mutation"]) for m in SCORE]
    assert scored == list(mutants)
    text = (RESULTS / "equivalent/mla-bwd-sm_100a.txt").read_text(encoding="utf-8")
    assert Equivalents.parse(text).strangers(mutants.values()) == []


def test_every_mutant_is_caught_or_explained() -> None:
    assert [m for m in SCORE if m["verdict"] in (SURVIVED, NOTED)] == []
