// Many QPs between two ends with one pair of CQs, and many threads: each QP keeps its order, and nothing is lost.
#include "cases.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LANES = 200,
    LANES_MAX = 1024,
    THREADS = 4,
    BURST_MAX = 8, // messages to one lane in a round
    ACTIVE = 5,    // lanes that have messages in a round
    DEPTH = 16,    // RECVs of a lane
    SLOT = 512,
    RECEIVED = LANES_MAX * BURST_MAX * SLOT, // each lane's sources first
    WAIT_MS = 10000,
};
enum waiting { POLLS, SLEEPS, SLEEPS_FOR_SOLICITED };

struct lane {
    struct endpoint e; // its QP's own; all else is borrowed
    uint32_t sent, received;
    atomic_uint done;
};

struct lanes {
    struct side *side;
    struct endpoint *e;
    unsigned count, messages;
    unsigned taken_sent, taken_received; // of the one CQ that all have
    bool one_cq;
    struct lane lane[LANES_MAX];
};

// Of what grows with the number of rounds.
static uint64_t deadline(void) { return now_ns() + (WAIT_MS + 250ull * case_rounds) * 1000000; }

static size_t source(unsigned lane, uint32_t number) { return ((size_t)lane * BURST_MAX + number % BURST_MAX) * SLOT; }

static size_t landing(uint64_t id) { return RECEIVED + (size_t)id * SLOT; }

static uint32_t length_of(unsigned lane, uint32_t number) { return (lane * 37 + number * 101) % (SLOT + 1); }

static uint64_t seed_of(enum role sender, unsigned lane, uint32_t number) {
    return (uint64_t)(sender == ROLE_A) << 50 | (uint64_t)lane << 32 | number;
}

static void lanes_open(struct lanes *l, struct side *s, struct endpoint *e, unsigned count, bool events) {
    l->side = s, l->e = e, l->count = count;
    size_t bytes = RECEIVED + (size_t)count * DEPTH * SLOT;
    need(s, endpoint_open(e, &(struct options){.bytes = bytes, .cqe = (int)count * DEPTH, .events = events}));
    for (unsigned i = 0; i < count; i++) {
        struct endpoint *lane = &l->lane[i].e;
        struct ibv_qp_init_attr init = {
            .send_cq = l->one_cq ? e->recv_cq : e->send_cq, .recv_cq = e->recv_cq, .qp_type = case_type, .sq_sig_all = 1,
            .cap = {.max_send_wr = 64, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1}};
        *lane = *e;
        need(s, (lane->qp = ibv_create_qp(e->pd, &init)));
        lane->mine.qpn = lane->qp->qp_num;
        need(s, endpoint_to_init(lane));
        for (unsigned k = 0; k < DEPTH; k++) need(s, !post_recv(lane, i * DEPTH + k, landing(i * DEPTH + k), SLOT));
        need(s, socket_swap(s->sock, &lane->mine, &lane->peer, sizeof lane->mine));
        need(s, endpoint_to_rtr(lane) && endpoint_to_rts(lane));
    }
    need(s, meet(s));
}

// The runner closes the rest.
static void lanes_close(struct lanes *l) {
    if (!l->side->failed && !meet(l->side)) fail(l->side, __FILE__, __LINE__, "the other side failed");
    for (unsigned i = 0; i < l->count; i++)
        if (l->lane[i].e.qp && ibv_destroy_qp(l->lane[i].e.qp)) fail(l->side, __FILE__, __LINE__, "destroy qp");
    free(l);
}

static int send_next(struct lanes *l, unsigned lane, unsigned flags) {
    uint32_t number = l->lane[lane].sent++, length = length_of(lane, number);
    struct endpoint *e = &l->lane[lane].e;
    fill(e->memory + source(lane, number), length, seed_of(l->side->role, lane, number));
    struct ibv_sge sge = {(uintptr_t)e->memory + source(lane, number), length, e->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = (uint64_t)lane << 32 | number, .sg_list = &sge, .num_sge = length > 0,
                             .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htonl(number), .send_flags = flags};
    return post_work(e, &wr);
}

// One lane's completions come in the order of its requests.
static void take_sent(struct lanes *l, const struct ibv_wc *wc) {
    need_status(l->side, *wc, IBV_WC_SUCCESS);
    struct lane *lane = &l->lane[wc->wr_id >> 32];
    need(l->side, wc->qp_num == lane->e.qp->qp_num);
    // Release; partner: the Acquire load in `post_many`: a slot that is free was read.
    need(l->side, (uint32_t)wc->wr_id == atomic_fetch_add_explicit(&lane->done, 1, memory_order_release));
}

