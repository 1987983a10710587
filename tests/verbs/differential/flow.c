// The flow of requests: receivers that are not ready, the send queue drained, fences, depth of reads.
// InfiniBand specification 9.7.5.2.8 (RNR), 10.3.1.5 (send queue drained), 10.8.3.3 (fence), 9.4.4 (reads).
#include "trace.h"

#include <string.h>
#include <unistd.h>

// No receive is ever posted: retried so many times, and then the error.
static void rnr_exhausted(long retries) {
    struct pair pair;
    pair_open(&pair, &(struct options){.rnr_retry = retries ? (int)retries : NONE});
    receive(&pair.a, 3, 0, 64);
    post(&pair.a, &(struct op){.id = 1, .code = retries % 2 ? IBV_WR_SEND : IBV_WR_RDMA_WRITE_WITH_IMM, .len = 8});
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_RDMA_WRITE, .len = 8});
    sent(&pair.a, 2);
    received(&pair.a, 1);
    say_states(&pair);
    say_empty(&pair);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

// rnr_retry 7 has no limit; the receive comes, and the message with it.
static void rnr_until_ready(long code) {
    struct pair pair;
    pair_open(&pair, &(struct options){.rnr_retry = 7, .rnr_timer = 8});
    post(&pair.a, &(struct op){.id = 1, .code = (enum ibv_wr_opcode)code, .len = 3000, .imm = 4});
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_RDMA_WRITE, .len = 8, .to = 5000});
    usleep(30000);
    say_empty(&pair);
    receive(&pair.b, 3, 0, 4000);
    sent(&pair.a, 2);
    received(&pair.b, 1);
    say_states(&pair);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

// UC has no such thing: what finds no receive is gone.
static void uc_without_receive(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UC});
    post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_SEND, .len = 8});
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 3000});
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_RDMA_WRITE, .len = 8});
    sent(&pair.a, 3);
    say_states(&pair);
    let_it_come();
    receive(&pair.b, 4, 0, 64);
    post(&pair.a, &(struct op){.id = 5, .code = IBV_WR_SEND, .len = 16});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_states(&pair);
    say_empty(&pair);
}

static int drain(struct end *end, bool notify) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = notify};
    return ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY);
}

// An idle send queue drains at once; what is posted then waits for RTS.
static void sqd_idle(long type) {
    struct pair pair;
    pair_open(&pair, &(struct options){.type = (enum ibv_qp_type)type});
    receive(&pair.b, 1, 0, 64);
    say("A to SQD -> %s", result(drain(&pair.a, true)));
    events(1);
    say("A is in %s", queried_state(pair.a.qp));
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8});
    usleep(30000);
    say_empty(&pair);
    say_modify(&pair.a, IBV_QPS_RTS);
    sent(&pair.a, 1);
    received(&pair.b, 1);
    no_events();
    say_states(&pair);
}

// Requests that are under way end first. Whether one that has not begun does is not defined, so there is only one.
static void sqd_drains(long notify) {
    struct pair pair;
    pair_open(&pair, &(struct options){.rnr_timer = 10});
    post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_SEND, .len = 8});
    usleep(20000); // it has met a receiver that is not ready
    say("A to SQD -> %s", result(drain(&pair.a, notify)));
    no_events();
    receive(&pair.b, 2, 0, 64);
    sent(&pair.a, 1);
    received(&pair.b, 1);
    if (notify) events(1);
    no_events();
    say_states(&pair);
    say_modify(&pair.a, IBV_QPS_RTS);
    receive(&pair.b, 3, 64, 64);
    post(&pair.a, &(struct op){.id = 4, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    received(&pair.b, 1);
}

// A queue pair with a drained send queue receives, and answers reads.
static void sqd_receives(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    receive(&pair.b, 1, 0, 64);
    say("B to SQD -> %s", result(drain(&pair.b, false)));
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8});
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_RDMA_READ, .len = 8});
    post(&pair.a, &(struct op){.id = 4, .code = IBV_WR_ATOMIC_FETCH_AND_ADD, .len = 8, .compare = 1});
    sent(&pair.a, 3);
    received(&pair.b, 1);
    say_states(&pair);
    say_memory("A", pair.a.memory, pair.a.bytes);
}

// From SQD to ERR: what was posted meanwhile is flushed.
static void sqd_to_error(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    say("A to SQD -> %s", result(drain(&pair.a, false)));
    for (uint64_t i = 0; i < 3; i++) post(&pair.a, &(struct op){.id = i, .code = IBV_WR_SEND, .len = 8});
    say_modify(&pair.a, IBV_QPS_ERR);
    sent(&pair.a, 3);
    say_empty(&pair);
}

// Behind a fence a write starts when the reads before it are done: it cannot spoil what they fetch.
static void fence(long code) {
    struct pair pair;
    pair_open(&pair, &(struct options){.all_signaled = true});
    for (int round = 0; round < 8; round++) {
        memory_fill(pair.b.memory, 32768, (uint32_t)round);
        post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_RDMA_READ, .at = 32768, .len = 16384, .to = 1000});
        post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_ATOMIC_FETCH_AND_ADD, .at = 60000, .len = 8, .to = 8});
        if (code == IBV_WR_SEND) receive(&pair.b, 3, 1000, 16384);
        post(&pair.a, &(struct op){.id = 4, .code = (enum ibv_wr_opcode)code, .at = 32768, .len = 16384, .to = 20000,
                                   .flags = IBV_SEND_FENCE});
        sent(&pair.a, 3);
        if (code == IBV_WR_SEND) received(&pair.b, 1);
        say_memory("A", pair.a.memory, pair.a.bytes);
        say_memory("B", pair.b.memory, pair.b.bytes);
    }
}

