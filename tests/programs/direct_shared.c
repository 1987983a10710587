// Queue pairs that take their RECVs from an SRQ: a message takes one RECV, whichever way it comes, each queue pair
// keeps its order, and a RECV that is posted is withheld from nobody.
#include "cases.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LANES_MAX = 64,
    SLOT = 512,
    BURST_MAX = 24, // messages of a lane in a round
    LANE_SLOTS = 32, // sources of a lane
    RECEIVES_MAX = 256,
    LANDING = LANES_MAX * LANE_SLOTS * SLOT,
    BYTES = LANDING + RECEIVES_MAX * SLOT,
    PIECES = 5, // of a message that only the router takes
    WARM_UP = 200, // far more than it takes to get a direct ring
    WAIT_MS = 15000,
};
#define ROUTED (1u << 31) // beside a request's flags: by the router
enum waiting { POLLS, SLEEPS, SLEEPS_FOR_SOLICITED };

struct lane {
    struct endpoint e; // its QP's own; all else is borrowed
    uint32_t sent, received;
};

struct lanes {
    struct side *side;
    struct endpoint *e;
    unsigned count;
    struct lane lane[LANES_MAX];
};

static size_t landing(uint64_t id) { return LANDING + (size_t)id * SLOT; }

static size_t source(unsigned lane, uint32_t number) { return (lane * LANE_SLOTS + number % LANE_SLOTS) * SLOT; }

static uint32_t length_of(unsigned lane, uint32_t number) { return PIECES + (lane * 37 + number * 101) % (SLOT - PIECES + 1); }

static uint64_t seed_of(enum role sender, unsigned lane, uint32_t number) {
    return (uint64_t)(sender == ROLE_A) << 50 | (uint64_t)lane << 32 | number;
}

static bool repost(struct endpoint *e, uint64_t id) { return !post_recv(e, id, landing(id), SLOT); }

static void lanes_open(struct lanes *l, struct side *s, struct endpoint *e, unsigned count, unsigned receives,
                       const struct options *how) {
    struct options options = *how;
    l->side = s, l->e = e, l->count = count;
    options.srq = true, options.bytes = BYTES, options.cqe = 4096, options.recv_wr = receives;
    need(s, endpoint_open(e, &options));
    for (unsigned i = 0; i < count; i++) {
        struct endpoint *lane = &l->lane[i].e;
        struct ibv_qp_init_attr init = {.send_cq = e->send_cq, .recv_cq = e->recv_cq, .srq = e->srq, .qp_type = IBV_QPT_RC,
                                        .sq_sig_all = 1, .cap = {.max_send_wr = 64, .max_send_sge = PIECES}};
        *lane = *e;
        need(s, (lane->qp = ibv_create_qp(e->pd, &init)));
        lane->mine.qpn = lane->qp->qp_num;
        need(s, endpoint_to_init(lane));
        need(s, socket_swap(s->sock, &lane->mine, &lane->peer, sizeof lane->mine));
        need(s, endpoint_to_rtr(lane) && endpoint_to_rts(lane));
    }
    for (unsigned i = 0; i < receives; i++) need(s, repost(e, i));
    need(s, meet(s));
}

// The runner closes the rest.
static void lanes_close(struct lanes *l) {
    if (!l->side->failed && !meet(l->side)) fail(l->side, __FILE__, __LINE__, "the other side failed");
    for (unsigned i = 0; i < l->count; i++)
        if (l->lane[i].e.qp && ibv_destroy_qp(l->lane[i].e.qp)) fail(l->side, __FILE__, __LINE__, "destroy qp");
    free(l);
}

static int send_with(struct lanes *l, unsigned lane, enum ibv_wr_opcode opcode, unsigned flags) {
    uint32_t number = l->lane[lane].sent++, length = length_of(lane, number);
    struct endpoint *e = &l->lane[lane].e;
    fill(e->memory + source(lane, number), length, seed_of(l->side->role, lane, number));
    struct ibv_sge sges[PIECES];
    for (unsigned i = 0; i < PIECES; i++)
        sges[i] = (struct ibv_sge){(uintptr_t)e->memory + source(lane, number) + i, 1, e->mr->lkey};
    unsigned last = flags & ROUTED ? PIECES - 1 : 0;
    sges[last].length = length - last;
    struct ibv_send_wr wr = {.wr_id = (uint64_t)lane << 32 | number, .sg_list = sges, .num_sge = (int)last + 1,
                             .opcode = opcode, .imm_data = htonl(number), .send_flags = flags & ~ROUTED};
    if (opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
        wr.wr.rdma.rkey = e->peer.rkey; // onto the same bytes there, which nobody reads
        wr.wr.rdma.remote_addr = e->peer.memory + source(lane, number);
        wr.num_sge = 0;
    }
    return post_work(e, &wr);
}

