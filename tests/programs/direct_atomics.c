// Atomics of several processes on the same words, past the router and by it at the same time, while their right ends.
//
//   direct_atomics server PORT ROUNDS SEED | client HOST PORT ROUNDS SEED
//
// The client forks PROCESSES, every other one without the direct path. In each round every process has a new queue
// pair, adds to some words and swaps in another by COMPARE_SWAP; the server's verb ends that (`ends`), and others may
// end the grants alone before. Each atomic that was reported as done is in the words once the verb returns; nothing
// else is, then or later. (But when a queue pair ends, some of which its requester does not learn any more.)
//
// Clients spin and sleep by turns, and Linux 6.18 may then run their scheduling group alone for seconds, again and
// again: server and router stand still (LIMITATIONS, Performance). So they wait long.
#include "harness.h"
#include "must.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PROCESSES = 4, WORDS = 4, SWAPPED = WORDS - 1, DEPTH = 8, BYTES = 64 << 10, WAIT_MS = 60000 };
// Words of several pages, of which one is no multiple of a cache line.
static const uint64_t places[WORDS] = {0, 4096 + 8, 8192 + 64, 12288 + 4088};

struct report {
    uint64_t done[WORDS], failed[WORDS], status; // the last: of the first that failed
};

static uint64_t *word(const struct endpoint *e, unsigned index) { return (uint64_t *)(e->memory + places[index]); }

// ---- whose memory it is

static void deregister(struct endpoint *e) {
    must(!ibv_dereg_mr(e[0].mr));
    e[0].mr = NULL;
}

static void take_the_right(struct endpoint *e) {
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    must(!ibv_rereg_mr(e[0].mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, access));
}

static void to_error(struct endpoint *e) {
    for (int i = 0; i < PROCESSES; i++) must(qp_modify_state(e[i].qp, IBV_QPS_ERR));
}

static void destroy(struct endpoint *e) {
    for (int i = 0; i < PROCESSES; i++) {
        must(!ibv_destroy_qp(e[i].qp));
        e[i].qp = NULL;
    }
}

static const struct {
    void (*by)(struct endpoint *);
    bool is_exact;
} ends[] = {{deregister, true}, {take_the_right, true}, {to_error, false}, {destroy, false}};

