// Datagrams past the router: rings of several senders lead to one queue of RECVs, which the router fills, too. A
// datagram by another address handle goes through the router, so both ways are taken at random.
#include "direct_ud.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

bool sends(const struct lane *l) { return l->side->role == ROLE_A; }

struct ibv_ah_attr path_to_peer(const struct lane *l) {
    return (struct ibv_ah_attr){.is_global = 1, .port_num = 1,
                                .grh = {.dgid = l->e->peer.gid, .sgid_index = (uint8_t)gid_index(), .hop_limit = 64}};
}

static bool begin_qp(struct ibv_qp *qp, uint32_t qkey) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = qkey};
    return !ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_QKEY) &&
           qp_modify_state(qp, IBV_QPS_RTR) &&
           !ibv_modify_qp(qp, &(struct ibv_qp_attr){.qp_state = IBV_QPS_RTS}, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

static struct ibv_qp *another_qp(struct lane *l) {
    struct ibv_qp_init_attr init = {.send_cq = l->e->send_cq, .recv_cq = l->e->send_cq, .qp_type = IBV_QPT_UD,
                                    .cap = {WINDOW + 1, 1, 2, 1, 64}, .sq_sig_all = 1};
    struct ibv_qp *qp = ibv_create_qp(l->e->pd, &init);
    return qp && begin_qp(qp, QKEY) ? qp : NULL;
}

bool lane_open(struct lane *l, struct side *s, struct endpoint *e, unsigned sources, bool events) {
    struct options options = {.type = IBV_QPT_UD, .bytes = TOTAL, .send_wr = WINDOW + 1, .recv_wr = RECEIVES, .send_sge = 2,
                              .inline_bytes = 64, .events = events};
    *l = (struct lane){.side = s, .e = e, .random = case_seed, .source_count = sources, .qkey = QKEY};
    if (!endpoint_open(e, &options) || !endpoint_connect(s, e)) return false;
    uint32_t mine[SENDERS] = {0}, theirs[SENDERS];
    for (unsigned i = 0; sends(l) && i < sources; i++) {
        struct ibv_qp *qp = l->sources[i].qp = i ? another_qp(l) : e->qp;
        if (!qp) return false;
        mine[i] = qp->qp_num;
    }
    if (!socket_swap(s->sock, mine, theirs, sizeof mine)) return false;
    for (unsigned i = 0; i < sources; i++) l->sources[i].qpn = sends(l) ? mine[i] : theirs[i];
    struct ibv_ah_attr path = path_to_peer(l);
    return (l->other = ibv_create_ah(e->pd, &path)) != NULL;
}

void lane_close(struct lane *l) {
    for (unsigned i = 1; i < l->source_count; i++)
        if (l->sources[i].qp) need(l->side, !ibv_destroy_qp(l->sources[i].qp));
    if (l->other) need(l->side, !ibv_destroy_ah(l->other));
}

void post_receive(struct lane *l, uint32_t length) {
    uint64_t id = l->posted++;
    l->capacity[id % RECEIVES] = length;
    if (sends(l)) return;
    need(l->side, !post_recv(l->e, id, RECEIVED + id % RECEIVES * SLOT, length));
}

static void have_receives(struct lane *l, unsigned count) {
    while (l->posted - l->taken < count && !l->side->failed) post_receive(l, SLOT);
}

void post_datagram(struct lane *l, const struct datagram *d) {
    struct endpoint *e = l->e;
    uint8_t *at = e->memory + (size_t)(l->slot++ % (WINDOW + 1)) * SLOT;
    uint32_t first = d->is_split ? d->length / 3 : d->length;
    struct ibv_sge sges[2] = {{(uintptr_t)at, first, e->mr->lkey}, {(uintptr_t)at + first, d->length - first, e->mr->lkey}};
    struct ibv_send_wr wr = {.wr_id = d->number, .sg_list = sges, .num_sge = d->is_split ? 2 : 1,
                             .imm_data = htonl(d->number), .send_flags = d->is_inline ? IBV_SEND_INLINE : 0,
                             .opcode = d->has_immediate ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND}, *bad;
    wr.wr.ud.ah = d->by_other ? l->other : e->ah;
    wr.wr.ud.remote_qpn = e->peer.qpn;
    wr.wr.ud.remote_qkey = l->qkey;
    fill(at, d->length, d->number * SENDERS + d->source);
    need(l->side, !ibv_post_send(l->sources[d->source].qp, &wr, &bad));
}

void take_sent(struct lane *l, unsigned count) {
    struct ibv_wc wc;
    for (unsigned i = 0; i < count; i++) {
        need(l->side, poll_one(l->e->send_cq, &wc, WAIT_MS));
        need_status(l->side, wc, IBV_WC_SUCCESS);
    }
}

static struct datagram random_datagram(struct lane *l, unsigned others) {
    static const uint32_t limits[] = {0, 64, 64, 64, 256, 1024, MTU};
    uint64_t random = random_next(&l->random);
    struct datagram d = {.source = (unsigned)(random >> 40) % l->source_count};
    d.length = (uint32_t)((random >> 8) % (limits[random % 7] + 1));
    d.has_immediate = random >> 32 & 1;
    d.is_inline = d.length > 0 && d.length <= 64 && random >> 33 & 1;
    d.is_split = !d.is_inline && d.length > 3 && random >> 34 & 1;
    d.by_other = others && (random >> 50) % others == 0;
    d.number = l->sources[d.source].next++;
    return d;
}

static unsigned source_of(const struct lane *l, uint32_t qpn) {
    for (unsigned i = 0; i < l->source_count; i++)
        if (l->sources[i].qpn == qpn) return i;
    return SENDERS;
}

// The GRH is that of a datagram of so many bytes, by IPv4 and without traffic class.
static bool is_header(const struct lane *l, const uint8_t *grh, uint32_t length, bool has_immediate) {
    if (gid_index() == IPV6_GID_INDEX) return grh[0] >> 4 == 6;
    uint32_t total = 20 + 32 + (has_immediate ? 4 : 0) + (length + 3) / 4 * 4, sum = 0;
    for (unsigned i = 20; i < 40; i += 2) sum += grh[i] << 8 | grh[i + 1];
    static const uint8_t nothing[20];
    return !memcmp(grh, nothing, 20) && grh[20] == 0x45 && (uint32_t)(grh[22] << 8 | grh[23]) == total && grh[28] == 64 &&
           grh[29] == 17 && !memcmp(grh + 32, l->e->peer.gid.raw + 12, 4) && !memcmp(grh + 36, l->e->mine.gid.raw + 12, 4) &&
           (sum & 0xffff) + (sum >> 16) == 0xffff;
}

// The next completion is of this datagram, in the next RECV.
static void check_datagram(struct lane *l, const struct ibv_wc *wc, const struct datagram *d) {
    uint64_t id = l->taken - 1;
    const uint8_t *at = l->e->memory + RECEIVED + id % RECEIVES * SLOT;
    need_status(l->side, *wc, IBV_WC_SUCCESS);
    if (wc->wr_id != id || wc->src_qp != l->sources[d->source].qpn || wc->byte_len != d->length + GRH_BYTES)
        fail(l->side, __FILE__, __LINE__, "%u bytes of %06x in RECV %lu, not %u of %06x in %lu", wc->byte_len, wc->src_qp,
             (unsigned long)wc->wr_id, d->length + GRH_BYTES, l->sources[d->source].qpn, (unsigned long)id);
    need(l->side, !l->side->failed && wc->opcode == IBV_WC_RECV && wc->wc_flags & IBV_WC_GRH && wc->qp_num == l->e->qp->qp_num);
    need(l->side, !(wc->wc_flags & IBV_WC_WITH_IMM) == !d->has_immediate && wc->pkey_index == 0);
    need(l->side, !d->has_immediate || ntohl(wc->imm_data) == d->number);
    need(l->side, is_header(l, at, d->length, d->has_immediate));
    need(l->side, holds(at + GRH_BYTES, d->length, d->number * SENDERS + d->source));
}

static void take_datagram(struct lane *l, const struct datagram *d) {
    struct ibv_wc wc;
    need(l->side, poll_one(l->e->recv_cq, &wc, WAIT_MS));
    l->taken++;
    check_datagram(l, &wc, d);
}

// Datagrams of each sender arrive in order; of different ones in any order.
static void take_burst(struct lane *l, const struct datagram *all, unsigned count) {
    bool arrived[WINDOW] = {false};
    for (unsigned n = 0; n < count && !l->side->failed; n++) {
        struct ibv_wc wc;
        need(l->side, poll_one(l->e->recv_cq, &wc, WAIT_MS));
        l->taken++;
        unsigned source = source_of(l, wc.src_qp), i = 0;
        while (i < count && (arrived[i] || all[i].source != source)) i++;
        need(l->side, i < count);
        arrived[i] = true;
        check_datagram(l, &wc, &all[i]);
    }
}

// So many, while the receiver does not look; then it takes them.
static void burst(struct lane *l, unsigned count, unsigned others) {
    struct datagram all[WINDOW];
    have_receives(l, count);
    need(l->side, !l->side->failed && meet(l->side));
    for (unsigned i = 0; i < count; i++) all[i] = random_datagram(l, others);
    for (unsigned i = 0; sends(l) && i < count && !l->side->failed; i++) post_datagram(l, &all[i]);
    if (sends(l) && !l->side->failed) take_sent(l, count);
    need(l->side, !l->side->failed && meet(l->side));
    if (!sends(l)) take_burst(l, all, count);
    if (sends(l)) l->taken += count;
    need(l->side, !l->side->failed && meet(l->side));
}

// One after the other from each, until there are rings.
void turns(struct lane *l, unsigned count) {
    for (unsigned i = 0; i < count * l->source_count && !l->side->failed; i++) {
        struct datagram d = random_datagram(l, 0);
        d.source = i % l->source_count;
        l->sources[d.source].next += 1;
        d.number = l->sources[d.source].next - 1;
        have_receives(l, 8);
        need(l->side, !l->side->failed && ((i % 4 && l->source_count == 1) || meet(l->side)));
        if (sends(l)) {
            post_datagram(l, &d);
            if (!l->side->failed) take_sent(l, 1);
            l->taken++;
        } else {
            take_datagram(l, &d);
        }
    }
    need(l->side, !l->side->failed && meet(l->side));
}

static void ud_one_sender(struct side *s, struct endpoint *e) {
    struct lane l;
    need(s, lane_open(&l, s, e, 1, false));
    turns(&l, TURNS);
    for (unsigned i = 0; i < 8 * case_rounds && !s->failed; i++)
        burst(&l, 1 + (unsigned)random_next(&l.random) % BURST_MAX, i % 3 ? 8 : 0);
    lane_close(&l);
}

static void ud_several_senders(struct side *s, struct endpoint *e) {
    struct lane l;
    need(s, lane_open(&l, s, e, SENDERS, false));
    turns(&l, TURNS);
    for (unsigned i = 0; i < 8 * case_rounds && !s->failed; i++)
        burst(&l, 1 + (unsigned)random_next(&l.random) % WINDOW, i % 3 ? 8 : 0);
    lane_close(&l);
}

// The bytes before the payload are the same by either way, whatever the handle says.
static void ud_headers(struct side *s, struct endpoint *e) {
    static const struct { uint8_t traffic_class, hops; uint32_t flow; } routes[] = {{0, 0, 0}, {0x20, 3, 0x12345}, {0xff, 255, 0xfffff}};
    static const uint32_t lengths[] = {0, 1, 3, 4, 5, 64, 103, 104, 105, 1023, 4095, 4096};
    enum { LENGTHS = sizeof lengths / sizeof *lengths };
    struct lane l;
    need(s, lane_open(&l, s, e, 1, false));
    for (unsigned r = 0; r < sizeof routes / sizeof *routes && !s->failed; r++) {
        uint8_t routed[LENGTHS][2][GRH_BYTES];
        struct ibv_ah_attr path = path_to_peer(&l);
        path.grh.traffic_class = routes[r].traffic_class;
        path.grh.hop_limit = routes[r].hops;
        path.grh.flow_label = routes[r].flow;
        struct ibv_ah *own = e->ah;
        need(s, (e->ah = ibv_create_ah(e->pd, &path)) != NULL);
        // The first are routed, the last are not.
        for (unsigned i = 0; i < 3 * TURNS && !s->failed; i++) {
            unsigned which = i % (2 * LENGTHS);
            struct datagram d = {.number = l.sources[0].next++, .length = lengths[which / 2], .has_immediate = which % 2};
            if (l.posted - l.taken < 8) post_receive(&l, SLOT);
            need(s, !s->failed && meet(s));
            if (sends(&l)) {
                post_datagram(&l, &d);
                if (!s->failed) take_sent(&l, 1);
                l.taken++;
                continue;
            }
            struct ibv_wc wc;
            uint8_t *at = e->memory + RECEIVED + l.taken % RECEIVES * SLOT, *kept = routed[which / 2][which % 2];
            need(s, poll_one(e->recv_cq, &wc, WAIT_MS));
            need_status(s, wc, IBV_WC_SUCCESS);
            need(s, wc.wr_id == l.taken++ && wc.byte_len == d.length + GRH_BYTES);
            if (i < 2 * LENGTHS) memcpy(kept, at, GRH_BYTES);
            need(s, !memcmp(kept, at, GRH_BYTES));
            need(s, holds(at + GRH_BYTES, d.length, d.number * SENDERS));
        }
        need(s, !ibv_destroy_ah(e->ah));
        e->ah = own;
    }
    lane_close(&l);
}

// A datagram that the next RECV is too short for is lost, and the RECV is the next one's.
static void ud_short_receives(struct side *s, struct endpoint *e) {
    struct lane l;
    need(s, lane_open(&l, s, e, 1, false));
    turns(&l, TURNS);
    for (unsigned round = 0; round < 4 * case_rounds && !s->failed; round++) {
        struct datagram all[BURST_MAX];
        unsigned count = 1 + (unsigned)random_next(&l.random) % BURST_MAX;
        while (l.posted - l.taken < count && !s->failed) {
            uint64_t random = random_next(&l.random);
            post_receive(&l, random % 4 ? SLOT : GRH_BYTES + 64 + (uint32_t)(random >> 8) % 512);
        }
        need(s, !s->failed && meet(s));
        for (unsigned i = 0; i < count; i++) all[i] = random_datagram(&l, 0);
        for (unsigned i = 0; sends(&l) && i < count && !s->failed; i++) post_datagram(&l, &all[i]);
        if (sends(&l) && !s->failed) take_sent(&l, count);
        need(s, !s->failed && meet(s));
        for (unsigned i = 0; i < count && !s->failed; i++) {
            if (all[i].length + GRH_BYTES > l.capacity[l.taken % RECEIVES]) continue;
            sends(&l) ? (void)l.taken++ : take_datagram(&l, &all[i]);
        }
        need(s, !s->failed && meet(s));
    }
    lane_close(&l);
}

// ---- losses: each datagram names itself

struct datagram numbered(struct lane *l) {
    return (struct datagram){.number = l->sources[0].next++, .length = 64, .has_immediate = true};
}

void send_numbered(struct lane *l, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        struct datagram d = numbered(l);
        if (sends(l) && !l->side->failed) post_datagram(l, &d);
        if (sends(l) && !l->side->failed) take_sent(l, 1);
    }
}

