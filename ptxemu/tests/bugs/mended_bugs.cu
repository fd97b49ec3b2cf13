// Faults of public repositories, each as a program of our own, before and after its fix. The line
// above a kernel names the repository with the number of its fix or report, and the fault.
#include <mma.h>

#include "mended_bugs.cuh"

// Shared memory between warps.

// llama.cpp 13742: a warp that skips its tile writes the mask that others still read
KERNEL(llamacpp_13742) {
  SHARED(64);
  int sum = 0;
  for (int k = 0; k < 4; ++k) {
    s[t] = x[64 * k + t];
    __syncthreads();
    bool skip = __all_sync(ALL, s[t & 31] == 0 && s[t | 32] == 0);
    if (mended) __syncthreads();
    if (skip) continue;
    sum += s[63 - t];
    __syncthreads();
  }
  out[t] = sum;
}

// llama.cpp 24360: the next step's B and C are written while this one's are read
KERNEL(llamacpp_24360) {
  __shared__ int b[16], c[16];
  int state = 0;
  for (int k = 0; k < 3; ++k) {
    if (t < 16) b[t] = x[128 * k + t];
    else if (t < 32) c[t - 16] = x[128 * k + t];
    __syncthreads();
    for (int n = 0; n < 16; ++n) state += b[n] * c[n];
    if (mended) __syncthreads();
  }
  out[t] = state + t;
}

// popsift 82: the total is added to before every thread has read it
KERNEL(popsift_82) {
  __shared__ int total;
  if (t == 0) total = 0;
  __syncthreads();
  int sum = 0;
  for (int k = 0; k < 3; ++k) {
    sum = 10 * sum + total;
    if (mended) __syncthreads();
    if (t == 63) total += x[128 * k + t];
    __syncthreads();
  }
  out[t] = sum;
}

// GPUJPEG 23: a counter is read behind atomic additions, without a barrier
KERNEL(gpujpeg_23) {
  __shared__ int count;
  if (t == 0) count = 0;
  __syncthreads();
  if (x[t] > 200) atomicAdd(&count, 1);
  if (mended) __syncthreads();
  out[t] = count;
}

// HeCBench 253: tiles without a barrier behind their use
KERNEL(hecbench_253) {
  SHARED(64);
  int sum = 0;
  for (int k = 0; k < 3; ++k) {
    s[t] = x[128 * k + t];
    __syncthreads();
    for (int i = 0; i < 64; i += 16) sum += s[(t + i) & 63];
    if (mended) __syncthreads();
  }
  out[t] = sum;
}

// HeCBench 254: one thread writes what all read at once
KERNEL(hecbench_254) {
  __shared__ volatile int sums[32];
  if (t == 63) sums[31] = x[t];
  if (mended) __syncthreads();
  out[t] = sums[31] + x[t];
}

// zprize-GPU-MSM-harness 1: one barrier in a loop of writes and reads
KERNEL(pippenger_is_unique) {
  SHARED(64);
  int same = 0;
  for (int k = 0; k < 3; ++k) {
    s[t] = x[128 * k + t] & 3;
    __syncthreads();
    for (int i = 0; i < 64; ++i) same += i != t && s[i] == s[t];
    if (mended) __syncthreads();
  }
  out[t] = same;
}

// FlashInfer 636: 16 bytes a thread behind six floats
KERNEL(flashinfer_636) {
  SHARED(8 + 128);
  int4 *vectors = (int4 *)(s + (mended ? 8 : 6) + (x[700] & 4));
  vectors[t] = ((int4 *)x)[t];
  __syncthreads();
  out[t] = vectors[31 - t].x;
}

// Lanes of one warp.

// llama.cpp 28475: a reduction by shuffles between a store and others' reads
KERNEL(llamacpp_28475) {
  SHARED(32);
  s[31 - t] = x[t];
  int sum = add_up(t);
  if (mended) __syncwarp();
  out[t] = s[t] + sum;
}

