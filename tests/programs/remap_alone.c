// Cases of one thread: kinds of memory, the data path, overlaps, many regions, memory that goes before its region,
// fork.
#define _GNU_SOURCE
#include "remap.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif

static void kind(const char *name, uint8_t *memory, size_t bytes, size_t wanted) {
    size_t found;
    fill(memory, bytes, 3);
    unsigned before = areas(memory, bytes);
    struct ibv_mr *mr = reg(memory, bytes);
    found = placed(memory, bytes);
    if (found != wanted) {
        fprintf(stderr, "%s: %zu bytes are placed, wanted %zu\n", name, found, wanted);
        show_maps(memory, bytes);
        exit(1);
    }
    need(is_filled(memory, bytes, 3));
    fill(memory, bytes, 4);
    dereg(mr);
    need(placed(memory, bytes) == 0);
    need(is_filled(memory, bytes, 4));
    if (areas(memory, bytes) > before) show_maps(memory, bytes);
    need(areas(memory, bytes) <= before);
}

void case_kinds(void) {
    uint8_t *memory = private_pages(64 * PAGE, 1);
    kind("pages", memory, 64 * PAGE, 64 * PAGE);
    kind("one page", memory + PAGE, PAGE, PAGE);
    kind("edges", memory + 100, 10 * PAGE, 9 * PAGE);
    kind("no whole page", memory + 1, 2 * PAGE - 2, 0);
    kind("a few bytes", memory + 100, 8, 0);
    // Restored memory is private and anonymous: what is thrown away is zero.
    struct ibv_mr *mr = reg(memory, 8 * PAGE);
    dereg(mr);
    need(madvise(memory, 8 * PAGE, MADV_DONTNEED) == 0);
    for (size_t i = 0; i < 8 * PAGE; i++) need(memory[i] == 0);
    need(areas(memory, 64 * PAGE) == 1);
    munmap(memory, 64 * PAGE);

    uint8_t *heap = malloc(40 * PAGE); // of brk
    kind("heap", heap, 40 * PAGE, 39 * PAGE);
    free(heap);
    uint8_t stack[16 * PAGE];
    kind("stack", stack, sizeof stack, 0);

    uint8_t *fresh = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mr = reg(fresh, 16 * PAGE);
    need(placed(fresh, 16 * PAGE) == 16 * PAGE);
    for (size_t i = 0; i < 16 * PAGE; i++) need(fresh[i] == 0);
    dereg(mr);
    need(mprotect(fresh + 4 * PAGE, PAGE, PROT_READ) == 0);
    mr = ibv_reg_mr(pd, fresh, 16 * PAGE, IBV_ACCESS_REMOTE_READ);
    need(mr && placed(fresh, 16 * PAGE) == 15 * PAGE);
    dereg(mr);
    need(areas(fresh, 16 * PAGE) == 3);
    munmap(fresh, 16 * PAGE);

    uint8_t *shared = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    kind("shared", shared, 16 * PAGE, 0);
    munmap(shared, 16 * PAGE);
    FILE *file = tmpfile();
    need(file && ftruncate(fileno(file), 16 * PAGE) == 0);
    uint8_t *mapped = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fileno(file), 0);
    kind("private file", mapped, 16 * PAGE, 0);
    munmap(mapped, 16 * PAGE);
    mapped = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    kind("file", mapped, 16 * PAGE, 0);
    munmap(mapped, 16 * PAGE);
    fclose(file);

    uint8_t *thp = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    thp = (uint8_t *)(((uintptr_t)thp + 2 * MIB - 1) & ~(2 * MIB - 1));
    madvise(thp, 4 * MIB, MADV_HUGEPAGE);
    fill(thp, 4 * MIB, 3);
    mr = reg(thp + 5, 4 * MIB - 10);
    need(placed(thp, 4 * MIB) == 4 * MIB - 2 * PAGE && is_filled(thp, 4 * MIB, 3));
    dereg(mr);
    need(placed(thp, 4 * MIB) == 0 && is_filled(thp, 4 * MIB, 3));

    uint8_t *huge = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB, -1, 0);
    if (huge != MAP_FAILED) {
        kind("hugetlb", huge, 2 * MIB, 0);
        munmap(huge, 2 * MIB);
        printf("hugetlb was there\n");
    }
}

