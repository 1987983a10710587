// Values of attributes: out of range, and as ibv_query_qp and its relatives give them back.
#include "trace.h"

#include <errno.h>
#include <string.h>

static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};

static void say_attributes(struct end *end) {
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    memset(&attr, 0, sizeof attr);
    int rc = ibv_query_qp(end->qp, &attr, 0xfffff, &init);
    say("query -> %s: state %s, cur_state %s", result(rc), state_name(attr.qp_state), state_name(attr.cur_qp_state));
    say("init_attr: type %s, send_cq %d, recv_cq %d, srq %d, sq_sig_all %d", type_name(init.qp_type),
        init.send_cq == end->qp->send_cq, init.recv_cq == end->qp->recv_cq, init.srq == end->qp->srq, init.sq_sig_all);
    say("caps as asked or more: %d %d %d %d %d", attr.cap.max_send_wr >= 16, attr.cap.max_recv_wr >= 16,
        attr.cap.max_send_sge >= 2, attr.cap.max_recv_sge >= 2, attr.cap.max_inline_data >= 16);
    say("the same caps in init_attr: %d", !memcmp(&attr.cap, &init.cap, sizeof attr.cap));
    if (attr.qp_state == IBV_QPS_RESET) return;
    say("pkey_index %u, port %u", attr.pkey_index, attr.port_num);
    if (end->qp->qp_type == IBV_QPT_UD) say("qkey %x", attr.qkey);
    else say("access %x", attr.qp_access_flags);
    if (end->qp->qp_type == IBV_QPT_UD || attr.qp_state == IBV_QPS_INIT) return;
    say("path_mtu %d, dest %s, dgid %s, sgid_index %s, hop_limit %u, is_global %u", attr.path_mtu,
        qp_name(attr.dest_qp_num), memcmp(&attr.ah_attr.grh.dgid, &device.gid, 16) ? "other" : "own",
        attr.ah_attr.grh.sgid_index == device.gid_index ? "own" : "other", attr.ah_attr.grh.hop_limit,
        attr.ah_attr.is_global);
    say("rq_psn %u", attr.rq_psn);
    if (end->qp->qp_type == IBV_QPT_RC)
        say("max_dest_rd_atomic %u, min_rnr_timer %u", attr.max_dest_rd_atomic, attr.min_rnr_timer);
    if (attr.qp_state == IBV_QPS_RTR) return;
    say("sq_psn %u", attr.sq_psn);
    if (end->qp->qp_type == IBV_QPT_RC)
        say("max_rd_atomic %u, timeout %u, retry_cnt %u, rnr_retry %u", attr.max_rd_atomic, attr.timeout,
            attr.retry_cnt, attr.rnr_retry);
}

static void query(long packed) {
    struct end end = {0};
    end_open(&end, "A", &(struct options){.type = (enum ibv_qp_type)(packed >> 8), .inline_bytes = 16});
    if (!reach(&end, (enum ibv_qp_state)(packed & 255))) give_up("reach the state");
    say_attributes(&end);
}

// Attributes of its creation that each type of queue pair gives back.
static void query_creation(long type) {
    struct pair pair;
    pair_open(&pair, &(struct options){
        .type = (enum ibv_qp_type)type, .unconnected = true, .srq = true, .all_signaled = true, .inline_bytes = 16});
    struct ibv_qp *qp = pair.b.qp;
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    say("qp: state %s, type %s, pd %d, context %d, srq %d", state_name(qp->state), type_name(qp->qp_type),
        qp->pd == pair.b.pd, qp->context == device.context, qp->srq == pair.b.srq);
    say("query -> %s", result(ibv_query_qp(qp, &attr, IBV_QP_CAP, &init)));
    say("init_attr: srq %d, sq_sig_all %d, max_recv_wr %u, max_recv_sge %u", init.srq == pair.b.srq, init.sq_sig_all,
        attr.cap.max_recv_wr, attr.cap.max_recv_sge);
}

struct value {
    const char *text;
    enum ibv_qp_state from, to;
    void (*set)(struct ibv_qp_attr *attr);
};

#define SET(name, statement) \
    static void set_##name(struct ibv_qp_attr *attr) { statement; }
