// A container that reaches for another one's things. Everything must be out of reach, and the victim undisturbed.
//
//   escape RUN_DIR VICTIM_HOST_PID VICTIM_IP VICTIM_QPN VICTIM_RKEY VICTIM_ADDRESS
#define _GNU_SOURCE
#include "harness.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

static struct victim {
    const char *run_dir;
    pid_t pid;
    union ibv_gid gid;
    uint32_t qpn, rkey;
    uint64_t memory;
} victim;

static struct stat own_socket;
static unsigned foreign_sockets;

static int is_later(const struct timespec *one, const struct timespec *other) {
    return one->tv_sec != other->tv_sec ? one->tv_sec > other->tv_sec : one->tv_nsec > other->tv_nsec;
}

static int look_at(const char *path, const struct stat *st, int kind, struct FTW *where) {
    (void)kind, (void)where;
    // Routers of crates/router/tests, which may run meanwhile: no `freeflow up` knows of them.
    if (strstr(path, "/ff-router-")) return 0;
    if (!S_ISSOCK(st->st_mode) || (st->st_dev == own_socket.st_dev && st->st_ino == own_socket.st_ino)) return 0;
    // Hosts that came up after this container, of other tests: their routers refuse it (docs/LIMITATIONS.md).
    if (is_later(&st->st_ctim, &own_socket.st_ctim)) return 0;
    int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    if (!connect(sock, (struct sockaddr *)&address, sizeof address)) {
        fprintf(stderr, "  reached %s\n", path);
        foreign_sockets++;
    }
    close(sock);
    return 0;
}

// No router socket but the container's own can be connected to.
static void sockets(struct side *s, struct endpoint *e) {
    (void)e;
    need(s, !stat("/run/freeflow/router.sock", &own_socket));
    const char *places[] = {victim.run_dir, "/run", "/tmp", "/var/run", "/dev/shm"};
    for (unsigned i = 0; i < sizeof places / sizeof *places; i++) nftw(places[i], look_at, 16, FTW_PHYS);
    need(s, foreign_sockets == 0);
}

// No process but the container's own can be seen, and none of another's by its number on the host.
static void processes(struct side *s, struct endpoint *e) {
    (void)e;
    struct stat own, other;
    need(s, !stat("/proc/self/ns/pid", &own));
    DIR *proc = opendir("/proc");
    need(s, proc);
    for (struct dirent *entry; (entry = readdir(proc));) {
        char path[300];
        if (strspn(entry->d_name, "0123456789") != strlen(entry->d_name)) continue;
        snprintf(path, sizeof path, "/proc/%s/ns/pid", entry->d_name);
        if (!stat(path, &other)) need(s, other.st_ino == own.st_ino);
    }
    closedir(proc);
    uint8_t bytes[16];
    struct iovec here = {bytes, sizeof bytes}, there = {(void *)(uintptr_t)victim.memory, sizeof bytes};
    need(s, process_vm_readv(victim.pid, &here, 1, &there, 1, 0) < 0);
}

// The victim's queue pair is not connected with ours: nothing that we send reaches it.
static void queue_pair(struct side *s, struct endpoint *e) {
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND};
    for (unsigned i = 0; i < 3; i++) {
        need(s, endpoint_open(e, &(struct options){.timeout = 8, .retry = 1}));
        e->peer = (struct address){.qpn = victim.qpn, .rkey = victim.rkey, .memory = victim.memory, .gid = victim.gid};
        need(s, endpoint_to_init(e) && endpoint_to_rtr(e) && endpoint_to_rts(e));
        need(s, !post_remote(e, opcodes[i], 1, 0, 64, 0, 0));
        struct ibv_wc wc;
        need(s, poll_one(e->send_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_RETRY_EXC_ERR);
        need(s, endpoint_close(e));
    }
}

static bool self_connect(struct endpoint *e) {
    e->peer = e->mine;
    return endpoint_to_init(e) && endpoint_to_rtr(e) && endpoint_to_rts(e);
}

