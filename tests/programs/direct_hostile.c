// Peers that were granted memory, and what they can do to it when the right is over: nothing.
//
//   direct_hostile owner CASE PORT                   an ordinary program over the drop-in, whose memory it is
//   direct_hostile attacker CASE IP PORT COLLUDER    speaks with the router by hand, and keeps all that it ever got
//   direct_hostile colluder PATH                     in a third container: gets the descriptor from the attacker
//   direct_hostile stranger IP QPN RKEY ADDRESS      asks for memory of an owner who is connected with somebody else
//   direct_hostile silent PORT MS                    an owner that does not carry out commands, for which it has so
//                                                    long
//   direct_hostile churn PORT SECONDS                an owner with an attacker and an honest peer, by two connections
//   direct_hostile honest IP PORT                    the honest peer of `churn`: WRITEs that are read back
//
// CASE says how the right ends (`ends`; `entered`: while the attacker says that it does an atomic), or is
// `read-only`, `refusals` or `no-access`. Both ends keep step by `swap`.
#define _GNU_SOURCE
#include "by_hand.h"
#include "direct_attack.h"
#include "harness.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BOUND_MS = 5000, ROUNDS = 2, READ_ONLY = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ };
#define FROM_OWNER 0x1111222233334444ull

#define must(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) die(__LINE__, #condition);                                                                   \
    } while (0)

static const char *role;

_Noreturn static void die(int line, const char *what) {
    fprintf(stderr, "  %s, line %d: %s (errno %s)\n", role, line, what, strerror(errno));
    exit(1);
}

// The other end's number for this one's: they are at the same step.
static uint64_t swap(int sock, uint64_t mine) {
    uint64_t theirs = 0;
    must(socket_swap(sock, &mine, &theirs, sizeof theirs));
    return theirs;
}

static union ibv_gid own_gid(int sock) {
    union ibv_gid gid = {.raw = {[10] = 0xff, [11] = 0xff}};
    struct sockaddr_in address = {0};
    socklen_t length = sizeof address;
    must(!getsockname(sock, (struct sockaddr *)&address, &length));
    memcpy(gid.raw + 12, &address.sin_addr, 4);
    return gid;
}

// ---- the owner's memory

static bool is(const char *name, const char *other) { return !strcmp(name, other); }

static uint8_t *fresh_pages(void) {
    uint8_t *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(memory != MAP_FAILED);
    memset(memory, 0, BYTES);
    return memory;
}

// How many of its bytes others can be given, by the process' own map: in one file, by its inode, or (0) in any. `last`:
// such a file.
static size_t shared_bytes_of(const uint8_t *memory, unsigned long file, unsigned long *last) {
    uint64_t from = (uintptr_t)memory, to = from + BYTES, start, end;
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[600], rights[5];
    unsigned long inode;
    size_t found = 0;
    must(maps);
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %4s %*s %*s %lu", &start, &end, rights, &inode) == 4 && rights[3] == 's' && start < to &&
            end > from && (!file || inode == file)) {
            found += (end < to ? end : to) - (start > from ? start : from);
            if (last) *last = inode;
        }
    fclose(maps);
    return found;
}

static size_t shared_bytes(const uint8_t *memory) { return shared_bytes_of(memory, 0, NULL); }

// Counts in the first word of every page, all the time, and finds each count as it left it.
struct keeper {
    uint8_t *memory;
    uint64_t counts[PAGES], rounds;
    unsigned lost;
    bool shall_stop;
    pthread_t thread;
};

static void *keep(void *argument) {
    struct keeper *keeper = argument;
    while (!__atomic_load_n(&keeper->shall_stop, __ATOMIC_RELAXED)) {
        for (int page = 0; page < PAGES; page++) {
            volatile uint64_t *word = (volatile uint64_t *)(keeper->memory + page * PAGE);
            keeper->lost += *word != keeper->counts[page];
            *word = ++keeper->counts[page];
        }
        __atomic_store_n(&keeper->rounds, keeper->rounds + 1, __ATOMIC_RELAXED);
        if (keeper->rounds % 256 == 0) sched_yield();
    }
    return NULL;
}

static void keeper_start(struct keeper *keeper, uint8_t *memory) {
    *keeper = (struct keeper){.memory = memory};
    for (int page = 0; page < PAGES; page++) memcpy(&keeper->counts[page], memory + page * PAGE, 8);
    must(!pthread_create(&keeper->thread, NULL, keep, keeper));
    while (!__atomic_load_n(&keeper->rounds, __ATOMIC_RELAXED)) sched_yield();
}

