// One container of a tenant, and what its neighbours must not be able to do to it; QPs and messages to be counted.
//
//   tenants stay GROUP            a pair of its own and a datagram QP in the group; prints `ready QPN RKEY ADDRESS
//                                 DATAGRAM_QPN`; prints each message that comes, and at SIGTERM whether all is
//                                 untouched
//   tenants group GROUP           a datagram to the group
//   tenants spoof IP QPN [INDEX]  asks for GIDs that it has not: all but INDEX, else 0
//   tenants idle server PORT | idle client IP PORT   a connection with nothing on it, until it is cut
//   tenants qps COUNT             makes so many QPs, and tries again where it gets none
//   tenants pump                  one message at a time, to itself; says every 100 ms how many
//
// All but `group`, `spoof` and `idle` end at SIGTERM.
#define _GNU_SOURCE
#include "harness.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SEED = 7, RECEIVES = 8, RECEIVE_BYTES = 256, SENT_BYTES = 32, GROUP_QPN = 0xffffff, TRY_MS = 50, CUT_MS = 30000 };

static volatile sig_atomic_t ended;

static void on_end(int number) {
    (void)number;
    ended = 1;
}

static bool join(struct endpoint *one, struct endpoint *other) {
    one->peer = other->mine;
    other->peer = one->mine;
    return endpoint_to_init(one) && endpoint_to_init(other) && endpoint_to_rtr(one) && endpoint_to_rtr(other) &&
           endpoint_to_rts(one) && endpoint_to_rts(other);
}

static bool open_datagrams(struct endpoint *e) {
    if (!endpoint_open(e, &(struct options){.type = IBV_QPT_UD}) || !endpoint_to_init(e)) return false;
    e->peer = (struct address){.gid = e->mine.gid, .qpn = e->mine.qpn, .qkey = QKEY};
    return endpoint_to_rtr(e) && endpoint_to_rts(e);
}

static int stay(const char *group) {
    struct endpoint ends[2] = {0}, datagrams = {0};
    union ibv_gid gid = gid_of(group);
    for (int i = 0; i < 2; i++)
        if (!endpoint_open(&ends[i], &(struct options){0})) return 1;
    if (!join(&ends[0], &ends[1]) || !open_datagrams(&datagrams)) return 1;
    if (ibv_attach_mcast(datagrams.qp, &gid, 0)) return 1;
    for (int i = 0; i < 2; i++) fill(ends[i].memory, ends[i].bytes, SEED);
    fill(datagrams.memory, datagrams.bytes, SEED);
    for (uint64_t i = 0; i < RECEIVES; i++)
        if (post_recv(&ends[0], i, i * RECEIVE_BYTES, RECEIVE_BYTES) || post_recv(&datagrams, i, i * RECEIVE_BYTES, RECEIVE_BYTES))
            return 1;
    printf("ready %u %u %lu %u\n", ends[0].mine.qpn, ends[0].mine.rkey, (unsigned long)ends[0].mine.memory, datagrams.mine.qpn);
    bool good = true;
    while (!ended) {
        struct ibv_wc wc;
        if (poll_one(datagrams.recv_cq, &wc, 10)) {
            printf("datagram %s\n", ibv_wc_status_str(wc.status));
            good = false;
        }
        if (poll_one(ends[0].recv_cq, &wc, 10)) {
            printf("message %s\n", ibv_wc_status_str(wc.status));
            good = false;
        }
    }
    for (int i = 0; i < 2; i++) good &= holds(ends[i].memory, ends[i].bytes, SEED) && qp_state(ends[i].qp) == IBV_QPS_RTS;
    good &= holds(datagrams.memory, datagrams.bytes, SEED);
    puts(good ? "untouched" : "touched");
    return !good;
}

static int send_to_group(const char *group) {
    struct endpoint e = {0};
    struct ibv_wc wc;
    if (!endpoint_open(&e, &(struct options){.type = IBV_QPT_UD}) || !endpoint_to_init(&e)) return 1;
    e.peer = (struct address){.gid = gid_of(group), .qpn = GROUP_QPN, .qkey = QKEY};
    if (!endpoint_to_rtr(&e) || !endpoint_to_rts(&e) || post_send(&e, 1, 0, SENT_BYTES, 0)) return 1;
    if (!poll_one(e.send_cq, &wc, CUT_MS)) return 1;
    printf("sent: %s\n", ibv_wc_status_str(wc.status));
    return endpoint_close(&e) && wc.status == IBV_WC_SUCCESS ? 0 : 1;
}