// Takes whatever has come: in order, each once, in the next RECVs. How many.
unsigned take_some(struct lane *l, uint32_t from, unsigned ms) {
    struct ibv_wc wc;
    unsigned count = 0;
    while (!l->side->failed && poll_one(l->e->recv_cq, &wc, ms)) {
        uint32_t number = ntohl(wc.imm_data);
        if (wc.status || wc.wr_id != l->taken || number < from || number >= l->sources[0].next)
            fail(l->side, __FILE__, __LINE__, "%u in RECV %lu (%s), not from %u on in %lu", number, (unsigned long)wc.wr_id,
                 ibv_wc_status_str(wc.status), from, (unsigned long)l->taken);
        if (!holds(l->e->memory + RECEIVED + wc.wr_id % RECEIVES * SLOT + GRH_BYTES, 64, number * SENDERS))
            fail(l->side, __FILE__, __LINE__, "%u is not whole", number);
        from = number + 1;
        l->taken++;
        count++;
    }
    return count;
}

// Both ends agree how many RECVs are used up.
void agree(struct lane *l) {
    uint64_t mine = l->taken, theirs;
    need(l->side, !l->side->failed && socket_swap(l->side->sock, &mine, &theirs, sizeof mine));
    if (sends(l)) l->taken = theirs;
}

