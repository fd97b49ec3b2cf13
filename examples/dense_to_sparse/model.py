"""A byte model with DeepSeek-V3.2's layers: multi-head latent attention, dense or sparse.

Parameters have the names that transformers' `DeepseekV32ForCausalLM` gives them, which
`in_transformers` makes of a model. S is the number of tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import flashdsa

LATENT, ROPE, NOPE, VALUE, INDEX = 512, 64, 128, 128, 128  # columns
SM_SCALE = (NOPE + ROPE) ** -0.5


@dataclass(frozen=True)
class Sizes:
    """The default has 107 M parameters."""

    hidden: int = 768
    layers: int = 8
    heads: int = 16
    q_rank: int = 512
    intermediate: int = 2560
    index_heads: int = 16
    topk: int = 2048

    def config(self, context: int) -> dict[str, Any]:
        """The arguments of transformers' `DeepseekV32Config`."""
        return {
            "vocab_size": 256, "hidden_size": self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "index_head_dim": INDEX,
            "index_n_heads": self.index_heads, "index_topk": self.topk,
            "intermediate_size": self.intermediate, "first_k_dense_replace": self.layers,
            "max_position_embeddings": context, "bos_token_id": None, "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        }  # fmt: skip


class Attended(NamedTuple):
    """A layer's tensors, which the indexer's losses and the looks at the model read."""

    q: Tensor  # [S, H, 192], not absorbed
    kv: Tensor  # [S, 576]
    indexed: tuple[Tensor, Tensor, Tensor]  # q [S, H_I, 128], k [S, 128], weights [S, H_I] fp32
    indices: Tensor | None  # [S, topk] int32: the selected keys; None: dense


def rotate(x: Tensor, positions: Tensor, *, neighbours: bool) -> Tensor:
    """Rotate the columns of x [S, ..., 64]: pairs of neighbours, or of halves (the indexer's)."""
    frequency = 10_000.0 ** (-torch.arange(0, ROPE, 2, device=x.device).float() / ROPE)
    angle = (positions[:, None].float() * frequency).view(-1, *[1] * (x.ndim - 2), ROPE // 2)
    cos, sin = angle.cos(), angle.sin()
    one, other = (x[..., 0::2], x[..., 1::2]) if neighbours else x.float().chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(x.dtype)


def select(index: tuple[Tensor, Tensor, Tensor], ends: Tensor, topk: int) -> Tensor:
    """Each query's best keys before `ends` by scores of fp8 products, [S, topk] int32."""
    q, k, weights = index
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        q_fp8, folded = flashdsa.quantize_index_q(q.bfloat16(), weights.float())
        k_fp8, k_scale = flashdsa.quantize_index_k(k.bfloat16())
        indices = torch.empty(len(q), topk, dtype=torch.int32, device=q.device)
        flashdsa.dsa_topk_prefill(q_fp8, k_fp8, folded, None, ends, indices, k_scale=k_scale)
    return indices


class Indexer(nn.Module):
    """The lightning indexer. Its inputs are detached: it learns from its own loss alone."""

    def __init__(self, sizes: Sizes) -> None:
        """Create float32 weights."""
        super().__init__()
        self.heads = sizes.index_heads
        self.wq_b = nn.Linear(sizes.q_rank, self.heads * INDEX, bias=False)
        self.wk = nn.Linear(sizes.hidden, INDEX, bias=False)
        self.k_norm = nn.LayerNorm(INDEX, eps=1e-6)
        self.weights_proj = nn.Linear(sizes.hidden, self.heads, bias=False)

    def forward(self, x: Tensor, q_resid: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and the heads' weights, with their scales, of tokens at positions `at`."""
        x, q_resid = x.detach(), q_resid.detach()
        q = self.wq_b(q_resid).unflatten(-1, (self.heads, INDEX))
        k = self.k_norm(self.wk(x))
        q, k = (torch.cat([rotate(t[..., :ROPE], at, neighbours=False), t[..., ROPE:]], -1)
                for t in (q, k))  # fmt: skip
        weights = self.weights_proj(x).float() * (self.heads * INDEX) ** -0.5
        return q, k, weights


class Attention(nn.Module):
    """Multi-head latent attention in absorbed form: 512 latents and 64 rotated columns a token."""

    def __init__(self, sizes: Sizes) -> None:
        """Create float32 weights."""
        super().__init__()
        self.heads, self.topk = sizes.heads, sizes.topk
        self.q_a_proj = nn.Linear(sizes.hidden, sizes.q_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(sizes.q_rank, eps=1e-6)
        self.q_b_proj = nn.Linear(sizes.q_rank, self.heads * (NOPE + ROPE), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(sizes.hidden, LATENT + ROPE, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(LATENT, eps=1e-6)
        self.kv_b_proj = nn.Linear(LATENT, self.heads * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(self.heads * VALUE, sizes.hidden, bias=False)
        self.indexer = Indexer(sizes)

    def project(self, x: Tensor, at: Tensor) -> Attended:
        """The tokens' queries, rows of kv and index, before attention."""
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).unflatten(-1, (self.heads, NOPE + ROPE))
        q = torch.cat([q[..., :NOPE], rotate(q[..., NOPE:], at, neighbours=True)], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], dim=-1)
        latent, k_rope = self.kv_a_layernorm(latent), rotate(k_rope, at, neighbours=True)
        kv = torch.cat([latent.to(q.dtype), k_rope], dim=-1)
        return Attended(q, kv, self.indexer(x, q_resid, at), None)

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [S, H, 576] that meet latents, from those that meet heads' keys."""
        up = self.kv_b_proj.weight.view(self.heads, NOPE + VALUE, LATENT)[:, :NOPE]
        return torch.cat([torch.einsum("shn,hnc->shc", q[..., :NOPE], up.to(q.dtype)),
                          q[..., NOPE:]], dim=-1)  # fmt: skip

    def read_out(self, latents: Tensor) -> Tensor:
        """The layer's output [S, hidden] from attended latents [S, H, 512]."""
        up = self.kv_b_proj.weight.view(self.heads, NOPE + VALUE, LATENT)[:, NOPE:]
        values = torch.einsum("shc,hvc->shv", latents, up.to(latents.dtype)).flatten(1)
        out: Tensor = self.o_proj(values.to(self.o_proj.weight.dtype))
        return out

    def forward(self, x: Tensor, at: Tensor, *, sparse: bool) -> tuple[Tensor, Attended]:
        """x [S, hidden] -> the output and what it was computed from."""
        seen = self.project(x, at)
        if not sparse:
            return self.o_proj(self.attend_densely(seen).flatten(1)), seen
        indices = select(seen.indexed, (at + 1).int(), self.topk)
        q, kv = (t.bfloat16() if t.is_cuda else t for t in (self.absorb(seen.q), seen.kv))
        out = self.read_out(flashdsa.sparse_mla(q, kv, indices, sm_scale=SM_SCALE))
        return out, seen._replace(indices=indices)

    def expand(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads [n, H, 192] from rows; PyTorch's fast kernels want values as
        wide as keys, so they are padded."""
        expanded = self.kv_b_proj(kv[:, :LATENT]).unflatten(-1, (self.heads, NOPE + VALUE))
        k_rope = kv[:, None, LATENT:].expand(-1, self.heads, -1).to(expanded.dtype)
        k = torch.cat([expanded[..., :NOPE], k_rope], dim=-1)
        return k, functional.pad(expanded[..., NOPE:], (0, ROPE))

    def attend_densely(self, seen: Attended) -> Tensor:
        """PyTorch's causal attention over keys and values of all heads, [S, H, 128]."""
        q, k, v = (t.transpose(0, 1)[None] for t in (seen.q, *self.expand(seen.kv)))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SM_SCALE)
        return out[0].transpose(0, 1)[..., :VALUE]


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        """Create float32 weights."""
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[S, hidden] -> [S, hidden]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention, then the MLP, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        """Create float32 weights."""
        super().__init__()
        self.self_attn, self.mlp = Attention(sizes), Mlp(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, eps=1e-6)

    def forward(self, x: Tensor, at: Tensor, *, sparse: bool) -> tuple[Tensor, Attended]:
        """x [S, hidden] -> the stream, and the attention's tensors."""
        attended, seen = self.self_attn(self.input_layernorm(x), at, sparse=sparse)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), seen


class ByteModel(nn.Module):
    """Layers over bytes; predicts the next byte."""

    def __init__(self, sizes: Sizes) -> None:
        """Create float32 weights, as transformers does: normal, of size 0.02."""
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(256, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.lm_head = nn.Linear(sizes.hidden, 256, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, *, sparse: bool) -> tuple[Tensor, list[Attended]]:
        """tokens [S] int64 -> logits [S, 256], and each layer's tensors."""
        x, at = self.embed_tokens(tokens), torch.arange(len(tokens), device=tokens.device)
        attended = []
        for layer in self.blocks:
            x, seen = layer(x, at, sparse=sparse)
            attended.append(seen)
        return self.lm_head(self.norm(x)), attended

    @property
    def blocks(self) -> list[Layer]:
        """The layers."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


def in_transformers(model: ByteModel, sizes: Sizes, context: int) -> Any:
    """The same weights as transformers' DeepSeek-V3.2, whose attention and indexer flashdsa takes
    over."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    from flashdsa.integrations.transformers import enable

    with torch.device(model.lm_head.weight.device):
        theirs = DeepseekV32ForCausalLM(DeepseekV32Config(**sizes.config(context)))
    names = {n: n if n.startswith("lm_head") else f"model.{n}" for n in model.state_dict()}
    theirs.load_state_dict({names[n]: x for n, x in model.state_dict().items()})
    dtype = torch.bfloat16 if model.lm_head.weight.is_cuda else torch.float32
    return enable(theirs.to(dtype).eval(), indexer="fp8")
