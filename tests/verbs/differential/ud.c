// Datagrams: the header in front of them, what is dropped, address handles, multicast.
// InfiniBand specification 9.8.3 (UD), 10.2.5 (Q_Keys), annex A17 (the header of RoCE v2);
// ibv_create_ah(3), ibv_attach_mcast(3).
#include "trace.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void say_end(struct pair *pair) {
    say_states(pair);
    say_empty(pair);
    say_memory("B behind the header", pair->b.memory + GRH_BYTES, 8192);
}

// A datagram that arrives after another was sent proves that the other one did not.
static void then_a_good_one(struct pair *pair) {
    post(&pair->a, &(struct op){.id = 90, .code = IBV_WR_SEND, .at = 5000, .len = 16});
    sent(&pair->a, 1);
    received(&pair->b, 1);
    say_end(pair);
}

static void lengths(long unused) {
    (void)unused;
    static const uint32_t bytes[] = {ZERO_LENGTH, 0, 1, 3, 63, 256, 1024};
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
        receive(&pair.b, i, 0, 4096);
        post(&pair.a, &(struct op){.id = 50 + i, .code = i % 2 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM, .at = i,
                                   .len = bytes[i], .imm = (uint32_t)i});
        sent(&pair.a, 1);
        received(&pair.b, 1);
        say_memory("B behind the header", pair.b.memory + GRH_BYTES, 4096);
    }
}

// The header of a datagram over IPv4: it stands in the last twenty of the forty bytes.
static void header(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    struct ibv_ah_attr attr = address_of_peer();
    attr.grh.hop_limit = 33;
    attr.grh.traffic_class = 0x48;
    struct ibv_ah *ah = ibv_create_ah(pair.a.pd, &attr);
    receive(&pair.b, 1, 0, 1024);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 100, .ah = ah});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    const uint8_t *ip = pair.b.memory + 20;
    // Headers of RoCE are 8 of UDP, 12 of BTH and 8 of DETH, and an ICRC of 4 ends the packet.
    say("version and length %02x, traffic class %02x, bytes %d, hop limit %u, protocol %u", ip[0], ip[1],
        (ip[2] << 8 | ip[3]), ip[8], ip[9]);
    say("source %s, destination %s", memcmp(ip + 12, device.gid.raw + 12, 4) ? "other" : "own",
        memcmp(ip + 16, peer_device->gid.raw + 12, 4) ? "other" : "own");
}

// Receives that leave no place for the header, or only for it.
static void short_receive(long room) {
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    receive(&pair.b, 1, 0, (uint32_t)room);
    receive(&pair.b, 2, 8192, 1024);
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 64});
    sent(&pair.a, 1);
    post(&pair.a, &(struct op){.id = 4, .code = IBV_WR_SEND, .len = ZERO_LENGTH});
    sent(&pair.a, 1);
    post(&pair.a, &(struct op){.id = 5, .code = IBV_WR_SEND, .len = 10});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_states(&pair);
}

static void beyond_mtu(long unused) {
    (void)unused;
    struct pair pair;
    struct ibv_port_attr port;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    if (ibv_query_port(device.context, 1, &port)) give_up("query the port");
    uint32_t mtu = 128u << port.active_mtu;
    receive(&pair.b, 1, 0, mtu + GRH_BYTES);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = mtu});
    sent(&pair.a, 1);
    struct ibv_wc wc = {0};
    int arrived = take(pair.b.recv_cq, &wc);
    say("as long as the MTU: arrives %d, with all %d", arrived, wc.byte_len == mtu + GRH_BYTES);
    receive(&pair.b, 3, 0, 2 * mtu);
    post(&pair.a, &(struct op){.id = 4, .code = IBV_WR_SEND, .len = mtu + 1});
    sent(&pair.a, 1);
    say_states(&pair);
    say_empty(&pair);
}

static void wrong_qkey(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    receive(&pair.b, 1, 0, 1024);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8, .qkey = QKEY + 1});
    sent(&pair.a, 1);
    then_a_good_one(&pair);
}

// A Q_Key with its highest bit means that of the sender's own queue pair.
static void controlled_qkey(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    receive(&pair.b, 1, 0, 1024);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8, .qkey = 0x80000001});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_end(&pair);
}

static void no_receiver(long kind) {
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    if (kind == 0) receive(&pair.b, 1, 0, 1024); // else: there is one, without a receive
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8, .qpn = kind == 0 ? 0xfffff0 : 0});
    sent(&pair.a, 1);
    if (kind) {
        post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 8, .at = 100, .qpn = pair.a.qp->qp_num});
        sent(&pair.a, 1);
        let_it_come();
        receive(&pair.b, 1, 0, 1024);
    }
    then_a_good_one(&pair);
}

