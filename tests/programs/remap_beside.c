// Cases of memory that must stay where it is although a region touches it or lies beside it, and of programs that
// change meanwhile: what the program, the kernel and other processes do with such pages is as without FreeFlow.
#define _GNU_SOURCE
#include "remap.h"

#include <errno.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { USES = 200, BLOCK_BYTES = 1 << 16 };
#ifndef SYS_mseal
#define SYS_mseal 462
#endif

// WRITEs into a region as often as would have it shared several times.
static void use_often(struct ibv_mr *mr, uint8_t *memory, size_t bytes) {
    for (unsigned uses = 0; uses < USES; uses++) {
        fill(whole_memory, bytes, uses);
        rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, mr, memory, bytes);
        need(is_filled(memory, bytes, uses));
        usleep(100);
    }
}

// ---- the first thread's stack

static uint8_t *_Atomic lowest;
static atomic_bool is_used, is_grown;

static void *use_lowest(void *argument) {
    (void)argument;
    while (!lowest) usleep(100);
    struct ibv_mr *mr = reg(lowest, 100);
    use_often(mr, lowest, 100);
    is_used = true;
    while (!is_grown) usleep(100);
    dereg(mr);
    return NULL;
}

static unsigned recurse(unsigned depth) {
    volatile uint8_t frame[2048];
    frame[0] = 1;
    return depth ? recurse(depth - 1) + frame[0] : 0;
}

__attribute__((noinline)) static void go_deep(void) {
    volatile uint8_t frame[600 * 1024];
    for (size_t at = sizeof frame; at >= 512; at -= 512) frame[at - 512] = 1;
    lowest = (uint8_t *)frame;
    // Without a deeper frame.
    while (!is_used) __builtin_ia32_pause();
    need(recurse(600) == 600);
    is_grown = true;
}

// The lowest page of the stack belongs to a region, and then the stack grows.
void case_edges_lowest(void) {
    make_whole();
    pthread_t thread = start_thread(use_lowest, NULL);
    go_deep();
    need(pthread_join(thread, NULL) == 0);
    end_whole();
}

// ---- what the program throws away

static void throw_away(uint8_t *memory, size_t bytes) { need(madvise(memory, bytes, MADV_DONTNEED) == 0); }

// On-demand regions beside a small one that is shared, and over one: their pages are the program's.
void case_edges_on_demand(void) {
    make_whole();
    uint8_t *raw = private_pages(2 * BLOCK_BYTES, 1);
    uint8_t *demand = (uint8_t *)(((uintptr_t)raw + BLOCK_BYTES - 1) & ~(uintptr_t)(BLOCK_BYTES - 1));
    uint8_t *small = demand + 4 * PAGE + 64;
    struct ibv_mr *on_demand = ibv_reg_mr(pd, demand, 5 * PAGE, ALL_ACCESS | IBV_ACCESS_ON_DEMAND);
    need(on_demand != NULL);
    struct ibv_mr *mr = reg(small, 64);
    need(use_until_placed(mr, small, 64));
    need(placed(demand, 4 * PAGE) == 0);
    fill(demand, 4 * PAGE, 5);
    throw_away(demand, 4 * PAGE);
    need(demand[100] == 0);
    fill(whole_memory, PAGE, 9);
    rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, on_demand, demand + PAGE, PAGE);
    need(is_filled(demand + PAGE, PAGE, 9));
    // The page that both touch is the program's again, too.
    demand[4 * PAGE] = 7;
    dereg(mr);
    need(placed(demand, 5 * PAGE) == 0 && demand[4 * PAGE] == 7);
    rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, on_demand, demand + 4 * PAGE, PAGE);
    need(is_filled(demand + 4 * PAGE, PAGE, 9));
    throw_away(demand, 5 * PAGE);
    need(demand[4 * PAGE] == 0);
    dereg(on_demand);
    munmap(raw, 2 * BLOCK_BYTES);
    end_whole();
}

