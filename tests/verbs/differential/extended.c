// The extended calls: ibv_wr_* and extended completion queues do what the older ones do.
// ibv_wr_post(3), ibv_create_qp_ex(3), ibv_create_cq_ex(3).
#include "trace.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#define COMMON_OPERATIONS (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM)
#define RC_OPERATIONS                                                                                    \
    (COMMON_OPERATIONS | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |                 \
     IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)

static struct ibv_qp *create(struct end *end, enum ibv_qp_type type, uint64_t operations, uint32_t inline_bytes) {
    struct ibv_qp_init_attr_ex init = {
        .send_cq = end->send_cq,
        .recv_cq = end->recv_cq,
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 4, .max_recv_sge = 2,
                .max_inline_data = inline_bytes},
        .qp_type = type,
        .pd = end->pd,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .send_ops_flags = operations,
    };
    errno = 0;
    return ibv_create_qp_ex(end->device->context, &init);
}

// End A posts by the new calls, end B is an ordinary one.
static struct ibv_qp_ex *open_extended(struct pair *pair, enum ibv_qp_type type, uint64_t operations) {
    pair_open(pair, &(struct options){.type = type, .unconnected = true});
    pair->a.qp = create(&pair->a, type, operations, 64);
    if (!pair->a.qp) give_up("create an extended queue pair");
    name_qp(pair->a.qp->qp_num, type, "A");
    end_connect(&pair->a);
    end_connect(&pair->b);
    return ibv_qp_to_qp_ex(pair->a.qp);
}

static void say_end(struct pair *pair) {
    say_states(pair);
    say_empty(pair);
    say_memory("A", pair->a.memory, pair->a.bytes);
    say_memory("B behind a header", pair->b.memory + GRH_BYTES, pair->b.bytes - GRH_BYTES);
}

// Every operation of RC in one batch.
static void batch(long type) {
    struct pair pair;
    bool rc = type == IBV_QPT_RC;
    uint64_t write = type == IBV_QPT_UC ? IBV_QP_EX_WITH_RDMA_WRITE : 0;
    struct ibv_qp_ex *qp =
        open_extended(&pair, (enum ibv_qp_type)type, rc ? RC_OPERATIONS : COMMON_OPERATIONS | write);
    uint64_t a = (uintptr_t)pair.a.memory, b = (uintptr_t)pair.b.memory;
    uint32_t lkey = pair.a.mr->lkey, rkey = pair.b.mr->rkey;
    for (uint64_t i = 0; i < 3; i++) receive(&pair.b, 100 + i, 2000 * i, 2000);
    ibv_wr_start(qp);
    qp->wr_flags = IBV_SEND_SIGNALED;
    qp->wr_id = 1;
    ibv_wr_send(qp);
    if (type == IBV_QPT_UD) ibv_wr_set_ud_addr(qp, pair.a.ah, pair.b.qp->qp_num, QKEY);
    ibv_wr_set_sge(qp, lkey, a + 1, 300);
    qp->wr_id = 2;
    ibv_wr_send_imm(qp, htonl(55));
    if (type == IBV_QPT_UD) ibv_wr_set_ud_addr(qp, pair.a.ah, pair.b.qp->qp_num, QKEY);
    struct ibv_sge list[3] = {{a, 10, lkey}, {a + 500, 20, lkey}, {a + 900, 30, lkey}};
    ibv_wr_set_sge_list(qp, 3, list);
    qp->wr_flags = 0; // this one leaves no completion
    qp->wr_id = 3;
    if (type != IBV_QPT_UD) {
        ibv_wr_rdma_write(qp, rkey, b + 20000);
        ibv_wr_set_sge(qp, lkey, a + 2000, 1000);
    }
    qp->wr_flags = IBV_SEND_SIGNALED;
    if (rc) {
        qp->wr_id = 4;
        ibv_wr_rdma_write_imm(qp, rkey, b + 22000, htonl(66));
        ibv_wr_set_sge(qp, lkey, a + 4000, 1500);
        qp->wr_id = 5;
        ibv_wr_rdma_read(qp, rkey, b + 20000);
        ibv_wr_set_sge(qp, lkey, a + 30000, 2000);
        qp->wr_id = 6;
        ibv_wr_atomic_fetch_add(qp, rkey, b + 40000, 7);
        ibv_wr_set_sge(qp, lkey, a + 40000, 8);
        qp->wr_id = 7;
        ibv_wr_atomic_cmp_swp(qp, rkey, b + 40008, 1, 2);
        ibv_wr_set_sge(qp, lkey, a + 40008, 8);
    }
    say("complete -> %s", result(ibv_wr_complete(qp)));
    sent(&pair.a, rc ? 6 : 2);
    received(&pair.b, rc ? 3 : 2);
    if (type == IBV_QPT_UD) {
        for (size_t i = 0; i < 2; i++) say_memory("B behind a header", pair.b.memory + 2000 * i + GRH_BYTES, 1900);
        return;
    }
    say_end(&pair);
}

