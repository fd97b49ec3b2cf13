"""Kernels with synchronisation removed or weakened: ptxemu notices it.

`python -m workbench mutate` tries all mutants; here is a draw of those that it found to be noticed,
of which the first one of each kernel always runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from ptxemu.mutate import Equivalents, Replay, Trial, measure, mutations_of
from ptxemu.mutate.replay import fingerprint
from ptxemu.mutate.runner import CAUGHT, POLICIES
from ptxemu.saved_launch import load_launch
from workbench.mutation.campaign import argued, read_rows
from workbench.small_calls.call import IGNORED, SmallCall, record
from workbench.small_calls.table import TABLE

AT_ONCE = (POLICIES[2],)
"""Copies at once, which costs a quarter."""
LAUNCHES: dict[str, SmallCall] = {
    "mla-bwd-sm_100a": TABLE["mla-bwd-sm_100a"].calls[0],
    "mla-fwd-drawn-sm_90a": TABLE["mla-fwd-drawn-sm_90a"].calls[0],
}
SCHEDULES = {"mla-bwd-sm_100a": (*AT_ONCE, POLICIES[0])}
"""At random, too."""
DRAWN = {
    # One of each category.
    "mla-bwd-sm_100a": (
        "arrive#3 removed", "barrier#8 removed", "cluster-barrier#2 removed", "commit#2 removed",
        "expect-tx#1 +16 bytes", "group-wait#3 removed", "init-fence#1 removed",
        "mbarrier-wait#29 true at once", "memory-fence#2 removed", "order#3 relaxed",
        "proxy-fence#1 removed", "tcgen05-fence#11 removed", "tcgen05-wait#16 removed",
    ),
    # The order of the lists; an item that was drawn, in front of the first step and after any.
    "mla-fwd-drawn-sm_90a": ("barrier#3 removed", "barrier#6 removed", "barrier#10 removed"),
}  # fmt: skip


@dataclass(frozen=True)
class Mutants:
    """A kernel's mutants by name, and what tries them; another note is enough to catch one."""

    trial: Trial
    names: list[str]
    ptx: str
    strangers: list[str]


@cache
def mutants_of(kernel: str) -> Mutants:
    """They run on one launch, whose original has no fault."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "first.launch"
        record(LAUNCHES[kernel], TABLE[kernel].entry, path)
        launch = Replay(load_launch(path), ignored=IGNORED)
    function = launch.module.syntax.functions[launch.kernel]
    found = list(mutations_of(function))
    policies = SCHEDULES.get(kernel, AT_ONCE)
    baseline = measure(launch, policies)
    assert baseline.faults == set()
    trial = Trial([launch], [baseline], policies, found, Equivalents(), notes=True)
    names = [f"{m.site.category}#{m.site.number} {m.name}" for m in found]
    return Mutants(trial, names, fingerprint(function), argued(kernel).strangers(found))


def counts(kernel: str) -> dict[str, Any]:
    """The kernel's row of the table."""
    return next(row for row in read_rows() if row["name"] == kernel)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(kernel, name, marks=() if name is names[0] else pytest.mark.slow)
        for kernel, names in DRAWN.items()
        for name in names
    ],
)
def test_a_mutant_is_noticed(kernel: str, name: str) -> None:
    mutants = mutants_of(kernel)
    result = mutants.trial.judge(mutants.names.index(name))
    assert (result.verdict, result.message != "") == (CAUGHT, True)


@pytest.mark.parametrize("kernel", DRAWN)
def test_the_counts_and_the_arguments_are_of_this_kernel(kernel: str) -> None:
    """If not: `python -m workbench mutate`, and argue again what survives."""
    mutants, counted = mutants_of(kernel), counts(kernel)
    assert (counted["ptx"], counted["mutants"]) == (mutants.ptx, len(mutants.names))
    assert mutants.strangers == []


def test_every_mutant_of_the_blackwell_backward_is_caught_or_explained() -> None:
    counted = counts("mla-bwd-sm_100a")
    assert counted["survived"] == counted["not reached"] == 0
