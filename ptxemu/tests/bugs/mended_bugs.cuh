// What the programs of mended_bugs.cu and mended_bugs_sm100.cu have in common.
//
// KERNEL(name) makes two kernels, `name` with the fault and `name_mended`. x holds 1024 numbers
// below 512 of which 64 to 127 are zero, and zeros behind; nobody has written out.
#pragma once

#define KERNEL(name) \
  template <bool mended> __device__ void name##_body(int *x, int *out, int t); \
  extern "C" __global__ void name(int *x, int *out) { \
    name##_body<false>(x, out, threadIdx.x); \
  } \
  extern "C" __global__ void name##_mended(int *x, int *out) { \
    name##_body<true>(x, out, threadIdx.x); \
  } \
  template <bool mended> __device__ void name##_body(int *x, int *out, int t)
#define SHARED(n) __shared__ alignas(1024) int s[n]
#define ALL 0xffffffffu
typedef unsigned long long Barrier;

__device__ unsigned at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init(Barrier *b, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(b)), "r"(count) : "memory");
}
__device__ void fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ void arrive(Barrier *b) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at(b)) : "memory");
}
__device__ void expect(Barrier *b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at(b)), "r"(bytes)
               : "memory");
}
__device__ void wait(Barrier *b, int parity) {
  asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, "
               "[%0], %1; @!p bra W; }" ::"r"(at(b)), "r"(parity) : "memory");
}
__device__ void load(void *to, const void *from, int bytes, Barrier *b) {
  expect(b, bytes);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
               "[%3];" ::"r"(at(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(at(b))
               : "memory");
}
__device__ void store(void *to, const void *from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               "cp.async.bulk.commit_group;" ::"l"(__cvta_generic_to_global(to)), "r"(at(from)),
               "r"(bytes) : "memory");
}
__device__ void wait_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ int rank() {
  int value;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
}
__device__ unsigned peer(const void *p, int rank) {
  unsigned value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(value) : "r"(at(p)), "r"(rank));
  return value;
}
__device__ int peek(unsigned address) {
  int value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ int add_up(int value) {
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(ALL, value, d);
  return value;
}
