// Posting: in each state, beyond the limits, with wrong requests; and what a queue gives up when it is flushed.
// ibv_post_send(3), ibv_post_recv(3); InfiniBand specification 10.3.1 (states of queue pairs), 10.8.2.
#include "trace.h"

#include <errno.h>
#include <string.h>

static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};

// Both queues in a state, then an error: what was taken is flushed.
static void in_state(long packed) {
    struct pair pair;
    enum ibv_qp_state state = (enum ibv_qp_state)(packed & 255);
    pair_open(&pair, &(struct options){.type = (enum ibv_qp_type)(packed >> 8), .unconnected = true});
    struct ibv_ah_attr address = address_of_device();
    if (pair.a.qp->qp_type == IBV_QPT_UD) pair.a.ah = ibv_create_ah(pair.a.pd, &address);
    if (!reach(&pair.a, state)) give_up("reach the state");
    receive(&pair.a, 1, 0, 128);
    receive(&pair.a, 2, 128, 128);
    // In RTS and SQE the request below would run; its peer is in RESET and must not matter here.
    if (state != IBV_QPS_RTS && state != IBV_QPS_SQD) {
        post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 64});
        post(&pair.a, &(struct op){.id = 4, .code = IBV_WR_SEND, .len = 64, .flags = UNSIGNALED});
    }
    say("is in %s", queried_state(pair.a.qp));
    say_modify(&pair.a, IBV_QPS_ERR);
    if (state != IBV_QPS_RESET) received(&pair.a, 2);
    if (state == IBV_QPS_SQE || state == IBV_QPS_ERR) sent(&pair.a, 2);
    say_empty(&pair);
}

static void beyond_limits(long type) {
    struct pair pair;
    pair_open(&pair, &(struct options){.type = (enum ibv_qp_type)type, .unconnected = true});
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (!reach(&pair.a, IBV_QPS_INIT) || ibv_query_qp(pair.a.qp, &attr, IBV_QP_CAP, &init)) give_up("query");
    int rc = 0;
    uint32_t posted = 0;
    while (posted <= attr.cap.max_recv_wr && !(rc = receive_quietly(&pair.a, posted, 0, 8, pair.a.mr->lkey))) posted++;
    say("receives: as many as promised %d, then %s", posted >= attr.cap.max_recv_wr, result(rc));
    struct ibv_sge sges[64];
    for (size_t i = 0; i < 64; i++) sges[i] = (struct ibv_sge){(uintptr_t)pair.a.memory, 8, pair.a.mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = sges, .num_sge = (int)attr.cap.max_recv_sge + 1}, *bad;
    modify(pair.a.qp, IBV_QPS_RESET);
    if (!reach(&pair.a, IBV_QPS_INIT)) give_up("reach INIT again");
    say("one element too many -> %s", result(ibv_post_recv(pair.a.qp, &wr, &bad)));
    wr.num_sge = (int)attr.cap.max_recv_sge;
    say("as many as promised -> %s", result(ibv_post_recv(pair.a.qp, &wr, &bad)));
    wr.num_sge = -1;
    say("-1 elements -> %s", result(ibv_post_recv(pair.a.qp, &wr, &bad)));
}

// A send queue that nothing leaves, because the receiver is not ready: full, and how full is said by errno alone.
static void send_queue_full(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.rnr_timer = 14});
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (ibv_query_qp(pair.a.qp, &attr, IBV_QP_CAP, &init)) give_up("query");
    struct op op = {.code = IBV_WR_SEND, .len = 8};
    int rc = 0;
    while (op.id <= attr.cap.max_send_wr && !(rc = post_quietly(&pair.a, &op))) op.id++;
    say("as many as promised %d, then %s", op.id >= attr.cap.max_send_wr, result(rc));
    struct ibv_sge sges[64];
    for (size_t i = 0; i < 64; i++) sges[i] = (struct ibv_sge){(uintptr_t)pair.b.memory, 8, pair.b.mr->lkey};
    struct ibv_send_wr wr = {.sg_list = sges, .num_sge = (int)attr.cap.max_send_sge + 1, .opcode = IBV_WR_SEND}, *bad;
    say("one element too many -> %s", result(ibv_post_send(pair.b.qp, &wr, &bad)));
    wr.num_sge = -1;
    say("-1 elements -> %s", result(ibv_post_send(pair.b.qp, &wr, &bad)));
}

