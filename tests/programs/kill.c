// kill -9 of either end at random points of its life, many times.
//
//   kill server PORT SEED COUNT | client HOST PORT SEED COUNT
//
// Each end is a supervisor that touches no verbs itself; in each round both start a child that connects and sends, and
// one of the two, as the seed says, is killed after a random time. The other child must learn of it from its
// completions, get everything it had outstanding back, and end by itself.
#include "traffic.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SURVIVOR_MS_MAX = 8000, EXIT_SETUP = 10, EXIT_RIGHT = 11, EXIT_WRONG = 12 };

struct round {
    uint64_t seed;
    bool kill_server, shared_memory, evented;
    unsigned delay_us;
};

static struct round round_of(uint64_t *random) {
    uint64_t a = random_next(random), b = random_next(random);
    // A third of the rounds kill while the child still sets up.
    unsigned range_us = a % 3 == 0 ? 8000 : 60000;
    return (struct round){.seed = a,
                          .kill_server = b & 1,
                          .shared_memory = b & 2,
                          .evented = b & 4,
                          .delay_us = (unsigned)(b >> 32) % range_us};
}

static int child(const struct round *round, enum role role, int sock) {
    struct traffic t = {.evented = round->evented};
    struct side side = {role, sock, "kill", false};
    struct options options = {.timeout = 8, .retry = 3, .shared_memory = round->shared_memory};
    if (!traffic_open(&t, &side, &options, round->seed + role)) return EXIT_SETUP;
    while (traffic_turn(&t, true))
        if (t.evented && !traffic_sleep(&t, 100)) break;
    if (t.corrupt) return EXIT_WRONG;
    switch (t.error) {
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_REM_OP_ERR: // the other end's memory goes before its queue pairs do
    case IBV_WC_WR_FLUSH_ERR:
        break;
    default:
        fprintf(stderr, "  the survivor got %s\n", ibv_wc_status_str(t.error));
        return EXIT_WRONG;
    }
    return traffic_flush(&t, 3000) && endpoint_close(&t.e) ? EXIT_RIGHT : EXIT_WRONG;
}

// The child's exit code; -1 if it had to be killed because it did not end.
static int wait_for(pid_t pid, uint64_t *ms) {
    int status;
    for (uint64_t begin = now_ns(); now_ns() - begin < SURVIVOR_MS_MAX * 1000000ull; usleep(300)) {
        *ms = (now_ns() - begin) / 1000000;
        if (waitpid(pid, &status, WNOHANG) == pid) return WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_WRONG;
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    return -1;
}

int main(int argc, char **argv) {
    bool server = argc == 5 && !strcmp(argv[1], "server"), client = argc == 6 && !strcmp(argv[1], "client");
    if (!server && !client) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    int port = atoi(argv[server ? 2 : 3]), count = atoi(argv[argc - 1]);
    uint64_t random = strtoull(argv[argc - 2], NULL, 0), slowest_ms = 0;
    int listener = server ? socket_listen(port) : -1;
    unsigned killed = 0, setup = 0, right = 0, wrong = 0;
    for (int i = 0; i < count && wrong == 0; i++) {
        struct round round = round_of(&random);
        int sock = server ? socket_accept(listener) : socket_connect(argv[2], port);
        if (sock < 0) {
            fprintf(stderr, "round %d: no connection with the other supervisor\n", i);
            wrong++;
            break;
        }
        pid_t pid = fork();
        if (pid == 0) _exit(child(&round, server ? ROLE_B : ROLE_A, sock));
        close(sock);
        uint64_t ms = 0;
        if (round.kill_server == server) {
            usleep(round.delay_us);
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
            killed++;
            continue;
        }
        int code = wait_for(pid, &ms);
        if (code == EXIT_SETUP) setup++;
        else if (code == EXIT_RIGHT) right++;
        else {
            wrong++;
            fprintf(stderr, "round %d (%s killed after %u us, %s, %s): the survivor %s\n", i,
                    round.kill_server ? "server" : "client", round.delay_us, round.evented ? "evented" : "polled",
                    round.shared_memory ? "ibv_malloc" : "heap", code < 0 ? "hung" : "was wrong");
        }
        if (ms > slowest_ms) slowest_ms = ms;
    }
    printf("%s: %u killed; survived %u under load, %u in set-up; slowest %lu ms; %u wrong\n",
           server ? "server" : "client", killed, right, setup, (unsigned long)slowest_ms, wrong);
    return wrong != 0;
}
