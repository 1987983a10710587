// Datagrams past the router: which of them comes first, and who is woken for one that waits.
#include "direct_ud.h"

#include <arpa/inet.h>
#include <string.h>

enum { SHORT = GRH_BYTES + 64, LONG = 1024 };

static bool take_event(struct lane *l) {
    struct ibv_cq *cq;
    void *context;
    if (ibv_get_cq_event(l->e->channel, &cq, &context)) return false;
    ibv_ack_cq_events(cq, 1);
    return true;
}

// Asleep: whatever is there now has been reported.
static bool falls_asleep(struct lane *l) {
    bool is_armed = !ibv_req_notify_cq(l->e->recv_cq, 0);
    while (is_armed && fd_readable(l->e->channel->fd, QUIET_MS))
        is_armed = take_event(l) && !ibv_req_notify_cq(l->e->recv_cq, 0);
    return is_armed;
}

static void post_numbered(struct lane *l, unsigned source, uint32_t length, bool by_other) {
    struct datagram d = {.source = source, .number = l->sources[source].next++, .length = length, .has_immediate = true,
                         .by_other = by_other};
    if (!sends(l) || l->side->failed) return;
    post_datagram(l, &d);
    if (!l->side->failed) take_sent(l, 1);
}

// Two for one RECV. The second waits, and nobody looked at the CQ since the first took that: the next RECV wakes.
static void ud_receive_comes_later(struct side *s, struct endpoint *e) {
    struct lane l;
    struct ibv_wc wc;
    need(s, lane_open(&l, s, e, 1, true));
    for (unsigned round = 0; round < 8 && !s->failed; round++) {
        if (round % 4 == 0) turns(&l, TURNS);
        use_up(&l);
        post_receive(&l, SLOT);
        need(s, !s->failed && meet(s));
        uint32_t first = l.sources[0].next;
        send_numbered(&l, 2);
        need(s, !s->failed && meet(s));
        if (!sends(&l)) {
            need(s, falls_asleep(&l) && ibv_poll_cq(e->recv_cq, 1, &wc) == 1);
            need_status(s, wc, IBV_WC_SUCCESS);
            need(s, wc.wr_id == l.taken++ && ntohl(wc.imm_data) == first && !ibv_poll_cq(e->recv_cq, 1, &wc));
        }
        post_receive(&l, SLOT);
        if (!sends(&l) && !s->failed) {
            bool is_told = fd_readable(e->channel->fd, QUIET_MS);
            unsigned came = take_some(&l, first + 1, QUIET_MS);
            const char *told = is_told ? "an event" : "no event";
            if (!s->failed && !is_told != !came) fail(s, __FILE__, __LINE__, "%s, and %u came", told, came);
            need(s, !s->failed && (!is_told || take_event(&l)));
        }
        agree(&l);
    }
    lane_close(&l);
}

// One sender's are too long for the RECV and lost; the other's is not, and one poll finds it.
static void ud_too_long_beside_another(struct side *s, struct endpoint *e) {
    struct lane l;
    struct ibv_wc wc;
    need(s, lane_open(&l, s, e, 2, true));
    turns(&l, TURNS);
    use_up(&l);
    for (unsigned round = 0; round < 16 && !s->failed; round++) {
        unsigned too_long = round % 2, good = !too_long;
        post_receive(&l, SHORT);
        if (!sends(&l)) need(s, !s->failed && !ibv_req_notify_cq(e->recv_cq, 0));
        need(s, !s->failed && meet(s));
        for (unsigned i = 0; i < 1 + round % 3; i++) post_numbered(&l, too_long, LONG, false);
        uint32_t number = l.sources[good].next;
        post_numbered(&l, good, 64, false);
        need(s, !s->failed && meet(s));
        if (!sends(&l)) {
            int found = 0;
            do {
                need(s, fd_readable(e->channel->fd, WAIT_MS) && take_event(&l) && !ibv_req_notify_cq(e->recv_cq, 0));
                found = ibv_poll_cq(e->recv_cq, 1, &wc);
            } while (!found);
            need_status(s, wc, IBV_WC_SUCCESS);
            need(s, found == 1 && wc.wr_id == l.taken && wc.src_qp == l.sources[good].qpn);
            need(s, ntohl(wc.imm_data) == number);
        }
        l.taken++;
        need(s, !s->failed && meet(s));
    }
    lane_close(&l);
}

