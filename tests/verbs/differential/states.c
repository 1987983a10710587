// Transitions of queue pairs: each pair of states, and each attribute that a transition needs, allows or forbids.
// InfiniBand specification 11.2.5.2 (Modify Queue Pair), tables of required and optional attributes; figure 124.
#include "trace.h"

#include <errno.h>

static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};

#define STATE_COUNT (IBV_QPS_ERR + 1)
#define PACK(type, from, to) ((long)(type) << 16 | (from) << 8 | (to))
#define TYPE(packed) ((enum ibv_qp_type)((packed) >> 16))
#define FROM(packed) ((enum ibv_qp_state)((packed) >> 8 & 255))
#define TO(packed) ((enum ibv_qp_state)((packed) & 255))

// One queue pair connected to itself, in the state.
static struct end end_in(enum ibv_qp_type type, enum ibv_qp_state state) {
    struct end end = {0};
    end_open(&end, "A", &(struct options){.type = type});
    if (!reach(&end, state)) give_up("reach the state");
    return end;
}

static int transition(struct end *end, enum ibv_qp_state from, enum ibv_qp_state to, int mask) {
    struct ibv_qp_attr attr;
    attr_fill(&attr, &end->options, end->qp->qp_type, end->qp->qp_num);
    attr.qp_state = to;
    attr.cur_qp_state = from;
    return ibv_modify_qp(end->qp, &attr, mask);
}

// From one state to each other, with what the target state needs.
static void from_state(long packed) {
    for (enum ibv_qp_state to = IBV_QPS_RESET; to < STATE_COUNT; to++) {
        struct end end = end_in(TYPE(packed), FROM(packed));
        bool forward = (FROM(packed) == IBV_QPS_RTR || to != IBV_QPS_RTS) &&
                       !(FROM(packed) == IBV_QPS_RTS && to == IBV_QPS_RTS);
        int rc = transition(&end, FROM(packed), to, forward ? required_mask(TYPE(packed), to) : IBV_QP_STATE);
        say("to %s -> %s, is in %s, qp->state %s", state_name(to), result(rc), queried_state(end.qp),
            state_name(end.qp->state));
    }
}

// The same with no attribute but the state, and with all that any transition of the type needs.
static void from_state_masks(long packed) {
    int all = required_mask(TYPE(packed), IBV_QPS_INIT) | required_mask(TYPE(packed), IBV_QPS_RTR) |
              required_mask(TYPE(packed), IBV_QPS_RTS);
    for (enum ibv_qp_state to = IBV_QPS_RESET; to < STATE_COUNT; to++) {
        struct end end = end_in(TYPE(packed), FROM(packed));
        int rc = transition(&end, FROM(packed), to, IBV_QP_STATE);
        say("to %s, state alone -> %s, is in %s", state_name(to), result(rc), queried_state(end.qp));
        end = end_in(TYPE(packed), FROM(packed));
        rc = transition(&end, FROM(packed), to, all);
        say("to %s, everything -> %s, is in %s", state_name(to), result(rc), queried_state(end.qp));
    }
}

static const struct {
    int bit;
    const char *name;
} attributes[] = {
    {IBV_QP_CUR_STATE, "CUR_STATE"}, {IBV_QP_EN_SQD_ASYNC_NOTIFY, "EN_SQD_ASYNC_NOTIFY"},
    {IBV_QP_ACCESS_FLAGS, "ACCESS_FLAGS"}, {IBV_QP_PKEY_INDEX, "PKEY_INDEX"}, {IBV_QP_PORT, "PORT"},
    {IBV_QP_QKEY, "QKEY"}, {IBV_QP_AV, "AV"}, {IBV_QP_PATH_MTU, "PATH_MTU"}, {IBV_QP_TIMEOUT, "TIMEOUT"},
    {IBV_QP_RETRY_CNT, "RETRY_CNT"}, {IBV_QP_RNR_RETRY, "RNR_RETRY"}, {IBV_QP_RQ_PSN, "RQ_PSN"},
    {IBV_QP_MAX_QP_RD_ATOMIC, "MAX_QP_RD_ATOMIC"}, {IBV_QP_ALT_PATH, "ALT_PATH"},
    {IBV_QP_MIN_RNR_TIMER, "MIN_RNR_TIMER"}, {IBV_QP_SQ_PSN, "SQ_PSN"},
    {IBV_QP_MAX_DEST_RD_ATOMIC, "MAX_DEST_RD_ATOMIC"}, {IBV_QP_PATH_MIG_STATE, "PATH_MIG_STATE"},
    {IBV_QP_CAP, "CAP"}, {IBV_QP_DEST_QPN, "DEST_QPN"},
};

