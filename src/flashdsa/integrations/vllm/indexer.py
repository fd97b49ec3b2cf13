"""DeepSeek-V3.2's indexer inside vLLM: the top-k of a batch, which vLLM has described."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import PrefillRowShard
from vllm.utils.deep_gemm import mqa_logits_use_mx_scales
from vllm.v1.worker.workspace import current_workspace_manager

from flashdsa.errors import UnsupportedError
from flashdsa.integrations import start
from flashdsa.integrations.vllm import INDEXER_NAME, KNOWN, NAME, installed_version
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


DENSE_LAYER = "dense_mha_metadata_layer_name"
"""Name of the argument that names the layer whose prompts may have dense attention."""
SERVED_VALUES: Mapping[str, Any] = {
    "skip_k_cache_insert": True,
    "use_pcp": False,
    "use_fp4_cache": False,
    "dcp_world_size": 1,
    "skip_topk_buffer_clear": True,
    "candidate_blocks": None,
    "candidate_write": False,
}
"""Values of vLLM's named arguments whose meaning is served."""
WITHOUT_MEANING_HERE = {
    "pcp_shard_decode_requests",
    "dcp_rank",
    "cp_kv_cache_interleave_size",
    "candidate_block_size",
    "topk_backend",
}
"""Named arguments that change nothing if the others are those of `SERVED_VALUES`."""

_caches: WeakSet[Any] = WeakSet()
"""Index caches of the layers that are served. Another engine of this process may have others."""


def install(indexer: Any) -> dict[str, str]:
    """Have flashdsa choose for a layer: replace the function that layers call by name.

    Args:
        indexer: a layer's, before the server starts.

    Returns:
        The backends that serve each operation.

    Raises:
        UnsupportedError: another model's indexer, sizes without kernels, context parallelism, a
            GPU for which vLLM writes other scales, a vLLM whose function has other parameters.
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
    if mqa_logits_use_mx_scales():
        # Read as fp32, four equal exponents are about the square of the scale.
        raise UnsupportedError(
            f"{INDEXER_NAME}: expected an index cache with fp32 scales; on this GPU (compute "
            f"capability 10.x) vLLM writes a key's scale as four UE8M0 bytes; use {NAME}"
        )
    sizes = {"H": indexer.n_head, "topk": indexer.topk_tokens}
    calls = {"dsa_topk_indexer": {"positions": True, **sizes}, "dsa_topk_prefill": sizes}
    served = start.load_own(calls, INDEXER_NAME)
    theirs = attention.sparse_attn_indexer
    if not isinstance(theirs, partial):
        attention.sparse_attn_indexer = partial(choose, theirs, _known_defaults(theirs))
    _caches.add(indexer.k_cache)
    return served


def _known_defaults(theirs: Callable[..., Tensor]) -> frozenset[str]:
    """Return the names of `SERVED_VALUES` that are the defaults of vLLM's function.

    Raises:
        UnsupportedError: it has not the parameters that `choose` reads.
    """
    found = inspect.signature(theirs).parameters
    names, needed = tuple(found), (*SERVED_VALUES, DENSE_LAYER)
    first = (*Call._fields, needed[0])  # the first that layers name
    if names[: len(first)] != first or not set(needed).issubset(names):
        raise UnsupportedError(
            f"{INDEXER_NAME}: sparse_attn_indexer of vLLM {installed_version()} is not known: "
            f"expected the parameters {', '.join(first)} of vLLM {KNOWN}, then among others "
            f"{', '.join(needed[1:])}; got {', '.join(names)}"
        )
    return frozenset(name for name, one in SERVED_VALUES.items() if found[name].default is one)


def choose(
    theirs: Callable[..., Tensor], defaults: frozenset[str], *given: Any, **named: Any
) -> Tensor:
    """Write the positions that each query of the batch attends to, as vLLM's function does.

    That one stays for layers of another engine; for a run without a batch, where it reserves
    memory; for prompts whose attention is dense, where it does nothing; for decodes of unequal
    lengths in one tensor; and for calls that mean something else.

    Args:
        theirs: vLLM's `sparse_attn_indexer`.
        defaults: names of `SERVED_VALUES` that may be missing among the arguments.
        given, named: its arguments; `given` are those of `Call`.
    """
    if len(given) != len(Call._fields) or not _is_known(named, defaults):
        return theirs(*given, **named)
    context, call = get_forward_context(), Call(*given)
    batch = context.attn_metadata
    is_served = context.no_compile_layers.get(call.k_cache_prefix) in _caches
    described = batch[call.k_cache_prefix] if is_served and isinstance(batch, dict) else None
    if described is None or call.q_scale is not None:
        return theirs(*given, **named)
    if not _serves(described, batch, named[DENSE_LAYER]):
        return theirs(*given, **named)
    if described.num_prefills:
        _choose_for_prompts(described, call)
    if described.num_decode_tokens:
        _choose_for_decodes(described, call)
    return call.topk_indices_buffer


def _is_known(named: Mapping[str, Any], defaults: frozenset[str]) -> bool:
    """Whether a call's named arguments mean what is served."""
    others = named.keys() - WITHOUT_MEANING_HERE - SERVED_VALUES.keys()
    return others == {DENSE_LAYER} and all(
        named[name] is value or named[name] == value if name in named else name in defaults
        for name, value in SERVED_VALUES.items()
    )


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