// The victim's key, and keys near it, open nothing for a queue pair of ours.
static void keys(struct side *s, struct endpoint *e) {
    uint64_t random = victim.rkey;
    struct ibv_wc wc;
    for (unsigned i = 0; i < 40; i++) {
        need(s, endpoint_open(e, &(struct options){0}));
        need(s, self_connect(e));
        uint32_t key = i < 20 ? victim.rkey + i - 10 : (uint32_t)random_next(&random);
        if (i == 0) key = victim.rkey;
        if (key == e->mr->rkey) key ^= 1;
        e->peer.rkey = key;
        e->peer.memory = victim.memory;
        need(s, !post_remote(e, i % 2 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, 1, 0, 64, 0, 0));
        need(s, poll_one(e->send_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_REM_ACCESS_ERR);
        need(s, endpoint_close(e));
        // As a local key it opens nothing either.
        need(s, endpoint_open(e, &(struct options){0}));
        need(s, self_connect(e));
        struct ibv_sge sge = {victim.memory, 64, key};
        struct ibv_send_wr wr = {.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE};
        wr.wr.rdma.remote_addr = e->mine.memory;
        wr.wr.rdma.rkey = e->mine.rkey;
        need(s, !post_work(e, &wr));
        need(s, poll_one(e->send_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_LOC_PROT_ERR);
        need(s, endpoint_close(e));
    }
}

// Datagrams to a queue pair that takes none, and to numbers around it, are lost without a trace.
static void datagrams(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.type = IBV_QPT_UD}));
    e->peer = (struct address){.qpn = victim.qpn, .qkey = QKEY, .gid = victim.gid};
    need(s, endpoint_to_init(e) && endpoint_to_rtr(e) && endpoint_to_rts(e));
    struct ibv_wc wc;
    for (unsigned i = 0; i < 100; i++) {
        e->peer.qpn = (victim.qpn + i) & 0xffffff;
        need(s, !post_send(e, i, 0, 64, 0));
        need(s, poll_one(e->send_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
    }
}

// There is one source address, and it is the container's own.
static void spoofed_source(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    union ibv_gid gid;
    need(s, memcmp(e->mine.gid.raw, victim.gid.raw, 16));
    for (int index = 1; index < 256; index++)
        need(s, ibv_query_gid(e->context, 1, index, &gid) || memcmp(gid.raw, victim.gid.raw, 16));
    need(s, endpoint_to_init(e));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = victim.qpn};
    attr.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh = {.dgid = victim.gid, .sgid_index = 3}};
    int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MIN_RNR_TIMER |
               IBV_QP_MAX_DEST_RD_ATOMIC;
    need(s, ibv_modify_qp(e->qp, &attr, mask) != 0);
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    victim = (struct victim){.run_dir = argv[1],
                             .pid = atoi(argv[2]),
                             .gid.raw = {[10] = 0xff, [11] = 0xff},
                             .qpn = (uint32_t)strtoul(argv[4], NULL, 0),
                             .rkey = (uint32_t)strtoul(argv[5], NULL, 0),
                             .memory = strtoull(argv[6], NULL, 0)};
    if (inet_pton(AF_INET, argv[3], victim.gid.raw + 12) != 1) return 2;
    static const struct {
        const char *name;
        void (*run)(struct side *, struct endpoint *);
    } tests[] = {{"sockets", sockets}, {"processes", processes}, {"queue_pair", queue_pair},
                 {"keys", keys},       {"datagrams", datagrams}, {"spoofed_source", spoofed_source}};
    unsigned failed = 0, count = sizeof tests / sizeof *tests;
    for (unsigned i = 0; i < count; i++) {
        struct side side = {ROLE_A, -1, tests[i].name, false};
        struct endpoint e = {0};
        tests[i].run(&side, &e);
        endpoint_close(&e);
        printf("%-9s escape: %s\n", side.failed ? "FAILED" : "ok", tests[i].name);
        failed += side.failed;
    }
    printf("%u passed, %u failed\n", count - failed, failed);
    return failed != 0;
}