void case_data(void) {
    size_t bytes = 3 * MIB;
    uint8_t *a = private_pages(bytes, 1), *b = private_pages(bytes, 2);
    struct ibv_mr *mr_a = reg(a, bytes), *mr_b = reg(b + 7, bytes - 20);
    need(placed(a, bytes) == bytes && placed(b, bytes) == bytes - 2 * PAGE);
    rdma(IBV_WR_RDMA_WRITE, mr_a, a + 7, mr_b, b + 7, bytes - 20);
    for (size_t i = 7; i < bytes - 13; i++) need(b[i] == a[i]);
    fill(a, bytes, 9);
    rdma(IBV_WR_RDMA_READ, mr_b, b + PAGE - 3, mr_a, a + PAGE - 3, 5 * PAGE);
    for (size_t i = PAGE - 3; i < 6 * PAGE - 3; i++) need(b[i] == a[i]);
    dereg(mr_a);
    // Private again: the peer's side works on.
    mr_a = reg(a + 1, 100);
    need(placed(a, bytes) == 0);
    fill(a, bytes, 11);
    rdma(IBV_WR_RDMA_WRITE, mr_a, a + 1, mr_b, b + 2 * PAGE, 100);
    need(!memcmp(b + 2 * PAGE, a + 1, 100));
    dereg(mr_a);
    dereg(mr_b);
    uint64_t *words = (uint64_t *)a;
    words[0] = 40;
    mr_a = reg(a, bytes);
    mr_b = reg(b, bytes);
    need(fetch_add(mr_b, (uint64_t *)b, mr_a, words, 2) == 40 && words[0] == 42);
    dereg(mr_a);
    dereg(mr_b);
    munmap(a, bytes);
    munmap(b, bytes);
}

void case_overlap(void) {
    uint8_t *m = private_pages(64 * PAGE, 5);
    unsigned before = all_areas();
    struct ibv_mr *inner = reg(m + 16 * PAGE, 8 * PAGE), *outer = reg(m, 64 * PAGE), *again = reg(m, 64 * PAGE);
    need(placed(m, 64 * PAGE) == 64 * PAGE);
    dereg(outer);
    need(placed(m, 64 * PAGE) == 64 * PAGE);
    dereg(again);
    need(placed(m, 64 * PAGE) == 8 * PAGE && placed(m + 16 * PAGE, 8 * PAGE) == 8 * PAGE);
    dereg(inner);
    need(placed(m, 64 * PAGE) == 0 && is_filled(m, 64 * PAGE, 5));
    // A page that another region touches is not moved under it.
    struct ibv_mr *edge = reg(m + 3 * PAGE + 8, 8);
    outer = reg(m, 8 * PAGE);
    need(placed(m, 8 * PAGE) == 7 * PAGE && placed(m + 3 * PAGE, PAGE) == 0);
    rdma(IBV_WR_RDMA_WRITE, outer, m, edge, m + 3 * PAGE + 8, 8);
    need(!memcmp(m, m + 3 * PAGE + 8, 8));
    dereg(outer);
    need(placed(m, 8 * PAGE) == 0);
    // And one that is placed stays, as long as anybody touches it.
    dereg(edge);
    outer = reg(m, 8 * PAGE);
    edge = reg(m + 3 * PAGE + 8, 8);
    dereg(outer);
    need(placed(m, 8 * PAGE) == PAGE);
    rdma(IBV_WR_RDMA_WRITE, edge, m + 3 * PAGE + 8, edge, m + 3 * PAGE + 8, 8);
    dereg(edge);
    // Pages restored at different times may stay apart: the kernel joins two areas only, once both
    // have pages.
    need(placed(m, 8 * PAGE) == 0 && areas(m, 64 * PAGE) <= 3);
    // In any order; and restored as a whole it is one again.
    struct ibv_mr *mrs[40];
    unsigned random = 12345;
    fill(m, 64 * PAGE, 6);
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < 40; i++) {
            random = random * 1103515245 + 12345;
            size_t start = (random >> 8) % (60 * PAGE), bytes = 1 + (random >> 4) % (64 * PAGE - start);
            mrs[i] = reg(m + start, bytes);
        }
        for (int i = 39; i > 0; i--) {
            random = random * 1103515245 + 12345;
            int j = (int)((random >> 8) % (unsigned)(i + 1));
            struct ibv_mr *t = mrs[i];
            mrs[i] = mrs[j];
            mrs[j] = t;
        }
        for (int i = 0; i < 40; i++) dereg(mrs[i]);
        need(placed(m, 64 * PAGE) == 0 && is_filled(m, 64 * PAGE, 6) && areas(m, 64 * PAGE) <= 64);
    }
    dereg(reg(m, 64 * PAGE));
    need(areas(m, 64 * PAGE) == 1);
    munmap(m, 64 * PAGE);
    need(all_areas() <= before + 3);
}