void use_up(struct lane *l) {
    while (l->taken < l->posted && !l->side->failed) {
        struct datagram d = random_datagram(l, 0);
        if (sends(l)) post_datagram(l, &d);
        if (sends(l) && !l->side->failed) take_sent(l, 1);
        sends(l) ? (void)l->taken++ : take_datagram(l, &d);
        need(l->side, !l->side->failed && meet(l->side));
    }
}

// They are lost, or wait for a RECV: then its post ends the sleep.
static void ud_without_receives(struct side *s, struct endpoint *e) {
    struct lane l;
    struct ibv_wc wc;
    need(s, lane_open(&l, s, e, 1, true));
    for (unsigned round = 0; round < 8 && !s->failed; round++) {
        if (round % 4 == 0) turns(&l, TURNS);
        use_up(&l);
        uint32_t from = l.sources[0].next;
        unsigned count = 1 + round * 9;
        need(s, !s->failed && (sends(&l) || round % 2 || !ibv_req_notify_cq(e->recv_cq, 0)) && meet(s));
        send_numbered(&l, count);
        need(s, !s->failed && meet(s));
        if (!sends(&l)) {
            struct ibv_cq *cq;
            void *context;
            need(s, !ibv_poll_cq(e->recv_cq, 1, &wc) && !ibv_req_notify_cq(e->recv_cq, 0));
            while (fd_readable(e->channel->fd, QUIET_MS)) {
                need(s, !ibv_get_cq_event(e->channel, &cq, &context));
                ibv_ack_cq_events(cq, 1);
                need(s, !ibv_req_notify_cq(e->recv_cq, 0) && !ibv_poll_cq(e->recv_cq, 1, &wc));
            }
        }
        for (unsigned i = 0; i < count; i++) post_receive(&l, SLOT);
        if (!sends(&l) && !s->failed) {
            bool is_told = fd_readable(e->channel->fd, QUIET_MS);
            unsigned came = take_some(&l, from, QUIET_MS);
            if (!s->failed && !is_told != !came) fail(s, __FILE__, __LINE__, "%s, and %u came", is_told ? "an event" : "no event", came);
        }
        agree(&l);
        need(s, !s->failed && meet(s));
        use_up(&l);
    }
    lane_close(&l);
}

