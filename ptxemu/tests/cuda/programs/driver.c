/* A program of the driver API, with PTX as text; needs no header of CUDA. Prints "done" at the end. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

int cuInit(unsigned), cuDeviceGet(int *, int), cuDeviceGetName(char *, int, int);
int cuCtxCreate_v2(void **, unsigned, int), cuModuleLoadData(void **, const void *);
int cuModuleGetFunction(void **, void *, const char *), cuMemAlloc_v2(uint64_t *, size_t);
int cuModuleGetGlobal_v2(uint64_t *, size_t *, void *, const char *);
int cuMemcpyHtoD_v2(uint64_t, const void *, size_t), cuMemcpyDtoH_v2(void *, uint64_t, size_t);
int cuMemsetD32_v2(uint64_t, unsigned, size_t), cuCtxSynchronize(void), cuMemFree_v2(uint64_t);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void *, void **, void **);
int cuDeviceGetMemPool(void **, int), cuMemAllocFromPoolAsync(uint64_t *, size_t, void *, void *);
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
int cuGetErrorName(int, const char **), cuTexObjectCreate(void);

static const char *ptx =
    ".version 8.0\n.target sm_90\n.address_size 64\n"
    ".visible .global .align 4 .u32 step = 3;\n"
    ".visible .entry add(.param .u64 x, .param .u32 n) {\n"
    ".reg .b32 %r<6>; .reg .b64 %rd<4>; .reg .pred %p;\n"
    "ld.param.u64 %rd0, [x]; ld.param.u32 %r4, [n]; mov.u32 %r0, %tid.x;\n"
    "setp.ge.u32 %p, %r0, %r4; @%p ret;\n"
    "mul.wide.u32 %rd1, %r0, 4; add.s64 %rd2, %rd0, %rd1; ld.global.u32 %r1, [%rd2];\n"
    "ld.global.u32 %r2, [step]; add.u32 %r3, %r1, %r2; st.global.u32 [%rd2], %r3; ret; }\n";

#define EXPECT(what) \
    if (!(what)) return printf("line %d: %s\n", __LINE__, #what), 1

int main(void) {
    void *context, *module, *function, *encode;
    uint64_t x, step;
    size_t size;
    unsigned n = 40, host[64], five = 5;
    int device, found;
    char name[64];
    const char *text;
    EXPECT(cuInit(0) == 0 && cuDeviceGet(&device, 0) == 0 && cuDeviceGet(&device, 1) == 101);
    EXPECT(cuDeviceGetName(name, sizeof name, 0) == 0 && !strcmp(name, "ptxemu sm_100a"));
    EXPECT(cuCtxCreate_v2(&context, 0, 0) == 0 && cuModuleLoadData(&module, ptx) == 0);
    EXPECT(cuModuleGetFunction(&function, module, "none") == 500);
    EXPECT(cuModuleGetFunction(&function, module, "add") == 0);
    EXPECT(cuModuleGetGlobal_v2(&step, &size, module, "step") == 0 && size == 4);
    EXPECT(cuMemAlloc_v2(&x, 256) == 0 && cuMemsetD32_v2(x, 7, 64) == 0);
    void *arguments[] = {&x, &n};
    EXPECT(cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, NULL, arguments, NULL) == 0);
    EXPECT(cuMemcpyHtoD_v2(step, &five, 4) == 0);
    struct {
        uint64_t x;
        unsigned n;
    } block = {x, 8};
    size = sizeof block;
    void *extra[] = {(void *)1, &block, (void *)2, &size, NULL};
    EXPECT(cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, NULL, NULL, extra) == 0);
    void *pool;
    uint64_t pooled;
    EXPECT(cuDeviceGetMemPool(&pool, 0) == 0 && pool != NULL);
    EXPECT(cuMemAllocFromPoolAsync(&pooled, 256, pool, NULL) == 0 && cuMemFree_v2(pooled) == 0);
    EXPECT(cuCtxSynchronize() == 0 && cuMemcpyDtoH_v2(host, x, 256) == 0);
    EXPECT(host[0] == 15 && host[8] == 10 && host[39] == 10 && host[40] == 7);
    EXPECT(cuGetProcAddress_v2("cuTensorMapEncodeTiled", &encode, 12000, 0, &found) == 0);
    EXPECT(encode != NULL && found == 0);
    EXPECT(cuTexObjectCreate() == 801 && cuGetErrorName(801, &text) == 0);
    EXPECT(!strcmp(text, "CUDA_ERROR_NOT_SUPPORTED") && cuMemFree_v2(x) == 0);
    puts("done");
    return 0;
}
