// Completion queues: notification, overflow, resizing, one queue for several queue pairs.
// ibv_req_notify_cq(3), ibv_get_cq_event(3), ibv_resize_cq(3); InfiniBand specification 11.4.2.2, 11.6.3.2.
#include "trace.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

// Takes the event that must come; says whose it is.
static void take_event(struct end *end) {
    struct ibv_cq *cq = NULL;
    void *context = NULL;
    if (!readable(end->channel->fd, wait_ms)) {
        say("no event of a completion");
        return;
    }
    int rc = ibv_get_cq_event(end->channel, &cq, &context);
    say("event of %s -> %s", cq == end->send_cq ? "the send queue" : cq == end->recv_cq ? "the receive queue" : "?",
        result(rc));
    if (!rc) ibv_ack_cq_events(cq, 1);
}

static void say_quiet(struct end *end) { say("another event: %d", readable(end->channel->fd, 20)); }

static void one_message(struct pair *pair, uint64_t id, unsigned flags) {
    receive(&pair->b, id, 0, 64);
    post(&pair->a, &(struct op){.id = id, .code = IBV_WR_SEND, .len = 8, .flags = flags});
    sent(&pair->a, 1);
}

// One event for each arming, however many completions come.
static void armed_once(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.channel = true});
    one_message(&pair, 1, 0);
    received(&pair.b, 1);
    say_quiet(&pair.b); // not armed: nothing
    say("arm -> %s", result(ibv_req_notify_cq(pair.b.recv_cq, 0)));
    say_quiet(&pair.b);
    one_message(&pair, 2, 0);
    one_message(&pair, 3, 0);
    take_event(&pair.b);
    say_quiet(&pair.b);
    received(&pair.b, 2);
    say("arm -> %s", result(ibv_req_notify_cq(pair.b.recv_cq, 0)));
    say("arm again -> %s", result(ibv_req_notify_cq(pair.b.recv_cq, 0)));
    one_message(&pair, 4, 0);
    take_event(&pair.b);
    say_quiet(&pair.b);
    received(&pair.b, 1);
}

// Armed for solicited completions only: others do not count, errors do.
static void armed_for_solicited(long opcode) {
    struct pair pair;
    pair_open(&pair, &(struct options){.channel = true});
    say("arm -> %s", result(ibv_req_notify_cq(pair.b.recv_cq, 1)));
    receive(&pair.b, 1, 0, 64);
    receive(&pair.b, 2, 0, 64);
    receive(&pair.b, 3, 0, 64);
    struct op op = {.id = 1, .code = (enum ibv_wr_opcode)opcode, .len = 8, .to = 64};
    post(&pair.a, &op);
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_quiet(&pair.b);
    op.flags = IBV_SEND_SOLICITED;
    post(&pair.a, &op);
    take_event(&pair.b);
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say("arm -> %s", result(ibv_req_notify_cq(pair.b.recv_cq, 1)));
    say_modify(&pair.b, IBV_QPS_ERR);
    take_event(&pair.b);
    received(&pair.b, 1);
}

// Armed for solicited ones, then for all: the wider holds. And the other way about.
static void armed_twice(long all_first) {
    struct pair pair;
    pair_open(&pair, &(struct options){.channel = true});
    say("arm -> %s", result(ibv_req_notify_cq(pair.b.recv_cq, !all_first)));
    say("arm -> %s", result(ibv_req_notify_cq(pair.b.recv_cq, all_first)));
    one_message(&pair, 1, 0);
    take_event(&pair.b);
    received(&pair.b, 1);
}

// Arming a queue that holds completions already: no event until another one comes.
static void armed_late(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.channel = true});
    one_message(&pair, 1, 0);
    one_message(&pair, 2, 0);
    say("arm -> %s", result(ibv_req_notify_cq(pair.a.send_cq, 0)));
    say_quiet(&pair.a);
    one_message(&pair, 3, 0);
    take_event(&pair.a);
    received(&pair.b, 3);
}

static void not_blocking(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.channel = true});
    struct ibv_cq *cq;
    void *context;
    int flags = fcntl(pair.b.channel->fd, F_GETFL);
    say("set O_NONBLOCK -> %s", result(fcntl(pair.b.channel->fd, F_SETFL, flags | O_NONBLOCK)));
    int rc = ibv_get_cq_event(pair.b.channel, &cq, &context);
    say("get an event -> %d, %s", rc, result(rc));
    flags = fcntl(device.context->async_fd, F_GETFL);
    fcntl(device.context->async_fd, F_SETFL, flags | O_NONBLOCK);
    struct ibv_async_event event;
    rc = ibv_get_async_event(device.context, &event);
    say("get an asynchronous event -> %d, %s", rc, result(rc));
}

static void without_channel(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    say("arm -> %s", result(ibv_req_notify_cq(pair.b.recv_cq, 0)));
    one_message(&pair, 1, 0);
    received(&pair.b, 1);
}

// More completions than the queue holds: an error of the queue, and of the queue pairs on it.
static void overflow(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.cqe = 4, .send_wr = 64, .all_signaled = true});
    int entries = pair.a.send_cq->cqe;
    say("as many as asked: %d", entries >= 4);
    for (int i = 0; i <= entries; i++) {
        struct op op = {.id = (uint64_t)i, .code = IBV_WR_RDMA_WRITE, .len = 8};
        if (post_quietly(&pair.a, &op)) {
            say("the send queue is shorter than the completion queue");
            return;
        }
    }
    struct ibv_async_event event;
    if (!readable(device.context->async_fd, wait_ms)) {
        say("no event");
    } else if (!ibv_get_async_event(device.context, &event)) {
        say("event: %s, of the queue: %d", ibv_event_type_str(event.event_type), event.element.cq == pair.a.send_cq);
        ibv_ack_async_event(&event);
    }
    if (readable(device.context->async_fd, 1000)) events(1);
    say_states(&pair);
}