// Asleep until each datagram, solicited or not.
static void ud_events(struct side *s, struct endpoint *e) {
    struct lane l;
    need(s, lane_open(&l, s, e, 1, true));
    turns(&l, TURNS);
    for (unsigned i = 0; i < 50 * case_rounds && !s->failed; i++) {
        uint64_t random = random_next(&l.random);
        bool solicited = random % 2;
        unsigned count = 1 + (unsigned)(random >> 8) % 4;
        struct datagram all[4];
        for (unsigned k = 0; k < count; k++) all[k] = random_datagram(&l, random % 3 ? 0 : 4);
        while (l.posted - l.taken < count && !s->failed) post_receive(&l, SLOT);
        if (!sends(&l)) need(s, !s->failed && !ibv_req_notify_cq(e->recv_cq, solicited));
        need(s, !s->failed && meet(s));
        if (sends(&l)) {
            for (unsigned k = 0; k < count && !s->failed; k++) {
                struct ibv_sge sge = {(uintptr_t)e->memory + k * SLOT, all[k].length, e->mr->lkey};
                struct ibv_send_wr wr = {.wr_id = k, .sg_list = &sge, .num_sge = 1, .imm_data = htonl(all[k].number),
                                         .opcode = all[k].has_immediate ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
                                         .send_flags = k + 1 == count ? IBV_SEND_SOLICITED : 0}, *bad;
                wr.wr.ud.ah = all[k].by_other ? l.other : e->ah;
                wr.wr.ud.remote_qpn = e->peer.qpn;
                wr.wr.ud.remote_qkey = QKEY;
                fill(e->memory + k * SLOT, all[k].length, all[k].number * SENDERS);
                need(s, !ibv_post_send(e->qp, &wr, &bad));
            }
            if (!s->failed) take_sent(&l, count);
            l.taken += count;
        } else {
            struct ibv_cq *cq;
            void *context;
            need(s, fd_readable(e->channel->fd, WAIT_MS) && !ibv_get_cq_event(e->channel, &cq, &context));
            ibv_ack_cq_events(cq, 1);
            for (unsigned k = 0; k < count && !s->failed; k++) take_datagram(&l, &all[k]);
        }
        need(s, !s->failed && meet(s));
    }
    lane_close(&l);
}

