/* The driver API: contexts, modules, launches, tensor maps. A CUfunction, a CUkernel and a
 * cudaKernel_t are the same here, as are a CUmodule and a CUlibrary. */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DRIVER_VERSION 13000
#define PARAMETERS_POINTER ((void *)1)
#define PARAMETERS_SIZE ((void *)2)
#define DEVICE_NAME_BYTES 256
#define TENSOR_MAP_BYTES 128

static char context; /* the only one: its address is the handle */

void *driver_function(const char *name);

API int cuInit(unsigned flags) { return (void)flags, start(); }
API int cuDriverGetVersion(int *version) { return *version = DRIVER_VERSION, SUCCESS; }
API int cuDeviceGetCount(int *count) { return *count = 1, start(); }
API int cuDeviceGet(int *device, int ordinal) {
    return *device = 0, ordinal == 0 ? start() : INVALID_DEVICE;
}
API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    uint64_t words[1] = {(uint64_t)attribute};
    if (device != 0) return INVALID_DEVICE;
    return request_number(OP_DEVICE_ATTRIBUTE, words, sizeof words, value);
}
API int cuDeviceGetName(char *name, int size, int device) {
    uint64_t version = 13;
    Reply reply;
    if (device != 0 || size < 1) return INVALID_VALUE;
    int status = request_words(OP_DEVICE_PROPERTIES, &version, sizeof version, &reply);
    if (status == SUCCESS) snprintf(name, (size_t)size, "%.*s", DEVICE_NAME_BYTES, reply.data);
    free(reply.data);
    return status;
}
API int cuDeviceGetUuid_v2(char *uuid, int device) {
    return memset(uuid, 0, 16), device == 0 ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    size_t available;
    memory_room(&available, bytes);
    return device == 0 ? start() : INVALID_DEVICE;
}
API int cuDeviceComputeCapability(int *major, int *minor, int device) {
    int status = cuDeviceGetAttribute(major, 75, device);
    return status != SUCCESS ? status : cuDeviceGetAttribute(minor, 76, device);
}
API int cuDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, (size_t)size, "0000:01:00.0");
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    return (void)device, (void)peer, *can = 0, SUCCESS;
}

static int give_context(void **result) { return *result = &context, start(); }
API int cuCtxCreate_v2(void **result, unsigned flags, int device) {
    return (void)flags, device == 0 ? give_context(result) : INVALID_DEVICE;
}
API int cuCtxCreate_v4(void **result, void *parameters, unsigned flags, int device) {
    return (void)parameters, cuCtxCreate_v2(result, flags, device);
}
API int cuCtxDestroy_v2(void *handle) { return (void)handle, SUCCESS; }
API int cuCtxGetCurrent(void **result) { return give_context(result); }
API int cuCtxSetCurrent(void *handle) { return (void)handle, SUCCESS; }
API int cuCtxPushCurrent_v2(void *handle) { return (void)handle, SUCCESS; }
API int cuCtxPopCurrent_v2(void **result) {
    if (result != NULL) *result = &context;
    return SUCCESS;
}
API int cuCtxGetDevice(int *device) { return *device = 0, SUCCESS; }
API int cuCtxGetDevice_v2(int *device, void *handle) { return (void)handle, *device = 0, SUCCESS; }
API int cuCtxGetFlags(unsigned *flags) { return *flags = 0, SUCCESS; }
API int cuCtxGetApiVersion(void *handle, unsigned *version) {
    return (void)handle, *version = DRIVER_VERSION, SUCCESS;
}
API int cuCtxSynchronize(void) { return synchronize(); }
API int cuCtxSynchronize_v2(void *handle) { return (void)handle, synchronize(); }
API int cuCtxSetLimit(int limit, size_t value) { return (void)limit, (void)value, SUCCESS; }
API int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    if (least != NULL) *least = 0;
    if (greatest != NULL) *greatest = -5;
    return SUCCESS;
}
API int cuDevicePrimaryCtxRetain(void **result, int device) {
    return device == 0 ? give_context(result) : INVALID_DEVICE;
}
API int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, SUCCESS; }
API int cuDevicePrimaryCtxReset_v2(int device) { return (void)device, SUCCESS; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    return *flags = 0, *is_active = 1, device == 0 ? SUCCESS : INVALID_DEVICE;
}

