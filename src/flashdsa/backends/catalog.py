"""The implementations that this version has, declared as data and put into the registry."""

from __future__ import annotations

from dataclasses import replace

from flashdsa.backends.features import ANY, Features, OneOf, UpTo
from flashdsa.backends.registry import Implementation, Registry
from flashdsa.hw import SM90, SM100
from flashdsa.kernels.attention.sm90.decode.full.plan import FORMATS as HOPPER_FORMATS
from flashdsa.kernels.attention.sm90.decode.full.plan import JOINED_FORMATS, MIXED_FORMATS
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
from flashdsa.row_formats import ROW_FORMATS

_CPU_ATTENTION = Features(
    devices=("cpu",),
    dtypes=("bfloat16", "float16", "float32", "float64"),
    attn_sink=True,
    topk_length=True,
    deterministic=True,
)
_CPU_BACKWARD = replace(_CPU_ATTENTION, extra_kv=True, ranges=True, index_block=ANY)
_CPU_FORWARD = replace(
    _CPU_BACKWARD,
    max_logits=True,
    row_formats=tuple(ROW_FORMATS),
    mixed_formats=tuple(ROW_FORMATS),
    batch_invariant=True,
)
_CPU_INDEXER = Features(
    devices=("cpu",),
    dtypes=("float8_e4m3fn",),
    d_qk=OneOf((INDEX_HEAD_DIM,)),
    next_n=OneOf(tuple(range(1, MAX_NEXT_N + 1))),
    table_page_size=OneOf(PARTS_OF_A_PAGE),
    token_bytes=OneOf((INDEX_TOKEN_BYTES, MXFP4_TOKEN_BYTES)),
    block=OneOf(PARTS_OF_A_PAGE),
    candidates=True,
    sorted=True,
    positions=True,
    deterministic=True,
)
_CPU_PREFILL = replace(
    _CPU_INDEXER, dtypes=("float8_e4m3fn", "bfloat16", "float16", "float32"), positions=False
)
_CPU_SCORES = Features(devices=("cpu",), dtypes=("float32",), sorted=True, deterministic=True)
_CPU_QUANTIZE = Features(
    devices=("cpu",),
    dtypes=("bfloat16", "float32"),
    d_qk=OneOf((INDEX_HEAD_DIM,)),
    deterministic=True,
)
_CPU_WRITE = replace(_CPU_QUANTIZE, token_bytes=_CPU_INDEXER.token_bytes)
_CPU_TRAINING = replace(_CPU_ATTENTION, d_qk=OneOf((INDEX_HEAD_DIM,)), attn_sink=False)
_CPU_ROWS = Features(devices=("cpu",), dtypes=("float32", "float64"), deterministic=True)
_CPU_ENTRIES = replace(_CPU_ATTENTION, attn_sink=False, topk_length=False)
_CPU_CACHE = Features(
    devices=("cpu",),
    dtypes=("uint8", "int8"),
    token_bytes=_CPU_INDEXER.token_bytes,
    deterministic=True,
)

_CPU = {
    "sparse_mla_fwd": ("sparse_mla:forward", _CPU_FORWARD),
    "sparse_mla_fwd_out": ("sparse_mla:forward_out", _CPU_FORWARD),
    "mla_bwd": ("sparse_mla:backward", _CPU_BACKWARD),
    "dsa_topk_indexer": ("indexer:topk_indexer", _CPU_INDEXER),
    "indexer_logits": ("indexer:logits", _CPU_INDEXER),
    "topk_indices": ("topk:topk_positions", _CPU_SCORES),
    "dsa_topk_prefill": ("prefill:topk_prefill", _CPU_PREFILL),
    "prefill_logits": ("prefill:logits", _CPU_PREFILL),
    "quantize_index_k": ("quantize:quantize_index_k", _CPU_QUANTIZE),
    "quantize_index_q": ("quantize:quantize_index_q", _CPU_QUANTIZE),
    "write_index_k_cache": ("index_k_cache:write", _CPU_WRITE),
    "read_index_k_cache": ("index_k_cache:read", _CPU_CACHE),
    "attention_target": ("indexer_training:attention_target", _CPU_ATTENTION),
    "indexer_scores": ("indexer_training:scores", _CPU_TRAINING),
    "indexer_bwd": ("indexer_training:backward", _CPU_TRAINING),
    "indexer_kl": ("indexer_training:kl", _CPU_ROWS),
    "indexer_kl_bwd": ("indexer_training:kl_backward", _CPU_ROWS),
    "compress_kv": ("entries:forward", _CPU_ENTRIES),
    "compress_kv_bwd": ("entries:backward", _CPU_ENTRIES),
}

