"""The tensors of a layer, and dense attention of the same tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa import rotate_tail, sparse_mla

D_LATENT = 512
NEAR = 128
"""Bytes that a query of DeepSeek-V4's form sees one by one, its own among them."""


class Near(NamedTuple):
    """The second source of DeepSeek-V4's form: the bytes before each query.

    All rows [T, 512] float32, keys and values; the positions of the S queries, int32; a logit
    [H] of each head that has no value; the tables of the rotation, which reached values as well.
    """

    rows: Tensor
    own: Tensor
    sink: Tensor
    rotation: tuple[Tensor, Tensor]

    def lists(self, rows: Tensor | slice) -> dict[str, Any]:
        end = self.own[rows] + 1
        seen = {"extra_kv": self.rows.bfloat16(), "extra_indices": (end - NEAR, end)}
        return seen | {"attn_sink": self.sink}

    def turn_back(self, attended: Tensor) -> Tensor:
        """attended [S, H, 512] without the rotation that values have as keys."""
        return rotate_tail(attended, self.own, self.rotation, inverse=True)


class Attention(NamedTuple):
    """The layer's tensors for a window: T keys, and S queries at its last positions.

    The indexer's score is ``sum_h weights[s, h] relu(q_index[s, h] . k_index[t])``. The keys are
    bytes, or entries if there are `near` bytes beside them.
    """

    q: Tensor  # [S, H, d_qk] float32
    kv: Tensor  # [T, d_qk] float32
    q_index: Tensor  # [S, 64, 128] float32
    k_index: Tensor  # [T, 128] float32
    weights: Tensor  # [S, 64] float32
    ends: Tensor  # [S] int32: query s sees the keys [0, ends[s])
    indices: Tensor  # [S, topk] int32: the keys that it attends to
    out: Tensor  # [S, H, 512] bf16
    scale: float
    near: Near | None = None

    def lists(self, rows: Tensor | slice = slice(None)) -> dict[str, Any]:
        """Arguments of `sparse_mla` for some of the queries, besides its operands."""
        return {"sm_scale": self.scale} | ({} if self.near is None else self.near.lists(rows))


def attend(tensors: tuple[Tensor, ...], scale: float, near: Near | None, backend: str) -> Attention:
    """The layer's tensors, `out` not among them, and what its queries attend to."""
    q, kv, *_, indices = tensors
    attention = Attention(*tensors, scale=scale, near=near, out=q)  # type: ignore[arg-type,misc]
    operands, lists = (q.bfloat16(), kv.bfloat16(), indices), attention.lists()
    out = sparse_mla(*operands, **lists, deterministic=True, backend=backend)
    return attention._replace(out=out if near is None else near.turn_back(out))


def dense_logits(attention: Attention, rows: Tensor) -> Tensor:
    """Logits [n, H, T] of the queries `rows` [n] over every key, -inf for keys in the future; then,
    if there are near bytes, over all bytes, -inf for those that are not near, and of the sink."""
    near, q = attention.near, attention.q[rows]
    keys = attention.kv if near is None else torch.cat([attention.kv, near.rows])
    logits: Tensor = torch.einsum("shd,td->sht", q, keys) * attention.scale
    key = torch.arange(len(keys), device=rows.device)
    seen = key < attention.ends[rows, None]
    if near is not None:
        back = near.own[rows, None] - (key - len(attention.kv))
        seen |= (key >= len(attention.kv)) & (back >= 0) & (back < NEAR)
    logits = logits.masked_fill(~seen[:, None], -math.inf)
    if near is None:
        return logits
    return torch.cat([logits, near.sink.expand(len(rows), -1)[..., None]], dim=-1)


def dense(attention: Attention) -> tuple[Tensor, Tensor]:
    """Weights [S, H, T] of every key, and what they attend to together with the near bytes, [S, H,
    512]."""
    near, kv = attention.near, attention.kv
    weights = dense_logits(attention, torch.arange(len(attention.q), device=kv.device)).softmax(-1)
    values = (kv if near is None else torch.cat([kv, near.rows]))[:, :D_LATENT]
    attended = torch.einsum("sht,tc->shc", weights[..., : len(values)], values)
    return weights[..., : len(kv)], attended if near is None else near.turn_back(attended)