static void keeper_stop(struct keeper *keeper) {
    __atomic_store_n(&keeper->shall_stop, true, __ATOMIC_RELAXED);
    pthread_join(keeper->thread, NULL);
    for (int page = 0; page < PAGES; page++)
        keeper->lost += memcmp(keeper->memory + page * PAGE, &keeper->counts[page], 8) != 0;
    if (keeper->lost) fprintf(stderr, "  %u of %lu rounds' counts lost\n", keeper->lost, (unsigned long)keeper->rounds);
    must(keeper->lost == 0);
}

// All words but the counters.
static void write_all(uint8_t *memory, uint64_t word) {
    for (size_t at = 0; at < BYTES; at += 8)
        if (at % PAGE) *(volatile uint64_t *)(memory + at) = word;
}

static bool has_all(const uint8_t *memory, uint64_t word) {
    for (size_t at = 0; at < BYTES; at += 8) {
        uint64_t found = *(const volatile uint64_t *)(memory + at);
        if (at % PAGE == 0 || found == word) continue;
        fprintf(stderr, "  page %zu, byte %zu: %lx instead of %lx\n", at / PAGE, at % PAGE, found, word);
        return false;
    }
    return true;
}

static uint64_t next_secret(void) {
    static uint64_t secret = 0xfeed000000000000u;
    return ++secret;
}

// New words in all the memory; the enemies do their worst; the words must stand.
static void stand(uint8_t *memory, int sock) {
    uint64_t secret = next_secret();
    write_all(memory, secret);
    swap(sock, secret);
    must(has_all(memory, secret));
    must(swap(sock, 0) == 0);
    must(has_all(memory, secret));
}

// ---- the ways in which a right ends

static void dereg(struct endpoint *e) {
    must(!ibv_dereg_mr(e->mr));
    e->mr = NULL;
}

static void rereg(struct endpoint *e) { must(!ibv_rereg_mr(e->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, READ_ONLY)); }

static void to_error(struct endpoint *e) { must(qp_modify_state(e->qp, IBV_QPS_ERR)); }

static void destroy(struct endpoint *e) {
    must(!ibv_destroy_qp(e->qp));
    e->qp = NULL;
}

static const struct end {
    const char *name;
    void (*by_owner)(struct endpoint *e); // else the attacker does it, or whoever started both
} ends[] = {{"dereg", dereg},           {"rereg", rereg},        {"qp-error", to_error}, {"qp-destroy", destroy},
            {"peer-destroy", NULL},     {"peer-close", NULL},    {"policy", NULL},       {"read-only", dereg},
            {"entered", dereg},         {"entered-qp", to_error}};

static const struct end *find_end(const char *name) {
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (is(ends[i].name, name)) return &ends[i];
    must(!"a known case");
    return NULL;
}

// Milliseconds until nothing is shared any more.
static unsigned until_private(const uint8_t *memory) {
    uint64_t begin = now_ns();
    while (shared_bytes(memory)) {
        must(now_ns() - begin < BOUND_MS * 1000000ull);
        usleep(200);
    }
    return (unsigned)((now_ns() - begin) / 1000000u);
}

static void open_owner(struct endpoint *e, struct side *side, const struct options *options) {
    must(endpoint_open(e, options) && endpoint_connect(side, e));
}

