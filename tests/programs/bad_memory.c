// Registered memory that is not there when it is needed: every request on it ends with an error, in bounded time.
//
//   bad_memory KIND server PORT | KIND client HOST PORT
//
// The server owns the memory. KIND: uffd (a page under the owner's own userfaultfd, which nobody serves), uffd-user
// (the same for faults from user space only), truncated (a mapped file, cut short), unmapped, unreadable.
#define _GNU_SOURCE
#include "harness.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef USERFAULTFD_IOC_NEW // Linux 6.1
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

enum { BYTES = 65536, EXIT_NOT_HERE = 77, ANSWER_MS_MAX = 8000 };

struct memory {
    uint8_t *address;
    int fd;
};

static bool under_userfaultfd(struct memory *m, int flags) {
    m->fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | flags);
    int device = m->fd < 0 ? open("/dev/userfaultfd", O_RDWR | O_CLOEXEC) : -1;
    if (device >= 0) {
        m->fd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK | flags);
        close(device);
    }
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.range = {(uintptr_t)m->address, BYTES}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    return m->fd >= 0 && !ioctl(m->fd, UFFDIO_API, &api) && !ioctl(m->fd, UFFDIO_REGISTER, &range);
}

static bool make(const char *kind, struct memory *m) {
    *m = (struct memory){NULL, -1};
    if (!strcmp(kind, "truncated")) {
        char name[] = "/tmp/freeflow-truncated.XXXXXX";
        m->fd = mkostemp(name, O_CLOEXEC);
        if (m->fd < 0) return false;
        unlink(name);
        if (ftruncate(m->fd, BYTES)) return false;
        m->address = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0);
        return m->address != MAP_FAILED;
    }
    m->address = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m->address == MAP_FAILED) return false;
    if (!strcmp(kind, "uffd")) return under_userfaultfd(m, 0);
    if (!strcmp(kind, "uffd-user")) return under_userfaultfd(m, UFFD_USER_MODE_ONLY);
    return true;
}

static bool spoil(const char *kind, const struct memory *m) {
    if (!strcmp(kind, "truncated")) return !ftruncate(m->fd, 0);
    if (!strcmp(kind, "unmapped")) return !munmap(m->address, BYTES);
    if (!strcmp(kind, "unreadable")) return !mprotect(m->address, BYTES, PROT_NONE);
    return true;
}

enum use { WRITE_INTO, READ_FROM, RECEIVE_INTO, SEND_FROM, USES };
static const char *const use_names[] = {"WRITE into", "READ from", "receive into", "send from"};

// `unreadable` is only about the bound: /proc/PID/mem may reach past page protection, as the kernel does.
static void judge(struct side *s, const char *kind, const char *what, const struct ibv_wc *wc) {
    printf("%s %s: %s\n", kind, what, ibv_wc_status_str(wc->status));
    if (wc->status == IBV_WC_SUCCESS && strcmp(kind, "unreadable")) fail(s, __FILE__, __LINE__, "%s worked", what);
}

static void one_use(struct side *s, struct endpoint *e, const char *kind, enum use use, struct memory *m) {
    struct options options = {.timeout = 14, .rnr_retry = 7, .bytes = BYTES, .memory = m->address};
    need(s, endpoint_open(e, &options));
    need(s, endpoint_to_init(e));
    if (s->role == ROLE_B) {
        if (use == RECEIVE_INTO) need(s, !post_recv(e, 1, 0, 10000));
        need(s, spoil(kind, m));
    } else if (use == SEND_FROM) {
        need(s, !post_recv(e, 1, 0, 10000));
    }
    need(s, endpoint_connect(s, e));
    struct ibv_wc wc;
    bool a = s->role == ROLE_A;
    if (a && use == WRITE_INTO) need(s, !post_remote(e, IBV_WR_RDMA_WRITE, 1, 0, 10000, 0, 0));
    if (a && use == READ_FROM) need(s, !post_remote(e, IBV_WR_RDMA_READ, 1, 0, 10000, 0, 0));
    if (a && use == RECEIVE_INTO) need(s, !post_send(e, 1, 0, 10000, 0));
    if (!a && use == SEND_FROM) need(s, !post_send(e, 1, 0, 10000, 0));
    if (a != (use == SEND_FROM)) {
        need(s, poll_one(e->send_cq, &wc, ANSWER_MS_MAX));
        judge(s, kind, use_names[use], &wc);
    }
    need(s, meet(s));
}

int main(int argc, char **argv) {
    bool server = argc == 4 && !strcmp(argv[2], "server"), client = argc == 5 && !strcmp(argv[2], "client");
    if (!server && !client) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    struct side side = {server ? ROLE_B : ROLE_A, -1, argv[1], false};
    side.sock = server ? socket_accept(socket_listen(atoi(argv[3]))) : socket_connect(argv[3], atoi(argv[4]));
    for (int use = 0; use < USES && !side.failed; use++) {
        struct memory memory = {NULL, -1};
        bool here = client || make(argv[1], &memory), both;
        if (!socket_swap(side.sock, &here, &both, sizeof here)) return 1;
        if (!here || !both) {
            printf("%s: not to be had here: %s\n", argv[1], strerror(errno));
            return EXIT_NOT_HERE;
        }
        struct endpoint e = {0};
        one_use(&side, &e, argv[1], use, &memory);
        if (!endpoint_close(&e)) fail(&side, __FILE__, __LINE__, "something could not be destroyed");
        if (memory.fd >= 0) close(memory.fd);
        if (server && strcmp(argv[1], "unmapped")) munmap(memory.address, BYTES);
    }
    return side.failed;
}
