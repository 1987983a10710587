// Exact returns: what calls give back, where, and when they wait.
#define _GNU_SOURCE
#include "apps.h"

#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

// `bad_wr` names the first request that was not posted; those before it are.
static bool bad_requests(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){.send_wr = 16, .recv_wr = 16}, NULL));
    struct ibv_sge sge = {(uintptr_t)p.a.memory, 8, p.a.mr->lkey};
    struct ibv_send_wr wrs[3] = {0}, *bad = NULL;
    for (unsigned i = 0; i < 3; i++) {
        wrs[i] = (struct ibv_send_wr){.wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE};
        wrs[i].next = i < 2 ? &wrs[i + 1] : NULL;
        wrs[i].wr.rdma.remote_addr = p.a.peer.memory;
        wrs[i].wr.rdma.rkey = p.a.peer.rkey;
    }
    wrs[1].num_sge = 31;
    want(ibv_post_send(p.a.qp, wrs, &bad) == EINVAL && bad == &wrs[1]);
    want(completes(p.a.send_cq, 0));
    wrs[1].num_sge = 1;
    wrs[1].opcode = IBV_WR_TSO;
    want(ibv_post_send(p.a.qp, wrs, &bad) != 0 && bad == &wrs[1]);
    want(completes(p.a.send_cq, 0));
    wrs[1].opcode = 99;
    want(ibv_post_send(p.a.qp, wrs, &bad) == EINVAL && bad == &wrs[1]);
    want(completes(p.a.send_cq, 0));
    struct ibv_recv_wr receives[2] = {{.wr_id = 0, .next = &receives[1], .sg_list = &sge, .num_sge = 1},
                                      {.wr_id = 1, .sg_list = &sge, .num_sge = -1}},
                       *bad_receive = NULL;
    want(ibv_post_recv(p.a.qp, receives, &bad_receive) == EINVAL && bad_receive == &receives[1]);
    want(ibv_post_send(p.a.qp, NULL, &bad) == 0);
    return pair_close(&p);
}

static struct ibv_qp_ex *extended_qp(struct pair *p, uint64_t operations) {
    struct ibv_qp_init_attr_ex init = {.send_cq = p->a.send_cq,
                                       .recv_cq = p->a.recv_cq,
                                       .cap = {16, 16, 2, 2, 64},
                                       .qp_type = IBV_QPT_RC,
                                       .sq_sig_all = 1,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                       .pd = p->a.pd,
                                       .send_ops_flags = operations};
    struct ibv_qp *qp = ibv_create_qp_ex(p->a.context, &init);
    if (!qp) return NULL;
    p->a.qp = qp;
    p->a.mine.qpn = qp->qp_num;
    return ibv_qp_to_qp_ex(qp);
}

