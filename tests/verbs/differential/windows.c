// Memory windows of both types, invalidation from both ends.
// ibv_alloc_mw(3), ibv_bind_mw(3), ibv_post_send(3); InfiniBand specification 10.6.7 (windows and their
// invalidation), 9.4.1.1 (SEND with invalidate), 11.2.8.7 and following (verbs).
#include "trace.h"

#include <errno.h>
#include <string.h>

#define WINDOW_ACCESS (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

// End B has a region that windows may be bound to.
struct stage {
    struct pair pair;
    struct ibv_mr *mr;
    struct ibv_mw *mw;
};

static void stage_open(struct stage *s, enum ibv_mw_type type) {
    pair_open(&s->pair, &(struct options){0});
    s->mw = ibv_alloc_mw(s->pair.b.pd, type);
    if (!s->mw && errno == EOPNOTSUPP) not_offered(type == IBV_MW_TYPE_1 ? "windows of type 1" : "windows of type 2");
    if (!s->mw) give_up("allocate a window");
    s->mr = ibv_reg_mr(s->pair.b.pd, s->pair.b.memory, s->pair.b.bytes, ALL_ACCESS | IBV_ACCESS_MW_BIND);
    if (!s->mr) give_up("register memory for windows");
}

struct binding {
    struct ibv_mr *mr; // NULL: the stage's
    size_t at, length;
    unsigned access;
    uint32_t rkey; // of type 2; 0: the next key of the window
    uint64_t id;
};