// A legal transition without each attribute that it needs, and with each other one.
static void masks(long packed) {
    int required = required_mask(TYPE(packed), TO(packed));
    if (FROM(packed) == TO(packed)) required = IBV_QP_STATE;
    if (FROM(packed) != IBV_QPS_RTR && TO(packed) == IBV_QPS_RTS) required = IBV_QP_STATE;
    if (TO(packed) == IBV_QPS_ERR || TO(packed) == IBV_QPS_RESET || TO(packed) == IBV_QPS_SQD) required = IBV_QP_STATE;
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        struct end end = end_in(TYPE(packed), FROM(packed));
        int rc = transition(&end, FROM(packed), TO(packed), required ^ attributes[i].bit);
        say("%s %s -> %s, is in %s", required & attributes[i].bit ? "without" : "with", attributes[i].name, result(rc),
            queried_state(end.qp));
    }
}

// A transition that names the present state wrongly, and one with the state missing in the mask.
static void current_state(long type) {
    struct end end = end_in((enum ibv_qp_type)type, IBV_QPS_RTS);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .cur_qp_state = IBV_QPS_INIT};
    say("RTS from INIT -> %s", result(ibv_modify_qp(end.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE)));
    say("is in %s", queried_state(end.qp));
    attr.cur_qp_state = IBV_QPS_RTS;
    say("RTS from RTS -> %s", result(ibv_modify_qp(end.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE)));
    say("nothing -> %s", result(ibv_modify_qp(end.qp, &attr, 0)));
    attr.min_rnr_timer = 12;
    attr.qkey = 5;
    say("no state, an attribute -> %s",
        result(ibv_modify_qp(end.qp, &attr, type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
    say("an unknown attribute -> %s", result(ibv_modify_qp(end.qp, &attr, IBV_QP_STATE | 1 << 30)));
    attr.qp_state = (enum ibv_qp_state)9;
    say("an unknown state -> %s", result(ibv_modify_qp(end.qp, &attr, IBV_QP_STATE)));
    say("is in %s", queried_state(end.qp));
}

// Through the states and back, three times; then it still carries data.
static void round_trips(long type) {
    struct pair pair;
    pair_open(&pair, &(struct options){.type = (enum ibv_qp_type)type});
    for (int round = 0; round < 3; round++) {
        say_modify(&pair.a, IBV_QPS_ERR);
        say_modify(&pair.b, IBV_QPS_ERR);
        pair_again(&pair);
        say_states(&pair);
        receive(&pair.b, 1, 0, 256);
        post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 100});
        sent(&pair.a, 1);
        received(&pair.b, 1);
        say_memory("B", pair.b.memory + GRH_BYTES, 256 - GRH_BYTES);
    }
}

void add_states(void) {
    for (size_t t = 0; t < 3; t++) {
        const char *name = type_name(types[t]);
        for (enum ibv_qp_state from = IBV_QPS_RESET; from < STATE_COUNT; from++) {
            if (types[t] == IBV_QPT_RC && from == IBV_QPS_SQE) continue; // an RC queue pair has no such state
            add(from_state, PACK(types[t], from, 0), "state_%s_from_%s", name, state_name(from));
            add(from_state_masks, PACK(types[t], from, 0), "state_%s_from_%s_masks", name, state_name(from));
        }
        static const enum ibv_qp_state legal[][2] = {
            {IBV_QPS_RESET, IBV_QPS_INIT}, {IBV_QPS_INIT, IBV_QPS_INIT}, {IBV_QPS_INIT, IBV_QPS_RTR},
            {IBV_QPS_RTR, IBV_QPS_RTS}, {IBV_QPS_RTS, IBV_QPS_RTS}, {IBV_QPS_RTS, IBV_QPS_SQD},
            {IBV_QPS_SQD, IBV_QPS_SQD}, {IBV_QPS_SQD, IBV_QPS_RTS}, {IBV_QPS_SQE, IBV_QPS_RTS},
            {IBV_QPS_RTS, IBV_QPS_ERR}, {IBV_QPS_ERR, IBV_QPS_RESET},
        };
        for (size_t i = 0; i < sizeof legal / sizeof *legal; i++) {
            if (types[t] == IBV_QPT_RC && legal[i][0] == IBV_QPS_SQE) continue;
            add(masks, PACK(types[t], legal[i][0], legal[i][1]), "mask_%s_%s_to_%s", name, state_name(legal[i][0]),
                state_name(legal[i][1]));
        }
        add(current_state, types[t], "state_%s_current", name);
        add(round_trips, types[t], "state_%s_round_trips", name);
    }
}
