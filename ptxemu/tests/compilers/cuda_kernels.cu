// Kernels in CUDA C++ that lean on what nvcc makes of the language: record.py compiles them.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <mma.h>

namespace cg = cooperative_groups;
using namespace nvcuda;

// Tiles of a cooperative group: a reduction and a scan of each warp.
extern "C" __global__ void tile_sums(const int *x, int *sums, int *scans) {
  auto block = cg::this_thread_block();
  auto tile = cg::tiled_partition<32>(block);
  int value = x[block.thread_rank()];
  int sum = cg::reduce(tile, value, cg::plus<int>());
  scans[block.thread_rank()] = cg::inclusive_scan(tile, value);
  if (tile.thread_rank() == 0) sums[tile.meta_group_rank()] = sum;
}

// Every CTA waits for all others, twice.
extern "C" __global__ void grid_barriers(int *counter, int *seen) {
  auto grid = cg::this_grid();
  atomicAdd(counter, 1);
  grid.sync();
  seen[grid.thread_rank()] = *(volatile int *)counter;
  grid.sync();
  if (grid.thread_rank() == 0) *counter = 1000;
  grid.sync();
  seen[grid.thread_rank()] += *(volatile int *)counter;
}

// Memory from the device's heap, handed on through shared memory.
extern "C" __global__ void device_heap(int *out) {
  __shared__ int *pieces[32];
  int *own = (int *)malloc(8);
  own[0] = threadIdx.x;
  own[1] = own[0] * own[0];
  pieces[threadIdx.x] = own;
  __syncthreads();
  int *other = pieces[31 - threadIdx.x];
  out[threadIdx.x] = other[0] + other[1];
  __syncthreads();
  free(own);
}

// A fragment of D is scaled element by element between the product and the store.
extern "C" __global__ void fragments(const half *a, const half *b, float *d) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a_part;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> b_part;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> d_part;
  wmma::fill_fragment(d_part, 1.0f);
  for (int k = 0; k < 32; k += 16) {
    wmma::load_matrix_sync(a_part, a + k, 32);
    wmma::load_matrix_sync(b_part, b + k, 32);
    wmma::mma_sync(d_part, a_part, b_part, d_part);
  }
  for (int i = 0; i < d_part.num_elements; ++i) d_part.x[i] *= 2;
  wmma::store_matrix_sync(d, d_part, 16, wmma::mem_col_major);
}

__constant__ float coefficients[4];
__device__ int launches;

// A table branch, and module variables that the host sets and reads.
extern "C" __global__ void choices(const int *which, float *x) {
  float value = x[threadIdx.x];
  switch (which[threadIdx.x]) {
    case 0: value = coefficients[1] * value; break;
    case 1: value = value + coefficients[2]; break;
    case 2: value = coefficients[3] - value; break;
    case 3: value = value * value; break;
    case 4: value = -value; break;
    case 5: value = coefficients[0] / value; break;
    default: printf("%d: no choice %d\n", threadIdx.x, which[threadIdx.x]);
  }
  x[threadIdx.x] = value;
  if (threadIdx.x == 0) atomicAdd(&launches, 1);
}
