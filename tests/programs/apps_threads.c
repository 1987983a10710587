// Many threads and many objects.
#include "apps.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4 };

struct thread {
    pthread_t thread;
    bool (*body)(unsigned);
    unsigned index;
    bool ok;
};

static void *thread_main(void *argument) {
    struct thread *t = argument;
    t->ok = t->body(t->index);
    return NULL;
}

static bool run_threads(bool (*body)(unsigned), unsigned count) {
    struct thread threads[THREADS * 2];
    bool ok = true;
    for (unsigned i = 0; i < count; i++) {
        threads[i] = (struct thread){.body = body, .index = i};
        pthread_create(&threads[i].thread, NULL, thread_main, &threads[i]);
    }
    for (unsigned i = 0; i < count; i++) {
        pthread_join(threads[i].thread, NULL);
        ok &= threads[i].ok;
    }
    return ok;
}

// ---- each thread its own QPs and CQs

static bool ping_pong(unsigned thread) {
    struct pair p;
    want(pair_open(&p, &(struct options){.shared_memory = thread % 2}, NULL));
    for (uint64_t i = 0; i < 1000; i++) {
        struct endpoint *from = i % 2 ? &p.b : &p.a, *to = i % 2 ? &p.a : &p.b;
        uint32_t bytes = (uint32_t)(1 + i * 37 % 5000);
        fill(from->memory, bytes, i ^ (uint64_t)thread << 32);
        want(!post_recv(to, i, 16384, bytes));
        want(!post_send(from, i, 0, bytes, 0));
        want(completes(to->recv_cq, i) && completes(from->send_cq, i));
        want(holds(to->memory + 16384, bytes, i ^ (uint64_t)thread << 32));
    }
    return pair_close(&p);
}

static bool threads_with_their_own_queues(void) { return run_threads(ping_pong, THREADS); }

// ---- all threads on one QP

enum { POSTS = 3000, SENDER_SHIFT = 32 };
static struct pair one;

static bool poster(unsigned thread) {
    for (uint64_t i = 0; i < POSTS;) {
        int rc = post_remote(&one.a, IBV_WR_RDMA_WRITE, (uint64_t)thread << SENDER_SHIFT | i, thread * 64, 8,
                             4096 + thread * 64, 0);
        if (rc == ENOMEM) { // full: the poller makes room
            sleep_ms(0);
            continue;
        }
        want(!rc);
        i++;
    }
    return true;
}

static bool poster_or_poller(unsigned thread) {
    if (thread < THREADS) return poster(thread);
    uint64_t next[THREADS] = {0};
    for (unsigned left = THREADS * POSTS; left;) {
        struct ibv_wc wc[16];
        int n = ibv_poll_cq(one.a.send_cq, 16, wc);
        want(n >= 0);
        for (int i = 0; i < n; i++, left--) {
            want(wc[i].status == IBV_WC_SUCCESS);
            unsigned sender = (unsigned)(wc[i].wr_id >> SENDER_SHIFT);
            want(sender < THREADS && (uint32_t)wc[i].wr_id == next[sender]++);
        }
    }
    return true;
}

static bool threads_on_one_queue(void) {
    want(pair_open(&one, &(struct options){.send_wr = 256}, NULL));
    want(run_threads(poster_or_poller, THREADS + 1));
    return pair_close(&one);
}

// ---- all threads poll one CQ

static unsigned polled;

static bool poster_and_poller(unsigned thread) {
    for (uint64_t i = 0; i < POSTS; i++) {
        struct ibv_wc wc[4];
        while (post_remote(&one.a, IBV_WR_RDMA_WRITE, i, thread * 64, 8, 4096 + thread * 64, 0)) {
            int n = ibv_poll_cq(one.a.send_cq, 4, wc);
            want(n >= 0);
            __atomic_add_fetch(&polled, (unsigned)n, __ATOMIC_RELAXED);
        }
    }
    while (__atomic_load_n(&polled, __ATOMIC_RELAXED) < THREADS * POSTS) {
        struct ibv_wc wc;
        int n = ibv_poll_cq(one.a.send_cq, 1, &wc);
        want(n >= 0 && (!n || wc.status == IBV_WC_SUCCESS));
        __atomic_add_fetch(&polled, (unsigned)n, __ATOMIC_RELAXED);
    }
    return true;
}

static bool threads_poll_one_queue(void) {
    want(pair_open(&one, &(struct options){.send_wr = 64}, NULL));
    polled = 0;
    want(run_threads(poster_and_poller, THREADS));
    want(polled == THREADS * POSTS);
    return pair_close(&one);
}

// ---- objects come and go while others work

static volatile bool churning;

