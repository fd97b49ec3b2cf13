"""The implementations that this version has, declared as data and put into the registry."""

from __future__ import annotations

from flashdsa.backends.features import Features, OneOf
from flashdsa.backends.registry import Implementation, Registry
from flashdsa.problem import INDEX_HEAD_DIM, Operation

_CPU_ATTENTION = Features(
    devices=("cpu",),
    dtypes=("bfloat16", "float32", "float64"),
    attn_sink=True,
    topk_length=True,
    deterministic=True,
)
_CPU_INDEXER = Features(
    devices=("cpu",),
    dtypes=("float8_e4m3fn",),
    d_qk=OneOf((INDEX_HEAD_DIM,)),
    sorted=True,
    deterministic=True,
)
_CPU_SCORES = Features(devices=("cpu",), dtypes=("float32",), sorted=True, deterministic=True)
_CPU_QUANTIZE = Features(
    devices=("cpu",),
    dtypes=("bfloat16", "float32"),
    d_qk=OneOf((INDEX_HEAD_DIM,)),
    deterministic=True,
)
_CPU_CACHE = Features(devices=("cpu",), dtypes=("uint8", "int8"), deterministic=True)

_CPU = {
    Operation.SPARSE_MLA_FWD: ("sparse_mla:forward", _CPU_ATTENTION),
    Operation.MLA_BWD: ("sparse_mla:backward", _CPU_ATTENTION),
    Operation.DSA_TOPK_INDEXER: ("indexer:topk_indexer", _CPU_INDEXER),
    Operation.INDEXER_LOGITS: ("indexer:logits", _CPU_INDEXER),
    Operation.TOPK_INDICES: ("topk:topk_positions", _CPU_SCORES),
    Operation.QUANTIZE_INDEX_K: ("quantize:quantize_index_k", _CPU_QUANTIZE),
    Operation.QUANTIZE_INDEX_Q: ("quantize:quantize_index_q", _CPU_QUANTIZE),
    Operation.WRITE_INDEX_K_CACHE: ("index_k_cache:write", _CPU_QUANTIZE),
    Operation.READ_INDEX_K_CACHE: ("index_k_cache:read", _CPU_CACHE),
}

registry = Registry()
"""The process's table, read by the dispatcher and by `flashdsa info`."""

for _operation, (_entry, _features) in _CPU.items():
    registry.register(
        Implementation(_operation, "cpu", f"flashdsa.backends.cpu.{_entry}", _features)
    )