// raft 679: a warp's queue, without a barrier
KERNEL(raft_679) {
  SHARED(64);
  s[t] = x[t];
  if (mended) __syncwarp();
  out[t] = s[t ^ 1];
}

// ccminer 75: rounds of a hash in which lanes exchange words in place
KERNEL(ccminer_75) {
  SHARED(32);
  s[t] = x[t];
  __syncwarp();
  for (int k = 1; k < 4; ++k) {
    int value = s[(t + k) & 31];
    if (mended) __syncwarp();
    s[t] = value + k;
    if (mended) __syncwarp();
  }
  out[t] = s[t];
}

// tilelang 1257: lane 0 writes what its warp reads
KERNEL(tilelang_1257) {
  SHARED(2);
  if ((t & 31) == 0) s[t / 32] = x[t];
  if (mended) __syncwarp();
  out[t] = s[t / 32] + t;
}

// cudf 2983: a copy of the output that the literal before it wrote
KERNEL(cudf_2983) {
  out[t] = x[t];
  if (mended) __syncwarp();
  out[32 + t] = out[31 - t];
}

// colibri 1099: a matrix that wmma stores, read by other lanes
KERNEL(colibri_1099) {
  using namespace nvcuda::wmma;
  __shared__ alignas(32) float tile[256];
  fragment<accumulator, 16, 16, 16, float> sums;
  for (int i = 0; i < sums.num_elements; ++i) sums.x[i] = (float)x[600] + 2;
  store_matrix_sync(tile, sums, 16, mem_row_major);
  if (mended) __syncwarp();
  int sum = 0;
  for (int i = t; i < 256; i += 32) sum += (int)tile[i];
  out[t] = sum;
}

// Kokkos 4855: lane 0 assigns its value to itself while others read it
KERNEL(kokkos_4855) {
  __shared__ volatile int values[32];
  volatile int *value = values + t;
  *value = x[t];
  __syncwarp();
  for (int d = 1; d < 32; d *= 2) {
    int other = t + d < 32 ? value[d] : 0;
    __syncwarp();
    *value = *value + other;
    __syncwarp();
  }
  if (!mended || t != 0) *value = *(value - t);
  out[t] = *value;
}

// Kokkos 1958: masks that name the next group's lanes
KERNEL(kokkos_1958) {
  unsigned mask = 0xffu << ((t / 8 * 8 + (mended ? 0 : 8)) & 31);
  int value = x[t];
  for (int d = 4; d > 0; d /= 2) value += __shfl_xor_sync(mask, value, d, 8);
  out[t] = value;
}

// cuCollections 337: a vote in place of a barrier
KERNEL(cucollections_337) {
  SHARED(32);
  s[t] = x[t];
  bool any = __any_sync(ALL, x[t] > 900);
  if (mended) __syncwarp();
  out[t] = s[t ^ 16] + any;
}

// vilib 5: a shuffle of the whole warp, which half of it does not reach
KERNEL(vilib_5) {
  SHARED(32);
  int value = x[t];
  if (t < 16) value += __shfl_xor_sync(mended ? 0xffffu : ALL, value, 8);
  else s[t] = value;
  __syncwarp();
  out[t] = t < 16 ? value : s[47 - t];
}

// Blocks.

// PyTorch 128455: the last block reads partial sums without a fence
KERNEL(pytorch_128455) {
  __shared__ bool is_last;
  x[512 + 64 * blockIdx.x + t] = x[64 * blockIdx.x + t] + 1;
  __threadfence();
  __syncthreads();
  if (t == 0) {
    is_last = atomicAdd(x + 700, 1) == 1;
    if (mended) __threadfence();
  }
  __syncthreads();
  if (is_last) out[t] = x[512 + t] + x[576 + t];
}

