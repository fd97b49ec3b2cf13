// Faults of public repositories in Blackwell kernels: see mended_bugs.cu.
#include "mended_bugs.cuh"

// tilelang 2699: st.bulk clears what other threads still read
KERNEL(tilelang_2699) {
  SHARED(64);
  s[t] = x[t];
  __syncthreads();
  int value = s[63 - t];
  if (mended) __syncthreads();
  if (t == 0) asm volatile("st.bulk.weak.shared::cta [%0], 256, 0;" ::"r"(at(s)) : "memory");
  __syncthreads();
  out[t] = value + s[t];
}

__device__ void allocate(unsigned *to) {
  asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], 32;" ::"r"(at(to))
               : "memory");
}
__device__ void free_all(unsigned columns) {
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, 32;" ::"r"(columns) : "memory");
}
__device__ void before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ void after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// CUTLASS 3316: a pair allocates tensor memory before both CTAs are known to run
KERNEL(cutlass_3316) {
  __shared__ unsigned columns;
  if (mended) cluster_sync();
  allocate(&columns);
  __syncwarp();
  unsigned mine = columns;
  before_sync();
  cluster_sync();
  after_sync();
  free_all(mine);
  out[32 * rank() + t] = x[t] + mine;
}

// A pair of CTAs: each has a half of the scales in its shared memory, and the leader copies both to
// tensor memory.
template <bool by_copy, bool mended> __device__ void copy_scales(int *x, int *out, int t) {
  SHARED(128);
  __shared__ Barrier full, loaded, copied;
  __shared__ unsigned columns;
  if (t == 0) init(&full, 1), init(&loaded, 1), init(&copied, 1), fence_init();
  cluster_sync();
  allocate(&columns);
  __syncwarp();
  unsigned to = columns, left = peer(&loaded, 0);
  if (by_copy) {
    if (t == 0) load(s, x + 128 * rank(), 512, &full);
    if (mended || rank() == 0) wait(&full, 0);
  } else {
    for (int i = t; i < 128; i += 32) s[i] = x[128 * rank() + i];
    fence_async();
    __syncwarp();
  }
  if (t == 0 && rank() == 1 && mended)
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(left)
                 : "memory");
  if (t == 0 && rank() == 1 && !mended && !by_copy)
    asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(left) : "memory");
  if (t == 0 && rank() == 0) {
    if (mended || !by_copy) wait(&loaded, 0);
    unsigned long long from = (at(s) >> 4) | 1ull << 16 | 8ull << 32 | 1ull << 46;
    after_sync();
    asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from)
                 : "memory");
    asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
                 ".multicast::cluster.b64 [%0], %1;" ::"r"(at(&copied)), "h"((short)3) : "memory");
  }
  __syncwarp();
  wait(&copied, 0);
  after_sync();
  int4 v;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%0, %1, %2, %3}, [%4];"
               "tcgen05.wait::ld.sync.aligned;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(to) : "memory");
  before_sync();
  cluster_sync();
  after_sync();
  free_all(to);
  ((int4 *)out)[32 * rank() + t] = v;
}

// CUTLASS 3643: the leader copies a half that the peer has not waited for
KERNEL(cutlass_3643_wait) {
  copy_scales<true, mended>(x, out, t);
}

// CUTLASS 3643: the arrival that tells of the peer's half has CTA scope
KERNEL(cutlass_3643_scope) {
  copy_scales<false, mended>(x, out, t);
}
