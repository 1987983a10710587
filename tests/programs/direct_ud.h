// Datagrams by direct rings: what the cases of `direct_ud.c` and `direct_ud_order.c` have in common.
#ifndef FREEFLOW_TEST_DIRECT_UD_H
#define FREEFLOW_TEST_DIRECT_UD_H

#include "cases.h"

enum {
    SENDERS = 5,
    RECEIVES = 96,
    WINDOW = 64, // no more is on its way: there is a RECV for each
    BURST_MAX = 48,
    MTU = 4096,
    SLOT = MTU + 64,
    RECEIVED = (WINDOW + 1) * SLOT,
    TOTAL = RECEIVED + RECEIVES * SLOT,
    TURNS = 200, // enough to have a ring
    WAIT_MS = 15000,
    QUIET_MS = 200,
    OTHER_QKEY = 0x2222222,
};

struct source {
    struct ibv_qp *qp;
    uint32_t qpn, next; // number of the next datagram
};

struct lane {
    struct side *side;
    struct endpoint *e;
    uint64_t random; // the same on both ends
    struct ibv_ah *other; // the same address, by another handle
    struct source sources[SENDERS];
    unsigned source_count;
    uint32_t capacity[RECEIVES];
    uint64_t posted, taken;
    unsigned slot;
    uint32_t qkey;
};

struct datagram {
    unsigned source;
    uint32_t number, length;
    bool has_immediate, is_inline, is_split, by_other;
};

bool sends(const struct lane *l);
struct ibv_ah_attr path_to_peer(const struct lane *l);
bool lane_open(struct lane *l, struct side *s, struct endpoint *e, unsigned sources, bool events);
void lane_close(struct lane *l);
void post_receive(struct lane *l, uint32_t length);
void post_datagram(struct lane *l, const struct datagram *d);
void take_sent(struct lane *l, unsigned count);
void turns(struct lane *l, unsigned count);
struct datagram numbered(struct lane *l);
void send_numbered(struct lane *l, unsigned count);
unsigned take_some(struct lane *l, uint32_t from, unsigned ms);
void agree(struct lane *l);
void use_up(struct lane *l);
uint8_t *find_ring(void);
#endif
