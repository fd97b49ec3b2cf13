"""A CuPy RawModule with a module variable, and elementwise kernels and a sum that CuPy makes."""

import cupy as cp
import numpy as np

module = cp.RawModule(
    code=r"""
    __device__ float scale = 2;
    extern "C" __global__ void axpy(int n, const float *x, float *y) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] += scale * x[i];
    }
    """
)
x = cp.asarray(np.arange(1000, dtype=np.float32))
y = cp.ones(1000, dtype=np.float32)
module.get_function("axpy")((4,), (256,), (np.int32(1000), x, y))
assert np.array_equal(cp.asnumpy(y), 2 * np.arange(1000) + 1)
assert float((x * 2 + y).sum()) == (4 * np.arange(1000) + 1).sum()
