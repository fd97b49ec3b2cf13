"""The byte-level language model: local mixing, one MLA layer in absorbed form, one MLP.

The attention itself is an argument: the same weights run with the sparse op or densely.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_BYTES = 256
D_MODEL = 256
D_EMBED = 64
D_LATENT = 512  # = d_v of the op
D_ROPE = 64
D_QK = D_LATENT + D_ROPE
D_NOPE = 128  # per-head width of queries, keys and values before absorption
LOCAL_BYTES = D_MODEL // D_EMBED  # the mixer sees a byte and the three before it
MLP_WIDTH = 4 * D_MODEL
ROPE_BASE = 10_000.0
# The scale of the un-absorbed MLA, whose heads are 128 + 64 wide; not 576.
SM_SCALE = (D_NOPE + D_ROPE) ** -0.5
RESIDUAL_GAIN = 0.5  # the MLP starts as a small correction


class Projections(NamedTuple):
    """What one batch of windows brings to the attention; S queries, T keys per window."""

    hidden: Tensor  # [batch, S, D_MODEL]   residual stream of the queries
    q: Tensor  # [batch, S, H, D_QK]
    kv: Tensor  # [batch, T, D_QK]
    key_input: Tensor  # [batch, T, D_MODEL + D_EMBED]   what keys are made of


class ByteModel(nn.Module):
    """Byte model whose attention layer has the sizes of DeepSeek's MLA (512 latent + 64 RoPE)."""

    def __init__(self, num_heads: int) -> None:
        """Create float32 master weights for `num_heads` query heads."""
        super().__init__()
        self.embed = nn.Parameter(torch.randn(NUM_BYTES, D_EMBED))
        self.mix = random_weight(D_MODEL, D_MODEL)
        self.w_kv = random_weight(D_MODEL + D_EMBED, D_LATENT)
        self.w_k_rope = random_weight(D_MODEL, D_ROPE)
        self.w_q_nope = random_weight(D_MODEL, num_heads, D_NOPE)
        self.w_q_rope = random_weight(D_MODEL, num_heads, D_ROPE)
        self.w_uk = random_weight(D_LATENT, num_heads, D_NOPE)
        self.w_uv = random_weight(D_LATENT, num_heads, D_NOPE)
        self.w_o = random_weight(num_heads * D_NOPE, D_MODEL)
        self.mlp_in = random_weight(D_MODEL, MLP_WIDTH)
        self.mlp_out = random_weight(MLP_WIDTH, D_MODEL, gain=RESIDUAL_GAIN)
        self.head = random_weight(D_MODEL, NUM_BYTES, gain=RESIDUAL_GAIN)
        with torch.no_grad():
            # Queries start as keys do (see `project`): equal contexts attract from step 0.
            key_of_context = self.w_kv[:D_MODEL]  # [D_MODEL, D_LATENT]
            self.w_q_nope.copy_(torch.einsum("dc,chn->dhn", key_of_context, self.w_uk))

    def project(self, tokens: Tensor, num_queries: int) -> Projections:
        """Make queries of the last `num_queries` positions and keys of all.

        tokens [batch, T] int64. A key is made of the bytes *before* its position and of its own
        byte, so a query that looks for its own recent bytes finds what followed them earlier.
        """
        # Not `self.embed[tokens]`, whose backward adds in an order that varies from run to run.
        embedded = functional.embedding(tokens, self.embed)  # [batch, T, D_EMBED]
        local = torch.cat([shift(embedded, back) for back in range(LOCAL_BYTES)], dim=-1)
        hidden = normalise(local @ self.mix)  # [batch, T, D_MODEL]
        key_input = torch.cat([shift(hidden, 1), embedded], dim=-1)
        position = torch.arange(tokens.shape[1], device=tokens.device)
        kv = self.keys(hidden, key_input, position)
        hidden = hidden[:, -num_queries:]
        return Projections(hidden, self.queries(hidden, position[-num_queries:]), kv, key_input)

    def keys(self, hidden: Tensor, key_input: Tensor, position: Tensor) -> Tensor:
        """kv [batch, T, D_QK] of keys at position [T]; hidden [batch, T, D_MODEL]."""
        latent = normalise(key_input @ self.w_kv)  # [batch, T, D_LATENT]
        return torch.cat([latent, rotate(hidden @ self.w_k_rope, position)], dim=-1)

    def queries(self, hidden: Tensor, position: Tensor) -> Tensor:
        """q [batch, S, H, D_QK] of queries at position [S]; hidden [batch, S, D_MODEL]."""
        q_nope = torch.einsum("bsd,dhn->bshn", hidden, self.w_q_nope)
        q_latent = torch.einsum("bshn,chn->bshc", q_nope, self.w_uk)  # absorbed: q meets latents
        q_rope = torch.einsum("bsd,dhr->bhsr", hidden, self.w_q_rope)
        q_rope = rotate(q_rope, position).transpose(1, 2)  # [batch, S, H, D_ROPE]
        return torch.cat([q_latent, q_rope], dim=-1)

    def read_out(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [batch, S, D_MODEL], attended latents [batch, S, H, D_LATENT] -> logits.

        Logits are [batch, S, 256], float32.
        """
        values = torch.einsum("bshc,chn->bshn", attended.float(), self.w_uv)
        stream = hidden + values.flatten(2) @ self.w_o
        stream = stream + functional.gelu(normalise(stream) @ self.mlp_in) @ self.mlp_out
        return normalise(stream) @ self.head


def random_weight(d_in: int, *d_out: int, gain: float = 1.0) -> nn.Parameter:
    """[d_in, *d_out] float32, so scaled that unit inputs give outputs of size `gain`."""
    return nn.Parameter(torch.randn(d_in, *d_out) * gain / math.sqrt(d_in))


def normalise(x: Tensor) -> Tensor:
    """Divide the last axis by its root mean square."""
    return functional.rms_norm(x, (x.shape[-1],))


def shift(x: Tensor, back: int) -> Tensor:
    """x [batch, T, D] -> the row `back` positions earlier, zeros before the start."""
    return functional.pad(x, (0, 0, back, 0))[:, : x.shape[1]]


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding of x [..., T, D] (pairs of neighbours) at position [T]."""
    d = x.shape[-1]
    frequency = ROPE_BASE ** (-torch.arange(0, d, 2, device=x.device) / d)
    angle = position[:, None] * frequency  # [T, D / 2]
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
