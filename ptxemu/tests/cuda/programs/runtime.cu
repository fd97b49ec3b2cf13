// What the runtime API promises, asked for by a program: prints each broken promise, and "done".
#include <cstdio>
#include <cstring>

static int broken = 0;
#define EXPECT(what) \
    do { \
        if (!(what)) printf("line %d: %s\n", __LINE__, #what), broken++; \
    } while (0)

struct Pair {
    char tag;
    double value;
};

__constant__ float scale = 3;
__device__ int counter;
__device__ int *pointer_to_counter = &counter;
__managed__ int shared_with_host = 5;

__global__ void axpy(int n, Pair a, const float *x, float *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += scale * static_cast<float>(a.value) * x[i];
    if (i == 0) atomicAdd(pointer_to_counter, a.tag), shared_with_host++;
}

__global__ void greet(int number) {
    if (threadIdx.x == 0) printf("greeting %d\n", number);
}

__global__ void rank_in_cluster(unsigned *ranks) {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    ranks[blockIdx.x] = rank;
}

__global__ void meet(unsigned *arrived, unsigned *seen) {
    if (threadIdx.x != 0) return;
    atomicAdd(arrived, 1);
    while (atomicAdd(arrived, 0) < gridDim.x) continue;
    seen[blockIdx.x] = atomicAdd(arrived, 0);
}

__global__ void fill_shared(int *out) {
    extern __shared__ int buffer[];
    buffer[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

__global__ void outside(int *p) { p[1000000] = 1; }

static void memory_and_symbols() {
    const int n = 300;
    float host[n], *x, *y;
    int count = 0, managed_before = shared_with_host;
    for (int i = 0; i < n; i++) host[i] = static_cast<float>(i);
    EXPECT(cudaMalloc(&x, sizeof host) == cudaSuccess && cudaMalloc(&y, sizeof host) == cudaSuccess);
    EXPECT(cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice) == cudaSuccess);
    EXPECT(cudaMemset(y, 0, sizeof host) == cudaSuccess);
    EXPECT(cudaMemcpy(x + 1, host, sizeof host, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    float two = 2;
    EXPECT(cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess);
    EXPECT(cudaMemcpyToSymbol(scale, &two, sizeof two) == cudaSuccess);
    EXPECT(cudaMemcpyToSymbol(scale, host, sizeof host) == cudaErrorInvalidValue);
    axpy<<<3, 128>>>(n, Pair{7, 10}, x, y);
    EXPECT(cudaMemcpy(host, y, sizeof host, cudaMemcpyDefault) == cudaSuccess);
    EXPECT(host[0] == 0 && host[299] == 20 * 299.f);
    EXPECT(cudaMemcpyFromSymbol(&count, counter, sizeof count) == cudaSuccess && count == 7);
    EXPECT(managed_before == 5 && shared_with_host == 6);
    cudaPointerAttributes about;
    EXPECT(cudaPointerGetAttributes(&about, x) == cudaSuccess);
    EXPECT(about.type == cudaMemoryTypeDevice && about.devicePointer == x);
    EXPECT(cudaPointerGetAttributes(&about, host) == cudaSuccess);
    EXPECT(about.type == cudaMemoryTypeUnregistered);
    void *far;
    EXPECT(cudaMalloc(&far, 1ull << 45) == cudaErrorMemoryAllocation && far == nullptr);
    float *both;
    EXPECT(cudaMallocManaged(&both, 4 * n) == cudaSuccess);
    for (int i = 0; i < n; i++) both[i] = 1;
    axpy<<<3, 128>>>(n, Pair{0, 1}, x, both);
    EXPECT(cudaDeviceSynchronize() == cudaSuccess && both[100] == 1 + 2 * 100.f);
    EXPECT(cudaFree(x) == cudaSuccess && cudaFree(y) == cudaSuccess && cudaFree(both) == cudaSuccess);
    EXPECT(cudaFree(x) == cudaErrorInvalidValue && cudaFree(nullptr) == cudaSuccess);
    cudaGetLastError();
}

static void streams_and_graphs() {
    cudaStream_t first, second;
    cudaEvent_t begin, end;
    int *p, value[2] = {0, 0};
    EXPECT(cudaStreamCreate(&first) == cudaSuccess);
    EXPECT(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking) == cudaSuccess);
    EXPECT(cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess);
    EXPECT(cudaMallocAsync(&p, 64 * sizeof *p, first) == cudaSuccess);
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    EXPECT(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal) == cudaSuccess);
    EXPECT(cudaMemsetAsync(p, 0, 64 * sizeof *p, first) == cudaSuccess);
    EXPECT(cudaEventRecord(begin, first) == cudaSuccess);
    EXPECT(cudaStreamWaitEvent(second, begin, 0) == cudaSuccess);
    fill_shared<<<1, 64, 64 * sizeof *p, second>>>(p);
    EXPECT(cudaStreamEndCapture(first, &graph) == cudaSuccess);
    EXPECT(cudaMemset(p, 0xff, 64 * sizeof *p) == cudaSuccess);
    EXPECT(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
    EXPECT(cudaMemcpy(value, p, sizeof value, cudaMemcpyDeviceToHost) == cudaSuccess);
    EXPECT(value[0] == -1);
    EXPECT(cudaGraphLaunch(executable, first) == cudaSuccess);
    EXPECT(cudaMemcpyAsync(value, p, sizeof value, cudaMemcpyDeviceToHost, first) == cudaSuccess);
    EXPECT(cudaStreamSynchronize(first) == cudaSuccess && value[0] == 63 && value[1] == 62);
    EXPECT(cudaGraphExecDestroy(executable) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
    float milliseconds = -1;
    EXPECT(cudaEventRecord(begin) == cudaSuccess && cudaEventRecord(end) == cudaSuccess);
    EXPECT(cudaEventSynchronize(end) == cudaSuccess);
    EXPECT(cudaEventElapsedTime(&milliseconds, begin, end) == cudaSuccess && milliseconds >= 0);
    EXPECT(cudaFreeAsync(p, first) == cudaSuccess && cudaStreamDestroy(first) == cudaSuccess);
    EXPECT(cudaStreamDestroy(second) == cudaSuccess);
}

static void shapes_and_attributes() {
    unsigned *ranks, got[8];
    EXPECT(cudaHostAlloc(&ranks, sizeof got, cudaHostAllocMapped) == cudaSuccess);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {4, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = 8, config.blockDim = 32, config.attrs = &attribute, config.numAttrs = 1;
    EXPECT(cudaLaunchKernelEx(&config, rank_in_cluster, ranks) == cudaSuccess);
    EXPECT(ranks[3] == 3 && ranks[4] == 0 && ranks[7] == 3);
    config.gridDim = 6;
    EXPECT(cudaLaunchKernelEx(&config, rank_in_cluster, ranks) == cudaErrorInvalidClusterSize);
    cudaFuncAttributes facts;
    EXPECT(cudaFuncGetAttributes(&facts, fill_shared) == cudaSuccess);
    EXPECT(facts.maxThreadsPerBlock == 1024 && facts.sharedSizeBytes == 0);
    fill_shared<<<1, 64, 100000>>>(nullptr);
    EXPECT(cudaGetLastError() == cudaErrorInvalidValue);
    auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    EXPECT(cudaFuncSetAttribute(fill_shared, limit, 100000) == cudaSuccess);
    EXPECT(cudaFuncSetAttribute(fill_shared, limit, 300000) == cudaErrorInvalidValue);
    int blocks = 0, grid = 0, block = 0;
    EXPECT(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fill_shared, 64, 100000) ==
           cudaSuccess);
    EXPECT(blocks == 2);
    EXPECT(cudaOccupancyMaxPotentialBlockSize(&grid, &block, axpy) == cudaSuccess && block == 1024);
    fill_shared<<<dim3(1, 70000), 64>>>(nullptr);
    EXPECT(cudaGetLastError() == cudaErrorInvalidValue);
    fill_shared<<<0, 64>>>(nullptr);
    EXPECT(cudaGetLastError() == cudaErrorInvalidConfiguration);
    unsigned *numbers;
    EXPECT(cudaMallocManaged(&numbers, 5 * sizeof *numbers) == cudaSuccess);
    memset(numbers, 0, 5 * sizeof *numbers);
    unsigned *seen = numbers + 1;
    void *arguments[] = {&numbers, &seen};
    EXPECT(cudaLaunchCooperativeKernel(meet, 4, 32, arguments, 0, nullptr) == cudaSuccess);
    EXPECT(numbers[0] == 4 && numbers[1] == 4 && numbers[4] == 4);
    EXPECT(cudaLaunchCooperativeKernel(meet, 100000, 1024, arguments, 0, nullptr) ==
           cudaErrorCooperativeLaunchTooLarge);
    cudaTextureObject_t texture;
    EXPECT(cudaCreateTextureObject(&texture, nullptr, nullptr, nullptr) == cudaErrorNotSupported);
    cudaGetLastError();
    cudaDeviceProp device;
    EXPECT(cudaGetDeviceProperties(&device, 0) == cudaSuccess && device.major == 9);
    EXPECT(device.multiProcessorCount == 132 && device.sharedMemPerBlockOptin == 232448);
    EXPECT(device.maxGridSize[1] == 65535 && !strcmp(device.name, "ptxemu sm_90a"));
    EXPECT(cudaGetDeviceProperties(&device, 1) == cudaErrorInvalidDevice);
    cudaGetLastError();
}

int main() {
    memory_and_symbols();
    streams_and_graphs();
    shapes_and_attributes();
    greet<<<1, 32>>>(1);
    printf("before the greeting\n");
    EXPECT(cudaDeviceSynchronize() == cudaSuccess);
    int *p;
    EXPECT(cudaMalloc(&p, 4) == cudaSuccess);
    outside<<<1, 1>>>(p);
    EXPECT(cudaGetLastError() == cudaSuccess || cudaGetLastError() == cudaErrorIllegalAddress);
    EXPECT(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
    EXPECT(cudaMalloc(&p, 4) == cudaErrorIllegalAddress);
    printf("%d broken\ndone\n", broken);
    return broken != 0;
}