// A region that goes elsewhere takes its pages along: what it leaves is private again.
void case_rereg(void) {
    size_t bytes = 32 * PAGE;
    uint8_t *a = private_pages(bytes, 1), *b = private_pages(bytes, 2);
    struct ibv_mr *mr = reg(a, bytes);
    need(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, b, bytes, 0) == 0);
    need(placed(a, bytes) == 0 && placed(b, bytes) == bytes && is_filled(a, bytes, 1) && is_filled(b, bytes, 2));
    rdma(IBV_WR_RDMA_WRITE, mr, b, mr, b + 16 * PAGE, PAGE);
    need(!memcmp(b, b + 16 * PAGE, PAGE));
    fill(b, bytes, 3);
    // Within what it had, beyond it, and rights alone.
    need(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, b + 8 * PAGE, 8 * PAGE, 0) == 0);
    need(placed(b, bytes) == 8 * PAGE && placed(b + 8 * PAGE, 8 * PAGE) == 8 * PAGE && is_filled(b, bytes, 3));
    need(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, b + 4 * PAGE, 28 * PAGE, 0) == 0);
    need(is_filled(b, bytes, 3));
    rdma(IBV_WR_RDMA_READ, mr, b + 30 * PAGE, mr, b + 6 * PAGE, PAGE);
    need(!memcmp(b + 30 * PAGE, b + 6 * PAGE, PAGE));
    fill(b, bytes, 4);
    need(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) == 0);
    dereg(mr);
    need(placed(a, bytes) == 0 && placed(b, bytes) == 0 && is_filled(b, bytes, 4) && areas(a, bytes) == 1);
    munmap(a, bytes);
    munmap(b, bytes);
}

// Memory is there once, whether registered or not, and nothing of it stays behind.
void case_resident(void) {
    size_t bytes = 32 * MIB;
    uint8_t *m = private_pages(bytes, 1);
    dereg(reg(m, MIB));
    long before = resident_kib(), during = 0;
    for (int i = 0; i < 10; i++) {
        struct ibv_mr *mr = reg(m, bytes);
        during = resident_kib();
        dereg(mr);
    }
    long after = resident_kib();
    printf("%ld KiB resident, %ld registered, %ld afterwards\n", before, during, after);
    need(during < before + 4096 && after < before + 2048);
    munmap(m, bytes);
}

static long charged_kib(void) {
    static const char *const FILES[] = {"/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes"};
    long long bytes = -1;
    for (int i = 0; i < 2 && bytes < 0; i++) {
        FILE *file = fopen(FILES[i], "re");
        if (!file) continue;
        if (fscanf(file, "%lld", &bytes) != 1) bytes = -1;
        fclose(file);
    }
    if (bytes < 0) exit(77);
    return (long)(bytes / 1024);
}

// In a container: memory that nobody has touched is the container's once it is registered, and no more afterwards.
void case_charged(void) {
    size_t bytes = 64 * MIB;
    uint8_t *m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(m != MAP_FAILED);
    long before = charged_kib();
    struct ibv_mr *mr = reg(m, bytes);
    need(placed(m, bytes) == bytes);
    long during = charged_kib();
    dereg(mr);
    munmap(m, bytes);
    long after = charged_kib();
    printf("%ld KiB charged, %ld registered, %ld afterwards\n", before, during, after);
    need(during > before + 60 * 1024 && during < before + 80 * 1024 && after < before + 8 * 1024);
}

#define OWN_ZONES_MAX 512

