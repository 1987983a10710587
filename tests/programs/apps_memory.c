// Memory of every kind as the two ends of every operation.
#define _GNU_SOURCE
#include "apps.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BYTES = 50000 };

static void *(*shared_malloc)(size_t);
static void (*shared_free)(void *);

static bool find_shared(void) {
    shared_malloc = (void *(*)(size_t))dlsym(RTLD_DEFAULT, "ibv_malloc");
    shared_free = (void (*)(void *))dlsym(RTLD_DEFAULT, "ibv_free");
    want(shared_malloc && shared_free);
    return true;
}

// SEND, WRITE, READ and atomics from A to B, whose buffers hold BYTES.
static bool all_operations(struct pair *p) {
    const uint32_t part = 12345;
    fill(p->a.memory, part, 1);
    want(!post_recv(&p->b, 1, 16001, part) && !post_send(&p->a, 1, 0, part, 0));
    want(completes(p->b.recv_cq, 1) && completes(p->a.send_cq, 1));
    want(holds(p->b.memory + 16001, part, 1));
    fill(p->a.memory + 3, part, 2);
    want(!post_remote(&p->a, IBV_WR_RDMA_WRITE, 2, 3, part, 7, 0));
    want(completes(p->a.send_cq, 2));
    want(holds(p->b.memory + 7, part, 2));
    fill(p->b.memory + 30001, part, 3);
    want(!post_remote(&p->a, IBV_WR_RDMA_READ, 3, 20011, part, 30001, 0));
    want(completes(p->a.send_cq, 3));
    want(holds(p->a.memory + 20011, part, 3));
    size_t at = 48 + (8 - (uintptr_t)p->b.memory % 8) % 8;
    uint64_t value = 40, was = 0;
    memcpy(p->b.memory + at, &value, 8);
    struct ibv_sge sge = {(uintptr_t)p->a.memory + 1, 8, p->a.mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 4, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD};
    wr.wr.atomic.remote_addr = p->b.mine.memory + at;
    wr.wr.atomic.rkey = p->b.mine.rkey;
    wr.wr.atomic.compare_add = 2;
    want(!post_work(&p->a, &wr) && completes(p->a.send_cq, 4));
    memcpy(&was, p->a.memory + 1, 8);
    memcpy(&value, p->b.memory + at, 8);
    want(was == 40 && value == 42);
    wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
    wr.wr.atomic.compare_add = 42;
    wr.wr.atomic.swap = 1000;
    want(!post_work(&p->a, &wr) && completes(p->a.send_cq, 4));
    memcpy(&was, p->a.memory + 1, 8);
    memcpy(&value, p->b.memory + at, 8);
    want(was == 42 && value == 1000);
    return true;
}

static bool with_memory(void *a, void *b) {
    struct pair p;
    want(a && b && a != MAP_FAILED && b != MAP_FAILED);
    want(pair_open(&p, &(struct options){.memory = a, .bytes = BYTES}, &(struct options){.memory = b, .bytes = BYTES}));
    want(all_operations(&p));
    return pair_close(&p);
}

static int temporary_file(size_t bytes) {
    char path[] = "/tmp/freeflow-apps.XXXXXX";
    int file = mkstemp(path);
    if (file >= 0) unlink(path);
    if (file >= 0 && ftruncate(file, (off_t)bytes)) perror("ftruncate");
    return file;
}

static uint8_t in_bss[BYTES + 8];

static bool unaligned_heap_and_bss(void) {
    uint8_t *heap = malloc(BYTES + 8);
    bool ok = with_memory(heap + 3, in_bss + 5) && with_memory(in_bss + 1, heap + 7);
    free(heap);
    return ok;
}

static bool stacks(void) {
    uint8_t here[BYTES], there[BYTES];
    return with_memory(here, there);
}

static bool files(void) {
    int file = temporary_file(BYTES);
    want(file >= 0);
    void *common = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    void *own = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    want(with_memory(common, own) && with_memory(own, common));
    // Bytes written through the shared mapping are in the file.
    uint8_t byte = 0;
    want(pread(file, &byte, 1, 30001) == 1 && byte == ((uint8_t *)common)[30001]);
    munmap(common, BYTES);
    munmap(own, BYTES);
    return !close(file);
}

static bool anonymous_shared_and_memfd(void) {
    void *anonymous = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int file = memfd_create("apps", MFD_CLOEXEC);
    want(file >= 0 && !ftruncate(file, BYTES));
    void *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    want(with_memory(anonymous, memory) && with_memory(memory, anonymous));
    munmap(anonymous, BYTES);
    munmap(memory, BYTES);
    return !close(file);
}

static bool shared_with_everything(void) {
    want(find_shared());
    uint8_t *shared = shared_malloc(BYTES), *other = shared_malloc(BYTES + 5), *heap = malloc(BYTES);
    want(shared && other && heap);
    bool ok = with_memory(shared, other + 5) && with_memory(heap, shared) && with_memory(shared, heap);
    shared_free(shared);
    shared_free(other);
    free(heap);
    return ok;
}

