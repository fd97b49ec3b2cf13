"""The registry, and the implementations on GPUs as data in it.

The CPU's are in the operations' declarations: `dispatch/registration.py` registers them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashdsa.backends.features import ANY, NO_FORMATS, TRITON_LEAST, Features, Formats, OneOf, UpTo
from flashdsa.backends.registry import Implementation, Registry
from flashdsa.backends.triton import formats as triton_formats
from flashdsa.hw import SM90, SM100
from flashdsa.kernels.attention.sm90.decode.full import plan as decode
from flashdsa.kernels.attention.sm100.core.tile import HEADS as SM100_HEADS
from flashdsa.kernels.indexer.plan import TOPK
from flashdsa.kernels.indexer_training.sm90.head_sums.plan import TARGET_HEADS, TARGET_WIDTHS
from flashdsa.kernels.indexer_training.sm90.scores.plan import NUM_HEADS as SCORES_HEADS
from flashdsa.problem import (
    INDEX_HEAD_DIM,
    INDEX_TOKEN_BYTES,
    MAX_NEXT_N,
    MXFP4_TOKEN_BYTES,
    NUM_INDEX_HEADS,
    PARTS_OF_A_PAGE,
    SHORT_TABLE_PAGES,
)

_TOKEN_BYTES = OneOf((INDEX_TOKEN_BYTES, MXFP4_TOKEN_BYTES))
_LOGITS = Features(
    dtypes=("float8_e4m3fn",),
    num_heads=OneOf((16, 32, 64)),
    d_qk=OneOf((INDEX_HEAD_DIM,)),
    topk=UpTo(max(TOPK)),
    next_n=OneOf(tuple(range(1, MAX_NEXT_N + 1))),
    deterministic=True,
)
_INDEXER = replace(_LOGITS, sorted=True, positions=True)
_LOGITS_OF_SLOTS = replace(
    _LOGITS, num_heads=OneOf((NUM_INDEX_HEADS,)), table_page_size=OneOf(SHORT_TABLE_PAGES)
)
_INDEXER_OF_SLOTS = replace(_LOGITS_OF_SLOTS, sorted=True)
"""Features of the variants that gather tokens."""
_SM90_LOGITS = replace(_LOGITS, token_bytes=_TOKEN_BYTES)
_SM90_TWO_LEVELS = replace(
    _SM90_LOGITS, sorted=True, positions=True, block=OneOf(PARTS_OF_A_PAGE), candidates=True
)
"""Features of what scores all positions and ranks them in a launch of its own."""
_SM90_PREFILL_LOGITS = replace(_LOGITS, dtypes=("float8_e4m3fn", "bfloat16"))
_SM90_PREFILL = replace(_SM90_PREFILL_LOGITS, sorted=True)
_SM90_TWO_LEVELS_PREFILL = replace(_SM90_TWO_LEVELS, dtypes=_SM90_PREFILL.dtypes, positions=False)
_SM90_FORWARD = Features(
    dtypes=("bfloat16",),
    d_qk=OneOf((512, 576)),
    d_v=OneOf((512,)),
    attn_sink=True,
    topk_length=True,
    deterministic=True,
    row_formats=Formats(decode.objections),
    batch_invariant=True,
)
"""Features with any form of rows; `_SM90_JOINED` have more lists, `_SM90_BF16` has bf16 rows
only."""
_SM90_JOINED = replace(
    _SM90_FORWARD,
    row_formats=Formats(decode.joined_objections),
    mixed_formats=Formats(decode.mixed_objections),
    extra_kv=True,
    ranges=True,
    index_block=OneOf((1, 2, 4, 8, 16, 32, 64)),
)
_SM90_BF16 = replace(_SM90_JOINED, max_logits=True, row_formats=NO_FORMATS)
_SM90_BACKWARD = replace(_SM90_JOINED, row_formats=NO_FORMATS, batch_invariant=False)
_SM90_SCORES = Features(dtypes=("float32",), topk=UpTo(2048), sorted=True, deterministic=True)
_SM90_QUANTIZE = Features(
    dtypes=("bfloat16", "float32"), d_qk=OneOf((INDEX_HEAD_DIM,)), deterministic=True
)
_SM90_WRITE = replace(_SM90_QUANTIZE, token_bytes=_TOKEN_BYTES)
_SM90_READ = Features(dtypes=("uint8", "int8"), token_bytes=_TOKEN_BYTES, deterministic=True)
_SM90_TARGET = Features(
    dtypes=("bfloat16",),
    num_heads=UpTo(max(TARGET_HEADS)),
    d_qk=OneOf(TARGET_WIDTHS),
    attn_sink=True,
    topk_length=True,
    deterministic=True,
)
_SM90_INDEX_SCORES = replace(
    _SM90_TARGET, num_heads=UpTo(max(SCORES_HEADS)), d_qk=OneOf((INDEX_HEAD_DIM,)), attn_sink=False
)
_SM90_INDEX_BACKWARD = Features(
    dtypes=("bfloat16",),
    num_heads=_LOGITS.num_heads,
    d_qk=OneOf((INDEX_HEAD_DIM,)),
    topk_length=True,
    deterministic=True,
)
_SM90_ROWS = Features(dtypes=("float32",), deterministic=True)
_ENTRIES = Features(dtypes=("bfloat16", "float16", "float32", "float64"), deterministic=True)
_SM90 = (
    ("sparse_mla_fwd", "sparse_mla:bind", _SM90_FORWARD),
    ("sparse_mla_fwd", "sparse_mla:bind", _SM90_BF16),
    ("sparse_mla_fwd", "sparse_mla:bind", _SM90_JOINED),
    ("sparse_mla_fwd_out", "sparse_mla:bind_out", _SM90_FORWARD),
    ("sparse_mla_fwd_out", "sparse_mla:bind_out", _SM90_BF16),
    ("sparse_mla_fwd_out", "sparse_mla:bind_out", _SM90_JOINED),
    ("mla_bwd", "mla_bwd:bind", _SM90_BACKWARD),
    ("dsa_topk_indexer", "indexer:bind", _INDEXER),
    ("dsa_topk_indexer", "two_levels:bind", _SM90_TWO_LEVELS),
    ("indexer_logits", "indexer:bind_logits", _SM90_LOGITS),
    ("topk_indices", "topk:bind", _SM90_SCORES),
    ("dsa_topk_prefill", "prefill:bind", _SM90_PREFILL),
    ("dsa_topk_prefill", "two_levels:bind_prefill", _SM90_TWO_LEVELS_PREFILL),
    ("prefill_logits", "prefill:bind_logits", _SM90_PREFILL_LOGITS),
    ("quantize_index_k", "quantize:bind_keys", _SM90_QUANTIZE),
    ("quantize_index_q", "quantize:bind_queries", _SM90_QUANTIZE),
    ("write_index_k_cache", "index_k_cache:bind_write", _SM90_WRITE),
    ("read_index_k_cache", "index_k_cache:bind_read", _SM90_READ),
    ("attention_target", "indexer_training:bind_target", _SM90_TARGET),
    ("indexer_scores", "indexer_training:bind_scores", _SM90_INDEX_SCORES),
    ("indexer_bwd", "indexer_bwd:bind", _SM90_INDEX_BACKWARD),
    ("indexer_kl", "indexer_training:bind_kl", _SM90_ROWS),
    ("indexer_kl_bwd", "indexer_training:bind_kl_backward", _SM90_ROWS),
    ("compress_kv", "entries:bind", _ENTRIES),
    ("compress_kv_bwd", "entries:bind_backward", _ENTRIES),
)
"""An operation's further rows have features that its first one does not have together."""
_SM100_BACKWARD = Features(
    dtypes=("bfloat16",),
    num_heads=OneOf((128,)),
    d_qk=OneOf((576,)),
    d_v=OneOf((512,)),
    attn_sink=True,
    topk_length=True,
    deterministic=True,
)
_SM100_FEWER_HEADS = replace(_SM100_BACKWARD, num_heads=OneOf(SM100_HEADS[1:]), deterministic=False)
_SM100_FORWARD = replace(_SM100_BACKWARD, num_heads=OneOf(SM100_HEADS), max_logits=True)
_SM100 = (
    ("sparse_mla_fwd", "sparse_mla:bind", _SM100_FORWARD),
    ("sparse_mla_fwd_out", "sparse_mla:bind_out", _SM100_FORWARD),
    ("mla_bwd", "mla_bwd:bind", _SM100_BACKWARD),
    ("mla_bwd", "mla_bwd:bind", _SM100_FEWER_HEADS),
    ("dsa_topk_indexer", "indexer:bind", _INDEXER),
    ("dsa_topk_indexer", "indexer:bind", _INDEXER_OF_SLOTS),
    ("indexer_logits", "indexer:bind_logits", _LOGITS),
    ("indexer_logits", "indexer:bind_logits", _LOGITS_OF_SLOTS),
    ("compress_kv", "entries:bind", _ENTRIES),
    ("compress_kv_bwd", "entries:bind_backward", _ENTRIES),
)
_TRITON_FORWARD = Features(
    dtypes=("bfloat16", "float16"),
    d_qk=OneOf((512, 576)),
    d_v=OneOf((512,)),
    index_block=UpTo(1024),
    attn_sink=True,
    topk_length=True,
    max_logits=True,
    deterministic=True,
    extra_kv=True,
    ranges=True,
    batch_invariant=True,
)
_TRITON_PACKED = replace(
    _TRITON_FORWARD,
    dtypes=("bfloat16",),
    row_formats=Formats(triton_formats.objections),
    mixed_formats=Formats(triton_formats.objections),
)
_TRITON_BACKWARD = replace(
    _TRITON_FORWARD, dtypes=("bfloat16",), max_logits=False, batch_invariant=False
)
# Left to torch: fp32 and fp64, of which tensor cores have no products, and gradients of fp16, which
# may leave its range; more than 128 index heads, as a tile has them all, and a topk beyond 4096, as
# a part of a row has few more; keys of 68 bytes, blocks and candidates, compressed entries, the
# cache's reads and writes, which no time goes to on these GPUs.
_TRITON_LOGITS = replace(
    _LOGITS, num_heads=UpTo(128), topk=UpTo(4096), table_page_size=OneOf(PARTS_OF_A_PAGE)
)
_TRITON_INDEXER = replace(_TRITON_LOGITS, sorted=True, positions=True)
_TRITON_PREFILL_LOGITS = replace(_TRITON_LOGITS, dtypes=("float8_e4m3fn", "bfloat16", "float16"))
_TRITON_PREFILL = replace(_TRITON_PREFILL_LOGITS, sorted=True)
_TRITON_SCORES = replace(_SM90_SCORES, topk=_TRITON_INDEXER.topk)
_TRITON_SUMS = replace(
    _SM90_TARGET, dtypes=("bfloat16", "float16"), num_heads=ANY, d_qk=OneOf((128, 512, 576))
)
_TRITON_INDEX_BACKWARD = replace(_SM90_INDEX_BACKWARD, num_heads=ANY)
_TRITON = (
    ("sparse_mla_fwd", "attention:bind", _TRITON_FORWARD),
    ("sparse_mla_fwd", "attention:bind", _TRITON_PACKED),
    ("sparse_mla_fwd_out", "attention:bind_out", _TRITON_FORWARD),
    ("sparse_mla_fwd_out", "attention:bind_out", _TRITON_PACKED),
    ("mla_bwd", "attention_bwd:bind", _TRITON_BACKWARD),
    ("dsa_topk_indexer", "indexer:bind", _TRITON_INDEXER),
    ("indexer_logits", "indexer:bind_logits", _TRITON_LOGITS),
    ("topk_indices", "topk:bind", _TRITON_SCORES),
    ("dsa_topk_prefill", "prefill:bind", _TRITON_PREFILL),
    ("prefill_logits", "prefill:bind_logits", _TRITON_PREFILL_LOGITS),
    ("attention_target", "indexer_training:bind_target", _TRITON_SUMS),
    ("indexer_scores", "indexer_training:bind_scores", replace(_TRITON_SUMS, attn_sink=False)),
    ("indexer_bwd", "indexer_training:bind_backward", _TRITON_INDEX_BACKWARD),
    ("indexer_kl", "indexer_kl:bind", _SM90_ROWS),
    ("indexer_kl_bwd", "indexer_kl:bind_backward", _SM90_ROWS),
)

registry = Registry()
"""The process's table, read by the dispatcher and by `flashdsa info`."""

_GPUS: tuple[tuple[str, dict[str, Any], Any], ...] = (
    (SM90.backend, {"capabilities": SM90.capabilities}, _SM90),
    (SM100.backend, {"capabilities": SM100.capabilities}, _SM100),
    ("triton", {"least_capability": TRITON_LEAST}, _TRITON),
)
for _backend, _capabilities, _rows in _GPUS:
    _portable = _backend == "triton"
    for _operation, _function, _features in _rows:
        _on_gpu = Implementation(
            _operation,
            _backend,
            f"flashdsa.backends.{_backend}.{_function}",
            replace(_features, **_capabilities),
            priority=-1 if _portable else 0,  # after a GPU's own kernels, before torch
            runner="flashdsa.backends.gpu.runner:gpu",
            package="triton" if _portable else "",
        )
        _emulated = replace(
            _on_gpu,
            backend=f"emulate-{_backend}",
            features=replace(_features, devices=("cpu",), capabilities=()),
            automatic=False,
            runner=f"flashdsa.backends.emulated.runner:{_backend}",
            binds_each_call=True,
        )
        registry.register(_on_gpu)
        registry.register(_emulated)