static void take_sent(struct lanes *l, unsigned count) {
    struct ibv_wc wc;
    for (unsigned i = 0; i < count; i++) {
        need(l->side, poll_one(l->e->send_cq, &wc, WAIT_MS));
        need_status(l->side, wc, IBV_WC_SUCCESS);
    }
}

// Each lane's messages come in their order, in whichever RECV.
static void take_received(struct lanes *l, const struct ibv_wc *wc, bool again) {
    struct side *s = l->side;
    need_status(s, *wc, IBV_WC_SUCCESS);
    unsigned i = 0;
    while (i < l->count && l->lane[i].e.qp->qp_num != wc->qp_num) i++;
    need(s, i < l->count && wc->wr_id < RECEIVES_MAX);
    uint32_t number = l->lane[i].received++;
    need(s, !(wc->wc_flags & IBV_WC_WITH_IMM) || ntohl(wc->imm_data) == number);
    if (wc->opcode == IBV_WC_RECV) {
        need(s, wc->byte_len == length_of(i, number));
        uint64_t seed = seed_of(s->role == ROLE_A ? ROLE_B : ROLE_A, i, number);
        need(s, holds(l->e->memory + landing(wc->wr_id), wc->byte_len, seed));
    }
    need(s, !again || repost(l->e, wc->wr_id));
}

static void await_messages(struct lanes *l, unsigned count, enum waiting waiting, bool again) {
    struct side *s = l->side;
    uint64_t end = now_ns() + WAIT_MS * 1000000ull;
    for (unsigned got = 0; got < count && !s->failed;) {
        if (waiting != POLLS) need(s, !ibv_req_notify_cq(l->e->recv_cq, waiting == SLEEPS_FOR_SOLICITED));
        struct ibv_wc wc[16];
        int n;
        while (got < count && (n = ibv_poll_cq(l->e->recv_cq, count - got < 16 ? (int)(count - got) : 16, wc))) {
            need(s, n > 0);
            for (int i = 0; i < n && !s->failed; i++) take_received(l, &wc[i], again);
            got += (unsigned)n;
        }
        need(s, now_ns() < end);
        if (waiting == POLLS || got >= count) continue;
        struct ibv_cq *cq;
        void *context;
        need(s, fd_readable(l->e->channel->fd, WAIT_MS) && !ibv_get_cq_event(l->e->channel, &cq, &context));
        ibv_ack_cq_events(cq, 1);
    }
}

// One end's messages of a round, of a few lanes. Both ends work it out for themselves.
static unsigned burst(struct lanes *l, uint64_t *random, bool sends) {
    unsigned total = 0;
    for (unsigned k = 0; k < 4; k++) {
        uint64_t choice = random_next(random);
        unsigned lane = choice % 4 ? k : k + 4 * (unsigned)((choice >> 8) % (l->count / 4));
        unsigned messages = 1 + (unsigned)(choice >> 32) % BURST_MAX;
        total += messages;
        for (unsigned i = 0; sends && i < messages; i++) {
            bool writes = (choice >> (40 + i % 16) & 7) == 0;
            if (send_with(l, lane, writes ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_SEND_WITH_IMM,
                          i + 1 == messages ? IBV_SEND_SOLICITED : 0))
                fail(l->side, __FILE__, __LINE__, "lane %u: no room", lane);
        }
    }
    return total;
}