// Binds and says how it went; the window's key is then mw->rkey for both types.
static void bind(struct stage *s, const struct binding *b) {
    struct ibv_mw_bind_info info = {.mr = b->mr ? b->mr : s->mr, .addr = (uintptr_t)s->pair.b.memory + b->at,
                                    .length = b->length, .mw_access_flags = b->access};
    int rc;
    if (s->mw->type == IBV_MW_TYPE_1) {
        struct ibv_mw_bind request = {.wr_id = b->id, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
        rc = ibv_bind_mw(s->pair.b.qp, s->mw, &request);
        say("bind -> %s", result(rc));
        if (!rc) sent(&s->pair.b, 1);
        return;
    }
    struct ibv_send_wr wr = {.wr_id = b->id, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
                             .bind_mw = {.mw = s->mw, .rkey = b->rkey ? b->rkey : ibv_inc_rkey(s->mw->rkey),
                                         .bind_info = info}}, *bad;
    uint32_t key = wr.bind_mw.rkey;
    rc = ibv_post_send(s->pair.b.qp, &wr, &bad);
    say("bind -> %s", result(rc));
    if (rc) return;
    struct ibv_wc wc;
    if (!take(s->pair.b.send_cq, &wc)) {
        say("no completion");
        return;
    }
    say_completion(".sq", &wc);
    if (wc.status == IBV_WC_SUCCESS) s->mw->rkey = key;
}

static void use(struct stage *s, enum ibv_wr_opcode code, uint32_t rkey, size_t to, uint32_t length, uint64_t id) {
    post(&s->pair.a, &(struct op){
        .id = id, .code = code, .at = 4096, .len = length, .to = to, .rkey = rkey, .compare = 1});
    sent(&s->pair.a, 1);
}

static void say_end(struct stage *s) {
    say_states(&s->pair);
    say_empty(&s->pair);
    say_memory("B", s->pair.b.memory, s->pair.b.bytes);
}

static const struct binding whole = {.at = 1000, .length = 4000, .access = WINDOW_ACCESS, .id = 50};

static void through(long type) {
    struct stage s;
    stage_open(&s, (enum ibv_mw_type)type);
    say("the window's type %d, pd %d, context %d", s.mw->type, s.mw->pd == s.pair.b.pd,
        s.mw->context == s.pair.b.pd->context);
    bind(&s, &whole);
    use(&s, IBV_WR_RDMA_WRITE, s.mw->rkey, 1000, 4000, 1);
    use(&s, IBV_WR_RDMA_READ, s.mw->rkey, 1500, 64, 2);
    use(&s, IBV_WR_ATOMIC_FETCH_AND_ADD, s.mw->rkey, 2048, 8, 3);
    say_memory("A", s.pair.a.memory, s.pair.a.bytes);
    say_end(&s);
    say("deallocate, bound -> %s", result(ibv_dealloc_mw(s.mw)));
    say("deregister -> %s", result(ibv_dereg_mr(s.mr)));
}

#define PACK(type, kind) ((long)(type) << 8 | (kind))

// Accesses that the window forbids although its region allows them.
static void forbidden(long packed) {
    struct stage s;
    stage_open(&s, (enum ibv_mw_type)(packed >> 8));
    struct binding b = whole;
    if ((packed & 255) == 2) b.access = IBV_ACCESS_REMOTE_READ;
    if ((packed & 255) == 3) b.access = IBV_ACCESS_REMOTE_WRITE;
    if ((packed & 255) == 4) b.access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    bind(&s, &b);
    switch (packed & 255) {
        case 0: use(&s, IBV_WR_RDMA_WRITE, s.mw->rkey, 999, 8, 1); break;
        case 1: use(&s, IBV_WR_RDMA_WRITE, s.mw->rkey, 4993, 8, 1); break;
        case 2: use(&s, IBV_WR_RDMA_WRITE, s.mw->rkey, 1000, 8, 1); break;
        case 3: use(&s, IBV_WR_RDMA_READ, s.mw->rkey, 1000, 8, 1); break;
        case 4: use(&s, IBV_WR_ATOMIC_FETCH_AND_ADD, s.mw->rkey, 1000, 8, 1); break;
        default: use(&s, IBV_WR_RDMA_WRITE, s.mw->rkey ^ 0xff, 1000, 8, 1); break;
    }
    say_end(&s);
}

// Bindings that must fail.
static void refused(long packed) {
    struct stage s;
    stage_open(&s, (enum ibv_mw_type)(packed >> 8));
    struct binding b = whole;
    struct end *end = &s.pair.b;
    struct ibv_pd *other = ibv_alloc_pd(end->pd->context);
    switch (packed & 255) {
        case 0: b.mr = end->mr; break; // does not allow windows
        case 1: b.length = end->bytes; break;
        case 2: b.mr = ibv_reg_mr(end->pd, end->memory, end->bytes, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND); break;
        case 3: b.mr = ibv_reg_mr(other, end->memory, end->bytes, ALL_ACCESS | IBV_ACCESS_MW_BIND); break;
        case 4:
            s.mw = ibv_alloc_mw(other, s.mw->type);
            if (!s.mw) give_up("allocate another window");
            break;
        default: b.access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE; break;
    }
    if (!b.mr && (packed & 255) != 1 && (packed & 255) < 4) give_up("register");
    bind(&s, &b);
    say_states(&s.pair);
}

// The key of before is of no use after a second binding, of type 1; that of type 2 must be invalidated first.
static void bound_again(long type) {
    struct stage s;
    stage_open(&s, (enum ibv_mw_type)type);
    bind(&s, &whole);
    uint32_t before = s.mw->rkey;
    use(&s, IBV_WR_RDMA_WRITE, before, 1000, 8, 1);
    bind(&s, &(struct binding){.at = 20000, .length = 100, .access = WINDOW_ACCESS, .id = 51});
    say("another key: %d", s.mw->rkey != before);
    if (type == IBV_MW_TYPE_1) {
        use(&s, IBV_WR_RDMA_WRITE, s.mw->rkey, 20000, 100, 2);
        use(&s, IBV_WR_RDMA_WRITE, before, 1000, 8, 3);
    }
    say_end(&s);
}

// Of no bytes: for type 1 the end of the binding.
static void bound_to_nothing(long type) {
    struct stage s;
    stage_open(&s, (enum ibv_mw_type)type);
    if (type == IBV_MW_TYPE_1) bind(&s, &whole);
    uint32_t before = s.mw->rkey;
    bind(&s, &(struct binding){.at = 1000, .length = 0, .access = WINDOW_ACCESS, .id = 51});
    if (type == IBV_MW_TYPE_1) use(&s, IBV_WR_RDMA_WRITE, before, 1000, 8, 1);
    say_end(&s);
}

static void local_invalidate(struct stage *s, uint32_t key) {
    post(&s->pair.b, &(struct op){.id = 60, .code = IBV_WR_LOCAL_INV, .len = ZERO_LENGTH, .imm = key});
    sent(&s->pair.b, 1);
}

static void invalidated_locally(long again) {
    struct stage s;
    stage_open(&s, IBV_MW_TYPE_2);
    bind(&s, &whole);
    uint32_t key = s.mw->rkey;
    local_invalidate(&s, key);
    if (again) {
        bind(&s, &whole);
        use(&s, IBV_WR_RDMA_WRITE, s.mw->rkey, 1000, 64, 1);
        local_invalidate(&s, s.mw->rkey);
    }
    use(&s, IBV_WR_RDMA_WRITE, key, 1000, 8, 2);
    say_end(&s);
}

static void invalid_local_invalidation(long kind) {
    struct stage s;
    stage_open(&s, kind == 1 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2);
    if (kind == 1) bind(&s, &whole);
    local_invalidate(&s, kind == 0 ? 0x12345600 : kind == 1 || kind == 3 ? s.mw->rkey : s.mr->rkey);
    say_states(&s.pair);
}

// The peer's message invalidates the window that it used.
static void invalidated_remotely(long kind) {
    struct stage s;
    stage_open(&s, IBV_MW_TYPE_2);
    bind(&s, &whole);
    receive(&s.pair.b, 7, 0, 64);
    use(&s, IBV_WR_RDMA_WRITE, s.mw->rkey, 1000, 8, 1);
    uint32_t key = kind == 1 ? 0x12345600 : kind == 2 ? s.mr->rkey : s.mw->rkey;
    post(&s.pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND_WITH_INV, .len = 16, .imm = key});
    sent(&s.pair.a, 1);
    struct ibv_wc wc;
    if (take(s.pair.b.recv_cq, &wc)) {
        say_completion(".rq", &wc);
        if (wc.status == IBV_WC_SUCCESS) say("the key is named: %d", wc.invalidated_rkey == key);
    }
    if (kind == 0) {
        use(&s, IBV_WR_RDMA_WRITE, key, 1000, 8, 3);
        say_end(&s);
        return;
    }
    say_states(&s.pair);
}

