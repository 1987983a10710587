// Two ends on one device, their states, their work and what comes of it.
#define _GNU_SOURCE
#include "trace.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct device device;
struct device *peer_device = &device;
int wait_ms = 4000;

uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static void open_one(struct device *device) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (!list || !list[0] || !(device->context = ibv_open_device(list[0]))) give_up("open the device");
    ibv_free_device_list(list);
    if (ibv_query_device(device->context, &device->attr)) give_up("query the device");
    for (int index = 0; !ibv_query_gid(device->context, 1, index, &device->gid); index++) {
        device->gid_index = index;
        if (!memcmp(device->gid.raw, "\0\0\0\0\0\0\0\0\0\0\xff\xff", 12)) return;
        if (index == 15) break;
    }
    give_up("find an address of IPv4");
}

void device_open(void) {
    static struct device other;
    const char *peer = getenv("DIFFERENTIAL_PEER");
    open_one(&device);
    if (!peer) return;
    // FreeFlow's library asks for the socket's name each time that devices are listed.
    setenv("FREEFLOW_SOCKET", peer, 1);
    open_one(&other);
    peer_device = &other;
}

// ---- names

static struct {
    uint32_t number;
    bool datagrams;
    char name[8];
} qp_names[256];
static size_t qp_name_count;

void name_qp(uint32_t number, enum ibv_qp_type type, const char *name) {
    size_t i = 0;
    while (i < qp_name_count && qp_names[i].number != number) i++;
    if (i == sizeof qp_names / sizeof *qp_names) give_up("name a queue pair");
    if (i == qp_name_count) qp_name_count++;
    qp_names[i].number = number;
    qp_names[i].datagrams = type == IBV_QPT_UD;
    snprintf(qp_names[i].name, sizeof qp_names[i].name, "%s", name);
}

const char *qp_name(uint32_t number) {
    for (size_t i = 0; i < qp_name_count; i++)
        if (qp_names[i].number == number) return qp_names[i].name;
    return "?";
}

static bool of_datagrams(uint32_t number) {
    for (size_t i = 0; i < qp_name_count; i++)
        if (qp_names[i].number == number) return qp_names[i].datagrams;
    return false;
}

// ---- opening

static int value(int given, int otherwise) { return given == NONE ? 0 : given ? given : otherwise; }

uint8_t *memory_take(size_t bytes) {
    uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) give_up("take memory");
    memset(memory, 0, bytes);
    return memory;
}

struct ibv_mr *mr_open(struct ibv_pd *pd, void *memory, size_t bytes, int access) {
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, bytes, (unsigned)access);
    if (!mr) give_up("register memory");
    return mr;
}

static struct ibv_cq *cq_open_on(struct device *on, int entries, struct ibv_comp_channel *channel) {
    struct ibv_cq *cq = ibv_create_cq(on->context, entries, NULL, channel, 0);
    if (!cq) give_up("create a completion queue");
    return cq;
}

struct ibv_cq *cq_open(int entries, struct ibv_comp_channel *channel) { return cq_open_on(&device, entries, channel); }

