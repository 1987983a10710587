#include "traffic.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

enum {
    KIB = 1024,
    DEPTH = 16,      // requests outstanding
    RECEIVES = 48,   // more than the other end can have outstanding
    SLOT = 16 * KIB, // of a request
    RECEIVE_SLOT = 4 * KIB,
    SOURCES = 0,
    RECEIVED = SOURCES + DEPTH * SLOT,
    CONSTANT = RECEIVED + RECEIVES * RECEIVE_SLOT,
    WRITTEN = CONSTANT + SLOT,
    READ_BACK = WRITTEN + DEPTH * SLOT,
    NOTIFIED_SLOTS = 64, // more than the other end can have reported and this one not seen
    NOTIFIED = READ_BACK + DEPTH * SLOT,
    TOTAL = NOTIFIED + NOTIFIED_SLOTS * SLOT,
    CONSTANT_SEED = 4242,
};
enum { KIND_SEND, KIND_WRITE, KIND_READ, KIND_WRITE_IMM };

// Of the WRITE that a message reports: now and then none at all.
static uint32_t notified_length(uint64_t message) { return message % 5 ? (uint32_t)(message * 2654435761u >> 7) % SLOT : 0; }

static size_t notified_place(uint64_t message) { return NOTIFIED + (size_t)(message % NOTIFIED_SLOTS) * SLOT; }

bool traffic_open(struct traffic *t, struct side *side, const struct options *options, uint64_t seed) {
    struct options o = *options;
    o.bytes = TOTAL;
    o.send_wr = DEPTH;
    o.recv_wr = RECEIVES;
    o.events = t->evented;
    t->random = seed;
    t->error = IBV_WC_SUCCESS;
    if (!endpoint_open(&t->e, &o)) return false;
    fill(t->e.memory + CONSTANT, SLOT, CONSTANT_SEED);
    if (!endpoint_to_init(&t->e)) return false;
    for (; t->receives_posted < RECEIVES; t->receives_posted++) {
        uint64_t id = t->receives_posted;
        if (post_recv(&t->e, id, RECEIVED + id * RECEIVE_SLOT, RECEIVE_SLOT)) return false;
    }
    return endpoint_connect(side, &t->e);
}

// A device that is gone may refuse: that is an error like a flushed completion.
static bool refused(struct traffic *t) {
    if (t->error == IBV_WC_SUCCESS) {
        t->error = IBV_WC_WR_FLUSH_ERR;
        t->error_ns = now_ns();
    }
    return false;
}

static bool post_next(struct traffic *t) {
    unsigned slot = t->posted % DEPTH;
    uint64_t random = random_next(&t->random);
    unsigned kind = random % 4;
    uint32_t length = 1 + (uint32_t)(random >> 32) % (kind == KIND_SEND ? RECEIVE_SLOT : SLOT);
    size_t source = SOURCES + (size_t)slot * SLOT;
    t->kinds[slot] = (uint8_t)kind;
    t->lengths[slot] = length;
    int rc;
    if (kind == KIND_READ) {
        rc = post_remote(&t->e, IBV_WR_RDMA_READ, t->posted, READ_BACK + (size_t)slot * SLOT, length, CONSTANT, 0);
    } else if (kind == KIND_WRITE) {
        fill(t->e.memory + source, length < 64 ? length : 64, t->posted);
        rc = post_remote(&t->e, IBV_WR_RDMA_WRITE, t->posted, source, length, WRITTEN + (size_t)slot * SLOT, 0);
    } else if (kind == KIND_WRITE_IMM) {
        length = notified_length(t->sent);
        fill(t->e.memory + source, length, t->sent);
        rc = post_remote(&t->e, IBV_WR_RDMA_WRITE_WITH_IMM, t->posted, source, length, notified_place(t->sent), 0);
    } else {
        fill(t->e.memory + source, length, t->sent);
        rc = post_send(&t->e, t->posted, source, length, 0);
    }
    if (rc) return refused(t);
    t->sent += kind == KIND_SEND || kind == KIND_WRITE_IMM;
    t->posted++;
    return true;
}