// Requests of one ibv_wr_start are posted together or not at all.
static bool built_requests(void) {
    struct pair p = {0};
    want(endpoint_open(&p.a, &(struct options){0}) && endpoint_open(&p.b, &(struct options){0}));
    want(!ibv_qp_to_qp_ex(p.a.qp));
    want(!ibv_destroy_qp(p.a.qp));
    struct ibv_qp_ex *qp = extended_qp(&p, IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND);
    want(qp && connect_two(&p.a, &p.b));
    struct ibv_wc wc;
    for (unsigned mistake = 0; mistake < 5; mistake++) {
        ibv_wr_start(qp);
        qp->wr_id = 1;
        qp->wr_flags = 0;
        ibv_wr_rdma_write(qp, p.a.peer.rkey, p.a.peer.memory);
        ibv_wr_set_sge(qp, p.a.mr->lkey, (uintptr_t)p.a.memory, 8);
        qp->wr_id = 2;
        ibv_wr_rdma_write(qp, p.a.peer.rkey, p.a.peer.memory);
        struct ibv_sge sges[3] = {{(uintptr_t)p.a.memory, 1, p.a.mr->lkey}};
        static uint8_t payload[2000];
        int rc;
        switch (mistake) {
        case 0: ibv_wr_set_sge_list(qp, 3, sges); break;
        case 1: ibv_wr_set_inline_data(qp, payload, sizeof payload); break;
        case 2: ibv_wr_send_tso(qp, payload, 8, 100); break;
        case 3: qp->wr_flags = 1u << 20; ibv_wr_send(qp); break;
        default: ibv_wr_set_sge(qp, p.a.mr->lkey, (uintptr_t)p.a.memory, 8); break;
        }
        if (mistake == 4) {
            ibv_wr_abort(qp);
            rc = 1;
        } else {
            rc = ibv_wr_complete(qp);
        }
        want(rc != 0);
        sleep_ms(2);
        want(ibv_poll_cq(p.a.send_cq, 1, &wc) == 0);
    }
    // More than there is room for: none.
    ibv_wr_start(qp);
    qp->wr_flags = 0;
    for (unsigned i = 0; i < 200; i++) {
        ibv_wr_rdma_write(qp, p.a.peer.rkey, p.a.peer.memory);
        ibv_wr_set_sge(qp, p.a.mr->lkey, (uintptr_t)p.a.memory, 8);
    }
    want(ibv_wr_complete(qp) == ENOMEM);
    want(ibv_poll_cq(p.a.send_cq, 1, &wc) == 0);
    // And after all these it works.
    ibv_wr_start(qp);
    qp->wr_id = 9;
    ibv_wr_rdma_write(qp, p.a.peer.rkey, p.a.peer.memory);
    ibv_wr_set_inline_data(qp, "abcdefgh", 8);
    want(!ibv_wr_complete(qp) && completes(p.a.send_cq, 9));
    want(!memcmp(p.b.memory, "abcdefgh", 8));
    return pair_close(&p);
}

struct destroyer {
    struct ibv_cq *cq;
    volatile bool done;
    int rc;
};

static void *destroy(void *argument) {
    struct destroyer *d = argument;
    d->rc = ibv_destroy_cq(d->cq);
    __atomic_store_n(&d->done, true, __ATOMIC_RELEASE);
    return NULL;
}

// A CQ is destroyed only after its events were acknowledged.
static bool destroy_waits_for_acknowledgement(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){.events = true}, NULL));
    want(!ibv_req_notify_cq(p.a.send_cq, 0));
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 1, 0, 8, 0, 0));
    struct ibv_cq *cq = NULL;
    void *context = NULL;
    want(!ibv_get_cq_event(p.a.channel, &cq, &context));
    want(cq == p.a.send_cq && context == &p.a && completes(cq, 1));
    want(ibv_destroy_cq(cq) == EBUSY);
    want(!ibv_destroy_qp(p.a.qp));
    p.a.qp = NULL;
    struct destroyer d = {.cq = cq};
    pthread_t thread;
    pthread_create(&thread, NULL, destroy, &d);
    sleep_ms(50);
    want(!__atomic_load_n(&d.done, __ATOMIC_ACQUIRE));
    ibv_ack_cq_events(cq, 1);
    pthread_join(thread, NULL);
    want(d.rc == 0);
    p.a.send_cq = NULL;
    // No event waits: a descriptor that does not block says so.
    int flags = fcntl(p.a.channel->fd, F_GETFL);
    want(!fcntl(p.a.channel->fd, F_SETFL, flags | O_NONBLOCK));
    want(ibv_get_cq_event(p.a.channel, &cq, &context) == -1 && errno == EAGAIN);
    flags = fcntl(p.a.context->async_fd, F_GETFL);
    want(!fcntl(p.a.context->async_fd, F_SETFL, flags | O_NONBLOCK));
    struct ibv_async_event event;
    want(ibv_get_async_event(p.a.context, &event) == -1 && errno == EAGAIN);
    return pair_close(&p);
}

// An asynchronous event names its object by the pointer that the program has.
static bool events_name_their_objects(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, &(struct options){.mr_access = NEVER_ACCESS}));
    struct ibv_wc wc;
    want(!post_remote(&p.a, IBV_WR_RDMA_WRITE, 1, 0, 8, 0, 0) && poll_one(p.a.send_cq, &wc, 5000));
    want(wc.status == IBV_WC_REM_ACCESS_ERR && wc.qp_num == p.a.qp->qp_num && wc.wr_id == 1);
    struct ibv_async_event event;
    want(fd_readable(p.b.context->async_fd, 5000) && !ibv_get_async_event(p.b.context, &event));
    want(event.event_type == IBV_EVENT_QP_ACCESS_ERR && event.element.qp == p.b.qp);
    ibv_ack_async_event(&event);
    want(qp_state(p.b.qp) == IBV_QPS_ERR && qp_state(p.a.qp) == IBV_QPS_ERR && p.a.qp->state == IBV_QPS_ERR);
    return pair_close(&p);
}

