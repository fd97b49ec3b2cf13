"""cuDNN Frontend's bf16 logits of Hopper and its top-k, compiled ahead: peers of
`workbench/bench/prefill_gpu.py` on a machine without CuTe DSL, which takes the object as --cudnn-object.

Its own wrappers compile these kernels with CuTe DSL when they are called.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashdsa.bench.gpu.cases import TOPK
from flashdsa.hw import SM90
from flashdsa.jit.shared_object import build_shared_object
from flashdsa.problem import INDEX_HEAD_DIM
from workbench.peers.build_cudnn_topk import import_kernel

LOGITS = "cudnn.deepseek_sparse_attention.indexer_forward.indexer_fwd_sm90"
WIDTHS = (4096, 8192, 32768, 131072)
"""Keys that a compiled top-k takes at most."""
MANY_ROWS = 4096
"""Its kernel for more than 148 rows takes less of an SM's shared memory."""
ALIGNMENT = 16


def compile_logits(kernel: Any, num_heads: int) -> Any:
    """A TVM-FFI function (q (B, S, H, 128), k (B, T, 1, 128), weights (B, S, H) fp32, None, None,
    scores (B, S, T) fp32, None, 1, S, T, 1.0, None, None, offsets (B,) int32): causal, query s sees
    the keys up to offset + s. Scores behind them are not written."""
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
        options=f"--enable-tvm-ffi --gpu-arch {SM90.name}",
    )


def main() -> None:
    """Compile into one object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("unpacked", type=Path, help="the folder of the unpacked wheel")
    parser.add_argument("target", type=Path, help="a shared object")
    arguments = parser.parse_args()
    logits = import_kernel(arguments.unpacked, LOGITS)
    top_k = import_kernel(arguments.unpacked)
    compiled = {f"logits_h{heads}_bf16": compile_logits(logits, heads) for heads in (64, 32, 16)}
    for width in WIDTHS:
        compiled[f"topk_{width}"] = top_k.compile_topk_kernel(
            torch.float32, MANY_ROWS, width, TOPK, 1, return_val=False
        )
    build_shared_object(arguments.target, compiled, "cudnn")
    sys.stdout.write(f"{arguments.target}: {', '.join(compiled)}\n")


if __name__ == "__main__":
    main()