// Nothing that has the old Q_Key arrives once the receiver has another one.
static void ud_q_key_changes(struct side *s, struct endpoint *e) {
    struct lane l;
    need(s, lane_open(&l, s, e, 1, false));
    for (unsigned round = 0; round < 6 && !s->failed; round++) {
        turns(&l, TURNS);
        uint32_t wanted = round % 2 ? QKEY : OTHER_QKEY;
        struct ibv_qp_attr attr = {.qkey = wanted};
        if (!sends(&l)) need(s, !s->failed && !ibv_modify_qp(e->qp, &attr, IBV_QP_QKEY));
        need(s, !s->failed && meet(s));
        send_numbered(&l, 20);
        need(s, !s->failed && meet(s));
        if (!sends(&l)) need(s, !take_some(&l, l.sources[0].next, QUIET_MS));
        l.qkey = wanted;
        need(s, !s->failed && meet(s));
    }
    turns(&l, TURNS);
    lane_close(&l);
}

// ---- ends

static bool begins_anew(struct lane *l) {
    return qp_modify_state(l->e->qp, IBV_QPS_RESET) && begin_qp(l->e->qp, QKEY);
}

static void ud_receiver_begins_anew(struct side *s, struct endpoint *e) {
    struct lane l;
    struct ibv_wc wc;
    need(s, lane_open(&l, s, e, 1, false));
    for (unsigned round = 0; round < 6 && !s->failed; round++) {
        turns(&l, TURNS);
        bool by_error = round % 2;
        uint64_t left = l.posted - l.taken;
        if (!sends(&l)) need(s, !s->failed && qp_modify_state(e->qp, by_error ? IBV_QPS_ERR : IBV_QPS_RESET));
        need(s, !s->failed && meet(s));
        send_numbered(&l, 20);
        need(s, !s->failed && meet(s));
        for (; by_error && !sends(&l) && left; left--) {
            need(s, poll_one(e->recv_cq, &wc, WAIT_MS));
            need_status(s, wc, IBV_WC_WR_FLUSH_ERR);
            need(s, wc.wr_id == l.taken++);
        }
        if (!sends(&l)) need(s, !ibv_poll_cq(e->recv_cq, 1, &wc) && begins_anew(&l));
        l.taken = l.posted;
        need(s, !s->failed && meet(s));
    }
    turns(&l, TURNS);
    lane_close(&l);
}

