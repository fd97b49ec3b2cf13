"""flashdsa: DeepSeek Sparse Attention. The public names; torch is imported at their first use."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashdsa.api import (
        attention_target,
        bind,
        causal_ranges,
        dsa_topk_indexer,
        dsa_topk_prefill,
        fake_quantize_index,
        indexer_bwd,
        indexer_kl,
        indexer_kl_bwd,
        indexer_kl_loss,
        indexer_kl_loss_dense,
        indexer_logits,
        indexer_scores,
        lse_for_merge,
        lse_from_base2,
        lse_to_base2,
        merge_attention,
        mla_bwd,
        prefill_logits,
        quantize_index_k,
        quantize_index_q,
        quantize_kv,
        read_index_k_cache,
        read_kv_cache,
        sparse_mla,
        sparse_mla_fwd,
        topk_indices,
        warm_up,
        write_index_k_cache,
        write_kv_cache,
    )

__all__ = [
    "attention_target",
    "bind",
    "causal_ranges",
    "dsa_topk_indexer",
    "dsa_topk_prefill",
    "fake_quantize_index",
    "indexer_bwd",
    "indexer_kl",
    "indexer_kl_bwd",
    "indexer_kl_loss",
    "indexer_kl_loss_dense",
    "indexer_logits",
    "indexer_scores",
    "lse_for_merge",
    "lse_from_base2",
    "lse_to_base2",
    "merge_attention",
    "mla_bwd",
    "prefill_logits",
    "quantize_index_k",
    "quantize_index_q",
    "quantize_kv",
    "read_index_k_cache",
    "read_kv_cache",
    "sparse_mla",
    "sparse_mla_fwd",
    "topk_indices",
    "warm_up",
    "write_index_k_cache",
    "write_kv_cache",
]

try:
    __version__ = version("flashdsa")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name in __all__:
        function = globals()[name] = getattr(import_module("flashdsa.api"), name)
        return function
    raise AttributeError(f"module 'flashdsa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