SET(pkey_index, attr->pkey_index = 60000)
SET(port_0, attr->port_num = 0)
SET(port_2, attr->port_num = 2)
SET(access_unknown, attr->qp_access_flags = 1u << 12)
SET(mtu_0, attr->path_mtu = (enum ibv_mtu)0)
SET(mtu_6, attr->path_mtu = (enum ibv_mtu)6)
SET(mtu_256, attr->path_mtu = IBV_MTU_256)
SET(mtu_4096, attr->path_mtu = IBV_MTU_4096)
SET(dest_large, attr->dest_qp_num = 0x1ffffff)
SET(rq_psn_large, attr->rq_psn = 0x1ffffff)
SET(sq_psn_large, attr->sq_psn = 0x1ffffff)
SET(sgid, attr->ah_attr.grh.sgid_index = 200)
SET(not_global, attr->ah_attr.is_global = 0)
SET(ah_port_0, attr->ah_attr.port_num = 0)
SET(ah_port_2, attr->ah_attr.port_num = 2)
SET(zero_gid, memset(&attr->ah_attr.grh.dgid, 0, 16))
SET(dest_rd_large, attr->max_dest_rd_atomic = 255)
SET(dest_rd_0, attr->max_dest_rd_atomic = 0)
SET(rnr_timer_32, attr->min_rnr_timer = 32)
SET(rd_large, attr->max_rd_atomic = 255)
SET(rd_0, attr->max_rd_atomic = 0)
SET(timeout_0, attr->timeout = 0)
SET(timeout_32, attr->timeout = 32)
SET(retry_8, attr->retry_cnt = 8)
SET(rnr_retry_8, attr->rnr_retry = 8)

static const struct value values[] = {
    {"pkey_index_60000", IBV_QPS_RESET, IBV_QPS_INIT, set_pkey_index},
    {"port_0", IBV_QPS_RESET, IBV_QPS_INIT, set_port_0},
    {"port_2", IBV_QPS_RESET, IBV_QPS_INIT, set_port_2},
    {"access_unknown", IBV_QPS_RESET, IBV_QPS_INIT, set_access_unknown},
    {"path_mtu_0", IBV_QPS_INIT, IBV_QPS_RTR, set_mtu_0},
    {"path_mtu_6", IBV_QPS_INIT, IBV_QPS_RTR, set_mtu_6},
    {"path_mtu_256", IBV_QPS_INIT, IBV_QPS_RTR, set_mtu_256},
    {"path_mtu_4096", IBV_QPS_INIT, IBV_QPS_RTR, set_mtu_4096},
    {"dest_qp_num_25_bits", IBV_QPS_INIT, IBV_QPS_RTR, set_dest_large},
    {"rq_psn_25_bits", IBV_QPS_INIT, IBV_QPS_RTR, set_rq_psn_large},
    {"sgid_index_200", IBV_QPS_INIT, IBV_QPS_RTR, set_sgid},
    {"not_global", IBV_QPS_INIT, IBV_QPS_RTR, set_not_global},
    {"ah_port_0", IBV_QPS_INIT, IBV_QPS_RTR, set_ah_port_0},
    {"ah_port_2", IBV_QPS_INIT, IBV_QPS_RTR, set_ah_port_2},
    {"dgid_0", IBV_QPS_INIT, IBV_QPS_RTR, set_zero_gid},
    {"max_dest_rd_atomic_255", IBV_QPS_INIT, IBV_QPS_RTR, set_dest_rd_large},
    {"max_dest_rd_atomic_0", IBV_QPS_INIT, IBV_QPS_RTR, set_dest_rd_0},
    {"min_rnr_timer_32", IBV_QPS_INIT, IBV_QPS_RTR, set_rnr_timer_32},
    {"sq_psn_25_bits", IBV_QPS_RTR, IBV_QPS_RTS, set_sq_psn_large},
    {"max_rd_atomic_255", IBV_QPS_RTR, IBV_QPS_RTS, set_rd_large},
    {"max_rd_atomic_0", IBV_QPS_RTR, IBV_QPS_RTS, set_rd_0},
    {"timeout_0", IBV_QPS_RTR, IBV_QPS_RTS, set_timeout_0},
    {"timeout_32", IBV_QPS_RTR, IBV_QPS_RTS, set_timeout_32},
    {"retry_cnt_8", IBV_QPS_RTR, IBV_QPS_RTS, set_retry_8},
    {"rnr_retry_8", IBV_QPS_RTR, IBV_QPS_RTS, set_rnr_retry_8},
};

static void attribute_value(long index) {
    const struct value *value = &values[index];
    struct end end = {0};
    struct ibv_qp_attr attr;
    end_open(&end, "A", &(struct options){0});
    if (!reach(&end, value->from)) give_up("reach the state");
    attr_fill(&attr, &end.options, IBV_QPT_RC, end.qp->qp_num);
    attr.qp_state = value->to;
    value->set(&attr);
    say("to %s -> %s", state_name(value->to),
        result(ibv_modify_qp(end.qp, &attr, required_mask(IBV_QPT_RC, value->to))));
    say("is in %s", queried_state(end.qp));
}

