"""SGLang with its own and flashdsa's kernels beside transformers: cases and processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from workbench.engines import vllm_run
from workbench.engines.pack import LIBRARIES
from workbench.engines.sglang_process import COUNTS

CASES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"disable_cuda_graph": True},
    "chunked": {"chunked_prefill_size": 2048},
    "prefix": {"disable_radix_cache": False},
    "fp8": {
        "kv_cache_dtype": "fp8_e4m3",
        "dsa_prefill_backend": "flashmla_kv",
        "dsa_decode_backend": "flashmla_kv",
    },
}
"""Arguments of Engine that make a case; "eager+fp8" has both."""
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "dsa_prefill_backend": "flashmla_sparse",
    "dsa_decode_backend": "flashmla_sparse",
    "context_length": 8192,
    "max_running_requests": 8,
    "max_total_tokens": 65536,
    "chunked_prefill_size": 16384,
    "mem_fraction_static": 0.2,
    "cuda_graph_max_bs": 8,
    "disable_radix_cache": True,
    "disable_piecewise_cuda_graph": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "moe_runner_backend": "triton",
    "skip_server_warmup": True,
    "log_level": "info",
}
NONE = "none"
"""No plugin: SGLang's own kernels."""
PLUGINS = (NONE, "flashdsa", "flashdsa,flashdsa_indexer")
"""Values of SGLANG_PLUGINS."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # Prompts up to topk go to attention, too: FA3 and FlashInfer are not carried.
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
}
LIMIT_SECONDS = 560
"""SGLang's first process on a machine compiles some twenty kernels."""
PROCESS = "workbench.engines.sglang_process"


def in_a_process(words: list[str], gpu: int, path: str, log: Path) -> str:
    """Run one of `vllm_run.measure`'s processes: transformers', or SGLang's with a folder on its
    path; the end of its output if it failed or hung."""
    if words[0] != "vllm":
        return vllm_run.in_a_process(words, gpu, "", log)
    _, model, out, plugins, arguments = words
    libraries = [str(Path(path, LIBRARIES)), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = ENVIRONMENT | {
        "SGLANG_PLUGINS": f"{plugins},flashdsa_counts",
        COUNTS: str(Path(out).with_suffix(".counts")),
        "LD_LIBRARY_PATH": os.pathsep.join(one for one in libraries if one),
    }
    given = [model, out, arguments]
    return vllm_run.in_a_process(given, gpu, path, log, PROCESS, environment, LIMIT_SECONDS)


measure: Callable[..., dict[str, Any]] = partial(
    vllm_run.measure, settings=partial(vllm_run.arguments_of, cases=CASES, common=COMMON)
)
"""`vllm_run.measure` with these cases; its backends are PLUGINS."""
