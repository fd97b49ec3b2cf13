"""Launches of a few rows, the long ones of which are split among several clusters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.kernels.indexer.plan import SelectPlan
from flashdsa.plan.kernel_spec import KernelSpec


class RowSplits:
    """The clusters of a row tell each other their best through a workspace: see the runner's."""

    def __init__(self, runner: Runner, spec: KernelSpec, plan: SelectPlan) -> None:
        """Load only the kernel that splits no row, which `plan` is; the other at its first use."""
        self._runner, self._spec = runner, spec
        self._unsplit = runner.function(spec, plan)
        self._plan = replace(plan, splits=True)
        self._split_pages, self._slot_words = self._plan.split_pages, self._plan.slot_words
        self._workspace = partial(runner.workspace, self._slot_words, self._allocate)
        self._split: Callable[..., Any] | None = None

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
        """As `LaunchConfig.function`. No row is longer than the table is wide: narrow ones are not
        split."""
        tensors = (q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices)
        rows = seq_lens.numel()
        if block_table.numel() < rows * self._split_pages:
            self._unsplit(*tensors, rows, cluster_size)
            return
        if self._split is None:
            self._split = self._runner.function(self._spec, self._plan)
        workspace = self._workspace()
        self._split(*tensors, *workspace, num_clusters, cluster_size, num_clusters // rows)

    def _allocate(self, runner: Runner) -> tuple[Tensor, Tensor]:
        """Counters of arrivals, which each launch leaves at 0, and slots: see `launch_indexer`."""
        num_ctas = runner.num_sms  # and no more rows than CTAs
        slots = runner.empty(num_ctas, self._slot_words, dtype=torch.int32)
        return runner.empty(num_ctas, dtype=torch.int32).zero_(), slots
