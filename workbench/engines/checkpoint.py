"""A random DeepSeek-V3.2 that vLLM and transformers load, prompts, and eager's tokens.

Real sizes where kernels look: 576 and 512 columns, 64 index heads of 128, topk 2,048; two layers
of 512 columns, and a third one for drafts (MTP). A trained model's index ranks highest what its
attention weighs most; so does this one's. Else a few keys near the last selected one, which fp8
and bf16 rank differently, would change the tokens as much as a wrong selection.
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
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 8,
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
ONE, IMPORTANCE = 0, 1
"""Columns of the hidden states that all layers leave as the embedding has them: the same number
for every token, and a token's importance."""
EMBEDDING, COLUMN = 20, 3
"""Factor of the embedding, which the layers add to, and the scale of its two columns."""


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """The prompts' ids, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    words = SIZES["vocab_size"]
    return [torch.randint(3, words, (n,), generator=generator).tolist() for n in lengths]


def make(folder: Path, layers: int = LAYERS, **sizes: Any) -> None:
    """Save the checkpoint: a layer more than `layers`, the last, becomes that of the drafts, with
    weights of its own."""
    torch.manual_seed(0)
    config = transformers.DeepseekV32Config(num_hidden_layers=layers + 1, **(SIZES | sizes))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.DeepseekV32ForCausalLM(config).to(torch.bfloat16)
    weigh_by_importance(model)
    model.save_pretrained(folder, max_shard_size="100GB")
    path = folder / "model.safetensors"
    weights = load_file(path)
    columns, layer = config.hidden_size, f"model.layers.{layers}"
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
    entries = json.loads(about.read_text()) | NAMES_OF_VLLM | {"num_hidden_layers": layers}
    # A list of the layers' kinds, one of which is gone.
    entries = {
        key: value[:layers] if isinstance(value, list) and len(value) == layers + 1 else value
        for key, value in entries.items()
    }
    about.write_text(json.dumps(entries, indent=1) + "\n")


@torch.no_grad()
def weigh_by_importance(model: Any) -> None:
    """Make all queries prefer important tokens, in the index and in attention alike.

    Column ONE of the hidden states becomes the first of a query's latent columns, IMPORTANCE the
    first of a row's; each head multiplies them, beside its random columns.
    """
    config = model.config
    model.lm_head.weight.mul_(SHARPER)
    words = model.model.embed_tokens.weight.mul_(EMBEDDING)
    words[:, ONE] = COLUMN
    words[:, IMPORTANCE] = COLUMN * torch.randn(len(words)).clamp(-2.5, 2.5)
    for layer in model.model.layers:
        attention, index = layer.self_attn, layer.self_attn.indexer
        one_column(attention.q_a_proj.weight[0], ONE, 1.5)
        one_column(attention.kv_a_proj_with_mqa.weight[0], IMPORTANCE, 0.4)
        heads = config.num_attention_heads
        for weight, value in ((attention.q_b_proj.weight, 8.0), (attention.kv_b_proj.weight, 1.0)):
            one_column(weight.view(heads, -1, weight.shape[1])[:, 0], 0, value)
        # The last column of an index key has no RoPE.
        one_column(index.wk.weight[-1], IMPORTANCE, 1.0)
        query = index.wq_b.weight
        one_column(query.view(-1, config.index_head_dim, query.shape[1])[:, -1], 0, 1.0)
        index.weights_proj.weight[:, ONE] = 1.0
        for name, weight in layer.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                weight[..., :2, :] = 0


def one_column(rows: Tensor, column: int, value: float) -> None:
    """Rows of weights that look at one column alone."""
    rows.zero_()
    rows[..., column] = value


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
