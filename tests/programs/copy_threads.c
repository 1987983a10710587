// Large messages while the memory they go from and to comes and goes: what was deregistered is not touched any more.
//
//   copy_threads SEED SECONDS server PORT | client HOST PORT
//
// In each round both ends make an endpoint again and do one of KINDS; the client's requests are long,
// so that copies are under way when memory goes. Exit 0: all was right.
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MIB = 1 << 20, BYTES = 4 * MIB, DEPTH = 4, WAIT_MS = 20000 };
enum { DATA, WRITTEN_GOES, READ_GOES, SOURCE_GOES, REREGISTERED, KINDS };
enum { BEFORE = 0x11, AFTER = 0x22, OTHER = 0x33 };
static const char *const names[KINDS] = {"data", "target deregistered", "READ deregistered", "source deregistered",
                                         "re-registered"};

static bool all_are(const uint8_t *memory, size_t bytes, uint8_t one, uint8_t other) {
    for (size_t at = 0; at < bytes; at++)
        if (memory[at] != one && memory[at] != other) return false;
    return true;
}

static bool is_end(enum ibv_wc_status status) {
    return status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_LOC_PROT_ERR || status == IBV_WC_WR_FLUSH_ERR;
}

static void deregister(struct side *side, struct endpoint *e) {
    need(side, ibv_dereg_mr(e->mr) == 0);
    e->mr = NULL;
}

// WRITE, READ and SEND, each compared.
static void data(struct side *side, struct endpoint *e, uint64_t seed) {
    uint32_t sent = MIB / 2 + (uint32_t)(seed % 5000), length = MIB - (uint32_t)(seed % 777);
    bool begins = side->role == ROLE_A;
    fill(e->memory, MIB, begins ? seed : seed + 1);
    if (!begins) need(side, post_recv(e, 9, 3 * MIB, MIB) == 0);
    need(side, meet(side));
    struct ibv_wc wc;
    if (begins) {
        need(side, post_remote(e, IBV_WR_RDMA_READ, 1, 2 * MIB, length, 0, 0) == 0);
        need(side, post_remote(e, IBV_WR_RDMA_WRITE, 2, 0, length, MIB, 0) == 0);
        need(side, post_send(e, 3, 0, sent, 0) == 0);
        for (uint64_t id = 1; id <= 3; id++) {
            need(side, poll_one(e->send_cq, &wc, WAIT_MS));
            need_status(side, wc, IBV_WC_SUCCESS);
            need(side, wc.wr_id == id);
        }
        need(side, holds(e->memory + 2 * MIB, length, seed + 1));
    } else {
        need(side, poll_one(e->recv_cq, &wc, WAIT_MS));
        need_status(side, wc, IBV_WC_SUCCESS);
        need(side, wc.byte_len == sent && holds(e->memory + 3 * MIB, sent, seed));
    }
    need(side, meet(side));
    if (!begins) need(side, holds(e->memory + MIB, length, seed));
}

// Posts one after the other until memory is gone somewhere. `checked`: what a successful READ has to bring.
static void stream(struct side *side, struct endpoint *e, enum ibv_wr_opcode opcode, uint64_t checked) {
    struct ibv_wc wc = {.status = IBV_WC_SUCCESS};
    uint64_t posted = 0, done = 0;
    for (uint64_t begin = now_ns(); wc.status == IBV_WC_SUCCESS;) {
        need(side, now_ns() - begin < WAIT_MS * 1000000ull);
        for (; posted < done + DEPTH; posted++)
            need(side, post_remote(e, opcode, posted, posted % DEPTH * MIB, MIB, 0, 0) == 0);
        need(side, poll_one(e->send_cq, &wc, WAIT_MS));
        if (wc.status == IBV_WC_SUCCESS && checked)
            need(side, holds(e->memory + done % DEPTH * MIB, MIB, checked));
        done++;
    }
    if (!is_end(wc.status)) need_status(side, wc, IBV_WC_REM_ACCESS_ERR);
    for (; done < posted; done++) need(side, poll_one(e->send_cq, &wc, WAIT_MS) && wc.status == IBV_WC_WR_FLUSH_ERR);
}

static void target_goes(struct side *side, struct endpoint *e, uint64_t seed, bool reads) {
    bool begins = side->role == ROLE_A;
    if (begins || !reads) memset(e->memory, BEFORE, BYTES);
    else fill(e->memory, MIB, seed | 1);
    need(side, meet(side));
    if (begins) return stream(side, e, reads ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, reads ? seed | 1 : 0);
    usleep(seed % 3000);
    deregister(side, e);
    memset(e->memory, AFTER, BYTES);
    usleep(2000);
    need(side, all_are(e->memory, BYTES, AFTER, AFTER));
}