static void lanes_share(struct side *s, struct endpoint *e, unsigned receives, enum waiting waiting) {
    struct lanes *l = calloc(1, sizeof *l);
    uint64_t random = case_seed;
    lanes_open(l, s, e, LANES_MAX, receives, &(struct options){.events = waiting != POLLS});
    for (unsigned turn = 0; turn < 4 * case_rounds && !s->failed; turn++) {
        bool sends = turn % 2 == s->role;
        unsigned count = burst(l, &random, sends);
        if (!s->failed) sends ? take_sent(l, count) : await_messages(l, count, waiting, true);
    }
    lanes_close(l);
}

static void lanes_share_many(struct side *s, struct endpoint *e) { lanes_share(s, e, 128, POLLS); }
static void lanes_share_few(struct side *s, struct endpoint *e) { lanes_share(s, e, 5, POLLS); }
static void lanes_share_one(struct side *s, struct endpoint *e) { lanes_share(s, e, 1, POLLS); }
static void lanes_share_by_events(struct side *s, struct endpoint *e) { lanes_share(s, e, 32, SLEEPS); }
static void lanes_share_few_by_events(struct side *s, struct endpoint *e) { lanes_share(s, e, 3, SLEEPS); }
static void lanes_share_solicited(struct side *s, struct endpoint *e) { lanes_share(s, e, 256, SLEEPS_FOR_SOLICITED); }

static void warm_up(struct lanes *l, unsigned lane) {
    for (unsigned i = 0; i < WARM_UP && !l->side->failed; i++) {
        if (l->side->role == ROLE_B) {
            await_messages(l, 1, POLLS, true);
        } else {
            need(l->side, !send_with(l, lane, IBV_WR_SEND_WITH_IMM, 0));
            take_sent(l, 1);
        }
        if (!l->side->failed && !meet(l->side)) fail(l->side, __FILE__, __LINE__, "the other side failed");
    }
}

// Takes what is posted, and posts none again: so many are left then.
static void leave_receives(struct lanes *l, unsigned from, unsigned left) {
    for (unsigned i = left; i < from && !l->side->failed; i++) {
        if (l->side->role == ROLE_B) {
            await_messages(l, 1, POLLS, false);
            continue;
        }
        need(l->side, !send_with(l, 0, IBV_WR_SEND_WITH_IMM, 0));
        take_sent(l, 1);
    }
    if (!l->side->failed && !meet(l->side)) fail(l->side, __FILE__, __LINE__, "the other side failed");
}

// A sender that does not retry learns of the first message for which there is no RECV; those before are there.
static void missing_receives_are_told(struct side *s, struct endpoint *e) {
    enum { RECEIVES = 16, LEFT = 5 };
    struct lanes *l = calloc(1, sizeof *l);
    lanes_open(l, s, e, 1, RECEIVES, &(struct options){.rnr_retry = NEVER});
    if (!s->failed) warm_up(l, 0);
    if (!s->failed) leave_receives(l, RECEIVES, LEFT);
    if (!s->failed && s->role == ROLE_A) {
        struct ibv_wc wc;
        for (unsigned i = 0; i <= LEFT; i++)
            if (send_with(l, 0, IBV_WR_SEND_WITH_IMM, 0)) fail(s, __FILE__, __LINE__, "post");
        take_sent(l, LEFT);
        if (!s->failed && (!poll_one(e->send_cq, &wc, WAIT_MS) || wc.status != IBV_WC_RNR_RETRY_EXC_ERR))
            fail(s, __FILE__, __LINE__, "not RNR");
    }
    if (!s->failed && meet(s) && s->role == ROLE_B) await_messages(l, LEFT, POLLS, false);
    lanes_close(l);
}

