// Uses of queues besides plain transfers: invalidation, moderation, multicast, extended
// completions, ECE.
#define _GNU_SOURCE
#include "apps.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// B gives A a window of its memory, and A gives it back with its last message.
static bool send_with_invalidate(void) {
    struct pair p;
    struct ibv_wc wc;
    want(pair_open(&p, &(struct options){0}, NULL));
    struct ibv_mr *mr = ibv_reg_mr(p.b.pd, p.b.memory, p.b.bytes,
                                   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND);
    struct ibv_mw *mw = ibv_alloc_mw(p.b.pd, IBV_MW_TYPE_2);
    want(mr && mw);
    struct ibv_send_wr bind = {.wr_id = 1, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED};
    bind.bind_mw.mw = mw;
    bind.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
    bind.bind_mw.bind_info = (struct ibv_mw_bind_info){mr, (uintptr_t)p.b.memory + 4096, 4096, IBV_ACCESS_REMOTE_WRITE};
    struct ibv_send_wr *bad;
    want(!ibv_post_send(p.b.qp, &bind, &bad) && poll_one(p.b.send_cq, &wc, 5000));
    want(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW && wc.wr_id == 1);
    struct address whole = p.a.peer;
    p.a.peer.rkey = bind.bind_mw.rkey;
    fill(p.a.memory, 1000, 5);
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 2, 0, 1000, 4096, 0) && completes(p.a.send_cq, 2));
    want(holds(p.b.memory + 4096, 1000, 5));
    want(!post_recv(&p.b, 3, 0, 100));
    struct ibv_sge sge = {(uintptr_t)p.a.memory, 100, p.a.mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 3, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV};
    wr.invalidate_rkey = bind.bind_mw.rkey;
    want(!post_work(&p.a, &wr) && completes(p.a.send_cq, 3) && poll_one(p.b.recv_cq, &wc, 5000));
    want(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.byte_len == 100);
    want(wc.wc_flags == IBV_WC_WITH_INV && wc.invalidated_rkey == bind.bind_mw.rkey);
    // Bound again and taken away by its owner.
    bind.bind_mw.rkey = ibv_inc_rkey(bind.bind_mw.rkey);
    want(!ibv_post_send(p.b.qp, &bind, &bad) && completes(p.b.send_cq, 1));
    p.a.peer.rkey = bind.bind_mw.rkey;
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 4, 0, 8, 4096, 0) && completes(p.a.send_cq, 4));
    struct ibv_send_wr invalidate = {.wr_id = 5, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED};
    invalidate.invalidate_rkey = bind.bind_mw.rkey;
    want(!ibv_post_send(p.b.qp, &invalidate, &bad) && poll_one(p.b.send_cq, &wc, 5000));
    want(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_LOCAL_INV && wc.wr_id == 5);
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 6, 0, 8, 4096, 0) && poll_one(p.a.send_cq, &wc, 5000));
    want(wc.status == IBV_WC_REM_ACCESS_ERR && wc.wr_id == 6);
    p.a.peer = whole;
    want(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(mr));
    return pair_close(&p);
}

// A request with impossible fields is refused when it is posted.
static bool refused_requests(void) {
    struct pair rc, uc, ud;
    struct ibv_send_wr *bad;
    want(pair_open(&rc, &(struct options){0}, NULL) && pair_open(&uc, &(struct options){.type = IBV_QPT_UC}, NULL));
    want(pair_open(&ud, &(struct options){.type = IBV_QPT_UD}, NULL));
    struct ibv_send_wr wr = {.opcode = IBV_WR_BIND_MW};
    want(ibv_post_send(rc.a.qp, &wr, &bad) == EINVAL);
    wr.opcode = IBV_WR_TSO;
    want(ibv_post_send(rc.a.qp, &wr, &bad) == EOPNOTSUPP);
    wr.opcode = IBV_WR_SEND_WITH_INV;
    want(ibv_post_send(uc.a.qp, &wr, &bad) == EINVAL && post_work(&ud.a, &wr) == EINVAL);
    wr.opcode = IBV_WR_LOCAL_INV;
    want(post_work(&ud.a, &wr) == EINVAL);
    wr.send_flags = IBV_SEND_INLINE;
    want(ibv_post_send(rc.a.qp, &wr, &bad) == EINVAL);
    return pair_close(&rc) && pair_close(&uc) && pair_close(&ud);
}

