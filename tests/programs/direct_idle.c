// Two ends that sleep, with a path between them that needs no router.
#include "cases.h"

#include <signal.h>
#include <stdio.h>

enum { WARM_UP = 300, IDLE_MS = 15000 };

static void sleep_for_event(struct side *s, struct endpoint *e, unsigned ms) {
    struct ibv_cq *cq;
    void *context;
    struct ibv_wc wc;
    need(s, !ibv_req_notify_cq(e->recv_cq, 0));
    for (int n; (n = ibv_poll_cq(e->recv_cq, 1, &wc)) == 0;) {
        need(s, fd_readable(e->channel->fd, ms) && !ibv_get_cq_event(e->channel, &cq, &context));
        ibv_ack_cq_events(cq, 1);
        need(s, !ibv_req_notify_cq(e->recv_cq, 0));
    }
    need_status(s, wc, IBV_WC_SUCCESS);
    need(s, !post_recv(e, wc.wr_id, 4096, 64));
}

static void reply(struct side *s, struct endpoint *e, uint64_t id) {
    struct ibv_wc wc;
    need(s, !post_send(e, id, 0, 64, 0));
    need(s, poll_one(e->send_cq, &wc, 5000));
    need_status(s, wc, IBV_WC_SUCCESS);
}

// Until the time is over; an event of what was taken already may still come.
static void sleep_well(struct side *s, struct endpoint *e) {
    uint64_t end = now_ns() + IDLE_MS * 1000000ull;
    struct ibv_cq *cq;
    void *context;
    need(s, !ibv_req_notify_cq(e->recv_cq, 0));
    for (uint64_t now; (now = now_ns()) < end;) {
        if (!fd_readable(e->channel->fd, (unsigned)((end - now) / 1000000 + 1))) continue;
        need(s, !ibv_get_cq_event(e->channel, &cq, &context));
        ibv_ack_cq_events(cq, 1);
    }
}

// Says `idle` when it falls asleep; the test looks at what it then takes of the processors.
static void idle(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.events = true}));
    need(s, endpoint_to_init(e));
    for (unsigned i = 0; i < 8; i++) need(s, !post_recv(e, i, 4096, 64));
    need(s, endpoint_connect(s, e));
    for (unsigned i = 0; i < WARM_UP && !s->failed; i++) {
        if (s->role == ROLE_A) reply(s, e, i);
        if (!s->failed) sleep_for_event(s, e, 5000);
        if (s->role == ROLE_B && !s->failed) reply(s, e, i);
    }
    need(s, !s->failed && meet(s));
    printf("idle\n");
    if (s->role == ROLE_A) {
        sleep_well(s, e);
        if (!s->failed) reply(s, e, WARM_UP);
    } else {
        sleep_for_event(s, e, 2 * IDLE_MS);
    }
}

enum { HELD = 500, HELD_DEPTH = 128 };

static void say_and_wait(const char *what) {
    sigset_t go_on;
    int signal;
    sigemptyset(&go_on);
    sigaddset(&go_on, SIGUSR1);
    printf("%s\n", what);
    sigwait(&go_on, &signal);
}

static void hold(struct side *s, struct endpoint *e, struct endpoint *held) {
    struct ibv_qp_init_attr init = {
        .send_cq = e->send_cq, .recv_cq = e->recv_cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = HELD_DEPTH, .max_recv_wr = HELD_DEPTH, .max_send_sge = 1, .max_recv_sge = 1}};
    *held = *e;
    need(s, (held->qp = ibv_create_qp(e->pd, &init)));
    held->mine.qpn = held->qp->qp_num;
    need(s, endpoint_to_init(held) && socket_swap(s->sock, &held->mine, &held->peer, sizeof held->mine));
    need(s, endpoint_to_rtr(held) && endpoint_to_rts(held));
}

// Connections that nothing was ever sent by. The test looks at what they take when it says `held`; SIGUSR1 lets it go
// on.
static void held_connections(struct side *s, struct endpoint *e) {
    static struct endpoint held[HELD];
    sigset_t go_on;
    sigemptyset(&go_on);
    sigaddset(&go_on, SIGUSR1);
    sigprocmask(SIG_BLOCK, &go_on, NULL);
    need(s, endpoint_open(e, &(struct options){0}) && endpoint_connect(s, e));
    say_and_wait("bare");
    for (unsigned i = 0; i < HELD && !s->failed; i++) hold(s, e, &held[i]);
    if (!s->failed && !meet(s)) fail(s, __FILE__, __LINE__, "the other side failed");
    if (!s->failed) say_and_wait("held");
    if (!s->failed && !meet(s)) fail(s, __FILE__, __LINE__, "the other side failed");
    for (unsigned i = 0; i < HELD; i++)
        if (held[i].qp && ibv_destroy_qp(held[i].qp)) fail(s, __FILE__, __LINE__, "destroy qp");
}

const struct test_case idle_cases[] = {
    {"idle", idle},
    {NULL, NULL},
};

const struct test_case held_cases[] = {
    {"held_connections", held_connections},
    {NULL, NULL},
};