static int owner(const char *name, int listener) {
    const struct end *end = find_end(name);
    struct side side = {ROLE_B, socket_accept(listener), name, false};
    struct endpoint e = {0};
    struct keeper keeper;
    uint8_t *memory = fresh_pages();
    bool read_only = is(name, "read-only");
    open_owner(&e, &side, &(struct options){.memory = memory, .bytes = BYTES, .mr_access = read_only ? READ_ONLY : 0});
    must(shared_bytes(memory) == BYTES);
    write_all(memory, FROM_OWNER);
    keeper_start(&keeper, memory);
    swap(side.sock, 0);
    must(swap(side.sock, 0) == FROM_OWNER); // they have what they want, and have written
    for (int page = 0; page < PAGES && !read_only; page++) {
        must(*(volatile uint64_t *)(memory + page * PAGE + ATTACKER_AT) != FROM_OWNER);
        must(*(volatile uint64_t *)(memory + page * PAGE + COLLUDER_AT) != FROM_OWNER);
    }
    if (read_only) stand(memory, side.sock);
    swap(side.sock, 0); // they write all the time
    printf("granted\n");
    uint64_t begin = now_ns();
    if (end->by_owner) end->by_owner(&e);
    must(!end->by_owner || !shared_bytes(memory)); // its own verb returns when that is done
    // Not before the one who says that it does an atomic is expelled, and no longer.
    uint64_t took = now_ns() - begin;
    bool in_time = took >= 1500000000u && took < 10000000000u;
    if (!strncmp(name, "entered", 7) && !in_time) fprintf(stderr, "  its verb took %lu ms\n", took / 1000000);
    must(strncmp(name, "entered", 7) || in_time);
    unsigned ms = until_private(memory);
    for (int round = 0; round < ROUNDS; round++) stand(memory, side.sock);
    swap(side.sock, 0); // they have asked once more
    keeper_stop(&keeper);
    must(endpoint_close(&e));
    stand(memory, side.sock);
    printf("taken back after %u ms, %lu rounds of counters, none lost\n", ms, keeper.rounds);
    return 0;
}

// ---- the attacker

struct attack {
    struct by_hand hand;
    struct address mine, peer;
    int sock, colluder;
    struct booty booty;
};

static void connect_by_hand(struct attack *a, int sock) {
    a->sock = sock;
    must(by_hand_open(&a->hand) && by_hand_create_qp(&a->hand));
    a->mine = (struct address){.qpn = a->hand.qpn, .gid = own_gid(sock)};
    must(socket_swap(sock, &a->mine, &a->peer, sizeof a->mine));
    must(by_hand_connect_qp(&a->hand, &a->peer.gid, a->peer.qpn));
    struct side side = {ROLE_A, sock, "by hand", false};
    must(meet(&side));
}

static enum answer ask(struct attack *a, unsigned access, struct granted *granted) {
    return by_hand_ask_grant(&a->hand, a->peer.rkey, a->peer.memory + 8, 16, access, granted);
}

static void take_booty(struct attack *a, bool writes) {
    struct granted granted;
    must(ask(a, writes, &granted) == GOOD);
    must(granted.fd >= 0 && granted.writable == writes && granted.address == a->peer.memory && granted.length == BYTES);
    must(granted.offset == 0 && granted.bytes >= BYTES);
    a->booty.at = writes ? ATTACKER_AT : 0;
    must(booty_map(&a->booty, granted.fd, granted.bytes, writes));
    must(sees(&a->booty, FROM_OWNER));
    must(!booty_reseal(&a->booty));
}

// The owner has written; what comes of all attempts.
static struct outcome attempt(struct attack *a) {
    uint64_t secret = swap(a->sock, 0);
    struct outcome outcome = booty_try_all(&a->booty, secret);
    outcome = outcome_sum(outcome, colluder_try(a->colluder, secret));
    return outcome;
}

static void attempt_in_vain(struct attack *a) {
    struct outcome outcome = attempt(a);
    if (outcome.seen || outcome.resealed)
        fprintf(stderr, "  new words were seen %u times, seals gave way %u times\n", outcome.seen, outcome.resealed);
    swap(a->sock, outcome.seen || outcome.resealed);
    must(!outcome.seen && !outcome.resealed);
}

// While the right lasts: everything is to be seen, nothing to be changed.
static void only_read(struct attack *a) {
    must(ask(a, true, NULL) == NOT_SUPPORTED);
    struct outcome outcome = attempt(a);
    bool good = outcome.seen == 2 && !outcome.resealed && !outcome.written && outcome.refused >= 10;
    if (!good)
        fprintf(stderr, "  read-only: %u saw, %u seals gave way, %u ways to write, %u refusals\n", outcome.seen,
                outcome.resealed, outcome.written, outcome.refused);
    swap(a->sock, !good);
    must(good);
}

// Says all the time that it does an atomic by the grants that it had first.
static void *stay(void *argument) {
    struct by_hand *hand = argument;
    uint64_t inside = INSIDE | *(volatile uint32_t *)(hand->rings + GRANTS_REVOKED);
    for (;;) {
        __atomic_store_n((uint64_t *)(hand->rings + ENTERED), inside, __ATOMIC_SEQ_CST);
        sched_yield();
    }
    return NULL;
}