// After its window was invalidated by the peer, B binds it again; many times, with data through each.
static void many_rounds(long unused) {
    (void)unused;
    struct stage s;
    stage_open(&s, IBV_MW_TYPE_2);
    for (uint64_t i = 0; i < 10; i++) {
        bind(&s, &(struct binding){.at = 1000 * i, .length = 1000, .access = IBV_ACCESS_REMOTE_WRITE, .id = i});
        receive(&s.pair.b, 100 + i, 60000, 64);
        use(&s, IBV_WR_RDMA_WRITE, s.mw->rkey, 1000 * i + 10, 500, 200 + i);
        post(&s.pair.a, &(struct op){.id = 300 + i, .code = IBV_WR_SEND_WITH_INV, .len = 8, .imm = s.mw->rkey});
        sent(&s.pair.a, 1);
        received(&s.pair.b, 1);
    }
    say_end(&s);
}

// Writes through the window go on while it is invalidated: some succeed, then one fails, the rest are flushed.
static void invalidated_under_traffic(long unused) {
    (void)unused;
    struct stage s;
    stage_open(&s, IBV_MW_TYPE_2);
    bind(&s, &whole);
    struct ibv_wc wc;
    int good = 0, refused = 0, flushed = 0, others = 0;
    for (uint64_t i = 0; i < 14; i++) {
        struct op op = {.id = i, .code = IBV_WR_RDMA_WRITE, .at = 1000, .len = 2000, .to = 1000, .rkey = s.mw->rkey};
        if (post_quietly(&s.pair.a, &op)) give_up("post");
        if (i == 7) local_invalidate(&s, s.mw->rkey);
    }
    for (int i = 0; i < 14 && take(s.pair.a.send_cq, &wc); i++) {
        if (wc.status == IBV_WC_SUCCESS && !refused) good++;
        else if (wc.status == IBV_WC_REM_ACCESS_ERR && !refused) refused++;
        else if (wc.status == IBV_WC_WR_FLUSH_ERR && refused) flushed++;
        else others++;
    }
    say("all complete: %d, refused %d, out of order %d", good + refused + flushed == 14, refused, others);
}

// References between objects: each keeps the other from going.
static void busy(long type) {
    struct stage s;
    stage_open(&s, (enum ibv_mw_type)type);
    bind(&s, &whole);
    say("deregister the region of a bound window -> %s", result(ibv_dereg_mr(s.mr)));
    say("deallocate -> %s", result(ibv_dealloc_mw(s.mw)));
    errno = 0;
    struct ibv_pd *pd = ibv_alloc_pd(s.pair.b.pd->context);
    struct ibv_mw *mw = ibv_alloc_mw(pd, (enum ibv_mw_type)type);
    say("another -> %s", pointer_result(mw));
    say("deallocate the domain -> %s", result(ibv_dealloc_pd(pd)));
    if (mw) say("deallocate the window -> %s", result(ibv_dealloc_mw(mw)));
    say("deallocate the domain -> %s", result(ibv_dealloc_pd(pd)));
}

