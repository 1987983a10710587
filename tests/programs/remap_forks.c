// Cases of forks while partial pages are shared: the forking thread's stack is private before its child begins, however
// busy the library is, whichever verb the fork interrupts, and without a router.
#define _GNU_SOURCE
#include "remap.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STACK_BYTES = 3000, FORKERS = 3, REGISTERERS = 3, REGISTERED_MIB = 64, SCATTERED = 2000, HANG_SECONDS = 20 };

// A buffer and its neighbours in the page: of a frame, or of a block.
struct beside {
    volatile uint64_t before;
    uint8_t memory[256];
    volatile uint64_t behind;
};

// Parent and child write their own values over the stack below. Whether they find them there again.
__attribute__((noinline)) static bool has_own_stack(int value) {
    volatile uint8_t frame[STACK_BYTES];
    for (int i = 0; i < STACK_BYTES; i++) frame[i] = (uint8_t)value;
    for (int i = 0; i < STACK_BYTES; i++)
        if (frame[i] != (uint8_t)value) return false;
    return true;
}

// One fork from a frame with a region in it. Neither process sees anything of the other one.
static void fork_from(struct beside *frame) {
    frame->before = 1, frame->behind = 2;
    pid_t child = fork();
    if (!child) {
        frame->before = 7, frame->behind = 8;
        _exit(has_own_stack(0xcc) ? 0 : 1);
    }
    need(has_own_stack(0xaa));
    int status = -1;
    need(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    need(frame->before == 1 && frame->behind == 2);
}

// ---- while other threads register and fork

static struct ibv_mr *forkers_mrs[FORKERS];
static uint8_t *forkers_memories[FORKERS];
static atomic_int forkers_ready;
static atomic_ulong forks;

static void *fork_often(void *argument) {
    long at = (long)argument;
    struct beside frame = {0};
    forkers_mrs[at] = reg(frame.memory, sizeof frame.memory);
    forkers_memories[at] = frame.memory;
    atomic_fetch_add(&forkers_ready, 1);
    while (!atomic_load(&stop)) {
        fork_from(&frame);
        atomic_fetch_add(&forks, 1);
        usleep(20000);
    }
    dereg(forkers_mrs[at]);
    return NULL;
}

static void *register_often(void *argument) {
    (void)argument;
    size_t bytes = REGISTERED_MIB * MIB;
    uint8_t *memory = private_pages(bytes, 1);
    while (!atomic_load(&stop)) dereg(reg(memory, bytes));
    munmap(memory, bytes);
    return NULL;
}

// The library's lock is wanted all the time: by forks, and by registrations that hold it for long.
void case_forks_busy(void) {
    make_whole();
    pthread_t threads[FORKERS + REGISTERERS];
    for (long i = 0; i < FORKERS; i++) threads[i] = start_thread(fork_often, (void *)i);
    while (atomic_load(&forkers_ready) < FORKERS) usleep(1000);
    for (int i = 0; i < REGISTERERS; i++) threads[FORKERS + i] = start_thread(register_often, NULL);
    unsigned long shared = 0;
    for (double begin = now_us(); now_us() - begin < 5 * seconds() * 1e6 || (!shared && now_us() - begin < 60e6);) {
        for (int i = 0; i < FORKERS; i++) {
            for (int use = 0; use < 20; use++)
                rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, forkers_mrs[i], forkers_memories[i], 64);
            shared += is_placed(forkers_memories[i], 64);
        }
    }
    stop_threads(threads, FORKERS + REGISTERERS);
    printf("%lu forks, a page was seen shared %lu times\n", atomic_load(&forks), shared);
    need(shared > 0 && atomic_load(&forks) > FORKERS);
    end_whole();
}

// ---- by a child

