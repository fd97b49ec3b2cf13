#include <cstdio>
#include <cstdlib>
#include <vector>

__device__ unsigned finished;

// Each block adds 64 numbers; the last one to finish adds the blocks' sums.
__global__ void total(const int *x, int *sums, int *result) {
    __shared__ int part[64];
    __shared__ bool is_last;
    int t = threadIdx.x;
    part[t] = x[64 * blockIdx.x + t];
    for (int half = 32; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) part[t] += part[t + half];
        __syncwarp();
    }
    if (t == 0) {
        sums[blockIdx.x] = part[0];
        __threadfence();
        is_last = atomicAdd(&finished, 1) == gridDim.x - 1;
        __threadfence();
        int sum = 0;
        for (int i = 0; is_last && i < gridDim.x; ++i) sum += sums[i];
        if (is_last) *result = sum;
    }
}

int main(int count, char **arguments) {
    int n = count > 1 ? atoi(arguments[1]) : 128, *x, *sums, *result, sum;
    std::vector<int> ones(n, 1);
    cudaMalloc(&x, n * sizeof *x);
    cudaMalloc(&sums, n / 64 * sizeof *sums);
    cudaMalloc(&result, sizeof *result);
    cudaMemcpy(x, ones.data(), n * sizeof *x, cudaMemcpyHostToDevice);
    total<<<n / 64, 64>>>(x, sums, result);
    cudaMemcpy(&sum, result, sizeof sum, cudaMemcpyDeviceToHost);
    printf("the sum is %d\n", sum);
    return sum != n;
}
