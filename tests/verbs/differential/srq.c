// Shared receive queues: exhaustion, limits, the last request of a queue pair.
// ibv_modify_srq(3), ibv_get_async_event(3); InfiniBand specification 10.2.9.2 (limits), 11.6.3 (events).
#include "trace.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

static void send_one(struct pair *pair, uint64_t id) {
    post(&pair->a, &(struct op){.id = id, .code = IBV_WR_SEND, .len = 8});
    sent(&pair->a, 1);
}

static void say_srq(struct ibv_srq *srq) {
    struct ibv_srq_attr attr = {0};
    say("query -> %s, limit %u", result(ibv_query_srq(srq, &attr)), attr.srq_limit);
}

static int set_limit(struct ibv_srq *srq, uint32_t limit) {
    struct ibv_srq_attr attr = {.srq_limit = limit};
    return ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT);
}

// Requests are taken in the order of posting.
static void in_order(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.srq = true});
    for (uint64_t i = 0; i < 6; i++) receive(&pair.b, i, 64 * i, 64);
    for (uint64_t i = 0; i < 6; i++) send_one(&pair, 10 + i);
    received(&pair.b, 6);
    say_empty(&pair);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

static void empty(long retries) {
    struct pair pair;
    pair_open(&pair, &(struct options){.srq = true, .rnr_retry = retries ? (int)retries : NONE});
    receive(&pair.b, 1, 0, 64);
    send_one(&pair, 2);
    received(&pair.b, 1);
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 8});
    if (retries == 7) {
        usleep(10000);
        receive(&pair.b, 4, 0, 64);
        received(&pair.b, 1);
    }
    sent(&pair.a, 1);
    say_states(&pair);
    no_events();
}

// The event comes once, when fewer than the limit are left, and disarms itself.
static void limit(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.srq = true});
    for (uint64_t i = 0; i < 8; i++) receive(&pair.b, i, 0, 64);
    say_srq(pair.b.srq);
    say("limit 6 -> %s", result(set_limit(pair.b.srq, 6)));
    say_srq(pair.b.srq);
    send_one(&pair, 10);
    send_one(&pair, 11);
    received(&pair.b, 2);
    no_events();
    send_one(&pair, 12);
    received(&pair.b, 1);
    events(1);
    say_srq(pair.b.srq);
    send_one(&pair, 13);
    received(&pair.b, 1);
    no_events();
}

static void limit_reached_already(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.srq = true});
    for (uint64_t i = 0; i < 4; i++) receive(&pair.b, i, 0, 64);
    say("limit 10 -> %s", result(set_limit(pair.b.srq, 10)));
    send_one(&pair, 1);
    received(&pair.b, 1);
    events(1);
    no_events();
}

static void limit_values(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.srq = true});
    struct ibv_srq_attr attr = {0};
    if (ibv_query_srq(pair.b.srq, &attr)) give_up("query");
    say("more than its size -> %s", result(set_limit(pair.b.srq, attr.max_wr + 1)));
    say("its size -> %s", result(set_limit(pair.b.srq, attr.max_wr)));
    say("0 -> %s", result(set_limit(pair.b.srq, 0)));
    say_srq(pair.b.srq);
    say("nothing -> %s", result(ibv_modify_srq(pair.b.srq, &attr, 0)));
    say("an unknown attribute -> %s", result(ibv_modify_srq(pair.b.srq, &attr, 1 << 5)));
}

static void resize(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.srq = true});
    for (uint64_t i = 0; i < 4; i++) receive(&pair.b, i, 64 * i, 64);
    struct ibv_srq_attr attr = {.max_wr = 40};
    int rc = ibv_modify_srq(pair.b.srq, &attr, IBV_SRQ_MAX_WR);
    if (rc == EOPNOTSUPP && !(device.attr.device_cap_flags & IBV_DEVICE_SRQ_RESIZE)) not_offered("resizing");
    say("to 40 -> %s", result(rc));
    memset(&attr, 0, sizeof attr);
    if (ibv_query_srq(pair.b.srq, &attr)) give_up("query");
    say("as many as asked: %d", attr.max_wr >= (rc ? 16 : 40));
    for (uint64_t i = 0; i < 4; i++) send_one(&pair, i);
    received(&pair.b, 4);
}

static void full(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.srq = true});
    struct ibv_srq_attr attr = {0};
    if (ibv_query_srq(pair.b.srq, &attr)) give_up("query");
    say("as many as asked: %d %d", attr.max_wr >= 16, attr.max_sge >= 2);
    uint32_t posted = 0;
    int rc = 0;
    while (posted <= attr.max_wr && !(rc = receive_quietly(&pair.b, posted, 0, 8, pair.b.mr->lkey))) posted++;
    say("as many as promised %d, then %s", posted >= attr.max_wr, result(rc));
    struct ibv_sge sges[64];
    memset(sges, 0, sizeof sges);
    struct ibv_recv_wr wr = {.sg_list = sges, .num_sge = (int)attr.max_sge + 1}, *bad = NULL;
    send_one(&pair, 1);
    received(&pair.b, 1);
    say("one element too many -> %s", result(ibv_post_srq_recv(pair.b.srq, &wr, &bad)));
    say("post to the queue pair itself -> %s", result(ibv_post_recv(pair.b.qp, &wr, &bad)));
}

