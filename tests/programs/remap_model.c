// A model test: memory that the program maps, moves, throws away, writes and registers at random, and every way to
// reach it, against plain memory.
//
// Each thread has its own pages, neighbours of other threads' pages, a queue pair that is connected to itself, and one
// to a peer, which is a program of its own. What a thread does follows from the seed; what it must find follows from
// what it did. REMAP_SEED, REMAP_STEPS (of all threads together), REMAP_THREADS. REMAP_TRACED: now and then a tracer
// comes, beside which no thread can be frozen, and goes.
#define _GNU_SOURCE
#include "remap.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    PAGES = 48,
    BYTES = PAGES << 12,
    REGIONS = 14,
    PEER_BYTES = 96 << 10,
    THREADS_MAX = 8,
    PEER_FD = 100,
    BURST = 24,      // requests of a peer, one after the other: so it is granted the memory
    LOOK_EVERY = 32, // steps, after which all of a thread's memory is compared
    NOTES = 24,      // steps that are printed when something is wrong
    TRACE_EVERY = 900,     // steps, after which a tracer comes or goes
    UNHELD_US = 1050000,   // the pause of the library after a failed freeze, and a little more
};
// Far below where the kernel puts what wants no address, so that nothing comes into a hole.
#define ARENA 0x200000000000ul

struct region {
    struct ibv_mr *mr; // NULL: none
    size_t at, length;
    bool on_demand;
    bool is_alive; // its memory is that which was registered
    bool is_moved; // and some of that is at other addresses now
};

// To a peer, and back with `status`. `count` 0: a new connection, to the queue pair `address`; back with its own as
// `result`.
struct order {
    uint64_t address, compare, swap, result;
    uint32_t rkey, length, at, count;
    enum ibv_wr_opcode opcode;
    enum ibv_wc_status status;
};

struct hello {
    uint32_t qpn, rkey;
    uint64_t address;
};

struct actor {
    unsigned number;
    uint64_t random, seed, steps, step;
    uint8_t *m;
    uint8_t *model;          // what must be there
    bool is_mapped[PAGES], is_shared[PAGES]; // shared: by the program, also with children
    struct region regions[REGIONS];
    struct ibv_cq *cq;
    struct ibv_qp *self, *to_peer;
    uint8_t *scratch, *peer_model; // PEER_BYTES each
    struct ibv_mr *scratch_mr;
    uint64_t *result;
    struct ibv_mr *result_mr;
    int fd;
    pid_t pid;
    struct hello peer;
    uint64_t transfers, refused_moves;
    char notes[NOTES][160];
};

static uint64_t next_random(struct actor *a, uint64_t below) {
    a->random ^= a->random << 13;
    a->random ^= a->random >> 7;
    a->random ^= a->random << 17;
    return a->random % below;
}

__attribute__((format(printf, 2, 3))) static void note(struct actor *a, const char *format, ...) {
    va_list list;
    va_start(list, format);
    char *line = a->notes[a->step % NOTES];
    int length = snprintf(line, 160, "%lu: ", a->step);
    vsnprintf(line + length, 160 - (size_t)length, format, list);
    va_end(list);
}

_Noreturn static void wrong(struct actor *a, const char *what, size_t at) {
    fprintf(stderr, "seed %lu, thread %u, step %lu: %s, at byte %zu (page %zu)\n", a->seed, a->number, a->step, what, at,
            at / PAGE);
    for (uint64_t i = a->step < NOTES ? 0 : a->step - NOTES + 1; i <= a->step; i++)
        fprintf(stderr, "  %s\n", a->notes[i % NOTES]);
    for (int i = 0; i < REGIONS; i++) {
        struct region *r = &a->regions[i];
        if (r->mr)
            fprintf(stderr, "  region %d: %zu..%zu%s%s\n", i, r->at, r->at + r->length, r->on_demand ? " on demand" : "",
                    r->is_alive ? "" : " stale");
    }
    show_maps(a->m, BYTES);
    fflush(NULL);
    _exit(1);
}

