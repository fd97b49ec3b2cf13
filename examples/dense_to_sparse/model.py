"""transformers' DeepSeek-V3.2 with attention that learns: dense or sparse, with the indexer's loss.

Parameters keep their names, so checkpoints are those of `DeepseekV32ForCausalLM`. S is the number
of tokens of the one sequence that a call takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

import flashdsa

LATENT, ROPE, NOPE, VALUE, INDEX = 512, 64, 128, 128, 128  # columns that flashdsa's kernels serve


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

    def config(self, context: int, **others: Any) -> DeepseekV32Config:
        """A model over bytes, without experts unless `others` ask for them."""
        fields = {
            "vocab_size": 256, "hidden_size": self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "index_head_dim": INDEX,
            "index_n_heads": self.index_heads, "index_topk": self.topk,
            "intermediate_size": self.intermediate, "first_k_dense_replace": self.layers,
            "max_position_embeddings": context, "bos_token_id": None, "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            # vLLM and SGLang look for these:
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "architectures": ["DeepseekV32ForCausalLM"],
        }  # fmt: skip
        return DeepseekV32Config(**fields | others)


class Attended(NamedTuple):
    """A layer's tensors, which the looks at the model read, and the indexer's loss."""

    q: Tensor  # [S, H, 192], not absorbed
    kv: Tensor  # [S, 576]
    indexed: tuple[Tensor, Tensor, Tensor]  # q [S, H_I, 128], k [S, 128], weights [S, H_I] fp32
    indices: Tensor | None = None  # [S, topk] int32: the selected keys; None: dense
    divergence: Tensor | None = None  # of the attention from the indexer; None: not asked


Rotary = tuple[Tensor, Tensor]
"""Cosines and sines [S, 64]."""


def select(index: tuple[Tensor, Tensor, Tensor], ends: Tensor, topk: int) -> Tensor:
    """Each query's best keys before `ends` by scores of fp8 products, [S, topk] int32."""
    q, k, weights = index
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        q_fp8, folded = flashdsa.quantize_index_q(q.bfloat16(), weights.float())
        k_fp8, k_scale = flashdsa.quantize_index_k(k.bfloat16())
        indices = torch.empty(len(q), topk, dtype=torch.int32, device=q.device)
        flashdsa.dsa_topk_prefill(q_fp8, k_fp8, folded, None, ends, indices, k_scale=k_scale)
    return indices


