"""A random DeepSeek-V3.2 that vLLM and transformers load, prompts, and eager's tokens.

Real sizes where kernels look: 576 and 512 columns, 64 index heads of 128, topk 2,048; two layers
of 512 columns, and a third one for drafts (MTP).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 16384,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
NAMES_OF_VLLM = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
}
"""Entries of config.json that vLLM looks for; transformers neither needs nor writes them."""
LAYERS = 2
LENGTHS = (40, 700, 2500, 5000)
"""Tokens of the prompts: up to 2,048 all of them are selected."""
NEW = 16
"""Tokens that are generated."""
SHARPER = 4
"""Factor of the head's weights, so that the best token is not one of many equal ones."""


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """The prompts' ids, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    words = SIZES["vocab_size"]
    return [torch.randint(3, words, (n,), generator=generator).tolist() for n in lengths]


def make(folder: Path, **sizes: Any) -> None:
    """Save the checkpoint: the last layer becomes that of the drafts, with weights of its own."""
    torch.manual_seed(0)
    config = transformers.DeepseekV32Config(num_hidden_layers=LAYERS + 1, **(SIZES | sizes))
    model = transformers.DeepseekV32ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPER)
    model.save_pretrained(folder, max_shard_size="100GB")
    path = folder / "model.safetensors"
    weights = load_file(path)
    columns, layer = config.hidden_size, f"model.layers.{LAYERS}"
    ones = torch.ones(columns, dtype=torch.bfloat16)
    drafts: dict[str, Tensor] = {
        "enorm.weight": ones,
        "hnorm.weight": ones,
        "shared_head.norm.weight": ones,
        "shared_head.head.weight": weights["lm_head.weight"],
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "eh_proj.weight": torch.randn(columns, 2 * columns).bfloat16() * config.initializer_range,
    }
    weights |= {f"{layer}.{name}": tensor.clone() for name, tensor in drafts.items()}
    save_file(weights, path, metadata={"format": "pt"})
    about = folder / "config.json"
    entries = json.loads(about.read_text()) | NAMES_OF_VLLM | {"num_hidden_layers": LAYERS}
    # A list of the layers' kinds, one of which is gone.
    entries = {
        key: value[:LAYERS] if isinstance(value, list) and len(value) == LAYERS + 1 else value
        for key, value in entries.items()
    }
    about.write_text(json.dumps(entries, indent=1) + "\n")


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The model with eager attention, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = transformers.DeepseekV32ForCausalLM
    return kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(device).eval()


@torch.no_grad()
def eager(folder: Path, lengths: tuple[int, ...] = LENGTHS, new: int = NEW) -> dict[str, Any]:
    """transformers' greedy tokens, gaps of the two best log-probabilities, and bf16's error.

    Returns:
        tokens and gaps, a list a prompt; error: the largest difference of a chosen token's
        log-probability from that of the same model in fp32.
    """
    found: dict[str, Any] = {"tokens": [], "gaps": []}
    chosen = []
    model = load(folder, torch.bfloat16)
    for ids in prompts(lengths):
        given = torch.tensor([ids], device=model.device)
        out = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=new, min_new_tokens=new,
            do_sample=False, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        logs = torch.cat(out.logits).float().log_softmax(-1)
        best = logs.topk(2)
        found["tokens"].append(out.sequences[0, len(ids) :].tolist())
        found["gaps"].append((best.values[:, 0] - best.values[:, 1]).tolist())
        chosen.append((out.sequences, logs))
    del model
    exact, errors = load(folder, torch.float32), []
    for sequence, logs in chosen:
        wide = exact(sequence[:, :-1], logits_to_keep=new).logits[0].log_softmax(-1)
        tokens = sequence[0, -new:, None]
        errors.append(float((wide.gather(1, tokens) - logs.gather(1, tokens)).abs().max()))
    return found | {"error": max(errors)}
