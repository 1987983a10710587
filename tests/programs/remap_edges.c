// Cases of partial pages, which hold more of the program than a region. They are shared with the router once it has
// used them a few times; nothing beside the region is lost or changed by that, whoever writes there.
#define _GNU_SOURCE
#include "remap.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { USES_MAX = 20000, BLOCK = 200 };

struct ibv_mr *whole;
uint8_t *whole_memory;

void make_whole(void) {
    whole_memory = private_pages(16 * PAGE, 3);
    whole = reg(whole_memory, 16 * PAGE);
}

void end_whole(void) {
    dereg(whole);
    munmap(whole_memory, 16 * PAGE);
}

uint8_t *page_of(const void *address) { return (uint8_t *)((uintptr_t)address & ~(PAGE - 1)); }

bool is_placed(const void *address, size_t bytes) {
    uint8_t *first = page_of(address), *end = page_of((uint8_t *)address + bytes - 1) + PAGE;
    return placed(first, (size_t)(end - first)) == (size_t)(end - first);
}

bool use_until_placed(struct ibv_mr *mr, uint8_t *memory, size_t bytes) {
    size_t at_once = bytes < 4 * PAGE ? bytes : 4 * PAGE;
    for (unsigned uses = 0; uses < USES_MAX; uses++) {
        for (size_t at = 0; at < bytes; at += at_once) {
            size_t count = bytes - at < at_once ? bytes - at : at_once;
            fill(whole_memory, count, uses);
            rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, mr, memory + at, count);
            need(is_filled(memory + at, count, uses));
            fill(memory + at, count, uses + 1);
            rdma(IBV_WR_RDMA_READ, whole, whole_memory, mr, memory + at, count);
            need(is_filled(whole_memory, count, uses + 1));
        }
        if (is_placed(memory, bytes)) return true;
        usleep(100);
    }
    return false;
}

// The bytes beside a region in its pages.
struct sides {
    uint8_t *memory, *copy;
    size_t bytes, from, to;
};

static struct sides sides_of(uint8_t *memory, size_t bytes) {
    uint8_t *first = page_of(memory), *end = page_of(memory + bytes - 1) + PAGE;
    struct sides s = {first, malloc((size_t)(end - first)), (size_t)(end - first), (size_t)(memory - first), 0};
    s.to = s.from + bytes;
    memcpy(s.copy, s.memory, s.bytes);
    return s;
}

static void need_sides(const struct sides *s) {
    need(!memcmp(s->memory, s->copy, s->from));
    need(!memcmp(s->memory + s->to, s->copy + s->to, s->bytes - s->to));
}

// `quiet`: nobody writes beside the region.
static void use(const char *kind, uint8_t *memory, size_t bytes, bool is_quiet) {
    struct sides sides = sides_of(memory, bytes);
    struct ibv_mr *mr = reg(memory, bytes);
    if (!use_until_placed(mr, memory, bytes)) {
        show_maps(page_of(memory), bytes);
        fprintf(stderr, "%s, %zu bytes: %zu placed\n", kind, bytes, placed(page_of(memory), bytes + PAGE));
        fail(__FILE__, __LINE__, "it is not shared");
    }
    if (is_quiet) need_sides(&sides);
    fill(memory, bytes, 77);
    dereg(mr);
    need(is_filled(memory, bytes, 77) && placed(page_of(memory), sides.bytes) == 0);
    if (is_quiet) need_sides(&sides);
    free(sides.copy);
}

static uint8_t variables[3 * PAGE] = {1}, zeroed[3 * PAGE];
static char text_beside[64] = "beside";

static void *on_a_thread_s_stack(void *argument) {
    (void)argument;
    uint8_t memory[1024];
    volatile uint64_t beside = 0x1234567890;
    use("a thread's stack", memory, sizeof memory, false);
    need(beside == 0x1234567890);
    return NULL;
}

// The first thread's stack grows as before.
static unsigned recurse(unsigned depth) {
    volatile uint8_t frame[8 * 1024];
    frame[0] = 1;
    return depth ? recurse(depth - 1) + frame[0] : 0;
}

