// A peer that is granted a block of another container's memory, and looks for whatever lies around it.
//
//   edges_peer server PORT PAGES | client HOST PORT PAGES
//
// Of so many pages. A small block is one whose registration moves nothing: many were registered before.
//
// The block begins and ends within a page, and everything beside it is secret. The client uses all of it until whole
// pages are granted to it, then reads every byte that its process has mapped of the router's segments: it must find the
// block, which shows that there is a grant, and no secret.
#include "harness.h"
#include "must.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, SMALL_PAGES = 16, SKIP = 1000, CHUNK = 16 << 10, ROUNDS = 200, TRIES = 400, REGISTRATIONS = 100, WAIT_MS = 20000 };
static size_t page_count, block_bytes;
// Made at run time, so that neither program has it in its constants.
static uint64_t words(unsigned which) { return 0x9e3779b97f4a7c15u * (which + 1) ^ (uint64_t)page_count << 56; }
static const unsigned SECRET = 1, PUBLIC = 2;

static void put_words(uint8_t *memory, size_t bytes, unsigned which) {
    uint64_t word = words(which);
    for (size_t at = 0; at < bytes; at += sizeof word) memcpy(memory + at, &word, sizeof word);
}

static bool are_words(const uint8_t *memory, size_t bytes, unsigned which) {
    uint64_t word = words(which);
    for (size_t at = 0; at < bytes; at += sizeof word)
        if (memcmp(memory + at, &word, sizeof word)) return false;
    return true;
}

static void register_often(void) {
    struct endpoint e = {0};
    must(endpoint_open(&e, &(struct options){.bytes = PAGE}));
    uint8_t *pages = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(pages != MAP_FAILED);
    for (int i = 0; i < REGISTRATIONS; i++) {
        struct ibv_mr *mr = ibv_reg_mr(e.pd, pages, PAGE, IBV_ACCESS_LOCAL_WRITE);
        must(mr && !ibv_dereg_mr(mr));
    }
    munmap(pages, PAGE);
    must(endpoint_close(&e));
}

static int server(int listener) {
    struct endpoint e = {0};
    struct side side = {ROLE_B, socket_accept(listener), "edges", false};
    uint8_t *pages = mmap(NULL, page_count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(pages != MAP_FAILED);
    put_words(pages, page_count * PAGE, SECRET);
    if (page_count <= SMALL_PAGES) register_often();
    must(endpoint_open(&e, &(struct options){.memory = pages + SKIP, .bytes = block_bytes}));
    put_words(pages + SKIP, block_bytes, PUBLIC);
    must(endpoint_connect(&side, &e) && meet(&side));
    must(meet(&side)); // it has looked
    must(endpoint_close(&e));
    must(are_words(pages, SKIP, SECRET) && are_words(pages + SKIP + block_bytes, SKIP, SECRET));
    must(are_words(pages + SKIP, block_bytes, PUBLIC));
    return 0;
}

// All of the block, chunk by chunk: read and written back.
static void use(struct endpoint *e, enum ibv_wr_opcode opcode) {
    for (size_t at = 0; at < block_bytes; at += CHUNK) {
        uint32_t bytes = block_bytes - at < CHUNK ? block_bytes - at : CHUNK;
        struct ibv_wc wc;
        must(!post_remote(e, opcode, 1, 0, bytes, at, 0) && poll_one(e->send_cq, &wc, WAIT_MS));
        must(wc.status == IBV_WC_SUCCESS && are_words(e->memory, bytes, PUBLIC));
    }
}

// Words in the mapped segments of the router's.
static void count(size_t *secrets, size_t *publics) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], rights[5], name[256];
    unsigned long start, end;
    must(maps);
    *secrets = *publics = 0;
    while (fgets(line, sizeof line, maps)) {
        name[0] = 0;
        if (sscanf(line, "%lx-%lx %4s %*s %*s %*s %255s", &start, &end, rights, name) < 4) continue;
        if (rights[0] != 'r' || rights[3] != 's' || !strstr(name, "memfd:freeflow")) continue;
        for (const uint8_t *at = (const uint8_t *)start; at < (const uint8_t *)end; at += sizeof(uint64_t)) {
            uint64_t word;
            memcpy(&word, at, sizeof word);
            *secrets += word == words(SECRET);
            *publics += word == words(PUBLIC);
        }
    }
    fclose(maps);
}

static int client(const char *ip, int port) {
    struct side side = {ROLE_A, socket_connect(ip, port), "edges", false};
    struct endpoint e = {0};
    must(endpoint_open(&e, &(struct options){.bytes = CHUNK}) && endpoint_connect(&side, &e) && meet(&side));
    size_t secrets, publics, wanted = (page_count - 2) * PAGE / sizeof(uint64_t);
    int tries = 0;
    // Where the server's threads could not be frozen, it is tried again after a second.
    for (;; tries++) {
        for (int round = 0; round < (tries ? 1 : ROUNDS); round++) {
            use(&e, IBV_WR_RDMA_READ);
            use(&e, IBV_WR_RDMA_WRITE);
        }
        // Its own buffer goes.
        memset(e.memory, 0, CHUNK);
        count(&secrets, &publics);
        must(secrets == 0);
        if (publics >= wanted || tries == TRIES) break;
        usleep(WAIT_MS * 1000 / TRIES);
    }
    printf("%zu words of the block, granted %s\n", publics, tries ? "after a while" : "at once");
    must(publics >= wanted);
    for (int round = 0; round < ROUNDS; round++) use(&e, IBV_WR_RDMA_READ);
    must(meet(&side));
    must(endpoint_close(&e));
    return 0;
}

int main(int argc, char **argv) {
    page_count = argc > 3 ? (size_t)atoi(argv[argc - 1]) : 0;
    block_bytes = page_count * PAGE - 2 * SKIP;
    if (page_count < 3) return 2;
    if (argc == 4 && !strcmp(argv[1], "server")) return server(socket_listen(atoi(argv[2])));
    if (argc == 5 && !strcmp(argv[1], "client")) return client(argv[2], atoi(argv[3]));
    return 2;
}
