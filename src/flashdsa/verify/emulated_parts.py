"""The indexer's single operations as Hopper kernels on the CPU: on ptxemu and checked."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.cpu import index_k_cache
from flashdsa.backends.sm90 import index_k_cache as gpu_cache
from flashdsa.backends.sm90 import logits as gpu_logits
from flashdsa.backends.sm90 import topk as gpu_topk
from flashdsa.backends.sm90.indexer import require_layout
from flashdsa.backends.sm90.quantize import dtype_name, readable
from flashdsa.errors import UnsupportedError
from flashdsa.jit.loader import compile_plan
from flashdsa.kernels.catalog import (
    INDEXER_LOGITS,
    QUANTIZE_INDEX,
    TOPK_INDICES,
    WRITE_INDEX_K_CACHE,
)
from flashdsa.kernels.indexer.sm90.logits_plan import LogitsPlan
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.operands import (
    CacheWriteOperands,
    IndexerOperands,
    IndexKOperands,
    IndexQOperands,
    TopkOperands,
)
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.verify.emulated_indexer import CLUSTERS

NUM_CTAS = 4
"""CTAs of an emulated launch that shares rows out by pages: few enough to wait for."""
POISON = 0x7F7F7F7F
"""What outputs hold that the kernel must write."""


def launch(spec: KernelSpec, plan: Any, *arguments: Any, seed: int = 0) -> list[Any]:
    """One checked launch; returns the findings that are no errors.

    Args:
        seed: of the order in which warps and asynchronous work take turns.

    Raises:
        ptxemu.HazardError: the check found an error.
    """
    function = _compiled(spec, plan)
    from ptxemu.cutedsl import emulate

    with emulate(arch="sm_90a", seed=seed) as run:
        function(*arguments)
    return list(run.findings)


@lru_cache(maxsize=16)
def _compiled(spec: KernelSpec, plan: Any) -> Any:
    for package in ("cutlass", "llvmlite", "tvm_ffi"):
        if find_spec(package) is None:
            raise UnsupportedError(f"the emulator needs {package}: pip install 'flashdsa[emulate]'")
    import ptxemu.cutedsl  # noqa: F401 - keeps the PTX of what is compiled from here on

    return compile_plan(spec, plan)


def logits(operands: IndexerOperands, *, max_len: int) -> Tensor:
    """Scores (B, max_len) fp32, as the backend "sm90" gives them."""
    q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table = operands
    scores = torch.full((q_index_fp8.shape[0], max_len), torch.nan)
    require_layout(*operands, scores)
    gpu_logits.check_if_asked(seq_lens, block_table, len(k_index_cache_fp8), max_len)
    if scores.shape[0] == 0 or k_index_cache_fp8.shape[0] == 0:
        return scores.fill_(-torch.inf)
    plan = LogitsPlan(num_heads=q_index_fp8.shape[1])
    cache = k_index_cache_fp8.view(torch.uint8)
    launch(
        INDEXER_LOGITS, plan, q_index_fp8, cache, weights, seq_lens, block_table, scores, NUM_CTAS
    )
    return scores


def topk_positions(operands: TopkOperands, *, topk: int, sorted: bool) -> Tensor:
    """Positions (B, topk) int32, as the backend "sm90" gives them."""
    scores, lengths = operands
    gpu_topk.check_if_asked(lengths, scores.shape[1])
    positions = torch.full((scores.shape[0], topk), POISON, dtype=torch.int32)
    if scores.numel() == 0:
        return positions.fill_(-1)
    emulate_topk(TopkPlan(topk=topk, sorted=sorted), scores, lengths, positions)
    return positions


def emulate_topk(
    plan: TopkPlan,
    scores: Tensor,
    lengths: Tensor,
    positions: Tensor,
    *,
    clusters: tuple[int, int] = CLUSTERS[:2],
    seed: int = 0,
) -> list[Any]:
    """One checked launch of the plan's kernel, written into `positions`.

    Args:
        clusters: how many, and CTAs of each. seed: as in `emulate_indexer`.
    """
    return launch(TOPK_INDICES, plan, scores, lengths, positions, *clusters, seed=seed)


def quantize_index_k(operands: IndexKOperands) -> tuple[Tensor, Tensor]:
    """e4m3 (T, 128) and scales (T,), as the backend "sm90" gives them."""
    k = operands.k
    fp8 = torch.empty(k.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(k.shape[0])
    if k.shape[0]:
        launch(
            QUANTIZE_INDEX,
            QuantizePlan(dtype_name(k), 0),
            readable(k),
            fp8.view(torch.uint8),
            scale,
        )
    return fp8, scale


def quantize_index_q(operands: IndexQOperands) -> tuple[Tensor, Tensor]:
    """e4m3 (B, H, 128) and folded weights (B, H), as the backend "sm90" gives them."""
    q, weights = operands
    fp8, scale = quantize_index_k(IndexKOperands(q.reshape(-1, q.shape[-1])))
    return fp8.view(q.shape), weights * scale.view(weights.shape)


def write(operands: CacheWriteOperands) -> None:
    """Write keys into their slots, as the backend "sm90" does."""
    k, slots, cache = operands
    gpu_cache.require_aligned_pages(cache)
    gpu_cache.check_if_asked(slots, cache)
    if k.shape[0] and cache.shape[0]:
        plan = QuantizePlan(dtype_name(k), slots.element_size() * 8)
        launch(
            WRITE_INDEX_K_CACHE,
            plan,
            readable(k),
            slots.contiguous(),
            cache.view(torch.uint8).flatten(1),
        )


read = index_k_cache.read