void case_edges(void) {
    make_whole();
    static const size_t SIZES[] = {1, 64, 1000, 5000, 60000, 200000, 1 << 20};
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        uint8_t *memory = malloc(SIZES[i]);
        use("malloc", memory, SIZES[i], false);
        free(memory);
    }
    uint8_t *pages = private_pages(4 * PAGE, 5);
    use("within a page", pages + 100, 64, true);
    use("two pages", pages + PAGE - 8, 16, true);
    use("to the end of a page", pages + 8, PAGE - 8, true);
    use("page-aligned, but small", pages, 1000, true);
    munmap(pages, 4 * PAGE);
    use("initialised variables", variables + 10, 100, true);
    use("many initialised variables", variables + 10, 2 * PAGE, true);
    use("zeroed variables", zeroed + 10, 100, true);
    use("text", (uint8_t *)text_beside + 8, 8, true);
    need(!strcmp(text_beside, "beside"));
    need(pthread_join(start_thread(on_a_thread_s_stack, NULL), NULL) == 0);
    uint8_t small_on_stack[100], on_stack[3 * PAGE];
    on_stack[0] = small_on_stack[0] = 1;
    unsigned before = areas(page_of(on_stack), sizeof on_stack + PAGE);
    use("the first thread's stack", small_on_stack, sizeof small_on_stack, false);
    use("much of the first thread's stack", on_stack, sizeof on_stack, false);
    need(areas(page_of(on_stack), sizeof on_stack + PAGE) == before && recurse(200) == 200);
    end_whole();
}

// Regions that share pages: neighbours, nested, overlapping, a thousand in one page.
void case_edges_shared(void) {
    enum { COUNT = 1000 };
    make_whole();
    uint8_t *pages = private_pages(8 * PAGE, 5);
    struct ibv_mr *small[COUNT];
    for (int i = 0; i < COUNT; i++) small[i] = reg(pages + i * 4, 4);
    need(use_until_placed(small[7], pages + 28, 4));
    for (int i = 0; i < COUNT; i++) {
        fill(whole_memory, 4, (unsigned)i);
        rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, small[i], pages + i * 4, 4);
        need(is_filled(pages + i * 4, 4, (unsigned)i));
    }
    for (int i = 1; i < COUNT; i++) dereg(small[i]);
    need(placed(pages, PAGE) == PAGE);
    // Over it and beside it; what touches a page keeps it where it is.
    struct ibv_mr *all = reg(pages, 8 * PAGE), *nested = reg(pages + 100, 3 * PAGE), *over = reg(pages + 2 * PAGE + 9, 4 * PAGE);
    need(use_until_placed(all, pages, 8 * PAGE) && use_until_placed(nested, pages + 100, 3 * PAGE));
    dereg(all);
    need(use_until_placed(over, pages + 2 * PAGE + 9, 4 * PAGE));
    dereg(nested);
    dereg(small[0]);
    need(placed(pages, 2 * PAGE) == 0 && placed(pages + 2 * PAGE, 5 * PAGE) == 5 * PAGE);
    dereg(over);
    need(placed(pages, 8 * PAGE) == 0);
    munmap(pages, 8 * PAGE);
    end_whole();
}

// A program that registers for each use, as naive ones do: its memory stays where it is, and its threads run.
void case_edges_fleeting(void) {
    make_whole();
    uint8_t *memory = malloc(BLOCK);
    for (unsigned i = 0; i < 300; i++) {
        struct ibv_mr *mr = reg(memory, BLOCK);
        rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, mr, memory, BLOCK);
        dereg(mr);
        need(placed(page_of(memory), 2 * PAGE) == 0);
    }
    free(memory);
    end_whole();
}

// ---- writers in the same pages

struct neighbour {
    volatile uint64_t *words; // its own, one before and one behind each block
    uint64_t count;
};

enum { BLOCKS = 16, STRIDE = 1536, WRITERS = 3 };