static int attacker(const char *name, const char *ip, int port, const char *path) {
    struct attack a = {0};
    bool read_only = is(name, "read-only");
    connect_by_hand(&a, socket_connect(ip, port));
    if (read_only) must(ask(&a, true, NULL) == NOT_SUPPORTED);
    swap(a.sock, 0);
    take_booty(&a, !read_only);
    must((a.colluder = colluder_meet(path)) >= 0 && colluder_give(a.colluder, &a.booty));
    if (!read_only) booty_hammer(&a.booty);
    pthread_t staying;
    if (!strncmp(name, "entered", 7)) {
        must(!pthread_create(&staying, NULL, stay, &a.hand));
        while (!(__atomic_load_n((uint64_t *)(a.hand.rings + ENTERED), __ATOMIC_ACQUIRE) & INSIDE)) usleep(100);
    }
    for (int page = 0; page < PAGES && !read_only; page++)
        *(volatile uint64_t *)(a.booty.memory + page * PAGE + ATTACKER_AT) = 1;
    swap(a.sock, *(volatile uint64_t *)(a.booty.memory + OWNER_AT));
    if (read_only) only_read(&a);
    swap(a.sock, 0);
    if (is(name, "peer-destroy")) must(by_hand_destroy_qp(&a.hand) == GOOD);
    if (is(name, "peer-close")) close(a.hand.sock);
    for (int round = 0; round < ROUNDS; round++) attempt_in_vain(&a);
    if (!is(name, "peer-close")) must(ask(&a, !read_only, NULL) != GOOD);
    swap(a.sock, 0);
    attempt_in_vain(&a);
    booty_stop(&a.booty);
    return 0;
}

// ---- what is refused

struct more {
    uint64_t other_memory;
    uint32_t other_rkey, foreign_rkey;
};

static int owner_refuses(const char *name, int listener) {
    struct side side = {ROLE_B, socket_accept(listener), name, false};
    struct endpoint e = {0};
    uint8_t *memory = fresh_pages(), *other_memory = fresh_pages();
    int access = is(name, "no-access") ? NEVER_ACCESS : 0;
    open_owner(&e, &side, &(struct options){.memory = memory, .bytes = BYTES, .qp_access = access});
    struct ibv_pd *pd = ibv_alloc_pd(e.context);
    const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    struct ibv_mr *other = ibv_reg_mr(e.pd, other_memory, BYTES, all), *foreign = ibv_reg_mr(pd, memory, BYTES, all);
    must(pd && other && foreign);
    struct more more = {(uintptr_t)other_memory, other->rkey, foreign->rkey}, none;
    printf("ready %u %u %lu\n", e.mine.qpn, e.mine.rkey, (unsigned long)e.mine.memory);
    must(socket_swap(side.sock, &more, &none, sizeof more));
    must(swap(side.sock, 0) == 0);
    must(shared_bytes(memory) == BYTES); // nobody got anything, so nothing was to be taken back
    must(!ibv_dereg_mr(other) && !ibv_dereg_mr(foreign) && !ibv_dealloc_pd(pd));
    must(endpoint_close(&e));
    return 0;
}

static int attacker_is_refused(const char *name, const char *ip, int port) {
    struct attack a = {0};
    struct more none = {0}, more;
    connect_by_hand(&a, socket_connect(ip, port));
    must(socket_swap(a.sock, &none, &more, sizeof more));
    const uint64_t at = a.peer.memory;
    const uint32_t key = a.peer.rkey;
    const struct {
        uint32_t rkey;
        uint64_t address;
        uint32_t length;
    } wishes[] = {{key ^ 1, at, 8},         {key ^ 0x100, at, 8},         {0, at, 8},
                  {~0u, at, 8},             {key, more.other_memory, 8},  {more.other_rkey, at, 8},
                  {more.foreign_rkey, at, 8}, {key, at - 8, 8},           {key, at + BYTES, 8},
                  {key, at + BYTES - 4, 8}, {key, at, BYTES + 1},         {key, at, ~0u},
                  {key, ~7ull, 16},         {key, at, 0},                 {key, 0, 8}};
    unsigned refused = 0;
    for (size_t i = 0; i < sizeof wishes / sizeof *wishes; i++)
        for (unsigned access = 0; access < GRANT_KINDS; access++, refused++)
            must(by_hand_ask_grant(&a.hand, wishes[i].rkey, wishes[i].address, wishes[i].length, access, NULL) == NOT_SUPPORTED);
    if (is(name, "no-access"))
        for (unsigned access = 0; access < GRANT_KINDS; access++, refused++) must(ask(&a, access, NULL) == NOT_SUPPORTED);
    // A second QP at the same peer, which is not connected with it; one at a QP that there is not; one not connected.
    const uint32_t qpns[] = {a.peer.qpn, a.peer.qpn ^ 0x5555, 0};
    for (int i = 0; i < 3; i++, refused++) {
        must(by_hand_create_qp(&a.hand));
        if (qpns[i]) must(by_hand_connect_qp(&a.hand, &a.peer.gid, qpns[i]));
        must(ask(&a, true, NULL) == BUSY);
    }
    swap(a.sock, 0);
    printf("%u wishes refused\n", refused);
    return 0;
}