// One buffer, half `ibv_malloc`'s and half not, can't be: but one message may gather from both kinds.
static bool gathered_from_both_kinds(void) {
    want(find_shared());
    struct pair p;
    want(pair_open(&p, &(struct options){.send_sge = 4, .recv_sge = 4}, NULL));
    uint8_t *shared = shared_malloc(10000);
    struct ibv_mr *mr = ibv_reg_mr(p.a.pd, shared, 10000, IBV_ACCESS_LOCAL_WRITE);
    want(shared && mr);
    fill(shared, 10000, 5);
    memcpy(p.a.memory + 100, shared + 3000, 4000);
    struct ibv_sge sges[] = {{(uintptr_t)shared, 3000, mr->lkey},
                             {(uintptr_t)p.a.memory + 100, 4000, p.a.mr->lkey},
                             {(uintptr_t)shared + 7000, 3000, mr->lkey}};
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = sges, .num_sge = 3, .opcode = IBV_WR_SEND};
    want(!post_recv(&p.b, 1, 0, 10000) && !post_work(&p.a, &wr));
    want(completes(p.b.recv_cq, 1) && completes(p.a.send_cq, 1));
    want(holds(p.b.memory, 10000, 5));
    want(!ibv_dereg_mr(mr));
    shared_free(shared);
    return pair_close(&p);
}

// Memory that can't be written: it may be sent and read from, and registered for nothing else.
static bool read_only(void) {
    int file = temporary_file(BYTES);
    want(file >= 0);
    uint8_t *mapped = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    want(mapped != MAP_FAILED);
    fill(mapped, BYTES, 8);
    want(!mprotect(mapped, BYTES, PROT_READ));
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    want(!ibv_reg_mr(p.b.pd, mapped, BYTES, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT);
    want(!ibv_reg_mr(p.b.pd, mapped, BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE) && errno == EFAULT);
    struct ibv_mr *mr = ibv_reg_mr(p.b.pd, mapped, BYTES, IBV_ACCESS_REMOTE_READ);
    want(mr);
    struct ibv_sge sge = {(uintptr_t)p.a.memory, BYTES, p.a.mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ};
    wr.wr.rdma.remote_addr = (uintptr_t)mapped;
    wr.wr.rdma.rkey = mr->rkey;
    want(!post_work(&p.a, &wr) && completes(p.a.send_cq, 1));
    want(holds(p.a.memory, BYTES, 8));
    // Its own side sends from it.
    struct ibv_sge from = {(uintptr_t)mapped, 1000, mr->lkey};
    struct ibv_send_wr send = {.wr_id = 2, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND};
    want(!post_recv(&p.a, 2, 0, 1000) && !post_work(&p.b, &send));
    want(completes(p.a.recv_cq, 2) && completes(p.b.send_cq, 2));
    // A WRITE is refused by its key.
    struct ibv_wc wc;
    wr.opcode = IBV_WR_RDMA_WRITE;
    want(!post_work(&p.a, &wr) && poll_one(p.a.send_cq, &wc, 5000) && wc.status == IBV_WC_REM_ACCESS_ERR);
    want(holds(mapped, BYTES, 8));
    want(!ibv_dereg_mr(mr));
    munmap(mapped, BYTES);
    close(file);
    return pair_close(&p);
}

// Several regions over the same bytes, with different rights.
static bool overlapping_regions(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    struct ibv_mr *inner = ibv_reg_mr(p.b.pd, p.b.memory + 100, 300, IBV_ACCESS_REMOTE_READ);
    struct ibv_mr *across = ibv_reg_mr(p.b.pd, p.b.memory + 200, 1000, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    want(inner && across && inner->rkey != across->rkey && inner->rkey != p.b.mr->rkey);
    fill(p.b.memory, 1200, 1);
    p.a.peer.rkey = inner->rkey;
    want(!post_remote(&p.a, IBV_WR_RDMA_READ, 1, 0, 300, 100, 0) && completes(p.a.send_cq, 1));
    want(!memcmp(p.a.memory, p.b.memory + 100, 300));
    p.a.peer.rkey = across->rkey;
    memset(p.a.memory, 0x5a, 1000);
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 2, 0, 1000, 200, 0) && completes(p.a.send_cq, 2));
    want(p.b.memory[199] != 0x5a && p.b.memory[200] == 0x5a && p.b.memory[1199] == 0x5a);
    // The others outlive one.
    want(!ibv_dereg_mr(across));
    p.a.peer.rkey = inner->rkey;
    want(!post_remote(&p.a, IBV_WR_RDMA_READ, 3, 0, 300, 100, 0) && completes(p.a.send_cq, 3));
    want(!ibv_dereg_mr(inner));
    return pair_close(&p);
}

