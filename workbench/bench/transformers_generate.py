"""Prefill and decode of transformers' DeepSeek-V3.2 with random weights: flashdsa, sdpa and eager.

    python -m workbench.bench.transformers_generate --out result.json         # on a GPU
    python -m workbench.bench.transformers_generate --dry-run --out dry.json  # tiny, on the CPU

Two layers with the model's head sizes (H = 128, 512 + 64, 64 index heads, topk 2048), batch 1,
bf16. A row has a prefill and 32 decoded tokens: the shortest times of four rounds, in which the
implementations take turns, after a call of each for warm-up.
`peak_GiB_above_weights` is what torch allocated beyond the weights. A run that lacks memory says so
in its row. `workbench/first_page.py` draws the result.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from flashdsa.bench.checkout import find_checkout
from flashdsa.bench.machine import versions
from flashdsa.integrations.transformers import disable, enable

SCHEMA = "flashdsa-transformers/1"
DECODED = 32
ROUNDS = 4
VOCABULARY = 1024
SIZES = {"hidden_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128}
TINY = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 32,
    "index_topk": 32, "index_n_heads": 4,
}  # fmt: skip
INDEXERS = ("fp8", "exact", "model")


def build(sizes: dict[str, int], device: str) -> Any:
    """The model in bf16, with random weights of seed 0."""
    hidden = sizes["hidden_size"]
    config = transformers.DeepseekV32Config(
        vocab_size=VOCABULARY, intermediate_size=2 * hidden, moe_intermediate_size=hidden // 4,
        num_hidden_layers=2, first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, eos_token_id=None, pad_token_id=0,
        max_position_embeddings=131072, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.DeepseekV32ForCausalLM(config).to(torch.bfloat16).eval()


class Clock:
    """Seconds and memory of `generate` on one prompt."""

    def __init__(self, model: Any, length: int) -> None:
        self.model = model
        self.prefill = self.whole = math.inf
        self.tokens_found: list[int] = []
        self.on_gpu = model.device.type == "cuda"
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(1, VOCABULARY, (1, length), generator=generator)
        self.tokens = tokens.to(model.device)

    def generate(self, tokens: int) -> tuple[float, list[int]]:
        """Seconds for the prompt and so many new tokens, and the tokens."""
        start = time.perf_counter()
        found = self.model.generate(
            input_ids=self.tokens,
            attention_mask=torch.ones_like(self.tokens),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )
        new: list[int] = found[0, self.tokens.shape[1] :].tolist()  # waits for the device
        return time.perf_counter() - start, new

    def warm_up(self) -> float:
        """Generate once; GiB that torch allocated beyond what was there."""
        base = 0
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        self.generate(1)
        self.tokens_found = self.generate(1 + DECODED)[1]
        peak = torch.cuda.max_memory_allocated() - base if self.on_gpu else 0
        return peak / 2**30

    def take_turn(self) -> None:
        """Shorten the times, if this round's are shorter."""
        self.prefill = min(self.prefill, self.generate(1)[0])
        self.whole = min(self.whole, self.generate(1 + DECODED)[0])

    def times(self) -> dict[str, Any]:
        """A row's numbers, from the rounds so far."""
        return {
            "prefill_ms": 1e3 * self.prefill,
            "prefill_tokens_per_s": self.tokens.shape[1] / self.prefill,
            "decode_ms_a_token": 1e3 * (self.whole - self.prefill) / DECODED,
        }


def choose(model: Any, name: str) -> None:
    """Have the model's attention computed by `name`."""
    disable(model)
    flashdsa, _, indexer = name.partition(", indexer=")
    if indexer:
        enable(model, indexer=indexer)
    else:
        model.set_attn_implementation(flashdsa)


def measure(model: Any, names: list[str], length: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A row of each name: what it takes for a prompt of `length` tokens."""
    rows: dict[str, dict[str, Any]] = {}
    clocks: dict[str, Clock] = {}
    for name in names:
        choose(model, name)
        rows[name] = {"implementation": name, "length": length}
        clock = Clock(model, length)
        try:
            rows[name]["peak_GiB_above_weights"] = clock.warm_up()
            rows[name]["tokens"] = clock.tokens_found
            clocks[name] = clock
        except torch.cuda.OutOfMemoryError as error:
            rows[name]["error"] = f"out of memory: {str(error).splitlines()[0][:90]}"
    for _ in range(rounds):
        for name, clock in clocks.items():
            choose(model, name)
            clock.take_turn()
    disable(model)
    for name in names:
        yield rows[name] | (clocks[name].times() if name in clocks else {})


def main() -> None:
    """Measure every implementation at every length; write the JSON after each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("transformers.json"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument(
        "--dry-run", action="store_true", help="CPU, a tiny model, 128 tokens, a round"
    )
    chosen = parser.parse_args()
    device = "cpu" if chosen.dry_run else "cuda"
    lengths = [128] if chosen.dry_run else chosen.lengths
    model = build(TINY if chosen.dry_run else SIZES, device)
    checkout = find_checkout()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": checkout.as_dict() if checkout else None,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": versions() | {"transformers": transformers.__version__},
        "rows": [],
    }
    names = [f"flashdsa, indexer={indexer}" for indexer in INDEXERS] + ["sdpa", "eager"]
    for length in lengths:
        with torch.no_grad():
            for row in measure(model, names, length, 1 if chosen.dry_run else ROUNDS):
                document["rows"].append(row)
                print(json.dumps(row), flush=True)
        chosen.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
