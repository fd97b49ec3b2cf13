// The sum of a block's numbers; n is a power of two, at least 64.
template <int n> __global__ void sum(const float *x, float *result) {
    __shared__ float part[n];
    int t = threadIdx.x;
    part[t] = x[t];
    for (int half = n / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) part[t] += part[t + half];
    }
    if (t == 0) *result = part[0];
}

template __global__ void sum<256>(const float *, float *);
