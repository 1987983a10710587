// Everything that an RC or UC QP can do, at random, in both directions at once, on one pair of QPs.
//
// In each round both ends post up to ROUND requests without waiting, the last one a SEND that says that it is the last.
// A message is checked by its number, or by what its immediate data says of it; memory that a WRITE fills, when the
// message that reports it comes. A round is over when all is done and checked on both ends.
#include "cases.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    ROUND = 32,
    RECEIVES = 2 * ROUND,
    SLOT = 300 << 10,
    INLINE_MAX = 128,
    LOCAL = 0, // sources, and what READs and atomics bring
    RECEIVED = LOCAL + ROUND * SLOT,
    WRITTEN = RECEIVED + RECEIVES * SLOT,
    CONSTANT = WRITTEN + ROUND * SLOT,
    COUNTER = CONSTANT + SLOT,
    TOTAL = COUNTER + 4096,
    CONSTANT_SEED = 99,
    TIMEOUT_MS = 20000,
};
// Meaning of immediate data, above the slot.
enum { SAYS_NOTHING, SAYS_LAST, SAYS_CONSTANT, SAYS_WRITTEN, SAYS_WRITTEN_BEFORE };
// Check to make when a request is done.
enum expects { EXPECTS_NOTHING, EXPECTS_CONSTANT, EXPECTS_COUNT };

struct habits {
    bool late;   // few RECVs, each posted only after a while
    bool pauses; // does not poll for 300 ms, now and then
    bool forks, shared_memory;
};

struct mixed {
    struct side *side;
    struct endpoint *e;
    struct habits habits;
    uint64_t random;
    uint64_t sent, received; // messages that take a RECV
    uint64_t counted;        // what the peer's counter has to be
    // This round's requests.
    unsigned posted, done;
    struct {
        enum expects expects;
        uint32_t length;
        uint64_t count;
        bool signaled;
    } requests[ROUND];
    bool heard_last;
    // RECVs to be posted, if late.
    uint64_t waiting[RECEIVES];
    unsigned waiting_count;
    uint64_t next_receive_ns;
};

static uint64_t seed_of(enum role sender, uint64_t number) { return (uint64_t)(sender == ROLE_A) << 40 | number; }

static uint32_t random_length(struct mixed *m) {
    static const uint32_t limits[] = {1, 64, 64, 4096, 4096, 65536, 256 << 10, SLOT + 1};
    uint64_t random = random_next(&m->random);
    return (uint32_t)((random >> 8) % limits[random % 8]);
}

// The next request's slot. Fills in what all have in common.
static unsigned prepare(struct mixed *m, struct ibv_send_wr *wr, struct ibv_sge *sge, uint32_t length) {
    unsigned slot = m->posted;
    *sge = (struct ibv_sge){(uintptr_t)m->e->memory + LOCAL + (size_t)slot * SLOT, length, m->e->mr->lkey};
    *wr = (struct ibv_send_wr){.wr_id = slot, .sg_list = sge, .num_sge = length > 0};
    return slot;
}

static int post(struct mixed *m, struct ibv_send_wr *wr, enum expects expects) {
    unsigned slot = m->posted++;
    uint64_t random = random_next(&m->random);
    m->requests[slot].signaled = random % 4 == 0 || wr->send_flags & IBV_SEND_SIGNALED;
    m->requests[slot].expects = expects;
    m->requests[slot].length = wr->sg_list->length;
    if (m->requests[slot].signaled) wr->send_flags |= IBV_SEND_SIGNALED;
    if (random >> 8 & 1) wr->send_flags |= IBV_SEND_SOLICITED;
    return post_work(m->e, wr);
}

static int post_message(struct mixed *m, unsigned says, unsigned flags) {
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    bool is_inline = random_next(&m->random) % 4 == 0;
    uint32_t length = is_inline ? (uint32_t)(random_next(&m->random) % (INLINE_MAX + 1)) : random_length(m);
    unsigned slot = prepare(m, &wr, &sge, length);
    uint8_t *bytes = m->e->memory + LOCAL + (size_t)slot * SLOT;
    fill(bytes, length, seed_of(m->side->role, m->sent++));
    wr.send_flags = flags | (is_inline ? IBV_SEND_INLINE : 0);
    wr.opcode = says || random_next(&m->random) & 1 ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND;
    wr.imm_data = htonl(says << 8);
    int rc = post(m, &wr, EXPECTS_NOTHING);
    if (is_inline) memset(bytes, 0xee, length); // it is the program's again
    return rc;
}