static bool completion_fields(void) {
    struct pair p;
    struct ibv_wc wc;
    want(pair_open(&p, &(struct options){0}, NULL));
    memset(&wc, 0xff, sizeof wc);
    want(!post_remote(&p.a, IBV_WR_RDMA_READ, 1, 0, 100, 0, 0) && poll_one(p.a.send_cq, &wc, 5000));
    want(wc.opcode == IBV_WC_RDMA_READ && wc.byte_len == 100 && wc.wc_flags == 0 && wc.vendor_err == 0);
    want(wc.qp_num == p.a.qp->qp_num);
    want(!post_recv(&p.b, 2, 0, 64));
    struct ibv_sge sge = {(uintptr_t)p.a.memory, 33, p.a.mr->lkey};
    struct ibv_send_wr wr = {
        .wr_id = 3, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htobe32(0x12345678)};
    want(!post_work(&p.a, &wr) && poll_one(p.a.send_cq, &wc, 5000) && wc.opcode == IBV_WC_SEND);
    want(poll_one(p.b.recv_cq, &wc, 5000) && wc.opcode == IBV_WC_RECV && wc.byte_len == 33);
    want(wc.wc_flags == IBV_WC_WITH_IMM && wc.imm_data == htobe32(0x12345678) && wc.qp_num == p.b.qp->qp_num);
    want(!post_recv(&p.b, 4, 0, 64));
    wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    wr.wr.rdma.remote_addr = p.a.peer.memory;
    wr.wr.rdma.rkey = p.a.peer.rkey;
    want(!post_work(&p.a, &wr) && poll_one(p.a.send_cq, &wc, 5000) && wc.opcode == IBV_WC_RDMA_WRITE);
    want(poll_one(p.b.recv_cq, &wc, 5000) && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.byte_len == 33);
    return pair_close(&p);
}

// A datagram's completion: the sender, the GRH, and in `sl` the kind of header, by which UCX finds the addresses.
static bool datagram_fields(void) {
    struct pair p;
    struct ibv_wc wc;
    want(pair_open(&p, &(struct options){.type = IBV_QPT_UD}, NULL));
    want(!post_recv(&p.b, 1, 0, GRH_BYTES + 100) && !post_send(&p.a, 1, 0, 100, 0));
    want(poll_one(p.b.recv_cq, &wc, 5000) && wc.status == IBV_WC_SUCCESS);
    want(wc.byte_len == GRH_BYTES + 100 && wc.src_qp == p.a.qp->qp_num && wc.wc_flags == IBV_WC_GRH && wc.sl == 2);
    // An address made from it leads back.
    struct ibv_ah *back = ibv_create_ah_from_wc(p.b.pd, &wc, (struct ibv_grh *)p.b.memory, 1);
    want(back);
    struct ibv_ah *own = p.b.ah;
    p.b.ah = back;
    want(!post_recv(&p.a, 2, 0, GRH_BYTES + 100) && !post_send(&p.b, 2, 0, 100, 0));
    want(completes(p.a.recv_cq, 2) && completes(p.b.send_cq, 2));
    p.b.ah = own;
    want(!ibv_destroy_ah(back));
    return pair_close(&p);
}

