// Correct programs of common idioms. x holds 512 numbers below 512, and zeros behind; nobody has
// written out.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda/pipeline>
#include <mma.h>

#include "mended_bugs.cuh"

namespace cg = cooperative_groups;
#define IDIOM(name) extern "C" __global__ void name(int *x, int *out)
#define T int t = threadIdx.x, lane = t & 31, block = blockIdx.x
#define LOOK(p) (*(volatile int *)(p))

// Lanes of one warp.

// One lane produces, the others consume: they meet at barriers of loops of their own.
IDIOM(warp_roles) {
  T;
  SHARED(1);
  int sum = 0;
  if (t == 0) {
    for (int k = 0; k < 5; ++k) {
      s[0] = x[k];
      __syncwarp();
      __syncwarp();
    }
  } else {
    for (int k = 0; k < 5; ++k) {
      __syncwarp();
      sum += s[0];
      __syncwarp();
    }
  }
  out[t] = sum;
}

// A half of a warp meets, and one of its lanes publishes what all of them wrote.
IDIOM(half_publishes) {
  T;
  SHARED(32);
  __shared__ volatile int flag;
  if (t == 0) flag = 0;
  __syncthreads();
  if (t < 16) {
    s[t] = x[t];
    __syncwarp(0xffff);
    if (t == 3) {
      __threadfence_block();
      flag = 1;
    }
  } else if (t >= 32) {
    if (t == 40) {
      while (!flag) {}
      __threadfence_block();
    }
    __syncwarp();
    out[lane] = t < 48 ? s[47 - t] : 0;
  }
}

// Groups of a branch and of labels: staging, one atomic for all.
IDIOM(groups) {
  T;
  SHARED(32);
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  if (x[t] & 1) {
    auto odd = cg::coalesced_threads();
    s[odd.thread_rank()] = x[t];
    odd.sync();
    int other = s[odd.size() - 1 - odd.thread_rank()], at = 0;
    if (odd.thread_rank() == 0) at = atomicAdd(x + 600, odd.size());
    out[32 + odd.shfl(at, 0) + odd.thread_rank()] = other;
  }
  warp.sync();
  auto alike = cg::labeled_partition(warp, x[t] % 3);
  s[t] = x[t];
  alike.sync();
  int leader = alike.shfl(t, 0);
  out[t] = s[leader] + cg::reduce(alike, 1, cg::plus<int>());
}

// What wmma stores is the next product's operand; the tile is used again.
IDIOM(staged_products) {
  T;
  using namespace nvcuda::wmma;
  __shared__ alignas(32) half tile[256];
  fragment<matrix_a, 16, 16, 16, half, row_major> a;
  fragment<matrix_b, 16, 16, 16, half, row_major> ones;
  fragment<accumulator, 16, 16, 16, half> sums;
  fill_fragment(ones, __float2half(1.f / 16));
  for (int i = lane; i < 256; i += 32) tile[i] = __int2half_rn(x[i / 16]);
  for (int k = 0; k < 2; ++k) {
    __syncwarp();
    load_matrix_sync(a, tile, 16);
    fill_fragment(sums, __float2half(1));
    mma_sync(sums, a, ones, sums);
    __syncwarp();
    store_matrix_sync(tile, sums, 16, mem_row_major);
  }
  __syncwarp();
  out[t] = __half2int_rn(tile[8 * t]);
}

// Shuffles of all lanes in both arms of a branch, which CUDA's guide has as valid since Volta.
IDIOM(both_arms) {
  T;
  int value = x[t];
  if (t < 16) {
    SHARED(16);
    s[t] = value;
    out[t] = __shfl_xor_sync(ALL, s[t] + 1, 16);
  } else {
    out[t] = 3 * __shfl_xor_sync(ALL, 2 * value, 16);
  }
}

// Padding goes along with its struct, and what is not used of an array.
struct Small { char c; int value; short s; };
struct Large { double key; int value; };
struct alignas(16) List { int count, items[6]; };
IDIOM(structs) {
  T;
  __shared__ Small small[32];
  __shared__ Large large[32];
  __shared__ List lists[32];
  Small *from = (Small *)(out + 64), *to = from + 32;
  Large *sorted = (Large *)(out + 512);
  List *kept = (List *)(out + 640);
  from[t].c = 'a', from[t].value = x[t], from[t].s = 3;
  small[31 - t] = from[t];
  large[31 - t].key = t, large[31 - t].value = x[32 + t];
  lists[t].count = t % 5;
  for (int i = 0; i < t % 5; ++i) lists[t].items[i] = x[t];
  __syncwarp();
  to[t] = small[t];
  sorted[t] = large[t];
  kept[t] = lists[t];
  out[t] = to[t].value + sorted[t].value + (kept[t].count > 0 ? kept[t].items[0] : 0);
}

// Blocks.

