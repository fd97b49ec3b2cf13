/* The runtime API's launches, kernel attributes, occupancy, and its way to the driver API. */
#define _GNU_SOURCE
#include "standin.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define MOST_NESTED 16

typedef struct {
    Dim3 grid, block;
    size_t shared_bytes;
    void *stream;
    const char *attributes;
    unsigned count;
} LaunchConfig;

typedef struct {
    Dim3 grid, block;
    size_t shared_bytes;
    void *stream;
} CallConfiguration;

static __thread CallConfiguration configurations[MOST_NESTED];
static __thread int num_configurations;

/* <<<...>>> is a push, then the stub's pop and launch. */
API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
    if (num_configurations == MOST_NESTED) return INVALID_CONFIGURATION;
    configurations[num_configurations++] = (CallConfiguration){grid, block, shared, stream};
    return SUCCESS;
}
API int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
    if (num_configurations == 0) return INVALID_CONFIGURATION;
    CallConfiguration top = configurations[--num_configurations];
    *grid = top.grid;
    *block = top.block;
    *shared = top.shared_bytes;
    *stream = top.stream;
    return SUCCESS;
}

static int launch_host(const void *host, const Shape *shape, void **arguments, void *stream) {
    Function *function = function_find(host);
    if (function == NULL) return fail(INVALID_DEVICE_FUNCTION);
    return fail(launch(function, shape, arguments, stream_of(stream)));
}
API int cudaLaunchKernel(const void *host, Dim3 grid, Dim3 block, void **arguments, size_t shared,
                         void *stream) {
    Shape shape = {grid, block, {0, 0, 0}, (uint32_t)shared, 0};
    return launch_host(host, &shape, arguments, stream);
}
API int __cudaLaunchKernel(const void *kernel, Dim3 grid, Dim3 block, void **arguments,
                           size_t shared, void *stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
API int cudaLaunchCooperativeKernel(const void *host, Dim3 grid, Dim3 block, void **arguments,
                                    size_t shared, void *stream) {
    Shape shape = {grid, block, {0, 0, 0}, (uint32_t)shared, 1};
    return launch_host(host, &shape, arguments, stream);
}
API int cudaLaunchKernelExC(const LaunchConfig *config, const void *host, void **arguments) {
    Shape shape = {config->grid, config->block, {0, 0, 0}, (uint32_t)config->shared_bytes, 0};
    shape_attributes(&shape, config->attributes, config->count);
    return launch_host(host, &shape, arguments, config->stream);
}

API int __cudaGetKernel(Function **kernel, const void *host) {
    *kernel = function_find(host);
    return fail(*kernel != NULL ? SUCCESS : INVALID_DEVICE_FUNCTION);
}
API int cudaGetKernel(Function **kernel, const void *host) { return __cudaGetKernel(kernel, host); }
API int cudaGetFuncBySymbol(Function **function, const void *host) {
    return __cudaGetKernel(function, host);
}
API int cudaFuncGetName(const char **name, const void *host) {
    Function *function = function_find(host);
    if (function == NULL) return fail(INVALID_DEVICE_FUNCTION);
    return *name = function->name, SUCCESS;
}

/* cudaFuncAttributes: three sizes and ten numbers, each a CUfunction_attribute. */
typedef struct {
    size_t sizes[3];
    int numbers[13];
} FunctionAttributes;

API int cudaFuncGetAttributes(FunctionAttributes *result, const void *host) {
    static const int sizes[] = {1, 2, 3};
    static const int numbers[] = {0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 14};
    for (int i = 0; i < 3; i++) {
        int value = 0, status = function_attribute(host, sizes[i], &value);
        if (status != SUCCESS) return fail(status);
        result->sizes[i] = (size_t)value;
    }
    for (int i = 0; i < 13; i++) {
        int status = function_attribute(host, numbers[i], &result->numbers[i]);
        if (status != SUCCESS) return fail(status);
    }
    return SUCCESS;
}
API int cudaFuncSetAttribute(const void *host, int attribute, int value) {
    return fail(set_function_attribute(host, attribute, value));
}
API int cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int device) {
    return fail(device == 0 ? set_function_attribute(kernel, attribute, value) : INVALID_DEVICE);
}
API int cudaFuncSetCacheConfig(const void *host, int config) {
    (void)config;
    return fail(function_find(host) != NULL ? SUCCESS : INVALID_DEVICE_FUNCTION);
}
API int cudaFuncSetSharedMemConfig(const void *host, int config) {
    return cudaFuncSetCacheConfig(host, config);
}

