// Completion events, asynchronous events, and what a CQ does when it fills or changes its size.
#include "cases.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

// Takes the next event of the endpoint's channel.
static struct ibv_cq *next_event(struct endpoint *e, unsigned ms) {
    struct ibv_cq *cq = NULL;
    void *context = NULL;
    if (!fd_readable(e->channel->fd, ms) || ibv_get_cq_event(e->channel, &cq, &context)) return NULL;
    ibv_ack_cq_events(cq, 1);
    return context == e ? cq : NULL;
}

static void arrival(struct side *s, struct endpoint *e, unsigned flags, uint64_t id) {
    struct ibv_wc wc;
    need(s, meet(s));
    need(s, !post_send(e, id, 0, 64, flags));
    need(s, poll_one(e->send_cq, &wc, 5000));
    need_status(s, wc, IBV_WC_SUCCESS);
    need(s, meet(s));
}

static void event_for_each_arming(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.events = true}));
    need(s, endpoint_to_init(e));
    for (unsigned i = 0; s->role == ROLE_B && i < 20; i++) need(s, !post_recv(e, i, 0, 1000));
    need(s, endpoint_connect(s, e));
    struct ibv_wc wc;
    for (unsigned i = 0; i < 20; i++) {
        if (s->role == ROLE_A) {
            arrival(s, e, 0, i);
            if (s->failed) return;
            continue;
        }
        bool armed = i % 2 == 0;
        if (armed) need(s, !ibv_req_notify_cq(e->recv_cq, 0));
        need(s, meet(s));
        if (armed) need(s, next_event(e, 5000) == e->recv_cq);
        need(s, meet(s));
        if (!armed) need(s, !fd_readable(e->channel->fd, 5));
        need(s, poll_one(e->recv_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
    }
}

// A program that polls, finds nothing and arms must not sleep over completions that came in
// between; but an event is not repeated.
static void armed_late(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.events = true}));
    need(s, endpoint_to_init(e));
    for (unsigned i = 0; s->role == ROLE_B && i < 6; i++) need(s, !post_recv(e, i, 0, 1000));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A) {
        for (unsigned i = 0; i < 4 && !s->failed; i++) arrival(s, e, i == 3 ? IBV_SEND_SOLICITED : 0, i);
        return;
    }
    struct ibv_wc wc;
    need(s, meet(s) && meet(s));
    need(s, !fd_readable(e->channel->fd, 5));
    need(s, !ibv_req_notify_cq(e->recv_cq, 0));
    need(s, next_event(e, 5000) == e->recv_cq);
    need(s, !ibv_req_notify_cq(e->recv_cq, 0)); // unpolled, but reported
    need(s, !fd_readable(e->channel->fd, 30));
    need(s, meet(s) && meet(s));
    need(s, next_event(e, 5000) == e->recv_cq);
    for (unsigned i = 0; i < 2; i++) need(s, poll_one(e->recv_cq, &wc, 5000));
    need(s, meet(s) && meet(s));
    need(s, !ibv_req_notify_cq(e->recv_cq, 1)); // the one there is not solicited
    need(s, !fd_readable(e->channel->fd, 30));
    need(s, poll_one(e->recv_cq, &wc, 5000));
    need(s, meet(s) && meet(s));
    need(s, next_event(e, 5000) == e->recv_cq);
    need(s, poll_one(e->recv_cq, &wc, 5000));
    need(s, !ibv_resize_cq(e->recv_cq, 1000)); // what a resize carries over was reported too
    need(s, !ibv_req_notify_cq(e->recv_cq, 0));
    need(s, !fd_readable(e->channel->fd, 30));
}

// Armed for solicited completions: a plain message passes by in silence, a solicited one and an error speak.
static void solicited_only(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.events = true}));
    need(s, endpoint_to_init(e));
    for (unsigned i = 0; s->role == ROLE_B && i < 4; i++) need(s, !post_recv(e, i, 0, 1000));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A) {
        arrival(s, e, 0, 1);
        if (!s->failed) arrival(s, e, IBV_SEND_SOLICITED, 2);
        return;
    }
    struct ibv_wc wc;
    need(s, !ibv_req_notify_cq(e->recv_cq, 1));
    need(s, meet(s) && meet(s));
    need(s, !fd_readable(e->channel->fd, 30));
    need(s, meet(s) && meet(s));
    need(s, next_event(e, 5000) == e->recv_cq);
    for (unsigned i = 0; i < 2; i++) need(s, poll_one(e->recv_cq, &wc, 5000));
    need(s, !ibv_req_notify_cq(e->recv_cq, 1));
    need(s, qp_modify_state(e->qp, IBV_QPS_ERR));
    need(s, next_event(e, 5000) == e->recv_cq);
}

