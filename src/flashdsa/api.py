"""The public operations of flashdsa: signatures, meanings, and the way into the custom ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.catalog import registry
from flashdsa.backends.registry import resolve_backend
from flashdsa.errors import ArgumentTypeError
from flashdsa.ops import attention, indexer
from flashdsa.ops.checks import (
    capability,
    drop_kv_head,
    require_optional_tensors,
    require_positive,
    require_tensor,
    require_tensors,
    scale_or_default,
)
from flashdsa.problem import (
    D_V,
    INDEX_HEAD_DIM,
    INDEX_TOKEN_BYTES,
    INDEX_TOPK,
    NUM_INDEX_HEADS,
    PAGE_SIZE,
    Operation,
    Problem,
)

_KV_LAYOUT = "[S_kv, d_qk] or [S_kv, 1, d_qk]"
_INDICES_LAYOUT = "[S, topk] or [S, 1, topk]"
MANY_ROWS = 256
"""More than GPUs have SMs."""


def sparse_mla_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    d_v: int = D_V,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of every query over the kv rows that `indices` names for it.

    A slot is valid when ``0 <= indices[s, i] < S_kv`` and ``i < topk_length[s]``. Invalid slots
    contribute nothing; duplicates count as often as they occur; a query without a valid slot gets
    ``O = 0`` and ``lse = +inf``.

    Args:
        q: (S, H, d_qk) bf16, fp32 or fp64; d_qk = 576 in DeepSeek's MLA.
        kv: (S_kv, d_qk) or (S_kv, 1, d_qk), q's dtype; V is its first `d_v` columns.
        indices: (S, topk) or (S, 1, topk) int32, any values.
        d_v: columns of V, at most d_qk.
        sm_scale: factor of the logits; ``d_qk ** -0.5`` by default.
        topk_length: (S,) int32, slots in use of each query; clamped to [0, topk].
        attn_sink: (H,) fp32, a logit that takes weight and gives no value: O is scaled by
            ``exp(lse) / (exp(lse) + exp(sink))``; lse is returned without it.
        backend: "auto" or the name of one (`flashdsa info` lists them).

    Returns:
        O (S, H, d_v) in q's dtype, and lse (S, H) in fp32 (fp64 for fp64 inputs), the natural
        logarithm ``log sum_i exp(sm_scale * q . kv_i)``. O is differentiable, lse is not.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, rank, shape, device or layout.
        NotImplementedError: no implementation serves the call.
    """
    out, lse = _forward(
        q, kv, indices, d_v, sm_scale, topk_length, attn_sink, deterministic=False, backend=backend
    )
    return out, lse


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    d_v: int = D_V,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`sparse_mla_fwd`'s O, differentiable in `q`, `kv` and `attn_sink` (not in `indices`).

    Args: as for `sparse_mla_fwd`, and
        deterministic: gradients are bit-identical from run to run; otherwise the last bits of
            kv's gradient may differ (order of fp32 additions).

    Returns:
        O (S, H, d_v) in q's dtype. Gradients come in the inputs' dtypes; a gradient of a gradient
        is an error.
    """
    return _forward(q, kv, indices, d_v, sm_scale, topk_length, attn_sink, deterministic, backend)[
        0
    ]


def mla_bwd(  # noqa: PLR0913 - the contract fixes these arguments
    q: Tensor,
    kv: Tensor,
    dO: Tensor,
    lse: Tensor,
    O: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    deterministic: bool = False,
    dkv_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Gradients of sparse MLA from the forward's results.

    With ``P = exp(s - lse')``, ``lse' = logaddexp(lse, attn_sink)``, ``delta = sum_d O dO``:
    ``dS = P (dP - delta) sm_scale``, ``dQ = dS K``, ``dKV = dS^T Q + [P^T dO, 0]``,
    ``d_sink = -sum_s exp(sink - lse') delta``.

    Args:
        q, kv, indices, sm_scale, topk_length, attn_sink, backend: as for `sparse_mla_fwd`.
        dO: (S, H, d_v) in q's dtype, the gradient of O.
        lse: (S, H) fp32 (fp64 for fp64 inputs), as the forward returned it (natural logarithm).
        O: (S, H, d_v) in q's dtype, as the forward returned it (scaled by the sink, if any).
        deterministic: dKV is bit-identical from run to run. On Blackwell it costs some 40% more
            time (predicted) and a workspace: 2304 bytes for each slot of as many queries as fit
            1 GiB, and of one query at least.
        dkv_dtype: dtype of dKV: None or fp32, or bf16 for bf16 inputs; fp64 for fp64 inputs.

    Returns:
        dQ (S, H, d_qk) in q's dtype, dKV in kv's shape, and where there is a sink d_sink (H,).
        Rows of dKV that no valid slot names are exactly 0.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `sparse_mla_fwd`.
    """
    require_tensors(q=q, kv=kv, dO=dO, lse=lse, O=O, indices=indices)
    require_optional_tensors(topk_length=topk_length, attn_sink=attn_sink)
    _require_dtype_or_none("dkv_dtype", dkv_dtype)
    dq, dkv, d_sink = attention.mla_bwd(
        q,
        drop_kv_head("kv", kv, _KV_LAYOUT),
        dO,
        lse,
        O,
        drop_kv_head("indices", indices, _INDICES_LAYOUT),
        topk_length,
        attn_sink,
        scale_or_default(sm_scale, q),
        bool(deterministic),
        dkv_dtype,
        backend,
    )
    dkv = dkv.view(kv.shape)
    return (dq, dkv) if attn_sink is None else (dq, dkv, d_sink)


