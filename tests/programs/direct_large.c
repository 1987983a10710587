// A large region, to which many processes WRITE a little everywhere and much at one place, and leave one after the
// other.
//
//   direct_large server PORT CLIENTS | client HOST PORT CLIENTS
//
// The server checks that no WRITE was lost, and prints what its process copied while they left: its page faults.
#include "harness.h"
#include "must.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, CHUNKS = 64, CLIENTS_MAX = 64, ROUNDS = 8, BLOCK = 64 << 10, BLOCKS = 512, WAIT_MS = 20000 };
// The region begins at no multiple of a chunk. Each client has its page in each chunk, and its block in one.
static const uint64_t CHUNK = 16ull << 20, BYTES = CHUNKS * (16ull << 20), BLOCK_AT = 8ull << 20;

// The process, and its last writes: in each chunk, and of its blocks.
struct report {
    uint64_t words[CHUNKS], block, number;
};

static uint64_t word_at(unsigned client, unsigned chunk) { return chunk * CHUNK + (client + 1) * PAGE; }

static uint64_t block_at(unsigned client) { return client % CHUNKS * CHUNK + BLOCK_AT; }

// ---- the owner

static uint64_t faults(void) {
    struct rusage usage;
    must(!getrusage(RUSAGE_SELF, &usage));
    return (uint64_t)usage.ru_minflt;
}

static void accept_client(struct endpoint *e, const struct endpoint *first, struct side *side, int listener) {
    *side = (struct side){ROLE_B, socket_accept(listener), "large", false};
    if (e != first) {
        struct ibv_qp_init_attr init = {.send_cq = first->send_cq, .recv_cq = first->recv_cq, .qp_type = IBV_QPT_RC,
                                        .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
        *e = *first;
        must((e->qp = ibv_create_qp(e->pd, &init)));
        e->mine.qpn = e->qp->qp_num;
    }
    must(endpoint_connect(side, e));
}

static void check(const uint8_t *memory, const struct report *report) {
    unsigned client = (unsigned)report->number;
    for (unsigned chunk = 0; chunk < CHUNKS; chunk++)
        must(*(const volatile uint64_t *)(memory + word_at(client, chunk)) == report->words[chunk]);
    must(holds(memory + block_at(client), BLOCK, report->block));
}

static int server(int listener, unsigned clients) {
    static struct endpoint e[CLIENTS_MAX];
    static struct side sides[CLIENTS_MAX];
    static struct report reports[CLIENTS_MAX], none;
    uint64_t copied = 0;
    uint8_t *room = mmap(NULL, BYTES + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    must(room != MAP_FAILED);
    uint8_t *memory = room + PAGE;
    must(endpoint_open(&e[0], &(struct options){.memory = memory, .bytes = BYTES}));
    for (unsigned i = 0; i < clients; i++) accept_client(&e[i], &e[0], &sides[i], listener);
    for (unsigned i = 0; i < clients; i++) must(meet(&sides[i]));
    for (unsigned i = 0; i < clients; i++) must(meet(&sides[i])); // all have written
    for (unsigned i = 0; i < clients; i++) {
        uint64_t before = faults();
        must(socket_swap(sides[i].sock, &none, &reports[i], sizeof none));
        must(!ibv_destroy_qp(e[i].qp)); // and the others go on
        copied += (faults() - before) * PAGE;
        check(memory, &reports[i]);
    }
    e[0].qp = NULL;
    must(endpoint_close(&e[0]));
    // The contents stay, also when all is private again.
    for (unsigned i = 0; i < clients; i++) check(memory, &reports[i]);
    printf("copied %lu\n", (unsigned long)copied);
    return 0;
}

// ---- its peers

static void put(struct endpoint *e, uint32_t bytes, uint64_t at) {
    struct ibv_wc wc;
    must(!post_remote(e, IBV_WR_RDMA_WRITE, 1, 0, bytes, at, 0) && poll_one(e->send_cq, &wc, WAIT_MS));
    must(wc.status == IBV_WC_SUCCESS);
}

static void put_word(struct endpoint *e, struct report *report, unsigned client, unsigned chunk) {
    uint64_t word = (report->words[chunk] + 1) | (uint64_t)(client + 1) << 32;
    memcpy(e->memory, &word, sizeof word);
    put(e, sizeof word, word_at(client, chunk));
    report->words[chunk] = word;
}

static void put_block(struct endpoint *e, struct report *report, unsigned client) {
    fill(e->memory, BLOCK, report->block += CLIENTS_MAX);
    put(e, BLOCK, block_at(client));
}

static int client(const char *ip, int port, unsigned number) {
    struct side side = {ROLE_A, socket_connect(ip, port), "large", false};
    struct endpoint e = {0};
    struct report report = {.block = number + 1, .number = number}, none;
    must(endpoint_open(&e, &(struct options){.bytes = BLOCK}) && endpoint_connect(&side, &e) && meet(&side));
    // Each begins elsewhere.
    for (unsigned i = 0; i < ROUNDS * CHUNKS; i++) put_word(&e, &report, number, (i * 5 + number * 7) % CHUNKS);
    for (unsigned i = 0; i < BLOCKS; i++) put_block(&e, &report, number);
    must(meet(&side));
    for (unsigned i = 0; !fd_readable(side.sock, 1); i++) {
        put_word(&e, &report, number, i % CHUNKS);
        put_block(&e, &report, number);
    }
    must(socket_swap(side.sock, &report, &none, sizeof none));
    must(endpoint_close(&e));
    return 0;
}

static int clients_of(const char *ip, int port, unsigned clients) {
    int failed = 0;
    for (unsigned i = 0; i < clients; i++) {
        pid_t pid = fork();
        must(pid >= 0);
        if (pid == 0) exit(client(ip, port, i));
    }
    for (int status; wait(&status) > 0;) failed += status != 0;
    return failed != 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && !strcmp(argv[1], "server")) return server(socket_listen(atoi(argv[2])), (unsigned)atoi(argv[3]));
    if (argc == 5 && !strcmp(argv[1], "client")) return clients_of(argv[2], atoi(argv[3]), (unsigned)atoi(argv[4]));
    return 2;
}
