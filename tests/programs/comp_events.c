// A completion channel that nobody reads while hundreds of its CQs have something to report: each is
// reported once, in time, and the descriptor is readable for each; also if CQs are armed again while
// events are owed.
#include "die.h"

#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { COUNT = 400, EVENT_MS = 5000, QKEY = 0x11111111 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_ah *ah;
static struct ibv_cq *cqs[COUNT];
static struct ibv_qp *qps[COUNT];
static double longest_ms;

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

// A queue pair of datagrams, whose sends to itself complete whether anybody receives them or not.
static void open_one(int i) {
    cqs[i] = ibv_create_cq(context, 4, (void *)(intptr_t)i, channel, 0);
    if (!cqs[i]) die("ibv_create_cq %d", i);
    struct ibv_qp_init_attr init = {.send_cq = cqs[i], .recv_cq = cqs[i], .qp_type = IBV_QPT_UD, .cap = {2, 1, 1, 1, 8}};
    qps[i] = ibv_create_qp(pd, &init);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    if (!qps[i] || ibv_modify_qp(qps[i], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY)) die("INIT");
    attr.qp_state = IBV_QPS_RTR;
    if (ibv_modify_qp(qps[i], &attr, IBV_QP_STATE)) die("RTR");
    attr.qp_state = IBV_QPS_RTS;
    if (ibv_modify_qp(qps[i], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN)) die("RTS");
}

static void complete_one(int i) {
    char byte = 0;
    struct ibv_sge sge = {.addr = (uintptr_t)&byte, .length = 1};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
                             .wr.ud = {.ah = ah, .remote_qpn = qps[i]->qp_num, .remote_qkey = QKEY}}, *bad;
    if (ibv_req_notify_cq(cqs[i], 0) || ibv_post_send(qps[i], &wr, &bad)) die("post %d", i);
}

// Without taking the completion: until it is in the CQ.
static void wait_for_all(void) {
    for (int i = 0; i < COUNT; i++) {
        struct ibv_wc wc;
        double until = now_ms() + EVENT_MS;
        int found;
        while (!(found = ibv_poll_cq(cqs[i], 1, &wc)) && now_ms() < until) {}
        if (found != 1 || wc.status != IBV_WC_SUCCESS) die("completion %d", i);
    }
}

static int next_cq(void) {
    struct pollfd pollfd = {.fd = channel->fd, .events = POLLIN};
    double begun = now_ms();
    if (poll(&pollfd, 1, EVENT_MS) != 1) return -1;
    struct ibv_cq *cq;
    void *reported;
    if (ibv_get_cq_event(channel, &cq, &reported)) die("ibv_get_cq_event");
    if (now_ms() - begun > longest_ms) longest_ms = now_ms() - begun;
    ibv_ack_cq_events(cq, 1);
    return (int)(intptr_t)reported;
}

int main(void) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (!list || !list[0] || !(context = ibv_open_device(list[0]))) die("no device");
    union ibv_gid gid;
    if (!(pd = ibv_alloc_pd(context)) || !(channel = ibv_create_comp_channel(context)) || ibv_query_gid(context, 1, 0, &gid))
        die("setup");
    struct ibv_ah_attr way = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 1}};
    if (!(ah = ibv_create_ah(pd, &way))) die("ibv_create_ah");
    for (int i = 0; i < COUNT; i++) open_one(i);
    int seen[COUNT] = {0};
    for (int i = 0; i < COUNT; i++) complete_one(i);
    wait_for_all();
    // The first hundred reported are armed again at once, while the last are still owed.
    int total = 0, again = 0;
    for (; total < COUNT + 100; total++) {
        int i = next_cq();
        if (i < 0) die("%d events of %d", total, COUNT + 100);
        seen[i]++;
        if (again < 100) {
            complete_one(i);
            again++;
        }
    }
    for (int i = 0; i < COUNT; i++)
        if (!seen[i]) die("CQ %d was never reported", i);
    struct pollfd pollfd = {.fd = channel->fd, .events = POLLIN};
    if (poll(&pollfd, 1, 100)) die("more events than were asked for");
    // Once more, now that the channel has been behind.
    for (int i = 0; i < COUNT; i++) {
        struct ibv_wc wc;
        while (ibv_poll_cq(cqs[i], 1, &wc) > 0) {}
        complete_one(i);
    }
    wait_for_all();
    for (int i = 0; i < COUNT; i++) {
        int reported = next_cq();
        if (reported < 0) die("%d events of %d, the second time", i, COUNT);
    }
    for (int i = 0; i < COUNT; i++)
        if (ibv_destroy_qp(qps[i]) || ibv_destroy_cq(cqs[i])) die("destroying %d", i);
    if (ibv_destroy_ah(ah) || ibv_destroy_comp_channel(channel) || ibv_dealloc_pd(pd) || ibv_close_device(context)) die("end");
    printf("%d events of %d CQs, none lost, the longest wait %.1f ms\n", total + COUNT, COUNT, longest_ms);
    return 0;
}
