// Re-mapping of registered memory: what is zero-copy, that nothing is lost while it changes, that nothing is left.
//
//   remap CASE...
//
// Ends with 0 if all cases hold; prints what does not. 77: something that the case needs is not here.
#define _GNU_SOURCE
#include "remap.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct ibv_context *context;
struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *pair[2];

void fail(const char *file, int line, const char *what) {
    fprintf(stderr, "%s:%d: %s (errno %d)\n", file, line, what, errno);
    exit(1);
}

double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

void fill(uint8_t *memory, size_t bytes, unsigned seed) {
    for (size_t i = 0; i < bytes; i++) memory[i] = (uint8_t)(i * 31 + (i >> 12) * 7 + seed);
}

bool is_filled(const uint8_t *memory, size_t bytes, unsigned seed) {
    for (size_t i = 0; i < bytes; i++)
        if (memory[i] != (uint8_t)(i * 31 + (i >> 12) * 7 + seed)) return false;
    return true;
}

uint8_t *private_pages(size_t bytes, unsigned seed) {
    uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(memory != MAP_FAILED);
    fill(memory, bytes, seed);
    return memory;
}

struct ibv_mr *reg(void *address, size_t bytes) {
    struct ibv_mr *mr = ibv_reg_mr(pd, address, bytes, ALL_ACCESS);
    need(mr != NULL);
    return mr;
}

void dereg(struct ibv_mr *mr) { need(ibv_dereg_mr(mr) == 0); }

struct walk {
    FILE *file;
    unsigned long start, end, inode;
    char rights[5], name[256];
};

static bool next_area(struct walk *w) {
    char line[512];
    if (!w->file) need((w->file = fopen("/proc/thread-self/maps", "re")) != NULL);
    if (!fgets(line, sizeof line, w->file)) {
        fclose(w->file);
        return false;
    }
    w->name[0] = 0;
    need(sscanf(line, "%lx-%lx %4s %*s %*s %lu %255s", &w->start, &w->end, w->rights, &w->inode, w->name) >= 4);
    return true;
}

static size_t within(const struct walk *w, const void *address, size_t bytes) {
    unsigned long from = (unsigned long)address, to = from + bytes;
    from = w->start > from ? w->start : from;
    to = w->end < to ? w->end : to;
    return to > from ? to - from : 0;
}

static size_t of_arenas(const void *address, size_t bytes, char sharing) {
    size_t found = 0;
    for (struct walk w = {0}; next_area(&w);)
        if (w.rights[3] == sharing && strstr(w.name, "memfd:freeflow")) found += within(&w, address, bytes);
    return found;
}

size_t placed(const void *address, size_t bytes) { return of_arenas(address, bytes, 's'); }

size_t copied(const void *address, size_t bytes) { return of_arenas(address, bytes, 'p'); }

unsigned long arena_of(const void *address) {
    unsigned long found = 0;
    for (struct walk w = {0}; next_area(&w);)
        if (w.rights[3] == 's' && strstr(w.name, "memfd:freeflow") && within(&w, address, 1)) found = w.inode;
    return found;
}

unsigned areas(const void *address, size_t bytes) {
    unsigned found = 0;
    for (struct walk w = {0}; next_area(&w);) found += within(&w, address, bytes) > 0;
    return found;
}

unsigned all_areas(void) { return areas(NULL, -1ul); }

void show_maps(const void *address, size_t bytes) {
    for (struct walk w = {0}; next_area(&w);)
        if (within(&w, address, bytes)) printf("  %lx-%lx %s %s\n", w.start, w.end, w.rights, w.name);
}

long resident_kib(void) {
    long kib = 0;
    char line[256];
    FILE *status = fopen("/proc/self/status", "re");
    need(status != NULL);
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "VmRSS: %ld", &kib) == 1) break;
    fclose(status);
    return kib;
}