// All that was sent before arrives.
static void ud_sender_begins_anew(struct side *s, struct endpoint *e) {
    struct lane l;
    need(s, lane_open(&l, s, e, 2, false));
    for (unsigned round = 0; round < 8 && !s->failed; round++) {
        turns(&l, TURNS);
        struct datagram all[BURST_MAX];
        have_receives(&l, BURST_MAX);
        need(s, !s->failed && meet(s));
        for (unsigned i = 0; i < BURST_MAX; i++) {
            all[i] = random_datagram(&l, 0);
            l.sources[all[i].source].next--;
            all[i].source = 1;
            all[i].number = l.sources[1].next++;
            if (sends(&l) && !s->failed) post_datagram(&l, &all[i]);
        }
        if (sends(&l) && !s->failed) take_sent(&l, BURST_MAX);
        uint32_t qpn = 0, theirs;
        struct ibv_qp *gone = l.sources[1].qp;
        if (sends(&l) && round % 2) need(s, !s->failed && qp_modify_state(gone, IBV_QPS_RESET) && begin_qp(gone, QKEY));
        if (sends(&l) && round % 2 == 0) {
            need(s, !s->failed && !ibv_destroy_qp(gone) && (l.sources[1].qp = another_qp(&l)) != NULL);
        }
        if (sends(&l)) qpn = l.sources[1].qp->qp_num;
        need(s, !s->failed && meet(s));
        if (!sends(&l)) take_burst(&l, all, BURST_MAX);
        if (sends(&l)) l.taken += BURST_MAX;
        need(s, !s->failed && socket_swap(s->sock, &qpn, &theirs, sizeof qpn));
        l.sources[1].qpn = sends(&l) ? qpn : theirs;
    }
    lane_close(&l);
}

static void ud_handle_ends(struct side *s, struct endpoint *e) {
    struct lane l;
    need(s, lane_open(&l, s, e, 1, false));
    for (unsigned round = 0; round < 8 && !s->failed; round++) {
        turns(&l, TURNS);
        struct datagram all[BURST_MAX];
        have_receives(&l, BURST_MAX);
        need(s, !s->failed && meet(s));
        for (unsigned i = 0; i < BURST_MAX; i++) {
            all[i] = random_datagram(&l, 0);
            if (sends(&l) && !s->failed) post_datagram(&l, &all[i]);
        }
        if (sends(&l)) {
            struct ibv_ah_attr path = path_to_peer(&l);
            need(s, !s->failed && !ibv_destroy_ah(e->ah));
            e->ah = NULL;
            take_sent(&l, BURST_MAX);
            need(s, (e->ah = ibv_create_ah(e->pd, &path)) != NULL);
        }
        need(s, !s->failed && meet(s));
        if (!sends(&l)) take_burst(&l, all, BURST_MAX);
        if (sends(&l)) l.taken += BURST_MAX;
        need(s, !s->failed && meet(s));
    }
    lane_close(&l);
}

// A request that fails ends the send queue alone (SQE); what was sent before arrives, and it goes on after that.
static void ud_sender_fails(struct side *s, struct endpoint *e) {
    struct lane l;
    struct ibv_wc wc;
    need(s, lane_open(&l, s, e, 1, false));
    for (unsigned round = 0; round < 4 && !s->failed; round++) {
        turns(&l, TURNS);
        if (sends(&l) && !s->failed) {
            // Longer than the MTU.
            need(s, !post_send(e, 0, 0, MTU + 1, 0) && poll_one(e->send_cq, &wc, WAIT_MS));
            need_status(s, wc, IBV_WC_LOC_LEN_ERR);
            for (unsigned i = 0; i < 4; i++) {
                need(s, !post_send(e, i, 0, 64, 0) && poll_one(e->send_cq, &wc, WAIT_MS));
                need_status(s, wc, IBV_WC_WR_FLUSH_ERR);
            }
            need(s, qp_state(e->qp) == IBV_QPS_SQE && qp_modify_state(e->qp, IBV_QPS_RTS));
        }
        need(s, !s->failed && meet(s));
    }
    turns(&l, TURNS);
    lane_close(&l);
}

