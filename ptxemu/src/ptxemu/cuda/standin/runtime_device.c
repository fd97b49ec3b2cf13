/* The runtime API's device, streams, events and errors. */
#include "standin.h"

#include <stdlib.h>
#include <string.h>

#define DEFAULT_VERSION 13000

typedef void (*HostFunction)(void *data);
typedef void (*StreamCallback)(void *stream, int status, void *data);

static unsigned device_flags;

API int cudaGetLastError(void) { return take_last_error(); }
API int cudaPeekAtLastError(void) { return peek_last_error(); }

API int cudaGetDeviceCount(int *count) {
    *count = 1;
    return fail(start());
}
API int cudaGetDevice(int *device) {
    *device = 0;
    return SUCCESS;
}
API int cudaSetDevice(int device) { return fail(device == 0 ? start() : INVALID_DEVICE); }
API int cudaInitDevice(int device) { return cudaSetDevice(device); }
API int cudaSetValidDevices(int *devices, int count) {
    (void)devices, (void)count;
    return SUCCESS;
}
API int cudaChooseDevice(int *device, const void *properties) {
    (void)properties;
    *device = 0;
    return SUCCESS;
}
API int cudaSetDeviceFlags(unsigned flags) {
    device_flags = flags;
    return SUCCESS;
}
API int cudaGetDeviceFlags(unsigned *flags) {
    *flags = device_flags;
    return SUCCESS;
}
API int cudaDeviceSynchronize(void) { return fail(synchronize()); }
API int cudaThreadSynchronize(void) { return fail(synchronize()); }
API int cudaDeviceReset(void) { return synchronize(), SUCCESS; }
API int cudaDriverGetVersion(int *version) { return *version = DEFAULT_VERSION, SUCCESS; }
API int cudaRuntimeGetVersion(int *version) { return *version = DEFAULT_VERSION, SUCCESS; }

API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (device != 0) return fail(INVALID_DEVICE);
    uint64_t words[1] = {(uint64_t)attribute};
    return fail(request_number(OP_DEVICE_ATTRIBUTE, words, sizeof words, value));
}

static int properties(void *target, int device, uint64_t version) {
    if (device != 0) return fail(INVALID_DEVICE);
    Reply reply;
    int status = request_words(OP_DEVICE_PROPERTIES, &version, sizeof version, &reply);
    if (status == SUCCESS) memcpy(target, reply.data, reply.size);
    free(reply.data);
    return fail(status);
}
/* CUDA 12 has the symbol with a suffix, CUDA 13 that without, for another structure. */
API int cudaGetDeviceProperties_v2(void *target, int device) {
    return properties(target, device, 12);
}
API int cudaGetDeviceProperties(void *target, int device) {
    return properties(target, device, 13);
}

API int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    return *can = 0, SUCCESS;
}
API int cudaDeviceGetPCIBusId(char *text, int size, int device) {
    if (device != 0 || size < 13) return fail(INVALID_VALUE);
    strcpy(text, "0000:01:00.0");
    return SUCCESS;
}
API int cudaDeviceSetLimit(int limit, size_t value) {
    (void)limit, (void)value;
    return SUCCESS;
}
API int cudaDeviceGetLimit(size_t *value, int limit) {
    static const size_t values[] = {1024, 1 << 20, 8 << 20, 2, 2048};
    if (limit < 0 || limit > 4) return fail(INVALID_VALUE);
    return *value = values[limit], SUCCESS;
}
API int cudaDeviceSetCacheConfig(int config) { return (void)config, SUCCESS; }
API int cudaDeviceGetCacheConfig(int *config) { return *config = 0, SUCCESS; }
API int cudaDeviceSetSharedMemConfig(int config) { return (void)config, SUCCESS; }
API int cudaDeviceGetSharedMemConfig(int *config) { return *config = 1, SUCCESS; }
API int cudaProfilerStart(void) { return SUCCESS; }
API int cudaProfilerStop(void) { return SUCCESS; }
API int cudaCtxResetPersistingL2Cache(void) { return SUCCESS; }

API int cudaStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    return fail(stream_create(stream, flags, priority));
}
API int cudaStreamCreateWithFlags(Stream **stream, unsigned flags) {
    return fail(stream_create(stream, flags, 0));
}
API int cudaStreamCreate(Stream **stream) { return fail(stream_create(stream, 0, 0)); }
API int cudaStreamDestroy(Stream *stream) { return fail(stream_destroy(stream)); }
API int cudaStreamSynchronize(void *stream) {
    if (capture_of(stream_of(stream)) != NULL) return fail(CAPTURE_UNSUPPORTED);
    return fail(synchronize());
}
API int cudaStreamQuery(void *stream) { return cudaStreamSynchronize(stream); }
API int cudaStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    (void)flags;
    return fail(stream_wait_event(stream, event));
}
API int cudaStreamGetFlags(void *stream, unsigned *flags) {
    return *flags = stream_of(stream)->flags, SUCCESS;
}
API int cudaStreamGetPriority(void *stream, int *priority) {
    return *priority = stream_of(stream)->priority, SUCCESS;
}
API int cudaStreamGetDevice(void *stream, int *device) {
    (void)stream;
    return *device = 0, SUCCESS;
}
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least != NULL) *least = 0;
    if (greatest != NULL) *greatest = -5;
    return SUCCESS;
}
API int cudaStreamSetAttribute(void *stream, int attribute, const void *value) {
    (void)stream, (void)attribute, (void)value;
    return SUCCESS;
}
API int cudaLaunchHostFunc(void *stream, HostFunction function, void *data) {
    if (capture_of(stream_of(stream)) != NULL) return unsupported("cudaLaunchHostFunc in a graph");
    flush_printed();
    function(data);
    return SUCCESS;
}
API int cudaStreamAddCallback(void *stream, StreamCallback function, void *data, unsigned flags) {
    (void)flags;
    flush_printed();
    function(stream, sticky_error(), data);
    return SUCCESS;
}

API int cudaEventCreate(Event **event) { return fail(event_create(event)); }
API int cudaEventCreateWithFlags(Event **event, unsigned flags) {
    (void)flags;
    return fail(event_create(event));
}
API int cudaEventDestroy(Event *event) { return free(event), SUCCESS; }
API int cudaEventRecord(Event *event, void *stream) { return fail(event_record(event, stream)); }
API int cudaEventRecordWithFlags(Event *event, void *stream, unsigned flags) {
    (void)flags;
    return fail(event_record(event, stream));
}
API int cudaEventSynchronize(Event *event) {
    return fail(event == NULL ? INVALID_HANDLE : synchronize());
}
API int cudaEventQuery(Event *event) { return cudaEventSynchronize(event); }
API int cudaEventElapsedTime(float *milliseconds, Event *first, Event *last) {
    return fail(event_elapsed(milliseconds, first, last));
}
API int cudaEventElapsedTime_v2(float *milliseconds, Event *first, Event *last) {
    return fail(event_elapsed(milliseconds, first, last));
}