// A list with a wrong request in its middle: those before it are taken, bad_wr says which one was not.
static void list_with_bad_request(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    struct ibv_sge sge[64];
    for (size_t i = 0; i < 64; i++) sge[i] = (struct ibv_sge){(uintptr_t)pair.a.memory, 8, pair.a.mr->lkey};
    struct ibv_send_wr wr[3] = {0}, *bad = NULL;
    for (size_t i = 0; i < 3; i++)
        wr[i] = (struct ibv_send_wr){.wr_id = i, .next = i < 2 ? &wr[i + 1] : NULL, .sg_list = sge, .num_sge = 1,
                                     .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
    wr[1].num_sge = 60;
    receive(&pair.b, 10, 0, 64);
    receive(&pair.b, 11, 64, 64);
    int rc = ibv_post_send(pair.a.qp, wr, &bad);
    say("a list of sends -> %s, bad is number %ld", result(rc), bad ? (long)(bad - wr) : -1);
    sent(&pair.a, 1);
    received(&pair.b, 1);
    struct ibv_sge target[64];
    for (size_t i = 0; i < 64; i++) target[i] = (struct ibv_sge){(uintptr_t)pair.b.memory, 8, pair.b.mr->lkey};
    struct ibv_recv_wr receives[3] = {0}, *bad_receive = NULL;
    for (size_t i = 0; i < 3; i++)
        receives[i] = (struct ibv_recv_wr){
            .wr_id = 20 + i, .next = i < 2 ? &receives[i + 1] : NULL, .sg_list = target, .num_sge = 1};
    receives[2].num_sge = 60;
    rc = ibv_post_recv(pair.b.qp, receives, &bad_receive);
    say("a list of receives -> %s, bad is number %ld", result(rc), bad_receive ? (long)(bad_receive - receives) : -1);
    say_modify(&pair.b, IBV_QPS_ERR);
    received(&pair.b, 3);
    say_empty(&pair);
}

static const struct {
    enum ibv_wr_opcode code;
    const char *name;
} opcodes[] = {
    {IBV_WR_SEND, "send"}, {IBV_WR_SEND_WITH_IMM, "send_imm"}, {IBV_WR_RDMA_WRITE, "write"},
    {IBV_WR_RDMA_WRITE_WITH_IMM, "write_imm"}, {IBV_WR_RDMA_READ, "read"}, {IBV_WR_ATOMIC_CMP_AND_SWP, "cas"},
    {IBV_WR_ATOMIC_FETCH_AND_ADD, "faa"}, {(enum ibv_wr_opcode)60, "unknown"},
};

// Which opcodes a type of queue pair has, and which it refuses at once.
static void opcode_of_type(long packed) {
    struct pair pair;
    pair_open(&pair, &(struct options){.type = (enum ibv_qp_type)(packed >> 8)});
    receive(&pair.b, 1, 0, 1024);
    post(&pair.a, &(struct op){.id = 2, .code = opcodes[packed & 255].code, .len = 8, .imm = 0x1234, .to = 512});
    say_states(&pair);
}

static void inline_limits(long type) {
    struct pair pair;
    pair_open(&pair, &(struct options){.type = (enum ibv_qp_type)type, .inline_bytes = 32});
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (ibv_query_qp(pair.a.qp, &attr, IBV_QP_CAP, &init)) give_up("query");
    receive(&pair.b, 1, 0, 1024);
    post(&pair.a, &(struct op){
        .id = 2, .code = IBV_WR_SEND, .len = attr.cap.max_inline_data + 1, .flags = IBV_SEND_INLINE});
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 32, .flags = IBV_SEND_INLINE, .lkey = 0xdead});
    memset(pair.a.memory, 0xaa, 32); // it was copied when it was posted
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_memory("B", pair.b.memory + GRH_BYTES, 1024 - GRH_BYTES);
    say_empty(&pair);
}

