"""One process of `workbench engines vllm`: makes the checkpoint, or runs one of two engines.

    python -m workbench.engines.vllm_process make FOLDER
    python -m workbench.engines.vllm_process eager FOLDER OUT
    python -m workbench.engines.vllm_process vllm|server FOLDER OUT BACKEND ARGUMENTS

ARGUMENTS are those of vLLM's LLM, as JSON; `vllm_run` sets the environment. An engine keeps its
GPU's memory until its process ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

from workbench.engines import checkpoint, vllm_server

OURS = {"backend": ("attend",), "indexer": ("dsa_topk_indexer", "dsa_topk_prefill", "_serves")}
"""Functions whose calls are counted, by the integration's modules."""


def count_calls() -> Counter[str]:
    """Count the calls of flashdsa from here on, and the batches that its indexer leaves to vLLM.

    A CUDA graph's replays make none.
    """
    calls: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            found = function(*given, **named)
            if name != "_serves":
                calls[name] += 1
            elif not found:
                calls["left to vLLM"] += 1
            return found

        return call

    for module, names in OURS.items():
        held = import_module(f"flashdsa.integrations.vllm.{module}")
        for name in names:
            setattr(held, name, counted(name, getattr(held, name)))
    return calls


def start(folder: Path, backend: str, arguments: dict[str, Any]) -> Any:
    """An LLM whose engine runs in this process."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # a dict for attention_config is looked at before LLM loads them
    from vllm import LLM

    return LLM(
        model=str(folder), attention_config={"backend": backend, "sparse_mla_force_mqa": True},
        **arguments,
    )  # fmt: skip


def generate(folder: Path, backend: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """vLLM's greedy tokens, and what served them.

    With prefix caching the prompts come twice, and the second answers count.
    """
    from vllm import SamplingParams

    begin = time.perf_counter()
    calls = count_calls()
    llm = start(folder, backend, arguments)
    started = time.perf_counter()
    params = SamplingParams(
        temperature=0, max_tokens=checkpoint.NEW, min_tokens=checkpoint.NEW, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    given = [{"prompt_token_ids": ids} for ids in checkpoint.prompts()]
    for _ in range(2 if arguments.get("enable_prefix_caching") else 1):
        answers = llm.generate(given, params)
    config = llm.llm_engine.vllm_config
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in answers],
        "cached": [one.num_cached_tokens for one in answers],
        "graphs": config.compilation_config.cudagraph_mode.name,
        "cache": config.cache_config.cache_dtype,
        "calls": dict(calls),
        "starts_seconds": started - begin,
        "seconds": time.perf_counter() - started,
    }


def main(job: str, folder: str, out: str = "", backend: str = "", arguments: str = "{}") -> None:
    """Do what the command line says."""
    if job == "make":
        checkpoint.make(Path(folder))
        return
    if job == "eager":
        found = checkpoint.eager(Path(folder))
    else:
        run = {"vllm": generate, "server": vllm_server.generate}[job]
        found = run(Path(folder), backend, json.loads(arguments))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