// A child that forks without a verb of its own: what it mapped since it began is there in the grandchild.
void case_forks_grandchild(void) {
    enum { COUNT = 512, BYTES = 4096 };
    make_whole();
    pid_t child = fork();
    if (!child) {
        uint8_t *blocks[COUNT];
        for (unsigned i = 0; i < COUNT; i++) blocks[i] = private_pages(BYTES, i);
        pid_t grandchild = fork();
        if (!grandchild) {
            for (unsigned i = 0; i < COUNT; i++)
                if (!is_filled(blocks[i], BYTES, i)) _exit(1);
            _exit(0);
        }
        int status = -1;
        _exit(waitpid(grandchild, &status, 0) == grandchild && status == 0 ? 0 : 1);
    }
    int status = -1;
    need(waitpid(child, &status, 0) == child && status == 0);
    end_whole();
}

// ---- of pages beside the library's own thread

static void need_private_after_fork(struct ibv_mr *mr, uint8_t *memory, size_t bytes) {
    for (int turn = 0; turn < 3; turn++) {
        need(use_until_placed(mr, memory, bytes));
        pid_t child = fork();
        if (!child) _exit(0);
        need(placed(page_of(memory), PAGE) == 0 && placed(page_of(memory + bytes - 1), PAGE) == 0);
        int status = -1;
        need(waitpid(child, &status, 0) == child && status == 0);
    }
}

static void *fork_with_thread_local_region(void *argument) {
    static __thread uint8_t memory[64];
    (void)argument;
    struct ibv_mr *mr = reg(memory, sizeof memory);
    need_private_after_fork(mr, memory, sizeof memory);
    dereg(mr);
    return NULL;
}

// The block comes right before the first registration, which begins the library's thread: it lies above that one's
// stack, once no gap in the map is large enough for that. The stack of a later thread lies below it, in some runs.
void case_forks_beside(void) {
    enum { BYTES = 200000, GAPS_MAX = 200 };
    for (int i = 0; i < GAPS_MAX; i++)
        need(mmap(NULL, MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
    uint8_t *memory = malloc(BYTES);
    memset(memory, 1, BYTES);
    struct ibv_mr *mr = reg(memory, BYTES);
    make_whole();
    need_private_after_fork(mr, memory, BYTES);
    need(pthread_join(start_thread(fork_with_thread_local_region, NULL), NULL) == 0);
    dereg(mr);
    free(memory);
    end_whole();
}

// ---- by a signal handler in the midst of a verb

static volatile unsigned long handled;

static void fork_on_alarm(int number) {
    (void)number;
    int before = errno, status;
    pid_t child = fork();
    if (!child) _exit(0);
    if (child > 0) waitpid(child, &status, 0);
    handled++;
    errno = before;
}

static void *end_if_it_hangs(void *argument) {
    (void)argument;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    unsigned long last = 0;
    for (int still = 0; still < HANG_SECONDS * 10 && !atomic_load(&stop); usleep(100000)) {
        still = handled == last ? still + 1 : 0;
        last = handled;
        if (still == HANG_SECONDS * 10) fail(__FILE__, __LINE__, "a fork of a signal handler hangs");
    }
    return NULL;
}

void case_forks_handler(void) {
    make_whole();
    uint8_t *pages = private_pages(PAGE, 1);
    struct ibv_mr *mr = reg(pages + 64, 64);
    pthread_t watching = start_thread(end_if_it_hangs, NULL);
    struct sigaction action = {.sa_handler = fork_on_alarm, .sa_flags = SA_RESTART};
    need(sigaction(SIGALRM, &action, NULL) == 0);
    unsigned random = 1;
    for (double begin = now_us(); now_us() - begin < 2 * seconds() * 1e6;) {
        for (int uses = 0; uses < 100 && !is_placed(pages + 64, 64); uses++)
            rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, mr, pages + 64, 64);
        random = random * 1103515245 + 12345;
        unsigned long before = handled;
        struct itimerval once = {{0, 0}, {0, 1 + (random >> 16) % 300}};
        need(setitimer(ITIMER_REAL, &once, NULL) == 0);
        while (handled == before) {
            struct ibv_ah_attr to = {.port_num = 1, .is_global = 1};
            need(ibv_query_gid(context, 1, 0, &to.grh.dgid) == 0);
            struct ibv_ah *ah = ibv_create_ah(pd, &to);
            need(ah && ibv_destroy_ah(ah) == 0);
        }
    }
    printf("%lu forks by a signal handler\n", handled);
    stop_threads(&watching, 1);
    dereg(mr);
    munmap(pages, PAGE);
    end_whole();
}

// ---- by a thread that is about to be cancelled

// fork is no cancellation point.
static void *fork_with_a_pending_cancellation(void *argument) {
    bool *has_forked = argument;
    struct beside frame = {0};
    struct ibv_mr *mr = reg(frame.memory, sizeof frame.memory);
    need(use_until_placed(mr, frame.memory, sizeof frame.memory));
    need(pthread_cancel(pthread_self()) == 0);
    pid_t child = fork();
    // A child that was cancelled ends with 0: its last thread has ended.
    if (!child) _exit(7);
    need(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL) == 0);
    int status = -1;
    need(waitpid(child, &status, 0) == child);
    if (status != 7 << 8) printf("the child's status is %#x\n", (unsigned)status);
    need(status == 7 << 8);
    dereg(mr);
    *has_forked = true;
    return NULL;
}