// The limit event comes once fewer are posted, whoever took them.
static void limit_is_told(struct side *s, struct endpoint *e) {
    enum { RECEIVES = 48, LIMIT = 20 };
    struct lanes *l = calloc(1, sizeof *l);
    lanes_open(l, s, e, 1, RECEIVES, &(struct options){0});
    if (!s->failed) warm_up(l, 0);
    for (unsigned round = 0; round < 3 && !s->failed; round++) {
        struct ibv_srq_attr limit = {.srq_limit = LIMIT};
        if (s->role == ROLE_B && ibv_modify_srq(e->srq, &limit, IBV_SRQ_LIMIT)) fail(s, __FILE__, __LINE__, "limit");
        if (!s->failed) leave_receives(l, RECEIVES, LIMIT);
        if (s->role == ROLE_B && fd_readable(e->context->async_fd, 50)) fail(s, __FILE__, __LINE__, "an event too early");
        if (!s->failed && !meet(s)) fail(s, __FILE__, __LINE__, "the other side failed");
        if (!s->failed) leave_receives(l, LIMIT, LIMIT - 1);
        struct ibv_async_event event;
        bool told = s->role == ROLE_A || (fd_readable(e->context->async_fd, WAIT_MS) &&
                                          !ibv_get_async_event(e->context, &event) &&
                                          event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == e->srq);
        if (!told) fail(s, __FILE__, __LINE__, "no limit event");
        if (told && s->role == ROLE_B) ibv_ack_async_event(&event);
        if (!s->failed) leave_receives(l, LIMIT - 1, 0);
        if (s->role == ROLE_B && fd_readable(e->context->async_fd, 50)) fail(s, __FILE__, __LINE__, "a second event");
        for (unsigned i = 0; s->role == ROLE_B && i < RECEIVES; i++)
            if (!s->failed && !repost(e, i)) fail(s, __FILE__, __LINE__, "post");
        if (!s->failed && !meet(s)) fail(s, __FILE__, __LINE__, "the other side failed");
    }
    lanes_close(l);
}

struct later {
    struct endpoint *e;
    unsigned count;
    bool failed;
};

static void *post_later(void *argument) {
    struct later *later = argument;
    sleep_ms(60);
    for (unsigned i = 0; i < later->count; i++) later->failed |= !repost(later->e, i);
    return NULL;
}

// One lane's sender has been told of RECVs; another's messages take all of them by the router. Nobody waits for a
// message that the first one has not sent. Those that it sends then wait for the next posts, keep their order, and wake
// who sleeps.
static void nothing_is_withheld(struct side *s, struct endpoint *e) {
    enum { RECEIVES = 24, LATE = 4 };
    struct lanes *l = calloc(1, sizeof *l);
    lanes_open(l, s, e, 2, RECEIVES, &(struct options){.events = true});
    if (!s->failed) warm_up(l, 0);
    for (unsigned round = 0; round < case_rounds && !s->failed; round++) {
        if (s->role == ROLE_A) {
            for (unsigned i = 0; i < RECEIVES && !s->failed; i++)
                if (send_with(l, 1, IBV_WR_SEND_WITH_IMM, ROUTED)) fail(s, __FILE__, __LINE__, "post");
            take_sent(l, RECEIVES);
            if (!s->failed && !meet(s)) fail(s, __FILE__, __LINE__, "the other side failed");
            for (unsigned i = 0; i < LATE && !s->failed; i++)
                if (send_with(l, 0, IBV_WR_SEND_WITH_IMM, i + 1 < LATE ? 0 : ROUTED))
                    fail(s, __FILE__, __LINE__, "post");
            take_sent(l, LATE);
        } else {
            if (!meet(s)) fail(s, __FILE__, __LINE__, "the other side failed");
            await_messages(l, RECEIVES, POLLS, false);
            struct later later = {e, RECEIVES, false};
            pthread_t thread;
            if (!s->failed && pthread_create(&thread, NULL, post_later, &later)) fail(s, __FILE__, __LINE__, "thread");
            if (!s->failed) {
                await_messages(l, LATE, SLEEPS, true);
                pthread_join(thread, NULL);
                if (later.failed) fail(s, __FILE__, __LINE__, "post");
            }
        }
        if (!s->failed && !meet(s)) fail(s, __FILE__, __LINE__, "the other side failed");
    }
    lanes_close(l);
}

static bool take_events(struct endpoint *e, unsigned ms) {
    struct ibv_cq *cq;
    void *context;
    bool is_told = fd_readable(e->channel->fd, ms);
    if (is_told && !ibv_get_cq_event(e->channel, &cq, &context)) ibv_ack_cq_events(cq, 1);
    return is_told;
}

