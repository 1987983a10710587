// Registered memory that the program takes away, and regions over what it puts there instead: each byte is the
// program's own.
//
// Caches of registrations leave a region where its memory was. What is registered at these addresses later begins and
// ends inside pages that the old region still covers.
#define _GNU_SOURCE
#include "remap.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGES = 24, BEGIN = 3 * 4096 + 1000, LENGTH = 17 * 4096 + 77 };
static const size_t BYTES = PAGES * PAGE;

static uint8_t *peer;
static struct ibv_mr *peer_mr;

// ---- how memory goes

static void map_at(uint8_t *at, size_t bytes) {
    need(mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
}

static void unmapped(uint8_t *m) {
    need(munmap(m, BYTES) == 0);
    map_at(m, BYTES);
}

static void mapped_over(uint8_t *m) { map_at(m, BYTES); }

// The region that follows begins or ends in one of the pages that are new.
static void first_page_mapped_over(uint8_t *m) { map_at(m + BEGIN / PAGE * PAGE, PAGE); }

static void last_page_mapped_over(uint8_t *m) { map_at(m + (BEGIN + LENGTH) / PAGE * PAGE, PAGE); }

static void every_other_page_mapped_over(uint8_t *m) {
    for (size_t page = 0; page < PAGES; page += 2) map_at(m + page * PAGE, PAGE);
}

static uint8_t *moved_to;

static void moved_away(uint8_t *m) {
    moved_to = mremap(m, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, moved_to);
    need(moved_to != MAP_FAILED && moved_to != m);
    map_at(m, BYTES);
}

static void cut(uint8_t *m) {
    need(mremap(m, BYTES, 8 * PAGE, 0) == m);
    map_at(m + 8 * PAGE, BYTES - 8 * PAGE);
}

// Pages of other memory come to this address.
static void moved_here(uint8_t *m) {
    uint8_t *other = private_pages(BYTES, 9);
    need(mremap(other, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, m) == m);
}

static void closed_and_opened(uint8_t *m) {
    need(mprotect(m, BYTES, PROT_NONE) == 0 && mprotect(m, BYTES, PROT_READ | PROT_WRITE) == 0);
}

static void not_needed(uint8_t *m) { need(madvise(m, BYTES, MADV_DONTNEED) == 0); }

static void removed(uint8_t *m) {
    // Refused where the memory is not shared; nothing changes then.
    if (madvise(m, BYTES, MADV_REMOVE)) need(errno == EINVAL || errno == EACCES);
}

static void freed(uint8_t *m) {
    if (madvise(m, BYTES, MADV_FREE)) need(errno == EINVAL);
}

static const struct {
    const char *name;
    void (*run)(uint8_t *);
} WAYS[] = {
    {"unmapped", unmapped},
    {"mapped over", mapped_over},
    {"first page mapped over", first_page_mapped_over},
    {"last page mapped over", last_page_mapped_over},
    {"every other page mapped over", every_other_page_mapped_over},
    {"moved away", moved_away},
    {"cut", cut},
    {"other memory moved here", moved_here},
    {"closed and opened", closed_and_opened},
    {"not needed", not_needed},
    {"removed", removed},
    {"freed", freed},
};

// ---- how what is there then is registered

// The region, and the keys that it is reached by.
struct target {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    struct ibv_mw *window;
    uint32_t lkey, rkey;
};

static struct target whole_of(struct ibv_mr *mr) {
    need(mr != NULL);
    return (struct target){.mr = mr, .lkey = mr->lkey, .rkey = mr->rkey};
}

static struct target registered(uint8_t *at, struct ibv_mr *old) {
    (void)old;
    return whole_of(reg(at, LENGTH));
}

static struct target on_demand(uint8_t *at, struct ibv_mr *old) {
    (void)old;
    return whole_of(ibv_reg_mr(pd, at, LENGTH, ALL_ACCESS | IBV_ACCESS_ON_DEMAND));
}

static struct target implicitly(uint8_t *at, struct ibv_mr *old) {
    (void)at, (void)old;
    return whole_of(ibv_reg_mr(pd, NULL, SIZE_MAX, ALL_ACCESS | IBV_ACCESS_ON_DEMAND));
}

// A region of other memory becomes one of this.
static uint8_t *elsewhere;

static struct target changed(uint8_t *at, struct ibv_mr *old) {
    (void)old;
    struct ibv_mr *mr = reg(elsewhere, BYTES);
    need(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, at, LENGTH, 0) == 0);
    return whole_of(mr);
}

