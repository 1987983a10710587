// A writer that is stopped (SIGSTOP) at any point of a WRITE: what it was granted is taken back without it, nothing of
// the memory changes when it goes on, and what had completed before is there. And a receiver whose queue pair ends by
// an error of its own: what was acknowledged before is received.
#include "cases.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    PIECE = 4 << 20, // of a WRITE: long enough to be stopped within one
    SLOTS = 4,
    WARM_UP = 12,
    WAIT_MS = 15000,
};

static uint8_t byte_of(uint64_t number) { return (uint8_t)(number * 37 + 1); }

static bool is_stopped(pid_t pid) {
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return false;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 0;
    fclose(file);
    return state == 'T';
}

// Stops its parent once that says so, and lets it go on when the other end has done its part.
static void stop_parent(int sock, int go, unsigned after_ms) {
    pid_t parent = getppid();
    char heard;
    if (read(go, &heard, 1) != 1) _exit(1);
    sleep_ms(after_ms);
    if (kill(parent, SIGSTOP)) _exit(1);
    while (!is_stopped(parent)) sleep_ms(1);
    bool reported = send(sock, "s", 1, MSG_NOSIGNAL) == 1 && recv(sock, &heard, 1, 0) == 1;
    kill(parent, SIGCONT);
    _exit(!reported);
}

// WRITEs until one is refused; the last one that was not.
static uint64_t write_on(struct side *s, struct endpoint *e, int go) {
    uint64_t end = now_ns() + WAIT_MS * 1000000ull;
    for (uint64_t number = 1; !s->failed; number++) {
        size_t slot = number % SLOTS * PIECE;
        struct ibv_wc wc;
        memset(e->memory + slot, byte_of(number), PIECE);
        if (number == WARM_UP && write(go, "g", 1) != 1) fail(s, __FILE__, __LINE__, "the pipe");
        if (post_remote(e, IBV_WR_RDMA_WRITE, number, slot, PIECE, slot, 0)) fail(s, __FILE__, __LINE__, "post");
        if (!s->failed && !poll_one(e->send_cq, &wc, WAIT_MS)) fail(s, __FILE__, __LINE__, "no completion");
        if (!s->failed && wc.status == IBV_WC_REM_ACCESS_ERR) return number - 1;
        if (!s->failed && wc.status != IBV_WC_SUCCESS) fail(s, __FILE__, __LINE__, "%s", ibv_wc_status_str(wc.status));
        if (now_ns() > end) fail(s, __FILE__, __LINE__, "never refused");
    }
    return 0;
}

static void writer(struct side *s, struct endpoint *e, unsigned after_ms) {
    int pipe_[2], status = -1;
    need(s, !pipe(pipe_));
    pid_t child = fork(); // before there is memory that it would share
    if (!child) stop_parent(s->sock, pipe_[0], after_ms);
    close(pipe_[0]);
    need(s, child > 0 && endpoint_open(e, &(struct options){.bytes = SLOTS * PIECE}) && endpoint_connect(s, e));
    uint64_t last = write_on(s, e, pipe_[1]), nothing;
    close(pipe_[1]);
    need(s, waitpid(child, &status, 0) == child && !s->failed && !status);
    need(s, socket_swap(s->sock, &last, &nothing, sizeof last));
}

static void owner(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.bytes = SLOTS * PIECE}) && endpoint_connect(s, e));
    char heard;
    need(s, recv(s->sock, &heard, 1, 0) == 1 && heard == 's');
    need(s, !ibv_dereg_mr(e->mr));
    e->mr = NULL;
    uint8_t *then = malloc(SLOTS * PIECE);
    memcpy(then, e->memory, SLOTS * PIECE);
    bool reported = send(s->sock, "d", 1, MSG_NOSIGNAL) == 1;
    uint64_t last = 0, nothing = 0;
    bool same = reported && socket_swap(s->sock, &nothing, &last, sizeof last) && !memcmp(then, e->memory, SLOTS * PIECE);
    free(then);
    need(s, reported && last >= WARM_UP - 1 && same);
    // The slot after the last one may hold some of what was refused.
    for (uint64_t number = last; number + SLOTS > last + 1; number--) {
        const uint8_t *slot = e->memory + number % SLOTS * PIECE;
        need(s, slot[0] == byte_of(number) && !memcmp(slot, slot + 1, PIECE - 1));
    }
}