// More receivers than one sender has rings for, and the ones that it leaves for others.
static void ud_many_receivers(struct side *s, struct endpoint *e) {
    enum { RECEIVERS = 70, EACH = 150 };
    struct lane l;
    struct ibv_qp *qps[RECEIVERS] = {NULL};
    uint32_t mine[RECEIVERS] = {0}, theirs[RECEIVERS], seen[RECEIVERS] = {0};
    need(s, lane_open(&l, s, e, 1, false));
    for (unsigned i = 0; !sends(&l) && i < RECEIVERS; i++) {
        struct ibv_qp_init_attr init = {.send_cq = e->send_cq, .recv_cq = e->recv_cq, .qp_type = IBV_QPT_UD, .cap = {1, 2, 1, 1, 0}};
        need(s, (qps[i] = ibv_create_qp(e->pd, &init)) != NULL && begin_qp(qps[i], QKEY));
        mine[i] = qps[i]->qp_num;
    }
    need(s, socket_swap(s->sock, mine, theirs, sizeof mine));
    // Each by turns; then some alone, until their rings are in the places of others.
    for (unsigned round = 0; round < EACH + 12 * EACH && !s->failed; round++) {
        unsigned from = round < EACH ? 0 : RECEIVERS - 6;
        for (unsigned i = from; i < RECEIVERS && !sends(&l); i++) {
            struct ibv_sge sge = {(uintptr_t)e->memory + RECEIVED + i * SLOT, SLOT, e->mr->lkey};
            struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1}, *bad;
            need(s, !ibv_post_recv(qps[i], &wr, &bad));
        }
        need(s, meet(s));
        for (unsigned i = from; i < RECEIVERS && sends(&l) && !s->failed; i++) {
            uint32_t to = e->peer.qpn;
            e->peer.qpn = theirs[i];
            post_datagram(&l, &(struct datagram){.number = round, .length = 64, .has_immediate = true});
            e->peer.qpn = to;
            if (!s->failed) take_sent(&l, 1);
        }
        for (unsigned i = from; i < RECEIVERS && !sends(&l) && !s->failed; i++) {
            struct ibv_wc wc;
            need(s, poll_one(e->recv_cq, &wc, WAIT_MS));
            need_status(s, wc, IBV_WC_SUCCESS);
            need(s, wc.qp_num == mine[wc.wr_id] && ntohl(wc.imm_data) == round && seen[wc.wr_id]++ < round + 1);
        }
        need(s, !s->failed && meet(s));
    }
    for (unsigned i = 0; i < RECEIVERS; i++)
        if (qps[i]) need(s, !ibv_destroy_qp(qps[i]));
    lane_close(&l);
}

// ---- a sender that writes what it likes into its ring

struct scribbler {
    pthread_t thread;
    uint8_t *ring;
    bool shall_stop;
};

enum { FREED_AT = 64, SLOTS_AT = 4096, SLOT_BYTES = 128, RING_SLOTS = 256 };

// Descriptors that look as if they were the next ones, with anything in them.
static void *scribble(void *argument) {
    struct scribbler *scribbler = argument;
    uint64_t random = case_seed;
    while (!__atomic_load_n(&scribbler->shall_stop, __ATOMIC_RELAXED)) {
        uint64_t r = random_next(&random);
        volatile uint64_t *words = (volatile uint64_t *)(scribbler->ring + SLOTS_AT + r % RING_SLOTS * SLOT_BYTES);
        uint32_t next = __atomic_load_n((uint32_t *)(scribbler->ring + FREED_AT), __ATOMIC_RELAXED) + 1 + (r >> 8) % 4;
        uint32_t length = r >> 12 & 1 ? (r >> 16) % 300 : (uint32_t)(r >> 24);
        for (unsigned i = 1; i < 16; i++) words[i] = random_next(&random);
        __atomic_store_n((uint64_t *)words, length | (uint64_t)next << 32, __ATOMIC_RELEASE);
        if (r >> 13 & 1) sched_yield();
    }
    return NULL;
}

// The only ring that the process has mapped.
uint8_t *find_ring(void) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[600];
    unsigned long start, found = 0;
    unsigned count = 0;
    while (maps && fgets(line, sizeof line, maps))
        if (strstr(line, "freeflow-direct-ring") && sscanf(line, "%lx", &start) == 1 && !count++) found = start;
    if (maps) fclose(maps);
    return count == 1 ? (uint8_t *)found : NULL;
}