// The old region itself.
static struct target old_one(uint8_t *at, struct ibv_mr *old) {
    need(ibv_rereg_mr(old, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, at, LENGTH, 0) == 0);
    return (struct target){.lkey = old->lkey, .rkey = old->rkey};
}

static struct target old_one_with_rights(uint8_t *at, struct ibv_mr *old) {
    (void)at;
    need(ibv_rereg_mr(old, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL_ACCESS) == 0);
    return (struct target){.lkey = old->lkey, .rkey = old->rkey};
}

static struct target old_one_on_demand(uint8_t *at, struct ibv_mr *old) {
    (void)at;
    need(ibv_rereg_mr(old, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL_ACCESS | IBV_ACCESS_ON_DEMAND) == 0);
    return (struct target){.lkey = old->lkey, .rkey = old->rkey};
}

static struct target by_window_of(enum ibv_mw_type type, uint8_t *at, int rights) {
    struct target t = whole_of(ibv_reg_mr(pd, at, LENGTH, ALL_ACCESS | IBV_ACCESS_MW_BIND | rights));
    need((t.window = ibv_alloc_mw(pd, type)) != NULL);
    t.rkey = bind_window(t.window, t.mr, at, LENGTH);
    return t;
}

static struct target by_window_1(uint8_t *at, struct ibv_mr *old) {
    (void)old;
    return by_window_of(IBV_MW_TYPE_1, at, 0);
}

static struct target by_window_2(uint8_t *at, struct ibv_mr *old) {
    (void)old;
    return by_window_of(IBV_MW_TYPE_2, at, 0);
}

// Registered under another context, so by another PD: its rkey is of no use here, but its memory is the same.
static struct target twice(uint8_t *at, struct ibv_mr *old) {
    (void)old;
    struct target t = whole_of(reg(at, LENGTH));
    need((t.context = ibv_open_device(context->device)) != NULL && (t.pd = ibv_alloc_pd(t.context)) != NULL);
    struct ibv_mr *other = ibv_reg_mr(t.pd, at + 5 * PAGE + 3, LENGTH - 10 * PAGE, ALL_ACCESS);
    need(other != NULL && ibv_dereg_mr(other) == 0);
    return t;
}

static const struct {
    const char *name;
    struct target (*run)(uint8_t *, struct ibv_mr *);
} KINDS[] = {
    {"registered", registered},
    {"registered on demand", on_demand},
    {"implicitly on demand", implicitly},
    {"another one changed", changed},
    {"the old one changed", old_one},
    {"the old one's rights", old_one_with_rights},
    {"the old one on demand", old_one_on_demand},
    {"by a window of type 1", by_window_1},
    {"by a window of type 2", by_window_2},
    {"by two contexts", twice},
};

static void end(struct target *t) {
    if (t->window) need(ibv_dealloc_mw(t->window) == 0);
    if (t->mr) dereg(t->mr);
    if (t->pd) need(ibv_dealloc_pd(t->pd) == 0 && ibv_close_device(t->context) == 0);
}

// ---- what must hold

static const char *way_name, *kind_name;

static void same(const char *what, const uint8_t *a, const uint8_t *b, size_t bytes) {
    if (!memcmp(a, b, bytes)) return;
    size_t at = 0;
    while (a[at] == b[at]) at++;
    fprintf(stderr, "%s, %s: %s: wrong from byte %zu of %zu on\n", way_name, kind_name, what, at, bytes);
    exit(1);
}

