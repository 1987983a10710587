// The device's limits are true, and requests beyond them are refused with a NIC's errno.
#include "cases.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void device_attributes(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    struct ibv_device_attr device = {0};
    need(s, !ibv_query_device(e->context, &device));
    need(s, device.phys_port_cnt == 1 && device.vendor_id != 0x02c9 && device.max_cqe >= 1000000);
    need(s, device.max_qp_wr >= 32768 && device.max_sge >= 30 && device.atomic_cap != IBV_ATOMIC_NONE);
    struct ibv_port_attr port = {0};
    need(s, !ibv_query_port(e->context, 1, &port));
    need(s, port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET);
    need(s, port.active_mtu == IBV_MTU_4096 && port.max_msg_sz >= 1u << 30 && port.gid_tbl_len >= 1);
    need(s, ibv_query_port(e->context, 2, &port) != 0);
    for (int i = 0; i < port.gid_tbl_len; i++) {
        union ibv_gid gid;
        need(s, !ibv_query_gid(e->context, 1, i, &gid));
        static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
        if (i == 0) need(s, !memcmp(gid.raw, mapped, sizeof mapped));
    }
    union ibv_gid gid;
    need(s, ibv_query_gid(e->context, 1, port.gid_tbl_len, &gid) != 0);
    uint16_t pkey = 0;
    need(s, !ibv_query_pkey(e->context, 1, 0, (__be16 *)&pkey) && pkey == 0xffff);
}

// Each limit is reached in one object, and works there.
static void largest_queues(struct side *s, struct endpoint *e) {
    struct options options = {.cqe = 1000000, .send_wr = 32768, .recv_wr = 32768, .send_sge = 30, .recv_sge = 30};
    options.inline_bytes = 1024;
    need(s, endpoint_open(e, &options));
    need(s, e->send_cq->cqe >= 1000000);
    need(s, endpoint_to_init(e));
    if (s->role == ROLE_B) {
        for (unsigned i = 0; i < 32768; i++) need(s, !post_recv(e, i, 0, 64));
        need(s, post_recv(e, 0, 0, 64) == ENOMEM);
    }
    need(s, endpoint_connect(s, e));
    struct ibv_wc wc;
    for (unsigned i = 0; s->role == ROLE_A && i < 32768; i++) need(s, !post_send(e, i, 0, 8, 0));
    for (unsigned i = 0; i < 32768; i++) {
        need(s, poll_one(s->role == ROLE_A ? e->send_cq : e->recv_cq, &wc, 10000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.wr_id == i);
    }
}

static void too_large(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    struct ibv_device_attr device = {0};
    need(s, !ibv_query_device(e->context, &device));
    need(s, !ibv_create_cq(e->context, 0, NULL, NULL, 0) && errno == EINVAL);
    need(s, !ibv_create_cq(e->context, device.max_cqe + 1, NULL, NULL, 0) && errno == EINVAL);
    struct ibv_qp_init_attr good = {
        .send_cq = e->send_cq, .recv_cq = e->recv_cq, .qp_type = IBV_QPT_RC, .cap = {1, 1, 1, 1, 0}};
    struct ibv_qp_init_attr init = good;
    init.cap.max_send_wr = (uint32_t)device.max_qp_wr + 1;
    need(s, !ibv_create_qp(e->pd, &init) && errno == EINVAL);
    init = good;
    init.cap.max_recv_sge = (uint32_t)device.max_sge + 1;
    need(s, !ibv_create_qp(e->pd, &init) && errno == EINVAL);
    init = good;
    init.cap.max_inline_data = 1 << 20;
    need(s, !ibv_create_qp(e->pd, &init) && errno == EINVAL);
    init = good;
    init.send_cq = NULL;
    need(s, !ibv_create_qp(e->pd, &init) && errno == EINVAL);
    need(s, !ibv_reg_mr(e->pd, e->memory, e->bytes, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
}

// No more than was granted can be outstanding, and each completion makes room for one.
static void full_queue(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.send_wr = 10, .recv_wr = 10}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) return;
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    struct ibv_wc wc;
    need(s, !ibv_query_qp(e->qp, &attr, IBV_QP_CAP, &init));
    unsigned room = init.cap.max_send_wr;
    need(s, room >= 10);
    for (unsigned i = 0; i < room; i++) need(s, !post_remote(e, IBV_WR_RDMA_WRITE, i, 0, 8, 0, 0));
    sleep_ms(20); // all done, none polled
    need(s, post_remote(e, IBV_WR_RDMA_WRITE, room, 0, 8, 0, 0) == ENOMEM);
    for (unsigned i = 0; i < 3 * room; i++) {
        need(s, poll_one(e->send_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.wr_id == i);
        need(s, !post_remote(e, IBV_WR_RDMA_WRITE, i + room, 0, 8, 0, 0));
    }
    struct ibv_sge sges[2] = {{(uintptr_t)e->memory, 1, e->mr->lkey}, {(uintptr_t)e->memory, 1, e->mr->lkey}};
    struct ibv_send_wr wr = {.sg_list = sges, .num_sge = (int)init.cap.max_send_sge + 1, .opcode = IBV_WR_SEND};
    need(s, init.cap.max_send_sge != 1 || post_work(e, &wr) != 0);
}

static void busy_objects(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.srq = true, .events = true}));
    need(s, ibv_dealloc_pd(e->pd) == EBUSY);
    need(s, ibv_destroy_cq(e->send_cq) == EBUSY);
    need(s, ibv_destroy_srq(e->srq) == EBUSY);
    need(s, ibv_destroy_comp_channel(e->channel) == EBUSY);
}

