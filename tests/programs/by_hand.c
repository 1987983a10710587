#define _GNU_SOURCE
#include "by_hand.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

// Numbers of the messages, as they stand in crates/protocol/src/library.rs.
enum { MESSAGE_BYTES = 65536, FDS = 8, WAIT_SECONDS = 20 };
enum request {
    HELLO = 0,
    OPEN_CONTEXT = 1,
    ALLOC_PD = 6,
    CREATE_SEGMENT = 11,
    MAP_PART = 13,
    REGISTER_MR = 19,
    CREATE_CQ = 27,
    CREATE_QP = 35,
    MODIFY_QP = 37,
    DESTROY_QP = 39,
    ASK_GRANT = 42,
    OPEN_ORDERS = 43,
    CONFIRM_REVOCATION = 44,
    BORROW_SEGMENT = 51,
};
enum { FAILED = 1, HEADER_BYTES = 256 };

// Postcard: numbers are LEB128, an enum is its variant's number, then its fields. A byte or a bool is a number below
// 128.
struct message {
    uint8_t bytes[512];
    size_t length;
};

static void put(struct message *m, uint64_t value) {
    for (; value >= 128; value >>= 7) m->bytes[m->length++] = (uint8_t)(value | 128);
    m->bytes[m->length++] = (uint8_t)value;
}

static struct message begin(enum request request) {
    struct message m = {.length = 0};
    put(&m, request);
    return m;
}

struct reply {
    uint8_t bytes[MESSAGE_BYTES];
    size_t length, at;
    int fds[FDS];
    unsigned fd_count;
};

static uint64_t take(struct reply *r) {
    uint64_t value = 0;
    for (unsigned shift = 0; r->at < r->length && shift < 64; shift += 7) {
        uint8_t byte = r->bytes[r->at++];
        value |= (uint64_t)(byte & 127) << shift;
        if (!(byte & 128)) break;
    }
    return value;
}

static int take_fd(struct reply *r) {
    int fd = r->fd_count ? r->fds[--r->fd_count] : -1;
    return fd;
}

static void close_fds(struct reply *r) {
    while (r->fd_count) close(r->fds[--r->fd_count]);
}

static bool receive(int sock, struct reply *r) {
    char control[CMSG_SPACE(FDS * sizeof(int))];
    struct iovec iov = {r->bytes, sizeof r->bytes};
    struct msghdr header = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(sock, &header, MSG_CMSG_CLOEXEC);
    r->length = n > 0 ? (size_t)n : 0;
    r->at = r->fd_count = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); n > 0 && c; c = CMSG_NXTHDR(&header, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        r->fd_count = (unsigned)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(r->fds, CMSG_DATA(c), r->fd_count * sizeof(int));
    }
    return n > 0;
}

// The reply stands behind its variant then. One at a time: there is one thread here that asks.
static enum answer ask(struct by_hand *hand, const struct message *m, struct reply *r) {
    if (send(hand->sock, m->bytes, m->length, MSG_NOSIGNAL) < 0 || !receive(hand->sock, r)) return GONE;
    return take(r) == FAILED ? (enum answer)take(r) : GOOD;
}

static struct reply the_reply;

static enum answer ask_plain(struct by_hand *hand, const struct message *m) {
    enum answer answer = ask(hand, m, &the_reply);
    close_fds(&the_reply);
    return answer;
}

// The first number of the reply: what was made.
static bool ask_handle(struct by_hand *hand, const struct message *m, uint64_t *handle) {
    if (ask_plain(hand, m) != GOOD) return false;
    *handle = take(&the_reply);
    return true;
}