def dsa_topk_indexer(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    *,
    sorted: bool = False,
    backend: str = "auto",
) -> None:
    """Write the ids of each row's best-scoring tokens into `topk_indices`.

    ``score[t] = scale[t] * sum_h weights[b, h] * relu(q[b, h] . k[t])``. Exactly
    ``min(topk, seq_lens[b])`` ids are written, then -1. Ties at the cut-off go to the smallest
    token position; NaN scores rank last. An id is ``page * 64 + offset``.

    Args:
        q_index_fp8: (B, H, 128) float8_e4m3fn, from `quantize_index_q`.
        k_index_cache_fp8: (num_pages, 64, 1, 132) uint8 or int8. A page is 64 x 128 e4m3 bytes,
            then 64 fp32 scales; see `write_index_k_cache`.
        weights: (B, H) fp32, with the queries' scales folded in; may be negative.
        seq_lens: (B,) int32, tokens of each row.
        block_table: (B, max_pages) int32, the pages of each row in order.
        topk_indices: (B, topk) int32, the output; may be uninitialised.
        sorted: descending score, ties by position. Otherwise the order is a backend's own,
            deterministic; the CPU's is ascending token position.
        backend: "auto" or the name of one.

    Raises:
        TypeError, ValueError: a wrong argument, and where values are checked (on the CPU, or with
            FLASHDSA_CHECK=1) a negative length, a table too narrow for its length, a page id
            outside the cache. Nothing is written then.
        NotImplementedError: no implementation serves the call.
    """
    # NOTE: torch's dispatcher takes 5 us of host time where a launch takes as much.
    if (
        not torch.compiler.is_dynamo_compiling()
        and type(q_index_fp8) is Tensor
        and type(k_index_cache_fp8) is Tensor
        and type(weights) is Tensor
        and type(seq_lens) is Tensor
        and type(block_table) is Tensor
        and type(topk_indices) is Tensor
        and indexer.is_plain_eager()
        and indexer.serve_again(
            q_index_fp8,
            k_index_cache_fp8,
            weights,
            seq_lens,
            block_table,
            topk_indices,
            bool(sorted),
            backend,
        )
    ):
        return
    require_tensors(
        q_index_fp8=q_index_fp8,
        k_index_cache_fp8=k_index_cache_fp8,
        weights=weights,
        seq_lens=seq_lens,
        block_table=block_table,
        topk_indices=topk_indices,
    )
    indexer.dsa_topk_indexer(
        q_index_fp8,
        k_index_cache_fp8,
        weights,
        seq_lens,
        block_table,
        topk_indices,
        bool(sorted),
        True,
        backend,
    )


def dsa_topk_indexer_launch(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
) -> None:
    """`dsa_topk_indexer` without argument checks, for callers that have made their own.

    Negative lengths count as 0, a too narrow table clamps the length, tokens of a page outside
    the cache are never emitted, and nothing outside the buffers is touched.
    """
    # NOTE: 6 us of host time are a launch's, 5 of them in the kernel's function: hence no calls
    # here but the tensors' fastest. Sizes that only seem to be known are refused by the function.
    sizes = (q_index_fp8.numel(), topk_indices.numel(), topk_indices.get_device())
    known = _launches.get(sizes)
    if known is not None and k_index_cache_fp8.numel():
        function, first, second = known
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
            return
        except Exception:  # launched anew below, which raises it again or serves the call
            pass
    _launch_anew(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices)