void case_forks_cancelled(void) {
    make_whole();
    bool has_forked = false;
    void *result = NULL;
    need(pthread_join(start_thread(fork_with_a_pending_cancellation, &has_forked), &result) == 0);
    need(has_forked && result != PTHREAD_CANCELED);
    // The lock was given back.
    struct beside frame = {0};
    fork_from(&frame);
    end_whole();
}

// ---- with many partial pages

// Taking them out costs much less than sharing them one by one did.
void case_forks_scattered(void) {
    make_whole();
    size_t bytes = SCATTERED * 2 * PAGE;
    uint8_t *memory = private_pages(bytes, 1);
    struct ibv_mr **mrs = calloc(SCATTERED, sizeof *mrs);
    double begin = now_us();
    for (int i = 0; i < SCATTERED; i++) mrs[i] = reg(memory + (size_t)i * 2 * PAGE + 64, 64);
    for (int turn = 0; turn < 200 && placed(memory, bytes) < SCATTERED * PAGE; turn++)
        for (int i = 0; i < SCATTERED; i++)
            rdma(IBV_WR_RDMA_WRITE, whole, whole_memory, mrs[i], memory + (size_t)i * 2 * PAGE + 64, 64);
    need(placed(memory, bytes) == SCATTERED * PAGE);
    double shared = now_us();
    pid_t child = fork();
    if (!child) _exit(0);
    double forked = now_us();
    need(placed(memory, bytes) == 0);
    int status = -1;
    need(waitpid(child, &status, 0) == child && status == 0);
    printf("%d pages shared in %.0f ms, a fork in %.0f ms\n", SCATTERED, (shared - begin) / 1e3, (forked - shared) / 1e3);
    need(forked - shared < (shared - begin) / 8);
    for (int i = 0; i < SCATTERED; i++) dereg(mrs[i]);
    free(mrs);
    munmap(memory, bytes);
    end_whole();
}

// ---- after the router's death

static void *fork_without_a_router(void *argument) {
    (void)argument;
    struct beside kept = {0}, given_up = {0};
    struct ibv_mr *mr_kept = reg(kept.memory, sizeof kept.memory), *mr = reg(given_up.memory, sizeof given_up.memory);
    need(use_until_placed(mr_kept, kept.memory, sizeof kept.memory));
    need(use_until_placed(mr, given_up.memory, sizeof given_up.memory));
    printf("placed\n");
    fflush(stdout);
    struct ibv_async_event event;
    need(ibv_get_async_event(context, &event) == 0 && event.event_type == IBV_EVENT_DEVICE_FATAL);
    fill(given_up.memory, sizeof given_up.memory, 5);
    dereg(mr);
    need(is_filled(given_up.memory, sizeof given_up.memory, 5));
    for (int i = 0; i < 3; i++) {
        fork_from(&given_up);
        fork_from(&kept);
    }
    need(placed(page_of(kept.memory), PAGE) == 0 && placed(page_of(given_up.memory), PAGE) == 0);
    return NULL;
}

void case_forks_router_death(void) {
    make_whole();
    need(pthread_join(start_thread(fork_without_a_router, NULL), NULL) == 0);
    printf("forks-router-death: good\n");
    exit(0);
}
