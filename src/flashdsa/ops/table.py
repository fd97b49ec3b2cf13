"""The operations, one table each: operands, parameters, outputs.

Everything else about an operation follows from its table (`spec`), but for what its results are
(`fakes`, `autograd`) and for which backend serves it (`backends.catalog`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flashdsa.operands import (
    AttentionTargetOperands,
    CacheReadOperands,
    CacheWriteOperands,
    IndexerBwdOperands,
    IndexerKlBwdOperands,
    IndexerKlOperands,
    IndexerOperands,
    IndexerScoresOperands,
    IndexKOperands,
    IndexQOperands,
    MlaBwdOperands,
    PrefillOperands,
    SparseMlaOperands,
    SparseMlaOutOperands,
    TopkIndexerOperands,
    TopkOperands,
    TopkPrefillOperands,
)
from flashdsa.ops import argument_rules as rules
from flashdsa.ops import normalise
from flashdsa.ops.checks import INT32_MAX, int32_slots
from flashdsa.ops.index_requests import rows_of_requests
from flashdsa.ops.spec import Operand, OpSpec, Parameter
from flashdsa.problem import INDEX_HEAD_DIM, INDEX_TOKEN_BYTES, PAGE_SIZE, Operation

ATTENTION_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
QUANTIZABLE = (torch.bfloat16, torch.float32)
E4M3 = (torch.float8_e4m3fn,)
FP32 = (torch.float32,)
SUMS = (torch.float32, torch.float64)
INT32 = (torch.int32,)
BYTES = (torch.uint8, torch.int8)


def _fold(queries: str, keys: str, ids: str) -> str:
    return (
        f"fold the batch into S ({queries}.flatten(0, 1)) and into S_kv ({keys}.flatten(0, 1)), "
        f"and add b * S_kv to the {ids}"
    )


_VALID_INDICES = "valid indices of sequence b; invalid ones stay -1"
_Q = Operand(
    "q",
    "S H d_qk",
    ATTENTION_DTYPES,
    batched=_fold("q", "kv", _VALID_INDICES),
    nonempty="expected shape [S, H, d_qk] with H >= 1 and d_qk >= 1; got {shape}",
)
_KV = Operand("kv", "S_kv d_qk", rules.same_dtype, note=" or [S_kv, 1, d_qk]")
_KV_OR_PACKED = Operand("kv", "S_kv width", rules.kv_dtypes, rule=rules.kv_columns)
_INDICES = Operand("indices", "S topk", INT32, nonempty="expected topk >= 1 columns; got 0")
_TOPK_LENGTH = Operand("topk_length", "S", INT32, optional=True)
_ATTN_SINK = Operand("attn_sink", "H", rules.sink_dtypes, optional=True)
_SCALE = Parameter("sm_scale", "float")
_DETERMINISTIC = Parameter("deterministic", "bool")

SPARSE_MLA_FWD = OpSpec(
    Operation.SPARSE_MLA_FWD,
    SparseMlaOperands,
    operands=(_Q, _KV_OR_PACKED, _INDICES, _TOPK_LENGTH, _ATTN_SINK),
    parameters=(
        Parameter("d_v", "int", rule=rules.d_v_at_most_d_qk),
        _SCALE,
        replace(_DETERMINISTIC, passed=False),  # of the backward that autograd runs, and
        Parameter("backward_backend", "str", passed=False),  # its backend
        Parameter("max_logits", "bool"),
    ),
    outputs=("O", "lse", "max_logits"),  # max_logits is empty where it is not asked for
    autocast=("q", "kv"),
    normalise=normalise.rows_and_slots,
)
_LSE = Operand("lse", "S H", rules.lse_dtypes)
_RESULT = Operand("", "", rules.lse_dtypes, written=True, rule=rules.without_gaps)
SPARSE_MLA_FWD_OUT = OpSpec(
    Operation.SPARSE_MLA_FWD_OUT,
    SparseMlaOutOperands,
    operands=(
        _Q,
        _KV_OR_PACKED,
        _INDICES,
        replace(_RESULT, name="out", shape="S H d_v", dtypes=rules.same_dtype),
        replace(_RESULT, name="lse", shape="S H"),
        replace(_RESULT, name="max_logits", shape="S H", optional=True),
        _TOPK_LENGTH,
        _ATTN_SINK,
    ),
    parameters=(_SCALE,),
)
MLA_BWD = OpSpec(
    Operation.MLA_BWD,
    MlaBwdOperands,
    operands=(
        _Q,
        _KV,
        Operand("dO", "S H d_v", rules.same_dtype, rule=rules.columns_of_v),
        _LSE,
        Operand("O", "S H d_v", rules.same_dtype, why=" (d_v is dO's; one of the two is wrong)"),
        _INDICES,
        _TOPK_LENGTH,
        _ATTN_SINK,
    ),
    parameters=(
        _SCALE,
        _DETERMINISTIC,
        Parameter(
            "dkv_dtype",
            "ScalarType?",
            default=lambda q: rules.sum_dtype(q.dtype),
            rule=rules.dkv_dtype_fits,
        ),
    ),
    outputs=("dQ", "dKV", "d_sink"),  # d_sink is empty where there is no sink
    normalise=normalise.rows_with_gradient,
)

_CACHE = Operand(
    "cache",
    f"num_pages {PAGE_SIZE} 1 {INDEX_TOKEN_BYTES}",
    BYTES,
    rule=rules.packed_pages,
    begins_at=rules.SCALE_BYTES,
)
_INDEXER = (
    Operand(
        "q_index_fp8",
        f"B H {INDEX_HEAD_DIM}",
        E4M3,
        nonempty="expected shape [B, H, 128] with H >= 1; got H = 0",
    ),
    replace(_CACHE, name="k_index_cache_fp8"),
    Operand("weights", "B H", FP32),
    Operand("seq_lens", "B", INT32),
    Operand("block_table", "B max_pages", INT32),
)
_SORTED = Parameter("sorted", "bool")
_OF_INDEX_HEADS = {"d_qk": INDEX_HEAD_DIM}

DSA_TOPK_INDEXER = OpSpec(
    Operation.DSA_TOPK_INDEXER,
    TopkIndexerOperands,
    operands=(
        _INDEXER[0],
        replace(_INDEXER[1], free={"num_pages": rules.MAX_PAGES}),
        *_INDEXER[2:-1],
        Operand(
            "block_table",
            "requests max_pages",
            INT32,
            rule=rules.pages_of_requests,
            free={"max_pages": INT32_MAX},
        ),
        Operand(
            "topk_indices",
            "B topk",
            INT32,
            written=True,
            nonempty="expected shape [B, topk] with topk >= 1; got 0",
        ),
    ),
    parameters=(
        _SORTED,
        Parameter("positions", "bool", given=False),
        Parameter("check", "bool", given=False),
    ),
    facts=_OF_INDEX_HEADS,
    normalise=rows_of_requests,
)
INDEXER_LOGITS = OpSpec(
    Operation.INDEXER_LOGITS,
    IndexerOperands,
    operands=_INDEXER,
    parameters=(Parameter("max_len", "int"),),
    outputs=("scores",),
    facts=_OF_INDEX_HEADS,
)
TOPK_INDICES = OpSpec(
    Operation.TOPK_INDICES,
    TopkOperands,
    operands=(
        Operand("scores", "B max_len", FP32),
        Operand("lengths", "B", INT32, strided=True),
    ),
    parameters=(Parameter("topk", "int"), _SORTED),
    outputs=("positions",),
)

_PREFILL = (
    Operand(
        "q_index",
        f"S H {INDEX_HEAD_DIM}",
        (*E4M3, torch.bfloat16, torch.float16, torch.float32),
        batched=_fold("q_index", "k_index", "starts and ends of sequence b"),
        nonempty="expected shape [S, H, 128] with H >= 1; got H = 0",
    ),
    Operand("k_index", f"S_kv {INDEX_HEAD_DIM}", rules.same_dtype, rule=rules.rows_within_int32),
    Operand("weights", "S H", FP32),
    Operand("ends", "S", INT32),
)
_STARTS_AND_SCALES = (
    Operand("starts", "S", INT32, optional=True),
    Operand("k_scale", "S_kv", FP32, optional=True),
)

DSA_TOPK_PREFILL = OpSpec(
    Operation.DSA_TOPK_PREFILL,
    TopkPrefillOperands,
    operands=(
        *_PREFILL,
        Operand(
            "topk_indices",
            "S topk",
            INT32,
            written=True,
            nonempty="expected shape [S, topk] with topk >= 1; got 0",
        ),
        *_STARTS_AND_SCALES,
    ),
    parameters=(_SORTED,),
    facts=_OF_INDEX_HEADS,
    rule=rules.scales_of_e4m3_keys,
)
PREFILL_LOGITS = OpSpec(
    Operation.PREFILL_LOGITS,
    PrefillOperands,
    operands=(*_PREFILL, *_STARTS_AND_SCALES),
    outputs=("scores",),
    facts=_OF_INDEX_HEADS,
    rule=rules.scales_of_e4m3_keys,
)

_K = Operand("k", f"T {INDEX_HEAD_DIM}", QUANTIZABLE)
_SLOTS = Operand("slots", "T", (torch.int32, torch.int64), strided=True)

QUANTIZE_INDEX_K = OpSpec(
    Operation.QUANTIZE_INDEX_K,
    IndexKOperands,
    operands=(_K,),
    outputs=("fp8", "scale"),
    facts=_OF_INDEX_HEADS,
)
QUANTIZE_INDEX_Q = OpSpec(
    Operation.QUANTIZE_INDEX_Q,
    IndexQOperands,
    operands=(
        Operand("q", f"B H {INDEX_HEAD_DIM}", QUANTIZABLE),
        Operand("weights", "B H", FP32, strided=True),
    ),
    outputs=("fp8", "folded_weights"),
    facts=_OF_INDEX_HEADS,
)
WRITE_INDEX_K_CACHE = OpSpec(
    Operation.WRITE_INDEX_K_CACHE,
    CacheWriteOperands,
    operands=(_K, replace(_SLOTS, note=", one a key"), replace(_CACHE, written=True)),
    facts=_OF_INDEX_HEADS,
)
READ_INDEX_K_CACHE = OpSpec(
    Operation.READ_INDEX_K_CACHE,
    CacheReadOperands,
    operands=(_CACHE, _SLOTS),
    outputs=("fp8", "scale"),
)

ATTENTION_TARGET = OpSpec(
    Operation.ATTENTION_TARGET,
    AttentionTargetOperands,
    operands=(
        _Q,
        _KV,
        _LSE,
        _INDICES,
        _TOPK_LENGTH,
        _ATTN_SINK,
    ),
    parameters=(_SCALE,),
    outputs=("target",),
    autocast=("q", "kv"),
    normalise=normalise.rows_and_slots,
    detached=True,
)
_INDEX_HEADS = (
    Operand(
        "q_index",
        f"S H {INDEX_HEAD_DIM}",
        ATTENTION_DTYPES,
        batched=_fold("q_index", "k_index", _VALID_INDICES),
        nonempty="expected shape [S, H, 128] with H >= 1; got H = 0",
    ),
    Operand("k_index", f"S_kv {INDEX_HEAD_DIM}", rules.same_dtype),
    Operand("weights", "S H", rules.index_weight_dtypes),
    _INDICES,
)
_TRAINED = ("q_index", "k_index")
_BACKWARD_BACKEND = Parameter("backward_backend", "str", passed=False)

INDEXER_SCORES = OpSpec(
    Operation.INDEXER_SCORES,
    IndexerScoresOperands,
    operands=(*_INDEX_HEADS, _TOPK_LENGTH),
    parameters=(replace(_DETERMINISTIC, passed=False), _BACKWARD_BACKEND),
    outputs=("scores",),
    facts=_OF_INDEX_HEADS,
    autocast=_TRAINED,
    normalise=int32_slots,
)
INDEXER_BWD = OpSpec(
    Operation.INDEXER_BWD,
    IndexerBwdOperands,
    operands=(*_INDEX_HEADS, Operand("grad_scores", "S topk", rules.lse_dtypes), _TOPK_LENGTH),
    parameters=(
        _DETERMINISTIC,
        Parameter(
            "dk_dtype",
            "ScalarType?",
            default=lambda q_index: rules.sum_dtype(q_index.dtype),
            rule=rules.dk_dtype_fits,
        ),
    ),
    outputs=("dq_index", "dk_index", "d_weights"),
    facts=_OF_INDEX_HEADS,
    normalise=int32_slots,
)
_SCORES = Operand("scores", "S topk", SUMS, nonempty="expected topk >= 1 columns; got 0")
_TARGET = Operand("target", "S topk", rules.same_dtype)
INDEXER_KL = OpSpec(
    Operation.INDEXER_KL,
    IndexerKlOperands,
    operands=(_SCORES, _TARGET),
    parameters=(_BACKWARD_BACKEND,),
    outputs=("kl",),
)
INDEXER_KL_BWD = OpSpec(
    Operation.INDEXER_KL_BWD,
    IndexerKlBwdOperands,
    operands=(_SCORES, _TARGET, Operand("grad_kl", "S", rules.same_dtype)),
    outputs=("d_scores",),
)

OPERATIONS = (
    SPARSE_MLA_FWD,
    SPARSE_MLA_FWD_OUT,
    MLA_BWD,
    DSA_TOPK_INDEXER,
    INDEXER_LOGITS,
    TOPK_INDICES,
    DSA_TOPK_PREFILL,
    PREFILL_LOGITS,
    QUANTIZE_INDEX_K,
    QUANTIZE_INDEX_Q,
    WRITE_INDEX_K_CACHE,
    READ_INDEX_K_CACHE,
    ATTENTION_TARGET,
    INDEXER_SCORES,
    INDEXER_BWD,
    INDEXER_KL,
    INDEXER_KL_BWD,
)
