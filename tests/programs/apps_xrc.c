// XRC (IBTA annex A14): domains, shared receive queues by number, target QPs that processes share.
#define _GNU_SOURCE
#include "apps.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 16384, SLOT = 1024 };

// One process: memory, a domain, a queue for arrivals, an initiator, a target.
struct node {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_xrcd *domain;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp *initiator, *target;
    struct ibv_mr *mr;
    uint8_t *memory;
    union ibv_gid gid;
    uint32_t srq_number;
};

static struct ibv_xrcd *open_domain(struct ibv_context *context, int file, int flags) {
    struct ibv_xrcd_init_attr init = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = file, .oflags = flags};
    return ibv_open_xrcd(context, &init);
}

static struct ibv_srq *open_queue(struct node *n) {
    struct ibv_srq_init_attr_ex init = {
        .srq_context = n,
        .attr = {.max_wr = 16, .max_sge = 1},
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
        .srq_type = IBV_SRQT_XRC,
        .pd = n->pd,
        .xrcd = n->domain,
        .cq = n->recv_cq};
    return ibv_create_srq_ex(n->context, &init);
}

static struct ibv_qp *open_initiator(struct node *n, uint64_t operations) {
    struct ibv_qp_init_attr_ex init = {.send_cq = n->send_cq,
                                       .cap = {.max_send_wr = 32, .max_send_sge = 2, .max_inline_data = 64},
                                       .qp_type = IBV_QPT_XRC_SEND,
                                       .sq_sig_all = 1,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD,
                                       .pd = n->pd,
                                       .send_ops_flags = operations};
    if (operations) init.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    return ibv_create_qp_ex(n->context, &init);
}

static struct ibv_qp *make_target(struct node *n) {
    struct ibv_qp_init_attr_ex init = {
        .qp_context = n, .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = n->domain};
    return ibv_create_qp_ex(n->context, &init);
}

// Everything but QPs. `file` and `flags` as for `open`.
static bool node_open(struct node *n, int file, int flags) {
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    memset(n, 0, sizeof *n);
    want((n->context = open_first_device()) && (n->pd = ibv_alloc_pd(n->context)));
    want(!posix_memalign((void **)&n->memory, 4096, BYTES));
    memset(n->memory, 0, BYTES);
    want((n->mr = ibv_reg_mr(n->pd, n->memory, BYTES, access)));
    want((n->send_cq = ibv_create_cq(n->context, 64, NULL, NULL, 0)));
    want((n->recv_cq = ibv_create_cq(n->context, 64, NULL, NULL, 0)));
    want((n->domain = open_domain(n->context, file, flags)));
    want((n->srq = open_queue(n)) && !ibv_get_srq_num(n->srq, &n->srq_number));
    want(!ibv_query_gid(n->context, 1, 0, &n->gid));
    return true;
}

static bool node_close(struct node *n) {
    if (n->initiator) want(!ibv_destroy_qp(n->initiator));
    if (n->target) want(!ibv_destroy_qp(n->target));
    want(!ibv_destroy_srq(n->srq) && !ibv_close_xrcd(n->domain));
    want(!ibv_destroy_cq(n->send_cq) && !ibv_destroy_cq(n->recv_cq));
    want(!ibv_dereg_mr(n->mr) && !ibv_dealloc_pd(n->pd) && !ibv_close_device(n->context));
    free(n->memory);
    return true;
}

// An initiator has no responder's attributes, a target no requester's. Programs may leave them out, or say all that RC
// has.
static bool to_rts(struct ibv_qp *qp, uint32_t peer, union ibv_gid gid) {
    static bool all;
    all = !all;
    bool sends = all || qp->qp_type == IBV_QPT_XRC_SEND, answers = all || qp->qp_type == IBV_QPT_XRC_RECV;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    want(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_4096,
        .dest_qp_num = peer,
        .rq_psn = 7,
        .max_dest_rd_atomic = 16,
        .min_rnr_timer = 1,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 64}},
    };
    int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    want(!ibv_modify_qp(qp, &attr, answers ? mask | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : mask));
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .sq_psn = 7, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 16};
    mask = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT;
    want(!ibv_modify_qp(qp, &attr, sends ? mask | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : mask));
    want(qp_state(qp) == IBV_QPS_RTS);
    return true;
}