_launches: dict[tuple[int, int, int], tuple[Callable[..., Any], int, int]] = {}
"""What launches unchecked calls, a function and two numbers for it, by sizes of the queries and of
the output and by GPU."""
_launchers: dict[tuple[int, int, int], tuple[Callable[..., None], Any]] = {}
"""What serves any unchecked call, by GPU (-1: the CPU), heads and topk, and how it launches so many
rows, if it does."""


def _launch_anew(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
) -> None:
    """An unchecked call of sizes that were not there before, or that no kernel is launched for."""
    sizes = (q_index_fp8.get_device(), q_index_fp8.shape[1], topk_indices.shape[1])
    launcher = _launchers.get(sizes)
    if launcher is None:
        launcher = _launchers[sizes] = _indexer_launcher(*sizes)
    serve, ready = launcher
    serve(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices)
    if ready is not None and len(q_index_fp8):
        key = (q_index_fp8.numel(), topk_indices.numel(), topk_indices.get_device())
        _launches[key] = ready(len(q_index_fp8))


def _device_of_indexers(backend: str) -> str:
    """Where a backend's indexer takes its tensors; with "auto" this machine's GPU if one serves."""
    if not torch.cuda.is_available():
        return "cpu"
    here = capability(torch.device("cuda", torch.cuda.current_device()))
    backend = resolve_backend(backend)
    on_gpu = any(
        "cuda" in implementation.features.devices
        and (backend != "auto" or implementation.features.capability == here)
        for implementation in registry.implementations(Operation.DSA_TOPK_INDEXER)
        if backend in ("auto", implementation.backend)
    )
    return "cuda" if on_gpu else "cpu"


def _indexer_launcher(gpu: int, num_heads: int, topk: int) -> tuple[Callable[..., None], Any]:
    """See `_launchers`."""
    device = torch.device("cuda", gpu) if gpu >= 0 else torch.device("cpu")
    problem = Problem(
        Operation.DSA_TOPK_INDEXER,
        device.type,
        "float8_e4m3fn",
        num_heads=num_heads,
        d_qk=INDEX_HEAD_DIM,
        topk=topk,
        capability=capability(device),
    )
    chosen = registry.select(problem)
    if chosen.launcher:
        prepared = chosen.load_launcher()(device, num_heads, topk)
        return prepared.launch, prepared.ready
    return partial(chosen.load(), sorted=False, check=False), None


def compile_kernel(
    num_heads: int = NUM_INDEX_HEADS, topk: int = INDEX_TOPK, *, backend: str = "auto"
) -> None:
    """Build and warm up `dsa_topk_indexer` for these sizes, so that the first call is not slow.

    Runs the operation on one page of zeros, in either order: one row, with a table that is narrow
    or as wide as that of a row of a million tokens, and more rows than a GPU has SMs. Backends that
    compile do so then.

    Args:
        num_heads: indexer heads H, 64 in the model.
        topk: width of the output, 2048 in the model.
        backend: "auto" or the name of one.
    """
    require_positive("num_heads", num_heads)
    require_positive("topk", topk)
    device = _device_of_indexers(backend)
    page = torch.zeros(1, PAGE_SIZE, 1, INDEX_TOKEN_BYTES, dtype=torch.uint8)
    wide = 2**20 // PAGE_SIZE
    for by_score, rows, num_pages in (
        (False, 1, 1),
        (False, 1, wide),
        (False, MANY_ROWS, 1),
        (True, 1, 1),
        (True, MANY_ROWS, 1),
    ):
        dsa_topk_indexer(
            torch.zeros(rows, num_heads, INDEX_HEAD_DIM, device=device).to(torch.float8_e4m3fn),
            page.to(device),
            torch.zeros(rows, num_heads, device=device),
            torch.full((rows,), PAGE_SIZE, dtype=torch.int32, device=device),
            torch.zeros(rows, num_pages, dtype=torch.int32, device=device),
            torch.empty(rows, topk, dtype=torch.int32, device=device),
            sorted=by_score,
            backend=backend,
        )


def indexer_logits(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_len: int,
    *,
    backend: str = "auto",
) -> Tensor:
    """The scores that `dsa_topk_indexer` ranks, bit for bit.

    Args: as for `dsa_topk_indexer`, and
        max_len: width of the result; at least the longest of `seq_lens`.

    Returns:
        (B, max_len) fp32, -inf from ``seq_lens[b]`` on.
    """
    require_tensors(
        q_index_fp8=q_index_fp8,
        k_index_cache_fp8=k_index_cache_fp8,
        weights=weights,
        seq_lens=seq_lens,
        block_table=block_table,
    )
    require_positive("max_len", max_len)
    scores: Tensor = indexer.indexer_logits(
        q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, max_len, backend
    )
    return scores