// Whether an address shows a page of one of the router's segments.
static bool is_in_segment(const void *address) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    bool found = false;
    while (maps && !found && fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        if (sscanf(line, "%lx-%lx", &start, &end) == 2 && start <= (unsigned long)address && (unsigned long)address < end)
            found = strstr(line, "memfd:freeflow") != NULL;
    }
    if (maps) fclose(maps);
    return found;
}

// Registered memory that is unmapped, and memory mapped again at its address: as on a NIC, which has
// the old pages pinned, accesses succeed and find those; the new mapping is left alone.
static bool mapped_anew(void) {
    enum { TRIES = 100, PAUSE_US = 60000 };
    uint8_t *memory = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct pair p;
    want(memory != MAP_FAILED);
    // This process has registered so much by now that a small region may stay in place: later one is moved again.
    for (int tries = 0;; tries++) {
        want(pair_open(&p, &(struct options){0}, &(struct options){.memory = memory, .bytes = 65536}));
        if (is_in_segment(memory)) break;
        want(pair_close(&p) && tries < TRIES);
        usleep(PAUSE_US);
    }
    fill(p.a.memory, 1000, 4);
    want(mmap(memory, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 1, 0, 1000, 5, 0) && completes(p.a.send_cq, 1));
    for (int i = 0; i < 65536; i++) want(memory[i] == 0);
    munmap(memory, 65536);
    memset(p.a.memory + 2000, 0, 1000);
    want(!post_remote(&p.a, IBV_WR_RDMA_READ, 2, 2000, 1000, 5, 0) && completes(p.a.send_cq, 2));
    want(holds(p.a.memory + 2000, 1000, 4));
    want(pair_close(&p) && madvise(memory, 65536, MADV_NORMAL) == -1);
    return true;
}

// The longest messages that a program is likely to send, in one piece.
static bool one_gib(bool first_shared, bool second_shared) {
    const size_t bytes = 1u << 30;
    struct pair p;
    struct options first = {.bytes = bytes, .shared_memory = first_shared, .timeout = NEVER};
    struct options second = {.bytes = bytes, .shared_memory = second_shared, .timeout = NEVER};
    want(pair_open(&p, &first, &second));
    for (size_t at = 0; at < bytes; at += 4096) memcpy(p.a.memory + at, &at, 8);
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 1, 0, (uint32_t)bytes, 0, 0));
    struct ibv_wc wc;
    want(poll_one(p.a.send_cq, &wc, 60000) && wc.status == IBV_WC_SUCCESS);
    for (size_t at = 0; at < bytes; at += 4096) want(!memcmp(p.b.memory + at, &at, 8));
    want(!post_recv(&p.b, 2, 0, (uint32_t)bytes) && !post_send(&p.a, 2, 0, (uint32_t)bytes, 0));
    want(poll_one(p.b.recv_cq, &wc, 60000) && wc.status == IBV_WC_SUCCESS && wc.byte_len == bytes);
    want(completes(p.a.send_cq, 2));
    return pair_close(&p);
}

static bool one_gib_of_any_memory(void) { return one_gib(false, false); }
static bool one_gib_of_ibv_malloc(void) { return one_gib(true, true); }

// Memory of ibv_malloc is page-aligned, zero when fresh, apart from each other, and goes back.
static bool ibv_malloc_and_free(void) {
    want(find_shared());
    void *blocks[64];
    for (unsigned round = 0; round < 3; round++) {
        for (size_t i = 0; i < 64; i++) {
            size_t bytes = 1 + i * i * 1000;
            want((blocks[i] = shared_malloc(bytes)) != NULL);
            want((uintptr_t)blocks[i] % 4096 == 0);
            fill(blocks[i], bytes, i);
        }
        for (size_t i = 0; i < 64; i++) want(holds(blocks[i], 1 + i * i * 1000, i));
        for (size_t i = 0; i < 64; i++) shared_free(blocks[(i * 37) % 64]);
    }
    uint8_t *large = shared_malloc(64 << 20);
    want(large && !large[0] && !large[(64 << 20) - 1]);
    shared_free(large);
    shared_free(NULL);
    want(!shared_malloc((size_t)-1) && errno == EINVAL);
    return true;
}

const struct app_case memory_cases[] = {
    {"unaligned_heap_and_bss", unaligned_heap_and_bss},
    {"stacks", stacks},
    {"files", files},
    {"anonymous_shared_and_memfd", anonymous_shared_and_memfd},
    {"shared_with_everything", shared_with_everything},
    {"gathered_from_both_kinds", gathered_from_both_kinds},
    {"read_only", read_only},
    {"overlapping_regions", overlapping_regions},
    {"mapped_anew", mapped_anew},
    {"one_gib_of_any_memory", one_gib_of_any_memory},
    {"one_gib_of_ibv_malloc", one_gib_of_ibv_malloc},
    {"ibv_malloc_and_free", ibv_malloc_and_free},
    {NULL, NULL},
};