// 100,000 regions: small pieces of one heap, and then pages of it one by one.
void case_many(void) {
    const char *text = getenv("REMAP_COUNT");
    const int COUNT = text ? atoi(text) : 100000;
    struct ibv_mr **mrs = malloc((size_t)COUNT * sizeof *mrs);
    uint8_t *heap = private_pages((COUNT * 100ul / PAGE + 2) * PAGE, 1);
    unsigned before = all_areas();
    double begin = now_us();
    for (int i = 0; i < COUNT; i++) mrs[i] = reg(heap + i * 100ul, 100);
    printf("register small: %.1f us each\n", (now_us() - begin) / COUNT);
    begin = now_us();
    for (int i = 0; i < COUNT; i++) dereg(mrs[i]);
    printf("deregister small: %.1f us each\n", (now_us() - begin) / COUNT);
    need(is_filled(heap, COUNT * 100ul, 1) && all_areas() <= before + 4);
    munmap(heap, (COUNT * 100ul / PAGE + 2) * PAGE);

    const int PAGES = COUNT / 5;
    heap = private_pages(PAGES * PAGE, 2);
    begin = now_us();
    for (int i = 0; i < PAGES; i++) mrs[i] = reg(heap + i * PAGE, PAGE);
    printf("register pages: %.1f us each, %u areas more\n", (now_us() - begin) / PAGES, all_areas() - before);
    // But for the first regions, which have arenas of their own where the router grants them to peers.
    need(placed(heap, PAGES * PAGE) == PAGES * PAGE && areas(heap, PAGES * PAGE) < OWN_ZONES_MAX + 10);
    begin = now_us();
    for (int i = 0; i < PAGES; i += 2) dereg(mrs[i]);
    for (int i = 1; i < PAGES; i += 2) dereg(mrs[i]);
    printf("deregister pages: %.1f us each\n", (now_us() - begin) / PAGES);
    need(is_filled(heap, PAGES * PAGE, 2) && placed(heap, PAGES * PAGE) == 0);
    dereg(reg(heap, PAGES * PAGE));
    need(areas(heap, PAGES * PAGE) <= 2 && is_filled(heap, PAGES * PAGE, 2));
    munmap(heap, PAGES * PAGE);
    free(mrs);
}

// Every other page of a lot: the map of the process stays within its limit, and no registration fails.
void case_limit(void) {
    enum { COUNT = 40000 };
    struct ibv_mr **mrs = malloc(COUNT * sizeof *mrs);
    uint8_t *m = private_pages(2 * COUNT * PAGE, 1);
    for (int i = 0; i < COUNT; i++) mrs[i] = reg(m + 2 * i * PAGE, PAGE);
    unsigned mapped = all_areas();
    printf("%u areas, %zu pages placed\n", mapped, placed(m, 2 * COUNT * PAGE) / PAGE);
    need(mapped < 35000 && placed(m, 2 * COUNT * PAGE) > 5000 * PAGE);
    for (int i = 0; i < COUNT; i++) dereg(mrs[i]);
    need(placed(m, 2 * COUNT * PAGE) == 0 && is_filled(m, 2 * COUNT * PAGE, 1));
    munmap(m, 2 * COUNT * PAGE);
    free(mrs);
}