def topk_indices(
    scores: Tensor, lengths: Tensor, topk: int, *, sorted: bool = False, backend: str = "auto"
) -> Tensor:
    """Positions of each row's best scores, exact, by the indexer's tie rule.

    Args:
        scores: (B, max_len) fp32; entries at or beyond `lengths` are ignored; NaN ranks last.
        lengths: (B,) int32 in [0, max_len].
        topk: how many.
        sorted: descending score, ties by position; otherwise the backend's own order (the CPU's
            is ascending position).
        backend: "auto" or the name of one.

    Returns:
        (B, topk) int32: ``min(topk, lengths[b])`` positions, then -1.
    """
    require_tensors(scores=scores, lengths=lengths)
    require_positive("topk", topk)
    positions: Tensor = indexer.topk_indices(scores, lengths, topk, bool(sorted), backend)
    return positions


def quantize_index_k(k: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Indexer keys as e4m3 with a scale each: ``scale = max(amax|k|, 1e-4) / 448``.

    Args:
        k: (T, 128) bf16 or fp32.
        backend: "auto" or the name of one.

    Returns:
        fp8 (T, 128) float8_e4m3fn = round(k / scale), to nearest even, and scale (T,) fp32.
    """
    require_tensor("k", k)
    fp8_and_scale: tuple[Tensor, Tensor] = indexer.quantize_index_k(k, backend)
    return fp8_and_scale


def quantize_index_q(q: Tensor, weights: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Indexer queries as e4m3, each head's scale (see `quantize_index_k`) folded into its weight.

    Args:
        q: (B, H, 128) bf16 or fp32.
        weights: (B, H) fp32.
        backend: "auto" or the name of one.

    Returns:
        fp8 (B, H, 128) float8_e4m3fn and folded weights (B, H) fp32.
    """
    require_tensors(q=q, weights=weights)
    fp8_and_folded: tuple[Tensor, Tensor] = indexer.quantize_index_q(q, weights, backend)
    return fp8_and_folded


def write_index_k_cache(k: Tensor, slots: Tensor, cache: Tensor, *, backend: str = "auto") -> None:
    """Quantise `k` and write it into the packed pages.

    Args:
        k: (T, 128) bf16 or fp32.
        slots: (T,) int32 or int64, distinct: ``page * 64 + offset``. -1 skips the key (padding).
        cache: (num_pages, 64, 1, 132) uint8 or int8, changed in place.
        backend: "auto" or the name of one.
    """
    require_tensors(k=k, slots=slots, cache=cache)
    indexer.write_index_k_cache(k, slots, cache, backend)


def read_index_k_cache(
    cache: Tensor, slots: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The quantised keys of `slots`, as `quantize_index_k` returned them.

    Args:
        cache: (num_pages, 64, 1, 132) uint8 or int8.
        slots: (T,) int32 or int64 in [0, num_pages * 64).
        backend: "auto" or the name of one.

    Returns:
        fp8 (T, 128) float8_e4m3fn and scale (T,) fp32; the key is ``fp8 * scale``.
    """
    require_tensors(cache=cache, slots=slots)
    fp8_and_scale: tuple[Tensor, Tensor] = indexer.read_index_k_cache(cache, slots, backend)
    return fp8_and_scale


def lse_to_base2(lse: Tensor) -> Tensor:
    """A natural-logarithm lse in base 2 (FlashInfer's and TileLang's convention)."""
    require_tensor("lse", lse)
    return lse / math.log(2)


def lse_from_base2(lse: Tensor) -> Tensor:
    """A base-2 lse as the natural logarithm that flashdsa takes."""
    require_tensor("lse", lse)
    return lse * math.log(2)


def _forward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    d_v: int,
    sm_scale: float | None,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    require_tensors(q=q, kv=kv, indices=indices)
    require_optional_tensors(topk_length=topk_length, attn_sink=attn_sink)
    require_positive("d_v", d_v)
    out_and_lse: tuple[Tensor, Tensor] = attention.sparse_mla_fwd(
        q,
        drop_kv_head("kv", kv, _KV_LAYOUT),
        drop_kv_head("indices", indices, _INDICES_LAYOUT),
        topk_length,
        attn_sink,
        d_v,
        scale_or_default(sm_scale, q),
        bool(deterministic),
        backend,
    )
    return out_and_lse


def _require_dtype_or_none(name: str, value: object) -> None:
    if value is not None and not isinstance(value, torch.dtype):
        raise ArgumentTypeError(
            f"{name}: expected a torch.dtype or None; got {type(value).__name__}"
        )