// It spoils its own datagrams, and nobody else's; the RECVs stay in order.
static void ud_beside_a_scribbler(struct side *s, struct endpoint *e) {
    struct lane l;
    struct scribbler scribbler = {0};
    char nothing = 0;
    need(s, lane_open(&l, s, e, 1, false));
    turns(&l, TURNS);
    if (sends(&l)) scribbler.ring = find_ring();
    // Or it has none: then all is as it was.
    l.sources[1].qp = sends(&l) ? another_qp(&l) : NULL;
    uint32_t honest = sends(&l) ? l.sources[1].qp->qp_num : 0, theirs, liar = l.sources[0].qpn;
    need(s, !s->failed && socket_swap(s->sock, &honest, &theirs, sizeof honest));
    l.sources[1].qpn = sends(&l) ? honest : theirs;
    if (scribbler.ring) need(s, !pthread_create(&scribbler.thread, NULL, scribble, &scribbler));
    const uint32_t count = 200 * case_rounds;
    uint32_t next = 0;
    while (l.posted - l.taken < RECEIVES - 1 && !s->failed) post_receive(&l, SLOT);
    need(s, !s->failed && meet(s));
    for (uint32_t i = 0; sends(&l) && i < count && !s->failed; i++) {
        post_datagram(&l, &(struct datagram){.source = 1, .number = i, .length = i % 200, .has_immediate = true});
        if (!s->failed) take_sent(&l, 1);
        if (i % 32 == 31) need(s, !s->failed && meet(s));
    }
    while (!sends(&l) && next < count && !s->failed) {
        struct ibv_wc wc;
        need(s, poll_one(e->recv_cq, &wc, WAIT_MS));
        need_status(s, wc, IBV_WC_SUCCESS);
        const uint8_t *at = e->memory + RECEIVED + wc.wr_id % RECEIVES * SLOT;
        need(s, wc.wr_id == l.taken++ && (wc.src_qp == liar || wc.src_qp == theirs) && wc.byte_len <= MTU + GRH_BYTES);
        need(s, gid_index() == IPV6_GID_INDEX || !memcmp(at + 32, e->peer.gid.raw + 12, 4));
        bool is_honest = wc.src_qp == theirs;
        if (is_honest) need(s, ntohl(wc.imm_data) == next && holds(at + GRH_BYTES, next % 200, next * SENDERS + 1));
        post_receive(&l, SLOT);
        if (is_honest && ++next % 32 == 0) need(s, !s->failed && meet(s));
    }
    __atomic_store_n(&scribbler.shall_stop, true, __ATOMIC_RELAXED);
    if (scribbler.ring) pthread_join(scribbler.thread, NULL);
    need(s, !s->failed && socket_swap(s->sock, &nothing, &nothing, 1));
    l.source_count = 2;
    lane_close(&l);
}

// A queue pair sends to itself.
static void ud_to_itself(struct side *s, struct endpoint *e) {
    struct lane l;
    struct ibv_wc wc;
    need(s, lane_open(&l, s, e, 1, false));
    struct ibv_ah *peer = e->ah;
    e->peer = e->mine;
    struct ibv_ah_attr path = path_to_peer(&l);
    need(s, (e->ah = ibv_create_ah(e->pd, &path)) != NULL);
    l.sources[0] = (struct source){e->qp, e->qp->qp_num, 0};
    for (unsigned i = 0; i < 2 * TURNS && !s->failed; i++) {
        uint32_t length = (uint32_t)random_next(&l.random) % 256;
        need(s, !post_recv(e, i, RECEIVED, SLOT));
        post_datagram(&l, &(struct datagram){.number = i, .length = length});
        take_sent(&l, 1);
        need(s, !s->failed && poll_one(e->recv_cq, &wc, WAIT_MS));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.wr_id == i && wc.src_qp == e->qp->qp_num && wc.byte_len == length + GRH_BYTES);
        need(s, holds(e->memory + RECEIVED + GRH_BYTES, length, i * SENDERS));
    }
    need(s, !ibv_destroy_ah(e->ah));
    e->ah = peer;
    lane_close(&l);
}

const struct test_case ud_cases[] = {
    {"ud_one_sender", ud_one_sender},
    {"ud_several_senders", ud_several_senders},
    {"ud_headers", ud_headers},
    {"ud_short_receives", ud_short_receives},
    {"ud_without_receives", ud_without_receives},
    {"ud_events", ud_events},
    {"ud_q_key_changes", ud_q_key_changes},
    {"ud_receiver_begins_anew", ud_receiver_begins_anew},
    {"ud_sender_begins_anew", ud_sender_begins_anew},
    {"ud_handle_ends", ud_handle_ends},
    {"ud_sender_fails", ud_sender_fails},
    {"ud_many_receivers", ud_many_receivers},
    {"ud_beside_a_scribbler", ud_beside_a_scribbler},
    {"ud_to_itself", ud_to_itself},
    {NULL, NULL},
};