static int give(struct node *n, uint64_t wr_id, size_t offset) {
    struct ibv_sge sge = {(uintptr_t)n->memory + offset, SLOT, n->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_srq_recv(n->srq, &wr, &bad);
}

// The other end, as an initiator sees it.
struct remote {
    uint64_t memory;
    uint32_t rkey, srq_number;
};

static struct remote remote_of(const struct node *n) {
    return (struct remote){(uintptr_t)n->memory, n->mr->rkey, n->srq_number};
}

static int request(struct node *n, struct ibv_qp *qp, enum ibv_wr_opcode opcode, uint64_t wr_id, size_t offset,
                   uint32_t bytes, struct remote to) {
    struct ibv_sge sge = {(uintptr_t)n->memory + offset, bytes, n->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .imm_data = htonl(wr_id)};
    struct ibv_send_wr *bad;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = to.memory;
        wr.wr.atomic.rkey = to.rkey;
        wr.wr.atomic.compare_add = 5;
    } else {
        wr.wr.rdma.remote_addr = to.memory;
        wr.wr.rdma.rkey = to.rkey;
    }
    wr.qp_type.xrc.remote_srqn = to.srq_number;
    return ibv_post_send(qp, &wr, &bad);
}

static bool arrives(struct node *n, uint64_t wr_id, enum ibv_wc_opcode opcode, uint32_t bytes, uint32_t target) {
    struct ibv_wc wc;
    want(poll_one(n->recv_cq, &wc, 10000));
    want(wc.status == IBV_WC_SUCCESS && wc.wr_id == wr_id && wc.opcode == opcode && wc.byte_len == bytes);
    want(wc.qp_num == target);
    return true;
}

// Each operation, from an initiator to the queues of a target's domain.
static bool xrc_operations(void) {
    struct node a, b;
    want(node_open(&a, -1, O_CREAT) && node_open(&b, -1, O_CREAT));
    want((a.initiator = open_initiator(&a, 0)) && (b.target = make_target(&b)));
    want(!b.target->pd && !b.target->send_cq && !b.target->recv_cq && !b.target->srq);
    want(to_rts(b.target, a.initiator->qp_num, a.gid) && to_rts(a.initiator, b.target->qp_num, b.gid));
    struct remote to = remote_of(&b);
    uint32_t number = b.target->qp_num;
    fill(a.memory, SLOT, 3);
    for (uint64_t round = 0; round < 40; round++) {
        want(!give(&b, round, SLOT * (round % 8)));
        want(!request(&a, a.initiator, round % 2 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM, round, 0, 1000, to));
        want(completes(a.send_cq, round) && arrives(&b, round, IBV_WC_RECV, 1000, number));
        want(holds(b.memory + SLOT * (round % 8), 1000, 3));
    }
    memset(b.memory, 0, BYTES);
    want(!request(&a, a.initiator, IBV_WR_RDMA_WRITE, 50, 0, 1000, to) && completes(a.send_cq, 50));
    want(holds(b.memory, 1000, 3) && !give(&b, 51, 8192));
    want(!request(&a, a.initiator, IBV_WR_RDMA_WRITE_WITH_IMM, 51, 0, 500, to) && completes(a.send_cq, 51));
    want(arrives(&b, 51, IBV_WC_RECV_RDMA_WITH_IMM, 500, number));
    want(!request(&a, a.initiator, IBV_WR_RDMA_READ, 52, 4096, 1000, to) && completes(a.send_cq, 52));
    want(holds(a.memory + 4096, 1000, 3));
    memcpy(b.memory, &(uint64_t){37}, 8);
    want(!request(&a, a.initiator, IBV_WR_ATOMIC_FETCH_AND_ADD, 53, 4096, 8, to) && completes(a.send_cq, 53));
    want(*(uint64_t *)(a.memory + 4096) == 37 && *(uint64_t *)b.memory == 42);
    // An initiator receives nothing, a target has no queues at all.
    struct ibv_recv_wr wr = {0}, *bad;
    want(ibv_post_recv(a.initiator, &wr, &bad) == EINVAL && ibv_post_recv(b.target, &wr, &bad) == EINVAL);
    want(request(&a, b.target, IBV_WR_SEND, 60, 0, 8, to) == EINVAL);
    want(ibv_close_xrcd(b.domain) == EBUSY && ibv_destroy_cq(b.recv_cq) == EBUSY);
    return node_close(&a) && node_close(&b);
}

