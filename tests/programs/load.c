// Traffic that checks itself, until asked to stop.
//
//   load [-e] [-i] [-f] [-x] [-m heap|shared] [-p MS] [-s SEED] [-t SECONDS] server PORT | client HOST PORT
//   load -a                              only waits for an asynchronous event
//
// -e sleeps in the completion channel; -i posts nothing but receives; -f expects the device to die under it, and prints
// when it learned of that (CLOCK_MONOTONIC, ns); -x exits without closing anything; -p rests so long after each turn.
// SIGTERM to either end stops both in order. Exit 0: all was right. Once connected it prints `ready QPN RKEY ADDRESS`.
#include "traffic.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static volatile sig_atomic_t stop_requested;

static void on_term(int signal) {
    (void)signal;
    stop_requested = 1;
}

static int wait_for_fatal(struct ibv_context *context, uint64_t first_error_ns) {
    struct ibv_async_event event;
    do {
        if (ibv_get_async_event(context, &event)) {
            perror("get async event");
            return 1;
        }
        ibv_ack_async_event(&event);
    } while (event.event_type != IBV_EVENT_DEVICE_FATAL);
    printf("fatal %lu %lu\n", (unsigned long)first_error_ns, (unsigned long)now_ns());
    return 0;
}

static int wait_only(void) {
    struct ibv_context *context = open_first_device();
    if (!context) return 1;
    printf("ready\n");
    int rc = wait_for_fatal(context, 0);
    return ibv_close_device(context) ? 1 : rc;
}

static int expect_fatal(struct traffic *t) {
    if (t->error == IBV_WC_SUCCESS || t->corrupt) {
        fprintf(stderr, "  ended with %s\n", t->corrupt ? "wrong data" : "no failed completion");
        return 1;
    }
    if (!traffic_flush(t, 2000)) return 1;
    if (wait_for_fatal(t->e.context, t->error_ns)) return 1;
    return endpoint_close(&t->e) ? 0 : 1;
}

// Reads 's' (stop) and 'd' (all my requests are done) from the other end; what follows belongs to `meet`.
static void hear(int sock, bool *stop, bool *done) {
    char heard;
    while (!*done && recv(sock, &heard, 1, MSG_DONTWAIT) == 1) {
        *stop |= heard == 's';
        *done |= heard == 'd';
    }
}

static void say(int sock, char what) {
    if (send(sock, &what, 1, MSG_NOSIGNAL) != 1) perror("send");
}

static bool run(struct traffic *t, int sock, bool post, unsigned pause_ms, uint64_t end_ns) {
    bool stop = false, said_stop = false, said_done = false, their_done = false;
    for (unsigned turn = 0; !(said_done && their_done); turn++) {
        if (!traffic_turn(t, post && !stop)) return false;
        if (t->evented && !traffic_sleep(t, 20)) return false;
        if (pause_ms) sleep_ms(pause_ms);
        if (!t->evented && turn % 256) continue;
        hear(sock, &stop, &their_done);
        stop |= stop_requested || (end_ns && now_ns() > end_ns);
        if (stop && !said_stop) say(sock, 's');
        said_stop |= stop;
        if (stop && traffic_idle(t) && !said_done) {
            say(sock, 'd');
            said_done = true;
        }
    }
    return true;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    struct traffic t = {0};
    struct options options = {.timeout = 16};
    bool fatal = false, post = true, only_async = false, at_once = false;
    unsigned pause_ms = 0;
    uint64_t seed = 1, end_ns = 0;
    for (int option; (option = getopt(argc, argv, "+aefim:p:s:t:x")) != -1;) {
        switch (option) {
        case 'a': only_async = true; break;
        case 'e': t.evented = true; break;
        case 'f': fatal = true; break;
        case 'i': post = false; break;
        case 'm': options.shared_memory = !strcmp(optarg, "shared"); break;
        case 'p': pause_ms = (unsigned)atoi(optarg); break;
        case 's': seed = strtoull(optarg, NULL, 0); break;
        case 't': end_ns = now_ns() + strtoull(optarg, NULL, 0) * 1000000000u; break;
        case 'x': at_once = true; break;
        default: return 2;
        }
    }
    if (only_async) return wait_only();
    argv += optind;
    argc -= optind;
    bool server = argc == 2 && !strcmp(argv[0], "server"), client = argc == 3 && !strcmp(argv[0], "client");
    if (!server && !client) return 2;
    struct sigaction action = {.sa_handler = on_term};
    sigaction(SIGTERM, &action, NULL);
    int sock = server ? socket_accept(socket_listen(atoi(argv[1]))) : socket_connect(argv[1], atoi(argv[2]));
    struct side side = {server ? ROLE_B : ROLE_A, sock, "load", false};
    if (sock < 0 || !traffic_open(&t, &side, &options, seed * 2 + server)) return 1;
    printf("ready %u %u %lu\n", t.e.mine.qpn, t.e.mine.rkey, (unsigned long)t.e.mine.memory);
    bool ok = run(&t, sock, post, pause_ms, end_ns);
    if (fatal) return ok ? 1 : expect_fatal(&t);
    printf("%lu requests, %lu received, %s\n", (unsigned long)t.completed, (unsigned long)t.received,
           ok ? "all right" : t.corrupt ? "corrupt" : ibv_wc_status_str(t.error));
    if (at_once) _exit(ok ? 0 : 1);
    ok = ok && meet(&side);
    return endpoint_close(&t.e) && ok ? 0 : 1;
}