// A private mapping of a file shows the file again where changes were thrown away.
void case_edges_file(void) {
    make_whole();
    FILE *file = tmpfile();
    need(file != NULL);
    for (size_t i = 0; i < 4 * PAGE; i++) need(fputc('F', file) == 'F');
    need(fflush(file) == 0);
    uint8_t *memory = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fileno(file), 0);
    need(memory != MAP_FAILED);
    struct ibv_mr *mr = reg(memory + PAGE + 100, 200);
    use_often(mr, memory + PAGE + 100, 200);
    dereg(mr);
    throw_away(memory, 4 * PAGE);
    need(memory[0] == 'F' && memory[PAGE + 100] == 'F' && memory[PAGE + 2000] == 'F');
    munmap(memory, 4 * PAGE);
    fclose(file);
    end_whole();
}

// ---- the first thread ends

static void *go_on(void *argument) {
    (void)argument;
    uint8_t *partial = private_pages(PAGE, 0), *pages = private_pages(8 * PAGE, 1);
    struct ibv_mr *small = reg(partial + 100, 1000), *large = reg(pages, 8 * PAGE);
    need(use_until_placed(small, partial + 100, 1000));
    fill(partial, PAGE, 7);
    // Nobody waits for the first thread: its map is empty once it has ended.
    char byte;
    for (bool is_there = true; is_there; usleep(1000)) {
        FILE *map = fopen("/proc/self/maps", "re");
        is_there = map && fread(&byte, 1, 1, map) == 1;
        if (map) fclose(map);
    }
    dereg(small), dereg(large);
    need(is_filled(partial, PAGE, 7) && is_filled(pages, 8 * PAGE, 1));
    need(placed(partial, PAGE) == 0 && placed(pages, 8 * PAGE) == 0);
    large = reg(pages, 8 * PAGE), small = reg(partial + 100, 1000);
    need(placed(pages, 8 * PAGE) == 8 * PAGE && use_until_placed(small, partial + 100, 1000));
    fill(partial, PAGE, 8);
    dereg(small), dereg(large);
    need(is_filled(partial, PAGE, 8) && is_filled(pages, 8 * PAGE, 1));
    printf("edges-leader: good\n");
    fflush(stdout);
    _exit(0);
}

void case_edges_leader(void) {
    make_whole();
    start_thread(go_on, NULL);
    pthread_exit(NULL);
}

// ---- memory that can't be moved, threads that can't be stopped

static _Atomic pid_t sleeper;

static void *sleep_on(void *argument) {
    (void)argument;
    sleeper = (pid_t)syscall(SYS_gettid);
    while (!stop) sleep(1);
    return NULL;
}

// How often a thread that sleeps was woken: by each freeze, and a few times by itself.
static long wakes(void) {
    char path[64], line[256];
    long count = -1;
    while (!sleeper) usleep(100);
    snprintf(path, sizeof path, "/proc/self/task/%d/status", sleeper);
    FILE *status = fopen(path, "re");
    need(status != NULL);
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "voluntary_ctxt_switches: %ld", &count) == 1) break;
    fclose(status);
    return count;
}

static void use_blocks(struct ibv_mr *mr, uint8_t *memory, size_t bytes, unsigned turns) {
    for (unsigned turn = 0; turn < turns; turn++)
        for (size_t at = 0; at < bytes; at += BLOCK_BYTES) {
            fill(whole_memory, 64, turn);
            rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, mr, memory + at + 64, 64);
            need(is_filled(memory + at + 64, 64, turn));
        }
}

static void use_immovable(const char *kind, uint8_t *memory, size_t bytes) {
    if (!memory) {
        printf("no %s here; ", kind);
        return;
    }
    memset(memory, 1, bytes);
    long before = wakes();
    double begin = now_us();
    struct ibv_mr *mr = reg(memory, bytes);
    use_blocks(mr, memory, bytes, 100);
    long woken = wakes() - before;
    printf("%s: %ld wakes; ", kind, woken);
    need(placed(memory, bytes) == 0 && woken < 20 + (now_us() - begin) / 1e6 * 4);
    dereg(mr);
}

// Threads are not stopped again and again for memory that the kernel does not move.
void case_edges_immovable(void) {
    make_whole();
    pthread_t thread = start_thread(sleep_on, NULL);
    uint8_t *sealed = private_pages(2 * MIB, 1);
    if (syscall(SYS_mseal, sealed, 2 * MIB, 0) != 0) sealed = NULL;
    uint8_t *huge = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    use_immovable("sealed memory", sealed, 2 * MIB);
    use_immovable("huge pages", huge == MAP_FAILED ? NULL : huge, 4 * MIB);
    if (huge != MAP_FAILED) munmap(huge, 4 * MIB);
    stop_threads(&thread, 1);
    end_whole();
}

