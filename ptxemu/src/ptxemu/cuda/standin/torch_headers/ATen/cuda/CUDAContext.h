// In the place of torch's, which needs the headers of cuBLAS, cuSPARSE and cuSOLVER.
#pragma once
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

namespace at::cuda {
using namespace c10::cuda;
}