// A queue pair that other types own does not take datagrams.
static void to_other_type(long type) {
    struct pair pair, other;
    pair_open(&other, &(struct options){.type = (enum ibv_qp_type)type});
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    receive(&other.b, 7, 0, 1024);
    receive(&pair.b, 1, 0, 1024);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8, .qpn = other.b.qp->qp_num});
    sent(&pair.a, 1);
    then_a_good_one(&pair);
    say_states(&other);
    say_empty(&other);
}

static void to_itself(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    receive(&pair.a, 1, 8192, 1024);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 100, .qpn = pair.a.qp->qp_num});
    sent(&pair.a, 1);
    received(&pair.a, 1);
    say_memory("A", pair.a.memory + 8192 + GRH_BYTES, 200);
}

static void ready_to_receive_only(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD, .unconnected = true});
    end_connect(&pair.a);
    if (!reach(&pair.b, IBV_QPS_RTR)) give_up("reach RTR");
    receive(&pair.b, 1, 0, 1024);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_end(&pair);
}

static void handle(struct ibv_pd *pd, const char *what, struct ibv_ah_attr attr) {
    errno = 0;
    struct ibv_ah *ah = ibv_create_ah(pd, &attr);
    say("%s -> %s", what, pointer_result(ah));
    if (ah) say("destroy -> %s", result(ibv_destroy_ah(ah)));
}

static void handles(long unused) {
    (void)unused;
    struct ibv_pd *pd = ibv_alloc_pd(device.context);
    struct ibv_ah_attr attr = address_of_device();
    handle(pd, "good", attr);
    attr.port_num = 0;
    handle(pd, "port 0", attr);
    attr.port_num = 2;
    handle(pd, "port 2", attr);
    attr = address_of_device();
    attr.grh.sgid_index = 250;
    handle(pd, "sgid_index 250", attr);
    attr = address_of_device();
    attr.is_global = 0;
    handle(pd, "not global", attr);
    attr = address_of_device();
    memset(&attr.grh.dgid, 0, 16);
    handle(pd, "dgid of zeros", attr);
    attr = address_of_device();
    attr.sl = 15;
    handle(pd, "sl 15", attr);
    attr = address_of_device();
    attr.grh.hop_limit = 0;
    handle(pd, "hop limit 0", attr);
}

// The handle of whoever sent a datagram: an answer goes there.
static void handle_of_sender(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    receive(&pair.b, 1, 0, 1024);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    struct ibv_wc wc;
    if (!take(pair.b.recv_cq, &wc)) give_up("receive");
    struct ibv_ah_attr attr;
    memset(&attr, 0, sizeof attr);
    int rc = ibv_init_ah_from_wc(device.context, 1, &wc, (struct ibv_grh *)pair.b.memory, &attr);
    say("init from a completion -> %s: global %d, port %u, dgid %s, sgid_index %s", result(rc), attr.is_global,
        attr.port_num, memcmp(&attr.grh.dgid, &device.gid, 16) ? "other" : "own",
        attr.grh.sgid_index == device.gid_index ? "own" : "other");
    struct ibv_ah *ah = ibv_create_ah_from_wc(pair.b.pd, &wc, (struct ibv_grh *)pair.b.memory, 1);
    say("create -> %s", pointer_result(ah));
    if (!ah) return;
    receive(&pair.a, 3, 8192, 1024);
    post(&pair.b, &(struct op){.id = 4, .code = IBV_WR_SEND, .at = 2048, .len = 30, .ah = ah, .qpn = wc.src_qp});
    sent(&pair.b, 1);
    received(&pair.a, 1);
    say_memory("A", pair.a.memory + 8192 + GRH_BYTES, 100);
}

