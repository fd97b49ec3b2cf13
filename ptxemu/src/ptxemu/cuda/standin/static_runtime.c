/* Programs that have the CUDA runtime linked in (nvcc's default) call it at addresses of their own.
 * Before their constructors run, the first bytes of those functions become a jump to the stand-in's
 * function of the same name. The program's symbol table says where they are. Libraries that are
 * loaded later are treated alike when ptxemu_redirect is called, which is after their
 * constructors: kernels that these registered are not known. */
#define _GNU_SOURCE
#include "standin.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096ul

#if defined(__x86_64__)
/* movabs $target, %r11; jmp *%r11 */
#define JUMP_BYTES 13
static void write_jump(unsigned char *at, void *target) {
    static const unsigned char move[2] = {0x49, 0xbb}, jump[3] = {0x41, 0xff, 0xe3};
    memcpy(at, move, 2);
    memcpy(at + 2, &target, 8);
    memcpy(at + 10, jump, 3);
}
#elif defined(__aarch64__)
/* ldr x16, 8 bytes on; br x16; the target */
#define JUMP_BYTES 16
static void write_jump(unsigned char *at, void *target) {
    static const unsigned code[2] = {0x58000050u, 0xd61f0200u};
    memcpy(at, code, 8);
    memcpy(at + 8, &target, 8);
}
#else
#error "ptxemu's stand-in runs on x86-64 and 64-bit ARM"
#endif

static void redirect(unsigned char *function, void *target) {
    unsigned char *first = (unsigned char *)((unsigned long)function & ~(PAGE - 1));
    size_t size = (size_t)(function + JUMP_BYTES - first);
    if (mprotect(first, size, PROT_READ | PROT_WRITE | PROT_EXEC)) return;
    write_jump(function, target);
    __builtin___clear_cache((char *)function, (char *)function + JUMP_BYTES);
    mprotect(first, size, PROT_READ | PROT_EXEC);
}

static int is_of_cuda(const char *name) {
    return !strncmp(name, "cuda", 4) || !strncmp(name, "__cuda", 6);
}

/* `bias`: what the loader adds to the file's addresses. */
static void redirect_symbols(const char *image, size_t size, unsigned long bias) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
    if (size < sizeof *header || memcmp(image, ELFMAG, SELFMAG) || header->e_shoff == 0 ||
        header->e_shoff + header->e_shnum * sizeof(Elf64_Shdr) > size)
        return;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    Dl_info self;
    void *standin = dladdr((void *)redirect, &self) ? dlopen(self.dli_fname, RTLD_NOW) : NULL;
    for (int i = 0; i < header->e_shnum && standin != NULL; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        const Elf64_Sym *symbols = (const Elf64_Sym *)(image + sections[i].sh_offset);
        const char *names = image + sections[sections[i].sh_link].sh_offset;
        for (size_t k = 0; k < sections[i].sh_size / sizeof *symbols; k++) {
            const Elf64_Sym *symbol = &symbols[k];
            if (ELF64_ST_TYPE(symbol->st_info) != STT_FUNC || symbol->st_shndx == SHN_UNDEF)
                continue;
            const char *name = names + symbol->st_name;
            void *target = is_of_cuda(name) ? dlsym(standin, name) : NULL;
            if (target != NULL) redirect((unsigned char *)(bias + symbol->st_value), target);
        }
    }
}

static void redirect_in_file(const char *path, unsigned long bias) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat facts;
    if (file < 0) return;
    if (fstat(file, &facts) == 0) {
        char *image = mmap(NULL, (size_t)facts.st_size, PROT_READ, MAP_PRIVATE, file, 0);
        if (image != MAP_FAILED) {
            redirect_symbols(image, (size_t)facts.st_size, bias);
            munmap(image, (size_t)facts.st_size);
        }
    }
    close(file);
}

typedef struct {
    unsigned long biases[4096];
    size_t count;
} Seen;

static int redirect_new(struct dl_phdr_info *info, size_t size, void *data) {
    Seen *seen = data;
    (void)size;
    for (size_t i = 0; i < seen->count; i++)
        if (seen->biases[i] == info->dlpi_addr) return 0;
    if (seen->count < sizeof seen->biases / sizeof *seen->biases)
        seen->biases[seen->count++] = info->dlpi_addr;
    const char *name = info->dlpi_name;
    if (strncmp(name, "/usr/", 5) && strncmp(name, "/lib", 4) && strstr(name, "ptxemu") == NULL)
        redirect_in_file(*name ? name : "/proc/self/exe", info->dlpi_addr);
    return 0;
}

/* Redirect what was loaded since the last call. */
API void ptxemu_redirect(void) {
    static Seen seen;
    dl_iterate_phdr(redirect_new, &seen);
}

__attribute__((constructor)) static void redirect_static_runtime(void) { ptxemu_redirect(); }
