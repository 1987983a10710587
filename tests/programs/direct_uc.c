// UC loses messages: one that finds no RECV, one that its RECV is too short for, a WRITE whose key is wrong. Both ends
// know each other's random choices, so they know which messages arrive, and nothing else may.
#include "cases.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BURST_MAX = 48,
    RECEIVES_MAX = 64,
    SLOT = 8192,
    LOCAL = 0,
    RECEIVED = LOCAL + (BURST_MAX + 1) * SLOT,
    WRITTEN = RECEIVED + RECEIVES_MAX * SLOT,
    TOTAL = WRITTEN + (BURST_MAX + 1) * SLOT,
    LAST_NUMBER = 0xffffff,
    TURNS = 300, // enough to have a direct ring again
    WAIT_MS = 15000,
};

struct message {
    uint32_t number, length;
    bool writes, has_wrong_key;
};

struct lossy {
    struct side *side;
    struct endpoint *e;
    uint64_t random; // the same on both ends
    uint32_t number; // of the next message
    // RECVs that are posted, by both ends' reckoning: how long each is.
    uint32_t capacity[RECEIVES_MAX];
    uint64_t posted, taken;
};

static bool sends(const struct lossy *l) { return l->side->role == ROLE_A; }

static bool lossy_open(struct lossy *l, struct side *s, struct endpoint *e) {
    struct options options = {.type = IBV_QPT_UC, .bytes = TOTAL, .send_wr = BURST_MAX + 1, .recv_wr = RECEIVES_MAX,
                              .inline_bytes = 64};
    *l = (struct lossy){.side = s, .e = e, .random = case_seed};
    return endpoint_open(e, &options) && endpoint_connect(s, e);
}

static void post_receive(struct lossy *l, uint32_t length) {
    uint64_t id = l->posted++;
    l->capacity[id % RECEIVES_MAX] = length;
    if (sends(l)) return;
    need(l->side, !post_recv(l->e, id, RECEIVED + id % RECEIVES_MAX * SLOT, length));
}

static void post_message(struct lossy *l, const struct message *m, unsigned slot) {
    struct endpoint *e = l->e;
    bool is_inline = !m->writes && m->length > 0 && m->length <= 64 && m->number % 2;
    struct ibv_sge sge = {(uintptr_t)e->memory + LOCAL + (size_t)slot * SLOT, m->length, e->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = m->number, .sg_list = &sge, .num_sge = m->length > 0, .imm_data = htonl(m->number),
                             .opcode = m->writes ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_SEND_WITH_IMM,
                             .send_flags = is_inline ? IBV_SEND_INLINE : 0};
    fill((void *)(uintptr_t)sge.addr, m->length, m->number);
    wr.wr.rdma.remote_addr = e->peer.memory + WRITTEN + (size_t)slot * SLOT;
    wr.wr.rdma.rkey = m->has_wrong_key ? e->peer.rkey ^ 0x5a5a00 : e->peer.rkey;
    need(l->side, !post_work(e, &wr));
}

static void take_sent(struct lossy *l, uint32_t number) {
    struct ibv_wc wc;
    need(l->side, poll_one(l->e->send_cq, &wc, WAIT_MS));
    need_status(l->side, wc, IBV_WC_SUCCESS);
    need(l->side, wc.wr_id == number);
}

// Whether it takes the next RECV; the others are lost.
static bool arrives(struct lossy *l, const struct message *m) {
    if (m->has_wrong_key && m->length) return false;
    if (l->taken == l->posted || (!m->writes && m->length > l->capacity[l->taken % RECEIVES_MAX])) return false;
    l->taken++;
    return true;
}

