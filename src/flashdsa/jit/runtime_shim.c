/* What the host code of compiled kernels calls, linked into every object: it forwards to the CUDA
 * runtime and driver of the process, whose functions load_shared_object() hands over by name. So an
 * object has no undefined symbol of CUDA's, loads on machines without CUDA, and needs neither CuTe
 * DSL nor a compiler.
 *
 * The names with an underscore in front, and their arguments, are those of the CUDA functions. A
 * function that was not handed over gives UNBOUND, which becomes a Python exception. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the object was built from; see shared_object.py. */
__attribute__((used)) const char flashdsa_sources[] = FLASHDSA_SOURCES;

typedef int32_t status; /* cudaError_t and CUresult: 0 is success */
enum { UNBOUND = 20250 };

#define FUNCTIONS(one)               \
    one(cudaLibraryLoadData)         \
    one(cudaLibraryGetKernel)        \
    one(cudaKernelSetAttributeForDevice) \
    one(cudaFuncSetAttribute)        \
    one(cudaGetDevice)               \
    one(cudaSetDevice)               \
    one(cudaDeviceGetAttribute)      \
    one(cudaLaunchKernelExC)         \
    one(cudaGetErrorString)          \
    one(cuKernelGetAttribute)        \
    one(cuTensorMapEncodeTiled)

#define NUMBER(name) N_##name,
#define TEXT(name) #name,
enum { FUNCTIONS(NUMBER) NUM_FUNCTIONS };
static const char *const names[NUM_FUNCTIONS] = {FUNCTIONS(TEXT)};
static void *functions[NUM_FUNCTIONS];