// A notification waits for so many completions, or so long.
static bool moderation(void) {
    struct pair p;
    struct ibv_cq *cq;
    void *context;
    want(pair_open(&p, &(struct options){.events = true}, NULL));
    struct ibv_modify_cq_attr attr = {.attr_mask = 2};
    want(ibv_modify_cq(p.a.send_cq, &attr) == EINVAL);
    attr = (struct ibv_modify_cq_attr){IBV_CQ_ATTR_MODERATE, {.cq_count = 4, .cq_period = 60000}};
    want(!ibv_modify_cq(p.a.send_cq, &attr));
    bool early = true;
    for (unsigned tries = 0; early && tries < 50; tries++) {
        want(!ibv_req_notify_cq(p.a.send_cq, 0));
        uint64_t begin = now_ns();
        for (unsigned i = 0; i < 3; i++) want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, i, 0, 8, 0, 0));
        if (!(early = fd_readable(p.a.channel->fd, 10))) break;
        want(now_ns() - begin >= 59000000); // a busy machine: the period was over
        want(!ibv_get_cq_event(p.a.channel, &cq, &context));
        ibv_ack_cq_events(cq, 1);
        for (unsigned i = 0; i < 3; i++) want(completes(cq, i));
    }
    want(!early);
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 3, 0, 8, 0, 0) && fd_readable(p.a.channel->fd, 5000));
    want(!ibv_get_cq_event(p.a.channel, &cq, &context) && cq == p.a.send_cq);
    ibv_ack_cq_events(cq, 1);
    for (unsigned i = 0; i < 4; i++) want(completes(cq, i));
    // Too few for the count: the period ends it.
    attr.moderate = (struct ibv_moderate_cq){.cq_count = 1000, .cq_period = 20000};
    want(!ibv_modify_cq(cq, &attr) && !ibv_req_notify_cq(cq, 0));
    uint64_t begin = now_ns();
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 4, 0, 8, 0, 0) && fd_readable(p.a.channel->fd, 5000));
    want(now_ns() - begin >= 19000000);
    want(!ibv_get_cq_event(p.a.channel, &cq, &context) && completes(cq, 4));
    ibv_ack_cq_events(cq, 1);
    // None again.
    attr.moderate = (struct ibv_moderate_cq){0, 0};
    want(!ibv_modify_cq(cq, &attr) && !ibv_req_notify_cq(cq, 0));
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 5, 0, 8, 0, 0) && fd_readable(p.a.channel->fd, 5000));
    want(!ibv_get_cq_event(p.a.channel, &cq, &context) && completes(cq, 5));
    ibv_ack_cq_events(cq, 1);
    return pair_close(&p);
}

static bool ece(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    struct ibv_ece ece = {9, 9, 9};
    want(!ibv_query_ece(p.a.qp, &ece) && ece.vendor_id == 0x1f5f && !ece.options && !ece.comp_mask);
    want(!ibv_set_ece(p.a.qp, &ece));
    ece.options = 1;
    want(ibv_set_ece(p.a.qp, &ece) == EINVAL);
    ece = (struct ibv_ece){.vendor_id = 0x2c9};
    want(!ibv_set_ece(p.a.qp, &ece) && ece.vendor_id == 0x1f5f && ece.options == 0);
    ece.comp_mask = 1;
    want(ibv_set_ece(p.a.qp, &ece) == EINVAL);
    return pair_close(&p);
}

