// Cases of several threads: nothing that one writes is lost while another registers and deregisters the memory.
#define _GNU_SOURCE
#include "remap.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

atomic_bool stop;
static atomic_ulong calls;

pthread_t start_thread(void *(*body)(void *), void *argument) {
    pthread_t thread;
    need(pthread_create(&thread, NULL, body, argument) == 0);
    return thread;
}

void stop_threads(pthread_t *threads, int count) {
    atomic_store(&stop, true);
    for (int i = 0; i < count; i++) need(pthread_join(threads[i], NULL) == 0);
    atomic_store(&stop, false);
}

double seconds(void) {
    const char *text = getenv("REMAP_SECONDS");
    return text ? atof(text) : 2;
}

enum { WRITERS = 3, STRESS_BYTES = 1 << 20, ALLOCATED_BYTES = 200 << 10 };

struct writer {
    uint64_t *words; // its own, one in each page
    uint64_t count;
};

static void *write_on(void *argument) {
    struct writer *w = argument;
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        for (size_t page = 0; page < STRESS_BYTES / PAGE; page++) {
            volatile uint64_t *word = w->words + page * PAGE / 8;
            *word = *word + 1;
        }
        w->count++;
    }
    return NULL;
}

// Registers and deregisters for some seconds; how often. Threads that get no processor can't be frozen
// in time; for a second it is not tried again then, which is one spell of rounds that copy, however
// many.
static unsigned long turn(uint8_t *m, size_t bytes, bool must_place) {
    unsigned long rounds = 0, in_place = 0, spells = 0;
    bool was_placed = true;
    for (double begin = now_us(); now_us() - begin < seconds() * 1e6; rounds++) {
        size_t skip = rounds % 3 * 1000;
        struct ibv_mr *mr = reg(m + skip, bytes - 2 * skip);
        bool is_placed = placed(m, bytes) > 0;
        in_place += is_placed;
        spells += was_placed && !is_placed;
        was_placed = is_placed;
        dereg(mr);
        need(!must_place || placed(m, bytes) == 0);
    }
    printf("%lu rounds, %lu of them zero-copy\n", rounds, in_place);
    need(!must_place || in_place > spells * 10);
    return rounds;
}

