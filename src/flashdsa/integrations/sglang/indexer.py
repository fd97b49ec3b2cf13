"""DeepSeek-V3.2's indexer inside SGLang: the top-k of a batch, which SGLang has described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.integrations import start
from flashdsa.ops.indexer import dsa_topk_indexer
from flashdsa.ops.prefill import dsa_topk_prefill
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_SIZE, SCALE_BYTES

Original = Callable[..., Tensor]
INDEXER_NAME = "flashdsa_indexer"
LOGGER = "sglang.flashdsa"


def prepare_index(result: None, indexer: Any, *given: Any, **named: Any) -> None:
    """Load the kernels for a layer's sizes, and say what serves.

    Args:
        result: of the constructor. indexer: a layer's, which is made before requests come.
        given, named: other arguments of the constructor.

    Raises:
        UnsupportedError: keys of other than 128 columns, sizes without kernels, or kernels are
            missing.
    """
    if not _serves(indexer):
        return
    if indexer.head_dim != INDEX_HEAD_DIM:
        raise UnsupportedError(
            f"{INDEXER_NAME}: serves {INDEX_HEAD_DIM} columns; got {indexer.head_dim}"
        )
    sizes: dict[str, Any] = {"H": indexer.n_heads, "topk": indexer.index_topk}
    calls = {"dsa_topk_indexer": {"positions": (False, True), **sizes}, "dsa_topk_prefill": sizes}
    served = tuple(start.load_own(calls, INDEXER_NAME).items())
    start.say(LOGGER, start.described(served, "SGLang's: writes to the index cache"))


def choose_paged(
    theirs: Original,
    indexer: Any,
    forward_batch: Any,
    layer_id: int,
    q_fp8: Tensor,
    weights: Tensor,
    metadata: Any,
) -> Tensor:
    """Choose for decodes, verifications and drafts, a row a query, as `_get_topk_paged` does.

    Args:
        theirs: SGLang's method, for layers with tokens that are always chosen.
        q_fp8: (T, H, 128) float8_e4m3fn, rows of padding at the end.
        weights: (T, H, 1) fp32 with the queries' scales.

    Returns:
        (T, topk) int32: slots of the cache, or positions if SGLang converts them later; -1 in rows
        of padding.
    """
    if not _serves(indexer):
        return theirs(indexer, forward_batch, layer_id, q_fp8, weights, metadata)
    is_decode = forward_batch.forward_mode.is_decode_or_idle()
    lengths = metadata.get_seqlens_int32() if is_decode else metadata.get_seqlens_expanded()
    count = sum(metadata.get_dsa_extend_len_cpu())
    ids = _empty_ids(q_fp8, indexer.index_topk, count)
    cache = _read_buffer(indexer, layer_id)
    dsa_topk_indexer(
        q_fp8[:count],
        cache.view(len(cache), PAGE_SIZE, 1, INDEX_HEAD_DIM + SCALE_BYTES),
        weights[:count].squeeze(2),
        lengths.flatten()[:count],
        metadata.get_page_table_64()[:count],
        ids[:count],
        ids="slot" if _is_fused(metadata) else "position",
    )
    return ids


def choose_ragged(
    theirs: Original,
    indexer: Any,
    enable_dual_stream: bool,
    forward_batch: Any,
    layer_id: int,
    q_fp8: Tensor,
    weights: Tensor,
    metadata: Any,
    topk_result: Tensor | None = None,
) -> Tensor:
    """Choose for prompts, whose keys are gathered one after another, as `_get_topk_ragged` does.

    Args: as `choose_paged`.
        topk_result: (T, topk) int32 to write, filled with -1, or None.

    Returns:
        (T, topk) int32: slots of the cache, rows of the gathered keys and values of an fp8 cache,
        or positions if SGLang converts them later.
    """
    tables = getattr(metadata, "get_logical_page_table", metadata.get_page_table_64)()
    if not _serves(indexer) or not len(tables):
        given = forward_batch, layer_id, q_fp8, weights, metadata, topk_result
        return theirs(indexer, enable_dual_stream, *given)
    starts, ends = metadata.get_indexer_kvcache_range()
    count, lengths = len(starts), metadata.get_indexer_seq_len_cpu()
    keys, scales = _pool().get_index_k_scale_buffer(
        layer_id, metadata.get_indexer_seq_len(), tables, int(lengths.sum()), int(lengths.max())
    )
    ids = topk_result
    if ids is None:
        ids = _empty_ids(q_fp8, indexer.index_topk, count)
    chosen = ids[:count]
    dsa_topk_prefill(
        q_fp8[:count],
        keys.view(torch.float8_e4m3fn),
        weights[:count].squeeze(2),
        starts,
        ends,
        chosen,
        k_scale=scales.view(torch.float32).squeeze(-1),
    )
    chosen.sub_(starts[:, None]).clamp_(min=-1)
    if _is_fused(metadata):
        _convert(chosen, metadata)
    return ids


def _pool() -> Any:
    """SGLang's caches, of the batch that runs."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return get_token_to_kv_pool()


def _serves(indexer: Any) -> bool:
    """Whether scores alone decide: some models of later versions keep first or last tokens."""
    return not (getattr(indexer, "num_init_tokens", 0) or getattr(indexer, "num_local_tokens", 0))


def _is_fused(metadata: Any) -> bool:
    """Whether the top-k also converts positions, as SGLang has it by default."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_DSA_FUSE_TOPK.get()) and not metadata.force_unfused_topk


def _empty_ids(q: Tensor, topk: int, count: int) -> Tensor:
    """The output, -1 from `count` on."""
    ids = torch.empty(len(q), topk, dtype=torch.int32, device=q.device)
    ids[count:] = -1
    return ids


def _read_buffer(indexer: Any, layer_id: int) -> Tensor:
    """The layer's pages of keys and scales: (pages, 64 * 132) uint8."""
    if hasattr(indexer, "_get_index_k_read_buffer"):
        cache: Tensor = indexer._get_index_k_read_buffer(_pool(), layer_id)
    else:
        cache = _pool().get_index_k_with_scale_buffer(layer_id=layer_id)
    return cache


def _convert(positions: Tensor, metadata: Any) -> None:
    """Turn positions in a request into what attention reads, in place; -1 stays.

    That is a slot of the cache, or a row of keys and values that SGLang gathers before attention.
    """
    missing = positions < 0
    if metadata.topk_transform_method.name == "RAGGED":
        positions.add_(metadata.attn_metadata.topk_indices_offset[: len(positions), None])
    else:
        table = metadata.get_page_table_64()
        requests = metadata.get_token_to_batch_idx()[: len(positions), None]
        entries = (positions.clamp(min=0) // PAGE_SIZE).add_(requests * table.shape[1])
        pages = table.reshape(-1).index_select(0, entries.flatten()).view_as(entries)
        positions.remainder_(PAGE_SIZE).add_(pages * PAGE_SIZE)
    positions.masked_fill_(missing, -1)
