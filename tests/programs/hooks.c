// Functions in the place of the C library's, as libraries have them that follow a program's memory
// (UCX's ucm, sanitizers). To be preloaded. Such ones may lose mremap's fifth argument, or take
// what libibverbs does for the program's doing; so libibverbs may not come here: the process ends
// when it does.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static void refuse_library(const char *call, const void *caller) {
    Dl_info about;
    if (dladdr(caller, &about) && about.dli_fname && strstr(about.dli_fname, "libibverbs")) {
        fprintf(stderr, "libibverbs calls %s, which is not the C library's\n", call);
        abort();
    }
}

void *mmap(void *at, size_t bytes, int rights, int flags, int fd, off_t from) {
    refuse_library("mmap", __builtin_return_address(0));
    return (void *)syscall(SYS_mmap, at, bytes, rights, flags, fd, from);
}

void *mremap(void *at, size_t old_bytes, size_t bytes, int flags, ...) {
    refuse_library("mremap", __builtin_return_address(0));
    va_list more;
    va_start(more, flags);
    void *to = flags & MREMAP_FIXED ? va_arg(more, void *) : NULL;
    va_end(more);
    return (void *)syscall(SYS_mremap, at, old_bytes, bytes, flags, to);
}

int munmap(void *at, size_t bytes) {
    refuse_library("munmap", __builtin_return_address(0));
    return (int)syscall(SYS_munmap, at, bytes);
}

int mprotect(void *at, size_t bytes, int rights) {
    refuse_library("mprotect", __builtin_return_address(0));
    return (int)syscall(SYS_mprotect, at, bytes, rights);
}

int madvise(void *at, size_t bytes, int advice) {
    refuse_library("madvise", __builtin_return_address(0));
    return (int)syscall(SYS_madvise, at, bytes, advice);
}
