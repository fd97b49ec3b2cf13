"""Compilation of the indexer's variants for Blackwell."""

from __future__ import annotations

from typing import Any

from flashdsa.kernels.indexer import build
from flashdsa.kernels.indexer.sm100.kernel import indexer_kernel
from flashdsa.kernels.indexer.sm100.logits_kernel import logits_kernel
from flashdsa.kernels.indexer.sm100.plan import IndexerPlan, LogitsPlan


def compile_indexer(plan: IndexerPlan) -> Any:
    """See `kernels.indexer.build.compile_indexer`."""
    return build.compile_indexer(indexer_kernel, plan)


def compile_logits(plan: LogitsPlan) -> Any:
    """See `kernels.indexer.build.compile_logits`."""
    return build.compile_logits(logits_kernel, plan)
