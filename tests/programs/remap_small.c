// Cases of small regions: a few are moved at their registration, the others once the router uses them.
#define _GNU_SOURCE
#include "remap.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LOCAL = IBV_ACCESS_LOCAL_WRITE, BLOCK = 64 << 10, TRIES = 100000 };

// Pages of which so many blocks are whole ones of those that the router counts.
static uint8_t *blocks(unsigned count, unsigned seed) {
    size_t bytes = (size_t)(count + 1) * BLOCK;
    uint8_t *memory = private_pages(bytes, seed), *first = memory + (-(uintptr_t)memory & (BLOCK - 1));
    if (first > memory) munmap(memory, (size_t)(first - memory));
    munmap(first + count * BLOCK, (size_t)(memory + bytes - first) - count * BLOCK);
    fill(first, count * BLOCK, seed);
    return first;
}

// A region whose registration moved nothing.
static struct ibv_mr *reg_in_place(uint8_t *memory, size_t bytes, int access) {
    for (int i = 0; i < TRIES; i++) {
        struct ibv_mr *mr = ibv_reg_mr(pd, memory, bytes, access);
        need(mr);
        if (!placed(memory, bytes)) return mr;
        dereg(mr);
    }
    fail(__FILE__, __LINE__, "each registration moves pages");
}

// Until so many bytes are in arenas.
static void await_placed(const uint8_t *memory, size_t bytes, size_t wanted) {
    for (int i = 0; placed(memory, bytes) < wanted; i++) {
        need(i < TRIES);
        usleep(100);
    }
}

void case_small(void) {
    make_whole();
    uint8_t *pages = blocks(2, 3);
    struct ibv_mr *first = reg(pages, PAGE);
    need(placed(pages, PAGE) == PAGE);
    dereg(first);
    struct ibv_mr *remote = reg_in_place(pages + PAGE + 100, 5 * PAGE, ALL_ACCESS);
    struct ibv_mr *other = reg_in_place(pages + 8 * PAGE, PAGE, ALL_ACCESS);
    struct ibv_mr *local = reg_in_place(pages + 10 * PAGE, PAGE, LOCAL);
    struct ibv_mr *within = reg(pages + 12 * PAGE + 8, 16);
    struct ibv_mr *beyond = reg_in_place(pages + BLOCK, PAGE, ALL_ACCESS);
    need(use_until_placed(other, pages + 8 * PAGE, PAGE));
    // All of the block follows, and each is where a registration would have put it.
    await_placed(pages, BLOCK, (6 + 1 + 1 + 1) * PAGE);
    unsigned long arena = arena_of(pages + 2 * PAGE), common = arena_of(pages + 10 * PAGE);
    for (int i = 2; i < 6; i++) need(arena_of(pages + i * PAGE) == arena);
    need(arena != arena_of(pages + 8 * PAGE) && arena != common && common != arena_of(pages + 8 * PAGE));
    need(arena_of(pages + PAGE) == common && arena_of(pages + 6 * PAGE) == common && arena_of(pages + 12 * PAGE) == common);
    need(placed(pages + BLOCK, PAGE) == 0);
    need(is_filled(pages, 8 * PAGE, 3));
    struct ibv_mr *all[] = {remote, other, local, within, beyond};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) dereg(all[i]);
    need(placed(pages, 2 * BLOCK) == 0);
    need(is_filled(pages, 8 * PAGE, 3));
    need(areas(pages, 2 * BLOCK) == 1);
    munmap(pages, 2 * BLOCK);
    end_whole();
}