static int stranger(char **words) {
    struct attack a = {.peer = {.qpn = (uint32_t)strtoul(words[1], NULL, 0),
                                .rkey = (uint32_t)strtoul(words[2], NULL, 0),
                                .memory = strtoull(words[3], NULL, 0),
                                .gid = {.raw = {[10] = 0xff, [11] = 0xff}}}};
    must(inet_pton(AF_INET, words[0], a.peer.gid.raw + 12) == 1);
    must(by_hand_open(&a.hand) && by_hand_create_qp(&a.hand));
    must(by_hand_connect_qp(&a.hand, &a.peer.gid, a.peer.qpn));
    must(ask(&a, true, NULL) == BUSY && ask(&a, false, NULL) == BUSY);
    return 0;
}

// ---- an owner that does not do what it is asked

static int silent(int listener, int revocation_ms) {
    struct by_hand hand = {0}, again = {0};
    struct address mine, peer;
    uint64_t segment;
    int fd, commands, sock = socket_accept(listener);
    uint32_t command[2] = {0};
    must(by_hand_open(&hand) && by_hand_create_qp(&hand));
    must(by_hand_create_segment(&hand, BYTES, &segment, &fd) == GOOD);
    void *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    must(memory != MAP_FAILED && by_hand_map_part(&hand, segment, memory, BYTES) == GOOD);
    write_all(memory, FROM_OWNER);
    mine = (struct address){.qpn = hand.qpn, .memory = (uintptr_t)memory, .bytes = BYTES, .gid = own_gid(sock)};
    const unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    must(by_hand_register(&hand, memory, BYTES, access, &mine.rkey) == GOOD);
    must(socket_swap(sock, &mine, &peer, sizeof mine));
    must(by_hand_connect_qp(&hand, &peer.gid, peer.qpn));
    struct side side = {ROLE_B, sock, "silent", false};
    must(meet(&side));
    must(swap(sock, 0) == NOT_SUPPORTED); // without a command pipe nothing is granted
    must(by_hand_open_commands(&hand, &commands) == GOOD && by_hand_confirm(&hand, segment) == NOT_FOUND);
    swap(sock, 0);
    swap(sock, 0); // the other has it, and has destroyed its QP
    must(fd_readable(commands, BOUND_MS) && read(commands, command, sizeof command) == sizeof command);
    must(command[0] == segment && command[1] == 0);
    must(by_hand_confirm(&hand, segment + 1) == NOT_FOUND);
    must(by_hand_map_part(&hand, segment, (uint8_t *)memory + BYTES, BYTES) == NOT_SUPPORTED);
    printf("ordered\n");
    uint64_t begin = now_ns();
    struct pollfd waiting = {hand.sock, POLLIN, 0};
    must(poll(&waiting, 1, revocation_ms + BOUND_MS) == 1 && recv(hand.sock, command, sizeof command, 0) <= 0);
    unsigned ms = (unsigned)((now_ns() - begin) / 1000000u);
    must(read(commands, command, sizeof command) == 0);
    must(by_hand_open(&again) && by_hand_create_qp(&again));
    printf("its session ended after %u ms\n", ms);
    return 0;
}

static int attacker_of_silent(const char *ip, int port) {
    struct attack a = {0};
    connect_by_hand(&a, socket_connect(ip, port));
    swap(a.sock, ask(&a, true, NULL));
    swap(a.sock, 0);
    take_booty(&a, true);
    must(by_hand_destroy_qp(&a.hand) == GOOD);
    swap(a.sock, 0);
    return 0;
}

// ---- grants revoked again and again, beside honest traffic to the same memory

