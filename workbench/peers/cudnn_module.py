"""cuDNN Frontend's kernels as its wrappers call them; `build_cudnn` has made the objects."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashdsa.jit.shared_object import load_shared_object

CLASSES = (128, 256, 512, 1024, 2048)
MANY_ROWS = 148


@lru_cache(maxsize=8)
def _library(part: str) -> Callable[[str], Any]:
    return lru_cache(load_shared_object(Path(__file__).with_name(f"libcudnn_{part}.so")))


def indexer_top_k_wrapper(
    scores: Tensor, lengths: Tensor, k: int, return_val: bool = False
) -> dict[str, Tensor]:
    """Positions (B, k) int32 of the k best fp32 scores of each row, then -1, as "indices"."""
    scores = scores if scores.is_contiguous() else scores.contiguous()
    rows, width = scores.shape
    name = "many" if rows > MANY_ROWS else "few"
    kernel = _library("top_k")(f"topk_{max(512, 1 << (width - 1).bit_length())}_{name}_{k}")
    step = rows if rows <= MANY_ROWS else min(rows, (2**31 - 1) // (2 * width) // 8 * 8)
    positions = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    memory = torch.empty(step, 2, width, dtype=torch.int32, device=scores.device)
    for begin in range(0, rows, step):
        part = slice(begin, min(rows, begin + step))
        count = part.stop - part.start
        kernel(scores[part], None, memory[:count], None, lengths[part], positions[part], None)
    return {"indices": positions}


def logits(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Causal scores (S, T) fp32 of bf16 q (S, H, 128) and k (T, 128), T a multiple of 8 with keys
    after the last one that is seen; unseen ones are not written."""
    return logits_behind(q, k, weights, len(k))


def logits_behind(q: Tensor, k: Tensor, weights: Tensor, keys: int) -> Tensor:
    """`logits` of the first `keys` of k; the last query sees them all."""
    queries, heads, _ = q.shape
    scores = torch.empty(1, queries, len(k), device=q.device)
    offsets = torch.full((1,), keys - queries, dtype=torch.int32, device=q.device)
    operands = q[None], k[None, :, None], weights[None], None, None, scores, None
    kernel = _library("logits")(f"logits_h{heads}_bf16")
    kernel(*operands, 1, queries, len(k), 1.0, None, None, offsets)
    return scores[0]


def packed_logits(q: Tensor, k: Tensor, weights: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Causal scores (S, longest) fp32 of packed sequences, the first key of its own sequence first.

    Args:
        ends: (B + 1,) int32, 0 and the end of each sequence. longest: a multiple of 8.
    """
    queries, heads, _ = q.shape
    scores = torch.empty(queries, longest, device=q.device)
    kernel = _library("logits")(f"logits_h{heads}_thd")
    operands = q, k[:, None], weights, None, None, scores, None
    kernel(*operands, 1, longest, longest, 1.0, ends, ends, None)
    return scores


def sparse_attention_backward_wrapper(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    topk_length: Tensor | None = None,
) -> dict[str, Tensor]:
    """dq, dkv in bf16 and d_sink; other topk than 2,048 are lengths for its kernel."""
    (queries, heads, columns), keys, topk = q.shape, len(kv), topk_idxs.shape[1]
    if topk_length is None and topk != 2048:
        topk_length = _full_lengths(queries, topk, str(q.device))
    rows, rows_kv = -(-queries // 64) * 64, -(-keys // 64) * 64
    delta, lse_log2 = torch.empty(2, 1, rows, heads, device=q.device)
    sums = torch.zeros(1, 1, rows_kv * columns, device=q.device)
    d_sink, dq, dkv = torch.zeros_like(attn_sink), torch.empty_like(q), torch.empty_like(kv)
    load = _library("backward")
    operands = out[None], dout[None], delta, lse[None], lse_log2, attn_sink, d_sink
    load(f"before_h{heads}")(*operands, None, None, None)
    lengths = None if topk_length is None else topk_length[None]
    kernel = load(f"backward_h{heads}_{'2048' if lengths is None else 'lengths'}")
    rest = dout[None], lse_log2, delta, dq[None], sums, topk_idxs[None], lengths, columns**-0.5
    kernel(q[None], kv[None, :, None], *rest)
    load("after")(sums, dkv[None, :, None], keys)
    return {"dq": dq, "dkv": dkv, "d_sink": d_sink}


@lru_cache(maxsize=4)
def _full_lengths(queries: int, topk: int, device: str) -> Tensor:
    return torch.full((queries,), topk, dtype=torch.int32, device=device)


def filled_up(slots: Tensor, value: float = -1) -> Tensor:
    """Slots (S, topk) with as many as the next of CLASSES has."""
    topk = slots.shape[1]
    return pad(slots, (0, min(one for one in CLASSES if one >= topk) - topk), value=value)


def score_recompute(
    name: str, q: Tensor, k: Tensor, by_head: Tensor, slots: Tensor, lengths: Tensor
) -> Tensor:
    """The target, or the softmax of the scores, (S, topk) fp32.

    Args:
        name: "target" or "scores". by_head: lse in fp32 or weights in bf16, (H, S).
        slots: as `filled_up` makes them. lengths: (S,) int32, slots in use.
    """
    found = torch.empty(slots.shape, device=q.device)
    kernel = _library("recompute")(f"{name}_h{q.shape[1]}_{slots.shape[1]}")
    kernel(q[None], k[None, :, None], slots[None], found[None], by_head[None], lengths[None], None)
    return found


def indexer_backward(
    q: Tensor, k: Tensor, weights: Tensor, slots: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk in fp32 and d_weights of 64 heads, weights in bf16, from any gradient of the scores;
    slots and grad as `filled_up` makes them."""
    dq, dk = torch.empty_like(q), torch.zeros(k.shape, device=k.device)
    d_weights = torch.empty_like(weights)
    operands = q, weights, k, dq, d_weights, dk, grad, slots
    kernel = _library("index_backward")(f"index_backward_{slots.shape[1]}")
    kernel(*(one[None] for one in operands), 1.0, None, None, len(q), len(k), None)
    return dq, dk, d_weights