// As programs do that register a buffer for each use: the other threads go on.
void case_small_again(void) {
    make_whole();
    uint8_t *pages = blocks(1, 4);
    unsigned moved = 0;
    enum { COUNT = 5000 };
    double begin = now_us();
    for (int i = 0; i < COUNT; i++) {
        struct ibv_mr *mr = reg(pages + PAGE, PAGE);
        moved += placed(pages + PAGE, PAGE) != 0;
        rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, mr, pages + PAGE + i % 64, 8);
        need(!memcmp(pages + PAGE + i % 64, whole_memory, 8));
        dereg(mr);
    }
    double seconds = (now_us() - begin) / 1e6;
    printf("%u of %d registrations moved pages, %.1f s\n", moved, COUNT, seconds);
    // A few at the beginning, then 20 in a second; and the router asks more and more rarely.
    need(moved >= 1 && moved <= 64 + 1 + 20 * seconds);
    munmap(pages, BLOCK);
    end_whole();
}

struct counts {
    uint8_t *pages; // some words of each page are counted up
    unsigned page_count, word;
    uint64_t rounds;
};

static void *count_on(void *argument) {
    struct counts *counts = argument;
    while (!atomic_load(&stop)) {
        for (unsigned page = 0; page < counts->page_count; page++) {
            volatile uint64_t *word = (volatile uint64_t *)(counts->pages + page * PAGE) + counts->word;
            *word = *word + 1;
        }
        counts->rounds++;
    }
    return NULL;
}

// Other threads write into the pages and beside them all the time.
void case_small_writers(void) {
    enum { WRITERS = 3, PAGES = 8 };
    make_whole();
    uint8_t *pages = blocks(1, 5);
    memset(pages, 0, BLOCK);
    struct counts counts[WRITERS];
    pthread_t threads[WRITERS];
    for (unsigned i = 0; i < WRITERS; i++) {
        counts[i] = (struct counts){pages, PAGES, 8 + i, 0};
        threads[i] = start_thread(count_on, &counts[i]);
    }
    unsigned rounds = 0;
    for (double end = now_us() + seconds() * 1e6; now_us() < end; rounds++) {
        struct ibv_mr *mr = reg_in_place(pages + PAGE, 5 * PAGE, ALL_ACCESS), *local = reg_in_place(pages + 7 * PAGE, PAGE, LOCAL);
        for (unsigned i = 0; !is_placed(pages + PAGE, 5 * PAGE); i++) {
            rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, mr, pages + PAGE + 2048, 64);
            need(!memcmp(pages + PAGE + 2048, whole_memory, 64) && i < TRIES);
        }
        dereg(local);
        dereg(mr);
    }
    stop_threads(threads, WRITERS);
    for (unsigned i = 0; i < WRITERS; i++)
        for (unsigned page = 0; page < PAGES; page++) {
            uint64_t found = ((uint64_t *)(pages + page * PAGE))[8 + i];
            if (found != counts[i].rounds) fprintf(stderr, "page %u: %lu of %lu\n", page, found, counts[i].rounds);
            need(found == counts[i].rounds);
        }
    need(rounds > 0);
    printf("%u rounds\n", rounds);
    munmap(pages, BLOCK);
    end_whole();
}

// Memory that goes before its region, and other memory in its place: a region that was left in place reaches that.
void case_small_stale(void) {
    make_whole();
    for (int turn = 0; turn < 20; turn++) {
        uint8_t *pages = blocks(1, 10);
        struct ibv_mr *old = reg_in_place(pages + PAGE, 8 * PAGE, turn % 2 ? ALL_ACCESS : LOCAL | IBV_ACCESS_REMOTE_WRITE);
        need(mmap(pages + 4 * PAGE, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == pages + 4 * PAGE);
        for (size_t i = 0; i < 8 * PAGE; i++) need(pages[4 * PAGE + i] == 0);
        fill(whole_memory, PAGE, turn);
        rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, old, pages + 5 * PAGE, 100);
        need(!memcmp(pages + 5 * PAGE, whole_memory, 100) && pages[5 * PAGE + 100] == 0);
        // Over the new memory, and beyond the old region.
        struct ibv_mr *new = reg_in_place(pages + 7 * PAGE, 4 * PAGE, ALL_ACCESS);
        need(use_until_placed(new, pages + 7 * PAGE, 4 * PAGE));
        fill(pages, BLOCK, 11);
        if (turn % 3 == 0) {
            // Shared by now, and gone: the next registration finds it out.
            munmap(pages + 4 * PAGE, 2 * PAGE);
            need(mmap(pages + 4 * PAGE, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == pages + 4 * PAGE);
            struct ibv_mr *third = reg(pages + 4 * PAGE, 2 * PAGE);
            rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, third, pages + 4 * PAGE, 2 * PAGE);
            need(!memcmp(pages + 4 * PAGE, whole_memory, 2 * PAGE));
            dereg(third);
            need(!memcmp(pages + 4 * PAGE, whole_memory, 2 * PAGE));
            fill(pages, BLOCK, 11);
        }
        dereg(turn % 4 < 2 ? old : new);
        need(is_filled(pages, BLOCK, 11));
        dereg(turn % 4 < 2 ? new : old);
        need(is_filled(pages, BLOCK, 11) && placed(pages, BLOCK) == 0);
        munmap(pages, BLOCK);
    }
    end_whole();
}