static void source_goes(struct side *side, struct endpoint *e, uint64_t seed) {
    bool begins = side->role == ROLE_A;
    memset(e->memory, begins ? BEFORE : OTHER, BYTES);
    need(side, meet(side));
    if (begins) {
        for (uint64_t id = 0; id < DEPTH; id++)
            need(side, post_remote(e, IBV_WR_RDMA_WRITE, id, id * MIB, MIB, id * MIB, 0) == 0);
        usleep(seed % 300);
        deregister(side, e);
        memset(e->memory, AFTER, BYTES);
        struct ibv_wc wc;
        for (uint64_t id = 0; id < DEPTH; id++) {
            need(side, poll_one(e->send_cq, &wc, WAIT_MS));
            need(side, wc.status == IBV_WC_SUCCESS || is_end(wc.status));
        }
    }
    need(side, meet(side));
    if (!begins) need(side, all_are(e->memory, BYTES, BEFORE, OTHER));
}

// Of some rounds on demand: then the slow path makes the copies, as it does whenever a copy thread can't.
static int rights_of_round(uint64_t seed) {
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    return seed & 128 ? access | IBV_ACCESS_ON_DEMAND : access;
}

// The same rights again: nobody may notice.
static void reregistered(struct side *side, struct endpoint *e, uint64_t seed) {
    int access = rights_of_round(seed);
    bool begins = side->role == ROLE_A;
    fill(e->memory, begins ? BYTES : 1, seed);
    need(side, meet(side));
    for (uint64_t id = 0; begins && id < 6; id++) {
        struct ibv_wc wc;
        need(side, post_remote(e, IBV_WR_RDMA_WRITE, id, 0, BYTES, 0, 0) == 0);
        need(side, poll_one(e->send_cq, &wc, WAIT_MS));
        need_status(side, wc, IBV_WC_SUCCESS);
    }
    for (int i = 0; !begins && i < 20; i++)
        need(side, ibv_rereg_mr(e->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, access) == 0);
    need(side, meet(side));
    if (!begins) need(side, holds(e->memory, BYTES, seed));
}

static void one_round(struct side *side, uint64_t seed, unsigned kind) {
    void *memory = NULL;
    bool shared = seed & 64;
    if (!shared) {
        memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        need(side, memory != MAP_FAILED);
    }
    struct endpoint e = {0};
    struct options options = {.bytes = BYTES, .memory = memory, .shared_memory = shared};
    if (kind == REREGISTERED) options.mr_access = rights_of_round(seed);
    need(side, endpoint_open(&e, &options) && endpoint_to_init(&e) && endpoint_connect(side, &e));
    switch (kind) {
    case DATA: data(side, &e, seed); break;
    case WRITTEN_GOES: target_goes(side, &e, seed, false); break;
    case READ_GOES: target_goes(side, &e, seed, true); break;
    case SOURCE_GOES: source_goes(side, &e, seed); break;
    case REREGISTERED: reregistered(side, &e, seed); break;
    }
    if (side->failed) return;
    need(side, meet(side));
    need(side, endpoint_close(&e));
    if (memory) munmap(memory, BYTES);
}

int main(int argc, char **argv) {
    bool server = argc == 5 && !strcmp(argv[3], "server"), client = argc == 6 && !strcmp(argv[3], "client");
    if (!server && !client) return 2;
    uint64_t random = strtoull(argv[1], NULL, 0), begin = now_ns();
    unsigned seconds = (unsigned)atoi(argv[2]), counts[KINDS] = {0};
    int port = atoi(argv[server ? 4 : 5]), sock = server ? socket_accept(socket_listen(port)) : socket_connect(argv[4], port);
    if (sock < 0) return 1;
    struct side side = {server ? ROLE_B : ROLE_A, sock, "copy_threads", false};
    for (bool more = true; more;) {
        uint64_t seed = random_next(&random);
        unsigned kind = (unsigned)(seed >> 32) % KINDS;
        side.test = names[kind];
        one_round(&side, seed, kind);
        if (side.failed) {
            fprintf(stderr, "  in round %lu of kind \"%s\"\n", (unsigned long)seed, names[kind]);
            return 1;
        }
        counts[kind]++;
        bool mine = now_ns() - begin < seconds * 1000000000ull, theirs;
        if (!socket_swap(sock, &mine, &theirs, sizeof mine)) return 1;
        more = mine && theirs;
    }
    for (unsigned kind = 0; kind < KINDS; kind++) printf("%u %s%s", counts[kind], names[kind], kind + 1 < KINDS ? ", " : "\n");
    return 0;
}