// Fuser 2391: a semaphore is released without a fence
KERNEL(fuser_2391) {
  if (blockIdx.x == 0) {
    x[512 + t] = x[t];
    __syncthreads();
    if (mended && t == 0) __threadfence();
    if (t == 0) atomicExch(x + 700, 1);
  } else {
    if (t == 0) while (atomicAdd(x + 700, 0) == 0) {}
    if (t == 0) __threadfence();
    __syncthreads();
    out[t] = x[512 + t];
  }
}

// gunrock 829: a plain look at a label that other blocks raise by atomics
KERNEL(gunrock_829) {
  int label = x[64 * blockIdx.x + t] + 1;
  int *to = x + 512 + t;
  int now = mended ? atomicAdd(to, 0) : *to;
  if (now < label) atomicMax(to, label);
}

// QMCPACK 2876: zero times an output that nobody has written
KERNEL(qmcpack_2876) {
  float beta = (float)x[600], *c = (float *)out, sum = (float)x[t];
  c[t] = mended && beta == 0 ? sum : sum + beta * c[t];
}

// Writes, and lets the next launch begin.
KERNEL(cccl_5456_before) {
  x[512 + t] = x[t] + 1;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// CCCL 5456: reads what the launch before writes, and waits for it then
KERNEL(cccl_5456) {
  int value;
  if (!mended) value = x[512 + t];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (mended) value = x[512 + t];
  out[t] = value;
}

// Asynchronous copies.

// TransformerEngine 3417: only the leader waits for its copy
KERNEL(transformerengine_3417) {
  SHARED(64);
  for (int k = 0; k < 2; ++k) {
    s[t] = x[128 * k + t];
    fence_async();
    __syncthreads();
    if (t == 0) store(out + 64 * k, s, 256);
    if (t == 0) wait_read();
    if (mended) __syncthreads();
  }
  if (t == 0) wait_stored();
}

// TransformerEngine 2695: no proxy fence between reads and the next copy
KERNEL(transformerengine_2695) {
  SHARED(64);
  __shared__ Barrier full;
  if (t == 0) init(&full, 1);
  if (t == 0) fence_init();
  __syncthreads();
  int sum = 0;
  for (int k = 0; k < 2; ++k) {
    if (t == 0) load(s, x + 128 * k, 256, &full);
    wait(&full, k & 1);
    sum += s[63 - t];
    if (mended) fence_async();
    __syncthreads();
  }
  out[t] = sum;
}

// DeepEP 642: a flag that threads poll, then a bulk copy
KERNEL(deepep_642) {
  SHARED(64);
  __shared__ Barrier full;
  if (blockIdx.x == 1) {
    x[512 + t] = x[t];
    __threadfence();
    __syncthreads();
    if (t == 0) atomicExch(x + 700, 1);
    return;
  }
  if (t == 0) {
    init(&full, 1);
    fence_init();
    while (atomicAdd(x + 700, 0) == 0) {}
    __threadfence();
    if (mended) fence_async();
    load(s, x + 512, 256, &full);
  }
  __syncthreads();
  wait(&full, 0);
  out[t] = s[t];
}

// tilelang 3087: the parity of the phase before
KERNEL(tilelang_3087) {
  SHARED(64);
  __shared__ Barrier full;
  if (t == 0) init(&full, 1);
  if (t == 0) fence_init();
  __syncthreads();
  int sum = 0;
  for (int k = 0; k < 2; ++k) {
    if (t == 0) load(s, x + 128 * k, 256, &full);
    wait(&full, mended ? k : 1 - k);
    sum += s[63 - t];
    fence_async();
    __syncthreads();
  }
  out[t] = sum;
}

// Triton 10035: the leader frees a slot before its group has seen the phase
KERNEL(triton_10035) {
  __shared__ int slot;
  __shared__ Barrier full, empty;
  if (t == 0) init(&full, 1), init(&empty, 1);
  __syncthreads();
  if (t >= 64) {
    for (int k = 0; k < 3 && t == 64; ++k) {
      if (k > 0) wait(&empty, 1 - (k & 1));
      slot = x[k];
      arrive(&full);
    }
    return;
  }
  int sum = 0;
  for (int k = 0; k < 3; ++k) {
    wait(&full, k & 1);
    if (mended) {
      sum += slot;
      asm volatile("bar.sync 1, 64;" ::: "memory");
    }
    if (t == 0) arrive(&empty);
  }
  out[t] = mended ? sum : 0;
}

// FlashKDA 24: no fence between an mbarrier's initialisation and the copy
KERNEL(flashkda_24) {
  SHARED(64);
  __shared__ Barrier full;
  if (t == 0) init(&full, 1);
  if (mended && t == 0) fence_init();
  __syncthreads();
  if (t == 0) load(s, x, 256, &full);
  wait(&full, 0);
  out[t] = s[t];
}

// csarofeen/pytorch 2457: the group is committed behind the wait
KERNEL(csarofeen_2457) {
  SHARED(64);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at(s + t)), "l"(x + t) : "memory");
  if (mended) asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (!mended) asm volatile("cp.async.commit_group;" ::: "memory");
  __syncthreads();
  out[t] = s[63 - t];
}

