// Random SENDs, WRITEs, READs and atomics on several queue pairs in one thread, against a model of the peer's memory.
//
//   wire [OPTIONS] server PORT | client HOST PORT
//
//   -q COUNT   queue pairs (8)               -n COUNT   requests on each, then it ends (no limit)
//   -t MS      how long to post (1000)       -g FILE    begin when this file is there
//   -s SEED    of the requests (1)           -m BYTES   path MTU (4096)
//   -T, -R     timeout and retry count, as the attributes have them (16, 7)
//   -x         expects to be disturbed: prints when it saw the first error (CLOCK_MONOTONIC, ns) and takes what is
//              flushed
//
// Both ends sleep in one completion channel. Only its peer writes an end's target, so that the peer's model must be
// what is there. Prints a line `flow NUMBER REQUESTS BYTES` for each queue pair. Exit 0: all was right; with -x:
// disturbed, and all work came back.
#define _GNU_SOURCE
#include "harness.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    QPS_MAX = 64,
    DEPTH = 8, // requests outstanding on a queue pair, and RECVs
    SLOT = 12 * 1024 + 512,
    TARGET = 32 * 1024,
    WORDS = 1024, // of the target, at its end: for atomics alone
    FLOW = TARGET + 2 * DEPTH * SLOT,
    EVENT_WAIT_MS = 100,
    FLUSH_WAIT_MS = 5000,
    GO_WAIT_MS = 240000,
};

enum kind { SEND, SEND_IMM, WRITE, WRITE_IMM, READ, ADD, SWAP, KINDS };

struct request {
    enum kind kind;
    uint32_t length;
    uint8_t *expected; // of a READ: the model as it was; of an atomic: the word
};

struct flow {
    struct ibv_qp *qp;
    uint8_t *memory; // target, what is sent or read, what is received
    uint8_t model[TARGET];
    struct address mine, peer;
    uint64_t random, bytes;
    uint32_t posted, completed, messages_sent, messages_received, receives;
    struct request requests[DEPTH];
    uint8_t expected[DEPTH][SLOT];
};

static struct {
    unsigned qps, timeout, retry;
    enum ibv_mtu mtu;
    uint64_t count, duration_ms, seed;
    const char *go;
    bool disturbed;
} options = {.qps = 8, .timeout = 16, .retry = 7, .mtu = IBV_MTU_4096, .count = UINT64_MAX, .duration_ms = 1000, .seed = 1};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct flow *flows;
static enum ibv_wc_status first_error = IBV_WC_SUCCESS;
static uint64_t first_error_ns;

static bool bad(const char *what, const struct flow *flow) {
    fprintf(stderr, "  %s on flow %ld, request %u, message %u\n", what, flow ? (long)(flow - flows) : -1L,
            flow ? flow->completed : 0, flow ? flow->messages_received : 0);
    return false;
}

// ---- opening

static uint8_t *sources(struct flow *flow) { return flow->memory + TARGET; }
static uint8_t *received(struct flow *flow) { return flow->memory + TARGET + DEPTH * SLOT; }

static bool post_receive(struct flow *flow, uint64_t slot) {
    struct ibv_sge sge = {(uintptr_t)received(flow) + slot * SLOT, SLOT, mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = 1}, *first_bad;
    if (ibv_post_recv(flow->qp, &wr, &first_bad)) return false;
    flow->receives++;
    return true;
}

static bool open_flow(struct flow *flow, uint8_t *memory) {
    struct ibv_qp_init_attr init = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    flow->memory = memory;
    flow->qp = ibv_create_qp(pd, &init);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT,
                               .port_num = 1,
                               .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                                  IBV_ACCESS_REMOTE_ATOMIC};
    if (!flow->qp ||
        ibv_modify_qp(flow->qp, &attr, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS))
        return false;
    for (uint64_t slot = 0; slot < DEPTH; slot++)
        if (!post_receive(flow, slot)) return false;
    // Beginning just before the end of the numbers, so that they run over.
    flow->mine = (struct address){
        .qpn = flow->qp->qp_num, .psn = 0xfffff0, .rkey = mr->rkey, .memory = (uintptr_t)memory, .bytes = TARGET};
    return !ibv_query_gid(context, 1, 0, &flow->mine.gid);
}