void connect_qp(struct ibv_qp *qp, uint32_t to) {
    union ibv_gid gid;
    need(ibv_query_gid(context, 1, 0, &gid) == 0);
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL_ACCESS};
    need(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = to,
                             .max_dest_rd_atomic = 4, .min_rnr_timer = 1,
                             .ah_attr = {.is_global = 1, .grh = {.dgid = gid, .hop_limit = 1}, .port_num = 1}};
    need(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4};
    need(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                    IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void connect_pair(void) {
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1}};
    for (int i = 0; i < 2; i++) need((pair[i] = ibv_create_qp(pd, &init)) != NULL);
    for (int i = 0; i < 2; i++) connect_qp(pair[i], pair[!i]->qp_num);
}

static void wait_for_one(void) {
    struct ibv_wc wc;
    int count;
    while (!(count = ibv_poll_cq(cq, 1, &wc))) {}
    need(count == 1);
    if (wc.status != IBV_WC_SUCCESS) fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc.status));
    need(wc.status == IBV_WC_SUCCESS);
}

static void post_and_wait(struct ibv_send_wr *wr) {
    struct ibv_send_wr *bad;
    need(ibv_post_send(pair[0], wr, &bad) == 0);
    wait_for_one();
}

void rdma(enum ibv_wr_opcode opcode, struct ibv_mr *local, void *from, struct ibv_mr *remote, void *to, size_t bytes) {
    struct ibv_sge sge = {(uintptr_t)from, (uint32_t)bytes, local->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED,
                             .wr.rdma = {(uintptr_t)to, remote->rkey}};
    post_and_wait(&wr);
}

void message(struct ibv_mr *local, void *from, struct ibv_mr *remote, void *to, size_t bytes) {
    struct ibv_sge into = {(uintptr_t)to, (uint32_t)bytes, remote->lkey};
    struct ibv_recv_wr *bad, wr = {.sg_list = &into, .num_sge = 1};
    need(ibv_post_recv(pair[1], &wr, &bad) == 0);
    rdma(IBV_WR_SEND, local, from, remote, NULL, bytes);
    wait_for_one();
}

uint64_t fetch_add(struct ibv_mr *local, uint64_t *result, struct ibv_mr *remote, void *at, uint64_t add) {
    struct ibv_sge sge = {(uintptr_t)result, 8, local->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
                             .send_flags = IBV_SEND_SIGNALED,
                             .wr.atomic = {.remote_addr = (uintptr_t)at, .compare_add = add, .rkey = remote->rkey}};
    post_and_wait(&wr);
    return *result;
}

uint32_t bind_window(struct ibv_mw *window, struct ibv_mr *mr, void *address, size_t bytes) {
    struct ibv_mw_bind_info info = {.mr = mr, .addr = (uintptr_t)address, .length = bytes,
                                    .mw_access_flags = ALL_ACCESS & ~IBV_ACCESS_LOCAL_WRITE};
    if (window->type == IBV_MW_TYPE_1) {
        struct ibv_mw_bind bind = {.send_flags = IBV_SEND_SIGNALED, .bind_info = info};
        need(ibv_bind_mw(pair[1], window, &bind) == 0);
        wait_for_one();
        return window->rkey;
    }
    // Of use to the peer of this queue pair alone.
    uint32_t key = ibv_inc_rkey(window->rkey);
    struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
                                   .bind_mw = {.mw = window, .rkey = key, .bind_info = info}};
    need(ibv_post_send(pair[1], &wr, &bad) == 0);
    wait_for_one();
    return key;
}

