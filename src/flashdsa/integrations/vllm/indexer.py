"""DeepSeek-V3.2's indexer inside vLLM: the top-k of a batch, which vLLM has described."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import PrefillRowShard
from vllm.v1.worker.workspace import current_workspace_manager

from flashdsa.errors import UnsupportedError
from flashdsa.integrations.vllm import INDEXER_NAME
from flashdsa.ops.bound import warm_up
from flashdsa.ops.indexer import dsa_topk_indexer
from flashdsa.ops.prefill import dsa_topk_prefill
from flashdsa.problem import INDEX_HEAD_DIM, MAX_NEXT_N, SCALE_BYTES


class Call(NamedTuple):
    """The arguments of vLLM's `sparse_attn_indexer` that it is given without a name.

    Attributes:
        kv_cache: (blocks, 64, 132) uint8, blocks may lie apart.
        q_quant: (T, H, 128) float8_e4m3fn, decodes first.
        weights: (T, H) fp32 with the queries' scales.
        total_seq_lens: keys that the workspace of prompts holds.
        topk_indices_buffer: (T or more, topk or more) int32, written.
    """

    hidden_states: Tensor
    k_cache_prefix: str
    kv_cache: Tensor
    q_quant: Tensor
    q_scale: Tensor | None
    k: Tensor | None
    weights: Tensor
    quant_block_size: int
    scale_fmt: str | None
    topk_tokens: int
    head_dim: int
    max_model_len: int
    total_seq_lens: int
    topk_indices_buffer: Tensor

    @property
    def ids(self) -> Tensor:
        """The columns that are written."""
        return self.topk_indices_buffer[:, : self.topk_tokens]


def install(indexer: Any) -> None:
    """Replace the function that DeepSeek-V3.2's layers call by name, once in a process.

    Args:
        indexer: a layer's, before the server starts.

    Raises:
        UnsupportedError: another model's indexer, sizes without kernels, context parallelism.
    """
    from vllm.models.deepseek_v32 import attention

    if type(indexer) is not attention.DeepseekV32Indexer or indexer.head_dim != INDEX_HEAD_DIM:
        raise UnsupportedError(
            f"{INDEXER_NAME}: serves DeepseekV32Indexer with {INDEX_HEAD_DIM} columns; got "
            f"{type(indexer).__name__} with {indexer.head_dim}"
        )
    parallel = get_current_vllm_config().parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise UnsupportedError(
                f"{INDEXER_NAME}: expected {name} 1; got {getattr(parallel, name)}"
            )
    sizes = {"H": indexer.n_head, "topk": indexer.topk_tokens}
    warm_up("dsa_topk_indexer", positions=True, **sizes)
    warm_up("dsa_topk_prefill", **sizes)
    theirs = attention.sparse_attn_indexer
    if not isinstance(theirs, partial):
        attention.sparse_attn_indexer = partial(choose, theirs)


def choose(theirs: Callable[..., Tensor], *given: Any, **named: Any) -> Tensor:
    """Write the positions that each query of the batch attends to, as vLLM's function does.

    That one stays for a run without a batch, where it reserves memory; for prompts whose
    attention is dense, where it does nothing; and for decodes of unequal lengths in one tensor.

    Args:
        theirs: vLLM's `sparse_attn_indexer`.
        given, named: its arguments; `given` are those of `Call`.
    """
    batch, call = get_forward_context().attn_metadata, Call(*given)
    described = batch[call.k_cache_prefix] if isinstance(batch, dict) else None
    if described is None or not _serves(described, batch, named["dense_mha_metadata_layer_name"]):
        return theirs(*given, **named)
    if described.num_prefills:
        _choose_for_prompts(described, call)
    if described.num_decode_tokens:
        _choose_for_decodes(described, call)
    return call.topk_indices_buffer


def _serves(described: Any, batch: dict[str, Any], dense_layer: str) -> bool:
    """Whether the batch needs a choice, and has as many queries in each decode."""
    attention = batch.get(dense_layer)
    is_dense = getattr(getattr(attention, "prefill", None), "use_dense_mha", False)
    if is_dense and not getattr(attention, "num_decode_tokens", 0):
        return False
    if not described.num_decode_tokens:
        return True
    requests = len(described.decode.decode_lens)
    next_n, rest = divmod(described.num_decode_tokens, requests)
    return not (described.decode.requires_padding or rest) and next_n <= MAX_NEXT_N


def _choose_for_decodes(described: Any, call: Call) -> None:
    """Choose for one query a request, or for the 2 to 4 of a verification."""
    tokens, decode = described.num_decode_tokens, described.decode
    requests = len(decode.decode_lens)
    next_n = tokens // requests

    def rows(tensor: Tensor) -> Tensor:
        """The decodes' rows, with the queries of a request as a dimension if there are several."""
        found = tensor[:tokens]
        return found if next_n == 1 else found.view(requests, next_n, *found.shape[1:])

    dsa_topk_indexer(
        rows(call.q_quant),
        call.kv_cache.unsqueeze(2),
        rows(call.weights),
        rows(decode.seq_lens.flatten()),
        decode.block_table[:requests],
        rows(call.ids),
        ids="position",
    )


def _choose_for_prompts(described: Any, call: Call) -> None:
    """Choose for the queries of prompts, chunk by chunk: a chunk's keys lie one after another in
    vLLM's workspace, where a chunk with `skip_kv_gather` finds those of the one before it."""
    all_keys, all_scales = current_workspace_manager().get_simultaneous(
        ((call.total_seq_lens, INDEX_HEAD_DIM), call.q_quant.dtype),
        ((call.total_seq_lens, SCALE_BYTES), torch.uint8),
    )
    # Each rank of a tensor-parallel group chooses for some of the rows, and all get all.
    shard = PrefillRowShard.from_metadata(described.prefill, described.num_decode_tokens)
    for chunk in described.prefill.chunks:
        keys, scales = all_keys[: chunk.total_seq_lens], all_scales[: chunk.total_seq_lens]
        if not chunk.skip_kv_gather:
            ops.cp_gather_indexer_k_quant_cache(
                call.kv_cache, keys, scales, chunk.block_table, chunk.cu_seq_lens
            )
        part = chunk.token_start, chunk.token_end, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke
        if shard is not None:
            part = shard.narrow(chunk)
            if part is None:
                continue
        begin, end, starts, ends = part
        dsa_topk_prefill(
            call.q_quant[begin:end],
            keys,
            call.weights[begin:end],
            starts,
            ends,
            call.ids[begin:end],
            k_scale=scales.view(torch.float32).squeeze(1),
        )
        # Rows of the keys become positions in their request; -1 stays.
        call.ids[begin:end].sub_(starts[:, None]).clamp_(min=-1)
    if shard is not None:
        shard.exchange_topk(call.ids, call.topk_tokens)
