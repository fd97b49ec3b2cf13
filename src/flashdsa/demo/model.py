"""A byte model around one layer of DeepSeek Sparse Attention, with DeepSeek's sizes.

The lightning indexer scores every earlier key in fp8 and selects `topk`; `sparse_mla` attends to
those alone. The layer is in absorbed form: the queries of all heads meet the same 512 latents,
which are keys and values at once, and 64 rotary columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashdsa import dsa_topk_prefill, quantize_index_k, quantize_index_q
from flashdsa.demo.attention import D_LATENT, Attention, attend

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
