"""Compilation of the indexer's variants for Blackwell."""

from __future__ import annotations

from typing import Any

from flashdsa.hw import SM100
from flashdsa.kernels.indexer import build
from flashdsa.kernels.indexer.sm100.kernel import launch_indexer, launch_splits
from flashdsa.kernels.indexer.sm100.logits_kernel import launch_logits
from flashdsa.kernels.indexer.sm100.plan import IndexerPlan, LogitsPlan


def compile_indexer(plan: IndexerPlan) -> Any:
    """See `kernels.indexer.build.compile_indexer`."""
    return build.compile_indexer(
        launch_splits if plan.splits else launch_indexer, plan, SM100.target
    )


def compile_logits(plan: LogitsPlan) -> Any:
    """See `kernels.indexer.build.compile_logits`."""
    return build.compile_logits(launch_logits, plan, SM100.target)
