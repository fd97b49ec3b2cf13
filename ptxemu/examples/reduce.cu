#include <cstdio>

__global__ void sum(const float *x, float *total) {
    __shared__ float part[256];
    int t = threadIdx.x;
    part[t] = x[t];
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (t < half) part[t] += part[t + half];
        if (half > 32) __syncthreads();
    }
    if (t == 0) *total = part[0];
}

int main() {
    float host[256], *x, *total, result;
    for (float &one : host) one = 1;
    cudaMalloc(&x, sizeof host);
    cudaMalloc(&total, sizeof result);
    cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice);
    sum<<<1, 256>>>(x, total);
    cudaMemcpy(&result, total, sizeof result, cudaMemcpyDeviceToHost);
    printf("the sum is %g\n", result);
}
