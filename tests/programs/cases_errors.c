// Cases of errors, and the status each end gets for them (IBTA vol. 1, 9.9 and 11.6.2).
#include "cases.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

// The next completion has this id and status.
#define need_completion(side, cq, id, wanted)                                                                          \
    do {                                                                                                               \
        struct ibv_wc wc_ = {0};                                                                                       \
        need(side, poll_one(cq, &wc_, 5000));                                                                          \
        need_status(side, wc_, wanted);                                                                                \
        need(side, wc_.wr_id == (id));                                                                                 \
    } while (0)

static bool becomes_error(struct ibv_qp *qp) {
    for (unsigned i = 0; i < 1000; i++, sleep_ms(1))
        if (qp_state(qp) == IBV_QPS_ERR) return true;
    return false;
}

// ---- receiver not ready

static void rnr_exceeded(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.rnr_retry = 2, .rnr_timer = 1}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) return;
    need(s, !post_send(e, 1, 0, 100, 0));
    need(s, !post_send(e, 2, 0, 100, 0));
    need_completion(s, e->send_cq, 1, IBV_WC_RNR_RETRY_EXC_ERR);
    need_completion(s, e->send_cq, 2, IBV_WC_WR_FLUSH_ERR);
    need(s, qp_state(e->qp) == IBV_QPS_ERR);
}

static void rnr_never_retried(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.rnr_retry = NEVER}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) return;
    need(s, !post_send(e, 1, 0, 100, 0));
    need_completion(s, e->send_cq, 1, IBV_WC_RNR_RETRY_EXC_ERR);
}

// rnr_retry 7 waits for ever; the receive comes late, and everything arrives in order.
static void rnr_patient(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.rnr_retry = 7, .rnr_timer = 14}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A)
        for (unsigned i = 0; i < 10; i++) need(s, !post_send(e, i, 0, i + 1, 0));
    struct ibv_wc wc;
    for (unsigned i = 0; i < 10; i++) {
        if (s->role == ROLE_A) {
            need_completion(s, e->send_cq, i, IBV_WC_SUCCESS);
            continue;
        }
        if (i % 4 == 0) sleep_ms(20);
        need(s, !post_recv(e, i, 0, 100));
        need(s, poll_one(e->recv_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.wr_id == i && wc.byte_len == i + 1);
    }
}

static void rnr_write_immediate(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.rnr_retry = 1}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) return;
    need(s, !post_remote(e, IBV_WR_RDMA_WRITE_WITH_IMM, 1, 0, 100, 0, 0));
    need_completion(s, e->send_cq, 1, IBV_WC_RNR_RETRY_EXC_ERR);
}