// Attributes of each half of a connection, in every state.
static bool xrc_states(void) {
    struct node a, b;
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    want(node_open(&a, -1, O_CREAT) && node_open(&b, -1, O_CREAT));
    want((a.initiator = open_initiator(&a, 0)) && (b.target = make_target(&b)));
    want(qp_state(a.initiator) == IBV_QPS_RESET && qp_state(b.target) == IBV_QPS_RESET);
    want(to_rts(b.target, a.initiator->qp_num, a.gid) && to_rts(a.initiator, b.target->qp_num, b.gid));
    want(!ibv_query_qp(a.initiator, &attr, IBV_QP_CAP, &init) && init.qp_type == IBV_QPT_XRC_SEND);
    want(init.send_cq == a.send_cq && attr.cap.max_send_wr >= 32 && !attr.cap.max_recv_wr && init.sq_sig_all);
    want(attr.dest_qp_num == b.target->qp_num && attr.max_rd_atomic == 16 && attr.retry_cnt == 7);
    want(!ibv_query_qp(b.target, &attr, IBV_QP_CAP, &init) && init.qp_type == IBV_QPT_XRC_RECV);
    want(!init.send_cq && !init.recv_cq && !init.srq && init.qp_context == &b);
    want(attr.dest_qp_num == a.initiator->qp_num && attr.max_dest_rd_atomic == 16 && attr.min_rnr_timer == 1);
    want(qp_modify_state(a.initiator, IBV_QPS_SQD) && qp_state(a.initiator) == IBV_QPS_SQD);
    want(qp_modify_state(a.initiator, IBV_QPS_RTS) && qp_modify_state(a.initiator, IBV_QPS_ERR));
    want(qp_modify_state(b.target, IBV_QPS_ERR) && qp_state(b.target) == IBV_QPS_ERR);
    want(qp_modify_state(b.target, IBV_QPS_RESET) && qp_state(b.target) == IBV_QPS_RESET);
    return node_close(&a) && node_close(&b);
}

// A queue that is none, or in another domain, is not reached.
static bool xrc_wrong_queue(void) {
    for (unsigned round = 0; round < 2; round++) {
        struct node a, b;
        struct ibv_wc wc;
        want(node_open(&a, -1, O_CREAT) && node_open(&b, -1, O_CREAT));
        want((a.initiator = open_initiator(&a, 0)) && (b.target = make_target(&b)));
        want(to_rts(b.target, a.initiator->qp_num, a.gid) && to_rts(a.initiator, b.target->qp_num, b.gid));
        struct remote to = remote_of(&b);
        to.srq_number = round ? a.srq_number : to.srq_number ^ 0x5555;
        want(!give(&a, 1, 0) && !give(&b, 1, 0));
        want(!request(&a, a.initiator, IBV_WR_SEND, 2, 0, 8, to) && poll_one(a.send_cq, &wc, 10000));
        want(wc.status != IBV_WC_SUCCESS && wc.wr_id == 2 && qp_state(a.initiator) == IBV_QPS_ERR);
        want(ibv_poll_cq(a.recv_cq, 1, &wc) == 0 && ibv_poll_cq(b.recv_cq, 1, &wc) == 0);
        want(node_close(&a) && node_close(&b));
    }
    return true;
}

// The builder interface: the queue's number is a setter, and may not be left out.
static bool xrc_built_requests(void) {
    struct node a, b;
    want(node_open(&a, -1, O_CREAT) && node_open(&b, -1, O_CREAT));
    want((a.initiator = open_initiator(&a, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_ATOMIC_WRITE)));
    want((b.target = make_target(&b)));
    want(to_rts(b.target, a.initiator->qp_num, a.gid) && to_rts(a.initiator, b.target->qp_num, b.gid));
    struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(a.initiator);
    want(qp && !give(&b, 1, 0));
    ibv_wr_start(qp);
    ibv_wr_send(qp);
    ibv_wr_set_inline_data(qp, "abcdefgh", 8);
    want(ibv_wr_complete(qp) == EINVAL);
    ibv_wr_start(qp);
    qp->wr_id = 2;
    ibv_wr_send(qp);
    ibv_wr_set_xrc_srqn(qp, b.srq_number);
    ibv_wr_set_inline_data(qp, "abcdefgh", 8);
    qp->wr_id = 3;
    ibv_wr_atomic_write(qp, b.mr->rkey, (uintptr_t)b.memory + 64, "12345678");
    ibv_wr_set_xrc_srqn(qp, b.srq_number);
    want(!ibv_wr_complete(qp) && completes(a.send_cq, 2) && completes(a.send_cq, 3));
    want(arrives(&b, 1, IBV_WC_RECV, 8, b.target->qp_num));
    want(!memcmp(b.memory, "abcdefgh", 8) && !memcmp(b.memory + 64, "12345678", 8));
    return node_close(&a) && node_close(&b);
}

