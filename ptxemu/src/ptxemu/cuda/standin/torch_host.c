/* The functions of torch's libc10_cuda that host code of C++ extensions calls, for the CPU build of
 * torch. The names are those of C++; a stream is 16 bytes that registers hold. */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct {
    int8_t device_type, device;
    int64_t id;
} TorchStream;

#define NAMED(name) __asm__(name) API

TorchStream current_stream(int8_t device) NAMED("_ZN3c104cuda20getCurrentCUDAStreamEa");
TorchStream default_stream_of(int8_t device) NAMED("_ZN3c104cuda20getDefaultCUDAStreamEa");
void *stream_handle(const TorchStream *stream) NAMED("_ZNK3c104cuda10CUDAStream6streamEv");
void check_status(int status, const char *file, const char *function, unsigned line, int assertions)
    NAMED("_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb");
int8_t device_count(void) NAMED("_ZN3c104cuda12device_countEv");
int8_t current_device(void) NAMED("_ZN3c104cuda14current_deviceEv");
void set_device(int8_t device, int force) NAMED("_ZN3c104cuda10set_deviceEab");
int get_device(int8_t *device) NAMED("_ZN3c104cuda9GetDeviceEPa");
int set_device_status(int8_t device, int force) NAMED("_ZN3c104cuda9SetDeviceEab");
int maybe_set_device(int8_t device) NAMED("_ZN3c104cuda14MaybeSetDeviceEa");
int8_t exchange_device(int8_t device) NAMED("_ZN3c104cuda14ExchangeDeviceEa");
int8_t maybe_exchange_device(int8_t device) NAMED("_ZN3c104cuda19MaybeExchangeDeviceEa");

TorchStream current_stream(int8_t device) { return (void)device, (TorchStream){1, 0, 0}; }
TorchStream default_stream_of(int8_t device) { return current_stream(device); }
void *stream_handle(const TorchStream *stream) { return (void)stream, NULL; }
int8_t device_count(void) { return 1; }
int8_t current_device(void) { return 0; }
void set_device(int8_t device, int force) { (void)device, (void)force; }
int get_device(int8_t *device) { return *device = 0, SUCCESS; }
int set_device_status(int8_t device, int force) { return (void)device, (void)force, SUCCESS; }
int maybe_set_device(int8_t device) { return (void)device, SUCCESS; }
int8_t exchange_device(int8_t device) { return (void)device, 0; }
int8_t maybe_exchange_device(int8_t device) { return (void)device, 0; }

/* torch throws a C++ exception here, which C cannot; the report has the launch's own error. */
void check_status(int status, const char *file, const char *function, unsigned line,
                  int assertions) {
    (void)assertions;
    if (status == SUCCESS) return;
    fprintf(stderr, "%s:%u: %s: CUDA error: %s\n", file, line, function, error_text(status));
    exit(1);
}