static atomic_bool is_in_vfork;

static void *wait_in_vfork(void *argument) {
    (void)argument;
    pid_t child = vfork();
    if (!child) {
        struct timespec time = {3, 0};
        is_in_vfork = true;
        syscall(SYS_nanosleep, &time, NULL);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    return NULL;
}

// Nor for one that can't be stopped; once that goes on, memory is shared as ever.
void case_edges_unstoppable(void) {
    enum { BLOCKS = 100, BYTES = BLOCKS * BLOCK_BYTES };
    make_whole();
    uint8_t *memory = private_pages(BYTES, 1);
    struct ibv_mr *mrs[BLOCKS];
    pthread_t sleeping = start_thread(sleep_on, NULL);
    for (int i = 0; i < BLOCKS; i++) mrs[i] = reg(memory + i * BLOCK_BYTES + 64, 64);
    pthread_t waiting = start_thread(wait_in_vfork, NULL);
    while (!is_in_vfork) usleep(100);
    usleep(10000);
    long before = wakes();
    for (int i = 0; i < BLOCKS; i++) use_blocks(mrs[i], memory + i * BLOCK_BYTES, 1, 32);
    printf("%ld wakes\n", wakes() - before);
    need(wakes() - before < 30);
    need(pthread_join(waiting, NULL) == 0);
    need(use_until_placed(mrs[7], memory + 7 * BLOCK_BYTES + 64, 64));
    for (int i = 0; i < BLOCKS; i++) dereg(mrs[i]);
    need(placed(memory, BYTES) == 0);
    stop_threads(&sleeping, 1);
    munmap(memory, BYTES);
    end_whole();
}

// ---- other processes and devices

struct line {
    _Atomic uint64_t writes, late, lost;
    _Atomic(uint64_t *) at;
    atomic_bool is_refused, is_over;
};

// Writes a word of its parent, and reads it again.
static void write_from_outside(pid_t parent, struct line *line) {
    while (!line->is_over && getppid() == parent) {
        uint64_t value = ++line->writes, back = 0;
        struct iovec from = {&value, 8}, to = {line->at, 8}, into = {&back, 8};
        if (process_vm_writev(parent, &from, 1, &to, 1, 0) != 8) {
            line->is_refused = true;
            return;
        }
        int turns = 0;
        for (; turns < 200; turns++) {
            need(process_vm_readv(parent, &into, 1, &to, 1, 0) == 8);
            if (back == value) break;
            usleep(1000);
        }
        line->late += turns > 0;
        line->lost += back != value;
    }
}

// Another process writes beside a block that comes and goes.
void case_edges_foreign(void) {
    enum { BLOCKS = 64 };
    make_whole();
    uint8_t *memory = private_pages(BLOCKS * BLOCK_BYTES, 1);
    struct line *line = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(line != MAP_FAILED);
    line->at = (uint64_t *)(memory + 2048);
    pid_t parent = getpid(), child = fork();
    if (!child) {
        write_from_outside(parent, line);
        _exit(0);
    }
    unsigned moves = 0;
    for (double begin = now_us(); (now_us() - begin < seconds() * 2e6 || moves < 10) && !line->is_refused; moves++) {
        uint8_t *block = memory + moves % BLOCKS * BLOCK_BYTES;
        line->at = (uint64_t *)(block + 2048);
        struct ibv_mr *mr = reg(block + 100, 200);
        need(use_until_placed(mr, block + 100, 200));
        dereg(mr);
    }
    line->is_over = true;
    int status;
    need(waitpid(child, &status, 0) == child && status == 0);
    printf("%u moves, %lu writes, %lu seen late, %lu lost%s\n", moves, (unsigned long)line->writes, (unsigned long)line->late,
           (unsigned long)line->lost, line->is_refused ? ", not permitted" : "");
    // A writer that was interrupted is not waited for.
    need(line->lost <= moves / 50);
    munmap(line, PAGE);
    munmap(memory, BLOCKS * BLOCK_BYTES);
    end_whole();
}

// A buffer that io_uring has pinned lies beside a region: what it reads arrives.
void case_edges_uring(void) {
    make_whole();
    struct io_uring_params params = {0};
    int ring = (int)syscall(__NR_io_uring_setup, 4, &params);
    if (ring < 0) {
        printf("no io_uring here\n");
        end_whole();
        return;
    }
    uint8_t *memory = private_pages(PAGE, 5), *buffer = memory + 2048;
    struct iovec pinned = {buffer, 512};
    need(syscall(__NR_io_uring_register, ring, IORING_REGISTER_BUFFERS, &pinned, 1) == 0);
    int rights = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    uint8_t *sq = mmap(NULL, params.sq_off.array + params.sq_entries * 4, rights, flags, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *sqe = mmap(NULL, params.sq_entries * sizeof *sqe, rights, flags, ring, IORING_OFF_SQES);
    need(sq != MAP_FAILED && sqe != MAP_FAILED);
    struct ibv_mr *mr = reg(memory, 512);
    use_often(mr, memory, 512);
    int file = memfd_create("data", MFD_CLOEXEC);
    need(file >= 0 && pwrite(file, whole_memory, 512, 0) == 512);
    *sqe = (struct io_uring_sqe){.opcode = IORING_OP_READ_FIXED, .fd = file, .addr = (uintptr_t)buffer, .len = 512};
    *(uint32_t *)(sq + params.sq_off.array) = 0;
    __atomic_store_n((uint32_t *)(sq + params.sq_off.tail), 1, __ATOMIC_RELEASE);
    need(syscall(__NR_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
    need(!memcmp(buffer, whole_memory, 512));
    close(file), close(ring);
    // Not pinned any more.
    need(use_until_placed(mr, memory, 512));
    dereg(mr);
    end_whole();
}

// ---- limits

// Under a limit of private memory partial pages stay private: they could not become so again.
void case_edges_data_limit(void) {
    make_whole();
    uint8_t *memory = private_pages(PAGE, 5);
    struct rlimit before, limited;
    need(getrlimit(RLIMIT_DATA, &before) == 0);
    limited = (struct rlimit){1ul << 40, before.rlim_max};
    need(setrlimit(RLIMIT_DATA, &limited) == 0);
    struct ibv_mr *mr = reg(memory + 8, 100);
    use_often(mr, memory + 8, 100);
    need(placed(memory, PAGE) == 0 && setrlimit(RLIMIT_DATA, &before) == 0);
    need(before.rlim_cur != RLIM_INFINITY || use_until_placed(mr, memory + 8, 100));
    dereg(mr);
    end_whole();
}

// Lone pages far from each other leave room for others below the vNIC's limit.
void case_edges_far(void) {
    enum { COUNT = 120 };
    make_whole();
    uint8_t *memory = mmap(NULL, COUNT * 16 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    need(memory != MAP_FAILED);
    struct ibv_mr *mrs[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        uint8_t *page = memory + i * 16 * MIB;
        need(mprotect(page, PAGE, PROT_READ | PROT_WRITE) == 0);
        mrs[i] = reg(page + 64, 64);
        need(use_until_placed(mrs[i], page + 64, 64));
    }
    printf("%zu MiB of segments\n", placed(NULL, -1ul) >> 20);
    need(placed(NULL, -1ul) < 700 * MIB);
    for (size_t i = 0; i < COUNT; i++) dereg(mrs[i]);
    need(placed(memory, COUNT * 16 * MIB) == 0);
    munmap(memory, COUNT * 16 * MIB);
    end_whole();
}

// With FREEFLOW_REMAP=whole: whole pages of a region, and nothing else.
void case_edges_whole(void) {
    make_whole();
    need(placed(whole_memory, 16 * PAGE) == 16 * PAGE);
    uint8_t *pages = private_pages(4 * PAGE, 5);
    struct ibv_mr *mr = reg(pages + 100, 3 * PAGE);
    use_often(mr, pages + 100, PAGE);
    need(placed(pages, 4 * PAGE) == 2 * PAGE && placed(pages + PAGE, 2 * PAGE) == 2 * PAGE);
    dereg(mr);
    munmap(pages, 4 * PAGE);
    end_whole();
}
