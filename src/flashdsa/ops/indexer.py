"""The custom ops of the indexer: scores, top-k, quantisation and the packed index-K cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.catalog import registry
from flashdsa.ops.checks import capability, require_positive
from flashdsa.ops.indexer_checks import (
    check_topk_out,
    indexer_problem,
    key_problem,
    query_problem,
    scores_problem,
    slots_problem,
    write_problem,
)
from flashdsa.problem import INDEX_HEAD_DIM, Operation, Problem
from flashdsa.settings import environment_backend

_INDEXER_ARGS = (
    "Tensor q_index_fp8, Tensor k_index_cache_fp8, Tensor weights, Tensor seq_lens, "
    "Tensor block_table"
)


# NOTE: of a call `torch.library.custom_op` takes 14 us (57 on a busy machine), a definition 3.
_library = torch.library.Library("flashdsa", "FRAGMENT")
_library.define(
    f"dsa_topk_indexer({_INDEXER_ARGS}, Tensor(a!) topk_indices, bool sorted, bool check, "
    "str backend) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_MOST_LAYOUTS = 4096
_checked: dict[tuple[Any, ...], Callable[..., None]] = {}
"""What serves a call of tensors without gaps, by what the checks have seen of them. It takes the
tensors and `check`."""


def _dsa_topk_indexer(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    sorted: bool,
    check: bool,
    backend: str,
) -> None:
    """Writes `topk_indices`; `check` asks for errors on bad lengths and page ids."""
    tensors = (q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices)
    q, cache, w, lengths, table, out = tensors
    # NOTE: written out; over a list of tensors it takes a microsecond more.
    seen = (
        *(q.shape, cache.shape, w.shape, lengths.shape, table.shape, out.shape),
        *(q.dtype, cache.dtype, w.dtype, lengths.dtype, table.dtype, out.dtype),
        *(q.device, cache.device, w.device, lengths.device, table.device, out.device),
        *(cache.storage_offset() % 4, sorted),
        environment_backend() if backend == "auto" else backend,
    )
    dense = (
        q.is_contiguous()
        and cache.is_contiguous()
        and w.is_contiguous()
        and lengths.is_contiguous()
        and table.is_contiguous()
        and out.is_contiguous()
    )
    run = _checked.get(seen) if dense else None
    if run is None:
        run = _check_and_select(tensors, sorted, dense, backend)
        if dense:
            if len(_checked) >= _MOST_LAYOUTS:
                _checked.clear()
            _checked[seen] = run
    run(*tensors, check)
    torch.autograd.graph.increment_version(topk_indices)


def _check_and_select(
    tensors: tuple[Tensor, ...], sorted: bool, dense: bool, backend: str
) -> Callable[..., None]:
    """What serves the call, after the checks; it takes the tensors and `check`."""
    q_index_fp8, topk_indices = tensors[0], tensors[5]
    check_topk_out(topk_indices, q_index_fp8)
    num_heads, topk = q_index_fp8.shape[1], topk_indices.shape[1]
    problem = indexer_problem(Operation.DSA_TOPK_INDEXER, *tensors[:5], topk=topk, sorted=sorted)
    problem = replace(problem, capability=capability(q_index_fp8.device))
    chosen = registry.select(problem, backend)
    if dense and chosen.launcher:
        prepared = chosen.load_launcher()(q_index_fp8.device, num_heads, topk, sorted)
        checked: Callable[..., None] = prepared.checked
        return checked
    serve = chosen.load()
    return lambda *arguments: serve(*arguments[:-1], sorted=sorted, check=arguments[-1])


for _key in ("CPU", "CUDA"):
    _library.impl("dsa_topk_indexer", _dsa_topk_indexer, _key)
dsa_topk_indexer = torch.ops.flashdsa.dsa_topk_indexer.default


def _fake_dsa_topk_indexer(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    sorted: bool,
    check: bool,
    backend: str,
) -> None:
    check_topk_out(topk_indices, q_index_fp8)
    indexer_problem(
        Operation.DSA_TOPK_INDEXER, q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table
    )


torch.library.register_fake("flashdsa::dsa_topk_indexer", _fake_dsa_topk_indexer)


def _serving(problem: Problem, device: torch.device, backend: str) -> Callable[..., Any]:
    """What serves the problem on the device."""
    problem = replace(problem, capability=capability(device))
    return registry.select(problem, backend).load()


@torch.library.custom_op(
    "flashdsa::indexer_logits",
    mutates_args=(),
    schema=f"({_INDEXER_ARGS}, int max_len, str backend) -> Tensor",
)
def indexer_logits(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_len: int,
    backend: str,
) -> Tensor:
    """Scores (B, max_len) fp32, -inf beyond each row's length."""
    require_positive("max_len", max_len)
    problem = indexer_problem(
        Operation.INDEXER_LOGITS, q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table
    )
    run = _serving(problem, q_index_fp8.device, backend)
    scores: Tensor = run(
        q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, max_len=max_len
    )
    return scores