static void take_message(struct lossy *l, const struct message *m, unsigned slot) {
    struct ibv_wc wc;
    uint64_t id = l->taken - 1;
    need(l->side, poll_one(l->e->recv_cq, &wc, WAIT_MS));
    need_status(l->side, wc, IBV_WC_SUCCESS);
    if (wc.wr_id != id || ntohl(wc.imm_data) != m->number || wc.byte_len != m->length)
        fail(l->side, __FILE__, __LINE__, "message %u of %u bytes came to RECV %lu, not %u of %u bytes to %lu",
             ntohl(wc.imm_data), wc.byte_len, (unsigned long)wc.wr_id, m->number, m->length, (unsigned long)id);
    const uint8_t *at = l->e->memory + (m->writes ? WRITTEN + (size_t)slot * SLOT : RECEIVED + id % RECEIVES_MAX * SLOT);
    need(l->side, holds(at, m->length, m->number));
}

static uint32_t random_length(struct lossy *l) {
    static const uint32_t limits[] = {1, 64, 64, 64, 256, 4096, SLOT};
    uint64_t random = random_next(&l->random);
    return (uint32_t)((random >> 8) % (limits[random % 7] + 1));
}

static struct message random_message(struct lossy *l) {
    uint64_t random = random_next(&l->random);
    return (struct message){l->number++ % LAST_NUMBER, random_length(l), random % 4 == 0, random % 32 == 0};
}

// So many RECVs, then so many messages, all of them before the receiver looks.
static void burst(struct lossy *l, unsigned receives, unsigned count, uint32_t room) {
    struct message messages[BURST_MAX];
    for (unsigned i = 0; i < receives && l->posted - l->taken < RECEIVES_MAX - 1; i++)
        post_receive(l, room ? room : random_length(l));
    need(l->side, !l->side->failed && meet(l->side));
    for (unsigned i = 0; i < count; i++) messages[i] = random_message(l);
    for (unsigned i = 0; sends(l) && i < count && !l->side->failed; i++) post_message(l, &messages[i], i);
    for (unsigned i = 0; sends(l) && i < count && !l->side->failed; i++) take_sent(l, messages[i].number);
    need(l->side, !l->side->failed && meet(l->side));
    for (unsigned i = 0; i < count && !l->side->failed; i++)
        if (arrives(l, &messages[i]) && !sends(l)) take_message(l, &messages[i], i);
}

// Message by message, until the direct ring is there, and further: nothing is lost.
static void turns(struct lossy *l, unsigned count) {
    while (l->taken < l->posted && !l->side->failed) burst(l, 0, 1, 0);
    for (unsigned i = 0; i < count && !l->side->failed; i++) {
        struct message m = {l->number++ % LAST_NUMBER, random_length(l), i % 8 == 0, false};
        post_receive(l, SLOT);
        need(l->side, !l->side->failed && meet(l->side));
        if (sends(l)) post_message(l, &m, 0);
        if (sends(l) && !l->side->failed) take_sent(l, m.number);
        if (arrives(l, &m) && !sends(l) && !l->side->failed) take_message(l, &m, 0);
        need(l->side, !l->side->failed && meet(l->side));
    }
}

static void losses(struct side *s, struct endpoint *e, bool too_few, bool too_short) {
    struct lossy l;
    need(s, lossy_open(&l, s, e));
    for (unsigned round = 0; round < 4 + case_rounds / 4 && !s->failed; round++) {
        turns(&l, round % 3 ? 20 : TURNS);
        for (unsigned i = 0; i < 4 && !s->failed; i++) {
            uint64_t random = random_next(&l.random);
            unsigned count = 1 + (unsigned)(random >> 8) % BURST_MAX;
            burst(&l, too_few ? (unsigned)(random >> 16) % (count + 1) : count, count, too_short ? 0 : SLOT);
        }
    }
    if (!s->failed) turns(&l, TURNS);
}

static void uc_without_receives(struct side *s, struct endpoint *e) { losses(s, e, true, false); }
static void uc_with_short_receives(struct side *s, struct endpoint *e) { losses(s, e, false, true); }
static void uc_with_few_and_short_receives(struct side *s, struct endpoint *e) { losses(s, e, true, true); }