API int cuModuleLoadData(Image **module, const void *data) {
    *module = image_new(data);
    return image_send(*module);
}
API int cuModuleLoadDataEx(Image **module, const void *data) {
    return cuModuleLoadData(module, data);
}
API int cuModuleLoadFatBinary(Image **module, const void *data) {
    return cuModuleLoadData(module, data);
}
API int cuLibraryLoadData(Image **library, const void *data) {
    return cuModuleLoadData(library, data);
}
API int cuModuleLoad(Image **module, const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) return 301; /* file not found */
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    char *data = calloc(1, size + 64);
    rewind(file);
    size = fread(data, 1, size, file);
    fclose(file);
    int status = cuModuleLoadData(module, data);
    free(data);
    return status;
}
API int cuLibraryLoadFromFile(Image **library, const char *path) {
    return cuModuleLoad(library, path);
}
API int cuModuleUnload(Image *module) { return (void)module, SUCCESS; }
API int cuLibraryUnload(Image *library) { return (void)library, SUCCESS; }
API int cuModuleGetFunction(Function **function, Image *module, const char *name) {
    *function = function_new(module, NULL, name);
    return function_resolve(*function);
}
API int cuLibraryGetKernel(Function **kernel, Image *library, const char *name) {
    return cuModuleGetFunction(kernel, library, name);
}
API int cuLibraryGetModule(Image **module, Image *library) { return *module = library, SUCCESS; }
API int cuKernelGetFunction(Function **function, Function *kernel) {
    return *function = kernel, SUCCESS;
}
API int cuModuleGetGlobal_v2(void **address, size_t *size, Image *module, const char *name) {
    return symbol_address(module, name, address, size);
}
API int cuLibraryGetGlobal(void **address, size_t *size, Image *library, const char *name) {
    return symbol_address(library, name, address, size);
}
API int cuModuleGetLoadingMode(int *mode) { return *mode = 2, SUCCESS; }
API int cuFuncGetName(const char **name, Function *function) {
    return *name = function->name, SUCCESS;
}
API int cuFuncGetModule(Image **module, Function *function) {
    return *module = function->image, SUCCESS;
}

API int cuFuncGetAttribute(int *value, int attribute, Function *function) {
    return function_attribute(function, attribute, value);
}
API int cuKernelGetAttribute(int *value, int attribute, Function *kernel, int device) {
    return device == 0 ? function_attribute(kernel, attribute, value) : INVALID_DEVICE;
}
API int cuFuncSetAttribute(Function *function, int attribute, int value) {
    return set_function_attribute(function, attribute, value);
}
API int cuKernelSetAttribute(int attribute, int value, Function *kernel, int device) {
    return device == 0 ? set_function_attribute(kernel, attribute, value) : INVALID_DEVICE;
}
API int cuFuncSetCacheConfig(Function *function, int config) {
    return (void)function, (void)config, SUCCESS;
}

typedef struct {
    Dim3 grid, block;
    uint32_t shared_bytes;
    void *stream;
    const char *attributes;
    unsigned count;
} DriverLaunchConfig;

static int launch_either(Function *function, const Shape *shape, void *stream, void **arguments,
                         void **extra) {
    if (function_find(function) == NULL) return INVALID_HANDLE;
    if (extra == NULL) return launch(function, shape, arguments, stream_of(stream));
    const void *block = NULL;
    size_t size = 0;
    for (; *extra != NULL; extra += 2) {
        if (extra[0] == PARAMETERS_POINTER) block = extra[1];
        if (extra[0] == PARAMETERS_SIZE) size = *(size_t *)extra[1];
    }
    return launch_packed(function, shape, block, size, stream_of(stream));
}
API int cuLaunchKernel(Function *function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z,
                       uint32_t block_x, uint32_t block_y, uint32_t block_z, uint32_t shared,
                       void *stream, void **arguments, void **extra) {
    Shape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, {0, 0, 0}, shared, 0};
    return launch_either(function, &shape, stream, arguments, extra);
}
API int cuLaunchCooperativeKernel(Function *function, uint32_t grid_x, uint32_t grid_y,
                                  uint32_t grid_z, uint32_t block_x, uint32_t block_y,
                                  uint32_t block_z, uint32_t shared, void *stream,
                                  void **arguments) {
    Shape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, {0, 0, 0}, shared, 1};
    return launch_either(function, &shape, stream, arguments, NULL);
}
API int cuLaunchKernelEx(const DriverLaunchConfig *config, Function *function, void **arguments,
                         void **extra) {
    Shape shape = {config->grid, config->block, {0, 0, 0}, config->shared_bytes, 0};
    shape_attributes(&shape, config->attributes, config->count);
    return launch_either(function, &shape, config->stream, arguments, extra);
}