enum { SLOTS = 8, SLOT_BYTES = PAGE, HONEST_BYTES = SLOTS * SLOT_BYTES, WAIT_MS = 20000 };

// One turn: the owner names a region (key 0: it is over), the honest peer says what its last WRITEs were.
struct turn {
    uint64_t memory, seeds[SLOTS];
    uint32_t rkey, requests;
};

static void exchange(int sock, struct turn *theirs, const struct turn *mine) {
    must(socket_swap(sock, mine, theirs, sizeof *mine));
}

static struct ibv_mr *register_all(struct endpoint *e, uint8_t *memory) {
    const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    struct ibv_mr *mr = ibv_reg_mr(e->pd, memory, BYTES, all);
    must(mr);
    return mr;
}

// Revoked from both in the middle; the owner writes all the while. The honest one's WRITEs may soon
// have credit for another grant: then the pages are shared again, in another file.
static void revoke_from_attacker(uint8_t *memory, struct ibv_mr *mr) {
    volatile uint64_t *word = (volatile uint64_t *)(memory + BYTES - 8);
    uint64_t count = 0, begin = now_ns();
    unsigned long file = 0;
    must(shared_bytes_of(memory, 0, &file) && shared_bytes_of(memory, file, NULL) == BYTES);
    must(!ibv_dereg_mr(mr));
    while (shared_bytes_of(memory, file, NULL)) {
        for (int i = 0; i < 100; i++) {
            must(*word == count);
            *word = ++count;
        }
        must(now_ns() - begin < BOUND_MS * 1000000ull);
    }
    must(*word == count);
}

// The attacker has carried nothing that would earn it a grant, so it has a new QP in each turn.
static void reconnect(struct endpoint *e, uint32_t qpn) {
    must(qp_modify_state(e->qp, IBV_QPS_RESET));
    e->peer.qpn = qpn;
    must(endpoint_to_init(e) && endpoint_to_rtr(e) && endpoint_to_rts(e));
}

static void one_turn(struct endpoint *e, int honest, int attacker, unsigned for_ms, uint32_t *requests) {
    uint8_t *memory = fresh_pages();
    struct ibv_mr *for_honest = register_all(&e[0], memory), *for_attacker = register_all(&e[1], memory);
    struct turn turn = {.memory = (uintptr_t)memory, .rkey = for_honest->rkey}, answer;
    struct turn theirs = {.memory = (uintptr_t)memory, .rkey = for_attacker->rkey};
    must(shared_bytes(memory) == BYTES);
    exchange(honest, &answer, &turn);
    exchange(attacker, &answer, &theirs);
    reconnect(&e[1], answer.rkey);
    swap(attacker, 0);
    swap(attacker, 0); // it has it, and writes into the upper half
    sleep_ms(for_ms);
    revoke_from_attacker(memory, for_attacker);
    swap(attacker, 0);
    swap(attacker, 0); // it has done its worst
    exchange(honest, &answer, &turn); // stop
    exchange(honest, &answer, &turn);
    for (int slot = 0; slot < SLOTS; slot++)
        must(!answer.seeds[slot] || holds(memory + slot * SLOT_BYTES, SLOT_BYTES, answer.seeds[slot]));
    *requests += answer.requests;
    must(!ibv_dereg_mr(for_honest) && !munmap(memory, BYTES));
}

static int churn(int listener, unsigned seconds) {
    struct endpoint e[2] = {0};
    struct side sides[2];
    struct turn none = {0}, answer;
    uint32_t requests = 0, turns = 0;
    for (int i = 0; i < 2; i++) { // the honest one first
        sides[i] = (struct side){ROLE_B, socket_accept(listener), "churn", false};
        open_owner(&e[i], &sides[i], &(struct options){0});
        printf("connected %d\n", i);
    }
    for (uint64_t end = now_ns() + seconds * 1000000000ull; now_ns() < end; turns++)
        // Now and then so long that both have a grant on a busy machine too, and that somebody sees it.
        one_turn(e, sides[0].sock, sides[1].sock, turns % 8 ? 5 : 300, &requests);
    for (int i = 0; i < 2; i++) exchange(sides[i].sock, &answer, &none);
    for (int i = 0; i < 2; i++) must(endpoint_close(&e[i]));
    printf("%u turns, %u honest requests, none lost\n", turns, requests);
    return 0;
}

