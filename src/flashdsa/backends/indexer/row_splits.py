"""Launches in which long rows may be split among several clusters, which need a workspace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.indexer.clusters import NARROW_CLUSTER, NARROW_PAGES
from flashdsa.backends.runner import Runner
from flashdsa.kernels.indexer.plan import SelectPlan
from flashdsa.kernels.indexer.sizes import SPLITS_BY_SIZE
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.problem import PAGE_SIZE


class Table(NamedTuple):
    """The kernel for block tables of so many pages a row or more.

    Attributes:
        clusters: how many, and CTAs of each; None: those of the launch.
    """

    least_pages: int
    plan: SelectPlan
    clusters: tuple[int, int] | None = None


class RowSplits:
    """Launches of kernels among which the width of the table chooses. CTAs of those that split rows
    exchange their best entries in a workspace: see the runner's."""

    def __init__(self, runner: Runner, spec: KernelSpec, *tables: Table) -> None:
        """Load the first kernel, and each of the others at its first use.

        Args:
            tables: by their least pages, of which the first one has 0.
        """
        self._least_pages = [table.least_pages for table in tables]
        self._load = [partial(runner.function, spec, table.plan) for table in tables]
        self._functions: list[Callable[..., Any] | None] = [None] * len(tables)
        self._functions[0] = self._load[0]()
        self._workspaces = [_workspace(runner, table.plan) for table in tables]
        self._clusters = [table.clusters for table in tables]
        self._dealt = [table.plan.dealt for table in tables]
        self._page_entries = PAGE_SIZE // tables[0].plan.entry_tokens

    def launch(
        self,
        q_index_fp8: Tensor,
        k_index_cache_fp8: Tensor,
        weights: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        topk_indices: Tensor,
        num_clusters: int,
        cluster_size: int,
        pair_pages: int = 0,
    ) -> None:
        """Launch as `Launch.function`. No row is longer than the table is wide: each row of a
        narrow table gets one cluster, and of the narrowest ones a small one.

        Args:
            pair_pages: of a kernel that the lengths schedule, see kernels/indexer/launch.py.
        """
        tensors = (q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices)
        pages = block_table.shape[1] // self._page_entries
        which = len(self._least_pages) - 1
        while pages < self._least_pages[which]:
            which -= 1
        function, workspace = self._functions[which], self._workspaces[which]
        num_clusters, cluster_size = self._clusters[which] or (num_clusters, cluster_size)
        if function is None:
            function = self._functions[which] = self._load[which]()
        if workspace is not None:
            number = SPLITS_BY_SIZE * cluster_size if self._dealt[which] else pair_pages
            function(*tensors, *workspace(), num_clusters, cluster_size, number)
            return
        if pages <= NARROW_PAGES:
            cluster_size = min(cluster_size, NARROW_CLUSTER)
        function(*tensors, seq_lens.numel(), cluster_size)


def _workspace(runner: Runner, plan: SelectPlan) -> Callable[[], tuple[Any, ...]] | None:
    """The workspace of a launch: counters, and slots, which follow them; None: it needs none."""
    if not plan.splits:
        return None
    sizes = plan.split_workspace(runner.num_sms)

    def allocate(runner: Runner) -> tuple[Tensor]:
        return (runner.empty(*sizes.slots, dtype=torch.int32),)

    return partial(runner.workspace, plan.slot_words, allocate, sizes.counters)