// More reads than may be outstanding: they wait for each other, and complete in order.
static void read_depth(long depth) {
    struct pair pair;
    pair_open(&pair, &(struct options){.rd_atomic = (int)depth, .dest_rd_atomic = (int)depth, .send_wr = 32});
    for (uint64_t i = 0; i < 12; i++)
        post(&pair.a, &(struct op){.id = i, .code = i % 3 == 2 ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_RDMA_READ,
                                   .at = i * 2048, .len = i % 3 == 2 ? 8 : 2000, .to = i * 2048, .compare = 5});
    sent(&pair.a, 12);
    say_states(&pair);
    say_memory("A", pair.a.memory, pair.a.bytes);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

// A requester that may have no read outstanding.
static void read_depth_none(long code) {
    struct pair pair;
    pair_open(&pair, &(struct options){.rd_atomic = NONE});
    post(&pair.a, &(struct op){.id = 1, .code = (enum ibv_wr_opcode)code, .len = 8});
    sent(&pair.a, 1);
    say_states(&pair);
}

// Messages and completions keep the order of posting, whatever the opcodes.
static void order(long type) {
    struct pair pair;
    pair_open(&pair, &(struct options){.type = (enum ibv_qp_type)type, .send_wr = 64, .recv_wr = 64});
    static const enum ibv_wr_opcode mix[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE,
                                             IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_READ};
    size_t kinds = type == IBV_QPT_RC ? 5 : 4, receives = 0;
    for (uint64_t i = 0; i < 30; i++)
        receives += mix[i % kinds] != IBV_WR_RDMA_WRITE && mix[i % kinds] != IBV_WR_RDMA_READ;
    for (uint64_t i = 0; i < receives; i++) receive(&pair.b, 100 + i, 2000 * i, 2000);
    // With a fence: what is read lands where later requests are sent from.
    for (uint64_t i = 0; i < 30; i++)
        post(&pair.a, &(struct op){.id = i, .code = mix[i % kinds], .at = i * 16, .len = (uint32_t)(i * 60),
                                   .to = 60000, .imm = (uint32_t)i, .flags = IBV_SEND_FENCE});
    sent(&pair.a, 30);
    received(&pair.b, (int)receives);
    say_empty(&pair);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

// Both directions at once, over one pair.
static void both_ways(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.send_wr = 32, .recv_wr = 32});
    for (uint64_t i = 0; i < 16; i++) {
        receive(&pair.a, i, 32768 + 1024 * i, 1024);
        receive(&pair.b, i, 32768 + 1024 * i, 1024);
    }
    for (uint64_t i = 0; i < 16; i++) {
        post(&pair.a, &(struct op){.id = 50 + i, .code = IBV_WR_SEND, .at = 100 * i, .len = 1024});
        post(&pair.b, &(struct op){.id = 70 + i, .code = IBV_WR_SEND, .at = 200 * i, .len = 1000});
    }
    sent(&pair.a, 16);
    sent(&pair.b, 16);
    received(&pair.a, 16);
    received(&pair.b, 16);
    say_memory("A", pair.a.memory, pair.a.bytes);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

void add_flow(void) {
    for (long retries = 0; retries < 7; retries++) add(rnr_exhausted, retries, "rnr_exhausted_after_%ld", retries);
    add(rnr_until_ready, IBV_WR_SEND, "rnr_until_ready_send");
    add(rnr_until_ready, IBV_WR_RDMA_WRITE_WITH_IMM, "rnr_until_ready_write_imm");
    add(uc_without_receive, 0, "uc_without_receive");
    add(sqd_idle, IBV_QPT_RC, "sqd_rc_idle");
    add(sqd_idle, IBV_QPT_UC, "sqd_uc_idle");
    add(sqd_idle, IBV_QPT_UD, "sqd_ud_idle");
    add(sqd_drains, 1, "sqd_drains_with_event");
    add(sqd_drains, 0, "sqd_drains_without_event");
    add(sqd_receives, 0, "sqd_receives");
    add(sqd_to_error, 0, "sqd_to_error");
    add(fence, IBV_WR_RDMA_WRITE, "fence_write");
    add(fence, IBV_WR_SEND, "fence_send");
    add(read_depth, 1, "read_depth_1");
    add(read_depth, 2, "read_depth_2");
    add(read_depth, 7, "read_depth_7");
    add(read_depth, 16, "read_depth_16");
    add(read_depth_none, IBV_WR_RDMA_READ, "read_depth_none_read");
    add(read_depth_none, IBV_WR_ATOMIC_FETCH_AND_ADD, "read_depth_none_faa");
    add(order, IBV_QPT_RC, "order_rc");
    add(order, IBV_QPT_UC, "order_uc");
    add(both_ways, 0, "order_both_ways");
}