// Producer and consumer by cuda::pipeline, with copies.
IDIOM(pipeline) {
  T;
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
  __shared__ int s[2][32];
  auto role = t < 32 ? cuda::pipeline_role::producer : cuda::pipeline_role::consumer;
  auto pipe = cuda::make_pipeline(cg::this_thread_block(), &state, role);
  int sum = 0;
  for (int k = 0; k < 6; ++k) {
    if (t < 32) {
      pipe.producer_acquire();
      cuda::memcpy_async(&s[k % 2][lane], x + 32 * k + lane, sizeof(int), pipe);
      pipe.producer_commit();
    } else {
      pipe.consumer_wait();
      sum += s[k % 2][31 - lane];
      pipe.consumer_release();
    }
  }
  if (t >= 32) out[lane] = sum;
}

// The grid.

// Look-back: flags beside values, a warp looks at 32 blocks at once.
IDIOM(look_back) {
  T;
  int *flags = x + 512, *partial = x + 520, *prefix = x + 528, value = x[32 * block + t], sum = 0;
  for (int d = 1; d < 32; d *= 2) {
    int other = __shfl_up_sync(ALL, value, d);
    if (t >= d) value += other;
  }
  int total = __shfl_sync(ALL, value, 31);
  if (t == 0 && block > 0) {
    LOOK(partial + block) = total;
    __threadfence();
    LOOK(flags + block) = 1;
  }
  for (int last = -1; block > 0 && last < 0;) {
    int p = block - 1 - t, flag = 2, seen = 0;
    if (p >= 0) {
      while ((flag = LOOK(flags + p)) == 0) {}
      __threadfence();
      seen = LOOK((flag == 2 ? prefix : partial) + p);
    }
    last = __ffs(__ballot_sync(ALL, flag == 2)) - 1;
    sum += __reduce_add_sync(ALL, t <= last ? seen : 0);
  }
  if (t == 0) {
    LOOK(prefix + block) = sum + total;
    __threadfence();
    LOOK(flags + block) = 2;
  }
  out[32 * block + t] = sum + value;
}

// The last block, as in CUDA's example: the sum overwrites a block's partial one.
IDIOM(last_block) {
  T;
  __shared__ bool last;
  volatile int *result = out;
  int sum = __reduce_add_sync(ALL, x[32 * block + t]);
  if (t == 0) {
    result[block] = sum;
    __threadfence();
    last = atomicInc((unsigned *)x + 600, gridDim.x) == gridDim.x - 1;
  }
  __syncthreads();
  if (last) {
    sum = __reduce_add_sync(ALL, t < gridDim.x ? result[t] : 0);
    if (t == 0) result[0] = sum;
  }
}

// NCCL's lines of data beside flags; and data that are their own flag.
IDIOM(data_with_flags) {
  T;
  int *line = x + 512 + 4 * t, *word = x + 700 + t;
  if (block == 0) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(line), "r"(x[t]), "r"(7),
                 "r"(x[32 + t]) : "memory");
    LOOK(word) = x[64 + t];
  } else {
    int a, b, c, flag, other;
    do asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                    : "=r"(a), "=r"(flag), "=r"(b), "=r"(other) : "l"(line) : "memory");
    while (flag != 7 || other != 7);
    while ((c = LOOK(word)) == 0) {}
    out[t] = a + b + c;
  }
}

// A warp's lanes poll a block each, and vote.
IDIOM(polled_by_a_warp) {
  T;
  int *data = out + 64, sum = 0;
  if (block < 3) {
    data[32 * block + t] = x[32 * block + t];
    __syncwarp();
    if (t == 0) {
      __threadfence();
      LOOK(x + 600 + block) = 1;
    }
  } else {
    while (!__all_sync(ALL, t < 3 ? LOOK(x + 600 + t) : 1)) {}
    __threadfence();
    __syncwarp();
    for (int k = 0; k < 3; ++k) sum += data[32 * k + 31 - t];
    out[t] = sum;
  }
}

// One warp waits for the launch before, and hands on what that wrote.
IDIOM(one_warp_waits_before) {
  T;
  x[512 + 64 * block + t] = x[64 * block + t] + 1;
  cudaTriggerProgrammaticLaunchCompletion();
}
IDIOM(one_warp_waits) {
  T;
  SHARED(32);
  int own = x[64 * block + t];
  if (t < 32) {
    cudaGridDependencySynchronize();
    s[t] = x[512 + 64 * block + t];
  }
  __syncthreads();
  out[64 * block + t] = own + s[31 - lane] + x[544 + 64 * block + lane];
}

// Clusters.

// The first CTA gathers; it alone waits, and the others may exit.
IDIOM(gathered) {
  T;
  __shared__ int s[4][32];
  __shared__ Barrier full;
  if (t == 0) init(&full, 128), fence_init();
  cluster_sync();
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(peer(&s[rank()][t], 0)),
               "r"(x[32 * rank() + t]) : "memory");
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                   peer(&full, 0)) : "memory");
  if (rank() > 0) return;
  wait(&full, 0);
  out[t] = s[0][t] + s[1][31 - t] + s[2][t] + s[3][31 - t];
}
