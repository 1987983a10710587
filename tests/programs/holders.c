// Datagrams between holders of addresses that move and watchers of fixed ones: each end logs which of the others it
// hears.
//
//   holders DIR NAME IP HOST RUN PEERS
//
// An end writes `IP QPN` to DIR/NAME when it can receive. Each 5 ms it sends a datagram to every end in DIR whose name
// ends in PEERS, and it appends a line `NS SENT_NS HOST RUN NUMBER` to DIR/NAME.log for each datagram that it receives:
// the sender's HOST, RUN and NUMBER. Times are CLOCK_REALTIME, as logs have it. An end whose device is gone begins
// again; SIGTERM removes DIR/NAME and ends it. IP may be `-`: then nobody can send to this end.
#include "harness.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 128, SLOT = 64, PEERS_MAX = 32, SEND_MS = 5, LOOK_TURNS = 10, AGAIN_MS = 100, PATH_BYTES = 512 };

struct datagram {
    uint32_t host, run;
    uint64_t number, sent_ns;
};

struct peer {
    char ip[64];
    unsigned qpn;
    struct ibv_ah *ah;
};

struct end {
    struct endpoint e;
    const char *directory, *peers_suffix;
    struct peer peers[PEERS_MAX];
    unsigned peer_count, posted, completed;
    struct datagram next;
    FILE *log;
};

static char own_file[PATH_BYTES];

static void on_term(int signal) {
    (void)signal;
    unlink(own_file);
    _exit(0);
}

static uint64_t wall_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static bool begin(struct end *end) {
    struct options options = {.type = IBV_QPT_UD, .send_wr = SLOTS, .recv_wr = SLOTS, .bytes = 2 * SLOTS * SLOT};
    struct endpoint *e = &end->e;
    if (!endpoint_open(e, &options) || !endpoint_to_init(e)) return false;
    for (uint64_t slot = 0; slot < SLOTS; slot++)
        if (post_recv(e, slot, slot * SLOT, SLOT)) return false;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
    if (ibv_modify_qp(e->qp, &attr, IBV_QP_STATE)) return false;
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = 1};
    return !ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

static bool announce(const char *ip, uint32_t qpn) {
    if (!strcmp(ip, "-")) return true;
    char before[PATH_BYTES + 8];
    snprintf(before, sizeof before, "%s.new", own_file);
    FILE *file = fopen(before, "w");
    if (!file) return false;
    fprintf(file, "%s %u\n", ip, qpn);
    return !fclose(file) && !rename(before, own_file);
}

static bool ends_in(const char *name, const char *suffix) {
    size_t length = strlen(name), wanted = strlen(suffix);
    return length >= wanted && !strcmp(name + length - wanted, suffix);
}

// The ends that there are now; address handles of those that there were before are kept.
static void look(struct end *end) {
    struct peer now[PEERS_MAX] = {0};
    unsigned found = 0;
    DIR *folder = opendir(end->directory);
    if (!folder) return;
    for (struct dirent *entry; found < PEERS_MAX && (entry = readdir(folder));) {
        char path[PATH_BYTES];
        if (!ends_in(entry->d_name, end->peers_suffix)) continue;
        snprintf(path, sizeof path, "%s/%s", end->directory, entry->d_name);
        FILE *file = fopen(path, "r");
        if (file && fscanf(file, "%63s %u", now[found].ip, &now[found].qpn) == 2) found++;
        if (file) fclose(file);
    }
    closedir(folder);
    for (unsigned i = 0; i < found; i++) {
        for (unsigned j = 0; j < end->peer_count && !now[i].ah; j++)
            if (end->peers[j].ah && end->peers[j].qpn == now[i].qpn && !strcmp(end->peers[j].ip, now[i].ip)) {
                now[i].ah = end->peers[j].ah;
                end->peers[j].ah = NULL;
            }
        struct ibv_ah_attr path = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid_of(now[i].ip), .hop_limit = 64}};
        if (!now[i].ah) now[i].ah = ibv_create_ah(end->e.pd, &path);
    }
    for (unsigned j = 0; j < end->peer_count; j++)
        if (end->peers[j].ah) ibv_destroy_ah(end->peers[j].ah);
    memcpy(end->peers, now, sizeof now);
    end->peer_count = found;
}

static bool receive(struct end *end) {
    struct ibv_wc wc[SLOTS];
    int count = ibv_poll_cq(end->e.recv_cq, SLOTS, wc);
    for (int i = 0; i < count; i++) {
        struct datagram got;
        if (wc[i].status != IBV_WC_SUCCESS) return false;
        memcpy(&got, end->e.memory + wc[i].wr_id * SLOT + GRH_BYTES, sizeof got);
        fprintf(end->log, "%lu %lu %u %u %lu\n", (unsigned long)wall_ns(), (unsigned long)got.sent_ns, got.host, got.run,
                (unsigned long)got.number);
        if (post_recv(&end->e, wc[i].wr_id, wc[i].wr_id * SLOT, SLOT)) return false;
    }
    return count >= 0 && !fflush(end->log);
}

static bool send_to_all(struct end *end) {
    struct endpoint *e = &end->e;
    end->next.number++;
    for (unsigned i = 0; i < end->peer_count && end->posted - end->completed < SLOTS; i++) {
        size_t slot = SLOTS + end->posted % SLOTS;
        if (!end->peers[i].ah) continue;
        end->next.sent_ns = wall_ns();
        memcpy(e->memory + slot * SLOT, &end->next, sizeof end->next);
        e->ah = end->peers[i].ah;
        e->peer = (struct address){.qpn = end->peers[i].qpn, .qkey = QKEY};
        if (post_send(e, slot, slot * SLOT, sizeof end->next, 0)) return false;
        end->posted++;
    }
    struct ibv_wc wc[SLOTS];
    int done = ibv_poll_cq(e->send_cq, SLOTS, wc);
    for (int i = 0; i < done; i++)
        if (wc[i].status != IBV_WC_SUCCESS) return false;
    end->completed += done > 0 ? (unsigned)done : 0;
    return done >= 0;
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    struct end end = {.directory = argv[1], .peers_suffix = argv[6]};
    char log[PATH_BYTES + 8];
    snprintf(own_file, sizeof own_file, "%s/%s", argv[1], argv[2]);
    snprintf(log, sizeof log, "%s.log", own_file);
    end.next = (struct datagram){.host = (uint32_t)atoi(argv[4]), .run = (uint32_t)atoi(argv[5])};
    end.log = fopen(log, "ae");
    struct sigaction action = {.sa_handler = on_term};
    sigaction(SIGTERM, &action, NULL);
    bool is_well = end.log && begin(&end) && announce(argv[3], end.e.mine.qpn);
    for (unsigned turn = 0; is_well; turn++, sleep_ms(SEND_MS)) {
        if (turn % LOOK_TURNS == 0) look(&end);
        // A device that is gone completes nothing more.
        is_well = receive(&end) && send_to_all(&end) && !fd_readable(end.e.context->async_fd, 0);
    }
    sleep_ms(AGAIN_MS);
    execv("/proc/self/exe", argv);
    return 1;
}
