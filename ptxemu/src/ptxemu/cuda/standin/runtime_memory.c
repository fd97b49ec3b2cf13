/* The runtime API's memory: allocation, copies, fills, symbols. */
#include "standin.h"

#include <stdlib.h>
#include <string.h>

#define MOST_PITCH 512

/* An earlier error of a kernel is every later call's. */
static int after_kernels(void) { return sticky_error(); }

static int allocate(void **result, size_t size, enum MemoryKind kind) {
    int status = after_kernels();
    return fail(status != SUCCESS ? status : memory_allocate(result, size, kind));
}

static int release(const void *address) {
    flush_printed();
    int status = after_kernels();
    return fail(status != SUCCESS ? status : memory_free(address));
}

API int cudaMalloc(void **result, size_t size) { return allocate(result, size, MEMORY_DEVICE); }
API int cudaMallocAsync(void **result, size_t size, void *stream) {
    (void)stream;
    return allocate(result, size, MEMORY_DEVICE);
}
API int cudaMallocFromPoolAsync(void **result, size_t size, void *pool, void *stream) {
    (void)pool, (void)stream;
    return allocate(result, size, MEMORY_DEVICE);
}
API int cudaMallocManaged(void **result, size_t size, unsigned flags) {
    (void)flags;
    return allocate(result, size, MEMORY_MANAGED);
}
API int cudaMallocHost(void **result, size_t size) {
    return allocate(result, size, MEMORY_PINNED);
}
API int cudaHostAlloc(void **result, size_t size, unsigned flags) {
    (void)flags;
    return allocate(result, size, MEMORY_PINNED);
}
API int cudaFree(void *address) { return release(address); }
API int cudaFreeHost(void *address) { return release(address); }
API int cudaFreeAsync(void *address, void *stream) {
    (void)stream;
    return release(address);
}
API int cudaHostGetDevicePointer(void **result, void *host, unsigned flags) {
    (void)flags;
    *result = host;
    return fail(memory_block(host) != NULL ? SUCCESS : INVALID_VALUE);
}
API int cudaHostGetFlags(unsigned *flags, void *host) {
    *flags = 0;
    return fail(memory_block(host) != NULL ? SUCCESS : INVALID_VALUE);
}
API int cudaMallocPitch(void **result, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + MOST_PITCH - 1) / MOST_PITCH * MOST_PITCH;
    return allocate(result, *pitch * height, MEMORY_DEVICE);
}
API int cudaMemGetInfo(size_t *available, size_t *total) {
    memory_room(available, total);
    return fail(after_kernels());
}

API int cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
    (void)kind;
    return fail(stream_copy(target, source, size, stream));
}
API int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    flush_printed();
    return cudaMemcpyAsync(target, source, size, kind, NULL);
}
API int cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t size,
                            void *stream) {
    return to || from ? fail(INVALID_DEVICE) : cudaMemcpyAsync(target, source, size, 4, stream);
}
API int cudaMemcpyPeer(void *target, int to, const void *source, int from, size_t size) {
    return cudaMemcpyPeerAsync(target, to, source, from, size, NULL);
}
API int cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source,
                          size_t source_pitch, size_t width, size_t height, int kind,
                          void *stream) {
    (void)kind;
    if (capture_of(stream_of(stream)) != NULL) return unsupported("cudaMemcpy2DAsync in a graph");
    int status = after_kernels();
    return fail(status != SUCCESS ? status
                                  : memory_copy_2d(target, target_pitch, source, source_pitch,
                                                   width, height));
}
API int cudaMemcpy2D(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                     size_t width, size_t height, int kind) {
    flush_printed();
    return cudaMemcpy2DAsync(target, target_pitch, source, source_pitch, width, height, kind,
                             NULL);
}
API int cudaMemsetAsync(void *target, int value, size_t size, void *stream) {
    return fail(stream_fill(target, (uint8_t)value, 1, size, stream));
}
API int cudaMemset(void *target, int value, size_t size) {
    return cudaMemsetAsync(target, value, size, NULL);
}
API int cudaMemset2DAsync(void *target, size_t pitch, int value, size_t width, size_t height,
                          void *stream) {
    int status = SUCCESS;
    for (size_t row = 0; row < height && status == SUCCESS; row++)
        status = stream_fill((char *)target + row * pitch, (uint8_t)value, 1, width, stream);
    return fail(status);
}
API int cudaMemset2D(void *target, size_t pitch, int value, size_t width, size_t height) {
    return cudaMemset2DAsync(target, pitch, value, width, height, NULL);
}