// Many objects at once, made and unmade twice.
static void many_objects(struct side *s, struct endpoint *e) {
    enum { COUNT = 500 };
    need(s, endpoint_open(e, &(struct options){0}));
    static _Thread_local struct ibv_mr *mrs[COUNT];
    static _Thread_local struct ibv_qp *qps[COUNT];
    static _Thread_local struct ibv_cq *cqs[COUNT];
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned i = 0; i < COUNT; i++) {
            need(s, (mrs[i] = ibv_reg_mr(e->pd, e->memory + i, 1 + i, IBV_ACCESS_LOCAL_WRITE)) != NULL);
            need(s, (cqs[i] = ibv_create_cq(e->context, 10, NULL, NULL, 0)) != NULL);
            struct ibv_qp_init_attr init = {
                .send_cq = cqs[i], .recv_cq = cqs[i], .qp_type = IBV_QPT_RC, .cap = {4, 4, 1, 1, 0}};
            need(s, (qps[i] = ibv_create_qp(e->pd, &init)) != NULL);
            for (unsigned j = 0; j < i; j++) need(s, qps[j]->qp_num != qps[i]->qp_num && mrs[j]->rkey != mrs[i]->rkey);
        }
        for (unsigned i = 0; i < COUNT; i++) {
            need(s, !ibv_destroy_qp(qps[i]));
            need(s, !ibv_destroy_cq(cqs[i]));
            need(s, !ibv_dereg_mr(mrs[i]));
        }
    }
}

static void address_handles(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.type = IBV_QPT_UD}));
    need(s, endpoint_connect(s, e));
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = e->peer.gid, .hop_limit = 64}};
    attr.grh.sgid_index = 77; // nobody speaks as somebody else
    need(s, !ibv_create_ah(e->pd, &attr));
    attr.grh.sgid_index = (uint8_t)gid_index();
    attr.port_num = 9;
    need(s, !ibv_create_ah(e->pd, &attr));
    attr.port_num = 1;
    attr.is_global = 0; // RoCE knows no local route
    need(s, !ibv_create_ah(e->pd, &attr));
}

const struct test_case limit_cases[] = {
    {"device_attributes", device_attributes},
    {"largest_queues", largest_queues},
    {"too_large", too_large},
    {"full_queue", full_queue},
    {"busy_objects", busy_objects},
    {"many_objects", many_objects},
    {"address_handles", address_handles},
    {NULL, NULL},
};
