"""FlashInfer's exact top-k kernels as a module that `workbench.bench` finds as peers.

Four of them: on clusters, radix selection by several CTAs a row, filtered, and its CUB backend.
FlashInfer's own API takes the first one on Blackwell only; it runs on Hopper, too. nvcc makes a
shared object from the headers of an unpacked flashinfer-python wheel, beside a module that calls
it. Put the folder on PYTHONPATH.

    python -m workbench.peers.build_flashinfer_topk UNPACKED/flashinfer/data FOLDER
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
#include <flashinfer/math.cuh>
#include <flashinfer/topk.cuh>

#include <cub/device/device_batched_topk.cuh>
#include <cuda/__execution/require.h>
#include <cuda/__execution/tie_break.h>
#include <cuda/argument>
#include <cuda/iterator>

using namespace flashinfer::sampling;

struct Row {
  int* out;
  const int* offsets;
  long k;
  struct Shift {
    int by;
    __device__ int operator()(int i) const { return i + by; }
  };
  __host__ __device__ auto operator()(long row) const {
    return cuda::make_transform_output_iterator(out + row * k, Shift{offsets[row]});
  }
};

__global__ void fill_tails(int* out, const int* lengths, long k) {
  for (long i = min(max(lengths[blockIdx.x], 0), (int)k) + threadIdx.x; i < k; i += blockDim.x)
    out[blockIdx.x * k + i] = -1;
}

// As FlashInfer's cub_topk_ragged_transform without a tie rule, bounds and all.
template <long MOST>
cudaError_t batched(const float* x, int* out, const int* lengths, const int* offsets,
                    void* memory, size_t& bytes, long rows, long width, long stride, long k,
                    cudaStream_t stream) {
  namespace exec = cuda::execution;
  constexpr int floor = cuda::std::numeric_limits<int>::min();
  const auto sizes = cuda::args::deferred_sequence{
      lengths, cuda::args::bounds<floor, int{MOST}>(),
      cuda::args::bounds(floor, static_cast<int>(width))};
  auto env = cuda::std::execution::env{
      exec::require(exec::determinism::not_guaranteed, exec::tie_break::unspecified,
                    exec::output_ordering::unsorted),
      cuda::stream_ref{stream}};
  return cub::DeviceBatchedTopK::MaxPairs(
      memory, bytes, cuda::make_strided_iterator(cuda::make_counting_iterator(x), stride),
      cuda::make_constant_iterator(cuda::discard_iterator{}),
      cuda::make_constant_iterator(cuda::make_counting_iterator(0)),
      cuda::make_transform_iterator(cuda::make_counting_iterator(0l), Row{out, offsets, k}), sizes,
      cuda::args::immediate{k < width ? k : width, cuda::args::bounds<1l, MOST>()},
      cuda::args::immediate{rows}, env);
}

extern "C" int cub_topk(const float* x, int* out, int* lengths, int* offsets, void* memory,
                        size_t* bytes, long rows, long width, long stride, long k, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  auto run = width <= 8192 ? batched<8192> : batched<1l << 21>;
  auto code = run(x, out, lengths, offsets, memory, *bytes, rows, width, stride, k, on);
  if (code != cudaSuccess || memory == nullptr) return static_cast<int>(code);
  fill_tails<<<rows, 256, 0, on>>>(out, lengths, k);
  return static_cast<int>(cudaGetLastError());
}

extern "C" int clusters(const float* logits, int* indices, int* lengths, int* offsets,
                        int* overflow, int overflow_stride, int batch, int stride, int k,
                        int cached, int size, void* stream) {
  launch_fast_topk_clusters_exact_ragged_transform<float>(
      logits, indices, lengths, offsets, nullptr, overflow, overflow_stride, batch, stride, k,
      cached, size, false, k, static_cast<cudaStream_t>(stream));
  return static_cast<int>(cudaGetLastError());
}

extern "C" int radix(float* logits, int* indices, int* lengths, int* offsets, void* states,
                     int batch, int stride, int k, void* stream) {
  return static_cast<int>(RadixTopKRaggedTransformMultiCTA<float, int>(
      logits, indices, offsets, lengths, nullptr, batch, k, stride,
      static_cast<RadixRowState*>(states), false, static_cast<cudaStream_t>(stream)));
}

extern "C" int filtered(float* logits, int* indices, int* lengths, int* offsets, void*,
                        int batch, int stride, int k, void* stream) {
  return static_cast<int>(FilteredTopKRaggedTransform<float, int>(
      logits, indices, offsets, lengths, nullptr, batch, k, stride, false, TopKTieBreak::None,
      static_cast<cudaStream_t>(stream)));
}
"""
MODULE = '''"""FlashInfer's exact top-k; made by workbench/peers/build_flashinfer_topk.py."""

import ctypes
from functools import lru_cache, partial
from pathlib import Path

import torch

_library = ctypes.CDLL(str(Path(__file__).with_name("libflashinfer_topk.so")))
_STATES = 1 << 20


@lru_cache(maxsize=1)  # gigabytes
def _memory(batch, width, k, device):
    """Clusters, places for candidates, and memory, as FlashInfer's topk.py chooses them."""
    clusters = 8 if batch <= 32 else 4 if batch < 128 else 2 if batch < 256 else 1
    clusters = clusters if width >= 8192 else 1
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 2
    cached = (shared - (k + 5 + 3 * 256 + 8) * 4 - 1024) // 16
    overflow = torch.empty(
        batch, 4 * (width // clusters) * clusters, dtype=torch.int32, device=device
    )
    return clusters, cached, overflow


@lru_cache(maxsize=4)
def _zeros(count, device):
    return torch.zeros(count, dtype=torch.int32, device=device)


def _call(function, scores, lengths, k, memory, *numbers):
    """Positions (B, k) int32 of the k best scores of each row, in no special order, then -1."""
    positions = torch.empty(len(scores), k, dtype=torch.int32, device=scores.device)
    tensors = (scores, positions, lengths, _zeros(len(scores), scores.device), memory)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = function(*(ctypes.c_void_p(x.data_ptr()) for x in tensors), *numbers, stream)
    if code:
        raise RuntimeError(f"FlashInfer's launch returned CUDA error {code}")
    return positions


def clusters(scores, lengths, k):
    """On clusters of CTAs."""
    batch, width = scores.shape
    size, cached, overflow = _memory(batch, width, k, scores.device)
    numbers = (width // size, batch, scores.stride(0), k, cached, size)
    return _call(_library.clusters, scores, lengths, k, overflow, *numbers)


def _of_rows(function, scores, lengths, k):
    states = _zeros(_STATES // 4, scores.device)
    return _call(function, scores, lengths, k, states, len(scores), scores.stride(0), k)


radix = partial(_of_rows, _library.radix)
filtered = partial(_of_rows, _library.filtered)


def cub(scores, lengths, k):
    """By CUB's DeviceBatchedTopK."""
    batch, width = scores.shape
    positions = torch.empty(batch, k, dtype=torch.int32, device=scores.device)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    offsets, size = _zeros(batch, scores.device), ctypes.c_size_t(0)
    tensors = [ctypes.c_void_p(x.data_ptr()) for x in (scores, positions, lengths, offsets)]
    numbers = [ctypes.c_long(n) for n in (batch, width, scores.stride(0), k)]
    memory = None
    for _ in range(2):  # the first call only says how much memory the second one takes
        place = ctypes.c_void_p(None if memory is None else memory.data_ptr())
        code = _library.cub_topk(*tensors, place, ctypes.byref(size), *numbers, stream)
        if code:
            raise RuntimeError(f"CUB returned CUDA error {code}")
        memory = torch.empty(max(1, size.value), dtype=torch.uint8, device=scores.device)
    return positions


def forget():
    """Give back the memory of the last scores' shape."""
    _memory.cache_clear()


TOP_KS = {"clusters": clusters, "radix": radix, "filtered": filtered, "CUB": cub}
'''


def main() -> None:
    """Compile, and write the module beside the object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="flashinfer/data of the unpacked wheel")
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
        made = arguments.target / "libflashinfer_topk.so"
        flags = ["-O3", "-std=c++17", "-arch=sm_90a", "--expt-relaxed-constexpr", "-shared"]
        flags += ["--expt-extended-lambda", "-diag-suppress", "186"]
        places = ["-Xcompiler", "-fPIC", "-I", folder, "-I", str(arguments.data / "include")]
        for part in ("cub", "libcudacxx/include", "thrust"):  # CUB's top-k is not in CUDA 13.0
            places += ["-I", str(arguments.data / "cccl" / part)]
        subprocess.run(["nvcc", *flags, *places, "-o", str(made), str(source)], check=True)
    (arguments.target / "flashinfer_topk.py").write_text(MODULE)


if __name__ == "__main__":
    main()
