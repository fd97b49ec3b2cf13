"""DSA on many GPUs: queries stay where they are, keys are gathered, gradients are added.

See docs/guides/context-parallel.md.
"""

from flashdsa.distributed.decode import (
    decode_sparse_mla,
    decode_topk_indexer,
    local_seq_lens,
    local_slots,
)
from flashdsa.distributed.dtensors import ContextParallelSparseMLA
from flashdsa.distributed.indexer import context_parallel_topk_indexer
from flashdsa.distributed.latents import GatheredLatents, gather_latents
from flashdsa.distributed.layout import SequenceLayout
from flashdsa.distributed.sparse_mla import AttentionOptions, context_parallel_sparse_mla
from flashdsa.distributed.two_sources import context_parallel_compress_kv, context_parallel_window

__all__ = [
    "AttentionOptions",
    "ContextParallelSparseMLA",
    "GatheredLatents",
    "SequenceLayout",
    "context_parallel_compress_kv",
    "context_parallel_sparse_mla",
    "context_parallel_topk_indexer",
    "context_parallel_window",
    "decode_sparse_mla",
    "decode_topk_indexer",
    "gather_latents",
    "local_seq_lens",
    "local_slots",
]