static void *write_beside(void *argument) {
    struct neighbour *n = argument;
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        for (int i = 0; i <= BLOCKS; i++) n->words[i * STRIDE / 8]++;
        n->count++;
    }
    return NULL;
}

// For some seconds, and on a busy machine until a block was shared.
static bool goes_on(double begin, unsigned shared) {
    double elapsed_us = now_us() - begin;
    return elapsed_us < seconds() * 1e6 || (!shared && elapsed_us < 60e6);
}

// Blocks with the writers' words between them are registered, used until they are shared, and given up, in any order.
static unsigned turn(uint8_t *memory, bool forks) {
    struct ibv_mr *mrs[BLOCKS] = {0};
    unsigned random = 12345, shared = 0, rounds = 0;
    for (double begin = now_us(); goes_on(begin, shared); rounds++) {
        random = random * 1103515245 + 12345;
        unsigned i = (random >> 8) % BLOCKS;
        uint8_t *block = memory + i * STRIDE + 64;
        if (!mrs[i]) mrs[i] = reg(block, BLOCK);
        for (unsigned uses = 0; uses < 12; uses++) {
            fill(whole_memory, BLOCK, random + uses);
            rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, mrs[i], block, BLOCK);
            need(is_filled(block, BLOCK, random + uses));
        }
        shared += is_placed(block, BLOCK);
        if (random >> 16 & 1) {
            dereg(mrs[i]);
            mrs[i] = NULL;
        }
        if (forks && random >> 17 & 1) {
            pid_t child = fork();
            if (!child) {
                // Its own from the first moment on: the parent's threads go on, and it writes what they write.
                for (int at = 0; at <= BLOCKS; at++) *(volatile uint64_t *)(memory + at * STRIDE) = 0;
                bool is_own = placed(memory, BLOCKS * STRIDE + PAGE) == 0;
                for (int at = 0; at <= BLOCKS; at++) is_own = is_own && !*(volatile uint64_t *)(memory + at * STRIDE);
                _exit(is_own ? 0 : 1);
            }
            int status;
            need(child > 0 && waitpid(child, &status, 0) == child && status == 0);
        }
    }
    for (int i = 0; i < BLOCKS; i++)
        if (mrs[i]) dereg(mrs[i]);
    printf("%u rounds, %u of them with the block shared\n", rounds, shared);
    return shared;
}

