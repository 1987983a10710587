// Memory that was revoked from one peer is shared again for the others, while all of them use it, and nothing is lost.
//
// The server's region is written by its own threads and by two clients, which are programs of their own. One goes on;
// the other connects, has the region granted, and goes, in order or by SIGKILL.
#define _GNU_SOURCE
#include "remap.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    OWN_PAGES = 16,                     // what the server writes, a counter in each page
    COUNTER = OWN_PAGES << 12,          // what the client that stays counts up, by WRITE and by FETCH_ADD
    STEADY = COUNTER + (1 << 12),       // what it writes otherwise
    STEADY_BYTES = 320 << 10,
    FLEETING = STEADY + STEADY_BYTES,   // what the other one writes
    FLEETING_BYTES = 64 << 10,
    REGION_BYTES = FLEETING + FLEETING_BYTES,
    CLIENT_FD = 100,
    WAIT_US = 60000000,
};

// From either end of a socket pair.
struct hello {
    uint32_t qpn, rkey;
    uint64_t address, hash;
};

static uint64_t random_state = 88172645463325252u;

static uint64_t next_random(uint64_t below) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % below;
}

static uint64_t hash_of(const uint8_t *memory, size_t bytes) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ memory[i]) * 1099511628211u;
    return hash;
}

static bool hear(int fd, struct hello *hello) { return recv(fd, hello, sizeof *hello, 0) == sizeof *hello; }

static void say(int fd, struct hello hello) { need(send(fd, &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello); }

static struct ibv_qp *make_qp(struct ibv_cq *cq) {
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    need(qp != NULL);
    return qp;
}

// ---- clients

static struct ibv_cq *client_cq;
static struct ibv_qp *client_qp;
static struct hello server;

static void join(void) {
    client_qp = make_qp(client_cq);
    say(CLIENT_FD, (struct hello){.qpn = client_qp->qp_num});
    need(hear(CLIENT_FD, &server));
    connect_qp(client_qp, server.qpn);
}

static void transfer(struct ibv_send_wr *wr) {
    struct ibv_send_wr *bad;
    struct ibv_wc wc;
    int count;
    wr->send_flags = IBV_SEND_SIGNALED;
    need(ibv_post_send(client_qp, wr, &bad) == 0);
    while (!(count = ibv_poll_cq(client_cq, 1, &wc))) {}
    need(count == 1);
    if (wc.status != IBV_WC_SUCCESS) fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc.status));
    need(wc.status == IBV_WC_SUCCESS);
}

static void move(enum ibv_wr_opcode opcode, struct ibv_mr *mr, void *own, size_t offset, size_t bytes) {
    struct ibv_sge sge = {(uintptr_t)own, (uint32_t)bytes, mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode,
                             .wr.rdma = {server.address + offset, server.rkey}};
    transfer(&wr);
}

static uint64_t add_one(struct ibv_mr *mr, uint64_t *result) {
    struct ibv_sge sge = {(uintptr_t)result, 8, mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
                             .wr.atomic = {.remote_addr = server.address + COUNTER + 64, .compare_add = 1, .rkey = server.rkey}};
    transfer(&wr);
    return *result;
}

static void begin_client(void) {
    need((client_cq = ibv_create_cq(context, 64, NULL, NULL, 0)) != NULL);
    join();
}