@indexer_logits.register_fake
def _(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_len: int,
    backend: str,
) -> Tensor:
    require_positive("max_len", max_len)
    indexer_problem(
        Operation.INDEXER_LOGITS, q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table
    )
    return weights.new_empty(weights.shape[0], max_len)


@torch.library.custom_op(
    "flashdsa::topk_indices",
    mutates_args=(),
    schema="(Tensor scores, Tensor lengths, int topk, bool sorted, str backend) -> Tensor",
)
def topk_indices(scores: Tensor, lengths: Tensor, topk: int, sorted: bool, backend: str) -> Tensor:
    """Positions (B, topk) int32 of the best scores, -1 beyond."""
    problem = scores_problem(scores, lengths, topk, sorted)
    run = _serving(problem, scores.device, backend)
    positions: Tensor = run(scores, lengths, topk=topk, sorted=sorted)
    return positions


@topk_indices.register_fake
def _(scores: Tensor, lengths: Tensor, topk: int, sorted: bool, backend: str) -> Tensor:
    scores_problem(scores, lengths, topk, sorted)
    return lengths.new_empty(scores.shape[0], topk)


@torch.library.custom_op(
    "flashdsa::quantize_index_k",
    mutates_args=(),
    schema="(Tensor k, str backend) -> (Tensor, Tensor)",
)
def quantize_index_k(k: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """e4m3 keys (T, 128) and scales (T,) fp32."""
    run = _serving(key_problem(Operation.QUANTIZE_INDEX_K, k), k.device, backend)
    fp8, scale = run(k)
    return fp8, scale


@quantize_index_k.register_fake
def _(k: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    key_problem(Operation.QUANTIZE_INDEX_K, k)
    return (
        k.new_empty(k.shape, dtype=torch.float8_e4m3fn),
        k.new_empty(k.shape[0], dtype=torch.float32),
    )


@torch.library.custom_op(
    "flashdsa::quantize_index_q",
    mutates_args=(),
    schema="(Tensor q, Tensor weights, str backend) -> (Tensor, Tensor)",
)
def quantize_index_q(q: Tensor, weights: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """e4m3 queries (B, H, 128) and weights (B, H) with the scales folded in."""
    run = _serving(query_problem(q, weights), q.device, backend)
    fp8, folded = run(q, weights)
    return fp8, folded


@quantize_index_q.register_fake
def _(q: Tensor, weights: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    query_problem(q, weights)
    return q.new_empty(q.shape, dtype=torch.float8_e4m3fn), weights.new_empty(weights.shape)


@torch.library.custom_op(
    "flashdsa::write_index_k_cache",
    mutates_args=("cache",),
    schema="(Tensor k, Tensor slots, Tensor(a!) cache, str backend) -> ()",
)
def write_index_k_cache(k: Tensor, slots: Tensor, cache: Tensor, backend: str) -> None:
    """Quantises k (T, 128) into the cache's slots."""
    run = _serving(write_problem(k, slots, cache), cache.device, backend)
    run(k, slots, cache)


@write_index_k_cache.register_fake
def _(k: Tensor, slots: Tensor, cache: Tensor, backend: str) -> None:
    write_problem(k, slots, cache)


@torch.library.custom_op(
    "flashdsa::read_index_k_cache",
    mutates_args=(),
    schema="(Tensor cache, Tensor slots, str backend) -> (Tensor, Tensor)",
)
def read_index_k_cache(cache: Tensor, slots: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """e4m3 keys (T, 128) and scales (T,) fp32 of the slots."""
    problem = slots_problem(Operation.READ_INDEX_K_CACHE, slots, cache)
    fp8, scale = _serving(problem, cache.device, backend)(cache, slots)
    return fp8, scale


@read_index_k_cache.register_fake
def _(cache: Tensor, slots: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    slots_problem(Operation.READ_INDEX_K_CACHE, slots, cache)
    count = slots.shape[0]
    return (
        cache.new_empty((count, INDEX_HEAD_DIM), dtype=torch.float8_e4m3fn),
        cache.new_empty(count, dtype=torch.float32),
    )