static bool churn_or_work(unsigned thread) {
    if (thread < 2) {
        bool ok = ping_pong(thread);
        churning = false;
        return ok;
    }
    // Its QPs complete to the CQ that `one` uses too, and are gone again.
    while (churning) {
        struct ibv_qp_init_attr init = {.send_cq = one.a.send_cq,
                                        .recv_cq = one.a.send_cq,
                                        .cap = {16, 16, 1, 1, 0},
                                        .qp_type = IBV_QPT_RC,
                                        .sq_sig_all = 1};
        struct ibv_qp *qp = ibv_create_qp(one.a.pd, &init);
        want(qp);
        struct endpoint e = one.a;
        e.qp = qp;
        want(endpoint_to_init(&e));
        want(!post_recv(&e, 77, 0, 8));
        want(qp_modify_state(qp, IBV_QPS_ERR)); // a flush is on its way to the shared CQ
        struct ibv_mr *mr = ibv_reg_mr(one.a.pd, one.a.memory + thread, 100, IBV_ACCESS_LOCAL_WRITE);
        want(mr && !ibv_dereg_mr(mr));
        want(!ibv_destroy_qp(qp));
        struct ibv_cq *cq = ibv_create_cq(one.a.context, 10, NULL, NULL, 0);
        want(cq && !ibv_destroy_cq(cq));
        struct ibv_wc wc;
        int n = ibv_poll_cq(one.a.send_cq, 1, &wc);
        want(n == 0 || (n == 1 && wc.wr_id == 77 && wc.status == IBV_WC_WR_FLUSH_ERR));
    }
    return true;
}

static bool objects_come_and_go(void) {
    want(pair_open(&one, &(struct options){0}, NULL));
    churning = true;
    want(run_threads(churn_or_work, THREADS));
    return pair_close(&one);
}

// ---- a thousand QPs on one CQ

static bool thousand_queue_pairs(void) {
    enum { QPS = 1000, PAIRS = QPS / 2, MESSAGES = 4 };
    static struct endpoint ends[QPS];
    struct endpoint *base = &ends[0];
    want(endpoint_open(base, &(struct options){.cqe = QPS * MESSAGES * 2}));
    for (unsigned i = 1; i < QPS; i++) {
        ends[i] = *base;
        struct ibv_qp_init_attr init = {.send_cq = base->send_cq,
                                        .recv_cq = base->send_cq,
                                        .cap = {MESSAGES, MESSAGES, 1, 1, 0},
                                        .qp_type = IBV_QPT_RC,
                                        .sq_sig_all = 1};
        want((ends[i].qp = ibv_create_qp(base->pd, &init)) != NULL);
        ends[i].mine.qpn = ends[i].qp->qp_num;
    }
    for (unsigned i = 0; i < PAIRS; i++) want(connect_two(&ends[i], &ends[PAIRS + i]));
    for (unsigned message = 0; message < MESSAGES; message++)
        for (unsigned i = 0; i < PAIRS; i++) {
            want(!post_recv(&ends[PAIRS + i], 1000 + message, 8 * (PAIRS + i), 8));
            want(!post_send(&ends[i], message, 8 * i, 8, 0));
        }
    static uint8_t next_send[QPS], next_receive[QPS];
    memset(next_send, 0, sizeof next_send);
    memset(next_receive, 0, sizeof next_receive);
    for (unsigned left = 2 * PAIRS * MESSAGES; left; left--) {
        struct ibv_wc wc;
        want(poll_one(base->send_cq, &wc, 10000));
        want(wc.status == IBV_WC_SUCCESS);
        unsigned i = 0;
        while (i < QPS && ends[i].qp->qp_num != wc.qp_num) i++;
        want(i < QPS);
        if (i < PAIRS)
            want(wc.wr_id == next_send[i]++);
        else
            want(wc.wr_id == 1000u + next_receive[i]++);
    }
    for (unsigned i = 1; i < QPS; i++) want(!ibv_destroy_qp(ends[i].qp));
    return endpoint_close(base);
}

static bool device_opened_a_thousand_times(void) {
    for (unsigned i = 0; i < 1000; i++) {
        struct endpoint e = {0};
        if (i % 50 == 0) {
            want(endpoint_open(&e, &(struct options){.events = true, .srq = true}));
            want(endpoint_close(&e));
        } else {
            struct ibv_context *context = open_first_device();
            want(context);
            struct ibv_pd *pd = ibv_alloc_pd(context);
            want(pd && !ibv_dealloc_pd(pd));
            want(!ibv_close_device(context));
        }
    }
    return true;
}

const struct app_case thread_cases[] = {
    {"threads_with_their_own_queues", threads_with_their_own_queues},
    {"threads_on_one_queue", threads_on_one_queue},
    {"threads_poll_one_queue", threads_poll_one_queue},
    {"objects_come_and_go", objects_come_and_go},
    {"thousand_queue_pairs", thousand_queue_pairs},
    {"device_opened_a_thousand_times", device_opened_a_thousand_times},
    {NULL, NULL},
};
