"""One process of `workbench engines sglang`: SGLang's answers with its own kernels or flashdsa's.

    python -m workbench.engines.sglang_process FOLDER OUT ARGUMENTS

ARGUMENTS are those of SGLang's Engine, as JSON; SGLANG_PLUGINS says what is replaced. The model
runs in a process of SGLang's own, where the plugin `flashdsa_counts` counts calls.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from workbench.engines import checkpoint

COUNTS = "FLASHDSA_SGLANG_COUNTS"
"""The environment variable that names the file of counts."""
THEIRS = {
    "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend": (
        "_forward_flashmla_sparse", "_forward_flashmla_kv", "_forward_fa3", "_forward_standard_mha",
    ),
    "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer": (
        "_get_topk_paged", "_get_topk_ragged", "_forward_cuda_k_only",
    ),
}  # fmt: skip
OURS = {
    "flashdsa.integrations.sglang": ("sparse_mla_fwd",),
    "flashdsa.integrations.sglang.indexer": ("dsa_topk_indexer", "dsa_topk_prefill"),
}


def count_calls() -> None:
    """A plugin: write how often SGLang's methods and flashdsa's functions are called.

    A CUDA graph's replays make no calls.
    """
    calls: Counter[str] = Counter()
    path = Path(os.environ[COUNTS])

    def counted(name: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        calls[name] += 1
        path.write_text(json.dumps(calls))
        return found

    for module, names in OURS.items():
        held = import_module(module)
        for name in names:
            setattr(held, name, partial(counted, name, getattr(held, name)))
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for kind, methods in THEIRS.items():
        for name in methods:
            HookRegistry.register(f"{kind}.{name}", partial(counted, name), HookType.AROUND)


def generate(folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """SGLang's greedy tokens, and what served them.

    With the radix cache the prompts come twice, and the second answers count.
    """
    from sglang import Engine

    begin = time.perf_counter()
    engine = Engine(model_path=str(folder), **arguments)
    started = time.perf_counter()
    params = {"temperature": 0, "max_new_tokens": checkpoint.NEW, "ignore_eos": True}
    for _ in range(1 if arguments.get("disable_radix_cache") else 2):
        answers = engine.generate(input_ids=checkpoint.prompts(), sampling_params=params)
    seconds = time.perf_counter() - started
    found = engine.server_args
    return {
        "tokens": [one["output_ids"][-checkpoint.NEW :] for one in answers],
        "cached": [one["meta_info"]["cached_tokens"] for one in answers],
        "graphs": not found.disable_cuda_graph,
        "cache": found.kv_cache_dtype,
        "backends": [found.dsa_prefill_backend, found.dsa_decode_backend],
        "calls": json.loads(Path(os.environ[COUNTS]).read_text()),
        "starts_seconds": started - begin,
        "seconds": seconds,
    }


def main(folder: str, out: str, arguments: str) -> None:
    """Do what the command line says."""
    Path(out).write_text(json.dumps(generate(Path(folder), json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
