#define _GNU_SOURCE
#include "harness.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void sleep_ms(unsigned ms) {
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

void fail(struct side *side, const char *file, int line, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    const char *base = strrchr(file, '/');
    fprintf(stderr, "  %s, side %c, %s:%d: %s (errno %s)\n", side->test, side->role == ROLE_A ? 'A' : 'B',
            base ? base + 1 : file, line, text, strerror(errno));
    side->failed = true;
}

static bool complain(const char *what) {
    fprintf(stderr, "  %s: %s\n", what, strerror(errno));
    return false;
}

// ---- sockets

static void limit_waiting(int sock) {
    struct timeval limit = {20, 0};
    int one = 1;
    setsockopt(sock, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(sock, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

int socket_listen(int port) {
    bool six = gid_index() == IPV6_GID_INDEX;
    int sock = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct sockaddr_in6 address6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    int rc = six ? bind(sock, (struct sockaddr *)&address6, sizeof address6) : bind(sock, (struct sockaddr *)&address, sizeof address);
    if (rc || listen(sock, 64)) {
        complain("listen");
        exit(2);
    }
    return sock;
}

int socket_accept(int listener) {
    struct pollfd waiting = {listener, POLLIN, 0};
    if (poll(&waiting, 1, 20000) != 1) return -1;
    int sock = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (sock >= 0) limit_waiting(sock);
    return sock;
}

int socket_connect(const char *host, int port) {
    bool six = strchr(host, ':');
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct sockaddr_in6 address6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    if (inet_pton(six ? AF_INET6 : AF_INET, host, six ? (void *)&address6.sin6_addr : &address.sin_addr) != 1) return -1;
    const struct sockaddr *to = six ? (struct sockaddr *)&address6 : (struct sockaddr *)&address;
    for (uint64_t end = now_ns() + 20000000000u; now_ns() < end; sleep_ms(5)) {
        int sock = socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (!connect(sock, to, six ? sizeof address6 : sizeof address)) {
            limit_waiting(sock);
            return sock;
        }
        close(sock);
    }
    return -1;
}

bool socket_swap(int sock, const void *mine, void *theirs, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = send(sock, (const char *)mine + done, bytes - done, MSG_NOSIGNAL);
        if (n <= 0) return false;
        done += (size_t)n;
    }
    for (size_t done = 0; done < bytes;) {
        ssize_t n = recv(sock, (char *)theirs + done, bytes - done, 0);
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

bool meet(struct side *side) {
    char mine = 'm', theirs = 0;
    return socket_swap(side->sock, &mine, &theirs, 1) && theirs == 'm';
}

// ---- endpoints

static void *shared_malloc(size_t bytes) {
    void *(*allocate)(size_t) = (void *(*)(size_t))dlsym(RTLD_DEFAULT, "ibv_malloc");
    return allocate ? allocate(bytes) : NULL;
}

static void shared_free(void *memory) {
    void (*release)(void *) = (void (*)(void *))dlsym(RTLD_DEFAULT, "ibv_free");
    if (release) release(memory);
}

struct ibv_context *open_first_device(void) {
    int count = 0;
    struct ibv_device **list = ibv_get_device_list(&count);
    struct ibv_context *context = list && count ? ibv_open_device(list[0]) : NULL;
    if (list) ibv_free_device_list(list);
    return context;
}

static uint32_t or(uint32_t value, uint32_t otherwise) { return value ? value : otherwise; }

static uint8_t attribute(uint8_t value, uint8_t otherwise) { return value == NEVER ? 0 : value ? value : otherwise; }

static int access_of(int value) {
    const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    return value == NEVER_ACCESS ? IBV_ACCESS_LOCAL_WRITE : value ? value : all;
}

static bool take_memory(struct endpoint *e) {
    const struct options *o = &e->options;
    e->bytes = o->bytes ? o->bytes : 65536;
    e->shared_memory = o->shared_memory;
    if (o->memory) {
        e->memory = o->memory;
        return true;
    }
    e->owns_memory = true;
    if (o->shared_memory) return (e->memory = shared_malloc(e->bytes)) != NULL;
    if (posix_memalign((void **)&e->memory, 4096, e->bytes)) return false;
    memset(e->memory, 0, e->bytes);
    return true;
}

bool endpoint_open(struct endpoint *e, const struct options *options) {
    e->options = *options;
    const struct options *o = &e->options;
    int cqe = o->cqe ? o->cqe : 256;
    if (!(e->context = open_first_device())) return complain("open device");
    if (!(e->pd = ibv_alloc_pd(e->context))) return complain("alloc pd");
    if (!take_memory(e)) return complain("memory");
    if (!(e->mr = ibv_reg_mr(e->pd, e->memory, e->bytes, (unsigned)access_of(o->mr_access)))) return complain("reg mr");
    if (o->events && !(e->channel = ibv_create_comp_channel(e->context))) return complain("create channel");
    if (!(e->send_cq = ibv_create_cq(e->context, cqe, e, e->channel, 0))) return complain("create cq");
    if (!(e->recv_cq = ibv_create_cq(e->context, cqe, e, e->channel, 0))) return complain("create cq");
    if (o->srq) {
        struct ibv_srq_init_attr srq = {.attr = {.max_wr = or(o->recv_wr, 64), .max_sge = or(o->recv_sge, 1)}};
        if (!(e->srq = ibv_create_srq(e->pd, &srq))) return complain("create srq");
    }
    struct ibv_qp_init_attr init = {
        .send_cq = e->send_cq,
        .recv_cq = e->recv_cq,
        .srq = e->srq,
        .cap = {.max_send_wr = or(o->send_wr, 64),
                .max_recv_wr = o->srq ? 0 : or(o->recv_wr, 64),
                .max_send_sge = or(o->send_sge, 1),
                .max_recv_sge = o->srq ? 0 : or(o->recv_sge, 1),
                .max_inline_data = o->inline_bytes},
        .qp_type = o->type ? o->type : IBV_QPT_RC,
        .sq_sig_all = !o->unsignaled,
    };
    if (!(e->qp = ibv_create_qp(e->pd, &init))) return complain("create qp");
    e->mine = (struct address){.qpn = e->qp->qp_num,
                               .psn = e->qp->qp_num * 2654435761u >> 8,
                               .rkey = e->mr->rkey,
                               .qkey = QKEY,
                               .memory = (uintptr_t)e->memory,
                               .bytes = e->bytes};
    return !ibv_query_gid(e->context, 1, gid_index(), &e->mine.gid) || complain("query gid");
}

int gid_index(void) {
    const char *index = getenv("FREEFLOW_TEST_GID_INDEX");
    return index ? atoi(index) : 0;
}

union ibv_gid gid_of(const char *ip) {
    union ibv_gid gid = {.raw = {[10] = 0xff, [11] = 0xff}};
    bool good = strchr(ip, ':') ? inet_pton(AF_INET6, ip, gid.raw) == 1 : inet_pton(AF_INET, ip, gid.raw + 12) == 1;
    if (!good) exit(2);
    return gid;
}

static bool modify(struct endpoint *e, struct ibv_qp_attr *attr, int mask, const char *what) {
    int rc = ibv_modify_qp(e->qp, attr, mask);
    if (!rc) return true;
    errno = rc > 0 ? rc : errno;
    return complain(what);
}

bool endpoint_to_init(struct endpoint *e) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .pkey_index = 0, .qkey = QKEY};
    attr.qp_access_flags = (unsigned)access_of(e->options.qp_access);
    int mask = IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX;
    mask |= e->qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
    if (e->qp->qp_type == IBV_QPT_UC) attr.qp_access_flags &= IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    return modify(e, &attr, mask, "to INIT");
}

static struct ibv_ah_attr path_to(const struct endpoint *e) {
    return (struct ibv_ah_attr){
        .is_global = 1, .port_num = 1, .grh = {.dgid = e->peer.gid, .sgid_index = (uint8_t)gid_index(), .hop_limit = 64}};
}

bool endpoint_to_rtr(struct endpoint *e) {
    const struct options *o = &e->options;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
    int mask = IBV_QP_STATE;
    if (e->qp->qp_type != IBV_QPT_UD) {
        attr.path_mtu = IBV_MTU_4096;
        attr.dest_qp_num = e->peer.qpn;
        attr.rq_psn = e->peer.psn & 0xffffff;
        attr.ah_attr = path_to(e);
        mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    }
    if (e->qp->qp_type == IBV_QPT_RC) {
        attr.max_dest_rd_atomic = 16;
        attr.min_rnr_timer = attribute(o->rnr_timer, 1);
        mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    }
    return modify(e, &attr, mask, "to RTR");
}

bool endpoint_to_rts(struct endpoint *e) {
    const struct options *o = &e->options;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .sq_psn = e->mine.psn & 0xffffff};
    int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    if (e->qp->qp_type == IBV_QPT_RC) {
        attr.timeout = attribute(o->timeout, 14);
        attr.retry_cnt = attribute(o->retry, 7);
        attr.rnr_retry = attribute(o->rnr_retry, 7);
        attr.max_rd_atomic = 16;
        mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    }
    if (!modify(e, &attr, mask, "to RTS")) return false;
    if (e->qp->qp_type != IBV_QPT_UD) return true;
    struct ibv_ah_attr path = path_to(e);
    return (e->ah = ibv_create_ah(e->pd, &path)) != NULL || complain("create ah");
}

bool endpoint_connect(struct side *side, struct endpoint *e) {
    return endpoint_to_init(e) && socket_swap(side->sock, &e->mine, &e->peer, sizeof e->mine) && endpoint_to_rtr(e) &&
           endpoint_to_rts(e) && meet(side);
}

static bool destroyed(int rc, const char *what) {
    if (!rc) return true;
    errno = rc > 0 ? rc : errno;
    return complain(what);
}

bool endpoint_close(struct endpoint *e) {
    bool ok = true;
    if (e->channel && e->unacked_events) ibv_ack_cq_events(e->recv_cq, e->unacked_events);
    if (e->ah) ok &= destroyed(ibv_destroy_ah(e->ah), "destroy ah");
    if (e->qp) ok &= destroyed(ibv_destroy_qp(e->qp), "destroy qp");
    if (e->srq) ok &= destroyed(ibv_destroy_srq(e->srq), "destroy srq");
    if (e->send_cq) ok &= destroyed(ibv_destroy_cq(e->send_cq), "destroy cq");
    if (e->recv_cq) ok &= destroyed(ibv_destroy_cq(e->recv_cq), "destroy cq");
    if (e->channel) ok &= destroyed(ibv_destroy_comp_channel(e->channel), "destroy channel");
    if (e->mr) ok &= destroyed(ibv_dereg_mr(e->mr), "dereg mr");
    if (e->owns_memory) e->shared_memory ? shared_free(e->memory) : free(e->memory);
    if (e->pd) ok &= destroyed(ibv_dealloc_pd(e->pd), "dealloc pd");
    if (e->context) ok &= destroyed(ibv_close_device(e->context), "close device");
    memset(e, 0, sizeof *e);
    return ok;
}

enum ibv_qp_state qp_state(struct ibv_qp *qp) {
    struct ibv_qp_attr attr = {0};
    struct ibv_qp_init_attr init;
    if (ibv_query_qp(qp, &attr, IBV_QP_STATE, &init)) return IBV_QPS_UNKNOWN;
    return attr.qp_state;
}

bool qp_modify_state(struct ibv_qp *qp, enum ibv_qp_state state) {
    struct ibv_qp_attr attr = {.qp_state = state};
    return !ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

// ---- work

int post_recv_key(struct endpoint *e, uint64_t wr_id, size_t offset, uint32_t length, uint32_t lkey) {
    struct ibv_sge sge = {(uintptr_t)e->memory + offset, length, lkey};
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;
    return e->srq ? ibv_post_srq_recv(e->srq, &wr, &bad) : ibv_post_recv(e->qp, &wr, &bad);
}

int post_recv(struct endpoint *e, uint64_t wr_id, size_t offset, uint32_t length) {
    return post_recv_key(e, wr_id, offset, length, e->mr->lkey);
}

int post_work(struct endpoint *e, struct ibv_send_wr *wr) {
    struct ibv_send_wr *bad;
    if (e->qp->qp_type == IBV_QPT_UD) {
        wr->wr.ud.ah = e->ah;
        wr->wr.ud.remote_qpn = e->peer.qpn;
        wr->wr.ud.remote_qkey = e->peer.qkey;
    }
    return ibv_post_send(e->qp, wr, &bad);
}

int post_send(struct endpoint *e, uint64_t wr_id, size_t offset, uint32_t length, unsigned flags) {
    struct ibv_sge sge = {(uintptr_t)e->memory + offset, length, e->mr->lkey};
    struct ibv_send_wr wr = {
        .wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = flags};
    return post_work(e, &wr);
}

int post_remote(struct endpoint *e, enum ibv_wr_opcode opcode, uint64_t wr_id, size_t offset, uint32_t length,
                uint64_t remote, unsigned flags) {
    struct ibv_sge sge = {(uintptr_t)e->memory + offset, length, e->mr->lkey};
    struct ibv_send_wr wr = {
        .wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = flags};
    wr.wr.rdma.remote_addr = e->peer.memory + remote;
    wr.wr.rdma.rkey = e->peer.rkey;
    return post_work(e, &wr);
}

bool poll_one(struct ibv_cq *cq, struct ibv_wc *wc, unsigned ms) {
    uint64_t end = now_ns() + (uint64_t)ms * 1000000u;
    for (unsigned turn = 0;; turn++) {
        int n = ibv_poll_cq(cq, 1, wc);
        if (n) return n == 1;
        if (turn % 64 == 63 && now_ns() > end) {
            errno = ETIMEDOUT;
            return false;
        }
    }
}

bool fd_readable(int fd, unsigned ms) {
    struct pollfd waiting = {fd, POLLIN, 0};
    return poll(&waiting, 1, (int)ms) == 1 && (waiting.revents & POLLIN);
}

bool wait_async(struct ibv_context *context, enum ibv_event_type kind, unsigned ms) {
    uint64_t end = now_ns() + (uint64_t)ms * 1000000u;
    for (uint64_t now; (now = now_ns()) < end;) {
        struct ibv_async_event event;
        if (!fd_readable(context->async_fd, (unsigned)((end - now) / 1000000u + 1))) break;
        if (ibv_get_async_event(context, &event)) return complain("get async event");
        ibv_ack_async_event(&event);
        if (event.event_type == kind) return true;
    }
    errno = ETIMEDOUT;
    return false;
}

// ---- bytes

uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t word_at(size_t i, uint64_t seed) { return (i + 1) * 0x9e3779b97f4a7c15u ^ (seed + 1) * 0xbf58476d1ce4e5b9u; }

void fill(void *memory, size_t bytes, uint64_t seed) {
    uint8_t *p = memory;
    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t word = word_at(i, seed);
        memcpy(p + 8 * i, &word, 8);
    }
    uint64_t last = word_at(bytes / 8, seed);
    memcpy(p + bytes / 8 * 8, &last, bytes % 8);
}

bool holds(const void *memory, size_t bytes, uint64_t seed) {
    const uint8_t *p = memory;
    for (size_t i = 0; i * 8 < bytes; i++) {
        uint64_t word = word_at(i, seed);
        size_t count = bytes - 8 * i < 8 ? bytes - 8 * i : 8;
        if (memcmp(p + 8 * i, &word, count)) {
            fprintf(stderr, "  word %zu of %zu bytes is wrong\n", i, bytes);
            return false;
        }
    }
    return true;
}
