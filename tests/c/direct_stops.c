// A writer that is stopped (SIGSTOP) at any point of a WRITE: what it was granted is taken back without it, nothing of the
// memory changes when it goes on, and what had completed before is there.
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
    bool told = send(sock, "s", 1, MSG_NOSIGNAL) == 1 && recv(sock, &heard, 1, 0) == 1;
    kill(parent, SIGCONT);
    _exit(!told);
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
    bool told = send(s->sock, "d", 1, MSG_NOSIGNAL) == 1;
    uint64_t last = 0, nothing = 0;
    bool same = told && socket_swap(s->sock, &nothing, &last, sizeof last) && !memcmp(then, e->memory, SLOTS * PIECE);
    free(then);
    need(s, told && last >= WARM_UP - 1 && same);
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

const struct test_case stop_cases[] = {
    {"writer_is_stopped_at_once", writer_is_stopped_at_once},
    {"writer_is_stopped_soon", writer_is_stopped_soon},
    {"writer_is_stopped_later", writer_is_stopped_later},
    {NULL, NULL},
};