// Goes on until the server's end of the socket is shut. What it has written is what it reads, and what the server has
// in the end.
void case_client_steady(void) {
    begin_client();
    const size_t own_bytes = 3 * STEADY_BYTES;
    uint8_t *own = private_pages(own_bytes, 1), *shadow = own + STEADY_BYTES, *read = shadow + STEADY_BYTES;
    struct ibv_mr *mr = reg(own, own_bytes);
    uint64_t *word = (uint64_t *)own, count = 0, seen[OWN_PAGES] = {0};
    memset(shadow, 0, STEADY_BYTES);
    move(IBV_WR_RDMA_WRITE, mr, shadow, STEADY, STEADY_BYTES);
    for (struct hello end; recv(CLIENT_FD, &end, sizeof end, MSG_DONTWAIT) < 0 && errno == EAGAIN;) {
        size_t at = next_random(STEADY_BYTES), bytes = 1 + next_random(STEADY_BYTES - at);
        if (next_random(4)) bytes = bytes % 9000 + 1 > STEADY_BYTES - at ? 1 : bytes % 9000 + 1;
        for (size_t i = 0; i < bytes; i += 1 + next_random(200)) shadow[at + i] = (uint8_t)next_random(256);
        move(IBV_WR_RDMA_WRITE, mr, shadow + at, STEADY + at, bytes);
        *word = ++count;
        move(IBV_WR_RDMA_WRITE, mr, word, COUNTER, 8);
        need(add_one(mr, word) == count - 1);
        at = next_random(STEADY_BYTES), bytes = 1 + next_random(STEADY_BYTES - at);
        move(IBV_WR_RDMA_READ, mr, read + at, STEADY + at, bytes);
        need(memcmp(read + at, shadow + at, bytes) == 0);
        size_t page = next_random(OWN_PAGES);
        move(IBV_WR_RDMA_READ, mr, word, page * PAGE, 8);
        need(*word >= seen[page]);
        seen[page] = *word;
    }
    move(IBV_WR_RDMA_READ, mr, read, STEADY, STEADY_BYTES);
    need(memcmp(read, shadow, STEADY_BYTES) == 0);
    say(CLIENT_FD, (struct hello){.hash = hash_of(shadow, STEADY_BYTES), .address = count});
    dereg(mr);
    need(ibv_destroy_qp(client_qp) == 0 && ibv_destroy_cq(client_cq) == 0);
}

// Comes, works until it has what can be granted, and goes, for each word that it hears.
void case_client_fleeting(void) {
    begin_client();
    uint8_t *own = private_pages(2 * FLEETING_BYTES, 1), *read = own + FLEETING_BYTES;
    struct ibv_mr *mr = reg(own, 2 * FLEETING_BYTES);
    for (unsigned seed = 2;; seed++) {
        for (unsigned i = 0; i < 16; i++) {
            fill(own, FLEETING_BYTES, seed + i);
            move(IBV_WR_RDMA_WRITE, mr, own, FLEETING, FLEETING_BYTES);
            move(IBV_WR_RDMA_READ, mr, read, FLEETING, FLEETING_BYTES);
            need(is_filled(read, FLEETING_BYTES, seed + i));
        }
        say(CLIENT_FD, (struct hello){.address = seed});
        struct hello next;
        if (!hear(CLIENT_FD, &next)) break;
        need(ibv_destroy_qp(client_qp) == 0);
        join();
    }
    dereg(mr);
    need(ibv_destroy_qp(client_qp) == 0 && ibv_destroy_cq(client_cq) == 0);
}

// ---- the server

struct client {
    pid_t pid;
    int fd;
    struct ibv_qp *qp;
};

static uint8_t *region;
static struct ibv_mr *region_mr;
static struct ibv_cq *server_cq;
static atomic_bool ended;

