"""cuDNN Frontend's top-k and its bf16 logits of Hopper, compiled ahead of time.

Its own wrappers compile these kernels with CuTe DSL when they are called. This compiles what the
benches' cases ask for, on a machine without a GPU, into a shared object beside a module,
cudnn_kernels, that calls it as the wrappers do. Put the folder on PYTHONPATH.

    python -m workbench.peers.build_cudnn UNPACKED_WHEEL FOLDER
"""

from __future__ import annotations

import argparse
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.hw import SM90
from flashdsa.jit.shared_object import build_shared_object
from flashdsa.problem import INDEX_HEAD_DIM
from workbench.bench import indexer, prefill

PACKAGES = ("", ".deepseek_sparse_attention", *(
    f".deepseek_sparse_attention.{name}" for name in ("indexer_forward", "indexer_top_k", "utils")
))  # fmt: skip
TOP_K = "cudnn.deepseek_sparse_attention.indexer_top_k.indexer_top_k_decode_varlen"
LOGITS = "cudnn.deepseek_sparse_attention.indexer_forward.indexer_fwd_sm90"
MANY_ROWS = 148
"""Rows above which its kernel takes less shared memory of an SM; see the module below, too."""
ALIGNMENT = 16
MODULE = '''"""cuDNN Frontend's top-k and logits; made by workbench/peers/build_cudnn.py."""

from functools import lru_cache
from pathlib import Path

import torch

from flashdsa.jit.shared_object import load_shared_object

_load = lru_cache(load_shared_object(Path(__file__).with_name("libcudnn_kernels.so")))


def indexer_top_k_wrapper(scores, lengths, k, return_val=False):
    """Positions (B, k) int32 of the k best fp32 scores of each row, then -1, as "indices"."""
    scores = scores if scores.is_contiguous() else scores.contiguous()
    rows, width = scores.shape
    kernel = _load(f"topk_{1 << (width - 1).bit_length()}_{'many' if rows > 148 else 'few'}")
    step = rows if rows <= 148 else min(rows, (2**31 - 1) // (2 * width) // 8 * 8)
    positions = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    memory = torch.empty(step, 2, width, dtype=torch.int32, device=scores.device)
    for begin in range(0, rows, step):
        part = slice(begin, min(rows, begin + step))
        count = part.stop - part.start
        kernel(scores[part], None, memory[:count], None, lengths[part], positions[part], None)
    return {"indices": positions}


def logits(q, k, weights):
    """Causal scores (S, T) fp32 of bf16 q (S, H, 128) and k (T, 128); unseen ones not written."""
    (queries, heads, _), keys = q.shape, len(k)
    scores = torch.empty(1, queries, keys, device=q.device)
    offsets = torch.full((1,), keys - queries, dtype=torch.int32, device=q.device)
    operands = q[None], k[None, :, None], weights[None], None, None, scores, None
    _load(f"logits_h{heads}_bf16")(*operands, 1, queries, keys, 1.0, None, None, offsets)
    return scores[0]
'''


def import_kernel(unpacked: Path, module: str) -> Any:
    """A kernel's module, without its packages' own imports, which ask for a GPU's libraries."""
    for name in PACKAGES:
        package = types.ModuleType(f"cudnn{name}")
        package.__path__ = [str(unpacked / f"cudnn{name}".replace(".", "/"))]
        sys.modules[package.__name__] = package
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_available = lambda: True
    return import_module(module)


def compile_logits(kernel: Any, num_heads: int) -> Any:
    """A TVM-FFI function (q (B, S, H, 128), k (B, T, 1, 128), weights (B, S, H) fp32, None, None,
    scores (B, S, T) fp32, None, 1, S, T, 1.0, None, None, offsets (B,) int32): causal, query s sees
    the keys up to offset + s. Scores beyond them are not written."""
    batch, queries, keys = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=4)

    def compact(dtype: Any, *shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=ALIGNMENT)

    forward = kernel.IndexerForwardSm90(
        cutlass.BFloat16,
        cutlass.Float32,
        head_dim=INDEX_HEAD_DIM,
        qhead_per_kvhead=num_heads,
        ratio=1,
        is_varlen=False,
        use_unchecked_qh64=False,
        use_unchecked_qh64_masked=False,
        compute_lse=False,
    )
    one = cutlass.Int32(1)
    return cute.compile(
        forward,
        compact(cutlass.BFloat16, batch, queries, num_heads, INDEX_HEAD_DIM),
        compact(cutlass.BFloat16, batch, keys, 1, INDEX_HEAD_DIM),
        compact(cutlass.Float32, batch, queries, num_heads),
        None,
        None,
        compact(cutlass.Float32, batch, queries, keys),
        None,
        one,
        one,
        one,
        cutlass.Float32(1.0),
        None,
        None,
        make_fake_compact_tensor(cutlass.Int32, (batch,), stride_order=(0,)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )


def top_k_sizes() -> dict[str, tuple[int, int, int]]:
    """(rows, width, k) by the name of the kernel that the cases need for them."""
    sizes = [(case.s, case.s_kv, case.topk) for case in (*indexer.CASES, *prefill.CASES)]
    return {
        f"topk_{1 << (width - 1).bit_length()}_{'many' if rows > MANY_ROWS else 'few'}": (
            rows, 1 << (width - 1).bit_length(), topk,
        )
        for rows, width, topk in sizes
    }  # fmt: skip


def main() -> None:
    """Compile, and write the module beside the object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("unpacked", type=Path, help="the folder of the unpacked wheel")
    parser.add_argument("target", type=Path, help="a folder")
    arguments = parser.parse_args()
    arguments.target.mkdir(parents=True, exist_ok=True)
    kernel = import_kernel(arguments.unpacked, TOP_K)
    compiled = {}
    for name, (rows, width, topk) in top_k_sizes().items():
        compiled[name] = kernel.compile_topk_kernel(
            torch.float32, rows, width, topk, 1, return_val=False
        )
        print(name, flush=True)
    logits = import_kernel(arguments.unpacked, LOGITS)
    for heads in {case.h for case in prefill.CASES if case.dtype == "bf16"}:
        compiled[f"logits_h{heads}_bf16"] = compile_logits(logits, heads)
    build_shared_object(arguments.target / "libcudnn_kernels.so", compiled, "cudnn")
    (arguments.target / "cudnn_kernels.py").write_text(MODULE)


if __name__ == "__main__":
    main()