// One message at a time between two ends that sleep in poll(2): nothing is ever lost between arming and looking.
static void ping_pong_by_events(struct side *s, struct endpoint *e) {
    enum { ROUNDS = 1000 };
    need(s, endpoint_open(e, &(struct options){.events = true, .unsignaled = true, .recv_wr = 4}));
    need(s, !fcntl(e->channel->fd, F_SETFL, fcntl(e->channel->fd, F_GETFL) | O_NONBLOCK));
    need(s, endpoint_to_init(e));
    need(s, !post_recv(e, 0, 0, 1000));
    need(s, !ibv_req_notify_cq(e->recv_cq, 0));
    need(s, endpoint_connect(s, e));
    struct ibv_wc wc;
    for (unsigned round = 0; round < ROUNDS; round++) {
        unsigned signal = round % 16 == 15 ? IBV_SEND_SIGNALED : 0;
        if (s->role == ROLE_A) need(s, !post_send(e, round, 1024, 64, signal));
        int n = 0;
        while (n == 0) {
            need(s, next_event(e, 10000) == e->recv_cq);
            need(s, !ibv_req_notify_cq(e->recv_cq, 0));
            n = ibv_poll_cq(e->recv_cq, 1, &wc);
        }
        need(s, n == 1);
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, !post_recv(e, round, 0, 1000));
        if (s->role == ROLE_B) need(s, !post_send(e, round, 1024, 64, signal));
        if (signal) need(s, poll_one(e->send_cq, &wc, 5000));
        if (signal) need_status(s, wc, IBV_WC_SUCCESS);
    }
}

static void srq_limit(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.srq = true, .recv_wr = 16}));
    for (unsigned i = 0; s->role == ROLE_B && i < 10; i++) need(s, !post_recv(e, i, 0, 1000));
    struct ibv_srq_attr attr = {.srq_limit = 6};
    if (s->role == ROLE_B) need(s, !ibv_modify_srq(e->srq, &attr, IBV_SRQ_LIMIT));
    need(s, endpoint_connect(s, e));
    struct ibv_wc wc;
    for (unsigned i = 0; s->role == ROLE_A && i < 5; i++) {
        need(s, !post_send(e, i, 0, 10, 0));
        need(s, poll_one(e->send_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
    }
    need(s, meet(s));
    if (s->role == ROLE_A) return;
    need(s, wait_async(e->context, IBV_EVENT_SRQ_LIMIT_REACHED, 5000));
    need(s, !ibv_query_srq(e->srq, &attr));
    need(s, attr.srq_limit == 0); // it fires once
    need(s, !wait_async(e->context, IBV_EVENT_SRQ_LIMIT_REACHED, 20));
}

static void last_request_of_srq(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.srq = true}));
    need(s, endpoint_connect(s, e));
    need(s, qp_modify_state(e->qp, IBV_QPS_ERR));
    need(s, wait_async(e->context, IBV_EVENT_QP_LAST_WQE_REACHED, 5000));
}

static void access_error_event(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) {
        need(s, wait_async(e->context, IBV_EVENT_QP_ACCESS_ERR, 5000));
        return;
    }
    struct ibv_wc wc;
    e->peer.rkey ^= 0x123400;
    need(s, !post_remote(e, IBV_WR_RDMA_WRITE, 1, 0, 8, 0, 0));
    need(s, poll_one(e->send_cq, &wc, 5000));
    need_status(s, wc, IBV_WC_REM_ACCESS_ERR);
}

// More completions than the CQ holds: the CQ is lost and its owner is notified; nobody else is.
static void cq_overflow(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.cqe = 4, .send_wr = 256, .unsignaled = true}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) {
        need(s, meet(s));
        need(s, !wait_async(e->context, IBV_EVENT_CQ_ERR, 5));
        return;
    }
    for (unsigned i = 0; i < 64; i++) {
        int rc = post_remote(e, IBV_WR_RDMA_WRITE, i, 0, 8, 0, IBV_SEND_SIGNALED);
        need(s, rc == 0 || rc == ENOMEM);
    }
    need(s, wait_async(e->context, IBV_EVENT_CQ_ERR, 5000));
    need(s, meet(s));
}