// Each direction, as a whole and a few bytes at either end. `m` is BYTES long, of which LENGTH from BEGIN on are
// registered.
static void exchange(uint8_t *m, const struct target *t, unsigned seed) {
    static const struct {
        size_t at, bytes;
    } PARTS[] = {{0, LENGTH}, {0, 8}, {7, 1}, {0, 3096}, {3000, 200}, {LENGTH - 1, 1}, {LENGTH - 77, 77}, {LENGTH - 5000, 4999}};
    uint8_t wanted[LENGTH], around[BYTES];
    for (size_t i = 0; i < sizeof PARTS / sizeof *PARTS; i++) {
        uint8_t *q = m + BEGIN + PARTS[i].at, *other = peer + 5;
        size_t bytes = PARTS[i].bytes;
        struct ibv_mr mine = {.lkey = t->lkey, .rkey = t->rkey};
        fill(m, BYTES, ++seed);
        memcpy(wanted, q, bytes);
        rdma(IBV_WR_RDMA_WRITE, &mine, q, peer_mr, other, bytes);
        same("WRITE out of it", other, wanted, bytes);
        fill(m, BYTES, ++seed);
        memcpy(wanted, q, bytes);
        rdma(IBV_WR_RDMA_READ, peer_mr, other, &mine, q, bytes);
        same("READ out of it", other, wanted, bytes);
        memcpy(around, m, BYTES);
        fill(other, bytes, ++seed);
        memcpy(around + (q - m), other, bytes);
        rdma(IBV_WR_RDMA_READ, &mine, q, peer_mr, other, bytes);
        same("READ into it", m, around, BYTES);
        fill(other, bytes, ++seed);
        memcpy(around + (q - m), other, bytes);
        rdma(IBV_WR_RDMA_WRITE, peer_mr, other, &mine, q, bytes);
        same("WRITE into it", m, around, BYTES);
    }
    for (size_t at = 0; at <= LENGTH - 8; at = at ? LENGTH : LENGTH / 8 * 8 - 16) {
        struct ibv_mr mine = {.lkey = t->lkey, .rkey = t->rkey};
        uint64_t *word = (uint64_t *)(m + BEGIN + at), result;
        *word = 40 + at;
        struct ibv_mr *result_mr = reg(&result, sizeof result);
        need(fetch_add(result_mr, &result, &mine, word, 2) == 40 + at && *word == 42 + at);
        dereg(result_mr);
        if (at) break;
    }
}

static void begin(void) {
    peer = private_pages(BYTES, 3);
    peer_mr = reg(peer, BYTES);
    elsewhere = private_pages(BYTES, 4);
}

static void done(void) {
    dereg(peer_mr);
    munmap(peer, BYTES);
    munmap(elsewhere, BYTES);
}

static void one(size_t way, size_t kind, bool old_first) {
    way_name = WAYS[way].name, kind_name = KINDS[kind].name;
    moved_to = private_pages(BYTES, 5);
    uint8_t *m = private_pages(BYTES, 1);
    struct ibv_mr *old = reg(m, BYTES);
    need(placed(m, BYTES) == BYTES);
    rdma(IBV_WR_RDMA_WRITE, old, m, peer_mr, peer, BYTES);
    WAYS[way].run(m);
    fill(m, BYTES, 2);
    struct target t = KINDS[kind].run(m + BEGIN, old);
    need(is_filled(m, BYTES, 2));
    exchange(m, &t, 3);
    if (WAYS[way].run == moved_away) need(is_filled(moved_to, BYTES, 1));
    fill(m, BYTES, 6);
    if (old_first) dereg(old);
    if (old_first && t.mr) exchange(m, &t, 7), fill(m, BYTES, 6);
    end(&t);
    need(is_filled(m, BYTES, 6));
    if (!old_first) dereg(old);
    need(is_filled(m, BYTES, 6) && placed(m, BYTES) == 0 && placed(moved_to, BYTES) == 0);
    munmap(m, BYTES);
    munmap(moved_to, BYTES);
}