void end_open(struct end *end, const char *name, const struct options *options) {
    const struct options *o = &end->options;
    end->options = *options;
    end->name = name;
    end->device = name[0] == 'B' ? peer_device : &device;
    end->bytes = o->bytes ? o->bytes : BUFFER_BYTES;
    if (!(end->pd = ibv_alloc_pd(end->device->context))) give_up("allocate a protection domain");
    end->memory = memory_take(end->bytes);
    end->mr = mr_open(end->pd, end->memory, end->bytes, value(o->mr_access, ALL_ACCESS));
    if (o->channel && !(end->channel = ibv_create_comp_channel(end->device->context))) give_up("create a channel");
    end->send_cq = cq_open_on(end->device, value(o->cqe, 64), end->channel);
    end->recv_cq = cq_open_on(end->device, value(o->cqe, 64), end->channel);
    bool srq = o->srq && name[0] == 'B';
    if (srq) {
        struct ibv_srq_init_attr init = {
            .attr = {.max_wr = (uint32_t)value(o->recv_wr, 16), .max_sge = (uint32_t)value(o->recv_sge, 2)}};
        if (!(end->srq = ibv_create_srq(end->pd, &init))) give_up("create a shared receive queue");
    }
    struct ibv_qp_init_attr init = {
        .send_cq = end->send_cq,
        .recv_cq = end->recv_cq,
        .srq = end->srq,
        .cap = {.max_send_wr = (uint32_t)value(o->send_wr, 16),
                .max_recv_wr = srq ? 0 : (uint32_t)value(o->recv_wr, 16),
                .max_send_sge = (uint32_t)value(o->send_sge, 2),
                .max_recv_sge = srq ? 0 : (uint32_t)value(o->recv_sge, 2),
                .max_inline_data = (uint32_t)o->inline_bytes},
        .qp_type = o->type ? o->type : IBV_QPT_RC,
        .sq_sig_all = o->all_signaled,
    };
    if (!(end->qp = ibv_create_qp(end->pd, &init))) give_up("create a queue pair");
    name_qp(end->qp->qp_num, end->qp->qp_type, name);
}

void pair_open(struct pair *pair, const struct options *options) {
    memset(pair, 0, sizeof *pair);
    end_open(&pair->a, "A", options);
    end_open(&pair->b, "B", options);
    pair->a.peer = &pair->b;
    pair->b.peer = &pair->a;
    memory_fill(pair->a.memory, pair->a.bytes, 1);
    memory_fill(pair->b.memory, pair->b.bytes, 2);
    if (options->unconnected) return;
    end_connect(&pair->a);
    end_connect(&pair->b);
}

void end_connect(struct end *end) {
    if (!reach(end, IBV_QPS_RTS)) give_up("connect");
    if (end->qp->qp_type != IBV_QPT_UD || end->ah) return;
    struct ibv_ah_attr attr = path_of(end);
    if (!(end->ah = ibv_create_ah(end->pd, &attr))) give_up("create an address handle");
}

void pair_again(struct pair *pair) {
    say("A to RESET -> %s", result(modify(pair->a.qp, IBV_QPS_RESET)));
    say("B to RESET -> %s", result(modify(pair->b.qp, IBV_QPS_RESET)));
    end_connect(&pair->a);
    end_connect(&pair->b);
}

// ---- states

static struct ibv_ah_attr address(const struct device *from, const struct device *to) {
    return (struct ibv_ah_attr){
        .is_global = 1,
        .port_num = 1,
        .grh = {.dgid = to->gid, .sgid_index = (uint8_t)from->gid_index, .hop_limit = 64},
    };
}

struct ibv_ah_attr address_of_device(void) { return address(&device, &device); }
struct ibv_ah_attr address_of_peer(void) { return address(&device, peer_device); }
struct ibv_ah_attr path_of(const struct end *end) {
    return address(end->device, end->peer ? end->peer->device : end->device);
}

void attr_fill(struct ibv_qp_attr *attr, const struct options *o, enum ibv_qp_type type, uint32_t peer) {
    int access = value(o->qp_access, ALL_ACCESS);
    if (type == IBV_QPT_UC) access &= IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    *attr = (struct ibv_qp_attr){
        .path_mtu = IBV_MTU_1024,
        .path_mig_state = IBV_MIG_MIGRATED,
        .qkey = QKEY,
        .rq_psn = 1000,
        .sq_psn = 1000,
        .dest_qp_num = peer,
        .qp_access_flags = (unsigned)access,
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2},
        .ah_attr = address_of_device(),
        .alt_ah_attr = address_of_device(),
        .max_rd_atomic = (uint8_t)value(o->rd_atomic, 4),
        .max_dest_rd_atomic = (uint8_t)value(o->dest_rd_atomic, 4),
        .min_rnr_timer = (uint8_t)value(o->rnr_timer, 1),
        .port_num = 1,
        .timeout = (uint8_t)value(o->timeout, 18),
        .retry_cnt = (uint8_t)value(o->retry, 7),
        .rnr_retry = (uint8_t)value(o->rnr_retry, 7),
        .alt_port_num = 1,
        .alt_timeout = 18,
    };
}