// The memory is what the model says, as far as it is mapped.
static void compare(struct actor *a, const char *what, size_t from, size_t to) {
    for (size_t page = from / PAGE; page <= (to - 1) / PAGE && page < PAGES; page++) {
        if (!a->is_mapped[page]) continue;
        size_t begin = page * PAGE < from ? from : page * PAGE, end = (page + 1) * PAGE < to ? (page + 1) * PAGE : to;
        if (!memcmp(a->m + begin, a->model + begin, end - begin)) continue;
        while (a->m[begin] == a->model[begin]) begin++;
        wrong(a, what, begin);
    }
}

static bool all_mapped(struct actor *a, size_t at, size_t length) {
    for (size_t page = at / PAGE; page <= (at + length - 1) / PAGE; page++)
        if (!a->is_mapped[page]) return false;
    return true;
}

// A range of mapped bytes; length 0: none was found.
static void pick(struct actor *a, size_t max, size_t *at, size_t *length) {
    for (int turn = 0; turn < 8; turn++) {
        *at = next_random(a, BYTES);
        *length = 1 + next_random(a, next_random(a, 3) ? max : 600);
        if (*at + *length > BYTES) *length = BYTES - *at;
        if (next_random(a, 4) == 0) *at &= ~(PAGE - 1);
        if (all_mapped(a, *at, *length)) return;
    }
    *length = 0;
}

static void pick_pages(struct actor *a, size_t *page, size_t *count) {
    *count = 1 + next_random(a, next_random(a, 3) ? 5 : 20);
    *page = next_random(a, PAGES - *count + 1);
}

// Other memory comes to these pages.
static void note_gone(struct actor *a, size_t page, size_t count, bool moves) {
    for (int i = 0; i < REGIONS; i++) {
        struct region *r = &a->regions[i];
        if (!r->mr || r->at >= (page + count) * PAGE || r->at + r->length <= page * PAGE) continue;
        r->is_alive = false;
        r->is_moved |= moves;
    }
}

static void write_some(struct actor *a, size_t at, size_t length) {
    uint64_t word = next_random(a, UINT64_MAX);
    for (size_t i = 0; i < length; i++) a->model[at + i] = (uint8_t)((word >> (i % 8 * 8)) + i / 8);
    memcpy(a->m + at, a->model + at, length);
}

// ---- what the program does with its memory

static void do_write(struct actor *a) {
    size_t at, length;
    pick(a, 3 * PAGE, &at, &length);
    note(a, "write %zu..%zu", at, at + length);
    if (length) write_some(a, at, length);
}