class Attention(DeepseekV32Attention):  # type: ignore[misc]
    """Multi-head latent attention in absorbed form: 512 latents and 64 rotated columns a token."""

    def project(self, x: Tensor, rotary: Rotary) -> Attended:
        """Queries, rows of kv and index of the tokens x [S, hidden], before attention."""
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).unflatten(-1, (self.num_heads, NOPE + ROPE))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], dim=-1)
        # Pairs of neighbours here, of halves in the index.
        rotated = apply_rotary_pos_emb_interleave(q[..., NOPE:], k_rope[:, None], *rotary)
        q_rope, k_rope = (one.to(q.dtype) for one in rotated)
        q = torch.cat([q[..., :NOPE], q_rope], dim=-1)
        kv = torch.cat([self.kv_a_layernorm(latent).to(q.dtype), k_rope[:, 0]], dim=-1)
        return Attended(q, kv, self._index(x.detach(), q_resid.detach(), rotary))

    def _index(self, x: Tensor, q_resid: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs are detached: the indexer learns from its own loss alone."""
        own = self.indexer
        q = own.wq_b(q_resid).unflatten(-1, (own.n_heads, INDEX))
        k = own.k_norm(own.wk(x))[:, None]
        rotated = apply_rotary_pos_emb(q[..., :ROPE], k[..., :ROPE], *rotary)
        q, k = (
            torch.cat([a.to(b.dtype), b[..., ROPE:]], dim=-1)
            for a, b in zip(rotated, (q, k), strict=True)
        )
        weights = own.weights_proj(x).float() * (own.n_heads * INDEX) ** -0.5
        return q, k[:, 0], weights

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [S, H, 576] that meet latents, from those that meet heads' keys."""
        up = self.kv_b_proj.weight.view(self.num_heads, NOPE + VALUE, LATENT)[:, :NOPE]
        return torch.cat([torch.einsum("shn,hnc->shc", q[..., :NOPE], up.to(q.dtype)),
                          q[..., NOPE:]], dim=-1)  # fmt: skip

    def values(self, latents: Tensor) -> Tensor:
        """All heads' values [S, H * 128] from attended latents [S, H, 512]."""
        up = self.kv_b_proj.weight.view(self.num_heads, NOPE + VALUE, LATENT)[:, NOPE:]
        values = torch.einsum("shc,hvc->shv", latents, up.to(latents.dtype)).flatten(1)
        return values.to(self.o_proj.weight.dtype)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotary, sparse: bool = False,
        teach: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend from and to hidden_states [1, S, hidden]; leave the tensors in `seen`.

        Returns the output and the divergence, if `teach`, the queries that teach, is given. Both
        are outputs, as FSDP gathers the weights again for the gradients of outputs.
        """
        cos, sin = position_embeddings
        seen = self.project(hidden_states[0], (cos[0], sin[0]))
        if sparse:
            ends = torch.arange(1, len(seen.kv) + 1, dtype=torch.int32, device=seen.kv.device)
            indices = select(seen.indexed, ends, self.indexer.index_topk)
            seen = seen._replace(indices=indices)
            q, kv = (t.bfloat16() if t.is_cuda else t for t in (self.absorb(seen.q), seen.kv))
            values = self.values(flashdsa.sparse_mla(q, kv, indices, sm_scale=self.scaling))
        else:
            values = self.attend_densely(seen).flatten(1)
        if teach is not None:
            seen = seen._replace(divergence=self._divergence(seen, teach))
        self.__dict__["seen"] = seen
        return self.o_proj(values[None]), seen.divergence

    def _divergence(self, seen: Attended, rows: Tensor) -> Tensor:
        """KL of the attention to the softmax of the indexer's scores: dense over every key that
        `rows` see, sparse over the selected keys of all queries."""
        with torch.no_grad():
            some = seen if seen.indices is not None else seen._replace(q=seen.q[rows])
            q, kv = (x.bfloat16() if x.is_cuda else x for x in (self.absorb(some.q), some.kv))
        q_index, k_index, weights = seen.indexed
        q_index, k_index = q_index.to(q.dtype), k_index.to(q.dtype)
        if seen.indices is not None:
            _, lse = flashdsa.sparse_mla_fwd(q, kv, seen.indices, sm_scale=self.scaling)
            kl = flashdsa.indexer_kl_loss(
                q_index, k_index, weights, seen.indices, q=q, kv=kv, lse=lse,
                sm_scale=self.scaling,
            )  # fmt: skip
            return kl.mean()
        ends = (rows + 1).int()
        every = torch.zeros_like(ends), ends
        _, lse = flashdsa.sparse_mla_fwd(q, kv, every, sm_scale=self.scaling)
        return flashdsa.indexer_kl_loss_dense(
            q_index[rows], k_index, weights[rows], q, kv, lse, ends, sm_scale=self.scaling
        )

    def expand(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads [n, H, 192] from rows; PyTorch's fast kernels want values as
        wide as keys, so they are padded."""
        expanded = self.kv_b_proj(kv[:, :LATENT]).unflatten(-1, (self.num_heads, NOPE + VALUE))
        k_rope = kv[:, None, LATENT:].expand(-1, self.num_heads, -1).to(expanded.dtype)
        k = torch.cat([expanded[..., :NOPE], k_rope], dim=-1)
        return k, functional.pad(expanded[..., NOPE:], (0, ROPE))

    def attend_densely(self, seen: Attended) -> Tensor:
        """PyTorch's causal attention over keys and values of all heads, [S, H, 128]."""
        q, k, v = (t.transpose(0, 1)[None] for t in (seen.q, *self.expand(seen.kv)))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        return out[0].transpose(0, 1)[..., :VALUE]


def learner(config: DeepseekV32Config) -> Any:
    """`DeepseekV32ForCausalLM` whose layers have the `Attention` above.

    Raises:
        ValueError: columns for which flashdsa has no kernels.
    """
    names = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"
    for name, expected in zip(names, (LATENT, ROPE, NOPE, VALUE, INDEX), strict=True):
        if getattr(config, name) != expected:
            raise ValueError(f"{name}: expected {expected}; got {getattr(config, name)}")
    model: nn.Module = DeepseekV32ForCausalLM(config)
    for number, layer in enumerate(blocks(model)):
        layer.self_attn = Attention(config, number)
    return model


def blocks(model: Any) -> list[Any]:
    """The layers."""
    return list(model.model.layers)


def run(
    model: Any, tokens: Tensor, *, sparse: bool, teach: Tensor | None = None
) -> tuple[Tensor, list[Attended]]:
    """tokens [S] int64 -> logits [S, vocabulary], and each layer's tensors.

    Args:
        model: of `learner`. sparse: attend to selected keys.
        teach: queries [n] whose dense attention teaches the indexers; of a sparse call any, as all
            teach.
    """
    no_mask = dict.fromkeys(model.config.layer_types)
    logits = model(
        tokens[None], attention_mask=no_mask, use_cache=False, sparse=sparse, teach=teach
    ).logits[0]
    return logits, [layer.self_attn.__dict__.pop("seen") for layer in blocks(model)]