static void writer_is_stopped(struct side *s, struct endpoint *e, unsigned after_ms) {
    s->role == ROLE_A ? writer(s, e, after_ms) : owner(s, e);
}

static void writer_is_stopped_at_once(struct side *s, struct endpoint *e) { writer_is_stopped(s, e, 0); }
static void writer_is_stopped_soon(struct side *s, struct endpoint *e) {
    writer_is_stopped(s, e, (unsigned)(case_seed % 40));
}
static void writer_is_stopped_later(struct side *s, struct endpoint *e) {
    writer_is_stopped(s, e, 41 + (unsigned)(case_seed % 97));
}

enum {
    MESSAGE = 256,
    WARM_UP_MESSAGES = 200, // far more than it takes to get a channel
    KEPT = 24,              // acknowledged and not polled when the error comes
    RECEIVES = 40,          // outstanding then
};

static bool receives(struct side *s, struct endpoint *e, uint64_t number, enum ibv_wc_status wanted) {
    struct ibv_wc wc;
    if (!poll_one(e->recv_cq, &wc, WAIT_MS)) {
        fail(s, __FILE__, __LINE__, "no completion of message %lu", (unsigned long)number);
        return false;
    }
    bool right = wc.wr_id == number && wc.status == wanted;
    if (right && wanted == IBV_WC_SUCCESS)
        right = wc.byte_len == MESSAGE && holds(e->memory + number % RECEIVES * MESSAGE, MESSAGE, number);
    if (!right)
        fail(s, __FILE__, __LINE__, "message %lu: %s, %lu, %u bytes", (unsigned long)number,
             ibv_wc_status_str(wc.status), (unsigned long)wc.wr_id, wc.byte_len);
    return right;
}

static bool sends(struct side *s, struct endpoint *e, uint64_t number) {
    struct ibv_wc wc;
    fill(e->memory, MESSAGE, number);
    bool done = !post_send(e, number, 0, MESSAGE, 0) && poll_one(e->send_cq, &wc, WAIT_MS) && !wc.status;
    if (!done) fail(s, __FILE__, __LINE__, "message %lu was not sent", (unsigned long)number);
    return done;
}

// Each acknowledged message is one that the receiver gets, though its queue pair fails before it has polled any of
// them.
static void acknowledged_is_received(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}) && endpoint_connect(s, e));
    uint64_t number = 0;
    if (s->role == ROLE_B)
        for (uint64_t receive = 0; receive < RECEIVES; receive++)
            need(s, !post_recv(e, receive, receive * MESSAGE, MESSAGE));
    need(s, meet(s));
    for (; number < WARM_UP_MESSAGES; number++) {
        if (s->role == ROLE_A) need(s, sends(s, e, number));
        if (s->role == ROLE_B) need(s, receives(s, e, number, IBV_WC_SUCCESS));
        if (s->role == ROLE_B)
            need(s, !post_recv(e, number + RECEIVES, number % RECEIVES * MESSAGE, MESSAGE));
        need(s, meet(s));
    }
    for (uint64_t kept = 0; s->role == ROLE_A && kept < KEPT; kept++) need(s, sends(s, e, number + kept));
    need(s, meet(s));
    if (s->role == ROLE_A) return;
    struct ibv_sge wrong = {(uintptr_t)e->memory, MESSAGE, e->mr->lkey ^ 0x5a5a00};
    struct ibv_send_wr request = {.wr_id = 7, .sg_list = &wrong, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    struct ibv_wc wc;
    need(s, !ibv_post_send(e->qp, &request, &bad) && poll_one(e->send_cq, &wc, WAIT_MS));
    need_status(s, wc, IBV_WC_LOC_PROT_ERR);
    need(s, qp_state(e->qp) == IBV_QPS_ERR);
    for (uint64_t kept = 0; kept < KEPT; kept++, number++) need(s, receives(s, e, number, IBV_WC_SUCCESS));
    for (; number < WARM_UP_MESSAGES + RECEIVES; number++) need(s, receives(s, e, number, IBV_WC_WR_FLUSH_ERR));
}

const struct test_case stop_cases[] = {
    {"acknowledged_is_received", acknowledged_is_received},
    {"writer_is_stopped_at_once", writer_is_stopped_at_once},
    {"writer_is_stopped_soon", writer_is_stopped_soon},
    {"writer_is_stopped_later", writer_is_stopped_later},
    {NULL, NULL},
};