static void with_writers(bool forks) {
    make_whole();
    uint8_t *memory = mmap(NULL, BLOCKS * STRIDE + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(memory != MAP_FAILED);
    struct neighbour neighbours[WRITERS];
    pthread_t threads[WRITERS];
    for (int i = 0; i < WRITERS; i++) {
        neighbours[i] = (struct neighbour){(uint64_t *)memory + i, 0};
        threads[i] = start_thread(write_beside, &neighbours[i]);
    }
    need(turn(memory, forks) > 0);
    stop_threads(threads, WRITERS);
    need(placed(memory, BLOCKS * STRIDE + PAGE) == 0);
    for (int i = 0; i < WRITERS; i++) {
        need(neighbours[i].count > 10);
        for (int at = 0; at <= BLOCKS; at++) need(neighbours[i].words[at * STRIDE / 8] == neighbours[i].count);
    }
    munmap(memory, BLOCKS * STRIDE + PAGE);
    end_whole();
}

void case_edges_writers(void) { with_writers(false); }
void case_edges_forks(void) { with_writers(true); }

static volatile uint64_t *signal_words;
static volatile uint64_t signal_count;
static void on_timer(int number) {
    (void)number;
    signal_count++;
    for (int at = 0; at <= BLOCKS; at++) signal_words[at * STRIDE / 8]++;
}

// One thread of the program, whose signals write beside the regions.
void case_edges_signals(void) {
    make_whole();
    uint8_t *memory = mmap(NULL, BLOCKS * STRIDE + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(memory != MAP_FAILED);
    signal_words = (uint64_t *)memory;
    struct sigaction action = {.sa_handler = on_timer, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    need(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
    need(turn(memory, false) > 0);
    need(setitimer(ITIMER_REAL, &never, NULL) == 0);
    need(signal_count > 100);
    for (int at = 0; at <= BLOCKS; at++) need(signal_words[at * STRIDE / 8] == signal_count);
    munmap(memory, BLOCKS * STRIDE + PAGE);
    end_whole();
}

// ---- fork with a partial page of the forking thread's own stack, and of the heap

struct forked {
    volatile uint64_t before;
    uint8_t memory[256];
    volatile uint64_t behind;
};

static void fork_beside(struct forked *f, const char *kind) {
    *f = (struct forked){.before = 1, .behind = 2};
    struct ibv_mr *mr = reg(f->memory, sizeof f->memory);
    for (unsigned turn = 0; turn < 3; turn++) {
        if (!use_until_placed(mr, f->memory, sizeof f->memory)) fail(__FILE__, __LINE__, kind);
        fill(f->memory, sizeof f->memory, turn);
        int ends[2];
        need(pipe(ends) == 0);
        pid_t child = fork();
        if (!child) {
            char byte;
            // The parent has written by then, and the child sees nothing of it.
            bool is_own = read(ends[0], &byte, 1) == 1 && f->before == 1 + turn * 10 && f->behind == 2 + turn * 10
                          && is_filled(f->memory, sizeof f->memory, turn);
            f->before = f->behind = 99;
            memset(f->memory, 99, sizeof f->memory);
            _exit(is_own ? 0 : 1);
        }
        f->before += 10, f->behind += 10;
        fill(f->memory, sizeof f->memory, turn + 50);
        need(write(ends[1], "", 1) == 1);
        int status;
        need(waitpid(child, &status, 0) == child && status == 0);
        need(f->before == 11 + turn * 10 && f->behind == 12 + turn * 10 && is_filled(f->memory, sizeof f->memory, turn + 50));
        close(ends[0]), close(ends[1]);
    }
    dereg(mr);
}

static void *fork_from_a_stack(void *argument) {
    (void)argument;
    struct forked on_stack;
    fork_beside(&on_stack, "on a thread's stack");
    return NULL;
}

void case_edges_fork(void) {
    make_whole();
    struct forked *in_heap = malloc(sizeof *in_heap), on_stack;
    static struct forked variable;
    fork_beside(in_heap, "in the heap");
    fork_beside(&variable, "a variable");
    fork_beside(&on_stack, "on the first thread's stack");
    free(in_heap);
    need(pthread_join(start_thread(fork_from_a_stack, NULL), NULL) == 0);
    end_whole();
}

// ---- allocators

// Blocks of an allocator's come and go as regions that are shared, while threads allocate and free beside them.
void case_edges_allocator(void) {
    enum { BYTES_MAX = 3000 };
    make_whole();
    unsigned before = all_areas(), random = 99, shared = 0, rounds = 0;
    pthread_t threads[3];
    struct allocating allocating[3];
    for (unsigned i = 0; i < 3; i++) {
        allocating[i] = (struct allocating){i + 1, BYTES_MAX};
        threads[i] = start_thread(allocate_on, &allocating[i]);
    }
    for (double begin = now_us(); goes_on(begin, shared); rounds++) {
        random = random * 1103515245 + 12345;
        size_t bytes = 1 + (random >> 8) % BYTES_MAX;
        uint8_t *memory = calloc(1, bytes);
        for (size_t at = 0; at < bytes; at++) need(!memory[at]);
        struct ibv_mr *mr = reg(memory, bytes);
        for (unsigned uses = 0; uses < 30; uses++) {
            fill(whole_memory, bytes, random + uses);
            rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, mr, memory, bytes);
            need(is_filled(memory, bytes, random + uses));
        }
        shared += is_placed(memory, bytes);
        dereg(mr);
        need(is_filled(memory, bytes, random + 29));
        free(memory);
    }
    stop_threads(threads, 3);
    printf("%u rounds, %u of them with the block shared, %d areas more\n", rounds, shared, (int)(all_areas() - before));
    need(shared > 0);
    end_whole();
}