static void local_errors(long kind) {
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    receive(&pair.b, 1, 0, 1024);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 8,
        .lkey = kind == 0 ? pair.a.mr->lkey ^ 0x5a5a5a00 : kind == 1 ? pair.b.mr->lkey : 0,
        .at = kind == 2 ? BUFFER_BYTES - 4 : 0});
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 2);
    say_states(&pair);
    say("A to RTS -> %s", result(modify(pair.a.qp, IBV_QPS_RTS)));
    post(&pair.a, &(struct op){.id = 4, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    say_states(&pair);
}

// The receiver's memory is not what its key says: its completion says so, the sender never knows.
static void receive_errors(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    receive_key(&pair.b, 1, 0, 1024, pair.b.mr->lkey ^ 0x5a5a5a00);
    receive(&pair.b, 2, 0, 1024);
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    received(&pair.b, 2);
    say_states(&pair);
}

// ---- multicast

static const uint8_t group_gid[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3};

// The group of IPv4 behind the GID: Linux hands its own datagrams back only to a host that is a member.
static void join_group(void) {
    struct ip_mreqn request = {.imr_ifindex = 0};
    memcpy(&request.imr_multiaddr, group_gid + 12, 4);
    memcpy(&request.imr_address, device.gid.raw + 12, 4);
    int sock = socket(AF_INET, SOCK_DGRAM, 0);
    setsockopt(sock, IPPROTO_IP, IP_ADD_MEMBERSHIP, &request, sizeof request);
}

static int attach(struct end *end, const uint8_t *gid, bool detach) {
    union ibv_gid group;
    memcpy(group.raw, gid, 16);
    int rc = detach ? ibv_detach_mcast(end->qp, &group, 0) : ibv_attach_mcast(end->qp, &group, 0);
    if (rc == EOPNOTSUPP) not_offered("multicast");
    return rc;
}

static void multicast_calls(long unused) {
    (void)unused;
    struct pair pair, connected;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    say("attach -> %s", result(attach(&pair.b, group_gid, false)));
    say("attach again -> %s", result(attach(&pair.b, group_gid, false)));
    say("detach -> %s", result(attach(&pair.b, group_gid, true)));
    say("detach again -> %s", result(attach(&pair.b, group_gid, true)));
    say("detach who never was in it -> %s", result(attach(&pair.a, group_gid, true)));
    pair_open(&connected, &(struct options){0});
    say("attach a connected queue pair -> %s", result(attach(&connected.a, group_gid, false)));
    say("attach to an address that is not a group's -> %s", result(attach(&pair.b, device.gid.raw, false)));
    say("attach once more -> %s", result(attach(&pair.b, group_gid, false)));
    say("destroy while attached -> %s", result(ibv_destroy_qp(pair.b.qp)));
}

static void multicast_delivery(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    join_group();
    say("attach A -> %s", result(attach(&pair.a, group_gid, false)));
    say("attach B -> %s", result(attach(&pair.b, group_gid, false)));
    sleep(2); // other hosts hear of it
    struct ibv_ah_attr attr = address_of_device();
    memcpy(attr.grh.dgid.raw, group_gid, 16);
    struct ibv_ah *ah = ibv_create_ah(pair.a.pd, &attr);
    say("handle of the group -> %s", pointer_result(ah));
    receive(&pair.a, 1, 8192, 1024);
    receive(&pair.b, 2, 8192, 1024);
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 100, .ah = ah, .qpn = 0xffffff});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_memory("B", pair.b.memory + 8192 + GRH_BYTES, 500);
    say("detach B -> %s", result(attach(&pair.b, group_gid, true)));
    receive(&pair.b, 4, 16384, 1024);
    post(&pair.a, &(struct op){.id = 5, .code = IBV_WR_SEND, .len = 100, .ah = ah, .qpn = 0xffffff});
    sent(&pair.a, 1);
    post(&pair.a, &(struct op){.id = 6, .code = IBV_WR_SEND, .len = 10});
    sent(&pair.a, 1);
    received(&pair.b, 1);
}

void add_ud(void) {
    add(lengths, 0, "ud_lengths");
    add(header, 0, "ud_header");
    static const long rooms[] = {1, 39, 40, 45, 60};
    for (size_t i = 0; i < 5; i++) add(short_receive, rooms[i], "ud_receive_of_%ld", rooms[i]);
    add(beyond_mtu, 0, "ud_beyond_mtu");
    add(wrong_qkey, 0, "ud_wrong_qkey");
    add(controlled_qkey, 0, "ud_controlled_qkey");
    add(no_receiver, 0, "ud_no_such_queue_pair");
    add(no_receiver, 1, "ud_no_receive");
    add(to_other_type, IBV_QPT_RC, "ud_to_rc");
    add(to_other_type, IBV_QPT_UC, "ud_to_uc");
    add(to_itself, 0, "ud_to_itself");
    add(ready_to_receive_only, 0, "ud_ready_to_receive_only");
    add(handles, 0, "ud_handles");
    add(handle_of_sender, 0, "ud_handle_of_sender");
    add(local_errors, 0, "ud_local_bad_key");
    add(local_errors, 1, "ud_local_wrong_pd");
    add(local_errors, 2, "ud_local_beyond_end");
    add(receive_errors, 0, "ud_receive_bad_key");
    add(multicast_calls, 0, "multicast_calls");
    add(multicast_delivery, 0, "multicast_delivery");
}