// Each field of a completion, whether messages have it or not.
static bool extended_completions(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    struct ibv_cq_init_attr_ex wanted = {.cqe = 16,
                                         .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
                                                     IBV_WC_EX_WITH_CVLAN | IBV_WC_EX_WITH_FLOW_TAG |
                                                     IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(p.a.context, &wanted);
    want(cq);
    wanted.wc_flags = IBV_WC_EX_WITH_TM_INFO;
    want(!ibv_create_cq_ex(p.a.context, &wanted) && errno == EOPNOTSUPP);
    wanted = (struct ibv_cq_init_attr_ex){
        .cqe = 16, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS, .flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN};
    want(!ibv_create_cq_ex(p.a.context, &wanted) && errno == EOPNOTSUPP);
    struct ibv_qp_init_attr init = {.send_cq = ibv_cq_ex_to_cq(cq),
                                    .recv_cq = ibv_cq_ex_to_cq(cq),
                                    .cap = {8, 8, 1, 1, 0},
                                    .qp_type = IBV_QPT_RC,
                                    .sq_sig_all = 1};
    want(!ibv_destroy_qp(p.a.qp) && (p.a.qp = ibv_create_qp(p.a.pd, &init)));
    p.a.mine.qpn = p.a.qp->qp_num;
    want(qp_modify_state(p.b.qp, IBV_QPS_RESET) && connect_two(&p.a, &p.b));
    struct timespec before;
    clock_gettime(CLOCK_MONOTONIC, &before);
    want(!post_recv(&p.a, 1, 0, 100));
    struct ibv_sge sge = {(uintptr_t)p.b.memory, 50, p.b.mr->lkey};
    struct ibv_send_wr wr = {
        .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htonl(77)};
    want(!post_work(&p.b, &wr) && completes(p.b.send_cq, 2));
    uint64_t end = now_ns() + 5000000000u;
    int rc;
    while ((rc = ibv_start_poll(cq, &(struct ibv_poll_cq_attr){0})) == ENOENT && now_ns() < end) {}
    want(rc == 0 && cq->wr_id == 1 && cq->status == IBV_WC_SUCCESS && ibv_wc_read_opcode(cq) == IBV_WC_RECV);
    want(ibv_wc_read_byte_len(cq) == 50 && ibv_wc_read_imm_data(cq) == htonl(77) && ibv_wc_read_qp_num(cq) == p.a.qp->qp_num);
    want(ibv_wc_read_wc_flags(cq) == IBV_WC_WITH_IMM && !ibv_wc_read_vendor_err(cq) && !ibv_wc_read_src_qp(cq));
    want(!ibv_wc_read_slid(cq) && !ibv_wc_read_sl(cq) && !ibv_wc_read_dlid_path_bits(cq));
    want(!ibv_wc_read_cvlan(cq) && !ibv_wc_read_flow_tag(cq));
    want(ibv_wc_read_completion_ts(cq) >= (uint64_t)before.tv_sec * 1000000000u + (uint64_t)before.tv_nsec);
    want(ibv_wc_read_completion_wallclock_ns(cq) > 1700000000u * 1000000000ull);
    want(ibv_next_poll(cq) == ENOENT);
    ibv_end_poll(cq);
    // No completion is from before its request, also while the router is busy.
    for (unsigned i = 0; i < 2000; i++) {
        uint64_t begin = now_ns();
        want(!post_recv(&p.a, i, 0, 100) && !post_work(&p.b, &wr));
        while ((rc = ibv_start_poll(cq, &(struct ibv_poll_cq_attr){0})) == ENOENT && now_ns() < begin + 5000000000u) {}
        want(rc == 0 && cq->wr_id == i && cq->status == IBV_WC_SUCCESS);
        want(ibv_wc_read_completion_ts(cq) >= begin && ibv_wc_read_completion_ts(cq) <= now_ns());
        // The device's clock, in the timestamps' unit, all of it in one field.
        struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK | 1u << 20};
        want(!ibv_query_rt_values_ex(p.a.context, &values) && values.comp_mask == IBV_VALUES_MASK_RAW_CLOCK);
        want(!values.raw_clock.tv_sec && (uint64_t)values.raw_clock.tv_nsec >= ibv_wc_read_completion_ts(cq));
        ibv_end_poll(cq);
        want(completes(p.b.send_cq, 2));
    }
    want(!ibv_destroy_qp(p.a.qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
    p.a.qp = NULL;
    return pair_close(&p);
}

static const union ibv_gid group = {.raw = {[10] = 0xff, [11] = 0xff, [12] = 239, [13] = 1, [14] = 2, [15] = 3}};

static struct ibv_ah *group_handle(struct ibv_pd *pd) {
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = group, .hop_limit = 1}};
    return ibv_create_ah(pd, &attr);
}