int required_mask(enum ibv_qp_type type, enum ibv_qp_state to) {
    const int connected = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    switch (to) {
        case IBV_QPS_INIT:
            return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                   (type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS);
        case IBV_QPS_RTR:
            if (type == IBV_QPT_UD) return IBV_QP_STATE;
            if (type == IBV_QPT_UC) return IBV_QP_STATE | connected;
            return IBV_QP_STATE | connected | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        case IBV_QPS_RTS:
            if (type != IBV_QPT_RC) return IBV_QP_STATE | IBV_QP_SQ_PSN;
            return IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                   IBV_QP_MAX_QP_RD_ATOMIC;
        default:
            return IBV_QP_STATE;
    }
}

int modify(struct ibv_qp *qp, enum ibv_qp_state to) {
    struct ibv_qp_attr attr = {.qp_state = to};
    return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

void say_modify(struct end *end, enum ibv_qp_state to) {
    say("%s to %s -> %s", end->name, state_name(to), result(modify(end->qp, to)));
}

// An error of the send queue alone: a datagram, or a message of UC, from memory that is not registered.
static bool break_send_queue(struct end *end) {
    struct ibv_wc wc;
    if (end->qp->qp_type == IBV_QPT_UD && !end->ah) {
        struct ibv_ah_attr attr = path_of(end);
        if (!(end->ah = ibv_create_ah(end->pd, &attr))) return false;
    }
    struct op op = {.code = IBV_WR_SEND, .id = 999, .len = 8, .lkey = end->mr->lkey ^ 0xffffff00, .qpn = 1};
    return !post_quietly(end, &op) && take(end->send_cq, &wc) && wc.status != IBV_WC_SUCCESS;
}

bool reach(struct end *end, enum ibv_qp_state state) {
    enum ibv_qp_type type = end->qp->qp_type;
    struct ibv_qp_attr attr;
    attr_fill(&attr, &end->options, type, end->peer ? end->peer->qp->qp_num : end->qp->qp_num);
    attr.ah_attr = attr.alt_ah_attr = path_of(end);
    enum ibv_qp_state until = state > IBV_QPS_RTS ? IBV_QPS_RTS : state;
    for (attr.qp_state = IBV_QPS_INIT; attr.qp_state <= until; attr.qp_state++)
        if (ibv_modify_qp(end->qp, &attr, required_mask(type, attr.qp_state))) return false;
    if (state == IBV_QPS_SQE) return break_send_queue(end);
    return state <= IBV_QPS_RTS || !modify(end->qp, state);
}

static int query_state(struct ibv_qp *qp, enum ibv_qp_state *state) {
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    int rc = ibv_query_qp(qp, &attr, IBV_QP_STATE, &init);
    *state = attr.qp_state;
    return rc;
}

const char *queried_state(struct ibv_qp *qp) {
    enum ibv_qp_state state;
    int rc = query_state(qp, &state);
    return rc ? result(rc) : state_name(state);
}

// An error travels to the other end, so the states are those that have stayed for a while.
void say_states(struct pair *pair) {
    const char *a = queried_state(pair->a.qp), *b = queried_state(pair->b.qp);
    for (int calm = 0; calm < 4; calm++) {
        usleep(5000);
        const char *a_now = queried_state(pair->a.qp), *b_now = queried_state(pair->b.qp);
        if (a_now != a || b_now != b) calm = -1;
        a = a_now;
        b = b_now;
    }
    say("A is in %s, B in %s", a, b);
}

void wait_for_state(struct end *end, enum ibv_qp_state wanted) {
    enum ibv_qp_state state = IBV_QPS_UNKNOWN;
    for (uint64_t until = now_ms() + (uint64_t)wait_ms; now_ms() < until && state != wanted; usleep(1000))
        if (query_state(end->qp, &state)) break;
    say("%s is in %s", end->name, state_name(state));
}

// ---- work

int post_quietly(struct end *end, const struct op *op) {
    struct ibv_sge sge = {(uintptr_t)end->memory + op->at, op->len, op->lkey ? op->lkey : end->mr->lkey};
    struct ibv_send_wr wr = {
        .wr_id = op->id,
        .sg_list = &sge,
        .num_sge = op->len == ZERO_LENGTH ? 0 : 1,
        .opcode = op->code,
        .send_flags = op->flags & UNSIGNALED ? op->flags & ~UNSIGNALED : op->flags | IBV_SEND_SIGNALED,
        .imm_data = op->code == IBV_WR_SEND_WITH_INV || op->code == IBV_WR_LOCAL_INV ? op->imm : htonl(op->imm),
    };
    struct end *peer = end->peer ? end->peer : end;
    uint64_t remote = op->remote ? op->remote : (uintptr_t)peer->memory + op->to;
    uint32_t rkey = op->rkey ? op->rkey : peer->mr ? peer->mr->rkey : 0;
    if (end->qp->qp_type == IBV_QPT_UD) {
        wr.wr.ud.ah = op->ah ? op->ah : end->ah;
        wr.wr.ud.remote_qpn = op->qpn ? op->qpn : peer->qp->qp_num;
        wr.wr.ud.remote_qkey = op->qkey ? op->qkey : QKEY;
    } else if (op->code == IBV_WR_ATOMIC_CMP_AND_SWP || op->code == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = remote;
        wr.wr.atomic.rkey = rkey;
        wr.wr.atomic.compare_add = op->compare;
        wr.wr.atomic.swap = op->swap;
    } else {
        wr.wr.rdma.remote_addr = remote;
        wr.wr.rdma.rkey = rkey;
    }
    struct ibv_send_wr *bad = NULL;
    int rc = ibv_post_send(end->qp, &wr, &bad);
    if (rc && bad != &wr) say("bad_wr is not the request");
    return rc;
}

void post(struct end *end, const struct op *op) {
    say("%s posts %s %lu -> %s", end->name, opcode_name(op->code), (unsigned long)op->id,
        result(post_quietly(end, op)));
}

int receive_quietly(struct end *end, uint64_t id, size_t at, uint32_t len, uint32_t lkey) {
    struct ibv_sge sge = {(uintptr_t)end->memory + at, len, lkey};
    struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = len == ZERO_LENGTH ? 0 : 1}, *bad = NULL;
    int rc = end->srq ? ibv_post_srq_recv(end->srq, &wr, &bad) : ibv_post_recv(end->qp, &wr, &bad);
    if (rc && bad != &wr) say("bad_wr is not the request");
    return rc;
}