static int occupancy(int *result, const void *host, const Shape *shape, int is_clusters) {
    Function *function = function_find(host);
    if (function == NULL) return INVALID_DEVICE_FUNCTION;
    int status = function_resolve(function);
    if (status != SUCCESS) return status;
    uint64_t words[5] = {
        function->id,
        (uint64_t)is_clusters,
        (uint64_t)shape->block.x * shape->block.y * shape->block.z,
        shape->shared_bytes,
        shape->cluster.x ? (uint64_t)shape->cluster.x * shape->cluster.y * shape->cluster.z : 0,
    };
    return request_number(OP_OCCUPANCY, words, sizeof words, result);
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *result, const void *host,
                                                               int threads, size_t shared,
                                                               unsigned flags) {
    (void)flags;
    if (threads <= 0) return fail(INVALID_VALUE);
    Shape shape = {.block = {(uint32_t)threads, 1, 1}, .shared_bytes = (uint32_t)shared};
    return fail(occupancy(result, host, &shape, 0));
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *result, const void *host, int threads,
                                                      size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(result, host, threads, shared,
                                                                  0);
}
API int cudaOccupancyMaxActiveClusters(int *result, const void *host, const LaunchConfig *config) {
    Shape shape = {config->grid, config->block, {0, 0, 0}, (uint32_t)config->shared_bytes, 0};
    shape_attributes(&shape, config->attributes, config->count);
    return fail(occupancy(result, host, &shape, 1));
}
API int cudaOccupancyAvailableDynamicSMemPerBlock(size_t *result, const void *host, int blocks,
                                                  int threads) {
    int shared = 0, status = function_attribute(host, 1, &shared), most = 0;
    (void)threads;
    uint64_t words[1] = {81}; /* shared memory of a multiprocessor */
    if (status == SUCCESS)
        status = request_number(OP_DEVICE_ATTRIBUTE, words, sizeof words, &most);
    if (status == SUCCESS && blocks <= 0) status = INVALID_VALUE;
    if (status == SUCCESS) *result = (size_t)(most / blocks - 1024 - shared);
    return fail(status);
}

API int cudaOccupancyMaxPotentialClusterSize(int *result, const void *host,
                                             const LaunchConfig *config) {
    int is_nonportable = 0, status = function_attribute(host, 14, &is_nonportable);
    (void)config;
    *result = is_nonportable ? 16 : 8;
    return fail(status);
}

/* A driver function by its name, in its newest form. */
void *driver_function(const char *name) {
    static const char *const suffixes[] = {"_v4", "_v3", "_v2", ""};
    char full[128];
    void *self = dlopen(NULL, RTLD_NOW);
    Dl_info info;
    if (dladdr((void *)driver_function, &info)) self = dlopen(info.dli_fname, RTLD_NOW);
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes && strlen(name) < 120; i++) {
        strcpy(full, name);
        strcat(full, suffixes[i]);
        void *found = dlsym(self, full);
        if (found != NULL) return found;
    }
    return NULL;
}

API int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                int *result) {
    (void)flags;
    *function = driver_function(name);
    if (result != NULL) *result = *function == NULL; /* 0: found, 1: symbol not found */
    return SUCCESS;
}
API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                         unsigned long long flags, int *result) {
    (void)version;
    return cudaGetDriverEntryPoint(name, function, flags, result);
}

/* Libraries: images that the program loads itself. */
API int cudaLibraryLoadData(Image **library, const void *data) {
    *library = image_new(data);
    return fail(image_send(*library));
}
API int cudaLibraryUnload(Image *library) { return (void)library, SUCCESS; }
API int cudaLibraryGetKernel(Function **kernel, Image *library, const char *name) {
    *kernel = function_new(library, NULL, name);
    return fail(function_resolve(*kernel));
}
API int cudaLibraryGetGlobal(void **address, size_t *size, Image *library, const char *name) {
    return fail(symbol_address(library, name, address, size));
}