// Memory that a region covers goes in each way, and comes back under a region of each kind.
void case_renewed(void) {
    begin();
    for (size_t way = 0; way < sizeof WAYS / sizeof *WAYS; way++)
        for (size_t kind = 0; kind < sizeof KINDS / sizeof *KINDS; kind++)
            for (int old_first = 0; old_first < 2; old_first++) one(way, kind, old_first);
    done();
}

// The end of the heap goes back and forth.
void case_renewed_heap(void) {
    begin();
    way_name = "brk", kind_name = "registered";
    uint8_t *m = sbrk(0);
    m = (uint8_t *)(((uintptr_t)m + PAGE - 1) & ~(PAGE - 1));
    need(brk(m + BYTES) == 0);
    fill(m, BYTES, 1);
    struct ibv_mr *old = reg(m, BYTES);
    struct target kept[3];
    for (unsigned turn = 0; turn < 3; turn++) {
        need(brk(m) == 0 && brk(m + BYTES) == 0);
        fill(m, BYTES, 2 + turn);
        kept[turn] = registered(m + BEGIN, old);
        exchange(m, &kept[turn], turn);
    }
    for (unsigned turn = 0; turn < 3; turn++) end(&kept[turn]);
    dereg(old);
    done();
}

// Regions of a few bytes, one after the other, in pages that were renewed: none has a whole page.
void case_renewed_small(void) {
    begin();
    way_name = "unmapped", kind_name = "small";
    for (unsigned turn = 0; turn < 20; turn++) {
        uint8_t *m = private_pages(BYTES, 1);
        struct ibv_mr *old = reg(m, BYTES), *small[64];
        unmapped(m);
        fill(m, BYTES, turn);
        for (size_t i = 0; i < 64; i++) small[i] = reg(m + i * 1500 + turn, 700);
        for (size_t i = 0; i < 64; i++) {
            rdma(IBV_WR_RDMA_WRITE, small[i], m + i * 1500 + turn, peer_mr, peer, 700);
            same("WRITE out of it", peer, m + i * 1500 + turn, 700);
            fill(peer, 700, turn + 9);
            rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, small[i], m + i * 1500 + turn, 700);
            same("WRITE into it", m + i * 1500 + turn, peer, 700);
        }
        if (turn % 2) dereg(old);
        for (size_t i = 0; i < 64; i++) dereg(small[i]);
        if (!(turn % 2)) dereg(old);
        munmap(m, BYTES);
    }
    done();
}

// A region on demand is of the addresses, whatever lies there: also what comes after it was registered.
void case_renewed_on_demand(void) {
    begin();
    for (size_t way = 0; way < sizeof WAYS / sizeof *WAYS; way++)
        for (int kind = 0; kind < 3; kind++) {
            static const char *NAMES[] = {"on demand before", "implicitly before", "by a window on demand before"};
            way_name = WAYS[way].name, kind_name = NAMES[kind];
            moved_to = private_pages(BYTES, 5);
            uint8_t *m = private_pages(BYTES, 1);
            struct ibv_mr *old = reg(m, BYTES);
            struct target t = kind == 1 ? implicitly(m + BEGIN, old)
                              : kind    ? by_window_of(IBV_MW_TYPE_1, m + BEGIN, IBV_ACCESS_ON_DEMAND)
                                        : on_demand(m + BEGIN, old);
            exchange(m, &t, 2);
            WAYS[way].run(m);
            exchange(m, &t, 3);
            end(&t);
            dereg(old);
            munmap(m, BYTES);
            munmap(moved_to, BYTES);
        }
    done();
}