static bool xrc_domains(void) {
    char path[] = "/var/tmp/freeflow-xrc-XXXXXX";
    int file = mkstemp(path);
    struct ibv_context *one = open_first_device(), *two = open_first_device();
    want(file >= 0 && !unlink(path) && one && two);
    want(!open_domain(one, file, 0) && errno == EAGAIN);
    want(!open_domain(one, 999, O_CREAT) && errno == EBADF);
    want(!ibv_open_xrcd(one, &(struct ibv_xrcd_init_attr){.fd = file, .oflags = O_CREAT}) && errno == EINVAL);
    struct ibv_xrcd *first = open_domain(one, file, O_CREAT | O_EXCL);
    want(first && !open_domain(two, file, O_CREAT | O_EXCL) && errno == EINVAL);
    struct ibv_xrcd *second = open_domain(two, file, 0), *nameless = open_domain(two, -1, O_CREAT);
    want(second && nameless);
    want(!ibv_close_xrcd(first) && !ibv_close_xrcd(nameless));
    want((first = open_domain(one, file, 0)) && !ibv_close_xrcd(first));
    want(!ibv_close_xrcd(second) && !open_domain(one, file, 0) && errno == EAGAIN);
    // A basic queue has no number, an XRC one needs a domain and a CQ.
    struct ibv_pd *pd = ibv_alloc_pd(one);
    struct ibv_srq *basic = ibv_create_srq(pd, &(struct ibv_srq_init_attr){.attr = {.max_wr = 4, .max_sge = 1}});
    uint32_t number;
    want(basic && ibv_get_srq_num(basic, &number) == EINVAL && !ibv_destroy_srq(basic));
    struct ibv_srq_init_attr_ex init = {.attr = {.max_wr = 4, .max_sge = 1},
                                        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
                                        .srq_type = IBV_SRQT_XRC,
                                        .pd = pd};
    want(!ibv_create_srq_ex(one, &init) && errno == EINVAL);
    want(!ibv_dealloc_pd(pd));
    // Objects that a program leaves go with its context.
    want((first = open_domain(one, file, O_CREAT)) && !ibv_close_device(one));
    want(!open_domain(two, file, 0) && errno == EAGAIN);
    close(file);
    return !ibv_close_device(two);
}

// Messages of the domain's processes to the initiator, and of the initiator to them.
struct word {
    struct remote at;
    union ibv_gid gid;
    uint32_t qpn;
};

static bool exchange(int sock, struct word mine, struct word *theirs) {
    return socket_swap(sock, &mine, theirs, sizeof mine);
}

// Makes the domain and the target, receives one message, and leaves both to the other one.
static bool owner(int file, int sock) {
    struct node n;
    struct word mine, theirs;
    want(node_open(&n, file, O_CREAT | O_EXCL) && (n.target = make_target(&n)) && !give(&n, 1, 0));
    mine = (struct word){remote_of(&n), n.gid, n.target->qp_num};
    want(exchange(sock, mine, &theirs) && to_rts(n.target, theirs.qpn, theirs.gid));
    want(exchange(sock, mine, &theirs));
    want(arrives(&n, 1, IBV_WC_RECV, 100, n.target->qp_num) && holds(n.memory, 100, 21));
    return exchange(sock, mine, &theirs); // and ends without a word
}