static int attacker_of_churn(const char *ip, int port) {
    struct attack a = {0};
    struct turn mine = {0}, turn;
    connect_by_hand(&a, socket_connect(ip, port));
    for (;;) {
        struct granted granted;
        must(by_hand_destroy_qp(&a.hand) == GOOD && by_hand_create_qp(&a.hand));
        mine.rkey = a.hand.qpn;
        exchange(a.sock, &turn, &mine);
        if (!turn.rkey) return 0;
        must(by_hand_connect_qp(&a.hand, &a.peer.gid, a.peer.qpn));
        swap(a.sock, 0);
        must(by_hand_ask_grant(&a.hand, turn.rkey, turn.memory, 8, true, &granted) == GOOD);
        must(granted.address == turn.memory && granted.bytes >= BYTES);
        a.booty.at = ATTACKER_AT;
        a.booty.first = HONEST_BYTES;
        must(booty_map(&a.booty, granted.fd, granted.bytes, true));
        booty_hammer(&a.booty);
        swap(a.sock, 0);
        swap(a.sock, 0);
        must(!booty_try_all(&a.booty, ~0ull).resealed);
        swap(a.sock, 0);
        booty_stop(&a.booty);
        must(!munmap(a.booty.memory, a.booty.bytes) && !close(a.booty.fd));
    }
}

static void complete(struct endpoint *e, enum ibv_wr_opcode opcode, size_t offset, size_t remote) {
    struct ibv_wc wc;
    must(!post_remote(e, opcode, 1, offset, SLOT_BYTES, remote, 0) && poll_one(e->send_cq, &wc, WAIT_MS));
    if (wc.status != IBV_WC_SUCCESS) fprintf(stderr, "  a request ended with %s\n", ibv_wc_status_str(wc.status));
    must(wc.status == IBV_WC_SUCCESS);
}

static int honest(const char *ip, int port) {
    struct side side = {ROLE_A, socket_connect(ip, port), "honest", false};
    struct endpoint e = {0};
    struct turn none = {0}, turn;
    uint64_t seed = 0;
    open_owner(&e, &side, &(struct options){0});
    for (exchange(side.sock, &turn, &none); turn.rkey; exchange(side.sock, &turn, &none)) {
        struct turn answer = {0};
        e.peer.memory = turn.memory;
        e.peer.rkey = turn.rkey;
        while (!fd_readable(side.sock, 0)) {
            int slot = answer.requests / 2 % SLOTS;
            fill(e.memory, SLOT_BYTES, answer.seeds[slot] = ++seed);
            complete(&e, IBV_WR_RDMA_WRITE, 0, slot * SLOT_BYTES);
            complete(&e, IBV_WR_RDMA_READ, SLOT_BYTES, slot * SLOT_BYTES);
            must(holds(e.memory + SLOT_BYTES, SLOT_BYTES, seed));
            answer.requests += 2;
        }
        exchange(side.sock, &turn, &none);
        exchange(side.sock, &turn, &answer);
    }
    must(endpoint_close(&e));
    return 0;
}

static int run(int argc, char **argv) {
    bool refusals = argc > 2 && (is(argv[2], "refusals") || is(argv[2], "no-access"));
    if (is(role, "owner") && argc == 4) {
        int listener = socket_listen(atoi(argv[3]));
        return refusals ? owner_refuses(argv[2], listener) : owner(argv[2], listener);
    }
    if (is(role, "attacker") && argc == 6) {
        int port = atoi(argv[4]);
        if (is(argv[2], "silent")) return attacker_of_silent(argv[3], port);
        if (is(argv[2], "churn")) return attacker_of_churn(argv[3], port);
        return refusals ? attacker_is_refused(argv[2], argv[3], port) : attacker(argv[2], argv[3], port, argv[5]);
    }
    if (is(role, "colluder") && argc == 3) return colluder_run(argv[2]);
    if (is(role, "stranger") && argc == 6) return stranger(argv + 2);
    if (is(role, "silent") && argc == 4) return silent(socket_listen(atoi(argv[2])), atoi(argv[3]));
    if (is(role, "churn") && argc == 4) return churn(socket_listen(atoi(argv[2])), (unsigned)atoi(argv[3]));
    if (is(role, "honest") && argc == 4) return honest(argv[2], atoi(argv[3]));
    return 2;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc < 3) return 2;
    role = argv[1];
    return run(argc, argv);
}
