"""The indexer's kernels on ptxemu, with a plan and clusters of the test's own choice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from flashdsa.backends.emulated.runner import POISON, Emulator
from flashdsa.dispatch.registration import custom_op
from flashdsa.kernels.indexer.plan import By, Lists, SelectPlan, Sharing
from flashdsa.kernels.indexer.sizes import SLOT_HEADER_WORDS
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.ops.indexer import DSA_TOPK_INDEXER, TopkIndexerOperands
from ptxemu import Policy
from tests.kernels.findings import RISING_BOUND
from tests.kernels.indexer.inputs import Inputs
from workbench.small_calls.direct import launch_indexer

SPLITS = IndexerPlan(
    num_heads=16,
    rows=By.CLUSTERS,
    sharing=Sharing(select_pages=1, merge_pages=3),
    lists=Lists(capacity=3072, first_fill_pages=10, fill_step_pages=2, most_topk=512),
)
"""Selecting takes next to no time, so that short rows are split as long ones are; lists are short,
so that they are soon cut."""
UNTOUCHED = int.from_bytes(bytes([POISON] * 4), "little")


def assert_as_the_cpu(
    plan: SelectPlan,
    inputs: Inputs,
    num_clusters: int = 2,
    cluster_size: int = 2,
    seed: int = 0,
    *,
    topk: int = 512,
    by_score: bool = False,
    positions: bool = False,
    warnings: Iterable[tuple[str, str]] = (),
) -> Emulator:
    """The kernel's ids equal the CPU backend's, whose check of values is off; nothing is found."""
    expected, got = inputs.output(topk), inputs.output(topk)
    custom_op(DSA_TOPK_INDEXER)(
        *inputs, expected, None, by_score, positions, plan.entry_tokens, 1, False, "cpu"
    )
    clusters = num_clusters, cluster_size
    operands = TopkIndexerOperands(*inputs, got)
    launch = emulate_indexer(
        plan, operands, clusters=clusters, seed=seed, by_score=by_score, positions=positions
    )
    wrong = (got != expected).any(1).nonzero().flatten().tolist()
    assert wrong == []
    found = {(f.code, Path(f.first.source_file or "").name) for f in launch.findings}
    assert found <= {RISING_BOUND, *warnings}, found
    return launch


def emulate_indexer(
    plan: SelectPlan,
    operands: TopkIndexerOperands,
    *,
    clusters: tuple[int, int] = (2, 2),
    seed: int = 0,
    by_score: bool = False,
    positions: bool = False,
) -> Emulator:
    """One checked launch of the plan's kernel, which must leave its counters at 0.

    Args:
        clusters: how many, and CTAs of each.
        seed: of the order in which warps and asynchronous work take turns.

    Raises:
        ptxemu.HazardError: the check found an error.
    """
    runner = Emulator(policy=Policy(seed=seed))
    workspace = launch_indexer(
        runner, plan, operands, clusters, sorted=by_score, positions=positions
    )
    if workspace:
        runner.workspaces[0] = workspace
        assert not workspace[0].any(), "the counters of the next launch are not 0"
    return runner


def published_counts(launch: Emulator) -> Tensor:
    """The number of entries in each slot of a launch of `emulate_indexer`; UNTOUCHED: none were
    published."""
    slots = launch.workspaces[0][1]
    headers = slots.flatten()[: len(slots) * SLOT_HEADER_WORDS]
    return headers.view(len(slots), SLOT_HEADER_WORDS)[:, 0]