// UC and UD have no receiver-not-ready: the message is lost and the sender's work succeeds.
static void lost(struct side *s, struct endpoint *e, enum ibv_qp_type type) {
    need(s, endpoint_open(e, &(struct options){.type = type}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A) {
        need(s, !post_send(e, 1, 0, 100, 0));
        need_completion(s, e->send_cq, 1, IBV_WC_SUCCESS);
        need(s, meet(s));
        need(s, meet(s));
        need(s, !post_send(e, 2, 0, 200, 0));
        need_completion(s, e->send_cq, 2, IBV_WC_SUCCESS);
    } else {
        struct ibv_wc wc;
        uint32_t header = type == IBV_QPT_UD ? GRH_BYTES : 0;
        need(s, meet(s));
        need(s, !post_recv(e, 1, 0, 1000) && !post_recv(e, 2, 0, 1000));
        need(s, meet(s));
        need(s, poll_one(e->recv_cq, &wc, 5000));
        // Between hosts the message and the word of it race; one that came late was not lost.
        if (wc.byte_len == 100 + header) need(s, poll_one(e->recv_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.byte_len == 200 + header);
    }
}

static void lost_uc(struct side *s, struct endpoint *e) { lost(s, e, IBV_QPT_UC); }
static void lost_ud(struct side *s, struct endpoint *e) { lost(s, e, IBV_QPT_UD); }

// ---- lengths and local keys

static void receive_too_short(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    need(s, endpoint_to_init(e));
    if (s->role == ROLE_B) need(s, !post_recv(e, 1, 0, 99));
    if (s->role == ROLE_B) need(s, !post_recv(e, 2, 0, 1000));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A) {
        need(s, !post_send(e, 1, 0, 100, 0));
        need_completion(s, e->send_cq, 1, IBV_WC_REM_INV_REQ_ERR);
    } else {
        need_completion(s, e->recv_cq, 1, IBV_WC_LOC_LEN_ERR);
        need_completion(s, e->recv_cq, 2, IBV_WC_WR_FLUSH_ERR);
    }
    need(s, becomes_error(e->qp));
}

static void receive_key_wrong(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    need(s, endpoint_to_init(e));
    if (s->role == ROLE_B) need(s, !post_recv_key(e, 1, 0, 1000, e->mr->lkey ^ 0x5a5a00));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A) {
        need(s, !post_send(e, 1, 0, 100, 0));
        need_completion(s, e->send_cq, 1, IBV_WC_REM_OP_ERR);
    } else {
        need_completion(s, e->recv_cq, 1, IBV_WC_LOC_PROT_ERR);
    }
}

static void send_key_wrong(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) return;
    e->mr->lkey ^= 0x5a5a00;
    int rc = post_send(e, 1, 0, 100, 0);
    e->mr->lkey ^= 0x5a5a00;
    need(s, !rc);
    need(s, !post_send(e, 2, 0, 100, 0));
    need_completion(s, e->send_cq, 1, IBV_WC_LOC_PROT_ERR);
    need_completion(s, e->send_cq, 2, IBV_WC_WR_FLUSH_ERR);
}

static void send_beyond_region(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) return;
    need(s, !post_send(e, 1, e->bytes - 99, 100, 0));
    need_completion(s, e->send_cq, 1, IBV_WC_LOC_PROT_ERR);
}

// A READ writes into local memory: the region must allow that.
static void read_into_read_only(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    struct ibv_mr *read_only = ibv_reg_mr(e->pd, e->memory, e->bytes, 0);
    need(s, read_only);
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A) {
        struct ibv_mr *usual = e->mr;
        e->mr = read_only;
        int rc = post_remote(e, IBV_WR_RDMA_READ, 1, 0, 100, 0, 0);
        e->mr = usual;
        need(s, !rc);
        need_completion(s, e->send_cq, 1, IBV_WC_LOC_PROT_ERR);
    }
    need(s, !ibv_dereg_mr(read_only));
}

// A key names memory only until its region is gone.
static void key_after_deregistration(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) {
        need(s, !ibv_dereg_mr(e->mr));
        e->mr = NULL;
        need(s, meet(s));
        return;
    }
    need(s, meet(s));
    need(s, !post_remote(e, IBV_WR_RDMA_WRITE, 1, 0, 100, 0, 0));
    need_completion(s, e->send_cq, 1, IBV_WC_REM_ACCESS_ERR);
}

static void ud_message_too_long(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.type = IBV_QPT_UD}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) return;
    if (post_send(e, 1, 0, 4097, 0)) return; // refused at once is as good
    need_completion(s, e->send_cq, 1, IBV_WC_LOC_LEN_ERR);
}

static void ud_wrong_qkey(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.type = IBV_QPT_UD}));
    need(s, endpoint_to_init(e));
    if (s->role == ROLE_B) need(s, !post_recv(e, 1, 0, 1000));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A) {
        e->peer.qkey ^= 1;
        need(s, !post_send(e, 1, 0, 100, 0));
        need_completion(s, e->send_cq, 1, IBV_WC_SUCCESS);
        e->peer.qkey ^= 1;
        need(s, !post_send(e, 2, 0, 200, 0));
        need_completion(s, e->send_cq, 2, IBV_WC_SUCCESS);
    } else {
        struct ibv_wc wc;
        need(s, poll_one(e->recv_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.byte_len == 200 + GRH_BYTES);
    }
}

