"""The indexer's kernels on ptxemu, with a plan and clusters of the test's own choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.emulated.runner import POISON, Emulator
from flashdsa.kernels.catalog import INDEXER, TOPK_INDICES
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.operands import TopkIndexerOperands
from ptxemu import Policy


def emulate_indexer(
    plan: IndexerPlan,
    operands: TopkIndexerOperands,
    *,
    clusters: tuple[int, int, int] = (2, 2, 1),
    seed: int = 0,
) -> Emulator:
    """One checked launch of the plan's kernel, which must leave its counters at 0.

    Args:
        clusters: how many, CTAs of each, clusters of each row of `plan.split_pages` pages or more.
        seed: of the order in which warps and asynchronous work take turns.

    Raises:
        ptxemu.HazardError: the check found an error.
    """
    runner = Emulator(policy=Policy(seed=seed))
    number, size, splits = clusters
    assert splits == 1 or plan.splits
    how: tuple[Any, ...] = (number, size)
    arrivals = torch.zeros(len(operands.seq_lens), dtype=torch.int32)
    if plan.splits:
        slots = runner.empty(number * size, plan.slot_words, dtype=torch.int32)
        assert (slots.view(torch.uint8) == POISON).all()
        how = (arrivals, slots, *clusters)
    q, cache, *others = operands
    function = runner.function(INDEXER, plan)
    with runner.launching():
        function(q, cache.view(torch.uint8), *others, *how)
    assert not arrivals.any(), "the counters of the next launch are not 0"
    return runner


def emulate_topk(
    plan: TopkPlan,
    scores: Tensor,
    lengths: Tensor,
    positions: Tensor,
    *,
    clusters: tuple[int, int] = (2, 2),
    seed: int = 0,
) -> Emulator:
    """One checked launch of the plan's kernel, written into `positions`.

    Args:
        clusters: how many, and CTAs of each. seed: as in `emulate_indexer`.
    """
    runner = Emulator(policy=Policy(seed=seed))
    function = runner.function(TOPK_INDICES, plan)
    with runner.launching():
        function(scores, lengths, positions, *clusters)
    return runner
