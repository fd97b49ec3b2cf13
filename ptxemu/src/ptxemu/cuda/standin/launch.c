/* Launches, and what is left of them: errors that come with the next call, and printf's text.
 *
 * A launch has ended when its call returns. As with CUDA, an error in the kernel is not that
 * call's: the calls behind it return it, all of them, until the process ends. */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ATTRIBUTE_BYTES 72
#define COOPERATIVE 2
#define CLUSTER_DIMENSION 4
#define PROGRAMMATIC 6
#define FLAG_COOPERATIVE 1u
#define FLAG_PROGRAMMATIC 2u

static int sticky;
static __thread int last_error;
static char *printed;
static size_t printed_size;

int sticky_error(void) { return sticky; }

/* Remember an error for cudaGetLastError. */
int fail(int status) {
    if (status != SUCCESS) last_error = status;
    return status;
}

int take_last_error(void) {
    int status = sticky != SUCCESS ? sticky : last_error;
    last_error = SUCCESS;
    return status;
}

int peek_last_error(void) { return sticky != SUCCESS ? sticky : last_error; }

void flush_printed(void) {
    standin_lock();
    if (printed_size) {
        fwrite(printed, 1, printed_size, stdout);
        fflush(stdout);
    }
    printed_size = 0;
    standin_unlock();
}

int synchronize(void) {
    flush_printed();
    return sticky;
}

static void keep_printed(const char *text, size_t size) {
    printed = realloc(printed, printed_size + size + 1);
    memcpy(printed + printed_size, text, size);
    printed_size += size;
}

typedef struct {
    uint64_t function;
    Dim3 grid, block, cluster;
    uint32_t shared_bytes, flags, size;
} LaunchWords;

static int run(Function *function, const Shape *shape, const void *block, size_t size) {
    LaunchWords words = {
        .function = function->id,
        .grid = shape->grid,
        .block = shape->block,
        .cluster = shape->cluster,
        .shared_bytes = shape->shared_bytes,
        .flags = (shape->is_cooperative ? FLAG_COOPERATIVE : 0) |
                 (shape->is_programmatic ? FLAG_PROGRAMMATIC : 0),
        .size = (uint32_t)size,
    };
    struct iovec parts[2] = {{&words, sizeof words}, {(void *)block, size}};
    Reply reply;
    int status = request(OP_LAUNCH, parts, 2, &reply);
    if (status == SUCCESS && reply.size >= sizeof sticky) {
        memcpy(&sticky, reply.data, sizeof sticky);
        standin_lock();
        keep_printed(reply.data + sizeof sticky, reply.size - sizeof sticky);
        standin_unlock();
    }
    free(reply.data);
    return status;
}

int launch_packed(Function *function, const Shape *shape, const void *block, size_t size,
                  Stream *stream) {
    if (sticky != SUCCESS) return sticky;
    int status = function_resolve(function);
    if (status != SUCCESS) return status;
    Graph *graph = stream != NULL ? capture_of(stream) : NULL;
    if (graph != NULL) return capture_launch(graph, function, shape, block, size);
    return run(function, shape, block, size);
}

int launch(Function *function, const Shape *shape, void **arguments, Stream *stream) {
    if (sticky != SUCCESS) return sticky;
    int status = function_resolve(function);
    if (status != SUCCESS) return status;
    size_t size = function->parameter_bytes;
    char *block = calloc(1, size ? size : 1);
    for (uint32_t i = 0; i < function->num_parameters; i++) {
        const Parameter *parameter = &function->parameters[i];
        memcpy(block + parameter->offset, arguments[i], parameter->size);
    }
    status = launch_packed(function, shape, block, size, stream);
    free(block);
    return status;
}

/* Read an array of cudaLaunchAttribute (CUlaunchAttribute has the same layout). Attributes that
 * do not change what a launch computes, such as priorities, are left alone: launches run one after
 * the other. */
int shape_attributes(Shape *shape, const char *attributes, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        const char *attribute = attributes + i * ATTRIBUTE_BYTES;
        uint32_t id;
        Dim3 value;
        memcpy(&id, attribute, sizeof id);
        memcpy(&value, attribute + 8, sizeof value);
        if (id == CLUSTER_DIMENSION) shape->cluster = value;
        if (id == COOPERATIVE) shape->is_cooperative = value.x != 0;
        if (id == PROGRAMMATIC) shape->is_programmatic = value.x != 0;
    }
    return SUCCESS;
}