static void do_map(struct actor *a) {
    size_t page, count;
    pick_pages(a, &page, &count);
    int kind = next_random(a, 8) ? MAP_PRIVATE : MAP_SHARED;
    bool unmaps = next_random(a, 2);
    note(a, "map %s pages %zu..%zu%s", kind == MAP_SHARED ? "shared" : "private", page, page + count, unmaps ? ", unmapped" : "");
    if (unmaps) need(munmap(a->m + page * PAGE, count * PAGE) == 0);
    void *there = mmap(a->m + page * PAGE, count * PAGE, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    need(there == a->m + page * PAGE);
    note_gone(a, page, count, false);
    memset(a->model + page * PAGE, 0, count * PAGE);
    for (size_t i = 0; i < count; i++) a->is_mapped[page + i] = true, a->is_shared[page + i] = kind == MAP_SHARED;
    if (next_random(a, 4)) write_some(a, page * PAGE, count * PAGE);
}

static void do_unmap(struct actor *a) {
    size_t page, count;
    pick_pages(a, &page, &count);
    if (count > 6) count = 6;
    note(a, "unmap pages %zu..%zu", page, page + count);
    need(munmap(a->m + page * PAGE, count * PAGE) == 0);
    note_gone(a, page, count, false);
    for (size_t i = 0; i < count; i++) a->is_mapped[page + i] = false;
}

static void do_move(struct actor *a) {
    size_t from, to, count;
    pick_pages(a, &from, &count);
    to = next_random(a, PAGES - count + 1);
    note(a, "move pages %zu..%zu to %zu", from, from + count, to);
    if (!all_mapped(a, from * PAGE, count * PAGE) || (from < to + count && to < from + count)) return;
    void *there = mremap(a->m + from * PAGE, count * PAGE, count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, a->m + to * PAGE);
    note_gone(a, to, count, false);
    if (there == MAP_FAILED) {
        // Several areas: some kernels have unmapped the target, or moved a part, by then. It is the program's to know.
        a->refused_moves++;
        note_gone(a, from, count, true);
        for (size_t half = 0; half < 2; half++) {
            size_t page = half ? from : to;
            need(mmap(a->m + page * PAGE, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                      0) == a->m + page * PAGE);
            memset(a->model + page * PAGE, 0, count * PAGE);
            for (size_t i = 0; i < count; i++) a->is_mapped[page + i] = true, a->is_shared[page + i] = false;
        }
        return;
    }
    need(there == a->m + to * PAGE);
    note_gone(a, from, count, true);
    memcpy(a->model + to * PAGE, a->model + from * PAGE, count * PAGE);
    for (size_t i = 0; i < count; i++) {
        a->is_mapped[from + i] = false, a->is_mapped[to + i] = true;
        a->is_shared[to + i] = a->is_shared[from + i];
    }
}

// Remapped pages keep their contents, all else is zero.
static void do_throw_away(struct actor *a) {
    size_t page, count;
    pick_pages(a, &page, &count);
    int advice = next_random(a, 3) ? MADV_DONTNEED : MADV_REMOVE;
    note(a, "advise pages %zu..%zu: %s", page, page + count, advice == MADV_REMOVE ? "remove" : "not needed");
    for (size_t i = page; i < page + count; i++) {
        if (!a->is_mapped[i]) continue;
        if (madvise(a->m + i * PAGE, PAGE, advice)) need(errno == EINVAL || errno == EACCES);
        static const uint8_t zeros[PAGE];
        if (!memcmp(a->m + i * PAGE, zeros, PAGE)) memset(a->model + i * PAGE, 0, PAGE);
    }
}

static void do_protect(struct actor *a) {
    size_t page, count;
    pick_pages(a, &page, &count);
    note(a, "protect pages %zu..%zu and back", page, page + count);
    if (!all_mapped(a, page * PAGE, count * PAGE)) return;
    need(mprotect(a->m + page * PAGE, count * PAGE, next_random(a, 2) ? PROT_READ : PROT_NONE) == 0);
    need(mprotect(a->m + page * PAGE, count * PAGE, PROT_READ | PROT_WRITE) == 0);
}

// A child has its own copy of what this thread wrote.
static void do_fork(struct actor *a) {
    note(a, "fork");
    pid_t child = fork();
    need(child >= 0);
    if (!child) {
        // Other threads' memory is as of another moment.
        for (size_t page = 0; page < PAGES; page++) {
            if (!a->is_mapped[page]) continue;
            if (memcmp(a->m + page * PAGE, a->model + page * PAGE, PAGE)) _exit(2);
            if (!a->is_shared[page]) memset(a->m + page * PAGE, 99, PAGE);
        }
        _exit(0);
    }
    int status;
    need(waitpid(child, &status, 0) == child);
    if (status) wrong(a, "the child sees something else", 0);
    compare(a, "after a fork", 0, BYTES);
}

// ---- regions

static const int RIGHTS[] = {ALL_ACCESS, ALL_ACCESS, ALL_ACCESS, ALL_ACCESS | IBV_ACCESS_ON_DEMAND,
                             ALL_ACCESS | IBV_ACCESS_MW_BIND, ALL_ACCESS | IBV_ACCESS_RELAXED_ORDERING};

static void do_register(struct actor *a) {
    struct region *r = &a->regions[next_random(a, REGIONS)];
    if (r->mr) {
        note(a, "deregister %zu..%zu%s", r->at, r->at + r->length, r->is_alive ? "" : ", stale");
        need(ibv_dereg_mr(r->mr) == 0);
        r->mr = NULL;
        return;
    }
    int rights = RIGHTS[next_random(a, sizeof RIGHTS / sizeof *RIGHTS)];
    pick(a, BYTES / 2, &r->at, &r->length);
    note(a, "register %zu..%zu, rights %x", r->at, r->at + r->length, (unsigned)rights);
    if (!r->length) return;
    need((r->mr = ibv_reg_mr(pd, a->m + r->at, r->length, rights)) != NULL);
    r->on_demand = rights & IBV_ACCESS_ON_DEMAND;
    r->is_alive = true, r->is_moved = false;
}

static void do_reregister(struct actor *a) {
    struct region *r = &a->regions[next_random(a, REGIONS)];
    if (!r->mr) return note(a, "reregister none");
    if (next_random(a, 4) == 0) {
        // Memory that is gone is refused where it is none any more.
        int rights = RIGHTS[next_random(a, sizeof RIGHTS / sizeof *RIGHTS)];
        bool is_there = all_mapped(a, r->at, r->length);
        note(a, "reregister %zu..%zu with rights %x", r->at, r->at + r->length, (unsigned)rights);
        if (!is_there) return;
        need(ibv_rereg_mr(r->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, rights) == 0);
        r->on_demand = rights & IBV_ACCESS_ON_DEMAND;
        r->is_alive = true, r->is_moved = false;
        return;
    }
    size_t at, length;
    pick(a, BYTES / 2, &at, &length);
    note(a, "reregister %zu..%zu as %zu..%zu", r->at, r->at + r->length, at, at + length);
    if (!length) return;
    need(ibv_rereg_mr(r->mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, a->m + at, length, 0) == 0);
    r->at = at, r->length = length, r->is_alive = true, r->is_moved = false;
}

// Some bytes of a region that may be used; NULL: none was found. `align`: of their beginning.
static struct region *pick_of_region(struct actor *a, size_t max, size_t align, size_t *at, size_t *length) {
    for (int turn = 0; turn < 8; turn++) {
        struct region *r = &a->regions[next_random(a, REGIONS)];
        if (!r->mr || !(r->is_alive || r->on_demand)) continue;
        size_t skip = next_random(a, 3) ? next_random(a, r->length) : 0;
        if (next_random(a, 4) == 0) skip = r->length > 40 ? r->length - 40 : 0;
        *at = (r->at + skip + align - 1) & ~(align - 1);
        if (*at >= r->at + r->length) continue;
        size_t most = r->at + r->length - *at;
        *length = 1 + next_random(a, most < max ? most : max);
        if (align > 1) *length = align;
        if (*length <= most && all_mapped(a, *at, *length)) return r;
    }
    return NULL;
}

// ---- transfers

static void wait_for(struct actor *a, unsigned count) {
    struct ibv_wc wc;
    while (count) {
        int found = ibv_poll_cq(a->cq, 1, &wc);
        need(found >= 0);
        if (!found) continue;
        if (wc.status != IBV_WC_SUCCESS) wrong(a, ibv_wc_status_str(wc.status), 0);
        count--;
    }
    a->transfers++;
}

static void post(struct ibv_qp *qp, enum ibv_wr_opcode opcode, struct ibv_sge sge, uint64_t address, uint32_t rkey) {
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED,
                                   .wr.rdma = {address, rkey}};
    need(ibv_post_send(qp, &wr, &bad) == 0);
}