// ---- remote access

struct attempt {
    enum ibv_wr_opcode opcode;
    uint64_t offset;
    uint32_t length, key_bits;
    int mr_access, qp_access;
    enum ibv_wc_status wanted;
};

static void attempt(struct side *s, struct endpoint *e, struct attempt a) {
    struct options options = {.bytes = 65536};
    if (s->role == ROLE_B) options.mr_access = a.mr_access;
    if (s->role == ROLE_B) options.qp_access = a.qp_access;
    need(s, endpoint_open(e, &options));
    need(s, endpoint_to_init(e));
    if (s->role == ROLE_B) need(s, !post_recv(e, 7, 0, 1000));
    fill(e->memory, e->bytes, 1);
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A) {
        e->peer.rkey ^= a.key_bits;
        memset(e->memory, 0xee, e->bytes);
        struct ibv_sge sge = {(uintptr_t)e->memory, a.length, e->mr->lkey};
        struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = a.opcode};
        if (a.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
            wr.wr.atomic.remote_addr = e->peer.memory + a.offset;
            wr.wr.atomic.rkey = e->peer.rkey;
            wr.wr.atomic.compare_add = 1;
        } else {
            wr.wr.rdma.remote_addr = e->peer.memory + a.offset;
            wr.wr.rdma.rkey = e->peer.rkey;
        }
        need(s, !post_work(e, &wr));
        need_completion(s, e->send_cq, 1, a.wanted);
        need(s, meet(s));
    } else {
        need(s, meet(s));
        need(s, holds(e->memory, e->bytes, 1)); // nothing was touched
        need(s, becomes_error(e->qp));
        need_completion(s, e->recv_cq, 7, IBV_WC_WR_FLUSH_ERR);
    }
}

#define ATTEMPT(NAME, ...)                                                                                             \
    static void NAME(struct side *s, struct endpoint *e) { attempt(s, e, (struct attempt){__VA_ARGS__}); }
#define WRITABLE (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)

ATTEMPT(write_key_wrong, IBV_WR_RDMA_WRITE, 0, 100, 0x777700, 0, 0, IBV_WC_REM_ACCESS_ERR)
ATTEMPT(read_key_wrong, IBV_WR_RDMA_READ, 0, 100, 0x777700, 0, 0, IBV_WC_REM_ACCESS_ERR)
ATTEMPT(atomic_key_wrong, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 8, 0x777700, 0, 0, IBV_WC_REM_ACCESS_ERR)
ATTEMPT(write_beyond_region, IBV_WR_RDMA_WRITE, 65500, 37, 0, 0, 0, IBV_WC_REM_ACCESS_ERR)
ATTEMPT(read_before_region, IBV_WR_RDMA_READ, -1ull, 10, 0, 0, 0, IBV_WC_REM_ACCESS_ERR)
ATTEMPT(write_wrapping_around, IBV_WR_RDMA_WRITE, -4096ull, 65536, 0, 0, 0, IBV_WC_REM_ACCESS_ERR)
ATTEMPT(write_to_local_only, IBV_WR_RDMA_WRITE, 0, 100, 0, NEVER_ACCESS, 0, IBV_WC_REM_ACCESS_ERR)
ATTEMPT(read_from_write_only, IBV_WR_RDMA_READ, 0, 100, 0, WRITABLE, 0, IBV_WC_REM_ACCESS_ERR)
ATTEMPT(atomic_on_write_only, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 8, 0, WRITABLE, 0, IBV_WC_REM_ACCESS_ERR)
ATTEMPT(atomic_unaligned, IBV_WR_ATOMIC_FETCH_AND_ADD, 4, 8, 0, 0, 0, IBV_WC_REM_INV_REQ_ERR)
ATTEMPT(qp_without_write, IBV_WR_RDMA_WRITE, 0, 100, 0, 0, NEVER_ACCESS, IBV_WC_REM_INV_REQ_ERR)
ATTEMPT(qp_without_read, IBV_WR_RDMA_READ, 0, 100, 0, 0, WRITABLE, IBV_WC_REM_INV_REQ_ERR)
ATTEMPT(qp_without_atomic, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 8, 0, 0, WRITABLE, IBV_WC_REM_INV_REQ_ERR)

