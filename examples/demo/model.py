"""A byte model around one layer of DeepSeek Sparse Attention, with DeepSeek's sizes.

The lightning indexer scores every earlier key in fp8 and selects `topk`; `sparse_mla` attends to
those alone. The layer is in absorbed form: the queries of all heads meet the same 512 latents,
which are keys and values at once, and 64 rotary columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashdsa import dsa_topk_prefill, quantize_index_k, quantize_index_q, rotate_tail, sparse_mla

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


D_MODEL, D_EMBED = 256, 64
D_KEY = D_MODEL + D_EMBED  # columns that keys are made of
D_ROPE = 64
D_HEAD = 128  # columns of a head's keys and values before absorption
INDEX_HEADS, D_INDEX = 64, 128
SM_SCALE = (D_HEAD + D_ROPE) ** -0.5  # of the heads before absorption


class Indexer(nn.Module):
    """The lightning indexer. Its inputs are detached: it learns from its own loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w_q = weight(D_MODEL, INDEX_HEADS, D_INDEX)
        self.w_k = weight(D_KEY, D_INDEX)
        self.w_weights = weight(D_MODEL, INDEX_HEADS)

    def forward(self, hidden: Tensor, key_input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [S, D_MODEL], key_input [T, D_KEY] -> q_index, k_index and weights."""
        hidden, key_input = hidden.detach(), key_input.detach()
        q = torch.einsum("sd,dhk->hsk", hidden, self.w_q)
        q = rotate(q, len(key_input) - len(hidden)).transpose(0, 1)
        k = rotate(normalise(key_input @ self.w_k), 0)
        return q, k, hidden @ self.w_weights * (INDEX_HEADS * D_INDEX) ** -0.5


@torch.no_grad()
def select(q: Tensor, k: Tensor, weights: Tensor, ends: Tensor, topk: int, backend: str) -> Tensor:
    """Each query's best keys by scores of fp8 products, [S, topk] int32."""
    q, weights = quantize_index_q(q.bfloat16(), weights)
    k, scale = quantize_index_k(k.bfloat16())
    indices = ends.new_empty(len(ends), topk)
    dsa_topk_prefill(q, k, weights, None, ends, indices, k_scale=scale, backend=backend)
    return indices


class SparseAttention(nn.Module):
    """Multi-head latent attention to the keys that the indexer selects."""

    def __init__(self, num_heads: int, topk: int, backend: str) -> None:
        """Create float32 weights; `backend` serves the operations."""
        super().__init__()
        self.topk, self.backend = topk, backend
        self.indexer = Indexer()
        self.w_kv, self.w_k_rope = weight(D_KEY, D_LATENT), weight(D_MODEL, D_ROPE)
        self.w_q_rope = weight(D_MODEL, num_heads, D_ROPE)
        self.w_uk = weight(D_LATENT, num_heads, D_HEAD)
        # Queries start as keys do, so equal contexts attract from the first step on.
        w_q = torch.einsum("dc,chn->dhn", self.w_kv[:D_MODEL], self.w_uk)
        self.w_q = nn.Parameter(w_q.detach())

    def forward(self, hidden: Tensor, key_input: Tensor, num_queries: int) -> Attention:
        """hidden [T, D_MODEL], key_input [T, D_KEY]; the last `num_queries` positions attend."""
        latent = normalise(key_input @ self.w_kv)  # [T, 512]
        kv = torch.cat([latent, rotate(hidden @ self.w_k_rope, 0)], dim=-1)
        first = len(hidden) - num_queries
        hidden = hidden[first:]
        q = torch.einsum("sd,dhn->shn", hidden, self.w_q)
        q_latent = torch.einsum("shn,chn->shc", q, self.w_uk)  # absorbed: meets latents
        q_rope = rotate(torch.einsum("sd,dhr->hsr", hidden, self.w_q_rope), first)
        q = torch.cat([q_latent, q_rope.transpose(0, 1)], dim=-1)

        q_index, k_index, weights = self.indexer(hidden, key_input)
        ends = torch.arange(first + 1, len(kv) + 1, device=kv.device, dtype=torch.int32)
        indices = select(q_index, k_index, weights, ends, self.topk, self.backend)
        tensors = q, kv, q_index, k_index, weights, ends, indices
        return attend(tensors, SM_SCALE, None, self.backend)


class ByteModel(nn.Module):
    """Mixes neighbouring bytes, attends once, and predicts the next byte."""

    def __init__(
        self,
        num_heads: int,
        num_queries: int,
        topk: int,
        backend: str,
        layer: Callable[..., nn.Module] = SparseAttention,
    ) -> None:
        """Create float32 weights; the last `num_queries` positions of a window attend."""
        super().__init__()
        self.num_queries = num_queries
        self.embed = nn.Parameter(torch.randn(256, D_EMBED))
        self.mix = weight(D_MODEL, D_MODEL)
        self.attention = layer(num_heads, topk, backend)
        self.w_uv = weight(D_LATENT, num_heads, D_HEAD)
        self.w_o = weight(num_heads * D_HEAD, D_MODEL)
        self.mlp_in, self.mlp_out = weight(D_MODEL, 1024), weight(1024, D_MODEL, gain=0.5)
        self.head = weight(D_MODEL, 256, gain=0.5)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Attention]:
        """tokens [T] int64 -> logits [S, 256], hidden states [S, D_MODEL] and the attention.

        A key is made of the bytes *before* its position and of its own byte: a query that looks for
        its own recent bytes finds what followed them earlier.
        """
        # Not `self.embed[tokens]`, whose backward adds in an order that varies from run to run.
        embedded = functional.embedding(tokens, self.embed)
        local = torch.cat([shift(embedded, back) for back in range(D_MODEL // D_EMBED)], dim=-1)
        hidden = normalise(local @ self.mix)
        key_input = torch.cat([shift(hidden, 1), embedded], dim=-1)
        attention = self.attention(hidden, key_input, self.num_queries)
        hidden = hidden[-self.num_queries :]
        return self.read_out(hidden, attention.out), hidden, attention

    def read_out(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [S, D_MODEL], attended latents [S, H, 512] -> logits [S, 256]."""
        values = torch.einsum("shc,chn->shn", attended.float(), self.w_uv)
        stream = hidden + values.flatten(1) @ self.w_o
        mlp: Tensor = functional.gelu(normalise(stream) @ self.mlp_in) @ self.mlp_out
        return normalise(stream + mlp) @ self.head


def weight(d_in: int, *d_out: int, gain: float = 1.0) -> nn.Parameter:
    """[d_in, *d_out] float32 of a scale that turns unit inputs into outputs of size `gain`."""
    return nn.Parameter(torch.randn(d_in, *d_out) * gain / math.sqrt(d_in))


def normalise(x: Tensor) -> Tensor:
    """Divide the last axis by its root mean square."""
    return functional.rms_norm(x, (x.shape[-1],))


def shift(x: Tensor, back: int) -> Tensor:
    """x [T, D] -> the row `back` positions earlier, zeros before the start."""
    return functional.pad(x, (0, 0, back, 0))[: len(x)]


def rotate(x: Tensor, first: int) -> Tensor:
    """Rotary embedding of the first 64 columns of x [..., n, D]; row 0 is at position `first`."""
    frequency = 10_000.0 ** (-torch.arange(0, D_ROPE, 2, device=x.device) / D_ROPE)
    angle = torch.arange(first, first + x.shape[-2], device=x.device)[:, None] * frequency
    even, odd = x[..., 0:D_ROPE:2], x[..., 1:D_ROPE:2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.cat([torch.stack(turned, dim=-1).flatten(-2), x[..., D_ROPE:]], dim=-1)