static int driver_occupancy(int *result, Function *function, int is_clusters, uint64_t threads,
                            uint64_t shared, uint64_t cluster) {
    int status = function_resolve(function);
    uint64_t words[5] = {function->id, (uint64_t)is_clusters, threads, shared, cluster};
    if (status != SUCCESS) return status;
    return request_number(OP_OCCUPANCY, words, sizeof words, result);
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *result, Function *function, int threads,
                                                    size_t shared) {
    return driver_occupancy(result, function, 0, (uint64_t)threads, shared, 0);
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *result, Function *function,
                                                             int threads, size_t shared) {
    return driver_occupancy(result, function, 0, (uint64_t)threads, shared, 0);
}
API int cuOccupancyMaxActiveClusters(int *result, Function *function,
                                     const DriverLaunchConfig *config) {
    Shape shape = {.block = config->block};
    shape_attributes(&shape, config->attributes, config->count);
    uint64_t cluster = (uint64_t)shape.cluster.x * shape.cluster.y * shape.cluster.z;
    uint64_t threads = (uint64_t)shape.block.x * shape.block.y * shape.block.z;
    return driver_occupancy(result, function, 1, threads, config->shared_bytes, cluster);
}

API int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address,
                               const uint64_t *sizes, const uint64_t *strides,
                               const uint32_t *box, const uint32_t *steps, int interleave,
                               int swizzle, int l2_promotion, int fill) {
    struct {
        uint64_t address, sizes[5], strides[5];
        uint32_t box[5], steps[5], numbers[6];
    } words = {.address = (uint64_t)address};
    uint32_t numbers[] = {(uint32_t)type,    rank, (uint32_t)interleave, (uint32_t)swizzle,
                          (uint32_t)l2_promotion, (uint32_t)fill};
    if (rank < 1 || rank > 5) return INVALID_VALUE;
    memcpy(words.sizes, sizes, rank * sizeof *sizes);
    memcpy(words.strides, strides, (rank - 1) * sizeof *strides);
    memcpy(words.box, box, rank * sizeof *box);
    memcpy(words.steps, steps, rank * sizeof *steps);
    memcpy(words.numbers, numbers, sizeof numbers);
    Reply reply;
    int status = request_words(OP_TENSOR_MAP, &words, sizeof words, &reply);
    if (status == SUCCESS) memcpy(map, reply.data, TENSOR_MAP_BYTES);
    free(reply.data);
    return status;
}

API int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                            int *result) {
    (void)version, (void)flags;
    *function = driver_function(name);
    if (result != NULL) *result = *function == NULL; /* 0: found, 1: symbol not found */
    return *function != NULL ? SUCCESS : NOT_FOUND;
}
API int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* Linking: one PTX text, which stays as it is, for the emulator runs that. */
typedef struct {
    char *text;
    size_t size;
} Link;

API int cuLinkCreate_v2(unsigned count, void *options, void *values, Link **link) {
    (void)count, (void)options, (void)values;
    return *link = calloc(1, sizeof **link), start();
}
API int cuLinkAddData_v2(Link *link, int type, const void *data, size_t size) {
    if (type != 1 || link->text != NULL) return unsupported("cuLinkAddData of more than one PTX");
    link->text = calloc(1, size + 1);
    memcpy(link->text, data, size);
    link->size = size + 1;
    return SUCCESS;
}
API int cuLinkComplete(Link *link, void **image, size_t *size) {
    *image = link->text;
    if (size != NULL) *size = link->size;
    return link->text != NULL ? SUCCESS : INVALID_VALUE;
}
API int cuLinkDestroy(Link *link) {
    free(link->text);
    free(link);
    return SUCCESS;
}