// A key works only in the protection domain that it was made in.
static void key_of_another_domain(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    struct ibv_pd *other = ibv_alloc_pd(e->context);
    need(s, other);
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    struct ibv_mr *foreign = ibv_reg_mr(other, e->memory, e->bytes, access);
    need(s, foreign);
    e->mine.rkey = foreign->rkey;
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A) {
        need(s, !post_remote(e, IBV_WR_RDMA_WRITE, 1, 0, 100, 0, 0));
        need_completion(s, e->send_cq, 1, IBV_WC_REM_ACCESS_ERR);
    }
    need(s, meet(s));
    need(s, ibv_dealloc_pd(other) == EBUSY);
    need(s, !ibv_dereg_mr(foreign) && !ibv_dealloc_pd(other));
}

// ---- retries and flushing

static void retry_exceeded(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.timeout = 8, .retry = 2}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) {
        need(s, !ibv_destroy_qp(e->qp));
        e->qp = NULL;
        need(s, meet(s));
        return;
    }
    need(s, meet(s));
    for (unsigned i = 1; i <= 3; i++) need(s, !post_send(e, i, 0, 100, 0));
    need_completion(s, e->send_cq, 1, IBV_WC_RETRY_EXC_ERR);
    need_completion(s, e->send_cq, 2, IBV_WC_WR_FLUSH_ERR);
    need_completion(s, e->send_cq, 3, IBV_WC_WR_FLUSH_ERR);
    need(s, qp_state(e->qp) == IBV_QPS_ERR);
}

static void peer_in_error(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.timeout = 8, .retry = 2}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) need(s, qp_modify_state(e->qp, IBV_QPS_ERR));
    need(s, meet(s));
    if (s->role == ROLE_B) return;
    need(s, !post_remote(e, IBV_WR_RDMA_WRITE, 1, 0, 100, 0, 0));
    need_completion(s, e->send_cq, 1, IBV_WC_RETRY_EXC_ERR);
}

static void flush_in_order(struct side *s, struct endpoint *e) {
    enum { COUNT = 30 };
    need(s, endpoint_open(e, &(struct options){.rnr_retry = 7, .rnr_timer = 20}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) return;
    for (unsigned i = 0; i < COUNT; i++) need(s, !post_recv(e, 100 + i, 0, 100));
    for (unsigned i = 0; i < COUNT; i++) need(s, !post_send(e, i, 0, 100, 0)); // B has no receive: all wait
    need(s, qp_modify_state(e->qp, IBV_QPS_ERR));
    for (unsigned i = 0; i < COUNT; i++) need_completion(s, e->send_cq, i, IBV_WC_WR_FLUSH_ERR);
    for (unsigned i = 0; i < COUNT; i++) need_completion(s, e->recv_cq, 100 + i, IBV_WC_WR_FLUSH_ERR);
    // Requests posted now flush as well.
    need(s, !post_send(e, 200, 0, 100, 0));
    need(s, !post_recv(e, 201, 0, 100));
    need_completion(s, e->send_cq, 200, IBV_WC_WR_FLUSH_ERR);
    need_completion(s, e->recv_cq, 201, IBV_WC_WR_FLUSH_ERR);
    struct ibv_wc wc;
    need(s, ibv_poll_cq(e->send_cq, 1, &wc) == 0 && ibv_poll_cq(e->recv_cq, 1, &wc) == 0);
}

// RESET forgets the outstanding work, and the QP can be connected again.
static void reset_and_again(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.rnr_retry = 7}));
    for (unsigned round = 0; round < 5; round++) {
        need(s, endpoint_to_init(e));
        if (s->role == ROLE_B) need(s, !post_recv(e, round, 0, 100));
        need(s, endpoint_connect(s, e));
        if (s->role == ROLE_A) {
            need(s, !post_send(e, round, 0, 50, 0));
            need_completion(s, e->send_cq, round, IBV_WC_SUCCESS);
            need(s, !post_send(e, 50 + round, 0, 50, 0)); // finds no receive
        } else {
            need_completion(s, e->recv_cq, round, IBV_WC_SUCCESS);
        }
        need(s, meet(s));
        need(s, qp_modify_state(e->qp, IBV_QPS_RESET));
        struct ibv_wc wc;
        need(s, ibv_poll_cq(e->send_cq, 1, &wc) == 0);
        need(s, meet(s));
    }
}