// A WRITE, with immediate data or followed by a message that reports it.
static int post_write(struct mixed *m) {
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    bool immediate = random_next(&m->random) & 1;
    unsigned slot = prepare(m, &wr, &sge, random_length(m));
    uint64_t seed = seed_of(m->side->role, m->sent);
    fill(m->e->memory + LOCAL + (size_t)slot * SLOT, sge.length, seed);
    wr.opcode = immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    wr.imm_data = htonl(SAYS_WRITTEN << 8 | slot);
    wr.wr.rdma.remote_addr = m->e->peer.memory + WRITTEN + (size_t)slot * SLOT;
    wr.wr.rdma.rkey = m->e->peer.rkey;
    m->sent += immediate;
    int rc = post(m, &wr, EXPECTS_NOTHING);
    if (rc || immediate) return rc;
    uint32_t length = sge.length;
    prepare(m, &wr, &sge, sizeof length);
    memcpy((void *)(uintptr_t)sge.addr, &length, sizeof length);
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    wr.imm_data = htonl(SAYS_WRITTEN_BEFORE << 8 | slot);
    m->sent++;
    return post(m, &wr, EXPECTS_NOTHING);
}

// A READ, and maybe a message of what it brought.
static int post_read(struct mixed *m) {
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    bool sends = random_next(&m->random) & 1;
    prepare(m, &wr, &sge, random_length(m));
    wr.opcode = IBV_WR_RDMA_READ;
    wr.wr.rdma.remote_addr = m->e->peer.memory + CONSTANT;
    wr.wr.rdma.rkey = m->e->peer.rkey;
    memset((void *)(uintptr_t)sge.addr, 0x77, sge.length);
    int rc = post(m, &wr, EXPECTS_CONSTANT);
    if (rc || !sends) return rc;
    struct ibv_sge same = sge;
    prepare(m, &wr, &sge, sge.length);
    wr.sg_list = &same;
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    wr.imm_data = htonl(SAYS_CONSTANT << 8);
    wr.send_flags = IBV_SEND_FENCE;
    m->sent++;
    return post(m, &wr, EXPECTS_NOTHING);
}

static int post_atomic(struct mixed *m) {
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    uint64_t random = random_next(&m->random);
    unsigned slot = prepare(m, &wr, &sge, 8);
    wr.wr.atomic.remote_addr = m->e->peer.memory + COUNTER;
    wr.wr.atomic.rkey = m->e->peer.rkey;
    m->requests[slot].count = m->counted;
    if (random & 1) {
        wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        m->counted += wr.wr.atomic.compare_add = random >> 40;
    } else {
        bool swaps = random & 2;
        wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
        wr.wr.atomic.compare_add = m->counted + !swaps;
        wr.wr.atomic.swap = random >> 20;
        if (swaps) m->counted = wr.wr.atomic.swap;
    }
    if (random & 4) wr.send_flags = IBV_SEND_FENCE;
    return post(m, &wr, EXPECTS_COUNT);
}

static int post_any(struct mixed *m) {
    uint64_t random = random_next(&m->random) % (case_type == IBV_QPT_UC ? 11 : 16); // UC: no READ, no atomic
    return random < 7 ? post_message(m, SAYS_NOTHING, 0)
           : random < 11 ? post_write(m)
           : random < 14 ? post_read(m)
                         : post_atomic(m);
}

static void check_request(struct mixed *m, unsigned slot) {
    const uint8_t *bytes = m->e->memory + LOCAL + (size_t)slot * SLOT;
    if (m->requests[slot].expects == EXPECTS_CONSTANT)
        need(m->side, holds(bytes, m->requests[slot].length, CONSTANT_SEED));
    if (m->requests[slot].expects == EXPECTS_COUNT) need(m->side, !memcmp(bytes, &m->requests[slot].count, 8));
}

// A completion: every request before it is done too.
static void take_done(struct mixed *m, const struct ibv_wc *wc) {
    need_status(m->side, *wc, IBV_WC_SUCCESS);
    for (; m->done < m->posted && !m->requests[m->done].signaled; m->done++) check_request(m, m->done);
    need(m->side, m->done < m->posted && wc->wr_id == m->done);
    check_request(m, m->done++);
}

static void take_message(struct mixed *m, const struct ibv_wc *wc) {
    struct side *s = m->side;
    enum role sender = s->role == ROLE_A ? ROLE_B : ROLE_A;
    need_status(s, *wc, IBV_WC_SUCCESS);
    const uint8_t *bytes = m->e->memory + RECEIVED + wc->wr_id * SLOT;
    uint32_t immediate = wc->wc_flags & IBV_WC_WITH_IMM ? ntohl(wc->imm_data) : 0, written;
    uint8_t *slot = m->e->memory + WRITTEN + (size_t)(immediate & 0xff) * SLOT;
    uint64_t seed = seed_of(sender, m->received++);
    switch (immediate >> 8) {
    case SAYS_CONSTANT: need(s, holds(bytes, wc->byte_len, CONSTANT_SEED)); break;
    case SAYS_WRITTEN:
        need(s, wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM);
        need(s, holds(slot, wc->byte_len, seed));
        break;
    case SAYS_WRITTEN_BEFORE:
        need(s, wc->byte_len == sizeof written);
        memcpy(&written, bytes, sizeof written);
        need(s, written <= SLOT && holds(slot, written, seed));
        break;
    default:
        m->heard_last |= immediate >> 8 == SAYS_LAST;
        need(s, wc->opcode == IBV_WC_RECV && holds(bytes, wc->byte_len, seed));
    }
    m->waiting[m->waiting_count++] = wc->wr_id;
}