/* A loaded cubin; what the host code calls its state points to one. */
struct library {
    void *handle;                                  /* cudaLibrary_t */
    status (*load_to_device)(void **, int32_t);    /* sets the kernels' attributes on a device */
    uint64_t devices;                              /* bit i: done on device i */
};
enum { MAX_DEVICES = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of every library's fields */
static __thread int missing = -1;       /* the last function that was called and not there */
static __thread status failed_before;   /* of a call whose result the host code only asserts */
static __thread struct library *running; /* of the function that this thread called last */

/* Python hands functions over before the first call; 0, or -1 for a name that is not needed. */
int flashdsa_bind(const char *name, void *function)
{
    for (int i = 0; i < NUM_FUNCTIONS; i++)
        if (!strcmp(name, names[i])) {
            functions[i] = function;
            return 0;
        }
    return -1;
}

/* Name of the i-th function that flashdsa_bind() wants; NULL behind the last. */
const char *flashdsa_function(int i)
{
    return i >= 0 && i < NUM_FUNCTIONS ? names[i] : NULL;
}

#define FORWARD(name, types, arguments)                 \
    do {                                                \
        if (functions[N_##name])                        \
            return ((status(*) types)functions[N_##name]) arguments; \
        missing = N_##name;                             \
        return UNBOUND;                                 \
    } while (0)

status _cudaLibraryLoadData(void **library, const void *code, void *jit_options, void **jit_values,
                            uint32_t num_jit, void *options, void **values, uint32_t num_options)
{
    FORWARD(cudaLibraryLoadData,
            (void **, const void *, void *, void **, uint32_t, void *, void **, uint32_t),
            (library, code, jit_options, jit_values, num_jit, options, values, num_options));
}

status _cudaLibraryGetKernel(void **kernel, void *library, const char *name)
{
    FORWARD(cudaLibraryGetKernel, (void **, void *, const char *), (kernel, library, name));
}

status _cudaKernelSetAttributeForDevice(void *kernel, int32_t attribute, int32_t value, int32_t device)
{
    FORWARD(cudaKernelSetAttributeForDevice, (void *, int32_t, int32_t, int32_t),
            (kernel, attribute, value, device));
}

status _cudaFuncSetAttribute(const void *function, int32_t attribute, int32_t value)
{
    FORWARD(cudaFuncSetAttribute, (const void *, int32_t, int32_t), (function, attribute, value));
}

status _cudaGetDevice(int32_t *device)
{
    FORWARD(cudaGetDevice, (int32_t *), (device));
}

static status load_kernels(struct library *library, int32_t device)
{
    uint64_t bit = device < MAX_DEVICES ? (uint64_t)1 << device : 0;
    status result = 0;

    if (!library->load_to_device || __atomic_load_n(&library->devices, __ATOMIC_ACQUIRE) & bit)
        return 0;
    pthread_mutex_lock(&lock);
    if (!(library->devices & bit))
        result = library->load_to_device(&library->handle, device);
    if (!result)
        __atomic_or_fetch(&library->devices, bit, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return result;
}

static status set_device(int32_t device)
{
    FORWARD(cudaSetDevice, (int32_t), (device));
}

/* The tensors' device may be another than the one that was current when the function was called. */
status _cudaSetDevice(int32_t device)
{
    status result = set_device(device);

    return result || !running ? result : load_kernels(running, device);
}

status _cudaDeviceGetAttribute(int32_t *value, int32_t attribute, int32_t device)
{
    FORWARD(cudaDeviceGetAttribute, (int32_t *, int32_t, int32_t), (value, attribute, device));
}

status _cuKernelGetAttribute(int32_t *value, int32_t attribute, void *kernel, int32_t device)
{
    FORWARD(cuKernelGetAttribute, (int32_t *, int32_t, void *, int32_t),
            (value, attribute, kernel, device));
}

status _cuTensorMapEncodeTiled(void *map, int32_t type, uint32_t rank, void *address,
                               const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                               const uint32_t *element_strides, int32_t interleave, int32_t swizzle,
                               int32_t l2_promotion, int32_t fill)
{
    FORWARD(cuTensorMapEncodeTiled,
            (void *, int32_t, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
             const uint32_t *, int32_t, int32_t, int32_t, int32_t),
            (map, type, rank, address, sizes, strides, box, element_strides, interleave, swizzle,
             l2_promotion, fill));
}

/* Nothing is launched behind a call that failed. */
void cuda_dialect_assert_success(status result)
{
    if (result && !failed_before)
        failed_before = result;
}

status _cudaLaunchKernelEx(const void *config, const void *kernel, void **arguments)
{
    status before = failed_before;

    failed_before = 0;
    if (before)
        return before;
    FORWARD(cudaLaunchKernelExC, (const void *, const void *, void **), (config, kernel, arguments));
}

static void describe(status code, const char *what, char *text, size_t size)
{
    const char *(*explain)(status) = functions[N_cudaGetErrorString];

    if (code == UNBOUND)
        snprintf(text, size, "%s: the CUDA %s of this process has no %s", what,
                 missing >= 0 && names[missing][2] != 'd' ? "driver" : "runtime",
                 missing >= 0 ? names[missing] : "function");
    else
        snprintf(text, size, "%s: CUDA error %d%s%s", what, (int)code, explain ? ", " : "",
                 explain ? explain(code) : "");
}

/* Every call of a function begins here. `state` is 0 before the first one. */
status cuda_dialect_init_library_once(int64_t *state, status (*init)(void **),
                                      status (*load_to_device)(void **, int32_t),
                                      void (*set_error)(const char *, const char *))
{
    struct library *library;
    char text[256];
    int32_t device = 0;
    status result = _cudaGetDevice(&device);

    failed_before = 0;

    library = (struct library *)(intptr_t)__atomic_load_n(state, __ATOMIC_ACQUIRE);
    if (!result && !library) {
        pthread_mutex_lock(&lock);
        library = (struct library *)(intptr_t)*state;
        if (!library) {
            library = calloc(1, sizeof *library);
            result = library ? init(&library->handle) : 2; /* cudaErrorMemoryAllocation */
            if (!result) {
                library->load_to_device = load_to_device;
                __atomic_store_n(state, (int64_t)(intptr_t)library, __ATOMIC_RELEASE);
            } else {
                free(library);
                library = NULL;
            }
        }
        pthread_mutex_unlock(&lock);
    }
    if (!result)
        result = load_kernels(library, device);
    running = result ? NULL : library;
    if (result && set_error) {
        describe(result, "loading a kernel", text, sizeof text);
        set_error("RuntimeError", text);
    }
    return result;
}

/* Called when the process ends: CUDA may have ended before, and frees what was loaded. */
void cuda_dialect_unload_library_once(int64_t *state)
{
    (void)state;
}

typedef void (*raise_error)(const char *kind, const char **parts, int32_t num_parts);

void CuteDSLRT_TVMFFISetRaisedCudaError(raise_error raise, int32_t code)
{
    static __thread char text[256];
    const char *parts[1] = {text};

    describe(code, "launching a kernel", text, sizeof text);
    raise("RuntimeError", parts, 1);
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(raise_error raise, int32_t x, int32_t y, int32_t z)
{
    static __thread char text[128];
    const char *parts[1] = {text};

    snprintf(text, sizeof text, "CUDA refused a grid of %d x %d x %d blocks", (int)x, (int)y, (int)z);
    raise("RuntimeError", parts, 1);
}
