"""FlashInfer-Bench: flashdsa's operations as solutions of its two DSA definitions.

A solution is JSON whose source imports flashdsa, which must be installed where it is judged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashdsa.ops.attention import sparse_mla_fwd
from flashdsa.ops.merge import lse_for_merge, lse_to_base2

INDEXER = "dsa_topk_indexer_fp8_h64_d128_topk2048_ps64"
ATTENTION = "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64"
ATTENTION_PS1 = "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps1"
HARDWARE = ("NVIDIA H100", "NVIDIA H200")
"""GPUs on which the kernels of the solutions have run."""

_INDEXER_SOURCE = '''"""DSA top-k indexer by flashdsa."""

from flashdsa import dsa_topk_indexer


def run(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices):
    dsa_topk_indexer(
        q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices
    )
'''
_ATTENTION_SOURCE = '''"""DSA sparse attention by flashdsa."""

from workbench.flashinfer_bench import attend


def run(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale, output, lse):
    attend(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale, output, lse)
'''
SOURCES = {
    INDEXER: _INDEXER_SOURCE,
    ATTENTION: _ATTENTION_SOURCE,
    ATTENTION_PS1: _ATTENTION_SOURCE,
}
"""Definition -> the text of main.py; its `run` takes the inputs and then the outputs, written."""


def solution(definition: str, author: str = "flashdsa") -> dict[str, Any]:
    """The solution of a definition, as JSON.

    Args:
        definition: a key of `SOURCES`.
    """
    return {
        "name": f"flashdsa_{definition}",
        "definition": definition,
        "author": author,
        "spec": {
            "language": "python",
            "target_hardware": list(HARDWARE),
            "entry_point": "main.py::run",
            "dependencies": ["flashdsa"],
            "destination_passing_style": True,
        },
        "sources": [{"path": "main.py", "content": SOURCES[definition]}],
        "description": "flashdsa, imported: it must be installed where this runs.",
    }


def attend(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    sparse_indices: Tensor,
    sm_scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Sparse attention of latent and RoPE columns apart, into the caller's buffers.

    flashdsa takes rows of both: the rows that are named are gathered first, not the whole cache.

    Args:
        q_nope: (T, H, 512) bf16. q_pe: (T, H, 64).
        ckv_cache: (pages, page_size, 512). kpe_cache: (pages, page_size, 64).
        sparse_indices: (T, topk) int32 slots; -1, and what lies outside, is invalid.
        sm_scale: factor of the logits.
        output: (T, H, 512), written. lse: (T, H) fp32, written, base 2, -inf for an empty row.
    """
    latent, rope = ckv_cache.flatten(0, 1), kpe_cache.flatten(0, 1)
    valid = (sparse_indices >= 0) & (sparse_indices < len(latent))
    used, places = torch.unique(sparse_indices[valid], return_inverse=True)
    ids = torch.full_like(sparse_indices, -1)
    ids.masked_scatter_(valid, places.to(ids.dtype))
    kv = torch.cat([latent[used.long()], rope[used.long()]], dim=-1)
    out, natural = sparse_mla_fwd(
        torch.cat([q_nope, q_pe], dim=-1), kv, ids, sm_scale=float(sm_scale)
    )
    output.copy_(out)
    lse.copy_(lse_to_base2(lse_for_merge(natural)))
