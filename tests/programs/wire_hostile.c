// Attacks of a tenant on queue pairs of other hosts by nothing but verbs, and the datagram service
// that must not notice.
//
//   wire_hostile attack QPN RKEY ADDRESS IP OTHER_IP   every service, at the victim's QPN under its address and
//                                                      another's
//   wire_hostile keys server PORT | keys client IP PORT RKEY ADDRESS
//                                              a pair of its own, and somebody else's key
//   wire_hostile receive                       a UD queue pair; prints `ready QPN`, ends at the first message
//   wire_hostile send IP QPN QKEY              sends it one
//
// Exit 0: no attack had a success that means something, or the first message was the one meant for it.
#define _GNU_SOURCE
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 64, TRIES = 8, GOOD_BYTES = 33, WAIT_MS = 20000 };

static unsigned failures;

static bool open_towards(struct endpoint *e, enum ibv_qp_type type, const struct address *peer) {
    // 1 ms and one retry: whoever does not answer at once never will.
    if (!endpoint_open(e, &(struct options){.type = type, .timeout = 8, .retry = 1})) return false;
    e->peer = *peer;
    return endpoint_to_init(e) && endpoint_to_rtr(e) && endpoint_to_rts(e);
}

// Writes, reads, adds, sends: a reliable request must fail; what no one answers may end well, and changes nothing.
static void attack(const char *what, enum ibv_qp_type type, const struct address *victim) {
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD,
                                                 IBV_WR_SEND};
    for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++) {
        bool one_way = opcodes[i] == IBV_WR_RDMA_WRITE || opcodes[i] == IBV_WR_SEND;
        if ((type == IBV_QPT_UC && !one_way) || (type == IBV_QPT_UD && opcodes[i] != IBV_WR_SEND)) continue;
        struct endpoint e = {0};
        struct ibv_wc wc = {0};
        if (!open_towards(&e, type, victim)) exit(1);
        memset(e.memory, 0xee, BYTES);
        bool atomic = opcodes[i] == IBV_WR_ATOMIC_FETCH_AND_ADD;
        struct ibv_sge sge = {(uintptr_t)e.memory, atomic ? 8 : BYTES, e.mr->lkey};
        struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcodes[i]};
        if (atomic) {
            wr.wr.atomic.remote_addr = victim->memory;
            wr.wr.atomic.rkey = victim->rkey;
            wr.wr.atomic.compare_add = 1;
        } else if (type != IBV_QPT_UD) {
            wr.wr.rdma.remote_addr = victim->memory;
            wr.wr.rdma.rkey = victim->rkey;
        }
        bool came = !post_work(&e, &wr) && poll_one(e.send_cq, &wc, WAIT_MS);
        bool good = came && (type != IBV_QPT_RC || wc.status == IBV_WC_RETRY_EXC_ERR);
        printf("%s, %d: %s\n", what, opcodes[i], came ? ibv_wc_status_str(wc.status) : "nothing");
        failures += !good;
        if (!endpoint_close(&e)) failures++;
    }
}

static int attack_all(char **words) {
    struct address victim = {.qpn = (uint32_t)atoi(words[0]), .rkey = (uint32_t)strtoul(words[1], NULL, 0),
                             .memory = strtoull(words[2], NULL, 0), .gid = gid_of(words[3]), .qkey = QKEY};
    attack("RC at the victim", IBV_QPT_RC, &victim);
    attack("UC at the victim", IBV_QPT_UC, &victim);
    attack("UD at the victim", IBV_QPT_UD, &victim);
    victim.gid = gid_of(words[4]);
    attack("RC at the victim under another's address", IBV_QPT_RC, &victim);
    attack("UC at the victim under another's address", IBV_QPT_UC, &victim);
    for (int i = 0; i < TRIES; i++) {
        victim.qpn = (victim.qpn * 2654435761u + 12345) & 0xffffff;
        attack("RC at a guessed QPN", IBV_QPT_RC, &victim);
    }
    printf("%u failed\n", failures);
    return failures != 0;
}

// A connection with an accomplice beside the victim, from which the victim's key must open nothing.
static int keys(int argc, char **words) {
    bool server = !strcmp(words[0], "server");
    int listener = server ? socket_listen(atoi(words[1])) : -1;
    for (int i = 0; i < 3; i++) {
        static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD};
        int sock = server ? socket_accept(listener) : socket_connect(words[1], atoi(words[2]));
        struct side side = {server ? ROLE_B : ROLE_A, sock, "keys", false};
        struct endpoint e = {0};
        struct ibv_wc wc = {0};
        if (sock < 0 || !endpoint_open(&e, &(struct options){0}) || !endpoint_connect(&side, &e)) return 1;
        if (!server && argc == 5) {
            struct ibv_sge sge = {(uintptr_t)e.memory, 8, e.mr->lkey};
            struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcodes[i]};
            uint64_t address = strtoull(words[4], NULL, 0);
            uint32_t key = (uint32_t)strtoul(words[3], NULL, 0);
            if (opcodes[i] == IBV_WR_ATOMIC_FETCH_AND_ADD) {
                wr.wr.atomic.remote_addr = address;
                wr.wr.atomic.rkey = key;
                wr.wr.atomic.compare_add = 1;
            } else {
                wr.wr.rdma.remote_addr = address;
                wr.wr.rdma.rkey = key;
            }
            bool came = !post_work(&e, &wr) && poll_one(e.send_cq, &wc, WAIT_MS);
            printf("key, %d: %s\n", opcodes[i], came ? ibv_wc_status_str(wc.status) : "nothing");
            failures += !came || wc.status != IBV_WC_REM_ACCESS_ERR;
        }
        failures += !meet(&side) || !endpoint_close(&e);
    }
    printf("%u failed\n", failures);
    return failures != 0;
}

static int receive(void) {
    struct endpoint e = {0};
    struct ibv_wc wc;
    if (!endpoint_open(&e, &(struct options){.type = IBV_QPT_UD}) || !endpoint_to_init(&e)) return 1;
    for (uint64_t i = 0; i < 16; i++)
        if (post_recv(&e, i, i * 256, 256)) return 1;
    e.peer.gid = e.mine.gid;
    if (!endpoint_to_rtr(&e) || !endpoint_to_rts(&e)) return 1;
    printf("ready %u\n", e.mine.qpn);
    if (!poll_one(e.recv_cq, &wc, 3 * WAIT_MS) || wc.status != IBV_WC_SUCCESS) return 1;
    printf("%u bytes\n", wc.byte_len);
    return endpoint_close(&e) && wc.byte_len == GRH_BYTES + GOOD_BYTES ? 0 : 1;
}

static int send_one(char **words) {
    struct endpoint e = {0};
    struct ibv_wc wc;
    struct address peer = {
        .gid = gid_of(words[0]), .qpn = (uint32_t)atoi(words[1]), .qkey = (uint32_t)strtoul(words[2], NULL, 0)};
    if (!open_towards(&e, IBV_QPT_UD, &peer) || post_send(&e, 1, 0, GOOD_BYTES, 0)) return 1;
    if (!poll_one(e.send_cq, &wc, WAIT_MS) || wc.status != IBV_WC_SUCCESS) return 1;
    return endpoint_close(&e) ? 0 : 1;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc == 7 && !strcmp(argv[1], "attack")) return attack_all(argv + 2);
    if ((argc == 4 || argc == 7) && !strcmp(argv[1], "keys")) return keys(argc - 2, argv + 2);
    if (argc == 2 && !strcmp(argv[1], "receive")) return receive();
    if (argc == 5 && !strcmp(argv[1], "send")) return send_one(argv + 2);
    return 2;
}
