"""A random DeepSeek-V4 of four layers learns real text: by flashdsa, and beside it by eager torch.

    python -m workbench.bench.train_v4 --steps 200 --out result.json      # on a GPU
    python -m workbench.bench.train_v4 --small --steps 20 --out dry.json  # on the CPU

transformers' model with a window layer, two of entries of 4 tokens (CSA) and one of entries of 128
(HCA), of V4's sizes per head. Two copies of the same weights take turns: each step both learn from
the same tokens, a stretch of the text that Python ships, byte by byte (`flashdsa.demo.text`).
float32 weights; on a GPU computed under autocast to bf16. The result has both losses of each step,
in nats per byte, and both copies' median times of a step. Losses follow each other and do not
agree: layers pick entries and experts by scores, whose roundings differ.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from flashdsa.bench.checkout import find_checkout
from flashdsa.bench.machine import versions
from flashdsa.demo.run import load_text
from flashdsa.integrations.transformers import enable

SCHEMA = "flashdsa-train-v4/1"
LEARNING_RATE, RISING_STEPS = 1e-3, 10
LAYERS = [
    "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
    "compressed_sparse_attention",
]  # fmt: skip
SIZES = {
    "hidden_size": 1024, "moe_intermediate_size": 512, "num_attention_heads": 16, "head_dim": 512,
    "q_lora_rank": 512, "o_lora_rank": 512, "o_groups": 8, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 512, "sliding_window": 128,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "head_dim": 64,
    "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 16,
    "index_head_dim": 32, "index_topk": 8, "sliding_window": 16,
}  # fmt: skip


def build(sizes: dict[str, int], device: str) -> Any:
    """The model with random float32 weights of seed 0 and eager attention."""
    config = transformers.DeepseekV4Config(
        vocab_size=256, num_hidden_layers=len(LAYERS), layer_types=LAYERS,
        mlp_layer_types=["moe"] * len(LAYERS), n_routed_experts=4, num_experts_per_tok=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, max_position_embeddings=131072,
        use_cache=False, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config)
    model.set_attn_implementation("eager")
    return model.to(device).train()


class Learner:
    """A copy of the model, its optimiser, and the losses and seconds of its steps."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.optimiser = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda step: min(1.0, (step + 1) / RISING_STEPS)
        )

    def step(self, tokens: Tensor, precision: AbstractContextManager[Any]) -> None:
        """Learn to predict tokens [1, T] from those before them."""
        start = time.perf_counter()
        with precision:
            loss = self.model(input_ids=tokens, labels=tokens).loss
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.schedule.step()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)


def train(sizes: dict[str, int], device: str, steps: int, length: int) -> dict[str, Learner]:
    """Both copies, after `steps` of stretches of `length` bytes."""
    model = build(sizes, device)
    learners = {
        "eager": Learner(copy.deepcopy(model)),
        "flashdsa": Learner(enable(model, deterministic=True)),
    }
    text, _ = load_text()
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        start = int(torch.randint(len(text) - length, (), generator=generator))
        tokens = text[start : start + length].long()[None].to(device)
        for one in learners.values():
            on_gpu = device == "cuda"
            one.step(tokens, torch.autocast(device, torch.bfloat16) if on_gpu else nullcontext())
        if step % 10 == 0 or step in (1, steps):
            losses = (f"{name} {one.losses[-1]:.4f}" for name, one in learners.items())
            print(f"step {step}: {', '.join(losses)}", flush=True)
    return learners


def main() -> None:
    """Train both copies and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, help="bytes of a step; 4,096, small: 256")
    parser.add_argument("--out", type=Path, default=Path("train_v4.json"))
    parser.add_argument("--small", action="store_true", help="the CPU and a tiny model")
    chosen = parser.parse_args()
    device = "cpu" if chosen.small else "cuda"
    sizes = SMALL if chosen.small else SIZES
    length = chosen.length or (256 if chosen.small else 4096)
    learners = train(sizes, device, chosen.steps, length)
    checkout = find_checkout()
    document = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": checkout.as_dict() if checkout else None,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": versions() | {"transformers": transformers.__version__},
        "layers": LAYERS,
        "sizes": sizes | {"length": length, "steps": chosen.steps},
        "losses": {name: one.losses for name, one in learners.items()},
        "median_ms_a_step": {
            name: 1e3 * statistics.median(one.seconds) for name, one in learners.items()
        },
    }
    chosen.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