// Attributes that every device with a port of Ethernet has alike.
static void port_and_tables(long unused) {
    (void)unused;
    struct ibv_port_attr port;
    union ibv_gid gid;
    __be16 pkey = 0;
    say("query port 0 -> %s", result(ibv_query_port(device.context, 0, &port)));
    say("query port 2 -> %s", result(ibv_query_port(device.context, 2, &port)));
    say("query port 1 -> %s", result(ibv_query_port(device.context, 1, &port)));
    say("state %s, link layer %s, lid %u, lmc %u, sm_lid %u, phys_state %u", ibv_port_state_str(port.state),
        port.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "other", port.lid, port.lmc, port.sm_lid,
        port.phys_state);
    say("gid_tbl_len >= 1: %d, pkey_tbl_len %u, max_mtu %d", port.gid_tbl_len >= 1, port.pkey_tbl_len, port.max_mtu);
    say("gid 0 -> %s", result(ibv_query_gid(device.context, 1, 0, &gid)));
    say("gid 100000 -> %s", ibv_query_gid(device.context, 1, 100000, &gid) ? "refused" : "0");
    say("gid of port 2 -> %s", ibv_query_gid(device.context, 2, 0, &gid) ? "refused" : "0");
    say("pkey 0 -> %s: %x", result(ibv_query_pkey(device.context, 1, 0, &pkey)), pkey);
    say("pkey 60000 -> %s", ibv_query_pkey(device.context, 1, 60000, &pkey) ? "refused" : "0");
    say("pkey index of ffff: %d", ibv_get_pkey_index(device.context, 1, 0xffff));
    say("pkey index of 1234: %d", ibv_get_pkey_index(device.context, 1, 0x1234));
}

static void gid_entries(long unused) {
    (void)unused;
    struct ibv_gid_entry entry, table[64];
    int rc = ibv_query_gid_ex(device.context, 1, (uint32_t)device.gid_index, &entry, 0);
    say("entry -> %s", result(rc));
    if (!rc)
        say("index %d, port %u, type %u, the gid %d", entry.gid_index == (uint32_t)device.gid_index, entry.port_num,
            entry.gid_type, !memcmp(&entry.gid, &device.gid, 16));
    say("entry 100000 -> %s", result(ibv_query_gid_ex(device.context, 1, 100000, &entry, 0)));
    say("entry of port 2 -> %s", result(ibv_query_gid_ex(device.context, 2, 0, &entry, 0)));
    say("entry with flags -> %s", result(ibv_query_gid_ex(device.context, 1, 0, &entry, 1)));
    ssize_t count = ibv_query_gid_table(device.context, table, 64, 0);
    int found = 0;
    for (ssize_t i = 0; i < count; i++) found += !memcmp(&table[i].gid, &device.gid, 16);
    say("table: some %d, the address of IPv4 %d times", count > 0, found);
    count = ibv_query_gid_table(device.context, table, 0, 0);
    say("table of no entries: %s", count >= 0 ? "ok" : result((int)count));
}

static void device_attributes(long unused) {
    (void)unused;
    struct ibv_device_attr attr;
    struct ibv_device_attr_ex extended;
    memset(&attr, 0, sizeof attr);
    memset(&extended, 0, sizeof extended);
    struct ibv_values_ex clock = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
    say("query -> %s", result(ibv_query_device(device.context, &attr)));
    say("ports %u, limits above 0: %d", attr.phys_port_cnt,
        attr.max_qp > 0 && attr.max_cq > 0 && attr.max_mr > 0 && attr.max_pd > 0 && attr.max_qp_wr > 0 &&
            attr.max_sge > 0 && attr.max_cqe > 0 && attr.max_ah > 0 && attr.max_srq > 0 && attr.max_srq_wr > 0 &&
            attr.max_mr_size > 0 && attr.max_qp_rd_atom > 0 && attr.max_qp_init_rd_atom > 0);
    say("atomics %d", attr.atomic_cap);
    say("page sizes have 4096: %d", (attr.page_size_cap & 4096) != 0);
    say("the guid of the device: %d", attr.node_guid == ibv_get_device_guid(device.context->device));
    say("query, extended -> %s", result(ibv_query_device_ex(device.context, NULL, &extended)));
    say("the same: %d", !memcmp(&attr, &extended.orig_attr, offsetof(struct ibv_device_attr, phys_port_cnt) + 1));
    say("node type %s, transport %d, vectors > 0: %d", ibv_node_type_str(device.context->device->node_type),
        device.context->device->transport_type, device.context->num_comp_vectors > 0);
    struct ibv_query_device_ex_input unknown = {.comp_mask = 1};
    say("query, extended, with an unknown field -> %s",
        result(ibv_query_device_ex(device.context, &unknown, &extended)));
    say("clock offered where a mask is: %d",
        !extended.completion_timestamp_mask == !!ibv_query_rt_values_ex(device.context, &clock));
}

void add_attributes(void) {
    for (size_t t = 0; t < 3; t++) {
        for (enum ibv_qp_state state = IBV_QPS_RESET; state <= IBV_QPS_ERR; state++) {
            if (types[t] == IBV_QPT_RC && state == IBV_QPS_SQE) continue;
            add(query, (long)types[t] << 8 | state, "query_%s_in_%s", type_name(types[t]), state_name(state));
        }
        add(query_creation, types[t], "query_%s_creation", type_name(types[t]));
    }
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        add(attribute_value, (long)i, "value_%s", values[i].text);
    add(port_and_tables, 0, "device_port_and_tables");
    add(gid_entries, 0, "device_gid_entries");
    add(device_attributes, 0, "device_attributes");
}