static bool datagram_arrives(struct endpoint *e, uint64_t wr_id, uint32_t sender, uint64_t seed) {
    struct ibv_wc wc;
    want(poll_one(e->recv_cq, &wc, 5000) && wc.status == IBV_WC_SUCCESS && wc.wr_id == wr_id);
    want(wc.byte_len == GRH_BYTES + 100 && wc.src_qp == sender && wc.wc_flags == IBV_WC_GRH);
    want(!memcmp(e->memory + 8192 + 36, group.raw + 12, 4));
    want(holds(e->memory + 8192 + GRH_BYTES, 100, seed));
    return true;
}

static bool to_group(struct endpoint *e, struct ibv_ah *ah, uint64_t seed) {
    fill(e->memory, 100, seed);
    struct ibv_sge sge = {(uintptr_t)e->memory, 100, e->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = seed, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = 0xffffff;
    wr.wr.ud.remote_qkey = QKEY;
    want(!ibv_post_send(e->qp, &wr, &bad) && completes(e->send_cq, seed));
    return true;
}

// Every member gets a message to the group, also the sender, unless it does not want to.
static bool multicast(void) {
    struct pair p, connected;
    struct ibv_wc wc;
    want(pair_open(&p, &(struct options){.type = IBV_QPT_UD}, NULL));
    want(pair_open(&connected, &(struct options){0}, NULL));
    want(ibv_attach_mcast(connected.a.qp, &group, 0) == EINVAL && ibv_attach_mcast(p.a.qp, &p.b.mine.gid, 0) == EINVAL);
    want(ibv_detach_mcast(p.a.qp, &group, 0) == EINVAL);
    want(!ibv_attach_mcast(p.a.qp, &group, 0) && !ibv_attach_mcast(p.b.qp, &group, 0));
    want(!ibv_attach_mcast(p.b.qp, &group, 0)); // twice is once
    struct ibv_ah *ah = group_handle(p.a.pd);
    want(ah && !post_recv(&p.a, 1, 8192, 200) && !post_recv(&p.b, 2, 8192, 200));
    want(to_group(&p.a, ah, 7));
    want(datagram_arrives(&p.a, 1, p.a.qp->qp_num, 7) && datagram_arrives(&p.b, 2, p.a.qp->qp_num, 7));
    want(!ibv_detach_mcast(p.a.qp, &group, 0) && ibv_detach_mcast(p.a.qp, &group, 0) == EINVAL);
    want(!post_recv(&p.a, 3, 8192, 200) && !post_recv(&p.b, 4, 8192, 200) && to_group(&p.a, ah, 8));
    want(datagram_arrives(&p.b, 4, p.a.qp->qp_num, 8) && ibv_poll_cq(p.a.recv_cq, 1, &wc) == 0);
    // A member that has no RECV ready, or another Q_Key, gets nothing; the sender does not notice.
    want(to_group(&p.a, ah, 9) && ibv_poll_cq(p.b.recv_cq, 1, &wc) == 0);
    want(!ibv_destroy_ah(ah));
    want(ibv_destroy_qp(p.b.qp) == EBUSY); // as long as it is a member
    // Its own messages don't come back to a QP made so.
    want(!ibv_destroy_qp(p.a.qp));
    struct ibv_qp_init_attr_ex init = {.send_cq = p.a.send_cq,
                                       .recv_cq = p.a.recv_cq,
                                       .cap = {8, 8, 1, 1, 0},
                                       .qp_type = IBV_QPT_UD,
                                       .sq_sig_all = 1,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS,
                                       .pd = p.a.pd,
                                       .create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB};
    want((p.a.qp = ibv_create_qp_ex(p.a.context, &init)) && endpoint_to_init(&p.a) && endpoint_to_rtr(&p.a));
    want(!ibv_destroy_ah(p.a.ah) && endpoint_to_rts(&p.a) && !ibv_attach_mcast(p.a.qp, &group, 0));
    want((ah = group_handle(p.a.pd)) && !post_recv(&p.a, 5, 8192, 200) && !post_recv(&p.b, 6, 8192, 200));
    want(to_group(&p.a, ah, 10) && datagram_arrives(&p.b, 6, p.a.qp->qp_num, 10));
    want(ibv_poll_cq(p.a.recv_cq, 1, &wc) == 0 && !ibv_destroy_ah(ah));
    want(!ibv_detach_mcast(p.a.qp, &group, 0) && !ibv_detach_mcast(p.b.qp, &group, 0));
    // A member that is left behind goes with its context.
    struct endpoint left = {0};
    want(endpoint_open(&left, &(struct options){.type = IBV_QPT_UD}) && endpoint_to_init(&left));
    want(!ibv_attach_mcast(left.qp, &group, 0) && !ibv_close_device(left.context));
    free(left.memory);
    return pair_close(&p) && pair_close(&connected);
}

// Eight bytes at once.
static bool atomic_write(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){.inline_bytes = 16}, NULL));
    struct ibv_qp_init_attr_ex init = {.send_cq = p.a.send_cq,
                                       .recv_cq = p.a.recv_cq,
                                       .cap = {8, 8, 1, 1, 0},
                                       .qp_type = IBV_QPT_RC,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                       .pd = p.a.pd,
                                       .send_ops_flags = IBV_QP_EX_WITH_ATOMIC_WRITE};
    want(!ibv_destroy_qp(p.a.qp) && (p.a.qp = ibv_create_qp_ex(p.a.context, &init)));
    p.a.mine.qpn = p.a.qp->qp_num;
    want(qp_modify_state(p.b.qp, IBV_QPS_RESET) && connect_two(&p.a, &p.b));
    struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(p.a.qp);
    struct ibv_wc wc;
    ibv_wr_start(qp);
    qp->wr_id = 1;
    qp->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_atomic_write(qp, p.a.peer.rkey, p.a.peer.memory + 8, "abcdefgh");
    want(!ibv_wr_complete(qp) && poll_one(p.a.send_cq, &wc, 5000) && wc.status == IBV_WC_SUCCESS);
    want(wc.opcode == IBV_WC_ATOMIC_WRITE && wc.wr_id == 1 && !memcmp(p.b.memory + 8, "abcdefgh", 8));
    // From memory, by a list.
    memcpy(p.a.memory, "ijklmnop", 8);
    want(!post_remote(&p.a, IBV_WR_ATOMIC_WRITE, 2, 0, 8, 16, IBV_SEND_SIGNALED) && completes(p.a.send_cq, 2));
    want(!memcmp(p.b.memory + 8, "abcdefghijklmnop", 16));
    // An odd address.
    ibv_wr_start(qp);
    qp->wr_id = 3;
    ibv_wr_atomic_write(qp, p.a.peer.rkey, p.a.peer.memory + 4, "abcdefgh");
    want(!ibv_wr_complete(qp) && poll_one(p.a.send_cq, &wc, 5000) && wc.status != IBV_WC_SUCCESS);
    return pair_close(&p);
}