static void post_in_wrong_state(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    need(s, post_send(e, 1, 0, 10, 0) == EINVAL);
    need(s, post_recv(e, 1, 0, 10) == EINVAL);
    need(s, endpoint_to_init(e));
    need(s, post_send(e, 1, 0, 10, 0) == EINVAL);
    need(s, post_recv(e, 1, 0, 10) == 0);
}

static void wrong_transitions(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    need(s, qp_state(e->qp) == IBV_QPS_RESET);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS};
    need(s, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE) == EINVAL);
    attr.qp_state = IBV_QPS_RTR;
    need(s, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE) == EINVAL);
    attr.qp_state = IBV_QPS_INIT; // port and access are missing
    need(s, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE) == EINVAL);
    attr.port_num = 2; // there is one port
    need(s, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS) != 0);
    need(s, qp_state(e->qp) == IBV_QPS_RESET);
    need(s, endpoint_connect(s, e));
    attr.qp_state = IBV_QPS_INIT;
    need(s, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE) == EINVAL);
    need(s, qp_state(e->qp) == IBV_QPS_RTS);
}

const struct test_case error_cases[] = {
    {"rnr_exceeded", rnr_exceeded},
    {"rnr_never_retried", rnr_never_retried},
    {"rnr_patient", rnr_patient},
    {"rnr_write_immediate", rnr_write_immediate},
    {"lost_uc", lost_uc},
    {"lost_ud", lost_ud},
    {"receive_too_short", receive_too_short},
    {"receive_key_wrong", receive_key_wrong},
    {"send_key_wrong", send_key_wrong},
    {"send_beyond_region", send_beyond_region},
    {"read_into_read_only", read_into_read_only},
    {"key_after_deregistration", key_after_deregistration},
    {"ud_message_too_long", ud_message_too_long},
    {"ud_wrong_qkey", ud_wrong_qkey},
    {"write_key_wrong", write_key_wrong},
    {"read_key_wrong", read_key_wrong},
    {"atomic_key_wrong", atomic_key_wrong},
    {"write_beyond_region", write_beyond_region},
    {"read_before_region", read_before_region},
    {"write_wrapping_around", write_wrapping_around},
    {"write_to_local_only", write_to_local_only},
    {"read_from_write_only", read_from_write_only},
    {"atomic_on_write_only", atomic_on_write_only},
    {"atomic_unaligned", atomic_unaligned},
    {"qp_without_write", qp_without_write},
    {"qp_without_read", qp_without_read},
    {"qp_without_atomic", qp_without_atomic},
    {"key_of_another_domain", key_of_another_domain},
    {"retry_exceeded", retry_exceeded},
    {"peer_in_error", peer_in_error},
    {"flush_in_order", flush_in_order},
    {"reset_and_again", reset_and_again},
    {"post_in_wrong_state", post_in_wrong_state},
    {"wrong_transitions", wrong_transitions},
    {NULL, NULL},
};
