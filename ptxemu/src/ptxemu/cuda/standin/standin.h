/* What the parts of the stand-in for the CUDA runtime and driver share.
 *
 * The stand-in keeps handles, memory and errors; what a launch does, and every fact about device
 * and kernels, it asks the emulator for (link.c). The numbers of operations and the layouts of
 * requests are those of ptxemu/cuda/protocol.py. No header of CUDA is needed to compile it. */
#ifndef PTXEMU_STANDIN_H
#define PTXEMU_STANDIN_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define API __attribute__((visibility("default")))

/* cudaError_t and CUresult have the same numbers for these. */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INITIALIZATION_ERROR = 3,
    INVALID_CONFIGURATION = 9,
    INVALID_SYMBOL = 13,
    INVALID_DEVICE_FUNCTION = 98,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999,
};

enum Operation {
    OP_HELLO = 1,
    OP_MODULE,
    OP_FUNCTION,
    OP_LAUNCH,
    OP_SYMBOL,
    OP_GET_FUNCTION_ATTRIBUTE,
    OP_SET_FUNCTION_ATTRIBUTE,
    OP_OCCUPANCY,
    OP_DEVICE_ATTRIBUTE,
    OP_DEVICE_PROPERTIES,
    OP_TENSOR_MAP,
    OP_ALLOCATED,
    OP_FREED,
    OP_UNSUPPORTED,
    
};

enum MemoryKind { MEMORY_DEVICE = 0, MEMORY_PINNED = 1, MEMORY_MANAGED = 2 };

typedef struct {
    uint32_t x, y, z;
} Dim3;

/* The emulator's answer: `data` is the caller's to free. */
typedef struct {
    char *data;
    size_t size;
} Reply;

/* A block of emulated memory, at the address that the program sees. */
typedef struct {
    uint64_t base;
    size_t size;
    enum MemoryKind kind;
} Block;

/* A loaded image: a fat binary, a cubin or PTX; sent to the emulator when it is first needed. */
typedef struct Image {
    const void *data;
    uint64_t id;
    int status;
    int is_sent;
    struct Function *functions;
} Image;

typedef struct {
    uint32_t offset, size;
} Parameter;

/* A kernel; its handles are this structure's address. */
typedef struct Function {
    char *name;
    Image *image;
    struct Function *next;
    uint64_t id;
    int is_resolved, status;
    uint32_t num_parameters, parameter_bytes;
    Parameter *parameters;
} Function;

typedef struct Graph Graph;

typedef struct Stream {
    unsigned flags;
    int priority;
    Graph *capture; /* NULL where the stream is not being captured */
    struct Stream *next;
} Stream;

typedef struct {
    double seconds;
    int is_recorded;
    Graph *capture;
} Event;

typedef struct {
    Dim3 grid, block, cluster; /* cluster.x == 0: none is asked for */
    uint32_t shared_bytes;
    int is_cooperative, is_programmatic;
} Shape;

/* link.c */
int request(enum Operation operation, const struct iovec *parts, int count, Reply *reply);
int request_words(enum Operation operation, const void *words, size_t size, Reply *reply);
int request_number(enum Operation operation, const void *words, size_t size, int *value);
int start(void);
void standin_lock(void);
void standin_unlock(void);
int unsupported(const char *name);
int host_memory_is_device_memory(void);

/* memory.c */
int memory_start(int file, uint64_t base, uint64_t device_bytes, uint64_t shared_bytes,
                 uint64_t shared_room, uint64_t capacity);
int memory_allocate(void **result, size_t size, enum MemoryKind kind);
int memory_free(const void *address);
const Block *memory_block(const void *address);
void *memory_view(const void *address, size_t size);
int memory_copy(void *target, const void *source, size_t size);
int memory_copy_2d(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                   size_t width, size_t height);
int memory_fill(void *target, uint32_t value, unsigned width, size_t count);
void memory_room(size_t *available, size_t *total);

/* modules.c */
Image *image_new(const void *data);
int image_send(Image *image);
Function *function_new(Image *image, const void *host, const char *name);
Function *function_find(const void *host);
int function_resolve(Function *function);
int function_attribute(const void *host, int attribute, int *value);
int set_function_attribute(const void *host, int attribute, int value);
int variable_address(const void *host, void **address, size_t *size);
int symbol_address(Image *image, const char *name, void **address, size_t *size);

/* launch.c */
int launch(Function *function, const Shape *shape, void **arguments, Stream *stream);
int launch_packed(Function *function, const Shape *shape, const void *block, size_t size,
                  Stream *stream);
int shape_attributes(Shape *shape, const char *attributes, unsigned count);
void flush_printed(void);
int synchronize(void);
int fail(int status);
int sticky_error(void);
int take_last_error(void);
int peek_last_error(void);

/* graphs.c */
Graph *capture_of(Stream *stream);
int capture_launch(Graph *graph, Function *function, const Shape *shape, const void *block,
                   size_t size);
int capture_copy(Graph *graph, void *target, const void *source, size_t size);
int capture_fill(Graph *graph, void *target, uint32_t value, unsigned width, size_t count);
int capture_begin(Stream *stream);
int capture_end(Stream *stream, Graph **result);
int graph_run(Graph *graph);

/* streams.c */
double now(void);
int stream_create(Stream **stream, unsigned flags, int priority);
int stream_destroy(Stream *stream);
Stream *stream_of(void *handle);
Stream *streams(void);
int stream_copy(void *target, const void *source, size_t size, void *stream);
int stream_fill(void *target, uint32_t value, unsigned width, size_t count, void *stream);
int event_create(Event **event);
int event_record(Event *event, void *stream);
int event_elapsed(float *milliseconds, const Event *first, const Event *last);
int stream_wait_event(void *stream, const Event *event);

/* errors.c */
const char *error_name(int code);
const char *error_text(int code);
const char *result_name(int code);

#endif