void receive_key(struct end *end, uint64_t id, size_t at, uint32_t len, uint32_t lkey) {
    say("%s posts RECV %lu -> %s", end->name, (unsigned long)id, result(receive_quietly(end, id, at, len, lkey)));
}

void receive(struct end *end, uint64_t id, size_t at, uint32_t len) { receive_key(end, id, at, len, end->mr->lkey); }

// ---- what happens

int take(struct ibv_cq *cq, struct ibv_wc *wc) {
    uint64_t until = now_ms() + (uint64_t)wait_ms;
    int got;
    while ((got = ibv_poll_cq(cq, 1, wc)) == 0 && now_ms() < until) usleep(100);
    if (got < 0) say("poll -> %d", got);
    return got > 0;
}

// An error completion has a request, a status and a queue pair, nothing else; a GRH and a source are a datagram's alone
// (ibv_poll_cq(3), InfiniBand specification 11.4.2.1).
void say_completion(const char *where, const struct ibv_wc *wc) {
    printf("%s%s completes %lu %s", qp_name(wc->qp_num), where, (unsigned long)wc->wr_id, status_name(wc->status));
    if (wc->status == IBV_WC_SUCCESS) {
        bool receive = wc->opcode & IBV_WC_RECV;
        printf(" %s", wc_opcode_name(wc->opcode));
        if (receive || wc->opcode == IBV_WC_RDMA_READ || wc->opcode == IBV_WC_COMP_SWAP ||
            wc->opcode == IBV_WC_FETCH_ADD)
            printf(" bytes %u", wc->byte_len);
        if (receive && of_datagrams(wc->qp_num))
            printf(" %sfrom %s", wc->wc_flags & IBV_WC_GRH ? "GRH, " : "", qp_name(wc->src_qp));
        if (receive && wc->wc_flags & IBV_WC_WITH_IMM) printf(" imm %x", ntohl(wc->imm_data));
        if (receive && wc->wc_flags & IBV_WC_WITH_INV) printf(" with invalidation");
    }
    putchar('\n');
}