// FLUSH: the header of rdma-core 44 ends just before it.
typedef void flush_function(struct ibv_qp_ex *, uint32_t, uint64_t, size_t, uint8_t, uint8_t);
enum { FLUSH_OFFSET = 352, WR_FLUSH_OPERATION = 1 << 11, WC_FLUSH = 8, FLUSH_GLOBAL = 1, FLUSH_PERSISTENT = 2 };
enum { FLUSH_RANGE = 0, FLUSH_MR = 1, ACCESS_FLUSH_GLOBAL = 1 << 8 };

static bool flush(void) {
    struct pair p;
    struct ibv_wc wc;
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | ACCESS_FLUSH_GLOBAL;
    want(pair_open(&p, &(struct options){.mr_access = access, .qp_access = access}, NULL));
    struct ibv_qp_init_attr_ex init = {.send_cq = p.a.send_cq,
                                       .recv_cq = p.a.recv_cq,
                                       .cap = {8, 8, 1, 1, 0},
                                       .qp_type = IBV_QPT_RC,
                                       .sq_sig_all = 1,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                       .pd = p.a.pd,
                                       .send_ops_flags = WR_FLUSH_OPERATION | IBV_QP_EX_WITH_RDMA_WRITE};
    want(!ibv_destroy_qp(p.a.qp) && (p.a.qp = ibv_create_qp_ex(p.a.context, &init)));
    p.a.mine.qpn = p.a.qp->qp_num;
    want(qp_modify_state(p.b.qp, IBV_QPS_RESET) && connect_two(&p.a, &p.b));
    struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(p.a.qp);
    flush_function *wr_flush = *(flush_function **)((char *)qp + FLUSH_OFFSET);
    fill(p.a.memory, 1000, 4);
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 1, 0, 1000, 0, 0) && completes(p.a.send_cq, 1));
    for (uint8_t level = FLUSH_RANGE; level <= FLUSH_MR; level++) {
        ibv_wr_start(qp);
        qp->wr_id = 2 + level;
        wr_flush(qp, p.a.peer.rkey, p.a.peer.memory, level == FLUSH_MR ? 0 : 1000, FLUSH_GLOBAL, level);
        want(!ibv_wr_complete(qp) && poll_one(p.a.send_cq, &wc, 5000));
        want(wc.status == IBV_WC_SUCCESS && wc.wr_id == 2u + level && (int)wc.opcode == WC_FLUSH);
        want(holds(p.b.memory, 1000, 4));
    }
    // Memory here does not outlive a power failure.
    ibv_wr_start(qp);
    qp->wr_id = 5;
    wr_flush(qp, p.a.peer.rkey, p.a.peer.memory, 1000, FLUSH_PERSISTENT, FLUSH_RANGE);
    want(!ibv_wr_complete(qp) && poll_one(p.a.send_cq, &wc, 5000) && wc.status != IBV_WC_SUCCESS && wc.wr_id == 5);
    return pair_close(&p);
}