_INDEXER = Features(
    devices=("cuda",),
    dtypes=("float8_e4m3fn",),
    num_heads=OneOf((16, 32, 64)),
    d_qk=OneOf((INDEX_HEAD_DIM,)),
    topk=UpTo(max(TOPK)),
    next_n=OneOf(tuple(range(1, MAX_NEXT_N + 1))),
    deterministic=True,
    sorted=True,
)
_INDEXER_POSITIONS = replace(_INDEXER, num_heads=OneOf((32, 64)), positions=True)
"""Features of the variants that write positions: the sizes of the models that are served with
them."""
_INDEXER_OF_SLOTS = replace(
    _INDEXER, num_heads=OneOf((NUM_INDEX_HEADS,)), table_page_size=OneOf(SHORT_TABLE_PAGES)
)
"""Features of the variants that gather tokens."""
_SM90_LOGITS = replace(_INDEXER, token_bytes=_CPU_INDEXER.token_bytes)
_SM90_TWO_LEVELS = replace(
    _SM90_LOGITS, positions=True, block=OneOf(PARTS_OF_A_PAGE), candidates=True
)
"""Features of what scores all positions and ranks them in a launch of its own."""
_SM90_PREFILL = replace(_INDEXER, dtypes=("float8_e4m3fn", "bfloat16"))
_SM90_FORWARD = Features(
    devices=("cuda",),
    dtypes=("bfloat16",),
    d_qk=OneOf((512, 576)),
    d_v=OneOf((512,)),
    attn_sink=True,
    topk_length=True,
    deterministic=True,
    row_formats=tuple(form.name for form in HOPPER_FORMATS),
    batch_invariant=True,
)
"""Features with any form of rows; `_SM90_JOINED` have more lists, `_SM90_BF16` has bf16 rows
only."""
_SM90_JOINED = replace(
    _SM90_FORWARD,
    row_formats=tuple(form.name for form in JOINED_FORMATS),
    mixed_formats=tuple(form.name for form in MIXED_FORMATS),
    batch_invariant=False,
    extra_kv=True,
    ranges=True,
    index_block=OneOf((1, 2, 4, 8, 16, 32, 64)),
)
_SM90_BF16 = replace(_SM90_JOINED, max_logits=True, row_formats=(), batch_invariant=True)
_SM90_BACKWARD = replace(_SM90_JOINED, row_formats=())
_SM90_SCORES = replace(_CPU_SCORES, topk=UpTo(2048))
_SM90_TARGET = Features(
    devices=("cuda",),
    dtypes=("bfloat16",),
    num_heads=UpTo(max(TARGET_HEADS)),
    d_qk=OneOf(TARGET_WIDTHS),
    attn_sink=True,
    topk_length=True,
    deterministic=True,
)
_SM90_INDEX_SCORES = replace(
    _SM90_TARGET,
    num_heads=UpTo(max(SCORES_HEADS)),
    d_qk=OneOf((INDEX_HEAD_DIM,)),
    attn_sink=False,
)
_SM90_INDEX_BACKWARD = Features(
    devices=("cuda",),
    dtypes=("bfloat16",),
    num_heads=_INDEXER.num_heads,
    d_qk=OneOf((INDEX_HEAD_DIM,)),
    topk_length=True,
    deterministic=True,
)
_SM90_ROWS = replace(_CPU_ROWS, dtypes=("float32",))
_SM90 = {
    "sparse_mla_fwd": ("sparse_mla:bind", _SM90_FORWARD),
    "sparse_mla_fwd_out": ("sparse_mla:bind_out", _SM90_FORWARD),
    "mla_bwd": ("mla_bwd:bind", _SM90_BACKWARD),
    "dsa_topk_indexer": ("indexer:bind", _INDEXER),
    "indexer_logits": ("indexer:bind_logits", _SM90_LOGITS),
    "topk_indices": ("topk:bind", _SM90_SCORES),
    "dsa_topk_prefill": ("prefill:bind", _SM90_PREFILL),
    "prefill_logits": ("prefill:bind_logits", _SM90_PREFILL),
    "quantize_index_k": ("quantize:bind_keys", _CPU_QUANTIZE),
    "quantize_index_q": ("quantize:bind_queries", _CPU_QUANTIZE),
    "write_index_k_cache": ("index_k_cache:bind_write", _CPU_WRITE),
    "read_index_k_cache": ("index_k_cache:bind_read", _CPU_CACHE),
    "attention_target": ("attention_target:bind", _SM90_TARGET),
    "indexer_scores": ("indexer_scores:bind", _SM90_INDEX_SCORES),
    "indexer_bwd": ("indexer_bwd:bind", _SM90_INDEX_BACKWARD),
    "indexer_kl": ("indexer_kl:bind", _SM90_ROWS),
    "indexer_kl_bwd": ("indexer_kl:bind_backward", _SM90_ROWS),
    "compress_kv": ("entries:bind", _CPU_ENTRIES),
    "compress_kv_bwd": ("entries:bind_backward", _CPU_ENTRIES),
}
_FORWARDS = ("sparse_mla_fwd", "sparse_mla_fwd_out")
_SM100_BACKWARD = Features(
    devices=("cuda",),
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
_SM100 = {
    "sparse_mla_fwd": ("sparse_mla:bind", _SM100_FORWARD),
    "sparse_mla_fwd_out": ("sparse_mla:bind_out", _SM100_FORWARD),
    "mla_bwd": ("mla_bwd:bind", _SM100_BACKWARD),
    "dsa_topk_indexer": ("indexer:bind", _INDEXER),
    "indexer_logits": ("indexer:bind_logits", _INDEXER),
    "compress_kv": ("entries:bind", _CPU_ENTRIES),
    "compress_kv_bwd": ("entries:bind_backward", _CPU_ENTRIES),
}
_INDEXER_OF_POSITIONS = (("dsa_topk_indexer", ("indexer:bind", _INDEXER_POSITIONS)),)
_FURTHER = {
    "sm90": (
        *_INDEXER_OF_POSITIONS,
        ("dsa_topk_indexer", ("two_levels:bind", _SM90_TWO_LEVELS)),
        (
            "dsa_topk_prefill",
            (
                "two_levels:bind_prefill",
                replace(_SM90_TWO_LEVELS, dtypes=_SM90_PREFILL.dtypes, positions=False),
            ),
        ),
        *((one, (_SM90[one][0], more)) for more in (_SM90_BF16, _SM90_JOINED) for one in _FORWARDS),
    ),
    "sm100": (
        *_INDEXER_OF_POSITIONS,
        ("dsa_topk_indexer", ("indexer:bind", _INDEXER_OF_SLOTS)),
        ("indexer_logits", ("indexer:bind_logits", _INDEXER_OF_SLOTS)),
        ("mla_bwd", (_SM100["mla_bwd"][0], _SM100_FEWER_HEADS)),
    ),
}
"""Second rows of an operation: features that its first row does not have together."""

registry = Registry()
"""The process's table, read by the dispatcher and by `flashdsa info`."""

for _operation, (_function, _features) in _CPU.items():
    registry.register(
        Implementation(_operation, "cpu", f"flashdsa.backends.cpu.{_function}", _features)
    )
for _arch, _rows in ((SM90, _SM90), (SM100, _SM100)):
    _backend = _arch.backend
    for _operation, (_function, _features) in (
        *_rows.items(),
        *_FURTHER[_backend],
    ):
        _on_gpu = Implementation(
            _operation,
            _backend,
            f"flashdsa.backends.{_backend}.{_function}",
            replace(_features, devices=("cuda",), capabilities=_arch.capabilities),
            runner="flashdsa.backends.gpu.runner:gpu",
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
