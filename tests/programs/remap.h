// Common parts of the cases of `remap`: one device, memory of every kind, a connected pair of QPs
// in this process, checks.
#ifndef FREEFLOW_TEST_REMAP_H
#define FREEFLOW_TEST_REMAP_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define PAGE 4096ul
#define MIB (1ul << 20)
#define ALL_ACCESS                                                                                                     \
    (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

extern struct ibv_context *context;
extern struct ibv_pd *pd;

#define need(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) fail(__FILE__, __LINE__, #condition);                                                        \
    } while (0)
_Noreturn void fail(const char *file, int line, const char *what);
void show_maps(const void *address, size_t bytes);

// Whole pages of private memory; their contents follow from `seed`.
uint8_t *private_pages(size_t bytes, unsigned seed);
void fill(uint8_t *memory, size_t bytes, unsigned seed);
bool is_filled(const uint8_t *memory, size_t bytes, unsigned seed);
struct ibv_mr *reg(void *address, size_t bytes);
void dereg(struct ibv_mr *mr);

// By the process' own map. Bytes of the range that are in an arena; areas that the range consists of, and all areas.
size_t placed(const void *address, size_t bytes);
size_t copied(const void *address, size_t bytes); // private copies of an arena's pages
unsigned long arena_of(const void *address); // the file of the arena that it is in, or 0
unsigned areas(const void *address, size_t bytes);
unsigned all_areas(void);
long resident_kib(void);

// RDMA from one QP of this process to another; each returns when it is complete.
void rdma(enum ibv_wr_opcode opcode, struct ibv_mr *local, void *from, struct ibv_mr *remote, void *to, size_t bytes);
void message(struct ibv_mr *local, void *from, struct ibv_mr *remote, void *to, size_t bytes);
uint64_t fetch_add(struct ibv_mr *local, uint64_t *result, struct ibv_mr *remote, void *at, uint64_t add);

// Binds a window to a part of a region, with all rights; gives its key.
uint32_t bind_window(struct ibv_mw *window, struct ibv_mr *mr, void *address, size_t bytes);

// The device and the pair of this process; of a child, its own.
void open_all(void);
void close_all(void);

// Connects a new queue pair of this process to another one of the same device.
void connect_qp(struct ibv_qp *qp, uint32_t to);

double now_us(void);

// How long a case of several threads runs.
double seconds(void);

// Threads that go on until `stop` is set; `stop_threads` sets it, waits for them and clears it.
extern atomic_bool stop;
pthread_t start_thread(void *(*body)(void *), void *argument);
void stop_threads(pthread_t *threads, int count);

// The body of a thread that allocates and frees blocks, and checks that nobody changes them.
struct allocating {
    unsigned random; // where its choices begin
    size_t bytes_max;
};
void *allocate_on(void *argument);

// Whole pages that are registered, the other end of requests to partial ones.
extern struct ibv_mr *whole;
extern uint8_t *whole_memory;
void make_whole(void);
void end_whole(void);
uint8_t *page_of(const void *address);
// Whether all pages that a buffer touches are in arenas.
bool is_placed(const void *address, size_t bytes);
// WRITEs into a region and READs from it: what arrives is what was there. True once all its pages are shared.
bool use_until_placed(struct ibv_mr *mr, uint8_t *memory, size_t bytes);

void case_kinds(void);
void case_data(void);
void case_overlap(void);
void case_rereg(void);
void case_resident(void);
void case_charged(void);
void case_many(void);
void case_stale(void);
void case_renewed(void);
void case_renewed_heap(void);
void case_renewed_small(void);
void case_renewed_on_demand(void);
void case_renewed_moved(void);
void case_renewed_atomics(void);
void case_model(void);
void case_model_peer(void);
void case_limit(void);
void case_fork(void);
void case_fork_threads(void);
void case_writers(void);
void case_signals(void);
void case_reads(void);
void case_calls(void);
void case_atomics(void);
void case_traced(void);
void case_allocator(void);
void case_shared_again(void);
void case_shared_steady(void);
void case_client_steady(void);
void case_client_fleeting(void);
void case_router_death(void);
void case_cost(void);
void case_small(void);
void case_small_again(void);
void case_small_writers(void);
void case_small_fork(void);
void case_small_devices(void);
void case_small_stale(void);
void case_edges(void);
void case_edges_shared(void);
void case_edges_fleeting(void);
void case_edges_writers(void);
void case_edges_forks(void);
void case_edges_signals(void);
void case_edges_fork(void);
void case_edges_allocator(void);
void case_edges_lowest(void);
void case_edges_on_demand(void);
void case_edges_file(void);
void case_edges_leader(void);
void case_edges_immovable(void);
void case_edges_unstoppable(void);
void case_edges_foreign(void);
void case_edges_uring(void);
void case_edges_data_limit(void);
void case_edges_far(void);
void case_edges_whole(void);
void case_forks_busy(void);
void case_forks_grandchild(void);
void case_forks_beside(void);
void case_forks_handler(void);
void case_forks_cancelled(void);
void case_forks_scattered(void);
void case_forks_router_death(void);
void case_hint(void);
void case_hint_little(void);
void case_hint_ordinary(void);
void case_hint_partial(void);
void case_hint_reused(void);
void case_borrowed(void);
void case_borrowed_not(void);
void case_borrowed_changes(void);
void case_borrowed_renewed(void);
void case_borrowed_freed(void);
void case_borrowed_faults(void);
void case_borrowed_processes(void);
void case_borrowed_swapped(void);
void case_borrowed_storm(void);
void case_borrowed_atomics(void);
#endif