// Two messages for one RECV, and who is asleep has looked at both: the next RECV wakes.
static void receive_comes_later(struct side *s, struct endpoint *e) {
    enum { RECEIVES = 24 };
    struct lanes *l = calloc(1, sizeof *l);
    lanes_open(l, s, e, 2, RECEIVES, &(struct options){.events = true});
    if (!s->failed) warm_up(l, 0);
    for (unsigned round = 0; round < 6 && !s->failed; round++) {
        // The first lane's sender has been told of RECVs, and the second one's messages take all of them.
        for (unsigned i = 0; s->role == ROLE_A && i < RECEIVES && !s->failed; i++)
            if (send_with(l, 1, IBV_WR_SEND_WITH_IMM, ROUTED)) fail(s, __FILE__, __LINE__, "post");
        if (s->role == ROLE_A && !s->failed) take_sent(l, RECEIVES);
        if (s->role == ROLE_B) await_messages(l, RECEIVES, POLLS, false);
        if (s->role == ROLE_B && !s->failed && !repost(e, 0)) fail(s, __FILE__, __LINE__, "post");
        if (!s->failed && !meet(s)) fail(s, __FILE__, __LINE__, "the other side failed");
        for (unsigned i = 0; s->role == ROLE_A && i < 2 && !s->failed; i++)
            if (send_with(l, 0, IBV_WR_SEND_WITH_IMM, 0)) fail(s, __FILE__, __LINE__, "post");
        if (!s->failed && !meet(s)) fail(s, __FILE__, __LINE__, "the other side failed");
        struct ibv_wc wc;
        if (s->role == ROLE_B && !s->failed) {
            bool is_armed = !ibv_req_notify_cq(e->recv_cq, 0);
            while (is_armed && take_events(e, 100)) is_armed = !ibv_req_notify_cq(e->recv_cq, 0);
            if (!is_armed || ibv_poll_cq(e->recv_cq, 1, &wc) != 1) fail(s, __FILE__, __LINE__, "no message");
            if (!s->failed) take_received(l, &wc, false);
            if (!s->failed && ibv_poll_cq(e->recv_cq, 1, &wc)) fail(s, __FILE__, __LINE__, "a message without RECV");
            if (!s->failed && !repost(e, 1)) fail(s, __FILE__, __LINE__, "post");
            if (!s->failed && !take_events(e, 1000)) fail(s, __FILE__, __LINE__, "no event");
            if (!s->failed) await_messages(l, 1, POLLS, false);
        }
        for (unsigned i = 0; s->role == ROLE_B && i < RECEIVES && !s->failed; i++)
            if (!repost(e, i)) fail(s, __FILE__, __LINE__, "post");
        if (s->role == ROLE_A && !s->failed) take_sent(l, 2);
        if (!s->failed && !meet(s)) fail(s, __FILE__, __LINE__, "the other side failed");
    }
    lanes_close(l);
}

// More messages go past the router between two that it delivers than any queue holds.
static void long_runs_keep_their_order(struct side *s, struct endpoint *e) {
    enum { RECEIVES = 128, BATCH = 32, RUN = 1100 };
    struct lanes *l = calloc(1, sizeof *l);
    lanes_open(l, s, e, 1, RECEIVES, &(struct options){0});
    if (!s->failed) warm_up(l, 0);
    for (unsigned i = 0; i < 2 * RUN && !s->failed; i++) {
        unsigned flags = i % RUN == RUN - 1 ? ROUTED : 0;
        for (unsigned k = 0; s->role == ROLE_A && k < BATCH && !s->failed; k++)
            if (send_with(l, 0, IBV_WR_SEND_WITH_IMM, flags)) fail(s, __FILE__, __LINE__, "post");
        if (!s->failed) s->role == ROLE_A ? take_sent(l, BATCH) : await_messages(l, BATCH, POLLS, true);
        if (!s->failed && !meet(s)) fail(s, __FILE__, __LINE__, "the other side failed");
    }
    lanes_close(l);
}