static void inline_data(long unused) {
    (void)unused;
    struct pair pair;
    struct ibv_qp_ex *qp = open_extended(&pair, IBV_QPT_RC, RC_OPERATIONS);
    char one[] = "inline data", two[] = " of two pieces";
    receive(&pair.b, 1, 100, 200);
    ibv_wr_start(qp);
    qp->wr_flags = IBV_SEND_SIGNALED;
    qp->wr_id = 1;
    ibv_wr_send(qp);
    ibv_wr_set_inline_data(qp, one, sizeof one);
    qp->wr_id = 2;
    ibv_wr_rdma_write(qp, pair.b.mr->rkey, (uintptr_t)pair.b.memory + 1000);
    struct ibv_data_buf pieces[2] = {{one, sizeof one - 1}, {two, sizeof two}};
    ibv_wr_set_inline_data_list(qp, 2, pieces);
    say("complete -> %s", result(ibv_wr_complete(qp)));
    memset(one, 0, sizeof one);
    sent(&pair.a, 2);
    received(&pair.b, 1);
    say_end(&pair);
}

// A batch begun and given up leaves nothing.
static void abandoned(long unused) {
    (void)unused;
    struct pair pair;
    struct ibv_qp_ex *qp = open_extended(&pair, IBV_QPT_RC, RC_OPERATIONS);
    for (int round = 0; round < 40; round++) {
        ibv_wr_start(qp);
        qp->wr_id = 1;
        qp->wr_flags = IBV_SEND_SIGNALED;
        ibv_wr_rdma_write(qp, pair.b.mr->rkey, (uintptr_t)pair.b.memory);
        ibv_wr_set_sge(qp, pair.a.mr->lkey, (uintptr_t)pair.a.memory, 100);
        ibv_wr_abort(qp);
    }
    receive(&pair.b, 2, 5000, 100);
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_end(&pair);
}

// More than the queue holds: all of the batch is refused.
static void too_many(long unused) {
    (void)unused;
    struct pair pair;
    struct ibv_qp_ex *qp = open_extended(&pair, IBV_QPT_RC, RC_OPERATIONS);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (ibv_query_qp(pair.a.qp, &attr, IBV_QP_CAP, &init)) give_up("query");
    ibv_wr_start(qp);
    qp->wr_flags = IBV_SEND_SIGNALED;
    for (uint32_t i = 0; i <= attr.cap.max_send_wr; i++) {
        qp->wr_id = i;
        ibv_wr_rdma_write(qp, pair.b.mr->rkey, (uintptr_t)pair.b.memory);
        ibv_wr_set_sge(qp, pair.a.mr->lkey, (uintptr_t)pair.a.memory, 100);
    }
    say("complete -> %s", result(ibv_wr_complete(qp)));
    say_end(&pair);
}

static void too_much_inline(long unused) {
    (void)unused;
    struct pair pair;
    struct ibv_qp_ex *qp = open_extended(&pair, IBV_QPT_RC, RC_OPERATIONS);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (ibv_query_qp(pair.a.qp, &attr, IBV_QP_CAP, &init)) give_up("query");
    ibv_wr_start(qp);
    qp->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(qp, pair.b.mr->rkey, (uintptr_t)pair.b.memory);
    ibv_wr_set_inline_data(qp, pair.a.memory, attr.cap.max_inline_data + 1);
    say("complete -> %s", result(ibv_wr_complete(qp)));
    say_end(&pair);
}

