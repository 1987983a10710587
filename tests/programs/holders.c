// Datagrams that say which host sent them, and a third host that notes which of them it is given.
//
//   holders watch DIR NAME IP          receives, and prints a line `NS HOST RUN NUMBER` for each datagram
//   holders send DIR HOST RUN          sends one each 5 ms to every watcher that DIR names, for as long as it lives
//
// A watcher writes `IP QPN` to DIR/NAME.watcher when it can receive. NS is CLOCK_REALTIME, as logs have it; HOST and
// RUN are numbers. Either end begins anew when its device is gone.
#include "harness.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 128, SLOT = 64, WATCHERS_MAX = 8, SEND_MS = 5, LOOK_TURNS = 20, AGAIN_MS = 100 };

struct datagram {
    uint32_t host, run;
    uint64_t number;
};

struct watcher {
    char ip[64];
    unsigned qpn;
    struct ibv_ah *ah;
};

static void on_term(int signal) {
    (void)signal;
    _exit(0);
}

static uint64_t wall_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void again(char **argv) {
    fflush(stdout);
    sleep_ms(AGAIN_MS);
    execv("/proc/self/exe", argv);
    _exit(1);
}

static bool open_datagrams(struct endpoint *e) {
    struct options options = {.type = IBV_QPT_UD, .send_wr = SLOTS, .recv_wr = SLOTS, .bytes = SLOTS * SLOT};
    return endpoint_open(e, &options) && endpoint_to_init(e);
}

// ---- the watcher

static bool announce(const char *dir, const char *name, const char *ip, uint32_t qpn) {
    char path[512], before[520];
    snprintf(path, sizeof path, "%s/%s.watcher", dir, name);
    snprintf(before, sizeof before, "%s.new", path);
    FILE *file = fopen(before, "w");
    if (!file) return false;
    fprintf(file, "%s %u\n", ip, qpn);
    return !fclose(file) && !rename(before, path);
}

static bool watch(char **words) {
    struct endpoint e = {0};
    if (!open_datagrams(&e)) return false;
    for (uint64_t slot = 0; slot < SLOTS; slot++)
        if (post_recv(&e, slot, slot * SLOT, SLOT)) return false;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
    if (ibv_modify_qp(e.qp, &attr, IBV_QP_STATE) || !announce(words[0], words[1], words[2], e.mine.qpn)) return false;
    for (;; sleep_ms(1)) {
        struct ibv_wc wc[SLOTS];
        int count = ibv_poll_cq(e.recv_cq, SLOTS, wc);
        if (count < 0) return false;
        for (int i = 0; i < count; i++) {
            struct datagram got;
            if (wc[i].status != IBV_WC_SUCCESS) return false;
            memcpy(&got, e.memory + wc[i].wr_id * SLOT + GRH_BYTES, sizeof got);
            printf("%lu %u %u %lu\n", (unsigned long)wall_ns(), got.host, got.run, (unsigned long)got.number);
            if (post_recv(&e, wc[i].wr_id, wc[i].wr_id * SLOT, SLOT)) return false;
        }
        if (count) fflush(stdout);
        // A device that is gone completes nothing more.
        if (fd_readable(e.context->async_fd, 0)) return false;
    }
}

// ---- the sender

static void look(struct endpoint *e, const char *dir, struct watcher *watchers, unsigned *count) {
    struct watcher now[WATCHERS_MAX] = {0};
    unsigned found = 0;
    DIR *folder = opendir(dir);
    if (!folder) return;
    for (struct dirent *entry; found < WATCHERS_MAX && (entry = readdir(folder));) {
        char path[512];
        size_t length = strlen(entry->d_name);
        if (length < 8 || strcmp(entry->d_name + length - 8, ".watcher")) continue;
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        FILE *file = fopen(path, "r");
        if (file && fscanf(file, "%63s %u", now[found].ip, &now[found].qpn) == 2) found++;
        if (file) fclose(file);
    }
    closedir(folder);
    for (unsigned i = 0; i < found; i++) {
        for (unsigned j = 0; j < *count; j++)
            if (watchers[j].ah && !strcmp(watchers[j].ip, now[i].ip)) {
                now[i].ah = watchers[j].ah;
                watchers[j].ah = NULL;
            }
        struct ibv_ah_attr path = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid_of(now[i].ip), .hop_limit = 64}};
        if (!now[i].ah) now[i].ah = ibv_create_ah(e->pd, &path);
    }
    for (unsigned j = 0; j < *count; j++)
        if (watchers[j].ah) ibv_destroy_ah(watchers[j].ah);
    memcpy(watchers, now, sizeof now);
    *count = found;
}

static bool send_for_ever(char **words) {
    struct endpoint e = {0};
    struct watcher watchers[WATCHERS_MAX] = {0};
    unsigned count = 0, posted = 0, completed = 0;
    struct datagram datagram = {(uint32_t)atoi(words[1]), (uint32_t)atoi(words[2]), 0};
    if (!open_datagrams(&e)) return false;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
    if (ibv_modify_qp(e.qp, &attr, IBV_QP_STATE)) return false;
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = 1};
    if (ibv_modify_qp(e.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN)) return false;
    for (unsigned turn = 0;; turn++, sleep_ms(SEND_MS)) {
        if (turn % LOOK_TURNS == 0) look(&e, words[0], watchers, &count);
        datagram.number++;
        for (unsigned i = 0; i < count && posted - completed < SLOTS; i++) {
            size_t slot = posted % SLOTS;
            if (!watchers[i].ah) continue;
            memcpy(e.memory + slot * SLOT, &datagram, sizeof datagram);
            e.ah = watchers[i].ah;
            e.peer = (struct address){.qpn = watchers[i].qpn, .qkey = QKEY};
            if (post_send(&e, slot, slot * SLOT, sizeof datagram, 0)) return false;
            posted++;
        }
        struct ibv_wc wc[SLOTS];
        int done = ibv_poll_cq(e.send_cq, SLOTS, wc);
        for (int i = 0; i < done; i++)
            if (wc[i].status != IBV_WC_SUCCESS) return false;
        if (done < 0 || fd_readable(e.context->async_fd, 0)) return false;
        completed += (unsigned)done;
    }
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    struct sigaction action = {.sa_handler = on_term};
    sigaction(SIGTERM, &action, NULL);
    if (!strcmp(argv[1], "watch")) watch(argv + 2);
    else if (!strcmp(argv[1], "send")) send_for_ever(argv + 2);
    else return 2;
    again(argv);
}
