/* Emulated memory: one file that this process and the emulator map.
 *
 * Device memory has addresses at which nothing is mapped here, so a host access to it faults as on
 * a machine with a GPU; copies go through a second mapping. Pinned and managed memory is mapped at
 * its own address. Between blocks stay unused bytes, and an address is not handed out again while
 * others are left: a kernel that leaves its block, or uses it after cudaFree, hits nothing. */
#define _GNU_SOURCE
#include "standin.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096
#define ALIGNMENT PAGE /* a page is one block's: what nobody wrote is known by pages */
#define GUARD 512

typedef struct {
    uint64_t base, size, next; /* next: where the search for room goes on */
    uint64_t file_offset;
    char *view;
} Region;

static Region device, shared;
static int memory_file = -1;
static Block *blocks; /* by address */
static size_t num_blocks, room_for_blocks;
static size_t used, capacity;

int memory_start(int file, uint64_t base, uint64_t device_bytes, uint64_t shared_bytes,
                 uint64_t shared_room, uint64_t total) {
    uint64_t shared_base = base + device_bytes;
    int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_NORESERVE;
    void *view = mmap(NULL, device_bytes, protection, flags, file, 0);
    void *at_home = mmap((void *)shared_base, shared_bytes, protection, flags | MAP_FIXED_NOREPLACE,
                         file, device_bytes);
    if (view == MAP_FAILED || at_home != (void *)shared_base) {
        fprintf(stderr, "ptxemu: cannot map the emulated memory at %#lx\n", (long)shared_base);
        return INITIALIZATION_ERROR;
    }
    /* The emulator places the modules' variables in what is left of both regions. */
    device = (Region){base, device_bytes - shared_room, 0, 0, view};
    shared = (Region){shared_base, shared_bytes - shared_room, 0, device_bytes, at_home};
    memory_file = file;
    capacity = total;
    return SUCCESS;
}

static size_t position(uint64_t address) {
    size_t low = 0, high = num_blocks;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].base <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int is_free(uint64_t start, uint64_t size) {
    size_t at = position(start + size + GUARD);
    return at == 0 || blocks[at - 1].base + blocks[at - 1].size + GUARD <= start;
}

/* Room in `region`; 0 where there is none. */
static uint64_t place(Region *region, size_t size) {
    uint64_t taken = (size + GUARD + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (region->next + taken <= region->size && is_free(region->base + region->next, size)) {
        uint64_t start = region->base + region->next;
        region->next += taken;
        return start;
    }
    uint64_t start = region->base;
    for (size_t i = position(start); i <= num_blocks; i++) {
        uint64_t end = i < num_blocks ? blocks[i].base : region->base + region->size;
        if (end > region->base + region->size) end = region->base + region->size;
        if (start + taken <= end) {
            region->next = start + taken - region->base;
            return start;
        }
        if (i == num_blocks || blocks[i].base >= region->base + region->size) break;
        uint64_t behind = blocks[i].base + blocks[i].size + GUARD;
        start = (behind + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    return 0;
}

static int tell(enum Operation operation, const Block *block) {
    uint64_t words[3] = {block->base, block->size, block->kind};
    return request_words(operation, words, sizeof words, NULL);
}

int memory_allocate(void **result, size_t size, enum MemoryKind kind) {
    int status = start();
    if (status != SUCCESS) return status;
    if (result == NULL) return INVALID_VALUE;
    *result = NULL;
    if (size == 0) return SUCCESS;
    standin_lock();
    uint64_t start = size <= capacity - used || kind == MEMORY_PINNED
                         ? place(kind == MEMORY_DEVICE ? &device : &shared, size)
                         : 0;
    if (start == 0) {
        standin_unlock();
        return OUT_OF_MEMORY;
    }
    if (num_blocks == room_for_blocks) {
        room_for_blocks = room_for_blocks ? 2 * room_for_blocks : 64;
        blocks = realloc(blocks, room_for_blocks * sizeof *blocks);
    }
    size_t at = position(start);
    memmove(blocks + at + 1, blocks + at, (num_blocks++ - at) * sizeof *blocks);
    blocks[at] = (Block){start, size, kind};
    used += kind == MEMORY_PINNED ? 0 : size;
    *result = (void *)start;
    status = tell(OP_ALLOCATED, &blocks[at]);
    standin_unlock();
    return status;
}

/* Give the block's pages back. */
static void drop_pages(const Block *block) {
    const Region *region = block->kind == MEMORY_DEVICE ? &device : &shared;
    uint64_t first = block->base - region->base + region->file_offset, last = first + block->size;
    last = (last + PAGE - 1) / PAGE * PAGE;
    fallocate(memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first, last - first);
}

int memory_free(const void *address) {
    int status = SUCCESS;
    if (address == NULL) return SUCCESS;
    standin_lock();
    size_t at = position((uint64_t)address);
    if (at == 0 || blocks[at - 1].base != (uint64_t)address) {
        status = INVALID_VALUE;
    } else {
        Block block = blocks[at - 1];
        memmove(blocks + at - 1, blocks + at, (num_blocks-- - at) * sizeof *blocks);
        used -= block.kind == MEMORY_PINNED ? 0 : block.size;
        status = tell(OP_FREED, &block);
        drop_pages(&block);
    }
    standin_unlock();
    return status;
}

const Block *memory_block(const void *address) {
    size_t at = position((uint64_t)address);
    if (at == 0) return NULL;
    const Block *block = &blocks[at - 1];
    return (uint64_t)address < block->base + block->size ? block : NULL;
}

/* Where this process can access [address, address + size); NULL: it leaves its block. */
void *memory_view(const void *address, size_t size) {
    uint64_t start = (uint64_t)address;
    if (start < device.base || start >= shared.base) return (void *)address;
    if (start - device.base >= device.size) return device.view + (start - device.base);
    standin_lock();
    const Block *block = memory_block(address);
    int is_inside = block != NULL && start + size <= block->base + block->size;
    standin_unlock();
    return is_inside ? device.view + (start - device.base) : NULL;
}

int memory_copy(void *target, const void *source, size_t size) {
    int status = start();
    if (status != SUCCESS || size == 0) return status;
    void *to = memory_view(target, size), *from = memory_view(source, size);
    if (to == NULL || from == NULL) return INVALID_VALUE;
    memmove(to, from, size);
    return SUCCESS;
}

int memory_copy_2d(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                   size_t width, size_t height) {
    if (width > target_pitch || width > source_pitch) return 12; /* invalid pitch */
    for (size_t row = 0; row < height; row++) {
        int status = memory_copy((char *)target + row * target_pitch,
                                 (const char *)source + row * source_pitch, width);
        if (status != SUCCESS) return status;
    }
    return SUCCESS;
}

/* `count` elements of `width` (1, 2 or 4) bytes. */
int memory_fill(void *target, uint32_t value, unsigned width, size_t count) {
    int status = start();
    if (status != SUCCESS || count == 0) return status;
    char *to = memory_view(target, count * width);
    if (to == NULL) return INVALID_VALUE;
    if (width == 1) memset(to, (int)value, count);
    else
        for (size_t i = 0; i < count; i++) memcpy(to + i * width, &value, width);
    return SUCCESS;
}

void memory_room(size_t *available, size_t *total) {
    *available = *total = 0;
    if (start() != SUCCESS) return;
    *available = capacity - used;
    *total = capacity;
}
