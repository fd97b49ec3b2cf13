"""What the Hopper indexer's slowest warp executes, counted in an emulated run of one row.

`flashdsa.analysis.model.indexer_sm90` has the counts of the benchmark's shapes;
tools/count_indexer_paths.py counts them anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.verify.emulated_indexer import compiled
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs
from flashdsa.verify.warp_path import Path, WarpPaths


class RowPaths(NamedTuple):
    """Of the CTA whose slowest warp executes most."""

    scoring: Path  # until its last matrix instruction
    ranking: Path  # what comes behind
    first_copy: Path  # a producer's way to its first page


def count_row(tokens: int, ctas: int, teams: int = 1) -> RowPaths:
    """One row of normal data on `ctas` CTAs, of which `teams` clusters are made, unchecked."""
    from ptxemu.cutedsl import emulate

    plan = IndexerPlan(teams=teams > 1)
    how: tuple[Any, ...] = (1, ctas)
    if plan.teams:
        arrivals = torch.zeros(1, dtype=torch.int32)
        slots = torch.zeros(ctas, plan.slot_words, dtype=torch.int32)
        how = (arrivals, slots, teams, ctas // teams, teams)
    inputs = make_indexer_inputs(IndexerCase("one row", (tokens,), plan.topk), seed=0)
    q, cache, *others = inputs.operands
    heard: list[WarpPaths] = []

    def listen(_: Any) -> WarpPaths:
        heard.append(WarpPaths())
        return heard[-1]

    function = compiled(plan)
    with emulate(arch="sm_90a", on_launch=listen, check=False):
        function(
            q,
            cache.view(torch.uint8),
            *others,
            inputs.output_buffer(),
            *how,
        )
    (paths,) = heard
    slowest = paths.slowest().values()
    scoring, ranking = max(slowest, key=lambda both: sum(path.instructions for path in both))
    return RowPaths(scoring, ranking, paths.until_first_copy())
