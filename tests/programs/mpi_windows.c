// One-sided operations of the MPI program: windows of every kind of memory, many of them, created and freed, so that a
// library's cache of registrations sees addresses come again with other memory behind them.
#include "mpi.h"

#include <stdlib.h>
#include <string.h>

#define STACK_BYTES 20000
#define KINDS 4
enum { MALLOC, ALLOC_MEM, STACK, WIN_ALLOCATE };
static const char *const NAMES[KINDS] = {"malloc", "MPI_Alloc_mem", "the stack", "MPI_Win_allocate"};

// A window of the wanted kind; `*base` is where it begins, at an odd address where the kind allows it.
static MPI_Win window_of(int kind, size_t bytes, size_t offset, void **memory, uint8_t **base, uint8_t *stack) {
    MPI_Win window;
    if (kind == WIN_ALLOCATE) {
        MPI_Win_allocate(bytes, 1, MPI_INFO_NULL, MPI_COMM_WORLD, base, &window);
        return window;
    }
    if (kind == MALLOC)
        *memory = malloc(bytes + offset);
    else if (kind == ALLOC_MEM)
        MPI_Alloc_mem(bytes + offset, MPI_INFO_NULL, memory);
    else
        *memory = stack;
    *base = (uint8_t *)*memory + offset;
    MPI_Win_create(*base, bytes, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
    return window;
}

static void free_window(int kind, MPI_Win *window, void *memory) {
    MPI_Win_free(window);
    if (kind == MALLOC)
        free(memory);
    else if (kind == ALLOC_MEM)
        MPI_Free_mem(memory);
}

// Everyone's window is cut into one part for each rank. Each puts its part of the next one's window, by pieces of odd
// sizes from freshly allocated memory; each owner looks at the whole; then each gets a piece of the next one's window.
static void put_and_get(int kind, size_t bytes, size_t offset, uint64_t stream, uint8_t *stack) {
    void *memory = NULL;
    uint8_t *base;
    MPI_Win window = window_of(kind, bytes, offset, &memory, &base, stack);
    fill(base, stream << 8 | 128 | rank, 0, bytes);
    int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    size_t half = bytes / 2, pieces = 1 + stream % 5;
    uint8_t *sources[5];
    MPI_Win_fence(0, window);
    for (size_t piece = 0; piece < pieces; piece++) {
        size_t from = half * piece / pieces, length = half * (piece + 1) / pieces - from;
        sources[piece] = malloc(length + 7);
        fill(sources[piece] + 7, stream << 8 | rank, from, length);
        MPI_Put(sources[piece] + 7, length, MPI_BYTE, next, from, length, MPI_BYTE, window);
    }
    MPI_Win_fence(0, window);
    check(base, stream << 8 | previous, 0, half, NAMES[kind]);
    check(base + half, stream << 8 | 128 | rank, half, bytes - half, NAMES[kind]);
    for (size_t piece = 0; piece < pieces; piece++)
        free(sources[piece]);
    uint8_t *got = malloc(bytes + 13);
    fill(got, 99, 0, bytes + 13);
    MPI_Win_lock(MPI_LOCK_SHARED, next, 0, window);
    MPI_Get(got + 13, bytes, MPI_BYTE, next, 0, bytes, MPI_BYTE, window);
    MPI_Win_unlock(next, window);
    check(got, 99, 0, 13, "before what was got");
    check(got + 13, stream << 8 | rank, 0, half, "got what it put itself");
    check(got + 13 + half, stream << 8 | 128 | next, half, bytes - half, "got the owner's");
    free(got);
    MPI_Barrier(MPI_COMM_WORLD);
    free_window(kind, &window, memory);
}

static void windows_at(int round, size_t alignment) {
    _Alignas(64) uint8_t stack[STACK_BYTES + 64];
    for (int kind = 0; kind < KINDS; kind++) {
        // Whole pages of their own, parts of pages, and everything of a heap's page.
        static const size_t MOST[] = {40, 5000, 140000, 1000000};
        size_t most = kind == STACK ? STACK_BYTES : MOST[common_random() % 4];
        size_t bytes = 9 + common_random() % (most - 9);
        size_t offset = (1 + common_random() % 63) / alignment * alignment;
        bytes = (bytes + alignment - 1) / alignment * alignment; // the next rank's may lie right behind
        put_and_get(kind, bytes, offset, 5000 + round * KINDS + kind, stack);
    }
}

void one_sided_bytes(int round) {
    windows_at(round, 1);
}

// MPICH 4.0 with UCX 1.13, as in Debian 12, takes the address that UCX rounded down for a window's beginning, over any
// transport: windows at other addresses than multiples of 16 are wrong without FreeFlow too.
void one_sided_aligned(int round) {
    windows_at(round, 16);
}

// Sums by MPI_Accumulate from everyone to everyone, and tickets by MPI_Fetch_and_op: each is given out once.
static void sums_and_tickets(int kind, int count, int tickets, uint8_t *stack) {
    void *memory = NULL;
    uint8_t *base;
    size_t bytes = (count + 1) * sizeof(int64_t);
    MPI_Win window = window_of(kind, bytes, 16, &memory, &base, stack);
    int64_t *values = (int64_t *)base;
    if ((uintptr_t)values % sizeof *values)
        abort();
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, rank, 0, window);
    memset(values, 0, bytes);
    MPI_Win_unlock(rank, window);
    MPI_Barrier(MPI_COMM_WORLD);
    int64_t *mine = malloc(count * sizeof *mine);
    for (int index = 0; index < count; index++)
        mine[index] = (int64_t)(index + 1) * (rank + 1);
    for (int to = 0; to < size; to++) {
        MPI_Win_lock(MPI_LOCK_SHARED, to, 0, window);
        MPI_Accumulate(mine, count, MPI_INT64_T, to, 0, count, MPI_INT64_T, MPI_SUM, window);
        MPI_Win_unlock(to, window);
    }
    int64_t *taken = malloc(tickets * sizeof *taken), one = 1, previous = -1;
    MPI_Win_lock_all(0, window);
    for (int number = 0; number < tickets; number++) {
        MPI_Fetch_and_op(&one, &taken[number], MPI_INT64_T, 0, count * sizeof *values, MPI_SUM, window);
        MPI_Win_flush(0, window);
        if (taken[number] <= previous)
            check_value(taken[number], previous + 1, "a ticket comes after the one before");
        previous = taken[number];
    }
    MPI_Win_unlock_all(window);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window);
    for (int index = 0; index < count; index++)
        check_value(values[index], (int64_t)(index + 1) * size * (size + 1) / 2, "a sum in a window");
    int64_t last = values[count];
    MPI_Win_unlock(rank, window);
    if (rank == 0)
        check_value(last, (int64_t)size * tickets, "tickets given out");
    int64_t total = 0, all;
    for (int each = 0; each < tickets; each++)
        total += taken[each];
    MPI_Allreduce(&total, &all, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    int64_t given = (int64_t)size * tickets;
    check_value(all, given * (given - 1) / 2, "the sum of all tickets");
    free(mine), free(taken);
    free_window(kind, &window, memory);
}

