// Read before the sources of torch extensions that `ptxemu exec` builds: tensors on the GPU are
// tensors in host memory there, so what asks for the one is answered for the other.
#if defined(__cplusplus) && __has_include(<torch/extension.h>) && !defined(PTXEMU_TORCH_H)
#define PTXEMU_TORCH_H
#include <torch/extension.h>
#if __has_include(<cuda_runtime_api.h>)
// torch's headers of CUDA, before its words change their meaning.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#endif
#define is_cuda is_cpu
#define kCUDA kCPU
#define CUDA CPU
#endif