// The sender has its next direct ring before the receiver has emptied the last one: that follows all the same.
static void uc_next_ring(struct side *s, struct endpoint *e) {
    struct lossy l;
    need(s, lossy_open(&l, s, e));
    turns(&l, 2 * TURNS);
    struct message messages[BURST_MAX];
    for (unsigned i = 0; i < BURST_MAX; i++) {
        messages[i] = (struct message){l.number++, 64, i == 8, i == 8};
        post_receive(&l, SLOT);
    }
    need(s, !s->failed && meet(s));
    for (unsigned i = 0; sends(&l) && i < BURST_MAX && !s->failed; i++) {
        post_message(&l, &messages[i], i);
        if (!s->failed) take_sent(&l, messages[i].number);
    }
    need(s, !s->failed && meet(s));
    for (unsigned i = 0; i < BURST_MAX && !s->failed; i++)
        if (arrives(&l, &messages[i]) && !sends(&l)) take_message(&l, &messages[i], i);
    if (!s->failed) turns(&l, 3 * TURNS);
}

// The receiver posts and polls meanwhile: what arrives is in order and whole, and takes each RECV in turn.
static void uc_receives_meanwhile(struct side *s, struct endpoint *e) {
    struct lossy l;
    need(s, lossy_open(&l, s, e));
    turns(&l, TURNS);
    uint32_t count = 400 * case_rounds, next = 0;
    struct message last = {LAST_NUMBER, 0, false, false};
    bool heard = false;
    need(s, !s->failed && meet(s));
    uint64_t own = case_seed, end = now_ns() + (WAIT_MS + 1000ull * case_rounds) * 1000000;
    if (sends(&l)) {
        for (uint32_t i = 0; i < count && !s->failed; i++) {
            struct message m = {i, random_length(&l), i % 8 == 0, false};
            post_message(&l, &m, i % BURST_MAX);
            if (!s->failed) take_sent(&l, i);
            if (random_next(&own) % 64 == 0) sleep_ms(1);
        }
        // Until one is heard.
        for (char said = 0; !said && !s->failed;) {
            post_message(&l, &last, 0);
            if (!s->failed) take_sent(&l, LAST_NUMBER);
            need(s, socket_swap(s->sock, &said, &said, 1) && now_ns() < end);
        }
        return;
    }
    while (!heard && !s->failed) {
        struct ibv_wc wc;
        while (l.posted - l.taken < 1 + random_next(&own) % 16 && !s->failed)
            post_receive(&l, random_next(&own) % 256 ? SLOT : 64);
        if (random_next(&own) % 256 == 0) sleep_ms(1);
        need(s, now_ns() < end);
        int n = ibv_poll_cq(e->recv_cq, 1, &wc);
        need(s, n >= 0);
        if (n) {
            need_status(s, wc, IBV_WC_SUCCESS);
            uint32_t number = ntohl(wc.imm_data);
            need(s, wc.wr_id == l.taken++ && number >= next);
            next = number + 1;
            heard = number == LAST_NUMBER;
            if (!heard && wc.opcode == IBV_WC_RECV)
                need(s, holds(e->memory + RECEIVED + wc.wr_id % RECEIVES_MAX * SLOT, wc.byte_len, number));
            continue;
        }
        char asked;
        if (fd_readable(s->sock, 0)) {
            asked = heard;
            char nothing;
            need(s, socket_swap(s->sock, &asked, &nothing, 1));
        }
    }
    char said = 1, nothing;
    need(s, s->failed || socket_swap(s->sock, &said, &nothing, 1));
}

// ---- ends that go without each other

static bool begins_anew(struct endpoint *e) {
    return qp_modify_state(e->qp, IBV_QPS_RESET) && endpoint_to_init(e) && endpoint_to_rtr(e) && endpoint_to_rts(e);
}

