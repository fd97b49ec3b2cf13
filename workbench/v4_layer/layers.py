"""Layers to time: transformers' DeepSeek-V4 attention by flashdsa and in eager torch, and a judge.

Sizes are those of transformers' default `DeepseekV4Config`, which are V4-Flash's: hidden size 4096,
64 heads of 512 columns, queries by rank 1024, output by 8 groups of rank 1024, a window of 128,
entries of 4 (CSA) and 128 (HCA) tokens, 64 index heads of 128 columns, 512 entries chosen.
All parameters are bf16, and so are the hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.masking_utils import create_sliding_window_causal_mask

from flashdsa.errors import ArgumentValueError
from flashdsa.integrations.transformers import enable

OURS, EAGER = "flashdsa", "torch eager"
KINDS = {
    "window": "sliding_attention",
    "CSA": "compressed_sparse_attention",
    "HCA": "heavily_compressed_attention",
}
SIZE_NAMES = (
    "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_lora_rank", "o_groups",
    "index_n_heads", "index_head_dim", "index_topk", "sliding_window", "compress_rates",
)  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 64, "q_lora_rank": 32,
    "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 8,
    "sliding_window": 16, "compress_rates": {KINDS["CSA"]: 4, KINDS["HCA"]: 16},
}  # fmt: skip
"""Sizes for the CPU."""
AROUND = {"vocab_size": 8, "moe_intermediate_size": 8, "n_routed_experts": 2}
"""Sizes that no attention reads, as small as they go."""
FACTOR, ROUNDINGS = 1.3, 1e-2
"""An error may be FACTOR times eager's, or that of a few roundings to bf16 and of a sum over
queries of terms of both signs, which `flashdsa.verify.tolerances` allows the sinks' gradient."""


class Layer(NamedTuple):
    """An attention and what a model hands it besides hidden states.

    Attributes:
        position_embeddings: of each kind of rotation, cos and sin (1, T, 32).
        position_ids: (1, T). mask: (1, 1, T, T) of the window, or None.
    """

    attention: Any
    position_embeddings: dict[str, tuple[Tensor, Tensor]]
    position_ids: Tensor
    mask: Tensor | None

    def run(self, hidden: Tensor) -> Tensor:
        """Hidden states (1, T, D) -> (1, T, D)."""
        out: Tensor = self.attention(
            hidden, self.position_embeddings, self.position_ids, self.mask
        )[0]
        return out

    def train(self, hidden: Tensor, gradient: Tensor) -> Tensor:
        """Forward and backward, gradients of the hidden states and of all parameters."""
        hidden.grad = None
        for parameter in self.attention.parameters():
            parameter.grad = None
        out = self.run(hidden)
        out.backward(gradient)
        return out


class Inputs(NamedTuple):
    """Hidden states, a leaf that wants a gradient, and the gradient of the output: (1, T, D)."""

    hidden: Tensor
    gradient: Tensor


def build(tokens: int, device: str, seed: int) -> tuple[Inputs, dict[str, dict[str, Layer]], Any]:
    """One document's inputs, layers by kind and contender with equal weights, and the sizes."""
    torch.manual_seed(seed)
    config = DeepseekV4Config(
        num_hidden_layers=len(KINDS), layer_types=list(KINDS.values()), num_experts_per_tok=1,
        mlp_layer_types=["moe"] * len(KINDS), pad_token_id=None, use_cache=False,
        **AROUND, **(SMALL if device == "cpu" else {}),
    )  # fmt: skip
    longest = max(config.compress_rates.values())
    if tokens < longest:
        raise ArgumentValueError(
            f"tokens: expected {longest}, an entry of HCA, or more; got {tokens}"
        )
    with torch.device(device):
        model = DeepseekV4ForCausalLM(config).train()
    model.set_attn_implementation("eager")
    for name, parameter in model.named_parameters():
        if "sinks" in name or "position_bias" in name:  # zeros in a new model
            torch.nn.init.normal_(parameter)
        parameter.data = parameter.data.bfloat16()
    models = {EAGER: model, OURS: enable(copy.deepcopy(model))}
    shape = 1, tokens, config.hidden_size
    hidden, gradient = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    layers = {
        kind: {name: _layer(models[name].model, place, hidden) for name in (OURS, EAGER)}
        for place, kind in enumerate(KINDS)
    }
    sizes = {name: getattr(config, name) for name in SIZE_NAMES}
    return Inputs(hidden.requires_grad_(), gradient), layers, sizes


def _layer(model: Any, place: int, hidden: Tensor) -> Layer:
    """The attention at `place`, with what the model would hand it."""
    position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
    # No padding and no cache, whose parameter releases name differently.
    mask = create_sliding_window_causal_mask(model.config, hidden, None, None, position_ids)
    tables = {
        kind: model.rotary_emb(hidden, position_ids=position_ids, layer_type=kind)
        for kind in ("main", "compress")
    }
    return Layer(model.layers[place].self_attn, tables, position_ids, mask)


@dataclass(frozen=True)
class Error:
    """Errors of a result's norm, of ours and of eager's, against eager in fp32."""

    ours: float
    eager: float

    @property
    def is_allowed(self) -> bool:
        """Whether ours is about as near as eager's."""
        return self.ours <= max(FACTOR * self.eager, ROUNDINGS)


def judge(layers: dict[str, Layer], inputs: Inputs) -> dict[str, Error]:
    """Errors of the output and of every gradient.

    The indexer in fp32 would choose other entries; the judge is given those that eager chose.
    """
    picks: list[Tensor] = []
    indexer = getattr(layers[EAGER].attention.compressor, "indexer", None)
    hook = indexer and indexer.register_forward_hook(lambda *given: picks.append(given[-1]))
    eager = _results(layers[EAGER], inputs)
    if hook:
        hook.remove()
    ours = _results(layers[OURS], inputs)
    exact = _results(_in_fp32(layers[EAGER], picks), Inputs(*(x.float() for x in inputs)))
    if set(ours) != set(eager):
        raise AssertionError(f"gradients of {sorted(set(ours) ^ set(eager))} in one layer only")
    return {
        name: Error(*(float((x[name] - right).norm() / right.norm()) for x in (ours, eager)))
        for name, right in exact.items()
    }


def _results(layer: Layer, inputs: Inputs) -> dict[str, Tensor]:
    """Output and gradients by name, in float64."""
    hidden = inputs.hidden.detach().requires_grad_()
    out = layer.train(hidden, inputs.gradient)
    named = {"hidden": hidden} | dict(layer.attention.named_parameters())
    gradients = {name: x.grad.double() for name, x in named.items() if x.grad is not None}
    for parameter in layer.attention.parameters():
        parameter.grad = None
    return {"output": out.detach().double()} | gradients


def _in_fp32(layer: Layer, picks: list[Tensor]) -> Layer:
    """A copy that computes in fp32 and attends to the entries `picks`."""
    attention = copy.deepcopy(layer.attention).float()
    if picks:
        chosen: Callable[..., Tensor] = lambda *_: picks[0]
        attention.compressor.indexer.register_forward_hook(chosen)
    tables = {
        kind: (cos.float(), sin.float()) for kind, (cos, sin) in layer.position_embeddings.items()
    }
    mask = None if layer.mask is None else layer.mask.float()
    return layer._replace(attention=attention, position_embeddings=tables, mask=mask)