API int cudaGetSymbolAddress(void **result, const void *symbol) {
    return fail(variable_address(symbol, result, NULL));
}
API int cudaGetSymbolSize(size_t *size, const void *symbol) {
    return fail(variable_address(symbol, NULL, size));
}

/* Where `size` bytes from `offset` of a symbol are; the copy that follows checks nothing more. */
static int symbol_part(const void *symbol, size_t size, size_t offset, void **part) {
    size_t whole = 0;
    int status = variable_address(symbol, part, &whole);
    if (status != SUCCESS) return status;
    if (offset > whole || size > whole - offset) return INVALID_VALUE;
    *part = (char *)*part + offset;
    return SUCCESS;
}
API int cudaMemcpyToSymbolAsync(const void *symbol, const void *source, size_t size,
                                size_t offset, int kind, void *stream) {
    void *part;
    int status = symbol_part(symbol, size, offset, &part);
    return status != SUCCESS ? fail(status) : cudaMemcpyAsync(part, source, size, kind, stream);
}
API int cudaMemcpyToSymbol(const void *symbol, const void *source, size_t size, size_t offset,
                           int kind) {
    return cudaMemcpyToSymbolAsync(symbol, source, size, offset, kind, NULL);
}
API int cudaMemcpyFromSymbolAsync(void *target, const void *symbol, size_t size, size_t offset,
                                  int kind, void *stream) {
    void *part;
    int status = symbol_part(symbol, size, offset, &part);
    return status != SUCCESS ? fail(status) : cudaMemcpyAsync(target, part, size, kind, stream);
}
API int cudaMemcpyFromSymbol(void *target, const void *symbol, size_t size, size_t offset,
                             int kind) {
    flush_printed();
    return cudaMemcpyFromSymbolAsync(target, symbol, size, offset, kind, NULL);
}

/* The start of cudaPointerAttributes, which later versions only extend. */
typedef struct {
    int type, device;
    const void *device_pointer, *host_pointer;
} PointerAttributes;

API int cudaPointerGetAttributes(PointerAttributes *attributes, const void *address) {
    static const int types[] = {2, 1, 3}; /* device, host, managed */
    int status = start();
    if (status != SUCCESS) return fail(status);
    const Block *block = memory_block(address);
    *attributes = (PointerAttributes){0, -2, NULL, address};
    if (block != NULL)
        *attributes = (PointerAttributes){types[block->kind], 0, address,
                                          block->kind == MEMORY_DEVICE ? NULL : address};
    return SUCCESS;
}

/* Hints: nothing changes what a program sees. */
API int cudaMemPrefetchAsync(const void *address, size_t size) {
    return fail(memory_view(address, size) != NULL ? SUCCESS : INVALID_VALUE);
}
API int cudaMemPrefetchAsync_v2(const void *address, size_t size) {
    return cudaMemPrefetchAsync(address, size);
}
API int cudaMemAdvise(const void *address, size_t size) {
    return cudaMemPrefetchAsync(address, size);
}
API int cudaMemAdvise_v2(const void *address, size_t size) {
    return cudaMemPrefetchAsync(address, size);
}
API int cudaStreamAttachMemAsync(void *stream, void *address) {
    (void)stream, (void)address;
    return SUCCESS;
}
API int cudaDeviceGetDefaultMemPool(void **pool, int device) {
    *pool = (void *)1;
    return fail(device == 0 ? SUCCESS : INVALID_DEVICE);
}
API int cudaDeviceGetMemPool(void **pool, int device) {
    return cudaDeviceGetDefaultMemPool(pool, device);
}
API int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) {
    (void)pool, (void)attribute, (void)value;
    return SUCCESS;
}
API int cudaMemPoolTrimTo(void *pool, size_t size) {
    (void)pool, (void)size;
    return SUCCESS;
}
