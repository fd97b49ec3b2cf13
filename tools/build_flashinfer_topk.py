"""FlashInfer's exact top-k on clusters as a module that `flashdsa bench indexer` finds as a peer.

FlashInfer's own API takes that kernel on Blackwell only; it runs on Hopper, too. From the headers
of an unpacked flashinfer-python wheel nvcc makes a shared object, beside a module that calls it.
Put the folder on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

SOURCE = """
#include <iostream>
#define TVM_FFI_ICHECK(x) if (!(x)) std::cerr
#include <flashinfer/fast_topk_clusters_exact.cuh>

extern "C" int top_k(const float* logits, int* indices, int* lengths, int* offsets, int* overflow,
                     int overflow_stride, int batch, int stride, int k, int cached, int clusters,
                     void* stream) {
  flashinfer::sampling::launch_fast_topk_clusters_exact_ragged_transform<float>(
      logits, indices, lengths, offsets, nullptr, overflow, overflow_stride, batch, stride, k,
      cached, clusters, false, k, static_cast<cudaStream_t>(stream));
  return static_cast<int>(cudaGetLastError());
}
"""
MODULE = '''"""FlashInfer's exact top-k on clusters; made by tools/build_flashinfer_topk.py."""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

_top_k = ctypes.CDLL(str(Path(__file__).with_name("flashinfer_clusters.so"))).top_k


@lru_cache(maxsize=64)
def _memory(batch, width, k, device):
    """Clusters, places for candidates, and memory, as FlashInfer's topk.py chooses them."""
    clusters = 8 if batch <= 32 else 4 if batch < 128 else 2 if batch < 256 else 1
    clusters = clusters if width >= 8192 else 1
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 2
    cached = (shared - (k + 5 + 3 * 256 + 8) * 4 - 1024) // 16
    integers = {"dtype": torch.int32, "device": device}
    overflow = torch.empty(batch, 4 * (width // clusters) * clusters, **integers)
    return clusters, cached, overflow, torch.zeros(batch, **integers)


def top_k(scores, lengths, k):
    """Positions (B, k) int32 of the k best scores of each row, in no special order, then -1."""
    batch, width = scores.shape
    clusters, cached, overflow, offsets = _memory(batch, width, k, scores.device)
    positions = torch.empty(batch, k, dtype=torch.int32, device=scores.device)
    tensors = (scores, positions, lengths, offsets, overflow)
    numbers = (width // clusters, batch, scores.stride(0), k, cached, clusters)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = _top_k(*(ctypes.c_void_p(x.data_ptr()) for x in tensors), *numbers, stream)
    if code:
        raise RuntimeError(f"FlashInfer's launch returned CUDA error {code}")
    return positions
'''


def main() -> None:
    """Compile, and write the module beside the object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("include", type=Path, help="flashinfer/data/include of the wheel")
    parser.add_argument("target", type=Path, help="a folder")
    arguments = parser.parse_args()
    arguments.target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "top_k.cu"
        source.write_text(SOURCE)
        # The header asks for one of tvm-ffi, of which it needs the macro above only.
        stub = Path(folder) / "tvm" / "ffi" / "error.h"
        stub.parent.mkdir(parents=True)
        stub.touch()
        made = arguments.target / "flashinfer_clusters.so"
        flags = ["-O3", "-std=c++17", "-arch=sm_90a", "--expt-relaxed-constexpr", "-shared"]
        places = ["-Xcompiler", "-fPIC", "-I", folder, "-I", str(arguments.include)]
        subprocess.run(["nvcc", *flags, *places, "-o", str(made), str(source)], check=True)
    (arguments.target / "flashinfer_clusters.py").write_text(MODULE)


if __name__ == "__main__":
    main()