// All that the sender had sent is received, and comes before the rest.
static void uc_sender_begins_anew(struct side *s, struct endpoint *e) {
    struct lossy l;
    need(s, lossy_open(&l, s, e));
    for (unsigned round = 0; round < 4 && !s->failed; round++) {
        turns(&l, TURNS);
        struct message messages[BURST_MAX];
        for (unsigned i = 0; i < BURST_MAX; i++) post_receive(&l, SLOT);
        need(s, !s->failed && meet(s));
        for (unsigned i = 0; i < BURST_MAX; i++) {
            messages[i] = random_message(&l);
            messages[i].has_wrong_key = false;
        }
        for (unsigned i = 0; sends(&l) && i < BURST_MAX && !s->failed; i++) {
            if (i == BURST_MAX / 2) need(s, begins_anew(e));
            post_message(&l, &messages[i], i);
            if (!s->failed) take_sent(&l, messages[i].number);
        }
        need(s, !s->failed && meet(s));
        for (unsigned i = 0; i < BURST_MAX && !s->failed; i++)
            if (arrives(&l, &messages[i]) && !sends(&l)) take_message(&l, &messages[i], i);
    }
    if (!s->failed) turns(&l, TURNS);
}

// Messages to one that is not there are lost; it begins with its first RECV again.
static void uc_receiver_begins_anew(struct side *s, struct endpoint *e) {
    struct lossy l;
    need(s, lossy_open(&l, s, e));
    for (unsigned round = 0; round < 4 && !s->failed; round++) {
        turns(&l, TURNS + 40 * round);
        for (unsigned i = 0; i < 8; i++) post_receive(&l, SLOT);
        need(s, !s->failed && (sends(&l) || qp_modify_state(e->qp, IBV_QPS_RESET)) && meet(s));
        struct message lost = {l.number++, 64, false, false};
        for (unsigned i = 0; sends(&l) && i < 24 && !s->failed; i++) {
            post_message(&l, &lost, 0);
            if (!s->failed) take_sent(&l, lost.number);
        }
        need(s, !s->failed && meet(s) && (sends(&l) || begins_anew(e)) && meet(s));
        l.taken = l.posted;
    }
    if (!s->failed) turns(&l, TURNS);
}

// A request that fails ends the send queue alone (SQE); what was sent before arrives, and it goes on after that.
static void uc_sender_fails(struct side *s, struct endpoint *e) {
    struct lossy l;
    struct ibv_wc wc;
    need(s, lossy_open(&l, s, e));
    for (unsigned round = 0; round < 4 && !s->failed; round++) {
        turns(&l, TURNS);
        burst(&l, 20, 20, SLOT);
        if (sends(&l) && !s->failed) {
            struct ibv_sge sge = {(uintptr_t)e->memory, 64, e->mr->lkey ^ 0x5a5a00};
            struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND};
            need(s, !post_work(e, &wr) && poll_one(e->send_cq, &wc, WAIT_MS));
            need_status(s, wc, IBV_WC_LOC_PROT_ERR);
            for (unsigned i = 0; i < 4; i++) {
                need(s, !post_send(e, i, 0, 64, 0) && poll_one(e->send_cq, &wc, WAIT_MS));
                need_status(s, wc, IBV_WC_WR_FLUSH_ERR);
            }
            need(s, qp_state(e->qp) == IBV_QPS_SQE && qp_modify_state(e->qp, IBV_QPS_RTS));
        }
        need(s, !s->failed && meet(s));
    }
    if (!s->failed) turns(&l, TURNS);
}

const struct test_case uc_cases[] = {
    {"uc_without_receives", uc_without_receives},
    {"uc_with_short_receives", uc_with_short_receives},
    {"uc_with_few_and_short_receives", uc_with_few_and_short_receives},
    {"uc_next_ring", uc_next_ring},
    {"uc_receives_meanwhile", uc_receives_meanwhile},
    {"uc_sender_begins_anew", uc_sender_begins_anew},
    {"uc_receiver_begins_anew", uc_receiver_begins_anew},
    {"uc_sender_fails", uc_sender_fails},
    {NULL, NULL},
};
