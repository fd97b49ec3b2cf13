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
    MAX_PAGES,
    check_topk_out,
    indexer_problem,
    key_problem,
    query_problem,
    scores_problem,
    slots_problem,
    write_problem,
)
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_BYTES, Operation, Problem
from flashdsa.settings import raw_settings

_INDEXER_ARGS = (
    "Tensor q_index_fp8, Tensor k_index_cache_fp8, Tensor weights, Tensor seq_lens, "
    "Tensor block_table"
)


_Launch = tuple[Callable[..., Any], int, int]
"""A function of the operation's tensors and two numbers."""
_MOST_LAUNCHES = 4096
_served: dict[tuple[Any, ...], _Launch] = {}
"""How checked calls are launched again, by sizes, GPU, order, and what chose the backend."""


def serve_again(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    sorted: bool,
    backend: str,
) -> bool:
    """Launch a call like one that was checked and served; False: not served, nothing was written.

    A kernel's function refuses by itself what it was not compiled for. CuTe DSL's (4.8.1, in
    base_dsl/tvm_ffi_builder/tvm_ffi_builder.py; tests/kernels/indexer/test_sm90_refusals.py) holds
    every tensor to: its number of dimensions; its fixed sizes; one B; sizes that fit int32; no
    gaps, or stride 1 in the table's rows; its alignment; the type cuda and one device index; its
    dtype, but not the sign of integers. Left to check here are those that must be int32, and the
    number of pages. What is refused goes to the checks, which say what is wrong with it.
    """
    raw_backend, raw_check = raw_settings()
    launch = _served.get(
        (
            q_index_fp8.numel(),
            topk_indices.numel(),
            topk_indices.get_device(),
            sorted,
            backend,
            raw_backend,
        )
    )
    if (
        launch is None
        or raw_check is not None
        or not 0 < k_index_cache_fp8.numel() <= MAX_PAGES * PAGE_BYTES
        or not (seq_lens.dtype is block_table.dtype is topk_indices.dtype is torch.int32)
    ):
        return False
    function, first, second = launch
    try:
        function(
            q_index_fp8,
            k_index_cache_fp8,
            weights,
            seq_lens,
            block_table,
            topk_indices,
            first,
            second,
        )
    except Exception:  # of whatever kind: the checked call raises it again, or a clearer one
        return False
    torch._C._increment_version((topk_indices,))
    return True


_INFERENCE = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_EAGER = _INFERENCE.add(torch._C.DispatchKey.ADInplaceOrView)
_PLAIN = (_EAGER.raw_repr(), _INFERENCE.raw_repr())
"""Dispatch keys that torch includes in every call of a thread: outside and in inference mode."""


def is_plain_eager() -> bool:
    """Whether the dispatcher would do nothing but call the implementation, if all operands are
    just `torch.Tensor`: no mode (fake tensors, tracing, torch functions), transform or profiler.

    Those of torch.func wrap tensors in ones of the same type; like vmap, functionalization, jit and
    dispatch modes they are seen by the key that each includes.
    """
    return (
        torch._C._dispatch_tls_local_include_set().raw_repr() in _PLAIN
        and not torch._C._len_torch_function_stack()
        and not torch._C._autograd._profiler_enabled()
    )


# NOTE: of a call `torch.library.custom_op` takes 14 us (57 on a busy machine), a definition 3.
_library = torch.library.Library("flashdsa", "FRAGMENT")
_library.define(
    f"dsa_topk_indexer({_INDEXER_ARGS}, Tensor(a!) topk_indices, bool sorted, bool check, "
    "str backend) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


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
    if serve_again(*tensors, sorted, backend):
        return
    check_topk_out(topk_indices, q_index_fp8)
    rows, topk = topk_indices.shape
    problem = indexer_problem(Operation.DSA_TOPK_INDEXER, *tensors[:5], topk=topk, sorted=sorted)
    problem = replace(problem, capability=capability(q_index_fp8.device))
    chosen = registry.select(problem, backend)
    chosen.load()(*tensors, sorted=sorted, check=check)
    torch.autograd.graph.increment_version(topk_indices)
    if rows and chosen.launcher:
        sizes = (q_index_fp8.shape[1], topk, sorted)
        prepared = chosen.load_launcher()(q_index_fp8.device, *sizes)
        key = (
            *(q_index_fp8.numel(), topk_indices.numel(), topk_indices.get_device()),
            *(sorted, backend, raw_settings()[0]),
        )
        if len(_served) >= _MOST_LAUNCHES:
            _served.clear()
        _served[key] = prepared.ready(rows)


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
