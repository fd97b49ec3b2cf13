/* A launch of many CTAs that takes days in an emulator; says when it is about to begin. */
#include <stdint.h>
#include <stdio.h>

int cuInit(unsigned), cuCtxCreate_v2(void **, unsigned, int), cuModuleLoadData(void **, const void *);
int cuModuleGetFunction(void **, void *, const char *), cuMemAlloc_v2(uint64_t *, size_t);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void *, void **, void **);
int cuCtxSynchronize(void);

static const char *ptx =
    ".version 8.0\n.target sm_90\n.address_size 64\n"
    ".visible .entry endless(.param .u64 x) {\n"
    ".reg .b32 %r<6>; .reg .b64 %rd<4>; .reg .pred %p;\n"
    "ld.param.u64 %rd0, [x]; mov.u32 %r0, %ctaid.x; mov.u32 %r4, 0;\n"
    "mul.wide.u32 %rd1, %r0, 4; add.s64 %rd2, %rd0, %rd1;\n"
    "st.global.u32 [%rd0+2048], %r0;\n"  // a race of the CTAs
    "LOOP: add.u32 %r4, %r4, 1; bar.sync 0; st.global.u32 [%rd2], %r4;\n"
    "setp.lt.u32 %p, %r4, 1000000000; @%p bra LOOP; ret; }\n";

int main(void) {
    void *context, *module, *function;
    uint64_t x;
    void *arguments[] = {&x};
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuModuleLoadData(&module, ptx)) return 3;
    if (cuModuleGetFunction(&function, module, "endless") || cuMemAlloc_v2(&x, 4096)) return 4;
    puts("begins");
    fflush(stdout);
    int error = cuLaunchKernel(function, 64, 1, 1, 32, 1, 1, 0, NULL, arguments, NULL);
    return error ? error : cuCtxSynchronize();
}