static struct ibv_sge sge_of(struct actor *a, struct region *r, size_t at, size_t length) {
    return (struct ibv_sge){(uintptr_t)a->m + at, (uint32_t)length, r->mr->lkey};
}

static void around(struct actor *a, const char *what, size_t at, size_t length) {
    compare(a, what, at < 64 ? 0 : at - 64, at + length + 64 < BYTES ? at + length + 64 : BYTES);
}

static void do_self(struct actor *a) {
    static const enum ibv_wr_opcode OPCODES[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND};
    static const char *NAMES[] = {"WRITE", "READ", "SEND"};
    unsigned kind = (unsigned)next_random(a, 3);
    size_t from, to, length, room;
    struct region *r = pick_of_region(a, 3 * PAGE, 1, &from, &length), *s = pick_of_region(a, 3 * PAGE, 1, &to, &room);
    if (!r || !s) return note(a, "no transfer");
    length = length < room ? length : room;
    note(a, "%s %zu..%zu to %zu..%zu", NAMES[kind], from, from + length, to, to + length);
    if (from < to + length && to < from + length) return;
    if (kind == 2) {
        struct ibv_sge sge = sge_of(a, s, to, length);
        struct ibv_recv_wr *bad, wr = {.sg_list = &sge, .num_sge = 1};
        need(ibv_post_recv(a->self, &wr, &bad) == 0);
    }
    if (kind == 1) post(a->self, OPCODES[kind], sge_of(a, s, to, length), (uintptr_t)a->m + from, r->mr->rkey);
    else post(a->self, OPCODES[kind], sge_of(a, r, from, length), (uintptr_t)a->m + to, s->mr->rkey);
    wait_for(a, kind == 2 ? 2 : 1);
    memcpy(a->model + to, a->model + from, length);
    around(a, "what was sent", from, length);
    around(a, "what was received", to, length);
}

