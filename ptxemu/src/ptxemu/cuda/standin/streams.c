/* Streams and events. Work is done when it is given to a stream, so all orders that streams and
 * events ask for hold; captured streams record it instead. */
#include "standin.h"

#include <stdlib.h>
#include <time.h>

#define LEGACY_STREAM ((void *)1)
#define PER_THREAD_STREAM ((void *)2)

static Stream *all;
static Stream default_stream;

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

Stream *streams(void) { return all; }

int stream_create(Stream **stream, unsigned flags, int priority) {
    if (stream == NULL) return INVALID_VALUE;
    int status = start();
    if (status != SUCCESS) return status;
    Stream *made = calloc(1, sizeof *made);
    standin_lock();
    *made = (Stream){flags, priority, NULL, all};
    all = *stream = made;
    standin_unlock();
    return SUCCESS;
}

int stream_destroy(Stream *stream) {
    int status = INVALID_HANDLE;
    standin_lock();
    for (Stream **at = &all; *at != NULL; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            free(stream);
            status = SUCCESS;
            break;
        }
    standin_unlock();
    return status;
}

/* The stream behind a handle; the default one has three handles. */
Stream *stream_of(void *handle) {
    if (handle == NULL || handle == LEGACY_STREAM || handle == PER_THREAD_STREAM)
        return &default_stream;
    return handle;
}

int stream_copy(void *target, const void *source, size_t size, void *stream) {
    if (sticky_error() != SUCCESS) return sticky_error();
    Graph *graph = capture_of(stream_of(stream));
    return graph != NULL ? capture_copy(graph, target, source, size)
                         : memory_copy(target, source, size);
}

int stream_fill(void *target, uint32_t value, unsigned width, size_t count, void *stream) {
    if (sticky_error() != SUCCESS) return sticky_error();
    Graph *graph = capture_of(stream_of(stream));
    return graph != NULL ? capture_fill(graph, target, value, width, count)
                         : memory_fill(target, value, width, count);
}

int event_create(Event **event) {
    if (event == NULL) return INVALID_VALUE;
    int status = start();
    if (status == SUCCESS) *event = calloc(1, sizeof **event);
    return status;
}

int event_record(Event *event, void *stream) {
    if (event == NULL) return INVALID_HANDLE;
    if (sticky_error() != SUCCESS) return sticky_error();
    event->capture = capture_of(stream_of(stream));
    event->seconds = now();
    event->is_recorded = event->capture == NULL;
    return SUCCESS;
}

/* Time of the emulation, which says nothing about a GPU. */
int event_elapsed(float *milliseconds, const Event *first, const Event *last) {
    if (milliseconds == NULL || first == NULL || last == NULL) return INVALID_VALUE;
    if (!first->is_recorded || !last->is_recorded) return INVALID_HANDLE;
    *milliseconds = (float)(1e3 * (last->seconds - first->seconds));
    return sticky_error();
}

/* A stream that waits for an event of a captured one is captured too. */
int stream_wait_event(void *stream, const Event *event) {
    if (event == NULL) return INVALID_HANDLE;
    if (event->capture != NULL) stream_of(stream)->capture = event->capture;
    return SUCCESS;
}