// Registered memory was moved: a child has its own copy of it, and what is registered where it went is the program's.
void case_renewed_moved(void) {
    begin();
    way_name = "moved away", kind_name = "where it went";
    for (int is_forked = 0; is_forked < 2; is_forked++)
        for (int is_renewed = 0; is_renewed < 2; is_renewed++) {
            uint8_t *m = private_pages(BYTES, 1);
            struct ibv_mr *old = reg(m, BYTES);
            moved_to = private_pages(BYTES, 5);
            moved_away(m);
            struct target t = registered(moved_to + BEGIN, old);
            if (is_forked) {
                fill(moved_to, BYTES, 7);
                pid_t child = fork();
                if (!child) {
                    fill(moved_to, BYTES, 8);
                    _exit(placed(moved_to, BYTES) ? 1 : 0);
                }
                int status;
                need(waitpid(child, &status, 0) == child && status == 0);
                need(is_filled(moved_to, BYTES, 7));
            }
            exchange(moved_to, &t, 2);
            struct target again = {0};
            if (is_renewed) again = registered(m + BEGIN, old), exchange(m, &again, 4);
            exchange(moved_to, &t, 3);
            fill(moved_to, BYTES, 6);
            if (is_renewed) end(&again);
            dereg(old);
            exchange(moved_to, &t, 5);
            end(&t);
            munmap(m, BYTES);
            munmap(moved_to, BYTES);
        }
    done();
}

// One word, by the key of a placed region and by one on demand: each goes another way, and no addition is lost.
struct adder {
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *word_mr, *result_mr;
    uint64_t *word, *result;
};

enum { ADDERS = 4, ADDITIONS = 2000, AT_ONCE = 8 };

static void *add_on(void *argument) {
    struct adder *a = argument;
    struct ibv_sge sge = {(uintptr_t)a->result, 8, a->result_mr->lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
                                   .send_flags = IBV_SEND_SIGNALED,
                                   .wr.atomic = {.remote_addr = (uintptr_t)a->word, .compare_add = 1, .rkey = a->word_mr->rkey}};
    for (unsigned posted = 0, complete = 0; complete < ADDITIONS;) {
        for (; posted < ADDITIONS && posted - complete < AT_ONCE; posted++) need(!ibv_post_send(a->qp, &wr, &bad));
        struct ibv_wc wc;
        int count = ibv_poll_cq(a->cq, 1, &wc);
        need(count >= 0 && (!count || wc.status == IBV_WC_SUCCESS));
        complete += (unsigned)count;
    }
    return NULL;
}

void case_renewed_atomics(void) {
    begin();
    uint8_t *m = private_pages(BYTES, 0);
    uint64_t *word = (uint64_t *)(m + 5 * PAGE + 16);
    *word = 0;
    struct ibv_mr *placed_mr = reg(m, BYTES), *on_demand_mr = on_demand(m + BEGIN, placed_mr).mr;
    struct adder adders[ADDERS];
    pthread_t threads[ADDERS];
    for (unsigned i = 0; i < ADDERS; i++) {
        struct adder *a = &adders[i];
        a->word = word, a->word_mr = i % 2 ? on_demand_mr : placed_mr;
        a->result = (uint64_t *)(peer + i * PAGE), a->result_mr = peer_mr;
        need((a->cq = ibv_create_cq(context, 2 * AT_ONCE, NULL, NULL, 0)) != NULL);
        struct ibv_qp_init_attr init = {.send_cq = a->cq, .recv_cq = a->cq, .qp_type = IBV_QPT_RC,
                                        .cap = {.max_send_wr = 2 * AT_ONCE, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
        need((a->qp = ibv_create_qp(pd, &init)) != NULL);
        connect_qp(a->qp, a->qp->qp_num);
    }
    for (unsigned i = 0; i < ADDERS; i++) need(pthread_create(&threads[i], NULL, add_on, &adders[i]) == 0);
    for (unsigned i = 0; i < ADDERS; i++) need(pthread_join(threads[i], NULL) == 0);
    need(*word == ADDERS * ADDITIONS);
    for (unsigned i = 0; i < ADDERS; i++) need(ibv_destroy_qp(adders[i].qp) == 0 && ibv_destroy_cq(adders[i].cq) == 0);
    dereg(on_demand_mr);
    dereg(placed_mr);
    need(*word == ADDERS * ADDITIONS);
    munmap(m, BYTES);
    done();
}