// mKernel 18: a load into a tile whose store still reads it
KERNEL(mkernel_18) {
  SHARED(64);
  __shared__ Barrier full;
  s[t] = x[t] + 1;
  if (t == 0) init(&full, 1);
  if (t == 0) fence_init();
  fence_async();
  __syncthreads();
  if (t == 0) {
    store(out, s, 256);
    if (mended) wait_read();
    load(s, x + 128, 256, &full);
  }
  wait(&full, 0);
  out[64 + t] = s[t];
  if (t == 0) wait_stored();
}

// Fuser 3865: one warp's wait for the warpgroup's product, then a copy into its operand
KERNEL(fuser_3865) {
  SHARED(2048);
  __shared__ Barrier full;
  for (int i = t; i < 2048; i += 128) s[i] = 0x3c003c00;
  if (t == 0) init(&full, 1);
  if (t == 0) fence_init();
  fence_async();
  __syncthreads();
  unsigned long long a = (at(s) >> 4) | 8ull << 16 | 16ull << 32;
  unsigned long long b = (at(s + 1024) >> 4) | 8ull << 16 | 16ull << 32;
  float d[4];
  asm volatile("wgmma.fence.sync.aligned;"
               "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, 0, 1, 1, "
               "0, 0; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "l"(a), "l"(b) : "memory");
  if (mended) __syncthreads();
  if (t == 0) load(s, x, 256, &full);
  wait(&full, 0);
  out[t] = (int)d[0];
}

// Clusters.

// Triton 10656: a CTA exits while its peer reads its shared memory
KERNEL(triton_10656) {
  SHARED(64);
  s[t] = x[64 * rank() + t] + 1;
  cluster_sync();
  out[64 * rank() + t] = peek(peer(s + t, 1 - rank()));
  if (mended) cluster_sync();
}

// Triton 11731: the peer tells that it has read, and nobody waits for that
KERNEL(triton_11731) {
  SHARED(64);
  __shared__ Barrier done;
  s[t] = x[t];
  if (t == 0) init(&done, 64);
  if (t == 0) fence_init();
  cluster_sync();
  if (rank() == 1) {
    out[t] = peek(peer(s + t, 0));
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                     peer(&done, 0)) : "memory");
  } else if (mended) {
    wait(&done, 0);
  }
}

// facebookexperimental/triton 2292: a store into a peer that may not have started
KERNEL(tlx_2292) {
  SHARED(64);
  if (mended) cluster_sync();
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(peer(s + t, 1 - rank())),
               "r"(x[64 * rank() + t] + 1) : "memory");
  cluster_sync();
  out[64 * rank() + t] = s[t];
}