static void do_atomic(struct actor *a) {
    size_t at, length;
    struct region *r = pick_of_region(a, 8, 8, &at, &length);
    if (!r) return note(a, "no atomic");
    uint64_t before, add = next_random(a, 1000);
    memcpy(&before, a->model + at, 8);
    bool swaps = next_random(a, 2), fits = next_random(a, 2);
    note(a, "%s at %zu", swaps ? "compare and swap" : "fetch and add", at);
    struct ibv_sge sge = {(uintptr_t)a->result, 8, a->result_mr->lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
                                   .opcode = swaps ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD,
                                   .wr.atomic = {.remote_addr = (uintptr_t)a->m + at, .rkey = r->mr->rkey,
                                                 .compare_add = swaps ? before + !fits : add, .swap = add}};
    need(ibv_post_send(a->self, &wr, &bad) == 0);
    wait_for(a, 1);
    if (*a->result != before) wrong(a, "an atomic's result", at);
    uint64_t after = swaps ? (fits ? add : before) : before + add;
    memcpy(a->model + at, &after, 8);
    around(a, "after an atomic", at, 8);
}

// From a region to the peer and back to where nothing else goes; or from the peer into a region.
static void do_peer(struct actor *a) {
    size_t at, length;
    struct region *r = pick_of_region(a, 4 * PAGE, 1, &at, &length);
    if (!r) return note(a, "no transfer with the peer");
    size_t there = next_random(a, PEER_BYTES - length);
    bool sends = next_random(a, 2);
    note(a, "%s the peer %zu..%zu", sends ? "WRITE to" : "READ from", at, at + length);
    if (!sends) {
        post(a->to_peer, IBV_WR_RDMA_READ, sge_of(a, r, at, length), a->peer.address + there, a->peer.rkey);
        wait_for(a, 1);
        memcpy(a->model + at, a->peer_model + there, length);
        return around(a, "read from the peer", at, length);
    }
    post(a->to_peer, IBV_WR_RDMA_WRITE, sge_of(a, r, at, length), a->peer.address + there, a->peer.rkey);
    wait_for(a, 1);
    memcpy(a->peer_model + there, a->model + at, length);
    struct ibv_sge scratch = {(uintptr_t)a->scratch, (uint32_t)length, a->scratch_mr->lkey};
    post(a->to_peer, IBV_WR_RDMA_READ, scratch, a->peer.address + there, a->peer.rkey);
    wait_for(a, 1);
    if (memcmp(a->scratch, a->peer_model + there, length)) wrong(a, "the peer has something else", at);
}

static enum ibv_wc_status ask(struct actor *a, struct order *order) {
    need(send(a->fd, order, sizeof *order, MSG_NOSIGNAL) == sizeof *order);
    need(recv(a->fd, order, sizeof *order, 0) == sizeof *order);
    a->transfers += order->count;
    return order->status;
}