bool by_hand_open(struct by_hand *hand) {
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/run/freeflow/router.sock"};
    struct timeval limit = {WAIT_SECONDS, 0};
    hand->sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    setsockopt(hand->sock, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (connect(hand->sock, (struct sockaddr *)&address, sizeof address)) return false;
    struct message hello = begin(HELLO), context = begin(OPEN_CONTEXT), pd = begin(ALLOC_PD), cq = begin(CREATE_CQ);
    // Lowest and highest version, features, those required; lowest and highest layout; the program's name.
    const uint64_t hello_fields[] = {PROTOCOL_VERSION, PROTOCOL_VERSION, 0, 0, LAYOUT_VERSION, LAYOUT_VERSION, 7};
    for (size_t i = 0; i < 7; i++) put(&hello, hello_fields[i]);
    memcpy(hello.bytes + hello.length, "by-hand", 7);
    hello.length += 7;
    if (ask_plain(hand, &hello) != GOOD || !ask_handle(hand, &context, &hand->context)) return false;
    put(&pd, hand->context);
    const uint64_t cq_fields[] = {hand->context, 64, 0, 0, 0}; // cqe, no channel, cookie, no times
    for (size_t i = 0; i < 5; i++) put(&cq, cq_fields[i]);
    return ask_handle(hand, &pd, &hand->pd) && ask_handle(hand, &cq, &hand->cq);
}

bool by_hand_create_qp(struct by_hand *hand) {
    static uint64_t cookie = 1;
    struct message m = begin(CREATE_QP);
    // RC; the PD, both CQs; no SRQ, no XRC domain; capabilities; two flags; the cookie; no identifier.
    const uint64_t fields[] = {0, 1, hand->pd, 1, hand->cq, 1, hand->cq, 0, 0, 16, 16, 1, 1, 0, 1, 0, cookie++, 0};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) put(&m, fields[i]);
    if (ask(hand, &m, &the_reply) != GOOD) return false;
    hand->qp = take(&the_reply);
    hand->qpn = (uint32_t)take(&the_reply);
    int fd = take_fd(&the_reply);
    hand->rings = mmap(NULL, HEADER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return close(fd) == 0 && hand->rings != MAP_FAILED;
}

static void put_path(struct message *m, const union ibv_gid *peer) {
    put(m, peer != NULL);
    if (peer) {
        memcpy(m->bytes + m->length, peer->raw, 16);
        m->length += 16;
        const uint64_t route[] = {0, 0, 64, 0}; // flow label, index, hop limit, class
        for (size_t i = 0; i < 4; i++) put(m, route[i]);
    }
    const uint64_t rest[] = {0, 0, 0, 0, peer != NULL}; // LID, level, path bits, rate, port
    for (size_t i = 0; i < 5; i++) put(m, rest[i]);
}

static bool modify(struct by_hand *hand, enum ibv_qp_state state, unsigned mask, const union ibv_gid *peer, uint32_t qpn) {
    struct message m = begin(MODIFY_QP);
    const unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    // Handle; state, that before, MTU 1024, migration; Q_Key, two PSNs, the peer; access; five capabilities.
    const uint64_t head[] = {hand->qp, state, 0, 2, 0, 0, 0, 0, qpn, access, 0, 0, 0, 0, 0};
    for (size_t i = 0; i < sizeof head / sizeof *head; i++) put(&m, head[i]);
    put_path(&m, peer);
    put_path(&m, NULL);
    // Two P_Keys, two flags; both depths, RNR timer, port, timeout, two counts; alternate port and timeout; rate.
    const uint64_t tail[] = {0, 0, 0, 0, 16, 16, 1, 1, 14, 7, 7, 0, 0, 0, mask};
    for (size_t i = 0; i < sizeof tail / sizeof *tail; i++) put(&m, tail[i]);
    return ask_plain(hand, &m) == GOOD;
}

bool by_hand_connect_qp(struct by_hand *hand, const union ibv_gid *peer, uint32_t qpn) {
    const unsigned to_init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    const unsigned to_rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    const unsigned to_rts = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_MAX_QP_RD_ATOMIC;
    return modify(hand, IBV_QPS_INIT, to_init, NULL, 0) && modify(hand, IBV_QPS_RTR, to_rtr, peer, qpn) &&
           modify(hand, IBV_QPS_RTS, to_rts, NULL, 0);
}

enum answer by_hand_destroy_qp(struct by_hand *hand) {
    struct message m = begin(DESTROY_QP);
    put(&m, hand->qp);
    return ask_plain(hand, &m);
}

enum answer by_hand_ask_grant(struct by_hand *hand, uint32_t rkey, uint64_t address, uint32_t length, unsigned access,
                              struct granted *granted) {
    struct message m = begin(ASK_GRANT);
    const uint64_t fields[] = {hand->qp, rkey, address, length, access};
    for (size_t i = 0; i < 5; i++) put(&m, fields[i]);
    enum answer answer = ask(hand, &m, &the_reply);
    if (answer == GOOD && granted) {
        *granted = (struct granted){.address = take(&the_reply)};
        granted->length = take(&the_reply);
        granted->offset = take(&the_reply);
        granted->bytes = take(&the_reply);
        take(&the_reply); // GRANTS_REVOKED, which nobody here looks at
        granted->writable = take(&the_reply);
        granted->fd = take_fd(&the_reply);
    }
    close_fds(&the_reply);
    return answer;
}

enum answer by_hand_create_segment(struct by_hand *hand, uint64_t bytes, uint64_t *segment, int *fd) {
    struct message m = begin(CREATE_SEGMENT);
    put(&m, bytes);
    enum answer answer = ask(hand, &m, &the_reply);
    *segment = take(&the_reply);
    *fd = take_fd(&the_reply);
    return answer;
}

enum answer by_hand_map_part(struct by_hand *hand, uint64_t segment, const void *address, uint64_t bytes) {
    struct message m = begin(MAP_PART);
    const uint64_t fields[] = {segment, 0, (uintptr_t)address, bytes};
    for (size_t i = 0; i < 4; i++) put(&m, fields[i]);
    return ask_plain(hand, &m);
}

enum answer by_hand_register(struct by_hand *hand, const void *address, uint64_t bytes, unsigned access, uint32_t *rkey) {
    struct message m = begin(REGISTER_MR);
    const uint64_t fields[] = {hand->pd, (uintptr_t)address, bytes, (uintptr_t)address, access};
    for (size_t i = 0; i < 5; i++) put(&m, fields[i]);
    enum answer answer = ask_plain(hand, &m);
    take(&the_reply);
    take(&the_reply);
    *rkey = (uint32_t)take(&the_reply);
    return answer;
}

enum answer by_hand_borrow(struct by_hand *hand, const void *address, uint64_t bytes, uint64_t *segment) {
    struct message m = begin(BORROW_SEGMENT);
    put(&m, (uintptr_t)address);
    put(&m, bytes);
    enum answer answer = ask_plain(hand, &m);
    *segment = take(&the_reply);
    return answer;
}

enum answer by_hand_open_commands(struct by_hand *hand, int *pipe) {
    struct message m = begin(OPEN_ORDERS);
    enum answer answer = ask(hand, &m, &the_reply);
    *pipe = take_fd(&the_reply);
    return answer;
}

enum answer by_hand_confirm(struct by_hand *hand, uint64_t segment) {
    struct message m = begin(CONFIRM_REVOCATION);
    put(&m, segment);
    return ask_plain(hand, &m);
}
