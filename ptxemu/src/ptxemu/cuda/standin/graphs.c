/* CUDA graphs that come from capturing streams: launches, copies and fills in their order. */
#include "standin.h"

#include <stdlib.h>
#include <string.h>

typedef struct Node {
    struct Node *next;
    Function *function; /* of a launch; else NULL */
    Shape shape;
    void *block; /* of a launch: its parameters, `size` bytes */
    void *target;
    const void *source; /* NULL: a fill */
    size_t size;        /* of a fill: its elements */
    uint32_t value;
    unsigned width;
} Node;

struct Graph {
    Node *first, *last;
    unsigned references; /* the program's graph, and what was instantiated from it */
    Stream *origin;
};

Graph *capture_of(Stream *stream) { return stream->capture; }

static void append(Graph *graph, const Node *values) {
    Node *node = malloc(sizeof *node);
    *node = *values;
    standin_lock();
    if (graph->last != NULL) graph->last->next = node;
    else graph->first = node;
    graph->last = node;
    standin_unlock();
}

int capture_launch(Graph *graph, Function *function, const Shape *shape, const void *block,
                   size_t size) {
    void *copy = malloc(size ? size : 1);
    memcpy(copy, block, size);
    append(graph, &(Node){.function = function, .shape = *shape, .block = copy, .size = size});
    return SUCCESS;
}

int capture_copy(Graph *graph, void *target, const void *source, size_t size) {
    append(graph, &(Node){.target = target, .source = source, .size = size});
    return SUCCESS;
}

int capture_fill(Graph *graph, void *target, uint32_t value, unsigned width, size_t count) {
    append(graph, &(Node){.target = target, .value = value, .width = width, .size = count});
    return SUCCESS;
}

int capture_begin(Stream *stream) {
    if (stream->capture != NULL) return CAPTURE_UNSUPPORTED;
    Graph *graph = calloc(1, sizeof *graph);
    graph->references = 1;
    graph->origin = stream;
    stream->capture = graph;
    return SUCCESS;
}

int capture_end(Stream *stream, Graph **result) {
    Graph *graph = stream->capture;
    if (graph == NULL || graph->origin != stream) return INVALID_VALUE;
    stream->capture = NULL;
    for (Stream *other = streams(); other != NULL; other = other->next)
        if (other->capture == graph) other->capture = NULL;
    *result = graph;
    return SUCCESS;
}

int graph_run(Graph *graph) {
    for (const Node *node = graph->first; node != NULL; node = node->next) {
        int status = SUCCESS;
        if (node->function != NULL)
            status = launch_packed(node->function, &node->shape, node->block, node->size, NULL);
        else if (node->source != NULL)
            status = memory_copy(node->target, node->source, node->size);
        else
            status = memory_fill(node->target, node->value, node->width, node->size);
        if (status != SUCCESS) return status;
    }
    return SUCCESS;
}

static int release(Graph *graph) {
    if (graph == NULL) return INVALID_VALUE;
    if (--graph->references > 0) return SUCCESS;
    for (Node *node = graph->first; node != NULL;) {
        Node *next = node->next;
        free(node->block);
        free(node);
        node = next;
    }
    free(graph);
    return SUCCESS;
}

static int instantiate(Graph **executable, Graph *graph) {
    if (executable == NULL || graph == NULL) return INVALID_VALUE;
    graph->references++;
    *executable = graph;
    return SUCCESS;
}

static int run_in(Graph *graph, void *stream) {
    Graph *outer = capture_of(stream_of(stream));
    return outer != NULL ? CAPTURE_UNSUPPORTED : graph_run(graph);
}

static int is_capturing(void *stream, int *status) {
    *status = capture_of(stream_of(stream)) != NULL;
    return SUCCESS;
}

API int cudaStreamBeginCapture(void *stream, int mode) {
    (void)mode;
    return fail(capture_begin(stream_of(stream)));
}
API int cudaStreamEndCapture(void *stream, Graph **graph) {
    return fail(capture_end(stream_of(stream), graph));
}
API int cudaStreamIsCapturing(void *stream, int *status) { return is_capturing(stream, status); }
API int cudaGraphInstantiate(Graph **executable, Graph *graph) {
    return fail(instantiate(executable, graph));
}
API int cudaGraphInstantiateWithFlags(Graph **executable, Graph *graph) {
    return fail(instantiate(executable, graph));
}
API int cudaGraphUpload(Graph *executable, void *stream) {
    (void)executable, (void)stream;
    return SUCCESS;
}
API int cudaGraphLaunch(Graph *executable, void *stream) {
    return fail(run_in(executable, stream));
}
API int cudaGraphDestroy(Graph *graph) { return fail(release(graph)); }
API int cudaGraphExecDestroy(Graph *executable) { return fail(release(executable)); }

API int cuStreamBeginCapture_v2(void *stream, int mode) {
    (void)mode;
    return capture_begin(stream_of(stream));
}
API int cuStreamEndCapture(void *stream, Graph **graph) {
    return capture_end(stream_of(stream), graph);
}
API int cuStreamIsCapturing(void *stream, int *status) { return is_capturing(stream, status); }
API int cuGraphInstantiateWithFlags(Graph **executable, Graph *graph) {
    return instantiate(executable, graph);
}
API int cuGraphLaunch(Graph *executable, void *stream) { return run_in(executable, stream); }
API int cuGraphDestroy(Graph *graph) { return release(graph); }
API int cuGraphExecDestroy(Graph *executable) { return release(executable); }
