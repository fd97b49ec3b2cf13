"""vLLM 0.33 on a machine without a GPU: configuration, model with weights, and one batch.

    python -m tests.integrations.vllm_on_cpu FOLDER BACKEND[:CACHE[:DRAFTS]]|v4 ...

torch.cuda and NVML answer as one H200 does, a stub stands for libcuda, and Triton's interpreter
runs vLLM's kernels, so torch is to be a CUDA build for Python 3.12. A line of JSON a backend.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "FLASHDSA_BACKEND": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from torch import Tensor

import flashdsa
from flashdsa.integrations.vllm import INDEXER_NAME, LOGGER
from tests.support.formulas import attention
from tests.support.pretended_cuda import CAPABILITY, GIB, NAME, answer_with, pretend_a_gpu
from tests.support.vllm_batches import gather_index_keys, require_best

LINES: list[str] = []
"""Lines that flashdsa has written to vLLM's log."""


class Collect(logging.Handler):
    """Keeps messages."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        LINES.append(record.getMessage())


CONTEXT = 900
"""Tokens of the longest request: more than the checkpoint's topk."""


def pretend_nvml() -> None:
    """Let NVML answer, too, and vLLM pin no memory."""
    import pynvml
    import vllm.third_party.pynvml as vendored

    memory = SimpleNamespace(total=140 * GIB, free=130 * GIB, used=1)
    for module in (pynvml, vendored):
        answer_with(
            module,
            {
                "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1,
                "nvmlDeviceGetHandleByIndex": 0, "nvmlDeviceGetMemoryInfo": memory,
                "nvmlDeviceGetCudaComputeCapability": CAPABILITY, "nvmlDeviceGetName": NAME,
                "nvmlDeviceGetUUID": "GPU-0", "nvmlDeviceGetNumaNodeId": 0,
            },
        )  # fmt: skip
    import vllm.utils.torch_utils

    vllm.utils.torch_utils.PIN_MEMORY = False


def set_device_type(name: str) -> None:
    """Let vLLM allocate there what it allocates by its platform's name."""
    from vllm.platforms import current_platform

    for kind in type(current_platform).__mro__:
        if "device_type" in vars(kind):
            kind.device_type = name  # type: ignore[attr-defined]


def describe(folder: str, backend: str, cache: str = "auto", drafts: str = "") -> dict[str, Any]:
    """Build vLLM's configuration and model with a backend, as a server does; run a batch through
    flashdsa's indexer and attention."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.worker.workspace import current_workspace_manager, init_workspace_manager

    set_device_type("cuda")
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048,
        max_num_seqs=8, block_size=64, enable_prefix_caching=False, attention_backend=backend,
        kv_cache_dtype=cache,
        speculative_config={"method": "mtp", "num_speculative_tokens": int(drafts)} if drafts
        else None,
    ).create_engine_config()  # fmt: skip
    LINES.clear()
    logger = logging.getLogger(LOGGER)  # the configuration has taken its handlers
    logger.setLevel(logging.INFO)
    logger.handlers = [Collect()]
    chosen = AttentionBackendEnum[backend].get_class()
    support = chosen.get_builder_cls().get_cudagraph_support(config, None)
    graphs = copy.deepcopy(config.compilation_config).resolve_cudagraph_mode_and_sizes(
        support, backend, 1, True, None, 8
    )
    set_device_type("cpu")
    cpu = config.device_config.device = torch.device("cpu")
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, "tcp://127.0.0.1:29811", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
        init_workspace_manager(cpu)
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(vllm_config=config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        process_weights_after_loading(model, config.model_config, cpu)
        torch.set_default_dtype(torch.float32)
        layers = [one for one in model.modules() if getattr(one, "impl", None) is not None]
        found = {
            "support": support.name,
            "graphs": graphs.name,
            "model": type(model).__name__,
            "layers": [type(one.impl).__name__ for one in layers],
            "page_bytes": layers[0].get_kv_cache_spec(config).page_size_bytes,
            "lines": list(LINES),
            "reserved": current_workspace_manager()._current_workspaces[0].numel(),
            "most_tokens": config.scheduler_config.max_num_batched_tokens,
        }
        current_workspace_manager().lock()
        if backend == INDEXER_NAME:
            if not drafts:
                found["spawned"] = read_elsewhere(pickle.dumps(config.attention_config))
            found["error"] = run_batch(config, layers[0], 1 + int(drafts or 0))
        return found


def read_elsewhere(pickled: bytes) -> str:
    """The backend's name in a process that has not loaded plugins, as a server spawns one."""
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).backend.name)"
    read = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True)
    return (read.stdout or read.stderr).decode().strip()