static bool note(struct traffic *t, const struct ibv_wc *wc) {
    if (wc->status == IBV_WC_SUCCESS) return true;
    if (t->error == IBV_WC_SUCCESS) {
        t->error = wc->status;
        t->error_ns = now_ns();
    }
    return false;
}

static bool corrupt(struct traffic *t, const char *what, uint64_t id) {
    fprintf(stderr, "  %s %lu is wrong\n", what, (unsigned long)id);
    t->corrupt = true;
    return false;
}

static bool sent(struct traffic *t, const struct ibv_wc *wc) {
    unsigned slot = t->completed % DEPTH;
    if (wc->wr_id != t->completed) return corrupt(t, "order of completion", wc->wr_id);
    t->completed++;
    if (!note(t, wc)) return false;
    const uint8_t *read_back = t->e.memory + READ_BACK + (size_t)slot * SLOT;
    if (t->kinds[slot] == KIND_READ && !holds(read_back, t->lengths[slot], CONSTANT_SEED))
        return corrupt(t, "READ", wc->wr_id);
    return true;
}

static bool received(struct traffic *t, const struct ibv_wc *wc) {
    t->receives_posted--;
    if (!note(t, wc)) return false;
    const uint8_t *slot = t->e.memory + RECEIVED + wc->wr_id * RECEIVE_SLOT;
    if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
        bool right = wc->byte_len == notified_length(t->received) && wc->wc_flags & IBV_WC_WITH_IMM;
        if (!right || !holds(t->e.memory + notified_place(t->received), wc->byte_len, t->received))
            return corrupt(t, "WRITE with immediate data", t->received);
    } else if (!holds(slot, wc->byte_len, t->received)) {
        return corrupt(t, "SEND", t->received);
    }
    t->received++;
    if (post_recv(&t->e, wc->wr_id, RECEIVED + wc->wr_id * RECEIVE_SLOT, RECEIVE_SLOT)) return refused(t);
    t->receives_posted++;
    return true;
}

bool traffic_turn(struct traffic *t, bool post) {
    struct ibv_wc wc[DEPTH];
    while (post && t->posted - t->completed < DEPTH)
        if (!post_next(t)) return false;
    bool ok = true;
    int n = ibv_poll_cq(t->e.send_cq, DEPTH, wc);
    for (int i = 0; i < n; i++) ok &= sent(t, &wc[i]);
    int m = ibv_poll_cq(t->e.recv_cq, DEPTH, wc);
    for (int i = 0; i < m; i++) ok &= received(t, &wc[i]);
    return ok && n >= 0 && m >= 0;
}

bool traffic_sleep(struct traffic *t, unsigned ms) {
    struct ibv_cq *cq;
    void *context;
    if (ibv_req_notify_cq(t->e.send_cq, 0) || ibv_req_notify_cq(t->e.recv_cq, 0)) return false;
    // Completions before the arming give no event.
    uint64_t before = t->completed + t->received;
    if (!traffic_turn(t, false)) return false;
    if (t->completed + t->received != before || !fd_readable(t->e.channel->fd, ms)) return true;
    if (ibv_get_cq_event(t->e.channel, &cq, &context)) return false;
    ibv_ack_cq_events(cq, 1);
    return true;
}

bool traffic_idle(const struct traffic *t) { return t->completed == t->posted; }

bool traffic_flush(struct traffic *t, unsigned ms) {
    uint64_t end = now_ns() + (uint64_t)ms * 1000000u;
    while (t->completed < t->posted || t->receives_posted) {
        traffic_turn(t, false);
        if (t->corrupt) return false;
        if (now_ns() > end) {
            fprintf(stderr, "  %lu requests and %u receives were never flushed\n",
                    (unsigned long)(t->posted - t->completed), t->receives_posted);
            return false;
        }
    }
    return true;
}
