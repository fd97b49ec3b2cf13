"""A tiny checkpoint as DeepSeek publishes them: two shards, float8 blocks, experts one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 128
HIDDEN, HEADS, Q_RANK, EXPERTS, WIDTH, INDEX_HEADS = 160, 2, 64, 3, 48, 8
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 2 * WIDTH,
    "moe_intermediate_size": WIDTH,
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
    "max_position_embeddings": 1280,
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
INDEXER = {"index_topk": 24, "index_n_heads": INDEX_HEADS, "index_head_dim": 128}


def shapes(indexer: bool) -> dict[str, tuple[int, ...]]:
    """All tensors but scales; those of the layer that predicts one token more among them."""
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (256, HIDDEN)}
    made |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (256, HIDDEN)}
    own = {
        "q_a_proj.weight": (Q_RANK, HIDDEN),
        "q_a_layernorm.weight": (Q_RANK,),
        "q_b_proj.weight": (HEADS * 192, Q_RANK),
        "kv_a_proj_with_mqa.weight": (576, HIDDEN),
        "kv_a_layernorm.weight": (512,),
        "kv_b_proj.weight": (HEADS * 256, 512),
        "o_proj.weight": (HIDDEN, HEADS * 128),
    }
    if indexer:
        own |= {
            "indexer.wq_b.weight": (INDEX_HEADS * 128, Q_RANK),
            "indexer.wk.weight": (128, HIDDEN),
            "indexer.k_norm.weight": (128,),
            "indexer.k_norm.bias": (128,),
            "indexer.weights_proj.weight": (INDEX_HEADS, HIDDEN),
        }
    for number in range(3):
        layer = f"model.layers.{number}."
        made |= {f"{layer}self_attn.{name}": shape for name, shape in own.items()}
        made |= {
            f"{layer}{n}.weight": (HIDDEN,) for n in ("input_layernorm", "post_attention_layernorm")
        }
        mlps = {"mlp": 2 * WIDTH}
        if number:
            mlps = {f"mlp.experts.{n}": WIDTH for n in range(EXPERTS)}
            mlps |= {"mlp.shared_experts": WIDTH}
            made[f"{layer}mlp.gate.weight"] = (EXPERTS, HIDDEN)
            made[f"{layer}mlp.gate.e_score_correction_bias"] = (EXPERTS,)
        for name, width in mlps.items():
            made |= {f"{layer}{name}.{n}_proj.weight": (width, HIDDEN) for n in ("gate", "up")}
            made[f"{layer}{name}.down_proj.weight"] = (HIDDEN, width)
    return made


def write(folder: Path, *, indexer: bool = True) -> dict[str, Tensor]:
    """Draw a checkpoint, with DeepSeek-V3.2's indexers or as V3 without. Returns the float64 values
    that each of its tensors stands for."""
    generator, values = torch.Generator().manual_seed(0), {}
    stored: dict[str, Tensor] = {}
    for name, shape in shapes(indexer).items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1
        if "norm" in name and name.endswith("weight"):
            drawn = drawn + 1
        plain = len(shape) == 1 or any(
            one in name for one in ("embed_tokens", "lm_head", "mlp.gate.", "weights_proj")
        )
        if plain:
            dtype = torch.float32 if "e_score" in name or "k_norm" in name else torch.bfloat16
            stored[name] = drawn.to(dtype)
            values[name] = stored[name].double()
        else:
            quantised, scale, values[name] = _quantised(drawn)
            stored |= {name: quantised, f"{name}_scale_inv": scale}
    folder.mkdir(parents=True)
    names = sorted(stored)
    files = {name: f"model-{1 + (i % 2):05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: stored[name] for name in names if files[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = CONFIG | INDEXER if indexer else CONFIG | {"model_type": "deepseek_v3"}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def _quantised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float8 blocks, their scales, and what both stand for, block by block."""
    rows, columns = (range(0, n, BLOCK) for n in x.shape)
    quantised = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scale, meant = torch.empty(len(rows), len(columns)), torch.empty_like(x)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            at = slice(row, row + BLOCK), slice(column, column + BLOCK)
            scale[i, j] = x[at].abs().max() / 448
            quantised[at] = (x[at] / scale[i, j].double()).to(torch.float8_e4m3fn)
            meant[at] = quantised[at].double() * scale[i, j].double()
    return quantised, scale, meant