// The peer writes or reads a region: once, or so often that it is granted the memory.
static void do_by_peer(struct actor *a) {
    size_t at, length;
    struct region *r = pick_of_region(a, 4 * PAGE, 1, &at, &length);
    if (!r) return note(a, "no transfer by the peer");
    struct order order = {.address = (uintptr_t)a->m + at, .rkey = r->mr->rkey, .length = (uint32_t)length,
                          .at = (uint32_t)next_random(a, PEER_BYTES - length), .count = next_random(a, 8) ? 1 : BURST,
                          .opcode = next_random(a, 2) ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ};
    note(a, "%u %s of the peer %zu..%zu", order.count, order.opcode == IBV_WR_RDMA_READ ? "READ" : "WRITE", at, at + length);
    enum ibv_wc_status status = ask(a, &order);
    if (status != IBV_WC_SUCCESS) wrong(a, ibv_wc_status_str(status), at);
    if (order.opcode == IBV_WR_RDMA_READ) {
        memcpy(a->peer_model + order.at, a->model + at, length);
        struct ibv_sge scratch = {(uintptr_t)a->scratch, (uint32_t)length, a->scratch_mr->lkey};
        post(a->to_peer, IBV_WR_RDMA_READ, scratch, a->peer.address + order.at, a->peer.rkey);
        wait_for(a, 1);
        if (memcmp(a->scratch, a->peer_model + order.at, length)) wrong(a, "the peer read something else", at);
        return;
    }
    memcpy(a->model + at, a->peer_model + order.at, length);
    around(a, "written by the peer", at, length);
}

// The peer goes on with the key of a region whose memory was unmapped. What it writes is lost, or comes to these
// addresses, as they are mapped; nowhere else. (Pages that were moved it may still reach: as with a NIC that has them
// pinned.)
static void do_by_peer_stale(struct actor *a) {
    struct region *r = &a->regions[next_random(a, REGIONS)];
    size_t length = !r->mr ? 0 : r->length < 4 * PAGE ? r->length : 4 * PAGE;
    note(a, "the peer writes what is gone");
    if (!r->mr || r->is_alive || r->is_moved || r->on_demand || !all_mapped(a, r->at, length)) return;
    struct order order = {.address = (uintptr_t)a->m + r->at, .rkey = r->mr->rkey, .length = (uint32_t)length,
                          .count = 1 + (unsigned)next_random(a, 4), .opcode = IBV_WR_RDMA_WRITE};
    note(a, "%u WRITE of the peer to what is gone %zu..%zu", order.count, r->at, r->at + length);
    enum ibv_wc_status status = ask(a, &order);
    if (status != IBV_WC_SUCCESS) wrong(a, ibv_wc_status_str(status), r->at);
    for (size_t i = 0; i < length; i++)
        if (a->m[r->at + i] == a->peer_model[i]) a->model[r->at + i] = a->peer_model[i];
    compare(a, "after a WRITE to what is gone", 0, BYTES);
}

static void do_part(struct actor *a);
static void do_trace(struct actor *a);

static const struct {
    void (*run)(struct actor *);
    unsigned weight;
} STEPS[] = {
    {do_write, 14}, {do_map, 8},   {do_unmap, 3},  {do_move, 5},  {do_throw_away, 4},   {do_protect, 1},
    {do_register, 26}, {do_reregister, 7}, {do_self, 14}, {do_atomic, 5}, {do_peer, 8}, {do_by_peer, 10},
    {do_by_peer_stale, 4},
};

static bool is_traced;
static pid_t tracer; // 0: none