static bool queries(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){.unsignaled = true, .inline_bytes = 100}, NULL));
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    memset(&init, 0xff, sizeof init);
    want(!ibv_query_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_CAP | IBV_QP_AV, &init));
    want(init.send_cq == p.a.send_cq && init.recv_cq == p.a.recv_cq && !init.srq && init.qp_type == IBV_QPT_RC);
    want(!init.sq_sig_all && init.cap.max_inline_data >= 100 && init.cap.max_send_wr >= 64);
    want(attr.qp_state == IBV_QPS_RTS && attr.dest_qp_num == p.b.qp->qp_num && attr.path_mtu == IBV_MTU_4096);
    want(attr.ah_attr.is_global && !memcmp(&attr.ah_attr.grh.dgid, &p.b.mine.gid, 16) && attr.cap.max_send_sge >= 1);
    struct ibv_query_device_ex_input input = {.comp_mask = 1};
    struct ibv_device_attr_ex device;
    memset(&device, 0xff, sizeof device);
    want(ibv_query_device_ex(p.a.context, &input, &device) == EINVAL);
    want(!ibv_query_device_ex(p.a.context, NULL, &device) && device.comp_mask == 0 && device.orig_attr.max_qp > 0);
    want(device.completion_timestamp_mask && device.cq_mod_caps.max_cq_count == 65535);
    want(device.cq_mod_caps.max_cq_period == 65535);
    union ibv_gid gid;
    uint16_t pkey;
    want(ibv_query_gid(p.a.context, 1, 1000, &gid) == -1 && ibv_query_pkey(p.a.context, 1, 1000, &pkey) == -1);
    want(ibv_query_port(p.a.context, 9, &(struct ibv_port_attr){0}) == EINVAL);
    want(!ibv_reg_mr(p.a.pd, p.a.memory, 0, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL);
    want(!ibv_alloc_mw(p.a.pd, 3) && errno == EINVAL);
    want(ibv_dealloc_pd(p.a.pd) == EBUSY);
    return pair_close(&p);
}

// A GID names the interface that has its address, if there is one.
static bool gid_entries(void) {
    struct ibv_context *context = open_first_device();
    struct ibv_gid_entry entry, table[4];
    want(context && !ibv_query_gid_ex(context, 1, 0, &entry, 0));
    struct ifaddrs *list;
    want(!getifaddrs(&list));
    unsigned index = 0;
    for (struct ifaddrs *at = list; at; at = at->ifa_next) {
        if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET) continue;
        if (!memcmp(&((struct sockaddr_in *)at->ifa_addr)->sin_addr, entry.gid.raw + 12, 4))
            index = if_nametoindex(at->ifa_name);
    }
    freeifaddrs(list);
    want(index && entry.ndev_ifindex == index);
    want(entry.gid_index == 0 && entry.port_num == 1 && entry.gid_type == IBV_GID_TYPE_ROCE_V2);
    want(ibv_query_gid_table(context, table, 4, 0) == 1 && !memcmp(table, &entry, sizeof entry));
    want(ibv_query_gid_ex(context, 1, 1000, &entry, 0) == EINVAL && ibv_query_gid_ex(context, 2, 0, &entry, 0) == EINVAL);
    want(ibv_query_gid_table(context, table, 0, 0) == -EINVAL);
    return !ibv_close_device(context);
}

// An SRQ's limit is looked at only where the mask names it.
static bool srq_attributes(void) {
    struct ibv_context *context = open_first_device();
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_srq_init_attr init = {.attr = {5, 1, 0}};
    struct ibv_srq *srq = ibv_create_srq(pd, &init);
    struct ibv_srq_attr attr = {.srq_limit = 1u << 30};
    want(srq && init.attr.max_wr >= 5 && init.attr.max_sge >= 1);
    want(!ibv_modify_srq(srq, &attr, 0) && ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT) == EINVAL);
    want(ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR) == EOPNOTSUPP && ibv_modify_srq(srq, &attr, 1 << 5) == EINVAL);
    struct ibv_recv_wr wr = {0}, *bad;
    for (unsigned i = 0; i < 3; i++) want(!ibv_post_srq_recv(srq, &wr, &bad));
    attr.srq_limit = 2;
    want(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT) && !ibv_query_srq(srq, &attr) && attr.srq_limit == 2);
    return !ibv_destroy_srq(srq) && !ibv_dealloc_pd(pd) && !ibv_close_device(context);
}

const struct app_case meaning_cases[] = {
    {"gid_entries", gid_entries},
    {"srq_attributes", srq_attributes},
    {"bad_requests", bad_requests},
    {"built_requests", built_requests},
    {"destroy_waits_for_acknowledgement", destroy_waits_for_acknowledgement},
    {"events_name_their_objects", events_name_their_objects},
    {"completion_fields", completion_fields},
    {"datagram_fields", datagram_fields},
    {"queries", queries},
    {NULL, NULL},
};