static void creation(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.unconnected = true});
    say("RC, all operations -> %s", pointer_result(create(&pair.a, IBV_QPT_RC, RC_OPERATIONS, 0)));
    say("UC with reads -> %s", pointer_result(create(&pair.a, IBV_QPT_UC, IBV_QP_EX_WITH_RDMA_READ, 0)));
    say("UD with writes -> %s", pointer_result(create(&pair.a, IBV_QPT_UD, IBV_QP_EX_WITH_RDMA_WRITE, 0)));
    say("an unknown operation -> %s", pointer_result(create(&pair.a, IBV_QPT_RC, 1ull << 40, 0)));
    say("no operation -> %s", pointer_result(create(&pair.a, IBV_QPT_RC, 0, 0)));
}

// ---- extended completion queues

#define FIELDS (IBV_WC_STANDARD_FLAGS)

static struct ibv_cq_ex *extended_cq(struct device *on, uint32_t entries, uint64_t fields) {
    struct ibv_cq_init_attr_ex init = {.cqe = entries, .cq_context = &device, .wc_flags = fields};
    errno = 0;
    return ibv_create_cq_ex(on->context, &init);
}

// End A sends and end B receives, both with extended queues.
static void open_with_cqs(struct pair *pair, struct ibv_cq_ex *cqs[2], enum ibv_qp_type type) {
    pair_open(pair, &(struct options){.type = type, .unconnected = true});
    struct end *ends[2] = {&pair->a, &pair->b};
    for (int i = 0; i < 2; i++) {
        if (!(cqs[i] = extended_cq(ends[i]->device, 64, FIELDS))) give_up("create an extended completion queue");
        struct ibv_cq *cq = ibv_cq_ex_to_cq(cqs[i]);
        struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = type,
            .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2}};
        if (!(ends[i]->qp = ibv_create_qp(ends[i]->pd, &init))) give_up("create a queue pair");
        ends[i]->send_cq = ends[i]->recv_cq = cq;
        name_qp(ends[i]->qp->qp_num, type, ends[i]->name);
    }
    end_connect(&pair->a);
    end_connect(&pair->b);
}

static void say_current(struct ibv_cq_ex *cq) {
    uint32_t qp = ibv_wc_read_qp_num(cq);
    if (cq->status != IBV_WC_SUCCESS) {
        say("%s completes %lu %s", qp_name(qp), (unsigned long)cq->wr_id, status_name(cq->status));
        return;
    }
    enum ibv_wc_opcode opcode = ibv_wc_read_opcode(cq);
    say("%s completes %lu %s %s", qp_name(qp), (unsigned long)cq->wr_id, status_name(cq->status),
        wc_opcode_name(opcode));
    if (!(opcode & IBV_WC_RECV)) return;
    unsigned flags = ibv_wc_read_wc_flags(cq);
    say("bytes %u, with immediate %d, imm %x", ibv_wc_read_byte_len(cq), !!(flags & IBV_WC_WITH_IMM),
        flags & IBV_WC_WITH_IMM ? ntohl(ibv_wc_read_imm_data(cq)) : 0);
}

static int start(struct ibv_cq_ex *cq) {
    struct ibv_poll_cq_attr attr = {0};
    uint64_t until = now_ms() + (uint64_t)wait_ms;
    int rc;
    while ((rc = ibv_start_poll(cq, &attr)) == ENOENT && now_ms() < until) usleep(100);
    return rc;
}

static void next_until(struct ibv_cq_ex *cq, int count) {
    int rc = start(cq);
    if (rc) {
        say("start -> %s", result(rc));
        return;
    }
    uint64_t until = now_ms() + (uint64_t)wait_ms;
    for (int i = 0; i < count; i++) {
        say_current(cq);
        if (i + 1 == count) break;
        while ((rc = ibv_next_poll(cq)) == ENOENT && now_ms() < until) usleep(100);
        if (rc) break;
    }
    say("next -> %s", result(rc ? rc : ibv_next_poll(cq)));
    ibv_end_poll(cq);
}