void one_sided_values(int round) {
    (void)round;
    _Alignas(64) uint8_t stack[STACK_BYTES + 64];
    for (int kind = 0; kind < KINDS; kind++) {
        int most = kind == STACK ? STACK_BYTES / 8 - 3 : 20000;
        sums_and_tickets(kind, 1 + common_random() % most, 20, stack);
    }
}

// One of all swaps a zero for its own number, and the others find that. (Open MPI 4.1.4 has none over shared memory:
// its btl vader follows a null pointer.)
void one_sided_swap(int round) {
    (void)round;
    for (int kind = MALLOC; kind < KINDS; kind += WIN_ALLOCATE) {
        void *memory = NULL;
        uint8_t *base;
        MPI_Win window = window_of(kind, sizeof(int64_t), 0, &memory, &base, NULL);
        int64_t zero = 0, number = rank + 1, found = -1, winner;
        MPI_Win_lock(MPI_LOCK_EXCLUSIVE, rank, 0, window);
        *(int64_t *)base = 0;
        MPI_Win_unlock(rank, window);
        MPI_Barrier(MPI_COMM_WORLD);
        MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
        MPI_Compare_and_swap(&number, &zero, &found, MPI_INT64_T, 0, 0, window);
        MPI_Win_unlock(0, window);
        MPI_Barrier(MPI_COMM_WORLD);
        MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window);
        winner = *(int64_t *)base;
        MPI_Win_unlock(rank, window);
        MPI_Bcast(&winner, 1, MPI_INT64_T, 0, MPI_COMM_WORLD);
        check_value(found, winner == rank + 1 ? 0 : winner, "what a swap found");
        free_window(kind, &window, memory);
    }
}