// Inline data of what cannot be inline.
static void inline_read(long code) {
    struct pair pair;
    pair_open(&pair, &(struct options){.inline_bytes = 32});
    post(&pair.a, &(struct op){.id = 1, .code = (enum ibv_wr_opcode)code, .len = 8, .flags = IBV_SEND_INLINE});
}

// Everything outstanding is flushed in order: sends that wait for a receiver, and receives.
static void flush_order(long packed) {
    bool by_peer = packed & 1;
    struct pair pair;
    pair_open(&pair, &(struct options){.rnr_timer = 14, .rnr_retry = by_peer ? 1 : 7});
    for (uint64_t i = 0; i < 8; i++) {
        receive(&pair.a, 100 + i, 0, 8);
        post(&pair.a, &(struct op){
            .id = i, .code = i % 2 ? IBV_WR_SEND : IBV_WR_RDMA_WRITE, .len = 8, .to = 64,
            .flags = i % 4 == 2 ? UNSIGNALED : 0});
    }
    if (!by_peer) {
        sent(&pair.a, 1);
        say_modify(&pair.a, IBV_QPS_ERR);
    }
    sent(&pair.a, by_peer ? 8 : 7);
    received(&pair.a, 8);
    say_empty(&pair);
    say_states(&pair);
    post(&pair.a, &(struct op){.id = 50, .code = IBV_WR_SEND, .len = 8});
    receive(&pair.a, 51, 0, 8);
    sent(&pair.a, 1);
    received(&pair.a, 1);
    say_empty(&pair);
}

// RESET discards what is outstanding, without completions.
static void reset_discards(long type) {
    struct pair pair;
    pair_open(&pair, &(struct options){.type = (enum ibv_qp_type)type});
    for (uint64_t i = 0; i < 4; i++) receive(&pair.a, i, 0, 64);
    if (type == IBV_QPT_RC) post(&pair.a, &(struct op){.id = 9, .code = IBV_WR_SEND, .len = 8});
    say_modify(&pair.a, IBV_QPS_RESET);
    say_empty(&pair);
    say_modify(&pair.b, IBV_QPS_RESET);
    end_connect(&pair.a);
    end_connect(&pair.b);
    receive(&pair.b, 20, 0, 1024);
    post(&pair.a, &(struct op){.id = 21, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_empty(&pair);
}

// A queue pair that goes takes its completions with it? Those that are in the queue already stay.
static void destroy_with_work(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    receive(&pair.b, 1, 0, 64);
    receive(&pair.b, 2, 0, 64);
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    say("destroy A -> %s", result(ibv_destroy_qp(pair.a.qp)));
    received(&pair.b, 1);
    say("destroy B, a receive outstanding -> %s", result(ibv_destroy_qp(pair.b.qp)));
    struct ibv_wc wc;
    say("in B's queue then: %d", ibv_poll_cq(pair.b.recv_cq, 1, &wc));
}

void add_posting(void) {
    for (size_t t = 0; t < 3; t++) {
        const char *name = type_name(types[t]);
        for (enum ibv_qp_state state = IBV_QPS_RESET; state <= IBV_QPS_ERR; state++) {
            if (types[t] == IBV_QPT_RC && state == IBV_QPS_SQE) continue;
            add(in_state, (long)types[t] << 8 | state, "post_%s_in_%s", name, state_name(state));
        }
        add(beyond_limits, types[t], "post_%s_beyond_limits", name);
        add(inline_limits, types[t], "post_%s_inline", name);
        add(reset_discards, types[t], "post_%s_reset_discards", name);
        for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++)
            add(opcode_of_type, (long)types[t] << 8 | (long)i, "post_%s_opcode_%s", name, opcodes[i].name);
    }
    add(send_queue_full, 0, "post_send_queue_full");
    add(list_with_bad_request, 0, "post_list_with_bad_request");
    add(inline_read, IBV_WR_RDMA_READ, "post_inline_read");
    add(inline_read, IBV_WR_ATOMIC_FETCH_AND_ADD, "post_inline_faa");
    add(flush_order, 0, "flush_order_by_modify");
    add(flush_order, 1, "flush_order_by_error");
    add(destroy_with_work, 0, "destroy_qp_with_work");
}
