/* Images, their kernels and their variables, as programs register or load them. */
#include "standin.h"

#include <stdlib.h>
#include <string.h>

#define FAT_WRAPPER 0x466243b1u
#define FAT_BINARY 0xba55ed50u
#define ELF 0x464c457fu

typedef struct {
    uint32_t magic, version;
    const void *data;
    void *file_or_images;
} FatWrapper;

typedef struct Variable {
    const void *host;
    void **managed; /* where the program keeps the address of a __managed__ variable */
    const char *name;
    Image *image;
    struct Variable *next;
} Variable;

static Variable *variables;

/* Kernels by the addresses that stand for them: the stub in the program, and the handle. */
typedef struct {
    const void *key;
    Function *function;
} Slot;

static Slot *table;
static size_t table_size, table_used;

static Slot *slot_of(const void *key) {
    size_t at = ((uintptr_t)key >> 3) * 0x9e3779b97f4a7c15u >> 20 & (table_size - 1);
    while (table[at].key != NULL && table[at].key != key) at = (at + 1) & (table_size - 1);
    return &table[at];
}

static void enter(const void *key, Function *function) {
    if (2 * (table_used + 1) > table_size) {
        Slot *old = table;
        size_t old_size = table_size;
        table_size = old_size ? 2 * old_size : 256;
        table = calloc(table_size, sizeof *table);
        for (size_t i = 0; i < old_size; i++)
            if (old[i].key != NULL) *slot_of(old[i].key) = old[i];
        free(old);
    }
    Slot *slot = slot_of(key);
    table_used += slot->key == NULL;
    *slot = (Slot){key, function};
}

Image *image_new(const void *data) {
    Image *image = calloc(1, sizeof *image);
    image->data = data;
    return image;
}

/* Bytes of a fat binary, a cubin, or PTX with its closing zero. */
static size_t image_size(const void *data) {
    uint32_t magic;
    memcpy(&magic, data, sizeof magic);
    if (magic == FAT_BINARY) {
        uint64_t payload;
        uint16_t header;
        memcpy(&header, (const char *)data + 6, sizeof header);
        memcpy(&payload, (const char *)data + 8, sizeof payload);
        return header + payload;
    }
    return magic == ELF ? 64 : strlen(data) + 1;
}

int image_send(Image *image) {
    if (image->is_sent) return image->status;
    image->is_sent = 1;
    const void *data = image->data;
    uint32_t magic;
    memcpy(&magic, data, sizeof magic);
    if (magic == FAT_WRAPPER) data = ((const FatWrapper *)data)->data;
    Reply reply;
    image->status = request_words(OP_MODULE, data, image_size(data), &reply);
    if (image->status == SUCCESS) memcpy(&image->id, reply.data, sizeof image->id);
    free(reply.data);
    return image->status;
}

/* `host` NULL: the kernel has no stub in the program. */
Function *function_new(Image *image, const void *host, const char *name) {
    Function *function = calloc(1, sizeof *function);
    function->name = strdup(name);
    function->image = image;
    standin_lock();
    function->next = image->functions;
    image->functions = function;
    enter(function, function);
    if (host != NULL) enter(host, function);
    standin_unlock();
    return function;
}

/* By a stub's address or a handle; NULL: not known. */
Function *function_find(const void *host) {
    standin_lock();
    Function *function = table_size ? slot_of(host)->function : NULL;
    standin_unlock();
    return function;
}

int function_resolve(Function *function) {
    if (function->is_resolved) return function->status;
    function->is_resolved = 1;
    int status = image_send(function->image);
    Reply reply = {NULL, 0};
    if (status == SUCCESS) {
        struct iovec parts[2] = {{&function->image->id, sizeof function->image->id},
                                 {function->name, strlen(function->name)}};
        status = request(OP_FUNCTION, parts, 2, &reply);
    }
    if (status == SUCCESS) {
        memcpy(&function->id, reply.data, 8);
        memcpy(&function->num_parameters, reply.data + 8, 4);
        memcpy(&function->parameter_bytes, reply.data + 12, 4);
        size_t size = function->num_parameters * sizeof(Parameter);
        function->parameters = malloc(size ? size : 1);
        memcpy(function->parameters, reply.data + 16, size);
    }
    free(reply.data);
    return function->status = status;
}

int function_attribute(const void *host, int attribute, int *value) {
    Function *function = function_find(host);
    if (function == NULL) return INVALID_DEVICE_FUNCTION;
    int status = function_resolve(function);
    if (status != SUCCESS) return status;
    uint64_t words[2] = {function->id, (uint64_t)attribute};
    return request_number(OP_GET_FUNCTION_ATTRIBUTE, words, sizeof words, value);
}

int set_function_attribute(const void *host, int attribute, int value) {
    Function *function = function_find(host);
    if (function == NULL) return INVALID_DEVICE_FUNCTION;
    int status = function_resolve(function);
    if (status != SUCCESS) return status;
    uint64_t words[3] = {function->id, (uint64_t)attribute, (uint64_t)(int64_t)value};
    return request_words(OP_SET_FUNCTION_ATTRIBUTE, words, sizeof words, NULL);
}

int symbol_address(Image *image, const char *name, void **address, size_t *size) {
    int status = image_send(image);
    if (status != SUCCESS) return status;
    struct iovec parts[2] = {{&image->id, sizeof image->id}, {(void *)name, strlen(name)}};
    Reply reply;
    status = request(OP_SYMBOL, parts, 2, &reply);
    if (status == SUCCESS) {
        if (address != NULL) memcpy(address, reply.data, 8);
        if (size != NULL) memcpy(size, reply.data + 8, 8);
    }
    free(reply.data);
    return status;
}

int variable_address(const void *host, void **address, size_t *size) {
    for (Variable *variable = variables; variable != NULL; variable = variable->next)
        if (variable->host == host)
            return symbol_address(variable->image, variable->name, address, size);
    return INVALID_SYMBOL;
}

/* What nvcc's host code calls before main. Registering talks to nobody: many programs link images
 * that they never use. */
API void **__cudaRegisterFatBinary(void *wrapper) { return (void **)image_new(wrapper); }
API void __cudaRegisterFatBinaryEnd(void **image) { (void)image; }
API void __cudaUnregisterFatBinary(void **image) { (void)image; }

API void __cudaRegisterFunction(void **image, const char *host, char *device_name,
                                const char *name) {
    (void)device_name;
    function_new((Image *)image, host, name);
}

static Variable *variable_new(void **image, const void *host, const char *name) {
    Variable *variable = calloc(1, sizeof *variable);
    *variable = (Variable){host, NULL, name, (Image *)image, variables};
    return variables = variable;
}

API void __cudaRegisterVar(void **image, char *host, char *device_address, const char *name) {
    (void)device_address;
    variable_new(image, host, name);
}

API void __cudaRegisterManagedVar(void **image, void **host, char *device_address,
                                  const char *name) {
    (void)device_address;
    variable_new(image, host, name)->managed = host;
}

API char __cudaInitModule(void **image) {
    int status = SUCCESS;
    for (Variable *variable = variables; variable != NULL; variable = variable->next)
        if (variable->managed != NULL && variable->image == (Image *)image) {
            status = symbol_address(variable->image, variable->name, variable->managed, NULL);
            variable->managed = NULL;
        }
    return status == SUCCESS;
}

API void __cudaRegisterHostVar(void **image, const char *name, char *host, size_t size) {
    (void)image, (void)name, (void)host, (void)size;
}
API void __cudaRegisterUnifiedTable(void **table_) { (void)table_; }