// Asynchronous I/O may write to pages past every system call: none is moved in the midst of a region's life.
void case_small_devices(void) {
    make_whole();
    uint8_t *pages = blocks(1, 9);
    struct ibv_mr *before = reg_in_place(pages + PAGE, 2 * PAGE, ALL_ACCESS);
    uint64_t aio = 0;
    need(syscall(SYS_io_setup, 1, &aio) == 0);
    for (int i = 0; i < 200; i++) {
        rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, before, pages + PAGE, PAGE);
        need(!memcmp(pages + PAGE, whole_memory, PAGE));
    }
    usleep(20000);
    need(placed(pages, BLOCK) == 0);
    // From now on at once. The look before `io_setup` counts for a while, in which a few registrations move pages too:
    // never so many in a row.
    struct ibv_mr *after = NULL;
    double end = now_us() + 20e6;
    for (int in_a_row = 0; in_a_row < 200;) {
        need(now_us() < end);
        if (after) dereg(after);
        after = reg(pages + 8 * PAGE, PAGE);
        in_a_row = placed(pages + 8 * PAGE, PAGE) ? in_a_row + 1 : 0;
    }
    dereg(after);
    need(syscall(SYS_io_destroy, aio) == 0);
    need(use_until_placed(before, pages + PAGE, 2 * PAGE));
    dereg(before);
    munmap(pages, BLOCK);
    end_whole();
}

// A child of fork has its own copy, and the region stays the parent's.
void case_small_fork(void) {
    make_whole();
    uint8_t *pages = blocks(1, 6);
    struct ibv_mr *mr = reg_in_place(pages + PAGE, 3 * PAGE, ALL_ACCESS);
    struct ibv_mr *local = reg_in_place(pages + 6 * PAGE, 2 * PAGE, LOCAL);
    need(use_until_placed(mr, pages + PAGE, 3 * PAGE));
    await_placed(pages + 6 * PAGE, 2 * PAGE, 2 * PAGE);
    fill(pages, BLOCK, 7);
    pid_t child = fork();
    if (!child) {
        need(is_filled(pages, BLOCK, 7) && placed(pages, BLOCK) == 0);
        fill(pages, BLOCK, 8);
        open_all();
        struct ibv_mr *own = reg(pages + PAGE, 3 * PAGE);
        need(is_filled(pages, BLOCK, 8));
        dereg(own);
        _exit(0);
    }
    int status;
    need(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    need(is_filled(pages, BLOCK, 7));
    need(use_until_placed(mr, pages + PAGE, 3 * PAGE));
    rdma(IBV_WR_RDMA_WRITE, local, pages + 6 * PAGE, mr, pages + 2 * PAGE, 100);
    need(!memcmp(pages + 2 * PAGE, pages + 6 * PAGE, 100));
    dereg(local);
    dereg(mr);
    need(placed(pages, BLOCK) == 0);
    munmap(pages, BLOCK);
    end_whole();
}