// A message that was acknowledged is received, though the sender is gone, or the receiver's queue pair fails before it
// has polled.
static void acknowledged_stays(struct side *s, struct endpoint *e, bool fails) {
    enum { RECEIVES = 64, KEPT = 30 };
    struct lanes *l = calloc(1, sizeof *l);
    lanes_open(l, s, e, 1, RECEIVES, &(struct options){0});
    if (!s->failed) warm_up(l, 0);
    if (!s->failed && s->role == ROLE_A) {
        for (unsigned i = 0; i < KEPT; i++)
            if (send_with(l, 0, IBV_WR_SEND_WITH_IMM, 0)) fail(s, __FILE__, __LINE__, "post");
        take_sent(l, KEPT);
        if (!fails) {
            if (ibv_destroy_qp(l->lane[0].e.qp)) fail(s, __FILE__, __LINE__, "destroy qp");
            l->lane[0].e.qp = NULL;
        }
    }
    if (!s->failed && meet(s) && s->role == ROLE_B) {
        if (fails) {
            struct ibv_sge wrong = {(uintptr_t)e->memory, SLOT, e->mr->lkey ^ 0x5a5a00};
            struct ibv_send_wr request = {.wr_id = 7, .sg_list = &wrong, .num_sge = 1, .opcode = IBV_WR_SEND};
            struct ibv_wc wc;
            if (post_work(&l->lane[0].e, &request) || !poll_one(e->send_cq, &wc, WAIT_MS) ||
                wc.status != IBV_WC_LOC_PROT_ERR || qp_state(l->lane[0].e.qp) != IBV_QPS_ERR)
                fail(s, __FILE__, __LINE__, "the queue pair did not fail");
        }
        if (!s->failed) await_messages(l, KEPT, POLLS, true);
    }
    lanes_close(l);
}

static void left_by_who_is_gone(struct side *s, struct endpoint *e) { acknowledged_stays(s, e, false); }
static void left_to_who_fails(struct side *s, struct endpoint *e) { acknowledged_stays(s, e, true); }

// A queue pair that is destroyed gives the SRQ's RECVs back that its messages had not taken, others go on, and a new
// one in its place begins again.
static void queue_pairs_come_and_go(struct side *s, struct endpoint *e) {
    enum { RECEIVES = 32 };
    struct lanes *l = calloc(1, sizeof *l);
    lanes_open(l, s, e, 2, RECEIVES, &(struct options){0});
    for (unsigned round = 0; round < 4 && !s->failed; round++) {
        warm_up(l, round % 2);
        if (s->failed) break;
        struct lane *lane = &l->lane[round % 2];
        if (ibv_destroy_qp(lane->e.qp)) fail(s, __FILE__, __LINE__, "destroy qp");
        struct ibv_qp_init_attr init = {.send_cq = e->send_cq, .recv_cq = e->recv_cq, .srq = e->srq, .qp_type = IBV_QPT_RC,
                                        .sq_sig_all = 1, .cap = {.max_send_wr = 64, .max_send_sge = PIECES}};
        lane->e.qp = ibv_create_qp(e->pd, &init);
        lane->sent = lane->received = 0;
        if (!lane->e.qp) fail(s, __FILE__, __LINE__, "create qp");
        if (s->failed) break;
        lane->e.mine.qpn = lane->e.qp->qp_num;
        if (!endpoint_to_init(&lane->e) ||
            !socket_swap(s->sock, &lane->e.mine, &lane->e.peer, sizeof lane->e.mine) || !endpoint_to_rtr(&lane->e) ||
            !endpoint_to_rts(&lane->e) || !meet(s))
            fail(s, __FILE__, __LINE__, "connect");
    }
    if (!s->failed) warm_up(l, 0);
    if (!s->failed) leave_receives(l, RECEIVES, 0);
    lanes_close(l);
}

const struct test_case shared_cases[] = {
    {"shared_lanes_many", lanes_share_many},
    {"shared_lanes_few", lanes_share_few},
    {"shared_lanes_one", lanes_share_one},
    {"shared_lanes_by_events", lanes_share_by_events},
    {"shared_lanes_few_by_events", lanes_share_few_by_events},
    {"shared_lanes_solicited", lanes_share_solicited},
    {"shared_missing_receives_are_told", missing_receives_are_told},
    {"shared_limit_is_told", limit_is_told},
    {"shared_nothing_is_withheld", nothing_is_withheld},
    {"shared_receive_comes_later", receive_comes_later},
    {"shared_long_runs_keep_their_order", long_runs_keep_their_order},
    {"shared_left_by_who_is_gone", left_by_who_is_gone},
    {"shared_left_to_who_fails", left_to_who_fails},
    {"shared_queue_pairs_come_and_go", queue_pairs_come_and_go},
    {NULL, NULL},
};
