/* The way to the emulator: a socket to the process that started this program, or, in a Python
 * program, a function of the same process. */
#define _GNU_SOURCE
#include "standin.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

typedef int (*Callback)(uint32_t operation, const char *data, size_t size);

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int is_started, start_status;
static int connection = -1;
static Callback callback;
static int callback_file = -1;
static Reply callback_reply;

void standin_lock(void) { pthread_mutex_lock(&mutex); }
void standin_unlock(void) { pthread_mutex_unlock(&mutex); }

/* Python calls this before the first call of CUDA: requests go to `function`, memory is `file`. */
API void ptxemu_connect(Callback function, int file) {
    callback = function;
    callback_file = file;
}

/* What `function` answers with, called from inside it. */
API void ptxemu_reply(const char *data, size_t size) {
    callback_reply.data = malloc(size ? size : 1);
    memcpy(callback_reply.data, data, size);
    callback_reply.size = size;
}

/* In a Python process tensors in host memory stand for tensors on the GPU. */
int host_memory_is_device_memory(void) { return callback != NULL; }

/* A forked child has no connection of its own, as it has no CUDA context. */
static void after_fork(void) {
    if (is_started) start_status = INITIALIZATION_ERROR;
    if (connection >= 0) close(connection);
    connection = -1;
    callback = NULL;
}

static int send_all(struct iovec *parts, int count) {
    while (count > 0) {
        ssize_t sent = writev(connection, parts, count);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) return -1;
        while (count > 0 && (size_t)sent >= parts->iov_len) {
            sent -= parts->iov_len;
            parts++, count--;
        }
        if (count > 0) {
            parts->iov_base = (char *)parts->iov_base + sent;
            parts->iov_len -= sent;
        }
    }
    return 0;
}

static int receive_all(void *data, size_t size) {
    for (char *at = data; size > 0;) {
        ssize_t got = read(connection, at, size);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return -1;
        at += got;
        size -= got;
    }
    return 0;
}

/* The first byte of a connection brings the file that is the emulated memory. */
static int receive_file(void) {
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof control};
    if (recvmsg(connection, &message, 0) != 1) return -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    int file = -1;
    if (header != NULL && header->cmsg_type == SCM_RIGHTS)
        memcpy(&file, CMSG_DATA(header), sizeof file);
    return file;
}

static int lost(void) {
    static int is_said;
    if (!is_said++) fprintf(stderr, "ptxemu: the connection to the emulator is lost\n");
    return UNKNOWN;
}

static int exchange(enum Operation operation, const struct iovec *parts, int count, Reply *reply) {
    size_t total = 0;
    for (int i = 0; i < count; i++) total += parts[i].iov_len;
    *reply = (Reply){NULL, 0};
    if (callback != NULL) {
        char *data = malloc(total ? total : 1), *at = data;
        for (int i = 0; i < count; i++) {
            memcpy(at, parts[i].iov_base, parts[i].iov_len);
            at += parts[i].iov_len;
        }
        callback_reply = *reply;
        int status = callback(operation, data, total);
        *reply = callback_reply;
        free(data);
        return status;
    }
    uint64_t head[2] = {operation, total};
    struct iovec all[9] = {{head, sizeof head}};
    memcpy(all + 1, parts, count * sizeof *parts);
    int64_t answer[2];
    if (send_all(all, count + 1) || receive_all(answer, sizeof answer)) return lost();
    reply->size = answer[1];
    reply->data = malloc(reply->size ? reply->size : 1);
    if (receive_all(reply->data, reply->size)) return lost();
    return (int)answer[0];
}

static int connect_to_emulator(void) {
    int file = callback_file;
    pthread_atfork(NULL, NULL, after_fork);
    if (callback == NULL) {
        const char *path = getenv("PTXEMU_SOCKET");
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        if (path == NULL || strlen(path) >= sizeof address.sun_path) {
            fprintf(stderr, "ptxemu: start this program by `ptxemu exec`\n");
            return INITIALIZATION_ERROR;
        }
        strcpy(address.sun_path, path);
        connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(connection, (struct sockaddr *)&address, sizeof address)) return lost();
        file = receive_file();
    }
    uint64_t process = getpid();
    struct iovec part = {&process, sizeof process};
    Reply reply;
    int status = exchange(OP_HELLO, &part, 1, &reply);
    if (status == SUCCESS && reply.size == 5 * sizeof(uint64_t)) {
        uint64_t facts[5];
        memcpy(facts, reply.data, sizeof facts);
        status = memory_start(file, facts[0], facts[1], facts[2], facts[3], facts[4]);
    }
    free(reply.data);
    return status;
}

/* Connect at the first call; what went wrong then is the answer to every call. */
int start(void) {
    standin_lock();
    if (!is_started) {
        is_started = 1;
        start_status = connect_to_emulator();
    }
    standin_unlock();
    return start_status;
}

int request(enum Operation operation, const struct iovec *parts, int count, Reply *reply) {
    Reply ignored = {NULL, 0};
    Reply *answer = reply != NULL ? reply : &ignored;
    int status = start();
    *answer = ignored;
    if (status == SUCCESS) {
        standin_lock();
        status = exchange(operation, parts, count, answer);
        standin_unlock();
    }
    if (reply == NULL) free(answer->data);
    return status;
}

int request_words(enum Operation operation, const void *words, size_t size, Reply *reply) {
    struct iovec part = {(void *)words, size};
    return request(operation, &part, 1, reply);
}

/* A request whose answer is one 32-bit number. */
int request_number(enum Operation operation, const void *words, size_t size, int *value) {
    Reply reply;
    int status = request_words(operation, words, size, &reply);
    if (status == SUCCESS && reply.size >= sizeof *value) memcpy(value, reply.data, sizeof *value);
    free(reply.data);
    return status;
}

/* The answer of every function that is not emulated; the report names it. */
int unsupported(const char *name) {
    request_words(OP_UNSUPPORTED, name, strlen(name), NULL);
    return fail(NOT_SUPPORTED);
}