static int spoof(const char *ip, uint32_t qpn, unsigned own) {
    unsigned taken = 0;
    for (unsigned index = 0; index < 256; index = index < 4 ? index + 1 : index * 2 - 1) {
        if (index == own) continue;
        struct endpoint e = {0};
        if (!endpoint_open(&e, &(struct options){0}) || !endpoint_to_init(&e)) return 1;
        struct ibv_qp_attr attr = {
            .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qpn, .max_dest_rd_atomic = 1, .min_rnr_timer = 1,
            .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid_of(ip), .sgid_index = (uint8_t)index, .hop_limit = 64}}};
        taken += !ibv_modify_qp(e.qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
        if (!endpoint_close(&e)) return 1;
    }
    printf("%u taken\n", taken);
    return taken != 0;
}

static int idle(int argc, char **words) {
    bool server = argc == 2;
    int sock = server ? socket_accept(socket_listen(atoi(words[1]))) : socket_connect(words[1], atoi(words[2]));
    struct side side = {server ? ROLE_B : ROLE_A, sock, "idle", false};
    struct endpoint e = {0};
    struct ibv_wc wc;
    if (sock < 0 || !endpoint_open(&e, &(struct options){0}) || !endpoint_connect(&side, &e)) return 1;
    if (post_recv(&e, 1, 0, RECEIVE_BYTES)) return 1;
    puts("connected");
    if (!poll_one(e.recv_cq, &wc, CUT_MS)) return 1;
    printf("%s, state %d\n", ibv_wc_status_str(wc.status), qp_state(e.qp));
    bool good = wc.status == IBV_WC_WR_FLUSH_ERR && qp_state(e.qp) == IBV_QPS_ERR;
    puts(good ? "cut" : "not cut");
    return !good;
}

static int make_qps(unsigned count) {
    struct ibv_context *context = open_first_device();
    struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
    struct ibv_cq *cq = pd ? ibv_create_cq(context, 16, NULL, NULL, 0) : NULL;
    if (!cq) return 1;
    bool reported = false;
    for (unsigned made = 0; made < count && !ended;) {
        struct ibv_qp_init_attr init = {
            .send_cq = cq, .recv_cq = cq, .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
            .qp_type = IBV_QPT_RC};
        if (ibv_create_qp(pd, &init)) {
            made++;
            reported = false;
            continue;
        }
        if (errno != ENOMEM) {
            printf("made %u, then: %s\n", made, strerror(errno));
            return 1;
        }
        if (!reported) printf("made %u, then: ENOMEM\n", made);
        reported = true;
        sleep_ms(TRY_MS);
    }
    if (!ended) puts("made all");
    while (!ended) sleep_ms(TRY_MS);
    return 0;
}

static int pump(void) {
    struct endpoint from = {0}, to = {0};
    if (!endpoint_open(&from, &(struct options){0}) || !endpoint_open(&to, &(struct options){0}) || !join(&from, &to)) return 1;
    unsigned long count = 0;
    uint64_t begin = now_ns(), reported = 0;
    struct ibv_wc wc;
    puts("begun");
    while (!ended) {
        if (post_recv(&to, 1, 0, SENT_BYTES) || post_send(&from, 1, SENT_BYTES, SENT_BYTES, 0)) return 1;
        bool came = false;
        while (!ended && !(came = poll_one(from.send_cq, &wc, 20))) {}
        if (!came) break;
        if (wc.status != IBV_WC_SUCCESS || !poll_one(to.recv_cq, &wc, CUT_MS) || wc.status != IBV_WC_SUCCESS) return 1;
        count++;
        uint64_t now = now_ns();
        if (now - reported < 100000000) continue;
        reported = now;
        printf("sent %lu in %lu ms\n", count, (unsigned long)((now - begin) / 1000000));
    }
    return 0;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGTERM, on_end);
    if (argc == 3 && !strcmp(argv[1], "stay")) return stay(argv[2]);
    if (argc == 3 && !strcmp(argv[1], "group")) return send_to_group(argv[2]);
    if (argc >= 4 && !strcmp(argv[1], "spoof"))
        return spoof(argv[2], (uint32_t)atoi(argv[3]), argc > 4 ? (unsigned)atoi(argv[4]) : 0);
    if ((argc == 4 && !strcmp(argv[2], "server")) || (argc == 5 && !strcmp(argv[2], "client")))
        if (!strcmp(argv[1], "idle")) return idle(argc - 2, argv + 2);
    if (argc == 3 && !strcmp(argv[1], "qps")) return make_qps((unsigned)atoi(argv[2]));
    if (argc == 2 && !strcmp(argv[1], "pump")) return pump();
    return 2;
}