static const struct {
    const char *name;
    void (*run)(void);
} CASES[] = {
    {"kinds", case_kinds},       {"data", case_data},       {"overlap", case_overlap},
    {"many", case_many},         {"stale", case_stale},     {"limit", case_limit},
    {"renewed", case_renewed},   {"renewed-heap", case_renewed_heap},
    {"renewed-small", case_renewed_small}, {"renewed-on-demand", case_renewed_on_demand},
    {"renewed-moved", case_renewed_moved}, {"renewed-atomics", case_renewed_atomics},
    {"model", case_model},       {"model-peer", case_model_peer},
    {"rereg", case_rereg},       {"resident", case_resident}, {"charged", case_charged},
    {"fork", case_fork},         {"fork-threads", case_fork_threads},
    {"writers", case_writers},   {"signals", case_signals}, {"reads", case_reads},
    {"calls", case_calls},       {"atomics", case_atomics}, {"traced", case_traced},
    {"allocator", case_allocator}, {"router-death", case_router_death}, {"cost", case_cost},
    {"shared-again", case_shared_again}, {"shared-steady", case_shared_steady},
    {"client-steady", case_client_steady}, {"client-fleeting", case_client_fleeting},
    {"small", case_small}, {"small-again", case_small_again}, {"small-writers", case_small_writers},
    {"small-fork", case_small_fork}, {"small-devices", case_small_devices},
    {"small-stale", case_small_stale},
    {"edges", case_edges},       {"edges-shared", case_edges_shared}, {"edges-fleeting", case_edges_fleeting},
    {"edges-writers", case_edges_writers}, {"edges-signals", case_edges_signals},
    {"edges-fork", case_edges_fork}, {"edges-forks", case_edges_forks}, {"edges-allocator", case_edges_allocator},
    {"edges-lowest", case_edges_lowest}, {"edges-on-demand", case_edges_on_demand}, {"edges-file", case_edges_file},
    {"edges-leader", case_edges_leader}, {"edges-immovable", case_edges_immovable},
    {"edges-unstoppable", case_edges_unstoppable}, {"edges-foreign", case_edges_foreign},
    {"edges-uring", case_edges_uring}, {"edges-data-limit", case_edges_data_limit}, {"edges-far", case_edges_far},
    {"edges-whole", case_edges_whole},
    {"forks-busy", case_forks_busy}, {"forks-beside", case_forks_beside}, {"forks-handler", case_forks_handler},
    {"forks-grandchild", case_forks_grandchild}, {"forks-cancelled", case_forks_cancelled},
    {"forks-scattered", case_forks_scattered},
    {"forks-router-death", case_forks_router_death},
    {"hint", case_hint},         {"hint-little", case_hint_little}, {"hint-ordinary", case_hint_ordinary},
    {"hint-partial", case_hint_partial}, {"hint-reused", case_hint_reused},
    {"borrowed", case_borrowed}, {"borrowed-not", case_borrowed_not}, {"borrowed-changes", case_borrowed_changes},
    {"borrowed-renewed", case_borrowed_renewed}, {"borrowed-freed", case_borrowed_freed},
    {"borrowed-faults", case_borrowed_faults},
    {"borrowed-processes", case_borrowed_processes}, {"borrowed-swapped", case_borrowed_swapped},
    {"borrowed-storm", case_borrowed_storm}, {"borrowed-atomics", case_borrowed_atomics},
};

static struct ibv_device **devices;

void open_all(void) {
    int count;
    devices = ibv_get_device_list(&count);
    need(devices && count == 1);
    need((context = ibv_open_device(devices[0])) != NULL);
    need((pd = ibv_alloc_pd(context)) != NULL);
    need((cq = ibv_create_cq(context, 64, NULL, NULL, 0)) != NULL);
    connect_pair();
}

void close_all(void) {
    for (int i = 0; i < 2; i++) need(ibv_destroy_qp(pair[i]) == 0);
    need(ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
    ibv_free_device_list(devices);
}

int main(int argc, char **argv) {
    open_all();
    for (int i = 1; i < argc; i++) {
        bool known = false;
        for (size_t at = 0; at < sizeof CASES / sizeof *CASES; at++) {
            if (strcmp(argv[i], CASES[at].name)) continue;
            known = true;
            CASES[at].run();
            printf("%s: good\n", argv[i]);
            fflush(stdout);
        }
        need(known);
    }
    close_all();
    return 0;
}