static bool connect_flow(struct flow *flow) {
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = options.mtu,
        .dest_qp_num = flow->peer.qpn,
        .rq_psn = flow->peer.psn,
        .max_dest_rd_atomic = 4,
        .min_rnr_timer = 1,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = flow->peer.gid, .hop_limit = 64}},
    };
    if (ibv_modify_qp(flow->qp, &attr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        return false;
    attr.qp_state = IBV_QPS_RTS;
    attr.sq_psn = flow->mine.psn;
    attr.timeout = (uint8_t)options.timeout;
    attr.retry_cnt = (uint8_t)options.retry;
    attr.rnr_retry = 7;
    attr.max_rd_atomic = 4;
    return !ibv_modify_qp(flow->qp, &attr,
                          IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                              IBV_QP_MAX_QP_RD_ATOMIC);
}

static bool open_all(struct side *side) {
    size_t bytes = (size_t)options.qps * FLOW;
    uint8_t *memory = NULL;
    if (!(context = open_first_device()) || !(pd = ibv_alloc_pd(context))) return bad("no device", NULL);
    if (posix_memalign((void **)&memory, 4096, bytes)) return false;
    memset(memory, 0, bytes);
    mr = ibv_reg_mr(pd, memory, bytes,
                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
    channel = ibv_create_comp_channel(context);
    cq = channel ? ibv_create_cq(context, (int)options.qps * 2 * DEPTH, NULL, channel, 0) : NULL;
    if (!mr || !cq) return bad("no objects", NULL);
    for (unsigned i = 0; i < options.qps; i++) {
        flows[i].random = options.seed * 2 + side->role + ((uint64_t)i << 32);
        if (!open_flow(&flows[i], memory + (size_t)i * FLOW)) return bad("does not open", &flows[i]);
        if (!socket_swap(side->sock, &flows[i].mine, &flows[i].peer, sizeof flows[i].mine) || !connect_flow(&flows[i]))
            return bad("does not connect", &flows[i]);
    }
    return meet(side);
}

static bool close_all(void) {
    bool ok = true;
    for (unsigned i = 0; i < options.qps; i++) ok &= !ibv_destroy_qp(flows[i].qp);
    ok &= !ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel) && !ibv_dereg_mr(mr);
    return ok && !ibv_dealloc_pd(pd) && !ibv_close_device(context);
}

// ---- requests

// Plans the peer's memory after `wr`.
static void plan(struct flow *flow, struct request *request, uint64_t random, struct ibv_send_wr *wr, uint8_t *source) {
    size_t at = (random >> 40) % (TARGET - WORDS - request->length);
    uint8_t *expected = flow->expected[flow->posted % DEPTH];
    uint64_t word;
    switch (request->kind) {
        case SEND:
        case SEND_IMM: fill(source, request->length, flow->messages_sent); break;
        case WRITE:
        case WRITE_IMM:
            fill(source, request->length, random);
            memcpy(flow->model + at, source, request->length);
            break;
        case READ: memcpy(expected, flow->model + at, request->length); break;
        default:
            at = TARGET - WORDS + at % WORDS / 8 * 8;
            memcpy(expected, flow->model + at, 8);
            memcpy(&word, expected, 8);
            wr->wr.atomic.compare_add = request->kind == ADD ? random : word ^ (random >> 60 == 0);
            wr->wr.atomic.swap = random;
            if (request->kind == ADD) word += random;
            else if (random >> 60 != 0) word = random;
            memcpy(flow->model + at, &word, 8);
            wr->wr.atomic.remote_addr = flow->peer.memory + at;
            wr->wr.atomic.rkey = flow->peer.rkey;
            return;
    }
    wr->wr.rdma.remote_addr = flow->peer.memory + at;
    wr->wr.rdma.rkey = flow->peer.rkey;
}

static bool post_next(struct flow *flow) {
    static const enum ibv_wr_opcode opcodes[KINDS] = {
        [SEND] = IBV_WR_SEND,           [SEND_IMM] = IBV_WR_SEND_WITH_IMM,
        [WRITE] = IBV_WR_RDMA_WRITE,    [WRITE_IMM] = IBV_WR_RDMA_WRITE_WITH_IMM,
        [READ] = IBV_WR_RDMA_READ,      [ADD] = IBV_WR_ATOMIC_FETCH_AND_ADD,
        [SWAP] = IBV_WR_ATOMIC_CMP_AND_SWP,
    };
    uint64_t random = random_next(&flow->random);
    unsigned slot = flow->posted % DEPTH;
    struct request *request = &flow->requests[slot];
    request->kind = random % KINDS;
    request->length = request->kind >= ADD ? 8 : 1 + (uint32_t)(random >> 8) % (random & 128 ? 256 : SLOT - 8);
    uint8_t *source = sources(flow) + (size_t)slot * SLOT;
    struct ibv_sge sge = {(uintptr_t)source, request->length, mr->lkey};
    struct ibv_send_wr wr = {.wr_id = slot | DEPTH, .sg_list = &sge, .num_sge = 1, .opcode = opcodes[request->kind]}, *b;
    wr.imm_data = htonl(flow->messages_sent);
    plan(flow, request, random, &wr, source);
    // A READ that is asked for again reads again: what is written behind it waits (IBTA 10.8.3.3).
    if (request->kind == WRITE || request->kind == WRITE_IMM || random >> 62 == 0) wr.send_flags = IBV_SEND_FENCE;
    flow->messages_sent += request->kind == SEND || request->kind == SEND_IMM || request->kind == WRITE_IMM;
    if (ibv_post_send(flow->qp, &wr, &b)) return false;
    flow->posted++;
    flow->bytes += request->length;
    return true;
}

// ---- completions

static bool take_request(struct flow *flow, const struct ibv_wc *wc) {
    unsigned slot = flow->completed % DEPTH;
    struct request *request = &flow->requests[slot];
    if (wc->wr_id != (slot | DEPTH)) return bad("completions out of order", flow);
    const uint8_t *here = sources(flow) + (size_t)slot * SLOT;
    if (wc->status == IBV_WC_SUCCESS && request->kind >= READ && memcmp(here, flow->expected[slot], request->length))
        return bad(request->kind == READ ? "a READ brought wrong bytes" : "an atomic brought a wrong word", flow);
    flow->completed++;
    return true;
}

// A device whose router has died refuses what is posted: an error as good as a completion.
static bool lost_device(void) {
    if (options.disturbed && first_error == IBV_WC_SUCCESS) {
        first_error = IBV_WC_FATAL_ERR;
        first_error_ns = now_ns();
    }
    return options.disturbed;
}

static bool take_message(struct flow *flow, const struct ibv_wc *wc) {
    flow->receives--;
    if (wc->status != IBV_WC_SUCCESS) return true;
    bool written = wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM;
    if (wc->wc_flags & IBV_WC_WITH_IMM && ntohl(wc->imm_data) != flow->messages_received)
        return bad("immediate data is wrong", flow);
    if (!written && !holds(received(flow) + wc->wr_id * SLOT, wc->byte_len, flow->messages_received))
        return bad("a SEND brought wrong bytes", flow);
    flow->messages_received++;
    return post_receive(flow, wc->wr_id) || lost_device() || bad("posting a RECV fails", flow);
}

static struct flow *flow_of(uint32_t qpn) {
    for (unsigned i = 0; i < options.qps; i++)
        if (flows[i].qp->qp_num == qpn) return &flows[i];
    return NULL;
}

// The number taken, or -1 if one was wrong.
static int take_all(void) {
    struct ibv_wc wc[32];
    int taken = 0;
    for (int n; (n = ibv_poll_cq(cq, 32, wc)) != 0; taken += n) {
        if (n < 0) return -1;
        for (int i = 0; i < n; i++) {
            struct flow *flow = flow_of(wc[i].qp_num);
            if (!flow) return bad("a completion of no queue pair", NULL) - 1;
            if (wc[i].status != IBV_WC_SUCCESS && first_error == IBV_WC_SUCCESS) {
                first_error = wc[i].status;
                first_error_ns = now_ns();
            }
            if (!(wc[i].wr_id & DEPTH ? take_request(flow, &wc[i]) : take_message(flow, &wc[i]))) return -1;
        }
    }
    return taken;
}

// The router is gone, and with it the events of what came just before.
static bool without_events(void) {
    struct pollfd looked = {channel->fd, POLLIN, 0};
    return poll(&looked, 1, 0) == 1 && (looked.revents & POLLHUP);
}

// Sleeps until something may have come. False: an event is missing.
static bool sleep_in_channel(int sock) {
    struct pollfd waiting[2] = {{channel->fd, POLLIN, 0}, {sock, POLLIN, 0}};
    void *cookie;
    struct ibv_cq *of;
    int n;
    if (ibv_req_notify_cq(cq, 0)) return false;
    if ((n = take_all()) != 0) return n > 0;
    poll(waiting, 2, EVENT_WAIT_MS);
    if (!(waiting[0].revents & POLLIN)) {
        // Completions after the arming must ring, if not quite at once.
        return (n = take_all()) == 0 || (n > 0 && fd_readable(channel->fd, 2000)) || first_error != IBV_WC_SUCCESS ||
               without_events() || bad("completions without an event", NULL);
    }
    if (ibv_get_cq_event(channel, &of, &cookie)) return false;
    ibv_ack_cq_events(of, 1);
    return true;
}

// ---- the run

static bool all_done(void) {
    for (unsigned i = 0; i < options.qps; i++)
        if (flows[i].completed < flows[i].posted) return false;
    return true;
}

static bool run(int sock) {
    uint64_t end_ns = now_ns() + options.duration_ms * 1000000u;
    bool posting = true, said = false, heard = false;
    while (!(said && heard) && first_error == IBV_WC_SUCCESS) {
        posting = posting && now_ns() < end_ns;
        for (unsigned i = 0; posting && i < options.qps; i++)
            while (flows[i].posted - flows[i].completed < DEPTH && flows[i].posted < options.count)
                if (!post_next(&flows[i])) return lost_device() || bad("posting fails", &flows[i]);
        bool spent = true;
        for (unsigned i = 0; i < options.qps; i++) spent &= flows[i].posted >= options.count;
        int taken = take_all();
        if (taken < 0) return false;
        if (!said && (spent || !posting) && all_done()) said = send(sock, "d", 1, MSG_NOSIGNAL) == 1;
        char word;
        if (!heard) heard = recv(sock, &word, 1, MSG_DONTWAIT) == 1;
        if (taken == 0 && !(said && heard) && !sleep_in_channel(heard ? -1 : sock)) return false;
    }
    return first_error == IBV_WC_SUCCESS;
}

// The peer's writes to this memory are those of its model, and nothing else.
static bool compare(struct side *side) {
    uint8_t *theirs = malloc(TARGET);
    for (unsigned i = 0; i < options.qps; i++) {
        struct flow *flow = &flows[i];
        uint32_t sent = 0;
        if (!socket_swap(side->sock, &flow->messages_sent, &sent, sizeof sent) ||
            !socket_swap(side->sock, flow->model, theirs, TARGET))
            return bad("the peer has gone", flow);
        uint64_t end_ns = now_ns() + 2000000000u;
        while (flow->messages_received < sent && now_ns() < end_ns)
            if (take_all() < 0) return false;
        if (flow->messages_received != sent) return bad("messages are missing", flow);
        if (memcmp(flow->memory, theirs, TARGET)) return bad("this memory is not the peer's model of it", flow);
    }
    free(theirs);
    return meet(side);
}

static bool flushed(void) {
    uint64_t end_ns = now_ns() + FLUSH_WAIT_MS * 1000000u;
    bool all = false;
    // The queue pairs without an error are ended, as a program would.
    for (unsigned i = 0; i < options.qps; i++) qp_modify_state(flows[i].qp, IBV_QPS_ERR);
    while (!all && now_ns() < end_ns) {
        if (take_all() < 0) return false;
        all = all_done();
        for (unsigned i = 0; i < options.qps; i++) all &= flows[i].receives == 0;
    }
    printf("error %s %lu\n", ibv_wc_status_str(first_error), (unsigned long)first_error_ns);
    return all || bad("work did not come back", NULL);
}

static bool wait_for_go(void) {
    uint64_t end_ns = now_ns() + GO_WAIT_MS * 1000000ull;
    while (options.go && access(options.go, F_OK)) {
        if (now_ns() > end_ns) return bad("nobody said go", NULL);
        sleep_ms(10);
    }
    return true;
}

static void read_options(int argc, char **argv) {
    for (int option; (option = getopt(argc, argv, "+q:n:t:g:s:m:T:R:x")) != -1;) {
        unsigned long value = optarg ? strtoul(optarg, NULL, 0) : 0;
        switch (option) {
            case 'q': options.qps = value < QPS_MAX ? (unsigned)value : QPS_MAX; break;
            case 'n': options.count = value; break;
            case 't': options.duration_ms = value; break;
            case 'g': options.go = optarg; break;
            case 's': options.seed = value; break;
            case 'm': options.mtu = (enum ibv_mtu)(__builtin_ctzl(value) - 7); break;
            case 'T': options.timeout = (unsigned)value; break;
            case 'R': options.retry = (unsigned)value; break;
            case 'x': options.disturbed = true; break;
            default: exit(2);
        }
    }
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    read_options(argc, argv);
    argv += optind;
    argc -= optind;
    bool server = argc == 2 && !strcmp(argv[0], "server"), client = argc == 3 && !strcmp(argv[0], "client");
    if (!server && !client) return 2;
    int sock = server ? socket_accept(socket_listen(atoi(argv[1]))) : socket_connect(argv[1], atoi(argv[2]));
    struct side side = {server ? ROLE_B : ROLE_A, sock, "wire", false};
    flows = calloc(options.qps, sizeof *flows);
    if (sock < 0 || !flows || !open_all(&side)) return 1;
    printf("ready\n");
    if (!wait_for_go()) return 1;
    uint64_t begin_ns = now_ns();
    bool ok = run(sock);
    for (unsigned i = 0; i < options.qps; i++)
        printf("flow %u %u %lu\n", i, flows[i].completed, (unsigned long)flows[i].bytes);
    if (options.disturbed) return first_error != IBV_WC_SUCCESS && flushed() ? 0 : 1;
    if (first_error != IBV_WC_SUCCESS) printf("error %s\n", ibv_wc_status_str(first_error));
    ok = ok && compare(&side);
    printf("%s after %lu ms\n", ok ? "all right" : "wrong", (unsigned long)((now_ns() - begin_ns) / 1000000));
    return close_all() && ok ? 0 : 1;
}