static void *act(void *argument) {
    struct actor *a = argument;
    unsigned all = 0;
    for (size_t i = 0; i < sizeof STEPS / sizeof *STEPS; i++) all += STEPS[i].weight;
    for (a->step = 1; a->step <= a->steps; a->step++) {
        unsigned at = (unsigned)next_random(a, all);
        size_t i = 0;
        while (at >= STEPS[i].weight) at -= STEPS[i++].weight;
        if (next_random(a, 400) == 0) do_fork(a);
        else if (next_random(a, 1500) == 0) do_part(a);
        else if (is_traced && a->number == 0 && a->step % TRACE_EVERY == 0) do_trace(a);
        else STEPS[i].run(a);
        if (a->step % LOOK_EVERY == 0) compare(a, "all of it", 0, BYTES);
    }
    if (tracer && a->number == 0) do_trace(a);
    compare(a, "all of it", 0, BYTES);
    for (int i = 0; i < REGIONS; i++)
        if (a->regions[i].mr) need(ibv_dereg_mr(a->regions[i].mr) == 0);
    compare(a, "after all was deregistered", 0, BYTES);
    return NULL;
}

// ---- beginning and end

static struct ibv_qp *make_qp(struct ibv_cq *cq) {
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    need(qp != NULL);
    return qp;
}

static void start_peer(struct actor *a) {
    int ends[2];
    need(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    need((a->pid = fork()) >= 0);
    if (a->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        need(dup2(ends[1], PEER_FD) == PEER_FD);
        execl("/proc/self/exe", "remap", "model-peer", NULL);
        _exit(1);
    }
    close(ends[1]);
    a->fd = ends[0];
    a->to_peer = make_qp(a->cq);
    struct hello mine = {.qpn = a->to_peer->qp_num};
    need(send(a->fd, &mine, sizeof mine, MSG_NOSIGNAL) == sizeof mine);
    need(recv(a->fd, &a->peer, sizeof a->peer, 0) == sizeof a->peer);
    connect_qp(a->to_peer, a->peer.qpn);
}

static void begin(struct actor *a) {
    a->random = (a->seed + a->number) * 0x9e3779b97f4a7c15u | 1;
    for (int i = 0; i < 8; i++) next_random(a, 1);
    need((a->model = calloc(1, BYTES)) != NULL && (a->peer_model = calloc(1, PEER_BYTES)) != NULL);
    need((a->cq = ibv_create_cq(context, 64, NULL, NULL, 0)) != NULL);
    a->self = make_qp(a->cq);
    connect_qp(a->self, a->self->qp_num);
    start_peer(a);
    fill(a->peer_model, PEER_BYTES, 5);
    a->scratch = private_pages(PEER_BYTES, 0);
    a->scratch_mr = reg(a->scratch, PEER_BYTES);
    a->result = (uint64_t *)private_pages(PAGE, 0);
    a->result_mr = reg(a->result, 8);
    need(mmap(a->m, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == a->m);
    memset(a->is_mapped, 1, sizeof a->is_mapped);
    write_some(a, 0, BYTES);
}

static void finish(struct actor *a) {
    close(a->fd);
    int status;
    need(waitpid(a->pid, &status, 0) == a->pid && status == 0);
    dereg(a->scratch_mr);
    dereg(a->result_mr);
    need(ibv_destroy_qp(a->self) == 0 && ibv_destroy_qp(a->to_peer) == 0 && ibv_destroy_cq(a->cq) == 0);
    // Nothing of it is left in an arena, and nothing was lost when it came out.
    need(placed(a->m, BYTES) == 0);
    compare(a, "at the end", 0, BYTES);
    munmap(a->m, BYTES);
    munmap(a->scratch, PEER_BYTES);
    munmap(a->result, PAGE);
    free(a->model);
    free(a->peer_model);
}

// The pair's connection ends, and what the peer was granted with it; then there is a new one.
static void do_part(struct actor *a) {
    note(a, "the peer leaves, and comes back");
    need(ibv_destroy_qp(a->to_peer) == 0);
    a->to_peer = make_qp(a->cq);
    struct order order = {.address = a->to_peer->qp_num};
    need(ask(a, &order) == IBV_WC_SUCCESS);
    connect_qp(a->to_peer, (uint32_t)order.result);
    compare(a, "after the peer left", 0, BYTES);
}

// Until it is killed, or the process has ended.
_Noreturn static void trace(pid_t pid, int ready) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The router may have the threads frozen just now.
    unsigned turns = 0;
    while (ptrace(PTRACE_SEIZE, pid, NULL, NULL))
        if (++turns > 10000 || usleep(500)) _exit(1);
    if (write(ready, "", 1) != 1) _exit(1);
    int status;
    while (waitpid(pid, &status, __WALL) == pid && WIFSTOPPED(status))
        ptrace(PTRACE_CONT, pid, NULL, status >> 16 ? NULL : (void *)(uintptr_t)WSTOPSIG(status));
    _exit(0);
}

static void do_trace(struct actor *a) {
    if (tracer) {
        note(a, "the tracer goes");
        int status;
        need(kill(tracer, SIGKILL) == 0 && waitpid(tracer, &status, 0) == tracer);
        tracer = 0;
        usleep(UNHELD_US);
        return;
    }
    note(a, "a tracer comes");
    int ready[2];
    char byte;
    pid_t self = getpid();
    need(prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY) == 0 || errno == EINVAL);
    need(pipe(ready) == 0 && (tracer = fork()) >= 0);
    if (!tracer) close(ready[0]), trace(self, ready[1]);
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 1) wrong(a, "the tracer can't trace", 0);
    close(ready[0]);
}