static void connect_all(struct endpoint *e, struct side *sides) {
    for (int i = 0; i < PROCESSES; i++) {
        if (i) {
            struct ibv_qp_init_attr init = {.send_cq = e->send_cq, .recv_cq = e->recv_cq, .qp_type = IBV_QPT_RC,
                                            .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
            e[i] = e[0];
            must((e[i].qp = ibv_create_qp(e->pd, &init)));
            e[i].mine.qpn = e[i].qp->qp_num;
        }
        must(endpoint_connect(&sides[i], &e[i]));
    }
}

// Grants end, rights don't.
static void disturb(struct endpoint *e, uint64_t *random) {
    struct ibv_qp_attr attr = {.min_rnr_timer = 1};
    must(!ibv_modify_qp(e[random_next(random) % PROCESSES].qp, &attr, IBV_QP_MIN_RNR_TIMER));
}

static void round_of_server(struct side *sides, unsigned number, uint64_t *random) {
    static struct endpoint e[PROCESSES];
    struct report sum = {0}, report, none = {0};
    uint8_t *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t after[WORDS];
    must(memory != MAP_FAILED);
    memset(e, 0, sizeof e);
    must(endpoint_open(&e[0], &(struct options){.memory = memory, .bytes = BYTES}));
    connect_all(e, sides);
    for (int i = 0; i < PROCESSES; i++) must(meet(&sides[i]));
    usleep(4000 + random_next(random) % 8000);
    for (unsigned i = 0; i < number % 3; i++) {
        disturb(e, random);
        usleep(random_next(random) % 4000);
    }
    size_t end = number % (sizeof ends / sizeof *ends);
    ends[end].by(e);
    for (unsigned i = 0; i < WORDS; i++) after[i] = __atomic_load_n(word(e, i), __ATOMIC_SEQ_CST);
    for (int i = 0; i < PROCESSES; i++) {
        must(socket_swap(sides[i].sock, &none, &report, sizeof report));
        must(!ends[end].is_exact || report.status == IBV_WC_REM_ACCESS_ERR);
        for (unsigned at = 0; at < WORDS; at++) {
            sum.done[at] += report.done[at];
            sum.failed[at] += report.failed[at];
        }
    }
    for (unsigned i = 0; i < WORDS; i++) {
        uint64_t now = *word(e, i), most = sum.done[i] + (ends[end].is_exact ? 0 : sum.failed[i]);
        if (after[i] == now && sum.done[i] <= now && now <= most) continue;
        fprintf(stderr, "  round %u, word %u: %lu when the verb returned, %lu in the end, %lu done, %lu failed\n", number,
                i, (unsigned long)after[i], (unsigned long)now, (unsigned long)sum.done[i], (unsigned long)sum.failed[i]);
        exit(1);
    }
    for (int i = 1; i < PROCESSES; i++) must(!e[i].qp || !ibv_destroy_qp(e[i].qp));
    must(endpoint_close(&e[0]) && !munmap(memory, BYTES));
}

// ---- who does the atomics

struct atomic {
    unsigned at;
    uint64_t compare;
};

static int post(struct endpoint *e, unsigned slot, const struct atomic *atomic) {
    bool swaps = atomic->at == SWAPPED;
    struct ibv_sge sge = {(uintptr_t)e->memory + slot * 8, 8, e->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
                             .opcode = swaps ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD};
    wr.wr.atomic.remote_addr = e->peer.memory + places[atomic->at];
    wr.wr.atomic.rkey = e->peer.rkey;
    wr.wr.atomic.compare_add = swaps ? atomic->compare : 1;
    wr.wr.atomic.swap = swaps ? atomic->compare + 1 : 0;
    return post_work(e, &wr);
}

// Until one fails. Values that a word had only grow.
static void work(struct endpoint *e, struct report *report, uint64_t *random) {
    struct atomic atomics[DEPTH] = {0};
    uint64_t least[WORDS] = {0};
    unsigned posted = 0, polled = 0;
    struct ibv_wc wc;
    for (;;) {
        while (posted - polled < DEPTH) {
            struct atomic *next = &atomics[posted % DEPTH];
            *next = (struct atomic){.at = random_next(random) % WORDS, .compare = least[SWAPPED]};
            must(!post(e, posted++ % DEPTH, next));
        }
        must(poll_one(e->send_cq, &wc, WAIT_MS));
        must(wc.wr_id == polled++ % DEPTH);
        if (wc.status != IBV_WC_SUCCESS) break;
        const struct atomic *done = &atomics[wc.wr_id];
        bool swaps = done->at == SWAPPED;
        uint64_t before = ((volatile uint64_t *)e->memory)[wc.wr_id];
        must(wc.opcode == (swaps ? IBV_WC_COMP_SWAP : IBV_WC_FETCH_ADD) && wc.byte_len == 8);
        must(before >= least[done->at]);
        least[done->at] = before;
        if (swaps && before != done->compare) continue;
        report->done[done->at]++;
        least[done->at]++;
    }
    report->status = wc.status;
    for (unsigned failed = polled - 1; failed != posted; failed++) report->failed[atomics[failed % DEPTH].at]++;
    while (polled != posted) {
        must(poll_one(e->send_cq, &wc, WAIT_MS));
        must(wc.wr_id == polled++ % DEPTH && wc.status != IBV_WC_SUCCESS);
    }
}

static int client(const char *ip, int port, unsigned number, unsigned rounds, uint64_t seed) {
    struct side side = {ROLE_A, socket_connect(ip, port), "atomics", false};
    uint64_t random = seed + number;
    for (unsigned round = 0; round < rounds; round++) {
        struct endpoint e = {0};
        struct report report = {0}, none;
        must(endpoint_open(&e, &(struct options){.bytes = 4096, .send_wr = DEPTH}) && endpoint_connect(&side, &e));
        must(meet(&side));
        work(&e, &report, &random);
        must(socket_swap(side.sock, &report, &none, sizeof none) && endpoint_close(&e));
    }
    return 0;
}

static int clients(const char *ip, int port, unsigned rounds, uint64_t seed) {
    int failed = 0, status;
    for (unsigned i = 0; i < PROCESSES; i++) {
        pid_t pid = fork();
        must(pid >= 0);
        if (pid) continue;
        if (i % 2) setenv("FREEFLOW_DIRECT", "off", 1);
        exit(client(ip, port, i, rounds, seed));
    }
    while (wait(&status) > 0) failed += status != 0;
    return failed;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc == 5 && !strcmp(argv[1], "server")) {
        unsigned rounds = (unsigned)atoi(argv[3]);
        uint64_t random = strtoull(argv[4], NULL, 0);
        int listener = socket_listen(atoi(argv[2]));
        struct side sides[PROCESSES];
        for (int i = 0; i < PROCESSES; i++) sides[i] = (struct side){ROLE_B, socket_accept(listener), "atomics", false};
        for (unsigned round = 0; round < rounds; round++) round_of_server(sides, round, &random);
        printf("all atomics are there once\n");
        return 0;
    }
    if (argc == 6 && !strcmp(argv[1], "client"))
        return clients(argv[2], atoi(argv[3]), (unsigned)atoi(argv[4]), strtoull(argv[5], NULL, 0));
    fprintf(stderr, "usage: see the source\n");
    return 2;
}