void case_stale(void) {
    uint8_t *m = private_pages(16 * PAGE, 1);
    // Unmapped before it is deregistered; then something else is there.
    struct ibv_mr *mr = reg(m, 16 * PAGE);
    munmap(m, 16 * PAGE);
    dereg(mr);
    need(areas(m, 16 * PAGE) == 0);
    uint8_t *other = mmap(m, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    need(other == m);
    mr = reg(m, 16 * PAGE);
    munmap(m + 4 * PAGE, 4 * PAGE);
    other = mmap(m + 6 * PAGE, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(other, 77, 2 * PAGE);
    dereg(mr);
    need(areas(m + 4 * PAGE, 2 * PAGE) == 0 && placed(m, 16 * PAGE) == 0);
    for (size_t i = 0; i < 2 * PAGE; i++) need(other[i] == 77);
    munmap(m, 16 * PAGE);
    // A cache that never deregisters: the same address, registered again and again with other memory behind it.
    uint8_t *peer = private_pages(16 * PAGE, 0);
    struct ibv_mr *peer_mr = reg(peer, 16 * PAGE), *cached[50];
    for (int i = 0; i < 50; i++) {
        other = mmap(m, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        need(other == m);
        fill(m, 16 * PAGE, (unsigned)i);
        cached[i] = reg(m, 16 * PAGE);
        need(placed(m, 16 * PAGE) == 16 * PAGE && is_filled(m, 16 * PAGE, (unsigned)i));
        rdma(IBV_WR_RDMA_READ, peer_mr, peer, cached[i], m, 16 * PAGE);
        need(is_filled(peer, 16 * PAGE, (unsigned)i));
        munmap(m, 16 * PAGE);
    }
    for (int i = 0; i < 50; i++) dereg(cached[i]);
    dereg(peer_mr);
    // Moved by realloc before it is deregistered.
    uint8_t *block = malloc(MIB);
    fill(block, MIB, 5);
    mr = reg(block, MIB);
    uint8_t *larger = realloc(block, 64 * MIB);
    need(larger != NULL);
    dereg(mr);
    need(placed(larger, 64 * MIB) == 0 && is_filled(larger, MIB, 5));
    free(larger);
    // Rights that changed meanwhile.
    m = private_pages(16 * PAGE, 8);
    mr = reg(m, 16 * PAGE);
    need(mprotect(m + PAGE, PAGE, PROT_NONE) == 0 && mprotect(m + 2 * PAGE, PAGE, PROT_READ) == 0);
    dereg(mr);
    need(placed(m, 16 * PAGE) == 0 && areas(m, 16 * PAGE) == 4);
    need(mprotect(m, 16 * PAGE, PROT_READ | PROT_WRITE) == 0 && is_filled(m, 16 * PAGE, 8));
    munmap(m, 16 * PAGE);
    munmap(peer, 16 * PAGE);
}

static int end_of(pid_t child) {
    int status;
    need(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

void case_fork(void) {
    size_t bytes = 2 * MIB;
    uint8_t *m = private_pages(bytes, 1), *peer = private_pages(bytes, 2);
    struct ibv_mr *mr = reg(m + 10, bytes - 20), *peer_mr = reg(peer, bytes);
    int turn[2], back[2];
    need(pipe(turn) == 0 && pipe(back) == 0);
    char byte = 0;
    pid_t child = fork();
    if (!child) {
        // As it was at the fork, and nobody else's.
        if (placed(m, bytes) || placed(peer, bytes)) _exit(1);
        if (write(back[1], &byte, 1) != 1 || read(turn[0], &byte, 1) != 1) _exit(2);
        if (!is_filled(m, bytes, 1) || !is_filled(peer, bytes, 2)) _exit(3);
        fill(m, bytes, 30);
        fill(peer, bytes, 31);
        if (write(back[1], &byte, 1) != 1 || read(turn[0], &byte, 1) != 1) _exit(4);
        if (!is_filled(m, bytes, 30)) _exit(5);
        // It may open the device itself, and fork again.
        int count;
        struct ibv_device **list = ibv_get_device_list(&count);
        struct ibv_context *own = count == 1 ? ibv_open_device(list[0]) : NULL;
        struct ibv_pd *own_pd = own ? ibv_alloc_pd(own) : NULL;
        struct ibv_mr *own_mr = own_pd ? ibv_reg_mr(own_pd, m, bytes, ALL_ACCESS) : NULL;
        if (!own_mr || placed(m, bytes) != bytes || !is_filled(m, bytes, 30)) _exit(6);
        pid_t grandchild = fork();
        if (!grandchild) _exit(placed(m, bytes) == 0 && is_filled(m, bytes, 30) ? 0 : 1);
        int status;
        if (waitpid(grandchild, &status, 0) != grandchild || status) _exit(7);
        if (ibv_dereg_mr(own_mr) || placed(m, bytes) || !is_filled(m, bytes, 30)) _exit(8);
        _exit(0);
    }
    need(child > 0);
    // At once, while the child may still begin.
    fill(m, bytes, 20);
    rdma(IBV_WR_RDMA_WRITE, mr, m + 10, peer_mr, peer + 10, bytes - 20);
    need(read(back[0], &byte, 1) == 1 && write(turn[1], &byte, 1) == 1);
    need(read(back[0], &byte, 1) == 1);
    need(is_filled(m, bytes, 20));
    for (size_t i = 10; i < bytes - 10; i++) need(peer[i] == m[i]);
    need(write(turn[1], &byte, 1) == 1);
    int end = end_of(child);
    if (end) fprintf(stderr, "the child ended with %d\n", end);
    need(end == 0);
    // A child that begins another program; one that is killed at once; one from posix_spawn (system).
    need(system("true") == 0);
    child = fork();
    if (!child) {
        execlp("true", "true", NULL);
        _exit(9);
    }
    need(end_of(child) == 0);
    for (int i = 0; i < 20; i++) {
        child = fork();
        if (!child) _exit(is_filled(m, bytes, 20) ? 0 : 1);
        if (i % 2) kill(child, SIGKILL);
        end = end_of(child);
        need(i % 2 ? end == 256 + SIGKILL || end == 0 : end == 0);
    }
    // Memory that the program keeps from its children stays so.
    need(madvise(peer, bytes, MADV_DONTFORK) == 0);
    child = fork();
    if (!child) _exit(areas(peer, bytes) == 0 && is_filled(m, bytes, 20) ? 0 : 1);
    need(end_of(child) == 0);
    need(madvise(peer, bytes, MADV_DOFORK) == 0);
    dereg(mr);
    dereg(peer_mr);
    need(placed(m, bytes) == 0 && placed(peer, bytes) == 0 && is_filled(m, bytes, 20));
    munmap(m, bytes);
    munmap(peer, bytes);
    for (int i = 0; i < 2; i++) close(turn[i]), close(back[i]);
}

// The driver kills the router once memory is placed, and starts another one. Does not return: the device is dead.
void case_router_death(void) {
    size_t bytes = 64 * PAGE;
    uint8_t *a = private_pages(bytes, 1), *b = private_pages(bytes, 2), *c = private_pages(bytes, 3);
    struct ibv_mr *mr_a = reg(a, bytes), *mr_b = reg(b, bytes);
    reg(c, bytes);
    need(placed(a, bytes) == bytes && placed(b, bytes) == bytes);
    printf("placed\n");
    fflush(stdout);
    struct ibv_async_event event;
    need(ibv_get_async_event(context, &event) == 0 && event.event_type == IBV_EVENT_DEVICE_FATAL);
    dereg(mr_a);
    need(placed(a, bytes) == 0 && is_filled(a, bytes, 1) && areas(a, bytes) == 1);
    need(is_filled(b, bytes, 2) && is_filled(c, bytes, 3));
    printf("gone\n");
    fflush(stdout);
    struct ibv_context *next = NULL;
    for (int tries = 0; !next && tries < 2000; tries++, usleep(10000)) {
        int count;
        struct ibv_device **devices = ibv_get_device_list(&count);
        if (devices && count == 1) next = ibv_open_device(devices[0]);
    }
    struct ibv_pd *next_pd = next ? ibv_alloc_pd(next) : NULL;
    need(next_pd != NULL);
    // Pages in the dead session's arenas move to the new one's.
    struct ibv_mr *fresh = ibv_reg_mr(next_pd, a, bytes, ALL_ACCESS), *again = ibv_reg_mr(next_pd, c, bytes, ALL_ACCESS);
    need(fresh && again && placed(a, bytes) == bytes && placed(c, bytes) == bytes && is_filled(c, bytes, 3));
    dereg(mr_b);
    need(placed(b, bytes) == 0 && is_filled(b, bytes, 2));
    dereg(fresh);
    need(placed(a, bytes) == 0 && is_filled(a, bytes, 1));
    dereg(again); // the dead session's region is still there
    need(is_filled(c, bytes, 3));
    printf("router-death: good\n");
    exit(0);
}

static void cost(const char *what) {
    static const size_t sizes[] = {64, PAGE, 16 * PAGE, MIB, 16 * MIB, 256 * MIB};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        size_t bytes = sizes[s] < PAGE ? PAGE : sizes[s];
        uint8_t *m = private_pages(bytes, 1);
        int rounds = sizes[s] > MIB ? 3 : 200;
        double in = 0, out = 0, bare = 0;
        for (int i = 0; i < rounds; i++) {
            double begin = now_us();
            struct ibv_mr *mr = reg(m, sizes[s]);
            double between = now_us();
            dereg(mr);
            double after = now_us();
            in += between - begin;
            out += after - between;
            uint8_t *copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            memcpy(copy, m, bytes);
            munmap(copy, bytes);
            bare += now_us() - after;
        }
        printf("%s, %zu bytes: register %.1f us, deregister %.1f us, mmap and copy and munmap %.1f us\n", what, sizes[s],
               in / rounds, out / rounds, bare / rounds);
        munmap(m, bytes);
    }
}

static void *sleep_on(void *argument) {
    (void)argument;
    for (;;) pause();
    return NULL;
}

void case_cost(void) {
    pthread_t thread;
    cost("one thread");
    need(pthread_create(&thread, NULL, sleep_on, NULL) == 0);
    cost("two threads");
    need(pthread_cancel(thread) == 0 && pthread_join(thread, NULL) == 0);
}