// A QP reports its state, and what it was given, in every state.
static bool states_are_reported(void) {
    static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};
    for (unsigned i = 0; i < 3; i++) {
        struct endpoint a = {0}, b = {0};
        struct ibv_qp_attr attr;
        struct ibv_qp_init_attr init;
        want(endpoint_open(&a, &(struct options){.type = types[i]}) && endpoint_open(&b, &(struct options){.type = types[i]}));
        want(!ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_RESET);
        want(init.qp_type == types[i] && init.cap.max_send_wr >= 64 && attr.cap.max_recv_wr >= 64);
        want(endpoint_to_init(&a) && qp_state(a.qp) == IBV_QPS_INIT);
        want(!ibv_query_qp(a.qp, &attr, IBV_QP_PORT | IBV_QP_QKEY, &init) && attr.port_num == 1);
        want(types[i] != IBV_QPT_UD || attr.qkey == QKEY);
        want(endpoint_to_init(&b));
        a.peer = b.mine, b.peer = a.mine;
        want(endpoint_to_rtr(&a) && qp_state(a.qp) == IBV_QPS_RTR && endpoint_to_rtr(&b));
        want(endpoint_to_rts(&a) && qp_state(a.qp) == IBV_QPS_RTS && endpoint_to_rts(&b));
        want(qp_modify_state(a.qp, IBV_QPS_SQD));
        want(!ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_SQD && !attr.sq_draining);
        want(qp_modify_state(a.qp, IBV_QPS_RTS) && qp_state(a.qp) == IBV_QPS_RTS);
        want(qp_modify_state(a.qp, IBV_QPS_ERR) && qp_state(a.qp) == IBV_QPS_ERR);
        want(!ibv_query_qp(a.qp, &attr, IBV_QP_DEST_QPN | IBV_QP_SQ_PSN, &init));
        want(types[i] == IBV_QPT_UD || (attr.dest_qp_num == b.qp->qp_num && attr.sq_psn == (a.mine.psn & 0xffffff)));
        want(qp_modify_state(a.qp, IBV_QPS_RESET) && qp_state(a.qp) == IBV_QPS_RESET);
        want(endpoint_close(&a) && endpoint_close(&b));
    }
    return true;
}

const struct app_case queue_cases[] = {
    {"send_with_invalidate", send_with_invalidate},
    {"refused_requests", refused_requests},
    {"moderation", moderation},
    {"ece", ece},
    {"extended_completions", extended_completions},
    {"multicast", multicast},
    {"atomic_write", atomic_write},
    {"flush", flush},
    {"states_are_reported", states_are_reported},
    {NULL, NULL},
};