static void take_received(struct lanes *l, const struct ibv_wc *wc) {
    struct side *s = l->side;
    need_status(s, *wc, IBV_WC_SUCCESS);
    unsigned i = (unsigned)(wc->wr_id / DEPTH);
    struct lane *lane = &l->lane[i];
    uint32_t number = lane->received++;
    need(s, wc->qp_num == lane->e.qp->qp_num && wc->wr_id % DEPTH == number % DEPTH);
    need(s, ntohl(wc->imm_data) == number && wc->byte_len == length_of(i, number));
    uint64_t seed = seed_of(s->role == ROLE_A ? ROLE_B : ROLE_A, i, number);
    need(s, holds(l->e->memory + landing(wc->wr_id), wc->byte_len, seed));
    need(s, !post_recv(&lane->e, wc->wr_id, landing(wc->wr_id), SLOT));
}

static void take(struct lanes *l, const struct ibv_wc *wc, bool is_received) {
    is_received ? take_received(l, wc) : take_sent(l, wc);
    is_received ? l->taken_received++ : l->taken_sent++;
}

// Takes all there is. How many of them were messages; less than 0 after a failure.
static int take_all(struct lanes *l, struct ibv_cq *cq) {
    struct ibv_wc wc[16];
    int taken = 0, n;
    while ((n = ibv_poll_cq(cq, 16, wc)) > 0) {
        for (int i = 0; i < n && !l->side->failed; i++)
            take(l, &wc[i], l->one_cq ? wc[i].opcode & IBV_WC_RECV : cq == l->e->recv_cq);
        if (l->side->failed) return -1;
        taken += n;
    }
    return n < 0 ? n : taken;
}

static void await_messages(struct lanes *l, unsigned count, enum waiting waiting) {
    struct side *s = l->side;
    uint64_t end = deadline();
    for (unsigned got = 0; got < count;) {
        if (waiting != POLLS) need(s, !ibv_req_notify_cq(l->e->recv_cq, waiting == SLEEPS_FOR_SOLICITED));
        int n = take_all(l, l->e->recv_cq);
        need(s, n >= 0 && now_ns() < end);
        got += (unsigned)n;
        if (waiting == POLLS || got >= count) continue;
        struct ibv_cq *cq;
        void *context;
        need(s, fd_readable(l->e->channel->fd, WAIT_MS) && !ibv_get_cq_event(l->e->channel, &cq, &context));
        need(s, cq == l->e->recv_cq);
        ibv_ack_cq_events(cq, 1);
    }
}

static void await_sent(struct lanes *l, unsigned count) {
    uint64_t end = deadline();
    for (unsigned got = 0; got < count;) {
        int n = take_all(l, l->e->send_cq);
        need(l->side, n >= 0 && now_ns() < end);
        got += (unsigned)n;
    }
}

// One end's messages of a round: a few lanes, most often the same ones. Both ends work it out for themselves.
static unsigned burst(struct lanes *l, uint64_t *random, bool sends) {
    unsigned total = 0;
    for (unsigned k = 0; k < ACTIVE; k++) {
        uint64_t choice = random_next(random);
        // Lanes of a round are k modulo ACTIVE: each is there once.
        unsigned lane = choice % 8 ? k : k + ACTIVE * (unsigned)((choice >> 8) % (l->count / ACTIVE));
        unsigned messages = 1 + (unsigned)(choice >> 32) % BURST_MAX;
        total += messages;
        for (unsigned i = 0; sends && i < messages; i++)
            if (send_next(l, lane, i + 1 == messages ? IBV_SEND_SOLICITED : 0))
                fail(l->side, __FILE__, __LINE__, "lane %u: no room", lane);
    }
    return total;
}

static void few_of_many(struct side *s, struct endpoint *e, enum waiting waiting) {
    struct lanes *l = calloc(1, sizeof *l);
    uint64_t random = case_seed;
    lanes_open(l, s, e, LANES, waiting != POLLS);
    for (unsigned turn = 0; turn < 8 * case_rounds && !s->failed; turn++) {
        bool sends = turn % 2 == s->role;
        unsigned count = burst(l, &random, sends);
        if (s->failed) break;
        sends ? await_sent(l, count) : await_messages(l, count, waiting);
    }
    lanes_close(l);
}

static void few_of_many_polled(struct side *s, struct endpoint *e) { few_of_many(s, e, POLLS); }
static void few_of_many_by_events(struct side *s, struct endpoint *e) { few_of_many(s, e, SLEEPS); }
static void few_of_many_solicited(struct side *s, struct endpoint *e) { few_of_many(s, e, SLEEPS_FOR_SOLICITED); }

