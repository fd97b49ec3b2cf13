"""SGLang 0.5.13's model runner on a machine without a GPU: prompts and decodes through flashdsa.

    python -m tests.integrations.sglang_on_cpu FOLDER ARGUMENTS TOKENS LENGTH ...

torch.cuda answers as one H200 does; torch computes what SGLang's own kernels compute outside of
attention and top-k. ARGUMENTS are those of ServerArgs, as JSON; TOKENS are generated for prompts
of these lengths. Prints a line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "FLASHDSA_BACKEND": "cpu",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_PLUGINS": "flashdsa,flashdsa_indexer,flashdsa_counts",
    "SGLANG_USE_CUSTOM_TRITON_KERNEL_CACHE": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "TRITON_INTERPRET": "1",
}

import torch
from torch import Tensor

import flashdsa
from flashdsa.integrations.sglang.indexer import LOGGER
from tests.support.pretended_cuda import OnTheCpu, pretend_a_gpu
from tests.support.vllm_batches import gather_index_keys
from workbench.engines import checkpoint
from workbench.engines.sglang_process import COUNTS

LAYERS = "sglang.srt.layers"


def on_gloo(make: Any) -> Any:
    """A function of torch.distributed with that backend instead of NCCL."""

    def call(*given: Any, **named: Any) -> Any:
        if make.__name__ == "init_process_group":
            given = ()
        return make(*given, **named | {"backend": "gloo"})

    return call


def imported(name: str) -> Any:
    """A module whose functions are replaced."""
    return import_module(name)


def without_kernels() -> None:
    """Let torch compute what has kernels only."""
    for module, name in (
        ("layernorm", "RMSNorm"), ("layernorm", "LayerNorm"), ("activation", "SiluAndMul"),
        ("rotary_embedding.base", "RotaryEmbedding"),
    ):  # fmt: skip
        kind = getattr(imported(f"{LAYERS}.{module}"), name)
        kind.forward_cuda = kind.forward_native
    dsa = f"{LAYERS}.attention.dsa"
    indexer = imported(f"{dsa}.dsa_indexer")
    indexer.deep_gemm.get_num_sms = lambda: 132
    indexer.deep_gemm.get_paged_mqa_logits_metadata = lambda *_: torch.zeros(1).int()
    indexer.rotate_activation = rotate
    indexer.can_use_dsa_fused_store = lambda *_, **__: False
    indexer.Indexer._weights_proj_bf16_in_fp32_out = lambda self, x: (
        x.float() @ self.weights_proj.weight.float().t()
    )
    imported(f"{dsa}.triton_kernel").act_quant = quantize
    accessors = imported(f"{dsa}.index_buf_accessor")
    accessors.SetKAndS.execute, accessors.GetKAndS.execute = store_keys, gather_keys
    backend = imported(f"{LAYERS}.attention.dsa_backend")
    backend.concat_mla_absorb_q_general = lambda one, other: torch.cat((one, other), -1)
    backend.DeepseekSparseAttnBackend._compute_flashmla_metadata = lambda *_, **__: None
    pool = imported("sglang.srt.mem_cache.memory_pool")
    pool.set_mla_kv_buffer_triton, pool.quantize_k_cache_separate = store_rows, pack_rows
    batches = imported("sglang.srt.model_executor.forward_batch_info")
    batches.clamp_position = lambda lengths: (lengths - 1).clamp(min=0)


def rotate(x: Tensor) -> Tensor:
    """Multiply by Hadamard's matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    rotated: Tensor = x.float() @ matrix * float(x.shape[-1]) ** -0.5
    return rotated.to(x.dtype)


def quantize(x: Tensor, block: int, scale_fmt: str | None) -> tuple[Tensor, Tensor]:
    """e4m3 and a scale for each row of 128 columns, a power of two with a `scale_fmt`."""
    scales = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    if scale_fmt is not None:
        scales = scales.log2().ceil().exp2()
    return (x.float() / scales).to(torch.float8_e4m3fn), scales


def store_keys(pool: Any, buf: Tensor, loc: Tensor, index_k: Tensor, index_k_scale: Tensor) -> None:
    """Write index keys and scales into the pages of `buf`."""
    pages, at = loc // 64, loc % 64
    buf[:, : 64 * 128].view(-1, 64, 128)[pages, at] = index_k.view(torch.uint8)
    buf[:, 64 * 128 :].view(-1, 64, 4)[pages, at] = index_k_scale.view(torch.uint8)


def gather_keys(
    pool: Any, buf: Tensor, page_indices: Tensor, seq_len_tensor: Tensor, seq_len_sum: int,
    max_seq_len: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys and scales of all requests as bytes, one after another."""
    keys = torch.zeros(seq_len_sum, 128).to(torch.float8_e4m3fn)
    scales = torch.zeros(seq_len_sum, 4, dtype=torch.uint8)
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), seq_len_tensor.cumsum(0)))
    gather_index_keys(buf.view(-1, 64, 132), keys, scales, page_indices, ends)
    return keys.view(torch.uint8), scales


def store_rows(kv_buffer: Tensor, loc: Tensor, nope: Tensor, rope: Tensor) -> None:
    """Write rows of the cache."""
    kv_buffer[loc] = torch.cat((nope, rope), -1).view(kv_buffer.dtype)


def pack_rows(nope: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of packed rows."""
    rows = flashdsa.quantize_kv(torch.cat((nope, rope), -1).flatten(0, 1))
    return rows[:, None, :528], rows[:, None, 528:]


def generate(
    folder: str, arguments: dict[str, Any], prompts: list[list[int]], new: int
) -> list[list[int]]:
    """Greedy tokens of the prompts in one batch."""
    from sglang import bench_one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    bench_one_batch.get_tokenizer = lambda *_, **__: None
    args = ServerArgs(model_path=folder, **arguments)
    args.check_server_args()  # as a server's start does
    runner, _ = bench_one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    model, count = runner.torch_runner, len(prompts)
    requests = bench_one_batch.prepare_synthetic_inputs_for_latency_test(count, 0, prompts)
    chosen, _, batch = bench_one_batch.extend(requests, model)
    tokens = [chosen.tolist()]
    while len(tokens) < new:
        for request, token in zip(requests, tokens[-1], strict=True):
            request.output_ids.append(token)
        chosen, _ = bench_one_batch.decode(chosen, batch, model)
        tokens.append(chosen.tolist())
    return [list(one) for one in zip(*tokens, strict=True)]


class Collect(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(record.getMessage())


def main(folder: str, arguments: str, new: str, *lengths: str) -> None:
    """Print the tokens, the calls that made them, and flashdsa's lines of the log."""
    pretend_a_gpu()
    collect = Collect()
    logging.getLogger(LOGGER).setLevel(logging.INFO)
    logging.getLogger(LOGGER).addHandler(collect)
    for name in ("init_process_group", "new_group"):
        setattr(torch.distributed, name, on_gloo(getattr(torch.distributed, name)))
    with OnTheCpu():
        from sglang.srt.plugins import load_plugins

        load_plugins()
        without_kernels()
        prompts = checkpoint.prompts(tuple(map(int, lengths)))
        tokens = generate(folder, json.loads(arguments), prompts, int(new))
    calls = json.loads(Path(os.environ[COUNTS]).read_text())
    found = {"tokens": tokens, "calls": calls, "lines": collect.lines}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