static void unbound(long type) {
    struct stage s;
    stage_open(&s, (enum ibv_mw_type)type);
    use(&s, IBV_WR_RDMA_WRITE, s.mw->rkey, 0, 8, 1);
    say_states(&s.pair);
}

// The window is gone, its key with it.
static void deallocated(long type) {
    struct stage s;
    stage_open(&s, (enum ibv_mw_type)type);
    bind(&s, &whole);
    uint32_t key = s.mw->rkey;
    say("deallocate -> %s", result(ibv_dealloc_mw(s.mw)));
    use(&s, IBV_WR_RDMA_WRITE, key, 1000, 8, 1);
    say_end(&s);
}

// A window of type 2 belongs to the queue pair that bound it (2B): another one of the same domain is refused.
static void of_other_queue_pair(long unused) {
    (void)unused;
    struct stage s;
    stage_open(&s, IBV_MW_TYPE_2);
    bind(&s, &whole);
    struct pair other;
    pair_open(&other, &(struct options){.unconnected = true});
    struct ibv_qp_init_attr init = {.send_cq = other.b.send_cq, .recv_cq = other.b.recv_cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1}};
    if (!(other.b.qp = ibv_create_qp(s.pair.b.pd, &init))) give_up("create a queue pair");
    other.a.name = "C";
    other.b.name = "D";
    name_qp(other.a.qp->qp_num, IBV_QPT_RC, "C");
    name_qp(other.b.qp->qp_num, IBV_QPT_RC, "D");
    end_connect(&other.a);
    end_connect(&other.b);
    other.b.memory = s.pair.b.memory;
    post(&other.a, &(struct op){.id = 1, .code = IBV_WR_RDMA_WRITE, .len = 8, .to = 1000, .rkey = s.mw->rkey});
    sent(&other.a, 1);
    use(&s, IBV_WR_RDMA_WRITE, s.mw->rkey, 1000, 8, 2);
}

void add_windows(void) {
    static const enum ibv_mw_type types[] = {IBV_MW_TYPE_1, IBV_MW_TYPE_2};
    for (size_t t = 0; t < 2; t++) {
        int n = (int)types[t];
        add(through, n, "window_%d_through", n);
        static const char *const accesses[] = {
            "before_begin", "beyond_end", "write_where_read", "read_where_write", "atomic_where_none", "wrong_key"};
        for (long kind = 0; kind < 6; kind++) add(forbidden, PACK(n, kind), "window_%d_%s", n, accesses[kind]);
        static const char *const bindings[] = {"without_mw_bind", "beyond_region", "without_local_write",
                                               "region_of_other_pd", "window_of_other_pd", "local_access"};
        for (long kind = 0; kind < 6; kind++) add(refused, PACK(n, kind), "window_%d_bind_%s", n, bindings[kind]);
        add(bound_again, n, "window_%d_bound_again", n);
        add(bound_to_nothing, n, "window_%d_bound_to_nothing", n);
        add(busy, n, "window_%d_busy", n);
        add(unbound, n, "window_%d_unbound", n);
        add(deallocated, n, "window_%d_deallocated", n);
    }
    add(invalidated_locally, 0, "window_invalidated_locally");
    add(invalidated_locally, 1, "window_invalidated_and_bound_again");
    add(invalid_local_invalidation, 0, "local_inv_of_unknown_key");
    add(invalid_local_invalidation, 1, "local_inv_of_window_1");
    add(invalid_local_invalidation, 2, "local_inv_of_region");
    add_dangerous(invalid_local_invalidation, 3, "local_inv_of_unbound_window");
    add(invalidated_remotely, 0, "send_inv_of_window");
    add(invalidated_remotely, 1, "send_inv_of_unknown_key");
    add(invalidated_remotely, 2, "send_inv_of_region");
    add(many_rounds, 0, "window_many_rounds");
    add(invalidated_under_traffic, 0, "window_invalidated_under_traffic");
    add(of_other_queue_pair, 0, "window_2_of_other_queue_pair");
}