void case_writers(void) {
    uint8_t *m = mmap(NULL, STRESS_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_t threads[WRITERS];
    struct writer writers[WRITERS];
    for (int i = 0; i < WRITERS; i++) {
        writers[i] = (struct writer){(uint64_t *)m + i * 8, 0};
        threads[i] = start_thread(write_on, &writers[i]);
    }
    turn(m, STRESS_BYTES, true);
    stop_threads(threads, WRITERS);
    for (int i = 0; i < WRITERS; i++) {
        need(writers[i].count > 10);
        for (size_t page = 0; page < STRESS_BYTES / PAGE; page++)
            need(writers[i].words[page * PAGE / 8] == writers[i].count);
    }
    need(areas(m, STRESS_BYTES) == 1);
    munmap(m, STRESS_BYTES);
}

static volatile uint64_t *signal_words;
static volatile uint64_t signal_count;
static void on_timer(int number) {
    (void)number;
    signal_count++;
    for (size_t page = 0; page < STRESS_BYTES / PAGE; page += 16) signal_words[page * PAGE / 8]++;
}

// One thread, whose signals write the region.
void case_signals(void) {
    uint8_t *m = mmap(NULL, STRESS_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    signal_words = (uint64_t *)m;
    struct sigaction action = {.sa_handler = on_timer, .sa_flags = SA_RESTART};
    need(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval often = {{0, 100}, {0, 100}}, never = {{0, 0}, {0, 0}};
    need(setitimer(ITIMER_REAL, &often, NULL) == 0);
    turn(m, STRESS_BYTES, true);
    need(setitimer(ITIMER_REAL, &never, NULL) == 0);
    need(signal_count > 100);
    for (size_t page = 0; page < STRESS_BYTES / PAGE; page += 16) need(signal_words[page * PAGE / 8] == signal_count);
    munmap(m, STRESS_BYTES);
}

struct stream {
    int fd;
    uint8_t *to;
    size_t bytes;
    uint64_t count;
};

static void *feed(void *argument) {
    struct stream *s = argument;
    uint64_t block[512], next = 0;
    while (!atomic_load(&stop)) {
        for (int i = 0; i < 512; i++) block[i] = next++;
        if (write(s->fd, block, sizeof block) != sizeof block) break;
    }
    close(s->fd);
    return NULL;
}

// read(2) into the region: the kernel writes there; every byte must be there afterwards.
static void *drain(void *argument) {
    struct stream *s = argument;
    uint64_t next = 0;
    for (size_t at = 0;; at = (at + 3 * PAGE) % (s->bytes - 16 * PAGE)) {
        uint8_t *to = s->to + at;
        size_t got = 0;
        while (got < 4096) {
            ssize_t count = read(s->fd, to + got, 4096 - got);
            if (count < 0) fail(__FILE__, __LINE__, "read failed");
            if (count == 0) return NULL;
            got += (size_t)count;
        }
        for (int i = 0; i < 512; i++) {
            uint64_t word;
            memcpy(&word, to + i * 8, 8);
            if (word != next++) fail(__FILE__, __LINE__, "bytes that read(2) brought are lost");
        }
        s->count++;
    }
}

void case_reads(void) {
    int ends[2];
    need(pipe(ends) == 0);
    uint8_t *m = private_pages(STRESS_BYTES, 1);
    struct stream in = {ends[1], NULL, 0, 0}, out = {ends[0], m, STRESS_BYTES, 0};
    pthread_t feeder = start_thread(feed, &in), drainer = start_thread(drain, &out);
    turn(m, STRESS_BYTES, true);
    stop_threads(&feeder, 1);
    need(pthread_join(drainer, NULL) == 0 && out.count > 100);
    close(ends[0]);
    munmap(m, STRESS_BYTES);
}

// Blocking calls of other threads: none may answer EINTR, since no signal came.
static int silent_socket[2], silent_epoll, silent_semaphores;
static sem_t silent_sem;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;

static void note(const char *name, long result, int wanted) {
    atomic_fetch_add(&calls, 1);
    if (result >= 0 || errno != wanted) {
        fprintf(stderr, "%s gave %ld, errno %d\n", name, result, errno);
        fail(__FILE__, __LINE__, "a system call was disturbed");
    }
}

static struct timespec soon(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += 30000000;
    if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
    return t;
}

static void *wait_in_calls(void *argument) {
    long which = (long)argument;
    while (!atomic_load(&stop)) {
        struct epoll_event event;
        struct pollfd polled = {silent_socket[0], POLLIN, 0};
        struct timespec t = {0, 30000000}, left, at = soon();
        char byte;
        sigset_t set;
        fd_set fds;
        struct timeval tv = {0, 30000};
        struct sembuf down = {0, -1, 0};
        int code;
        switch (which) {
        case 0:
            if (epoll_wait(silent_epoll, &event, 1, 30) != 0) fail(__FILE__, __LINE__, "epoll_wait");
            break;
        case 1:
            if (nanosleep(&t, &left) != 0) fail(__FILE__, __LINE__, "nanosleep");
            break;
        case 2:
            if (poll(&polled, 1, 30) != 0) fail(__FILE__, __LINE__, "poll");
            break;
        case 3: note("sem_timedwait", sem_timedwait(&silent_sem, &at), ETIMEDOUT); break;
        case 4:
            sigemptyset(&set);
            sigaddset(&set, SIGUSR2);
            note("sigtimedwait", sigtimedwait(&set, NULL, &t), EAGAIN);
            break;
        case 5: note("recv", recv(silent_socket[0], &byte, 1, 0), EAGAIN); break;
        case 6:
            FD_ZERO(&fds);
            FD_SET(silent_socket[0], &fds);
            if (select(silent_socket[0] + 1, &fds, NULL, NULL, &tv) != 0) fail(__FILE__, __LINE__, "select");
            break;
        case 7: note("semtimedop", semtimedop(silent_semaphores, &down, 1, &t), EAGAIN); break;
        case 8:
            pthread_mutex_lock(&mutex);
            code = pthread_cond_timedwait(&condition, &mutex, &at);
            pthread_mutex_unlock(&mutex);
            if (code != ETIMEDOUT) fail(__FILE__, __LINE__, "pthread_cond_timedwait");
            break;
        case 9:
            if (clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &at, NULL) != 0) fail(__FILE__, __LINE__, "clock_nanosleep");
            break;
        }
        atomic_fetch_add(&calls, 1);
    }
    return NULL;
}

static void *wait_forever(void *argument) {
    char byte;
    int fd = *(int *)argument;
    // Ends when the other end closes, and not before.
    ssize_t count = read(fd, &byte, 1);
    if (count != 0) fail(__FILE__, __LINE__, "a blocking read was disturbed");
    return NULL;
}

static void ignore(int number) { (void)number; }

static void *until_signal(void *argument) {
    struct epoll_event event;
    while (!atomic_load(&stop)) {
        // Only the signal of the other thread ends it.
        if (epoll_wait(silent_epoll, &event, 1, -1) != -1 || errno != EINTR) fail(__FILE__, __LINE__, "epoll_wait");
        atomic_fetch_add((atomic_ulong *)argument, 1);
    }
    return NULL;
}

void case_calls(void) {
    enum { KINDS = 10 };
    uint8_t *m = private_pages(16 * PAGE, 1);
    pthread_t threads[KINDS], reader, sleeper;
    int ends[2];
    need(socketpair(AF_UNIX, SOCK_STREAM, 0, silent_socket) == 0 && pipe(ends) == 0);
    struct timeval timeout = {0, 30000};
    need(setsockopt(silent_socket[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) == 0);
    need((silent_epoll = epoll_create1(0)) >= 0 && sem_init(&silent_sem, 0, 0) == 0);
    need((silent_semaphores = semget(IPC_PRIVATE, 1, 0600)) >= 0);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    struct sigaction action = {.sa_handler = ignore};
    need(sigaction(SIGUSR1, &action, NULL) == 0);
    for (long i = 0; i < KINDS; i++) threads[i] = start_thread(wait_in_calls, (void *)i);
    reader = start_thread(wait_forever, &ends[0]);
    atomic_ulong woken = 0;
    unsigned long sent = 0;
    sleeper = start_thread(until_signal, &woken);
    turn(m, 16 * PAGE, true);
    // Signals still do what they do without us: each ends one wait.
    for (double begin = now_us(); now_us() - begin < 1e6; sent++) {
        unsigned long before = atomic_load(&woken);
        need(pthread_kill(sleeper, SIGUSR1) == 0);
        double asked = now_us();
        while (atomic_load(&woken) == before) {
            dereg(reg(m, 16 * PAGE));
            // It may not have been waiting yet when the signal came.
            if (now_us() - asked > 20e3) {
                need(pthread_kill(sleeper, SIGUSR1) == 0);
                asked = now_us();
            }
        }
    }
    printf("%lu calls, %lu signals\n", atomic_load(&calls), sent);
    need(sent > 10 && atomic_load(&calls) > 100);
    atomic_store(&stop, true);
    while (pthread_tryjoin_np(sleeper, NULL)) pthread_kill(sleeper, SIGUSR1), usleep(1000);
    close(ends[1]);
    need(pthread_join(reader, NULL) == 0);
    stop_threads(threads, KINDS);
    semctl(silent_semaphores, 0, IPC_RMID);
    munmap(m, 16 * PAGE);
}

// A word that peers add to, and that is registered in other ways meanwhile.
struct adder {
    struct ibv_mr *word_mr, *result_mr;
    uint64_t *word, *result, count;
};

static void *add_on(void *argument) {
    struct adder *a = argument;
    while (!atomic_load(&stop)) {
        fetch_add(a->result_mr, a->result, a->word_mr, a->word, 1);
        a->count++;
    }
    return NULL;
}

void case_atomics(void) {
    uint8_t *m = private_pages(64 * PAGE, 0);
    memset(m, 0, 64 * PAGE);
    struct adder a = {reg(m + 8 * PAGE, 64), reg(m + 60 * PAGE, 64), (uint64_t *)(m + 8 * PAGE),
                      (uint64_t *)(m + 60 * PAGE), 0};
    pthread_t thread = start_thread(add_on, &a);
    turn(m, 32 * PAGE, false);
    stop_threads(&thread, 1);
    need(*a.word == a.count && a.count > 100);
    dereg(a.word_mr);
    dereg(a.result_mr);
    need(placed(m, 64 * PAGE) == 0);
    // Placed before: the word's page stays, whoever comes and goes.
    a.word_mr = reg(m, 32 * PAGE);
    a.result_mr = reg(m + 60 * PAGE, PAGE);
    a.count = *a.word;
    thread = start_thread(add_on, &a);
    turn(m, 48 * PAGE, false);
    stop_threads(&thread, 1);
    need(*a.word == a.count);
    dereg(a.word_mr);
    dereg(a.result_mr);
    need(placed(m, 64 * PAGE) == 0 && *a.word == a.count);
    munmap(m, 64 * PAGE);
}

static void *idle(void *argument) {
    (void)argument;
    while (!atomic_load(&stop)) usleep(1000);
    return NULL;
}

// Run under a tracer, which has the threads: nothing can be frozen, so memory stays on the slow path, and all works.
void case_traced(void) {
    uint8_t *m = private_pages(64 * PAGE, 1);
    struct ibv_mr *before = reg(m, 64 * PAGE);
    need(placed(m, 64 * PAGE) == 64 * PAGE);
    pthread_t threads[2] = {start_thread(idle, NULL), start_thread(idle, NULL)};
    dereg(before); // by private copies: no thread could be frozen
    need(placed(m, 64 * PAGE) == 0 && is_filled(m, 64 * PAGE, 1));
    need(copied(m, 64 * PAGE) == 64 * PAGE);
    need(madvise(m + PAGE, PAGE, MADV_DONTNEED) == 0);
    for (size_t i = 0; i < PAGE; i++) need(m[PAGE + i] == 0);
    fill(m, 64 * PAGE, 2);
    struct ibv_mr *mr = reg(m, 64 * PAGE);
    need(placed(m, 64 * PAGE) == 0);
    rdma(IBV_WR_RDMA_WRITE, mr, m, mr, m + 32 * PAGE, PAGE);
    need(!memcmp(m, m + 32 * PAGE, PAGE));
    dereg(mr);
    stop_threads(threads, 2);
    mr = reg(m, 64 * PAGE);
    need(placed(m, 64 * PAGE) == 64 * PAGE);
    dereg(mr);
    need(placed(m, 64 * PAGE) == 0 && areas(m, 64 * PAGE) == 1);
    munmap(m, 64 * PAGE);
}

// Threads that allocate and free, while blocks of the same allocator come and go as regions.
void *allocate_on(void *argument) {
    const struct allocating *allocating = argument;
    unsigned random = allocating->random;
    enum { BLOCKS = 64 };
    struct { uint8_t *memory; size_t bytes; unsigned seed; } blocks[BLOCKS] = {{0}};
    while (!atomic_load(&stop)) {
        random = random * 1103515245 + 12345;
        unsigned i = (random >> 8) % BLOCKS;
        if (blocks[i].memory) {
            if (!is_filled(blocks[i].memory, blocks[i].bytes, blocks[i].seed))
                fail(__FILE__, __LINE__, "a block of memory changed");
            free(blocks[i].memory);
            blocks[i].memory = NULL;
        } else {
            size_t bytes = 1 + (random >> 12) % allocating->bytes_max;
            uint8_t *memory = calloc(1, bytes);
            for (size_t at = 0; at < bytes; at++)
                if (memory[at]) fail(__FILE__, __LINE__, "calloc gave memory that is not zero");
            fill(memory, bytes, random);
            blocks[i].memory = memory, blocks[i].bytes = bytes, blocks[i].seed = random;
        }
        atomic_fetch_add(&calls, 1);
    }
    for (int i = 0; i < BLOCKS; i++) free(blocks[i].memory);
    return NULL;
}

static void *register_on(void *argument) {
    unsigned random = (unsigned)(long)argument;
    while (!atomic_load(&stop)) {
        random = random * 1103515245 + 12345;
        size_t bytes = 1 + (random >> 8) % (300 * 1024);
        uint8_t *memory = calloc(1, bytes);
        for (size_t at = 0; at < bytes; at++)
            if (memory[at]) fail(__FILE__, __LINE__, "calloc gave memory that is not zero");
        struct ibv_mr *mr = reg(memory, bytes);
        fill(memory, bytes, random);
        dereg(mr);
        need(is_filled(memory, bytes, random));
        free(memory);
    }
    return NULL;
}

void case_allocator(void) {
    unsigned before = all_areas();
    pthread_t threads[5];
    atomic_store(&calls, 0);
    struct allocating allocating[3];
    for (unsigned i = 0; i < 3; i++) {
        allocating[i] = (struct allocating){i + 1, ALLOCATED_BYTES};
        threads[i] = start_thread(allocate_on, &allocating[i]);
    }
    for (long i = 3; i < 5; i++) threads[i] = start_thread(register_on, (void *)(i + 1));
    usleep(seconds() * 1000000);
    stop_threads(threads, 5);
    printf("%lu allocations, %d areas more\n", atomic_load(&calls), (int)(all_areas() - before));
    need(placed(NULL, -1ul) <= 33 * MIB); // no more than empty arenas
}

static int ended_with(pid_t child) {
    int status;
    need(waitpid(child, &status, 0) == child);
    return status;
}

// Forks of one thread while others write and register.
void case_fork_threads(void) {
    uint8_t *m = private_pages(STRESS_BYTES, 1), *quiet = private_pages(STRESS_BYTES, 9);
    struct ibv_mr *mr = reg(quiet, STRESS_BYTES);
    pthread_t threads[3];
    struct writer writer = {(uint64_t *)m, 0};
    threads[0] = start_thread(write_on, &writer);
    threads[1] = start_thread(register_on, (void *)7);
    struct allocating allocating = {8, ALLOCATED_BYTES};
    threads[2] = start_thread(allocate_on, &allocating);
    unsigned forks = 0;
    for (double begin = now_us(); now_us() - begin < seconds() * 1e6; forks++) {
        struct ibv_mr *other = reg(m, STRESS_BYTES);
        pid_t child = fork();
        if (!child) {
            if (placed(quiet, STRESS_BYTES) || placed(m, STRESS_BYTES)) _exit(1);
            _exit(is_filled(quiet, STRESS_BYTES, 9) ? 0 : 2);
        }
        need(child > 0 && ended_with(child) == 0);
        dereg(other);
    }
    stop_threads(threads, 3);
    printf("%u forks\n", forks);
    dereg(mr);
    need(forks > 1 && placed(quiet, STRESS_BYTES) == 0 && is_filled(quiet, STRESS_BYTES, 9));
    munmap(m, STRESS_BYTES);
    munmap(quiet, STRESS_BYTES);
}