static void polled(long type) {
    struct pair pair;
    struct ibv_cq_ex *cqs[2];
    open_with_cqs(&pair, cqs, (enum ibv_qp_type)type);
    struct ibv_poll_cq_attr attr = {0};
    say("start on the empty queue -> %s", result(ibv_start_poll(cqs[0], &attr)));
    for (uint64_t i = 0; i < 4; i++) receive(&pair.b, 10 + i, 1000 * i, 1000);
    for (uint64_t i = 0; i < 4; i++)
        post(&pair.a, &(struct op){.id = i, .code = i % 2 ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
                                   .len = 100 + (uint32_t)i, .imm = 40 + (uint32_t)i});
    next_until(cqs[0], 4);
    next_until(cqs[1], 4);
    attr.comp_mask = 1;
    say("start with an unknown field -> %s", result(ibv_start_poll(cqs[0], &attr)));
}

static void polled_errors(long unused) {
    (void)unused;
    struct pair pair;
    struct ibv_cq_ex *cqs[2];
    open_with_cqs(&pair, cqs, IBV_QPT_RC);
    receive(&pair.b, 10, 0, 100);
    post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_RDMA_WRITE, .len = 8, .rkey = pair.b.mr->rkey ^ 0x5a5a5a00});
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_RDMA_WRITE, .len = 8});
    next_until(cqs[0], 2);
    next_until(cqs[1], 1);
}

static void cq_creation(long unused) {
    (void)unused;
    say("standard fields -> %s", pointer_result(extended_cq(&device, 16, IBV_WC_STANDARD_FLAGS)));
    say("no fields -> %s", pointer_result(extended_cq(&device, 16, 0)));
    say("unknown fields -> %s", pointer_result(extended_cq(&device, 16, 1ull << 40)));
    say("no entries -> %s", pointer_result(extended_cq(&device, 0, 0)));
    struct ibv_cq_init_attr_ex init = {.cqe = 16, .comp_mask = 1u << 20};
    errno = 0;
    say("an unknown attribute -> %s", pointer_result(ibv_create_cq_ex(device.context, &init)));
    struct ibv_cq_ex *cq = extended_cq(&device, 16, 0);
    if (!cq) return;
    say("cq_context %d", ibv_cq_ex_to_cq(cq)->cq_context == &device);
    say("destroy -> %s", result(ibv_destroy_cq(ibv_cq_ex_to_cq(cq))));
}

// Answers of rdma-core's extended calls for features that the device may not have.
static void offered(long unused) {
    (void)unused;
    struct ibv_pd *pd = ibv_alloc_pd(device.context);
    struct ibv_srq_init_attr_ex init = {.attr = {.max_wr = 8, .max_sge = 1},
                                        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
                                        .srq_type = IBV_SRQT_BASIC, .pd = pd};
    struct ibv_srq *srq = ibv_create_srq_ex(device.context, &init);
    say("a basic shared queue, extended -> %s", pointer_result(srq));
    if (!srq) return;
    uint32_t number = 0;
    say("its number -> %s", result(ibv_get_srq_num(srq, &number)));
    say("destroy -> %s", result(ibv_destroy_srq(srq)));
}

void add_extended(void) {
    add(batch, IBV_QPT_RC, "wr_batch_rc");
    add(batch, IBV_QPT_UC, "wr_batch_uc");
    add(batch, IBV_QPT_UD, "wr_batch_ud");
    add(inline_data, 0, "wr_inline");
    add(abandoned, 0, "wr_abort");
    add(too_many, 0, "wr_too_many");
    add(too_much_inline, 0, "wr_too_much_inline");
    add(creation, 0, "wr_creation");
    add(polled, IBV_QPT_RC, "cq_ex_rc");
    add(polled, IBV_QPT_UD, "cq_ex_ud");
    add(polled_errors, 0, "cq_ex_errors");
    add(cq_creation, 0, "cq_ex_creation");
    add(offered, 0, "srq_ex_basic");
}