// Opens the target by its number, and goes on when its owner is gone.
static bool heir(int file, int sock) {
    struct node n;
    struct word theirs;
    struct ibv_async_event event;
    want(node_open(&n, file, 0) && exchange(sock, (struct word){remote_of(&n), n.gid, 0}, &theirs));
    struct ibv_qp_open_attr open = {
        .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE | IBV_QP_OPEN_ATTR_CONTEXT,
        .qp_num = theirs.qpn ^ 1,
        .xrcd = n.domain,
        .qp_context = &n,
        .qp_type = IBV_QPT_XRC_RECV};
    want(!ibv_open_qp(n.context, &open));
    open.qp_num = theirs.qpn;
    want((n.target = ibv_open_qp(n.context, &open)) && n.target->qp_num == theirs.qpn && n.target->qp_context == &n);
    want(qp_state(n.target) == IBV_QPS_RTS);
    for (uint64_t round = 0; round < 2; round++) {
        want(!give(&n, round, 0) && exchange(sock, (struct word){0}, &theirs));
        want(arrives(&n, round, IBV_WC_RECV, 100, n.target->qp_num) && holds(n.memory, 100, 30 + round));
    }
    want(exchange(sock, (struct word){0}, &theirs));
    want(fd_readable(n.context->async_fd, 10000) && !ibv_get_async_event(n.context, &event));
    want(event.event_type == IBV_EVENT_QP_ACCESS_ERR && event.element.qp == n.target);
    ibv_ack_async_event(&event);
    want(qp_state(n.target) == IBV_QPS_ERR);
    return node_close(&n);
}

static pid_t start(bool (*run)(int file, int sock), int file, int sock[2]) {
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sock)) return -1;
    pid_t child = fork();
    if (!child) {
        close(sock[0]);
        _exit(!run(file, sock[1]));
    }
    close(sock[1]);
    struct timeval limit = {20, 0};
    setsockopt(sock[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return child;
}

static bool ended_well(pid_t child) {
    int status = 0;
    want(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return true;
}

// One target QP serves two processes; it stays when the one that made it ends.
static bool xrc_shared_by_processes(void) {
    char path[] = "/var/tmp/freeflow-xrc-XXXXXX";
    int file = mkstemp(path), first[2], second[2];
    want(file >= 0 && !unlink(path));
    struct node n;
    struct word one, two, nothing = {0};
    struct ibv_wc wc;
    pid_t children[2];
    want((children[0] = start(owner, file, first)) > 0);
    want(node_open(&n, -1, O_CREAT) && (n.initiator = open_initiator(&n, 0)));
    struct word mine = {remote_of(&n), n.gid, n.initiator->qp_num};
    want(exchange(first[0], mine, &one) && to_rts(n.initiator, one.qpn, one.gid));
    want(exchange(first[0], mine, &one)); // the target is ready
    want((children[1] = start(heir, file, second)) > 0);
    want(exchange(second[0], (struct word){.qpn = one.qpn}, &two) && two.at.srq_number != one.at.srq_number);
    struct remote heirs = two.at;
    fill(n.memory, 100, 21);
    want(!request(&n, n.initiator, IBV_WR_SEND, 1, 0, 100, one.at) && completes(n.send_cq, 1));
    fill(n.memory, 100, 30);
    want(exchange(second[0], nothing, &two));
    want(!request(&n, n.initiator, IBV_WR_SEND, 2, 0, 100, heirs) && completes(n.send_cq, 2));
    want(exchange(first[0], nothing, &one) && ended_well(children[0]));
    fill(n.memory, 100, 31);
    want(exchange(second[0], nothing, &two));
    want(!request(&n, n.initiator, IBV_WR_SEND, 3, 0, 100, heirs) && completes(n.send_cq, 3));
    want(exchange(second[0], nothing, &two));
    heirs.rkey ^= 0x10000;
    want(!request(&n, n.initiator, IBV_WR_RDMA_WRITE, 4, 0, 8, heirs) && poll_one(n.send_cq, &wc, 10000));
    want(wc.status == IBV_WC_REM_ACCESS_ERR && wc.wr_id == 4 && ended_well(children[1]));
    close(file), close(first[0]), close(second[0]);
    return node_close(&n);
}

const struct app_case xrc_cases[] = {
    {"xrc_operations", xrc_operations},
    {"xrc_states", xrc_states},
    {"xrc_wrong_queue", xrc_wrong_queue},
    {"xrc_built_requests", xrc_built_requests},
    {"xrc_domains", xrc_domains},
    {"xrc_shared_by_processes", xrc_shared_by_processes},
    {NULL, NULL},
};