static void completions(struct ibv_cq *cq, const char *name, const char *where, int count) {
    struct ibv_wc wc;
    for (int i = 0; i < count; i++) {
        if (take(cq, &wc)) {
            say_completion(where, &wc);
        } else {
            say("%s%s: no completion", name, where);
            return;
        }
    }
}

// Messages that nobody answers for may be on their way to another host still.
void let_it_come(void) {
    if (peer_device != &device) usleep(500000);
}

void sent(struct end *end, int count) { completions(end->send_cq, end->name, ".sq", count); }

void received(struct end *end, int count) { completions(end->recv_cq, end->name, ".rq", count); }

static bool say_rest(struct ibv_cq *cq, const char *where) {
    struct ibv_wc wc;
    bool any = false;
    while (ibv_poll_cq(cq, 1, &wc) > 0) {
        printf("more: ");
        say_completion(where, &wc);
        any = true;
    }
    return any;
}

void say_empty(struct pair *pair) {
    bool any = say_rest(pair->a.send_cq, ".sq");
    any |= say_rest(pair->a.recv_cq, ".rq");
    any |= say_rest(pair->b.send_cq, ".sq");
    any |= say_rest(pair->b.recv_cq, ".rq");
    if (!any) say("nothing more");
}

bool readable(int fd, int ms) {
    struct pollfd waiting = {fd, POLLIN, 0};
    return poll(&waiting, 1, ms) == 1;
}

static int event_order(const void *a, const void *b) { return strcmp(a, b); }

// Where an asynchronous event waits, or comes in time; NULL if none does.
static struct ibv_context *eventful(int ms) {
    struct pollfd waiting[2] = {{device.context->async_fd, POLLIN, 0}, {peer_device->context->async_fd, POLLIN, 0}};
    if (poll(waiting, 2, ms) < 1) return NULL;
    return waiting[0].revents ? device.context : peer_device->context;
}

// The order of events of different objects is not defined; that of their texts is.
void events(int count) {
    char lines[32][80];
    int got = 0;
    for (struct ibv_context *context; got < count && got < 32 && (context = eventful(wait_ms));) {
        struct ibv_async_event event;
        if (ibv_get_async_event(context, &event)) break;
        const char *of = "";
        bool qp = event.event_type <= IBV_EVENT_PATH_MIG_ERR && event.event_type != IBV_EVENT_CQ_ERR;
        if (qp || event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED) of = qp_name(event.element.qp->qp_num);
        snprintf(lines[got++], sizeof *lines, "event: %s %s", ibv_event_type_str(event.event_type), of);
        ibv_ack_async_event(&event);
    }
    qsort(lines, (size_t)got, sizeof *lines, event_order);
    for (int i = 0; i < got; i++) say("%s", lines[i]);
    if (got < count) say("no event");
}

void no_events(void) {
    bool any = false;
    while (eventful(0)) {
        events(1);
        any = true;
    }
    if (!any) say("no event");
}

void memory_fill(uint8_t *memory, size_t bytes, uint32_t seed) {
    for (size_t i = 0; i < bytes; i++) memory[i] = (uint8_t)((i * 2654435761u >> 13) + seed * 97 + i);
}

void say_memory(const char *what, const uint8_t *memory, size_t bytes) {
    uint64_t digest = 14695981039346656037u; // FNV-1a
    for (size_t i = 0; i < bytes; i++) digest = (digest ^ memory[i]) * 1099511628211u;
    say("%s holds %016lx", what, (unsigned long)digest);
}