static void resize(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.cqe = 16});
    for (uint64_t i = 0; i < 6; i++) post(&pair.a, &(struct op){.id = i, .code = IBV_WR_RDMA_WRITE, .len = 8});
    say_states(&pair);
    say("to 100 -> %s", result(ibv_resize_cq(pair.a.send_cq, 100)));
    say("as many as asked: %d", pair.a.send_cq->cqe >= 100);
    sent(&pair.a, 3);
    say("to 2, three are in it -> %s", result(ibv_resize_cq(pair.a.send_cq, 2)));
    say("to 3 -> %s", result(ibv_resize_cq(pair.a.send_cq, 3)));
    sent(&pair.a, 3);
    say("to 0 -> %s", result(ibv_resize_cq(pair.a.send_cq, 0)));
    say("to -1 -> %s", result(ibv_resize_cq(pair.a.send_cq, -1)));
    say("beyond the limit -> %s", result(ibv_resize_cq(pair.a.send_cq, device.attr.max_cqe + 1)));
    post(&pair.a, &(struct op){.id = 9, .code = IBV_WR_RDMA_WRITE, .len = 8});
    sent(&pair.a, 1);
    say_empty(&pair);
}

static void creation(long unused) {
    (void)unused;
    static const int sizes[] = {0, -1, 1, 100};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        errno = 0;
        struct ibv_cq *cq = ibv_create_cq(device.context, sizes[i], &device, NULL, 0);
        say("%d entries -> %s", sizes[i], pointer_result(cq));
        if (!cq) continue;
        say("as many: %d, context %d, cq_context %d, channel %d", cq->cqe >= sizes[i], cq->context == device.context,
            cq->cq_context == &device, cq->channel == NULL);
        say("destroy -> %s", result(ibv_destroy_cq(cq)));
    }
    errno = 0;
    say("beyond the limit -> %s",
        pointer_result(ibv_create_cq(device.context, device.attr.max_cqe + 1, NULL, NULL, 0)));
    errno = 0;
    say("an unknown vector -> %s",
        pointer_result(ibv_create_cq(device.context, 8, NULL, NULL, device.context->num_comp_vectors)));
    errno = 0;
    say("vector -1 -> %s", pointer_result(ibv_create_cq(device.context, 8, NULL, NULL, -1)));
}

// Both queues of two queue pairs on one completion queue: each completion names its queue pair.
static void shared(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.unconnected = true});
    struct ibv_cq *cq = cq_open(64, NULL);
    struct end *ends[2] = {&pair.a, &pair.b};
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
            .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1}};
        if (!(ends[i]->qp = ibv_create_qp(ends[i]->pd, &init))) give_up("create a queue pair");
        ends[i]->send_cq = ends[i]->recv_cq = cq;
        name_qp(ends[i]->qp->qp_num, IBV_QPT_RC, ends[i]->name);
    }
    end_connect(&pair.a);
    end_connect(&pair.b);
    receive(&pair.b, 1, 0, 64);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8});
    struct ibv_wc wc[2];
    if (!take(cq, &wc[0]) || !take(cq, &wc[1])) give_up("complete");
    bool swapped = wc[0].wr_id == 2; // the order of two queues is not defined
    say_completion("", &wc[swapped]);
    say_completion("", &wc[!swapped]);
    say("poll for none: %d", ibv_poll_cq(cq, 0, wc));
    say("poll -> %d", ibv_poll_cq(cq, 2, wc));
}

// Several at once, never more than asked for.
static void poll_several(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    for (uint64_t i = 0; i < 10; i++) post(&pair.a, &(struct op){.id = i, .code = IBV_WR_RDMA_WRITE, .len = 8});
    say_states(&pair);
    struct ibv_wc wc[16];
    static const int asked[] = {1, 4, 16, 16};
    for (size_t i = 0; i < 4; i++) {
        int got = ibv_poll_cq(pair.a.send_cq, asked[i], wc);
        say("poll for %d -> %d", asked[i], got);
        for (int k = 0; k < got; k++) say_completion(".sq", &wc[k]);
    }
}

void add_cq(void) {
    add(armed_once, 0, "cq_armed_once");
    add(armed_for_solicited, IBV_WR_SEND, "cq_armed_for_solicited_send");
    add(armed_for_solicited, IBV_WR_RDMA_WRITE_WITH_IMM, "cq_armed_for_solicited_write_imm");
    add(armed_twice, 0, "cq_armed_for_solicited_then_all");
    add(armed_twice, 1, "cq_armed_for_all_then_solicited");
    add(armed_late, 0, "cq_armed_late");
    add(not_blocking, 0, "cq_not_blocking");
    add(without_channel, 0, "cq_without_channel");
    add(overflow, 0, "cq_overflow");
    add(resize, 0, "cq_resize");
    add(creation, 0, "cq_creation");
    add(shared, 0, "cq_shared");
    add(poll_several, 0, "cq_poll_several");
}