// Completions keep their order and number over a growing and a shrinking CQ, with traffic before, between and after.
static void cq_resize(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.cqe = 16, .send_wr = 512}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) return;
    struct ibv_wc wc;
    uint64_t posted = 0, polled = 0;
    static const int sizes[] = {64, 400, 100, 31, 500, 20};
    for (unsigned round = 0; round < sizeof sizes / sizeof *sizes; round++) {
        for (unsigned i = 0; i < 12; i++) need(s, !post_remote(e, IBV_WR_RDMA_WRITE, posted++, 0, 8, 0, 0));
        for (unsigned i = 0; i < 5; i++) {
            need(s, poll_one(e->send_cq, &wc, 5000));
            need_status(s, wc, IBV_WC_SUCCESS);
            need(s, wc.wr_id == polled++);
        }
        if (round == 5) { // 7 or more of them are still there
            sleep_ms(20);
            need(s, ibv_resize_cq(e->send_cq, 1) != 0);
        }
        while (posted - polled > 12) {
            need(s, poll_one(e->send_cq, &wc, 5000));
            need(s, wc.wr_id == polled++);
        }
        need(s, !ibv_resize_cq(e->send_cq, sizes[round]));
        need(s, e->send_cq->cqe >= sizes[round]);
    }
    while (polled < posted) {
        need(s, poll_one(e->send_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.wr_id == polled++);
    }
}

// The extended CQ gives the same completions, with a time stamp.
static void cq_extended(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    struct ibv_cq_init_attr_ex attr = {.cqe = 64, .wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_QP_NUM};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(e->context, &attr);
    need(s, cq);
    need(s, !ibv_destroy_qp(e->qp));
    struct ibv_qp_init_attr init = {.send_cq = ibv_cq_ex_to_cq(cq),
                                    .recv_cq = e->recv_cq,
                                    .cap = {64, 64, 1, 1, 0},
                                    .qp_type = IBV_QPT_RC,
                                    .sq_sig_all = 1};
    need(s, (e->qp = ibv_create_qp(e->pd, &init)) != NULL);
    e->mine.qpn = e->qp->qp_num;
    need(s, endpoint_connect(s, e));
    for (unsigned i = 0; i < 10; i++) need(s, !post_remote(e, IBV_WR_RDMA_READ, i, 0, 100 + i, 0, 0));
    struct ibv_poll_cq_attr poll = {0};
    uint64_t end = now_ns() + 5000000000u;
    int rc = ENOENT;
    while (rc == ENOENT && now_ns() < end) rc = ibv_start_poll(cq, &poll);
    for (unsigned i = 0; i < 10; i++) {
        need(s, rc == 0);
        need(s, cq->wr_id == i && cq->status == IBV_WC_SUCCESS);
        need(s, ibv_wc_read_opcode(cq) == IBV_WC_RDMA_READ && ibv_wc_read_byte_len(cq) == 100 + i);
        need(s, ibv_wc_read_qp_num(cq) == e->qp->qp_num);
        for (rc = ENOENT; i < 9 && rc == ENOENT && now_ns() < end;) rc = ibv_next_poll(cq);
    }
    ibv_end_poll(cq);
    need(s, ibv_start_poll(cq, &poll) == ENOENT);
    need(s, meet(s));
    need(s, !ibv_destroy_qp(e->qp));
    e->qp = NULL;
    need(s, !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
}

static void *read_completion_event(void *channel) {
    struct ibv_cq *cq;
    void *context;
    ibv_get_cq_event(channel, &cq, &context);
    return NULL;
}

static void *read_async_event(void *context) {
    struct ibv_async_event event;
    ibv_get_async_event(context, &event);
    return NULL;
}

// Programs end the threads that wait for events so.
static void cancelled(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.events = true}));
    for (int i = 0; i < 2; i++) {
        pthread_t reader;
        void *result = NULL;
        if (i == 0) need(s, !pthread_create(&reader, NULL, read_completion_event, e->channel));
        if (i == 1) need(s, !pthread_create(&reader, NULL, read_async_event, e->context));
        if (s->role == ROLE_A) sleep_ms(50);
        need(s, !pthread_cancel(reader) && !pthread_join(reader, &result) && result == PTHREAD_CANCELED);
    }
    need(s, !ibv_req_notify_cq(e->recv_cq, 0) && !fd_readable(e->channel->fd, 0));
}

const struct test_case event_cases[] = {
    {"cancelled", cancelled},
    {"armed_late", armed_late},
    {"event_for_each_arming", event_for_each_arming},
    {"solicited_only", solicited_only},
    {"ping_pong_by_events", ping_pong_by_events},
    {"srq_limit", srq_limit},
    {"last_request_of_srq", last_request_of_srq},
    {"access_error_event", access_error_event},
    {"cq_overflow", cq_overflow},
    {"cq_resize", cq_resize},
    {"cq_extended", cq_extended},
    {NULL, NULL},
};
