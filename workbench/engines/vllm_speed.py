"""One process of `workbench engines speed`: a vLLM's tokens a second and times to a first token.

    python -m workbench.engines.vllm_speed make FOLDER
    python -m workbench.engines.vllm_speed run FOLDER OUT BACKEND ARGUMENTS

Decodes start in full contexts: vLLM's DecodeBenchConnector takes their prompts for computed, and
the caches hold random rows, written once. ARGUMENTS are those of vLLM's LLM, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flashdsa.problem import D_V, INDEX_HEAD_DIM
from workbench.engines import checkpoint
from workbench.engines.vllm_process import start

LAYERS = 16
SIZES = {"max_position_embeddings": 2**17}
CONTEXTS = (8192, 65536)
USERS = (1, 8, 64)
PROMPTS = (4096, 32768)
STEPS, WARM = 48, 8
REPEATS = 3
KERNELS = 8
PAGE_TOKENS = 64
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": CONTEXTS[-1] + 2 * PAGE_TOKENS,
    "max_num_seqs": USERS[-1],
    "block_size": PAGE_TOKENS,
    "gpu_memory_utilization": 0.9,
    "kv_cache_memory_bytes": 90 * 2**30,
    "enable_prefix_caching": False,
    "compilation_config": {"cudagraph_capture_sizes": list(USERS)},
    "kv_transfer_config": {
        "kv_connector": "DecodeBenchConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"startup_fill": True},
    },
}


def fill(cache: Tensor) -> None:
    """Write random rows: bf16, packed ones of 656 bytes, or index keys with their scales."""
    if cache.dtype == torch.bfloat16:
        cache.normal_()
        return
    pages, tokens, width = cache.shape
    for page in range(0, pages, 4096):
        part = cache[page : page + 4096]
        if width == INDEX_HEAD_DIM + 4:  # a page's keys, then its scales
            flat = part.as_strided((len(part), tokens * width), (part.stride(0), 1))
            keys, scales = flat.split((tokens * INDEX_HEAD_DIM, tokens * 4), 1)
        else:
            keys, scales = part[..., :D_V], part[..., D_V : D_V + 16]
            rope = torch.randn(*part.shape[:2], 64, device=part.device).bfloat16()
            part[..., D_V + 16 :] = rope.view(torch.uint8)
        random = torch.randn(keys.shape, device=part.device).to(torch.float8_e4m3fn)
        keys.copy_(random.view(torch.uint8))
        ones = torch.ones(*scales.shape[:-1], scales.shape[-1] // 4, device=part.device)
        scales.copy_(ones.view(torch.uint8))


class Engine:
    """A started vLLM whose steps are taken one by one."""

    def __init__(self, folder: Path, backend: str, arguments: dict[str, Any]) -> None:
        """Start it and fill its caches."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as bench

        held = bench.DecodeBenchConnectorScheduler
        theirs = held.get_num_new_matched_tokens

        def matched(connector: Any, *given: Any) -> tuple[int, bool]:
            """Tokens that count as computed: none while prompts are timed."""
            return theirs(connector, *given) if self.computed else (0, False)

        held.get_num_new_matched_tokens = matched
        self.computed = False
        self.llm = start(folder, backend, ARGUMENTS | arguments)
        self.engine = self.llm.llm_engine
        self.names = count()
        layers = self.engine.vllm_config.compilation_config.static_forward_context
        for layer in layers.values():  # those of experts have no cache
            caches = getattr(layer, "kv_cache", ())
            for cache in [caches] if isinstance(caches, Tensor) else caches:
                fill(cache)

    def ask(self, users: int, tokens: int, new: int) -> None:
        """Add requests of random prompts."""
        from vllm import SamplingParams

        words = checkpoint.SIZES["vocab_size"]
        params = SamplingParams(
            temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        for _ in range(users):
            ids = torch.randint(3, words, (tokens,)).tolist()
            self.engine.add_request(str(next(self.names)), {"prompt_token_ids": ids}, params)

    def decode(self, users: int, context: int) -> float:
        """Seconds of a step of `users` decodes after `context` tokens."""
        self.computed = True
        self.ask(users, context, STEPS + WARM)
        begin = end = first = last = 0.0
        lengths: dict[str, int] = {}
        while self.engine.has_unfinished_requests():
            for one in self.engine.step():
                lengths[one.request_id] = len(one.outputs[0].token_ids)
            if len(lengths) == users:
                if not begin and min(lengths.values()) >= WARM:
                    begin, first = time.perf_counter(), sum(lengths.values()) / users
                end, last = time.perf_counter(), sum(lengths.values()) / users
        return (end - begin) / (last - first)

    def first_token(self, tokens: int) -> float:
        """Seconds from a prompt of `tokens` to its first token."""
        self.computed = False
        self.ask(1, tokens, 1)
        begin = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return time.perf_counter() - begin


def kernels(call: Callable[[], object]) -> list[tuple[str, int, float]]:
    """The kernels of a call that take longest in all: name, launches, milliseconds; before them
    all of them, and the time from the first one's start to the last one's end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = [
        (one.key[:120], one.count, one.device_time_total / 1e3) for one in profile.key_averages()
    ]
    ranges = [one.time_range for one in profile.events() or ()]
    span = max(one.end for one in ranges) - min(one.start for one in ranges) if ranges else 0.0
    busy = "all kernels", sum(one[1] for one in found), sum(one[2] for one in found)
    longest = sorted(found, key=lambda one: -one[2])[:KERNELS]
    return [busy, ("first to last", 1, span / 1e3), *longest]


def run(folder: Path, backend: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Medians: step, seconds by "users x context"; first, seconds by "1 x prompt"; kernels of
    the smaller prompt and of all `steps` of each decode, by the same names."""
    engine = Engine(folder, backend, arguments)
    first = {}
    engine.decode(1, CONTEXTS[0])  # the first steps of a process take longer
    for tokens in PROMPTS:
        engine.first_token(tokens)
        first[f"1 x {tokens}"] = median(engine.first_token(tokens) for _ in range(REPEATS))
    step = {
        f"{users} x {context}": median(engine.decode(users, context) for _ in range(REPEATS))
        for context in CONTEXTS
        for users in USERS
    }
    shown = {f"1 x {PROMPTS[0]}": kernels(lambda: engine.first_token(PROMPTS[0]))}
    for name in step:
        users, context = map(int, name.split(" x "))
        shown[name] = kernels(partial(engine.decode, users, context))
    config = engine.engine.vllm_config
    return {
        "vllm": version("vllm"),
        "kernels": shown,
        "steps": STEPS + WARM,
        "step": step,
        "first": first,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "cache": config.cache_config.cache_dtype,
    }


def main(job: str, folder: str, out: str = "", backend: str = "", arguments: str = "{}") -> None:
    """Do what the command line says."""
    if job == "make":
        checkpoint.make(Path(folder), LAYERS, **SIZES)
        return
    found = run(Path(folder), backend, json.loads(arguments))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
