// Errors that are not about keys: lengths, peers that are not there or not ready, requests a responder does not want.
// InfiniBand specification 9.9 (errors and what both ends do), 10.10 (error types), 11.6.2 (completion statuses).
#include "trace.h"

#include <string.h>

static void say_end(struct pair *pair) {
    say_states(pair);
    say_empty(pair);
    say_memory("B", pair->b.memory, pair->b.bytes);
}

// A message longer than the receive.
static void too_long(long packed) {
    struct pair pair;
    pair_open(&pair, &(struct options){.type = (enum ibv_qp_type)(packed >> 16)});
    uint32_t room = packed & 0xffff;
    receive(&pair.b, 1, 0, room ? room : ZERO_LENGTH);
    receive(&pair.b, 2, 32768, 8192);
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = room + 1});
    sent(&pair.a, 1);
    if (packed >> 16 == IBV_QPT_UC) {
        post(&pair.a, &(struct op){.id = 4, .code = IBV_WR_SEND, .len = 8});
        sent(&pair.a, 1);
    }
    received(&pair.b, 2);
    say_states(&pair);
    say_empty(&pair);
    say_memory("B beyond the receive", pair.b.memory + room, 16384);
}

// The sender may not know what the responder does not take: its state decides.
static void peer_in_state(long state) {
    struct pair pair;
    bool ready = state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_SQD;
    // One that answers has all the time; one that doesn't is given up soon.
    pair_open(&pair, &(struct options){.unconnected = true, .timeout = ready ? 18 : 13, .retry = ready ? 7 : 1});
    end_connect(&pair.a);
    if (!reach(&pair.b, (enum ibv_qp_state)state)) give_up("reach the state");
    if (state != IBV_QPS_RESET) receive(&pair.b, 1, 0, 64);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8});
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_RDMA_WRITE, .len = 8, .to = 512});
    sent(&pair.a, 2);
    if (ready || state == IBV_QPS_ERR) received(&pair.b, 1);
    say_end(&pair);
}

// No queue pair of that number, or one that is connected elsewhere, or is of another type.
static void peer_missing(long kind) {
    struct pair pair;
    pair_open(&pair, &(struct options){.unconnected = true, .timeout = 13, .retry = 1});
    struct end other = {0};
    end_open(&other, "C", &(struct options){.type = kind == 2 ? IBV_QPT_UC : IBV_QPT_RC});
    pair.a.peer = &other;
    other.peer = kind == 2 ? &pair.a : &pair.b; // not the one that calls
    end_connect(&pair.a);
    if (kind == 0) say("destroy C -> %s", result(ibv_destroy_qp(other.qp)));
    else end_connect(&other);
    if (kind) receive(&other, 1, 0, 64);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    say("A is in %s", queried_state(pair.a.qp));
    say_empty(&pair);
}

// The peer goes while messages wait for its receives.
static void peer_goes(long how) {
    struct pair pair;
    pair_open(&pair, &(struct options){.timeout = 13, .retry = 1, .rnr_timer = 14});
    for (uint64_t i = 0; i < 4; i++) post(&pair.a, &(struct op){.id = i, .code = IBV_WR_SEND, .len = 8});
    if (how == 0) say("destroy B -> %s", result(ibv_destroy_qp(pair.b.qp)));
    else say_modify(&pair.b, how == 1 ? IBV_QPS_RESET : IBV_QPS_ERR);
    sent(&pair.a, 4);
    say("A is in %s", queried_state(pair.a.qp));
    say_empty(&pair);
}

// The responder takes no read or atomic operations at all.
static void no_reads_taken(long code) {
    struct pair pair;
    pair_open(&pair, &(struct options){.dest_rd_atomic = NONE, .rd_atomic = 1});
    post(&pair.a, &(struct op){.id = 1, .code = (enum ibv_wr_opcode)code, .len = 8, .compare = 1});
    sent(&pair.a, 1);
    say_end(&pair);
}

// An error after good requests, before others: the good ones complete, the others are flushed, and nothing overtakes.
static void error_amid_requests(long unsignaled) {
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    for (uint64_t i = 0; i < 9; i++)
        post(&pair.a, &(struct op){.id = i, .code = IBV_WR_RDMA_WRITE, .len = 8, .to = 8 * i,
                                   .rkey = i == 4 ? pair.b.mr->rkey ^ 0x5a5a5a00 : 0,
                                   .flags = unsignaled ? UNSIGNALED : 0});
    sent(&pair.a, unsignaled ? 5 : 9);
    say_end(&pair);
}

static void say_digest_after(struct pair *pair) {
    receive(&pair->b, 70, 0, 64);
    post(&pair->a, &(struct op){.id = 71, .code = IBV_WR_SEND, .len = 8});
    sent(&pair->a, 1);
    received(&pair->b, 1);
    say_end(pair);
}

