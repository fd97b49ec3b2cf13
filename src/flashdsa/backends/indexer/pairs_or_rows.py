"""The indexer's launches of which the lengths choose one: rows in pairs, or rows on their own.

Pairs read a page once for two rows, which pays where many rows are long; rows on their own are
faster where one is. The host knows the table's width only, so it launches both: see
kernels/indexer/schedule/choice.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from flashdsa.backends.indexer.clusters import clusters_of
from flashdsa.backends.indexer.row_splits import RowSplits, Table
from flashdsa.backends.indexer.two_launches import Serve
from flashdsa.backends.runner import Runner
from flashdsa.kernels.indexer.plan import SelectPlan
from flashdsa.plan.kernel_spec import KernelSpec

LEAST_ROWS = 0.5
"""Rows for each SM from which two launches pay."""
LEAST_PAGES = 200
"""Pages of all pairs, for each SM, from which pairs are faster than rows on their own."""
ROOM = 2
"""Room for so many times these pages, if all requests were as long as the table is wide, from which
two launches pay: requests are rarely that long, and one long one among short ones loses 2 us."""
MOST_CTAS_OF_A_PAIR = 2
"""Most CTAs of a cluster of two rows that are scored together; with more, rows on their own are
faster."""


def least_pages(num_sms: int) -> int:
    """Pages of all pairs from which they are faster."""
    return LEAST_PAGES * num_sms


def with_pairs(
    runner: Runner, spec: KernelSpec, pairs: SelectPlan, alone: Serve, rows: int
) -> Serve:
    """`alone`, but in tables with room for enough pages the lengths choose between it and pairs.

    Args:
        pairs: the plan of `rows` in pairs. alone: serves them on their own; its last argument may
            be `pair_pages`.
    """
    clusters = clusters_of(runner, pairs, MOST_CTAS_OF_A_PAIR)
    if rows < LEAST_ROWS * runner.num_sms or clusters is None:
        return alone
    pages = least_pages(runner.num_sms)

    @cache  # the calls' tables may have any width, so the kernel is loaded where one needs it
    def bind() -> Serve:
        return RowSplits(runner, spec, Table(0, pairs)).launch

    def serve(*given: Any) -> None:
        *tensors, number, size = given
        if rows // 2 * tensors[4].shape[1] < ROOM * pages:
            alone(*given)
            return
        in_pairs = bind()
        alone(*tensors, number, size, -pages)
        in_pairs(*tensors, *clusters, pages)

    return serve
