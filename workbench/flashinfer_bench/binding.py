"""Binding of the DSA top-k indexer: it forwards its arguments, and results go where they say."""

from __future__ import annotations

from torch import Tensor

import flashdsa


def compile_kernel() -> None:
    """Load the kernels before the first call; without it the first call does."""
    flashdsa.warm_up("dsa_topk_indexer", H=64, topk=2048)


def dsa_topk_indexer_launch(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
) -> None:
    """Write each row's best ids into `topk_indices`; shapes as of `flashdsa.dsa_topk_indexer`."""
    flashdsa.dsa_topk_indexer(
        q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices
    )