static uint64_t number_of(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

void case_model(void) {
    static struct actor actors[THREADS_MAX];
    uint64_t threads = number_of("REMAP_THREADS", 1), seed = number_of("REMAP_SEED", 1), transfers = 0, moves = 0;
    need(threads >= 1 && threads <= THREADS_MAX);
    is_traced = getenv("REMAP_TRACED") != NULL;
    for (unsigned i = 0; i < threads; i++) {
        struct actor *a = &actors[i];
        *a = (struct actor){.number = i, .seed = seed, .steps = number_of("REMAP_STEPS", 1000) / threads,
                            .m = (uint8_t *)ARENA + 0x3000 + (uint64_t)i * BYTES};
        begin(a);
    }
    pthread_t running[THREADS_MAX];
    for (unsigned i = 1; i < threads; i++) need(pthread_create(&running[i], NULL, act, &actors[i]) == 0);
    act(&actors[0]);
    for (unsigned i = 1; i < threads; i++) need(pthread_join(running[i], NULL) == 0);
    for (unsigned i = 0; i < threads; i++) {
        finish(&actors[i]);
        transfers += actors[i].transfers, moves += actors[i].refused_moves;
    }
    printf("seed %lu, threads %lu: %lu transfers, %lu moves refused\n", seed, threads, transfers, moves);
}

// The other end of a thread's queue pair, which does as it is told.
void case_model_peer(void) {
    struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
    need(cq != NULL);
    struct ibv_qp *qp = make_qp(cq);
    uint8_t *memory = private_pages(PEER_BYTES, 5);
    struct ibv_mr *mr = reg(memory, PEER_BYTES);
    struct hello other, mine = {.qpn = qp->qp_num, .rkey = mr->rkey, .address = (uintptr_t)memory};
    need(recv(PEER_FD, &other, sizeof other, 0) == sizeof other);
    connect_qp(qp, other.qpn);
    need(send(PEER_FD, &mine, sizeof mine, MSG_NOSIGNAL) == sizeof mine);
    struct order order;
    while (recv(PEER_FD, &order, sizeof order, 0) == sizeof order) {
        order.status = IBV_WC_SUCCESS;
        if (!order.count && !order.result) {
            need(ibv_destroy_qp(qp) == 0);
            qp = make_qp(cq);
            connect_qp(qp, (uint32_t)order.address);
            order.result = qp->qp_num;
        }
        for (unsigned i = 0; i < order.count && order.status == IBV_WC_SUCCESS; i++) {
            struct ibv_sge sge = {(uintptr_t)memory + order.at, order.length, mr->lkey};
            post(qp, order.opcode, sge, order.address, order.rkey);
            struct ibv_wc wc;
            while (!ibv_poll_cq(cq, 1, &wc)) {}
            order.status = wc.status;
        }
        need(send(PEER_FD, &order, sizeof order, MSG_NOSIGNAL) == sizeof order);
    }
    dereg(mr);
    need(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
    munmap(memory, PEER_BYTES);
}
