// Verbs' data, completion statuses, events and limits through the C interface.
//
//   statuses loopback [CASE…]           both sides in this process
//   statuses server PORT [CASE…]        side B; the same cases on both ends
//   statuses client HOST PORT [CASE…]   side A
#include "cases.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static unsigned passed_count, failed_count;

static void run_side(struct side *side, const struct test_case *test) {
    struct endpoint e = {0};
    test->run(side, &e);
    // Neither end takes its endpoint away while the other one still works with it. On a failure nobody waits.
    if (side->failed) {
        shutdown(side->sock, SHUT_RDWR);
    } else if (!meet(side)) {
        fail(side, __FILE__, __LINE__, "the other side failed");
    }
    if (!endpoint_close(&e)) fail(side, __FILE__, __LINE__, "something could not be destroyed");
    close(side->sock);
}

struct half {
    struct side side;
    const struct test_case *test;
};

static void *run_half(void *argument) {
    struct half *half = argument;
    run_side(&half->side, half->test);
    return NULL;
}

static bool run_loopback(const struct test_case *test) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) return false;
    struct timeval limit = {20, 0};
    struct half halves[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        setsockopt(pair[i], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        halves[i] = (struct half){{i ? ROLE_B : ROLE_A, pair[i], test->name, false}, test};
        pthread_create(&threads[i], NULL, run_half, &halves[i]);
    }
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    return !halves[0].side.failed && !halves[1].side.failed;
}

static bool run_remote(const struct test_case *test, enum role role, int sock) {
    struct side side = {role, sock, test->name, false};
    if (sock < 0) {
        fail(&side, __FILE__, __LINE__, "no connection with the other side");
        return false;
    }
    run_side(&side, test);
    return !side.failed;
}

static bool wanted(const char *name, char **names) {
    if (!*names) return true;
    for (; *names; names++)
        if (strstr(name, *names)) return true;
    return false;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    bool loopback = argc >= 2 && !strcmp(argv[1], "loopback");
    bool server = argc >= 3 && !strcmp(argv[1], "server");
    bool client = argc >= 4 && !strcmp(argv[1], "client");
    if (!loopback && !server && !client) {
        fprintf(stderr, "usage: statuses loopback|server PORT|client HOST PORT [CASE…]\n");
        return 2;
    }
    char **names = argv + (loopback ? 2 : server ? 3 : 4);
    int listener = server ? socket_listen(atoi(argv[2])) : -1;
    const struct test_case *tables[] = {data_cases, error_cases, event_cases, limit_cases};
    for (size_t table = 0; table < sizeof tables / sizeof *tables; table++) {
        for (const struct test_case *test = tables[table]; test->name; test++) {
            if (!wanted(test->name, names)) continue;
            uint64_t begin = now_ns();
            bool ok = loopback ? run_loopback(test)
                      : server ? run_remote(test, ROLE_B, socket_accept(listener))
                               : run_remote(test, ROLE_A, socket_connect(argv[2], atoi(argv[3])));
            printf("%-9s %-36s %5lu ms\n", ok ? "ok" : "FAILED", test->name, (now_ns() - begin) / 1000000);
            ok ? passed_count++ : failed_count++;
        }
    }
    printf("%u passed, %u failed\n", passed_count, failed_count);
    return failed_count || !passed_count;
}