// Both ends send in each turn, over a thousand QPs that have one CQ between them; the last turn takes all of them.
static void all_on_one_cq(struct side *s, struct endpoint *e) {
    struct lanes *l = calloc(1, sizeof *l);
    uint64_t random[] = {case_seed, case_seed + 1};
    unsigned sent = 0, received = 0, turns = 2 * case_rounds;
    l->one_cq = true;
    lanes_open(l, s, e, LANES_MAX, false);
    for (unsigned turn = 0; turn <= turns && !s->failed; turn++) {
        bool is_last = turn == turns;
        received += is_last ? l->count : burst(l, &random[1 - s->role], false);
        sent += is_last ? l->count : burst(l, &random[s->role], true);
        for (unsigned i = 0; is_last && i < l->count && !s->failed; i++)
            if (send_next(l, i, 0)) fail(s, __FILE__, __LINE__, "lane %u: no room", i);
        uint64_t end = deadline();
        while (!s->failed && (l->taken_sent < sent || l->taken_received < received))
            if (take_all(l, e->recv_cq) < 0 || now_ns() > end) fail(s, __FILE__, __LINE__, "completions are missing");
    }
    if (!s->failed && (l->taken_sent != sent || l->taken_received != received))
        fail(s, __FILE__, __LINE__, "completions of nothing");
    lanes_close(l);
}

struct poster {
    struct lanes *l;
    unsigned number;
    bool failed;
};

// Posts on its own lane while another thread polls.
static void *post_many(void *argument) {
    struct poster *p = argument;
    struct lane *lane = &p->l->lane[p->number];
    uint64_t end = deadline();
    while (lane->sent < p->l->messages && !p->failed) {
        // Acquire; partner: `take_sent`.
        bool full = lane->sent - atomic_load_explicit(&lane->done, memory_order_acquire) >= BURST_MAX;
        if (full) sched_yield();
        else p->failed = send_next(p->l, p->number, 0);
        p->failed |= now_ns() > end;
    }
    return NULL;
}

static void threads_share_cq(struct side *s, struct endpoint *e) {
    struct lanes *l = calloc(1, sizeof *l);
    lanes_open(l, s, e, THREADS, false);
    l->messages = 50 * case_rounds;
    pthread_t threads[THREADS];
    struct poster posters[THREADS];
    for (unsigned i = 0; s->role == ROLE_A && i < THREADS; i++) {
        posters[i] = (struct poster){l, i, s->failed};
        pthread_create(&threads[i], NULL, post_many, &posters[i]);
    }
    if (!s->failed) s->role == ROLE_A ? await_sent(l, THREADS * l->messages) : await_messages(l, THREADS * l->messages, POLLS);
    for (unsigned i = 0; s->role == ROLE_A && i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        if (posters[i].failed) fail(s, __FILE__, __LINE__, "thread %u could not post", i);
    }
    lanes_close(l);
}

struct shared_poster {
    struct endpoint *e;
    unsigned number, messages;
    int rc;
};

// Posts on the one QP that all share; when the queue is full, tries again.
static void *post_on_shared(void *argument) {
    struct shared_poster *p = argument;
    uint64_t end = deadline();
    for (unsigned i = 0; i < p->messages && !p->rc;) {
        uint32_t what = p->number << 24 | i;
        struct ibv_sge sge = {(uintptr_t)p->e->memory + p->number * SLOT, SLOT, p->e->mr->lkey};
        struct ibv_send_wr wr = {.wr_id = what, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM,
                                 .imm_data = htonl(what)};
        int rc = post_work(p->e, &wr);
        if (!rc) i++;
        else if (rc != ENOMEM || now_ns() > end) p->rc = rc;
    }
    return NULL;
}

// The order in which each end saw the messages: they have to be the same, with each thread's in its order.
static void compare_orders(struct side *s, const uint32_t *seen, unsigned count) {
    uint32_t next[THREADS] = {0}, *theirs = calloc(count, sizeof *theirs);
    for (unsigned i = 0; i < count; i++) {
        need(s, seen[i] >> 24 < THREADS && (seen[i] & 0xffffff) == next[seen[i] >> 24]);
        next[seen[i] >> 24]++;
    }
    need(s, socket_swap(s->sock, seen, theirs, count * sizeof *theirs));
    need(s, !memcmp(seen, theirs, count * sizeof *theirs));
    free(theirs);
}

static void take_order(struct side *s, struct endpoint *e, uint32_t *seen, unsigned count) {
    struct ibv_wc wc;
    for (unsigned i = 0; i < count; i++) {
        need(s, poll_one(s->role == ROLE_A ? e->send_cq : e->recv_cq, &wc, WAIT_MS));
        need_status(s, wc, IBV_WC_SUCCESS);
        seen[i] = s->role == ROLE_A ? (uint32_t)wc.wr_id : ntohl(wc.imm_data);
        if (s->role == ROLE_A) continue;
        need(s, holds(e->memory + (THREADS + wc.wr_id) * SLOT, SLOT, seen[i] >> 24));
        need(s, !post_recv(e, wc.wr_id, (THREADS + wc.wr_id) * SLOT, SLOT));
    }
}