// A queue pair in the error state takes no more of them: an event says so, and they stay for others.
static void last_request(long how) {
    struct pair pair;
    pair_open(&pair, &(struct options){.srq = true});
    receive(&pair.b, 1, 0, 64);
    receive(&pair.b, 2, 64, 64);
    if (how == 0) {
        say_modify(&pair.b, IBV_QPS_ERR);
    } else {
        post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_RDMA_WRITE, .len = 8, .rkey = pair.b.mr->rkey ^ 0x5a5a5a00});
        sent(&pair.a, 1);
    }
    events(how == 0 ? 1 : 2);
    no_events();
    say_empty(&pair);
    pair_again(&pair);
    send_one(&pair, 4);
    received(&pair.b, 1);
    say_empty(&pair);
}

// Two queue pairs feed on one; each completion names its own.
static void two_queue_pairs(long unused) {
    (void)unused;
    struct pair one, two;
    pair_open(&one, &(struct options){.srq = true});
    pair_open(&two, &(struct options){.unconnected = true});
    two.a.name = "C";
    two.b.name = "D";
    struct ibv_qp_init_attr init = {.send_cq = two.b.send_cq, .recv_cq = one.b.recv_cq, .srq = one.b.srq,
        .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 8, .max_send_sge = 1}};
    if (!(two.b.qp = ibv_create_qp(one.b.pd, &init))) give_up("create a queue pair");
    two.b.pd = one.b.pd;
    name_qp(two.a.qp->qp_num, IBV_QPT_RC, "C");
    name_qp(two.b.qp->qp_num, IBV_QPT_RC, "D");
    end_connect(&two.a);
    end_connect(&two.b);
    for (uint64_t i = 0; i < 6; i++) receive(&one.b, i, 64 * i, 64);
    for (uint64_t i = 0; i < 3; i++) {
        send_one(&one, 10 + i);
        send_one(&two, 20 + i);
    }
    received(&one.b, 6);
    say("destroy the queue that two queue pairs use -> %s", result(ibv_destroy_srq(one.b.srq)));
}

static void bad_receive(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.srq = true});
    receive_key(&pair.b, 1, 0, 64, pair.b.mr->lkey ^ 0x5a5a5a00);
    receive(&pair.b, 2, 0, 64);
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_states(&pair);
    events(1);
    say_empty(&pair);
}

static void creation(long unused) {
    (void)unused;
    struct ibv_pd *pd = ibv_alloc_pd(device.context);
    struct ibv_srq_init_attr init = {.srq_context = &device, .attr = {.max_wr = 10, .max_sge = 1, .srq_limit = 5}};
    struct ibv_srq *srq = ibv_create_srq(pd, &init);
    say("create -> %s", pointer_result(srq));
    say("attributes given back: %d %d", init.attr.max_wr >= 10, init.attr.max_sge >= 1);
    say("context %d, srq_context %d, pd %d", srq->context == device.context, srq->srq_context == &device,
        srq->pd == pd);
    say_srq(srq);
    say("destroy the domain -> %s", result(ibv_dealloc_pd(pd)));
    say("destroy -> %s", result(ibv_destroy_srq(srq)));
    init.attr.max_wr = (uint32_t)device.attr.max_srq_wr + 1;
    errno = 0;
    say("too many requests -> %s", pointer_result(ibv_create_srq(pd, &init)));
    init.attr.max_wr = 10;
    init.attr.max_sge = (uint32_t)device.attr.max_srq_sge + 1;
    errno = 0;
    say("too many elements -> %s", pointer_result(ibv_create_srq(pd, &init)));
    init.attr.max_wr = init.attr.max_sge = 0;
    errno = 0;
    srq = ibv_create_srq(pd, &init);
    say("no requests -> %s", pointer_result(srq));
}

void add_srq(void) {
    add(in_order, 0, "srq_in_order");
    add(empty, 0, "srq_empty");
    add(empty, 3, "srq_empty_3_retries");
    add(empty, 7, "srq_empty_then_ready");
    add(limit, 0, "srq_limit");
    add(limit_reached_already, 0, "srq_limit_reached_already");
    add(limit_values, 0, "srq_limit_values");
    add(resize, 0, "srq_resize");
    add(full, 0, "srq_full");
    add(last_request, 0, "srq_last_request_by_modify");
    add(last_request, 1, "srq_last_request_by_error");
    add(two_queue_pairs, 0, "srq_two_queue_pairs");
    add(bad_receive, 0, "srq_bad_receive");
    add(creation, 0, "srq_creation");
}
