"""Blackwell kernels that others measured, as the model sees them: from their source.

flash-attn-4 4.0.0b36 (`flash_fwd_mla_sm100`, `flash_bwd_mla_sm100`, `..._dq_dqv_...`, `..._dk_...`)
and cudnn-frontend (`dsa_bwd_sm100`). No timelines: only what they compute and move is taken.
Their published times are of 512 dims, QK's and V's: 2 * 4096 * 2048 * 128 * 1024 FLOP in 1.865 ms
are 1,180 TFLOPS, and 2560 dims in 6.70 ms 820.
"""

from __future__ import annotations

from workbench.model.predict import Work
from workbench.model.shapes import PUBLISHED_DIM, QUERIES, TOPK, ss
from workbench.model.traffic import Footprint, Traffic

S_KV = 32_768
CUDNN_S_KV = 8192
"""Not said of cuDNN's."""
FORWARD_DIMS, BACKWARD_DIMS = 2 * PUBLISHED_DIM, 5 * PUBLISHED_DIM
ROW_BYTES, GRADIENT_ROW_BYTES = 2 * PUBLISHED_DIM, 4 * PUBLISHED_DIM
SOURCE = "their authors' papers and repositories"
"""Of the times, on machines and shapes that are not fully described."""


def fa4_forward() -> Work:
    """cta_group::2, 128 heads, 128 keys: a unit is one CTA of the pair.

    S over all keys of its own heads: rows by the pair's halves of keys. O over 256 of 512 dims:
    the same rows again, by dims. Hence keys are read twice, once as K or V, once as V^T.
    """
    keys, heads = 128, 64
    by_keys = keys // 2 * ROW_BYTES
    by_dims = keys * 512
    scores = keys * heads * 2
    return Work(
        "FlashAttention-4 sparse MLA forward, H=128",
        Traffic(
            useful_flop=2.0 * heads * keys * FORWARD_DIMS,
            matmuls=(
                ss("S", 32, heads, keys, shared_n=keys // 2),
                ss("O", 16, heads, 256, shared_n=128),
            ),
            shared_bytes=by_keys + by_dims + scores,
            tmem_bytes=2 * scores,
            read_bytes=by_keys + by_dims,
            exps=heads * keys,
        ),
        units=QUERIES * TOPK / keys * 2.0,
        footprint=Footprint(read=S_KV * ROW_BYTES),
    )


def fa4_backward() -> Work:
    """Several kernels one after the other: dP by pairs, then dQ and dKV; P is the forward's.

    A unit is 32 keys of 128 heads and half of the pair's work, all kernels added up. P and dS go
    through device memory in bf16; dKV leaves the registers by red.v4.
    """
    keys, heads = 32, 128
    half_rows = keys * ROW_BYTES / 2
    half_out = keys * GRADIENT_ROW_BYTES / 2
    scores = keys * heads * 2
    return Work(
        "FlashAttention-4 sparse MLA backward, H=128",
        Traffic(
            useful_flop=2.0 * heads * keys * BACKWARD_DIMS / 2,
            matmuls=(
                # dP over pairs of 64 keys, dQ likewise; dKV by dims, 128 keys at once
                ss("dP", 16, 64, 64, shared_n=32),
                ss("dQ", 2, 64, PUBLISHED_DIM, shared_n=PUBLISHED_DIM // 2),
                ss("dKV", 8, 128, 128),
            ),
            shared_bytes=2 * half_rows + scores + 2 * scores,
            tmem_bytes=2 * scores * 2 + half_out,
            read_bytes=2 * half_rows + scores + 2 * scores,
            reduce_bytes=half_out,
            red_bytes=half_out,
            exps=heads * keys / 2,
        ),
        units=QUERIES * TOPK / keys * 2.0,
        footprint=Footprint(reduced=S_KV * GRADIENT_ROW_BYTES, read=S_KV * ROW_BYTES),
    )


def cudnn_backward() -> Work:
    """cta_group::1, 64 heads and 64 keys a unit; dims on M for dQ and dKV.

    dKV goes from tensor memory through registers to device memory by red.v4 of eight warps.
    """
    keys = heads = 64
    rows, out, scores = keys * ROW_BYTES, keys * GRADIENT_ROW_BYTES, keys * heads * 2
    return Work(
        "cuDNN Frontend DSA backward, H=64",
        Traffic(
            useful_flop=2.0 * heads * keys * BACKWARD_DIMS,
            matmuls=(
                ss("P, dP", 32 + 32, heads, keys, half_rate=True),
                ss("dV, dK, dQ", 3 * 16, 128, keys),
            ),
            shared_bytes=rows + 2 * scores,
            tmem_bytes=4 * scores + out,
            read_bytes=rows,
            reduce_bytes=out,
            red_bytes=out,
            exps=heads * keys,
        ),
        units=QUERIES * TOPK / keys,
        footprint=Footprint(reduced=CUDNN_S_KV * GRADIENT_ROW_BYTES, read=CUDNN_S_KV * ROW_BYTES),
    )
