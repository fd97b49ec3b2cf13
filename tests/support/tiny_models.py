"""Tiny random models of transformers, and what the tests compare of them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

BATCH, LENGTH, TOPK, PADDING = 2, 48, 16, 5
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "index_topk": TOPK,
    "index_head_dim": 128,
    "index_n_heads": 16,  # of few heads scores would often be 0 alike, and ties be broken otherwise
    "first_k_dense_replace": 1,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


def build(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    if kind == "deepseek_v32":  # with yarn, whose mscale changes the logits' factor
        config = transformers.DeepseekV32Config(**SMALL | changes, rope_parameters=YARN)
        return transformers.DeepseekV32ForCausalLM(config).eval()
    layers = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
    config = transformers.GlmMoeDsaConfig(**SMALL | layers | changes)
    return transformers.GlmMoeDsaForCausalLM(config).eval()


def tokens() -> dict[str, Tensor]:
    """Left padding in the second sequence."""
    torch.manual_seed(1)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, :PADDING] = 0
    return {"input_ids": torch.randint(1, 96, (BATCH, LENGTH)), "attention_mask": mask}


def run(model: Any, gradients: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the tokens that are no padding, and every parameter's gradient."""
    model.zero_grad()
    x = tokens()
    with torch.set_grad_enabled(gradients):
        logits = model(**x).logits[x["attention_mask"].bool()]
        if gradients:
            torch.manual_seed(2)
            (logits * torch.randn_like(logits)).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), found


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm().detach() / expected.detach().norm().clamp_min(1e-30))


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(error(got[name], expected[name]) for name in expected)