def run_batch(config: Any, layer: Any, next_n: int) -> float:
    """Run two decodes and a prompt through vLLM's builders, and a layer's indexer and attention.

    Args:
        next_n: queries of a decode.

    Returns:
        The largest error of the layer's heads against float64, over their largest value.

    Raises:
        AssertionError: other positions than the best were chosen.
    """
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import CommonAttentionMetadata

    generator = torch.Generator().manual_seed(1)
    lengths, queries = torch.tensor([CONTEXT, 70, 650]).int(), [next_n, next_n, 6]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    tokens, pages = int(starts[-1]), -(-CONTEXT // 64)
    tables = torch.randperm(3 * pages, generator=generator).view(3, pages).int()
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, num_reqs=3, num_actual_tokens=tokens,
        seq_lens=lengths, seq_lens_cpu_upper_bound=lengths, max_query_len=max(queries),
        max_seq_len=CONTEXT, block_table_tensor=tables,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )  # fmt: skip
    context = config.compilation_config.static_forward_context
    names = {id(one): name for name, one in context.items()}
    keys, metadata = layer.indexer.k_cache, {}
    for one, extra in ((layer, {}), (keys, {"block_table_width": pages})):
        builder = one.get_attn_backend().get_builder_cls()
        given = one.get_kv_cache_spec(config), [names[id(one)]], config, torch.device("cpu")
        made = metadata[names[id(one)]] = builder(*given, **extra).build(
            common_prefix_len=0, common_attn_metadata=common
        )
        assert made.num_decodes == 2, "drafts and their verification are decodes"

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    slots = torch.arange(3 * pages * 64)
    index_cache = torch.zeros(3 * pages, 2, 64, 132, dtype=torch.uint8)[:, 0]
    flashdsa.write_index_k_cache(random(len(slots), 128), slots, index_cache.unsqueeze(2))
    keys.kv_cache = index_cache
    rows = random(len(slots), 576).bfloat16()
    if layer.kv_cache_dtype == "fp8_ds_mla":
        coded = flashdsa.quantize_kv(rows)
        rows = flashdsa.read_kv_cache(coded, slots)
        held = coded.view(-1, 64, 656)
    else:
        held = rows.view(-1, 64, 576)
    layer.kv_cache = torch.stack((held, torch.full_like(held, 127)), dim=1)[:, 0]
    q = random(tokens, layer.num_heads, 576).bfloat16() / 4
    index_q, weights = flashdsa.quantize_index_q(
        random(tokens, layer.indexer.n_head, 128), random(tokens, layer.indexer.n_head)
    )
    output = torch.zeros(tokens, layer.num_heads * layer.v_head_dim, dtype=torch.bfloat16)
    empty = torch.zeros(tokens, 8)
    with set_forward_context(metadata, config), torch.inference_mode():
        layer._sparse_indexer_and_attn(
            empty, empty, empty, empty, index_q, None, weights, None, None,
            q[..., :512], q[..., 512:], output,
        )  # fmt: skip
    ids = layer.topk_indices_buffer[:tokens]
    owners = torch.arange(3).repeat_interleave(torch.tensor(queries))
    seen = [int(lengths[i]) - int(starts[i + 1]) + 1 + s for s, i in enumerate(owners.tolist())]
    require_best(ids, seen, tables[owners], index_cache, index_q, weights)
    positions = [row[row >= 0].long() for row in ids]
    chosen = [
        (tables[i][row // 64] * 64 + row % 64).tolist()
        for i, row in zip(owners, positions, strict=True)
    ]
    latent, _ = attention(q, rows, chosen, layer.scale)
    expected = torch.einsum("thl,hlv->thv", latent, layer.W_UV.double()).flatten(1)
    return float((output - expected).abs().max() / expected.abs().max())


def replace_v4() -> dict[str, Any]:
    """Names of DeepSeek-V4's and V4.1's functions, after they are replaced."""
    from flashdsa.integrations.vllm import v4

    v4.install()
    modules = [importlib.import_module(name) for name in v4.MODULES]
    names = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
    return {"v4": [getattr(module, name).__module__ for module in modules for name in names]}


def without_extensions() -> None:
    """Compute what vLLM's CUDA extensions compute for `run_batch`, and leave a schedule out."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends.mla import indexer

    _custom_ops.cp_gather_indexer_k_quant_cache = gather_index_keys
    indexer.get_paged_mqa_logits_metadata = lambda *_, **__: torch.zeros(1, 2, dtype=torch.int32)


def main(folder: str, *runs: str) -> None:
    """Print a line for each run."""
    pretend_a_gpu()
    pretend_nvml()
    without_extensions()
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for run in runs:
        try:
            found = replace_v4() if run == "v4" else describe(folder, *run.split(":"))
        except ValueError as error:
            found = {"refused": str(error)}
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