static void threads_share_qp(struct side *s, struct endpoint *e) {
    enum { RECEIVES = 48 };
    unsigned count = THREADS * 50 * case_rounds;
    need(s, endpoint_open(e, &(struct options){0}));
    for (unsigned i = 0; i < THREADS; i++) fill(e->memory + i * SLOT, SLOT, i);
    need(s, endpoint_to_init(e));
    for (unsigned i = 0; i < RECEIVES; i++) need(s, !post_recv(e, i, (THREADS + i) * SLOT, SLOT));
    need(s, endpoint_connect(s, e));
    uint32_t *seen = calloc(count, sizeof *seen);
    pthread_t threads[THREADS];
    struct shared_poster posters[THREADS];
    for (unsigned i = 0; s->role == ROLE_A && i < THREADS; i++) {
        posters[i] = (struct shared_poster){e, i, 50 * case_rounds, 0};
        pthread_create(&threads[i], NULL, post_on_shared, &posters[i]);
    }
    take_order(s, e, seen, count);
    for (unsigned i = 0; s->role == ROLE_A && i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        if (posters[i].rc) fail(s, __FILE__, __LINE__, "thread %u: post gave %d", i, posters[i].rc);
    }
    if (!s->failed) compare_orders(s, seen, count);
    free(seen);
}

// A message sent successfully is there, however slowly it is taken and whatever becomes of its
// sender meanwhile.
enum { WARM_UP = 200, LEFT = 220, LEFT_RECEIVES = 256, SLOW_MS = 1300 };

static void take_left(struct side *s, struct endpoint *e, unsigned from, unsigned until, bool again) {
    struct ibv_wc wc;
    for (unsigned i = from; i < until; i++) {
        unsigned slot = i % LEFT_RECEIVES;
        need(s, poll_one(e->recv_cq, &wc, WAIT_MS));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.wr_id == slot && wc.byte_len == 64 && holds(e->memory + slot * 64, 64, i));
        if (again) need(s, !post_recv(e, slot, slot * 64, 64));
    }
}

static void send_left(struct side *s, struct endpoint *e, unsigned from, unsigned until) {
    struct ibv_wc wc;
    for (unsigned i = from; i < until; i++) {
        fill(e->memory, 64, i);
        need(s, !post_send(e, i, 0, 64, 0));
        need(s, poll_one(e->send_cq, &wc, WAIT_MS));
        need_status(s, wc, IBV_WC_SUCCESS);
    }
}

// Modifies its QP, which ends the direct path, and goes on; or is gone.
static void leave(struct side *s, struct endpoint *e, bool stays) {
    struct ibv_qp_attr attr = {.min_rnr_timer = 2};
    if (!stays) {
        need(s, !ibv_destroy_qp(e->qp));
        e->qp = NULL;
        return;
    }
    need(s, !ibv_modify_qp(e->qp, &attr, IBV_QP_MIN_RNR_TIMER));
    send_left(s, e, WARM_UP + LEFT, WARM_UP + LEFT_RECEIVES);
}

static void left(struct side *s, struct endpoint *e, bool stays) {
    need(s, endpoint_open(e, &(struct options){.type = case_type, .recv_wr = LEFT_RECEIVES, .cqe = 2 * LEFT_RECEIVES}));
    need(s, endpoint_to_init(e));
    for (unsigned i = 0; i < LEFT_RECEIVES; i++) need(s, !post_recv(e, i, i * 64, 64));
    need(s, endpoint_connect(s, e));
    s->role == ROLE_A ? send_left(s, e, 0, WARM_UP) : take_left(s, e, 0, WARM_UP, true);
    need(s, !s->failed && meet(s));
    if (s->role == ROLE_A) send_left(s, e, WARM_UP, WARM_UP + LEFT);
    if (s->role == ROLE_A && !s->failed) leave(s, e, stays);
    need(s, !s->failed && meet(s));
    if (s->role == ROLE_A) return;
    take_left(s, e, WARM_UP, WARM_UP + 1, false);
    sleep_ms(SLOW_MS);
    if (!s->failed) take_left(s, e, WARM_UP + 1, WARM_UP + (stays ? LEFT_RECEIVES : LEFT), false);
}

static void left_by_who_is_gone(struct side *s, struct endpoint *e) { left(s, e, false); }
static void left_before_a_change(struct side *s, struct endpoint *e) { left(s, e, true); }

const struct test_case lane_cases[] = {
    {"left_by_who_is_gone", left_by_who_is_gone},
    {"left_before_a_change", left_before_a_change},
    {"few_of_many_polled", few_of_many_polled},
    {"few_of_many_by_events", few_of_many_by_events},
    {"few_of_many_solicited", few_of_many_solicited},
    {"all_on_one_cq", all_on_one_cq},
    {"threads_share_cq", threads_share_cq},
    {"threads_share_qp", threads_share_qp},
    {NULL, NULL},
};