static void post_receives(struct mixed *m) {
    while (m->waiting_count > 0) {
        if (m->habits.late) {
            if (now_ns() < m->next_receive_ns) return;
            m->next_receive_ns = now_ns() + random_next(&m->random) % 500000;
        }
        uint64_t id = m->waiting[--m->waiting_count];
        need(m->side, !post_recv(m->e, id, RECEIVED + id * SLOT, SLOT));
    }
}

static void one_round(struct mixed *m) {
    struct ibv_wc wc[8];
    uint64_t end = now_ns() + TIMEOUT_MS * 1000000ull;
    m->posted = m->done = 0;
    m->heard_last = false;
    while (m->posted < ROUND - 2) need(m->side, !post_any(m));
    need(m->side, !post_message(m, SAYS_LAST, IBV_SEND_SIGNALED));
    while ((m->done < m->posted || !m->heard_last) && !m->side->failed) {
        int n = ibv_poll_cq(m->e->send_cq, 8, wc);
        for (int i = 0; i < n && !m->side->failed; i++) take_done(m, &wc[i]);
        int k = ibv_poll_cq(m->e->recv_cq, 8, wc);
        for (int i = 0; i < k && !m->side->failed; i++) take_message(m, &wc[i]);
        need(m->side, n >= 0 && k >= 0);
        post_receives(m);
        need(m->side, now_ns() < end);
    }
}

// The child has a life of its own; the parent's requests go on meanwhile.
static pid_t fork_child(void) {
    pid_t pid = fork();
    if (pid) return pid;
    uint8_t *own = malloc(1 << 20);
    memset(own, 0x55, 1 << 20);
    sleep_ms(5);
    _exit(own[4711] == 0x55 ? 0 : 1);
}

static void mixed(struct side *s, struct endpoint *e, struct habits habits) {
    struct mixed *m = calloc(1, sizeof *m);
    *m = (struct mixed){.side = s, .e = e, .habits = habits, .random = case_seed * 2 + s->role};
    need(s, endpoint_open(e, &(struct options){.type = case_type, .bytes = TOTAL, .send_wr = ROUND, .recv_wr = RECEIVES,
                                               .unsignaled = true, .inline_bytes = INLINE_MAX,
                                               .shared_memory = habits.shared_memory}));
    fill(e->memory + CONSTANT, SLOT, CONSTANT_SEED);
    memset(e->memory + COUNTER, 0, 4096);
    need(s, endpoint_to_init(e));
    for (unsigned id = 0; id < (habits.late ? 3 : RECEIVES); id++) m->waiting[m->waiting_count++] = id;
    if (!habits.late) post_receives(m);
    need(s, endpoint_connect(s, e));
    for (unsigned round = 0; round < case_rounds && !s->failed; round++) {
        if (habits.pauses && round % 16 == 5 + 5 * s->role) sleep_ms(300);
        pid_t child = habits.forks && round % 4 == 0 ? fork_child() : 0;
        one_round(m);
        int status = 0;
        if (child) need(s, child > 0 && waitpid(child, &status, 0) == child && status == 0);
        need(s, !s->failed && meet(s));
    }
    free(m);
}

static void mixed_heap(struct side *s, struct endpoint *e) { mixed(s, e, (struct habits){0}); }
static void mixed_shared(struct side *s, struct endpoint *e) { mixed(s, e, (struct habits){.shared_memory = true}); }
static void mixed_late_receives(struct side *s, struct endpoint *e) { mixed(s, e, (struct habits){.late = true}); }
static void mixed_pauses(struct side *s, struct endpoint *e) { mixed(s, e, (struct habits){.pauses = true}); }
static void mixed_forks(struct side *s, struct endpoint *e) { mixed(s, e, (struct habits){.forks = true}); }

const struct test_case mixed_cases[] = {
    {"mixed_heap", mixed_heap},
    {"mixed_shared", mixed_shared},
    {"mixed_late_receives", mixed_late_receives},
    {"mixed_pauses", mixed_pauses},
    {"mixed_forks", mixed_forks},
    {NULL, NULL},
};