// After an error, both queue pairs can be taken through RESET and used again.
static void reuse(long kind) {
    struct pair pair;
    pair_open(&pair, &(struct options){.rnr_retry = kind == 1 ? NONE : 7});
    for (int round = 0; round < 3; round++) {
        if (kind == 0)
            post(&pair.a, &(struct op){
                .id = 1, .code = IBV_WR_RDMA_WRITE, .len = 8, .rkey = pair.b.mr->rkey ^ 0x5a5a5a00});
        else if (kind == 1)
            post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_SEND, .len = 8});
        else
            post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_SEND, .len = 8, .lkey = pair.a.mr->lkey ^ 0x5a5a5a00});
        sent(&pair.a, 1);
        say_states(&pair);
        pair_again(&pair);
        say_digest_after(&pair);
    }
}

// Asynchronous events of a responder that was asked for what it does not allow.
static void event_of(long kind) {
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    no_events();
    if (kind == 0)
        post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_RDMA_WRITE, .len = 8, .rkey = pair.b.mr->rkey ^ 0x5a5a5a00});
    if (kind == 1)
        post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_ATOMIC_FETCH_AND_ADD, .len = 8, .to = 8, .compare = 1,
                                   .rkey = pair.b.mr->rkey ^ 0x5a5a5a00});
    if (kind == 2) {
        receive(&pair.b, 2, 0, 4);
        post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_SEND, .len = 8});
    }
    sent(&pair.a, 1);
    say_states(&pair);
    if (kind < 2) events(1);
    no_events();
}

// COMM_EST: a message for a queue pair that is still ready to receive.
static void communication_established(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.unconnected = true});
    end_connect(&pair.a);
    if (!reach(&pair.b, IBV_QPS_RTR)) give_up("reach RTR");
    receive(&pair.b, 1, 0, 64);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    events(1);
    no_events();
    say_end(&pair);
}

// Longer than any message may be: 2^31 bytes is the standard's limit, a device may have a smaller one.
static void beyond_message_limit(long unused) {
    (void)unused;
    struct pair pair;
    struct ibv_port_attr port;
    pair_open(&pair, &(struct options){0});
    if (ibv_query_port(device.context, 1, &port)) give_up("query the port");
    post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_RDMA_WRITE, .len = port.max_msg_sz + 1});
    sent(&pair.a, 1);
    say_end(&pair);
}

static void mismatched_psn(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.unconnected = true, .timeout = 13, .retry = 1});
    struct ibv_qp_attr attr;
    for (int i = 0; i < 2; i++) {
        struct end *end = i ? &pair.b : &pair.a;
        attr_fill(&attr, &end->options, IBV_QPT_RC, end->peer->qp->qp_num);
        if (i) attr.rq_psn = 5000; // the sender begins at 1000
        for (attr.qp_state = IBV_QPS_INIT; attr.qp_state <= IBV_QPS_RTS; attr.qp_state++)
            if (ibv_modify_qp(end->qp, &attr, required_mask(IBV_QPT_RC, attr.qp_state))) give_up("connect");
    }
    receive(&pair.b, 1, 0, 64);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    say_end(&pair);
}

void add_errors(void) {
    static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC};
    static const int rooms[] = {0, 1, 64, 1024, 3000};
    for (size_t t = 0; t < 2; t++)
        for (size_t i = 0; i < 5; i++)
            add(too_long, (long)types[t] << 16 | rooms[i], "error_%s_too_long_for_%d", type_name(types[t]), rooms[i]);
    for (enum ibv_qp_state state = IBV_QPS_RESET; state <= IBV_QPS_ERR; state++)
        if (state != IBV_QPS_SQE) add(peer_in_state, state, "error_peer_in_%s", state_name(state));
    add(peer_missing, 0, "error_peer_destroyed");
    add(peer_missing, 1, "error_peer_connected_elsewhere");
    add(peer_missing, 2, "error_peer_of_other_type");
    add(peer_goes, 0, "error_peer_destroyed_meanwhile");
    add(peer_goes, 1, "error_peer_reset_meanwhile");
    add(peer_goes, 2, "error_peer_error_meanwhile");
    add(no_reads_taken, IBV_WR_RDMA_READ, "error_responder_takes_no_reads");
    add(no_reads_taken, IBV_WR_ATOMIC_FETCH_AND_ADD, "error_responder_takes_no_atomics");
    add(error_amid_requests, 0, "error_amid_requests");
    add(error_amid_requests, 1, "error_amid_unsignaled_requests");
    add(reuse, 0, "reuse_after_remote_error");
    add(reuse, 1, "reuse_after_rnr");
    add(reuse, 2, "reuse_after_local_error");
    add(event_of, 0, "event_of_bad_key");
    add(event_of, 1, "event_of_bad_key_atomic");
    add(event_of, 2, "event_of_short_receive");
    add(communication_established, 0, "event_communication_established");
    add(beyond_message_limit, 0, "error_beyond_message_limit");
    add(mismatched_psn, 0, "error_mismatched_psn");
}
