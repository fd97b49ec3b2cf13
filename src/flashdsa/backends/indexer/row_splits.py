"""Launches in which long rows may be split among several clusters, which need a workspace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.indexer.clusters import NARROW_CLUSTER, NARROW_PAGES
from flashdsa.backends.runner import Runner
from flashdsa.kernels.indexer.plan import SelectPlan
from flashdsa.kernels.indexer.sizes import SPLITS_BY_SIZE
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.problem import PAGE_SIZE


class RowSplits:
    """Launches whose CTAs share rows and exchange their best entries in a workspace: see the
    runner's."""

    def __init__(
        self,
        runner: Runner,
        spec: KernelSpec,
        plan: SelectPlan,
        unsplit: SelectPlan | None,
        least_pages: int,
    ) -> None:
        """Load `unsplit`, if it is given, and the other kernel at its first use; else that one.

        Args:
            plan: has splits. unsplit: for tables with fewer pages a row than `least_pages`.
        """
        self._runner, self._spec, self._plan = runner, spec, plan
        self._split: Callable[..., Any] | None
        self._unsplit = runner.function(spec, unsplit) if unsplit else None
        self._least_pages = least_pages if unsplit else 0
        self._sizes = plan.split_workspace(runner.num_sms)
        self._workspace = partial(
            runner.workspace, plan.slot_words, self._allocate, self._sizes.counters
        )
        self._split = None if unsplit else runner.function(spec, plan)

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
    ) -> None:
        """Launch as `Launch.function`. No row is longer than the table is wide: each row of a
        narrow table gets one cluster, and of the narrowest ones a small one."""
        tensors = (q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices)
        rows = seq_lens.numel()
        pages = block_table.shape[1] * self._plan.entry_tokens // PAGE_SIZE
        if self._unsplit is not None and pages < self._least_pages:
            if pages <= NARROW_PAGES:
                cluster_size = min(cluster_size, NARROW_CLUSTER)
            self._unsplit(*tensors, rows, cluster_size)
            return
        if self._split is None:
            self._split = self._runner.function(self._spec, self._plan)
        workspace, most = self._workspace(), SPLITS_BY_SIZE * cluster_size
        self._split(*tensors, *workspace, num_clusters, cluster_size, most)

    def _allocate(self, runner: Runner) -> tuple[Tensor]:
        """Slots, which follow the counters."""
        return (runner.empty(*self._sizes.slots, dtype=torch.int32),)