static void start_client(struct client *client, const char *name) {
    int ends[2];
    need(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    need((client->pid = fork()) >= 0);
    if (client->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        need(dup2(ends[1], CLIENT_FD) == CLIENT_FD);
        execl("/proc/self/exe", "remap", name, NULL);
        _exit(1);
    }
    close(ends[1]);
    client->fd = ends[0];
    client->qp = NULL;
}

// It has a queue pair, and wants one here.
static void welcome(struct client *client) {
    struct hello hello;
    need(hear(client->fd, &hello));
    if (client->qp) need(ibv_destroy_qp(client->qp) == 0);
    client->qp = make_qp(server_cq);
    connect_qp(client->qp, hello.qpn);
    say(client->fd, (struct hello){.qpn = client->qp->qp_num, .rkey = region_mr->rkey, .address = (uintptr_t)region});
}

static void end_client(struct client *client, int expected) {
    int status;
    close(client->fd);
    need(waitpid(client->pid, &status, 0) == client->pid);
    need(WIFEXITED(status) ? WEXITSTATUS(status) == expected : WTERMSIG(status) == -expected);
    need(ibv_destroy_qp(client->qp) == 0);
}

// Counts up in each page of its own, and looks whether the client's count grows.
static void *work_on(void *unused) {
    volatile uint64_t *counter = (uint64_t *)(region + COUNTER);
    for (uint64_t count = 0, seen = 0; !atomic_load_explicit(&ended, memory_order_relaxed); count++) {
        for (size_t page = 0; page < OWN_PAGES; page++) {
            volatile uint64_t *word = (uint64_t *)(region + page * PAGE);
            need(*word == count);
            *word = count + 1;
        }
        uint64_t now = *counter;
        need(now >= seen);
        seen = now;
    }
    return unused;
}

// Until all of the region is in an arena; which.
static unsigned long wait_until_shared(void) {
    for (double begin = now_us();;) {
        unsigned long arena = arena_of(region);
        if (arena && placed(region, REGION_BYTES) == REGION_BYTES) return arena;
        if (now_us() - begin > WAIT_US) {
            fprintf(stderr, "%zu bytes are placed, %zu copied\n", placed(region, REGION_BYTES), copied(region, REGION_BYTES));
            show_maps(region, REGION_BYTES);
        }
        need(now_us() - begin <= WAIT_US);
        usleep(1000);
    }
}

static void begin_server(pthread_t *thread, struct client *steady) {
    region = private_pages(REGION_BYTES, 0);
    memset(region, 0, REGION_BYTES);
    region_mr = reg(region, REGION_BYTES);
    need((server_cq = ibv_create_cq(context, 64, NULL, NULL, 0)) != NULL);
    need(pthread_create(thread, NULL, work_on, NULL) == 0);
    start_client(steady, "client-steady");
    welcome(steady);
}

static void end_server(pthread_t thread, struct client *steady) {
    struct hello last;
    say(steady->fd, (struct hello){.qpn = 0});
    need(hear(steady->fd, &last));
    need(last.hash == hash_of(region + STEADY, STEADY_BYTES));
    need(*(uint64_t *)(region + COUNTER) == last.address && *(uint64_t *)(region + COUNTER + 64) == last.address);
    printf("%lu rounds of the client\n", (unsigned long)last.address);
    end_client(steady, 0);
    atomic_store(&ended, true);
    need(pthread_join(thread, NULL) == 0);
    uint64_t hash = hash_of(region, REGION_BYTES);
    dereg(region_mr);
    need(hash == hash_of(region, REGION_BYTES) && placed(region, REGION_BYTES) == 0 && copied(region, REGION_BYTES) == 0);
    need(ibv_destroy_cq(server_cq) == 0);
}

void case_shared_again(void) {
    const char *text = getenv("REMAP_ROUNDS");
    unsigned rounds = text ? (unsigned)atoi(text) : 12;
    pthread_t thread;
    struct client steady, fleeting = {.pid = 0};
    begin_server(&thread, &steady);
    unsigned long arena = wait_until_shared();
    // Not each time that the client comes the region is granted to it: while it is not shared again it can't be.
    unsigned heals = 0;
    for (unsigned round = 0; heals < rounds; round++) {
        need(round < 20 * rounds);
        struct hello done;
        if (fleeting.pid == 0)
            start_client(&fleeting, "client-fleeting");
        else
            say(fleeting.fd, (struct hello){.qpn = 0});
        welcome(&fleeting);
        need(hear(fleeting.fd, &done));
        if (round % 3 == 2) {
            kill(fleeting.pid, SIGKILL);
            end_client(&fleeting, -SIGKILL);
            fleeting.pid = 0;
        } else if (round % 3 == 1) {
            // Its end here goes first.
            need(ibv_destroy_qp(fleeting.qp) == 0);
            fleeting.qp = NULL;
        } else {
            say(fleeting.fd, (struct hello){.qpn = 0});
            welcome(&fleeting);
            need(hear(fleeting.fd, &done));
        }
        unsigned long now = wait_until_shared();
        heals += now != arena;
        arena = now;
    }
    printf("shared again %u times\n", heals);
    if (fleeting.pid) {
        if (!fleeting.qp) {
            say(fleeting.fd, (struct hello){.qpn = 0});
            welcome(&fleeting);
            struct hello done;
            need(hear(fleeting.fd, &done));
        }
        end_client(&fleeting, 0);
    }
    end_server(thread, &steady);
}

// One client that goes on until SIGTERM comes: what happens to the path meanwhile is others' doing.
void case_shared_steady(void) {
    pthread_t thread;
    struct client steady;
    sigset_t term;
    int signal;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    need(pthread_sigmask(SIG_BLOCK, &term, NULL) == 0);
    begin_server(&thread, &steady);
    printf("ready\n");
    fflush(stdout);
    need(sigwait(&term, &signal) == 0);
    end_server(thread, &steady);
}
