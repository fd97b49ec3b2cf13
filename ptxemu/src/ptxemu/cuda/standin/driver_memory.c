/* The driver API's memory, streams and events. */
#include "standin.h"

#include <stdlib.h>
#include <string.h>

API int cuMemAlloc_v2(void **result, size_t size) {
    return size ? memory_allocate(result, size, MEMORY_DEVICE) : INVALID_VALUE;
}
API int cuMemAllocAsync(void **result, size_t size) { return cuMemAlloc_v2(result, size); }
API int cuMemAllocFromPoolAsync(void **result, size_t size) { return cuMemAlloc_v2(result, size); }

/* There is one pool, which keeps nothing. */
API int cuDeviceGetDefaultMemPool(void **pool) { return *pool = (void *)1, SUCCESS; }
API int cuDeviceGetMemPool(void **pool) { return *pool = (void *)1, SUCCESS; }
API int cuDeviceSetMemPool(int device) { return (void)device, SUCCESS; }
API int cuMemPoolSetAttribute(void *pool) { return (void)pool, SUCCESS; }
API int cuMemPoolGetAttribute(void *pool, int attribute, uint64_t *value) {
    /* The first three are ints: whether memory is used again. */
    if (attribute <= 3) *(int *)value = 0;
    else *value = 0;
    return (void)pool, SUCCESS;
}
API int cuMemPoolSetAccess(void *pool) { return (void)pool, SUCCESS; }
API int cuMemPoolTrimTo(void *pool) { return (void)pool, SUCCESS; }
API int cuMemAllocManaged(void **result, size_t size) {
    return memory_allocate(result, size, MEMORY_MANAGED);
}
API int cuMemAllocHost_v2(void **result, size_t size) {
    return memory_allocate(result, size, MEMORY_PINNED);
}
API int cuMemHostAlloc(void **result, size_t size) { return cuMemAllocHost_v2(result, size); }
API int cuMemAllocPitch_v2(void **result, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + 511) / 512 * 512;
    return memory_allocate(result, *pitch * height, MEMORY_DEVICE);
}
API int cuMemFree_v2(void *address) { return memory_free(address); }
API int cuMemFreeAsync(void *address) { return memory_free(address); }
API int cuMemFreeHost(void *address) { return memory_free(address); }
API int cuMemHostGetDevicePointer_v2(void **result, void *host) {
    *result = host;
    return memory_block(host) != NULL ? SUCCESS : INVALID_VALUE;
}
API int cuMemGetInfo_v2(size_t *available, size_t *total) {
    return memory_room(available, total), start();
}
API int cuMemGetAddressRange_v2(void **base, size_t *size, void *address) {
    const Block *block = memory_block(address);
    if (block == NULL) return NOT_FOUND;
    if (base != NULL) *base = (void *)block->base;
    if (size != NULL) *size = block->size;
    return SUCCESS;
}

/* Attributes of a pointer: 1 context, 2 memory type, 3 device pointer, 4 host pointer, 7 buffer
 * number, 8 managed, 9 device ordinal. */
API int cuPointerGetAttribute(void *result, int attribute, void *address) {
    const Block *block = memory_block(address), tensor = {(uint64_t)address, 0, MEMORY_DEVICE};
    if (block == NULL && address != NULL && host_memory_is_device_memory()) block = &tensor;
    if (block == NULL) return INVALID_VALUE;
    int number = 0;
    switch (attribute) {
    case 1:
    case 3:
    case 4:
        if (attribute == 4 && block->kind == MEMORY_DEVICE) return INVALID_VALUE;
        memcpy(result, &address, sizeof address);
        return SUCCESS;
    case 2: number = block->kind == MEMORY_PINNED ? 1 : 2; break;
    case 7: memcpy(result, &block->base, sizeof block->base); return SUCCESS;
    case 8: number = block->kind == MEMORY_MANAGED; break;
    case 9: break;
    default: return NOT_SUPPORTED;
    }
    memcpy(result, &number, sizeof number);
    return SUCCESS;
}

API int cuMemcpyAsync(void *target, const void *source, size_t size, void *stream) {
    return stream_copy(target, source, size, stream);
}
API int cuMemcpy(void *target, const void *source, size_t size) {
    flush_printed();
    return stream_copy(target, source, size, NULL);
}
API int cuMemcpyHtoD_v2(void *target, const void *source, size_t size) {
    return cuMemcpy(target, source, size);
}
API int cuMemcpyDtoH_v2(void *target, const void *source, size_t size) {
    return cuMemcpy(target, source, size);
}
API int cuMemcpyDtoD_v2(void *target, const void *source, size_t size) {
    return cuMemcpy(target, source, size);
}
API int cuMemcpyHtoDAsync_v2(void *target, const void *source, size_t size, void *stream) {
    return stream_copy(target, source, size, stream);
}
API int cuMemcpyDtoHAsync_v2(void *target, const void *source, size_t size, void *stream) {
    return stream_copy(target, source, size, stream);
}
API int cuMemcpyDtoDAsync_v2(void *target, const void *source, size_t size, void *stream) {
    return stream_copy(target, source, size, stream);
}
API int cuMemsetD8Async(void *target, unsigned char value, size_t count, void *stream) {
    return stream_fill(target, value, 1, count, stream);
}
API int cuMemsetD16Async(void *target, unsigned short value, size_t count, void *stream) {
    return stream_fill(target, value, 2, count, stream);
}
API int cuMemsetD32Async(void *target, unsigned value, size_t count, void *stream) {
    return stream_fill(target, value, 4, count, stream);
}
API int cuMemsetD8_v2(void *target, unsigned char value, size_t count) {
    return stream_fill(target, value, 1, count, NULL);
}
API int cuMemsetD16_v2(void *target, unsigned short value, size_t count) {
    return stream_fill(target, value, 2, count, NULL);
}
API int cuMemsetD32_v2(void *target, unsigned value, size_t count) {
    return stream_fill(target, value, 4, count, NULL);
}

API int cuStreamCreate(Stream **stream, unsigned flags) { return stream_create(stream, flags, 0); }
API int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    return stream_create(stream, flags, priority);
}
API int cuStreamDestroy_v2(Stream *stream) { return stream_destroy(stream); }
API int cuStreamSynchronize(void *stream) { return (void)stream, synchronize(); }
API int cuStreamQuery(void *stream) { return (void)stream, sticky_error(); }
API int cuStreamGetCtx(void *stream, void **context) {
    int cuCtxGetCurrent(void **result);
    return (void)stream, cuCtxGetCurrent(context);
}
API int cuStreamWaitEvent(void *stream, Event *event) { return stream_wait_event(stream, event); }
API int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    (void)stream;
    flush_printed();
    function(data);
    return SUCCESS;
}

API int cuEventCreate(Event **event) { return event_create(event); }
API int cuEventDestroy_v2(Event *event) { return free(event), SUCCESS; }
API int cuEventRecord(Event *event, void *stream) { return event_record(event, stream); }
API int cuEventRecordWithFlags(Event *event, void *stream) { return event_record(event, stream); }
API int cuEventSynchronize(Event *event) { return (void)event, synchronize(); }
API int cuEventQuery(Event *event) { return (void)event, sticky_error(); }
API int cuEventElapsedTime(float *milliseconds, Event *first, Event *last) {
    return event_elapsed(milliseconds, first, last);
}
API int cuEventElapsedTime_v2(float *milliseconds, Event *first, Event *last) {
    return event_elapsed(milliseconds, first, last);
}