// Datagrams of the same sender to a group come in no order with the ring, and do not change that of the others.
static void ud_group_between(struct side *s, struct endpoint *e) {
    struct lane l;
    const union ibv_gid group = gid_of(gid_index() == IPV6_GID_INDEX ? "ff15::708" : "239.7.7.8");
    need(s, lane_open(&l, s, e, 1, false));
    need(s, sends(&l) || !ibv_attach_mcast(e->qp, &group, 0));
    need(s, meet(s));
    struct ibv_ah_attr path = path_to_peer(&l);
    path.grh.dgid = group;
    struct ibv_ah *to_group = ibv_create_ah(e->pd, &path), *to_peer = e->ah;
    need(s, to_group);
    turns(&l, TURNS);
    for (unsigned round = 0; round < 8 * case_rounds && !s->failed; round++) {
        while (l.posted - l.taken < 6 && !s->failed) post_receive(&l, SLOT);
        need(s, !s->failed && meet(s));
        uint32_t next = l.sources[0].next, qpn = e->peer.qpn;
        for (unsigned i = 0; i < 6 && !s->failed; i++) {
            // Half are the group's; then two by the router, and one by the ring.
            if (i < 3) (e->ah = to_group, e->peer.qpn = 0xffffff);
            post_numbered(&l, 0, 64, i == 3 || i == 4);
            (e->ah = to_peer, e->peer.qpn = qpn);
        }
        need(s, !s->failed && meet(s));
        for (unsigned i = 0; i < 6 && !s->failed; i++) {
            struct ibv_wc wc;
            if (sends(&l)) {
                l.taken++;
                continue;
            }
            need(s, poll_one(e->recv_cq, &wc, WAIT_MS));
            need_status(s, wc, IBV_WC_SUCCESS);
            uint32_t number = ntohl(wc.imm_data) - next;
            if (wc.wr_id != l.taken++ || (number >= 3 && number != i))
                fail(s, __FILE__, __LINE__, "%u in the place of %u (RECV %lu)", number, i, (unsigned long)wc.wr_id);
        }
        need(s, !s->failed && meet(s));
    }
    need(s, !ibv_destroy_ah(to_group) && (sends(&l) || !ibv_detach_mcast(e->qp, &group, 0)));
    lane_close(&l);
}

// A short one stands in the ring when the router delivers a long one, whose RECV is followed by one that is too short
// for it. The router has not lost it, so nobody does.
static void ud_short_receive_follows(struct side *s, struct endpoint *e) {
    struct lane l;
    struct ibv_wc wc;
    enum { ROUNDS = 24 };
    unsigned whole = 0;
    need(s, lane_open(&l, s, e, 1, false));
    turns(&l, TURNS);
    uint8_t has_ring = sends(&l) && find_ring(), theirs;
    need(s, !s->failed && socket_swap(s->sock, &has_ring, &theirs, 1));
    use_up(&l);
    for (unsigned round = 0; round < ROUNDS && !s->failed; round++) {
        post_receive(&l, SLOT);
        post_receive(&l, SHORT);
        need(s, !s->failed && meet(s));
        post_numbered(&l, 0, 64, false);
        post_numbered(&l, 0, LONG, true);
        need(s, !s->failed && meet(s));
        unsigned came = 0;
        for (; !sends(&l) && came < 2 && poll_one(e->recv_cq, &wc, QUIET_MS); came++) {
            need_status(s, wc, IBV_WC_SUCCESS);
            need(s, wc.wr_id == l.taken++);
        }
        need(s, sends(&l) || came);
        whole += came == 2;
        agree(&l);
        // The short one, if it was left.
        for (; l.taken < l.posted && !s->failed; l.taken++) {
            post_numbered(&l, 0, 64, false);
            need(s, sends(&l) || (!s->failed && poll_one(e->recv_cq, &wc, WAIT_MS) && wc.wr_id == l.taken));
        }
    }
    if (!sends(&l) && theirs && whole < ROUNDS / 2)
        fail(s, __FILE__, __LINE__, "one of two was lost %u times", ROUNDS - whole);
    lane_close(&l);
}

const struct test_case ud_order_cases[] = {
    {"ud_receive_comes_later", ud_receive_comes_later},
    {"ud_too_long_beside_another", ud_too_long_beside_another},
    {"ud_group_between", ud_group_between},
    {"ud_short_receive_follows", ud_short_receive_follows},
    {NULL, NULL},
};
