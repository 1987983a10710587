// Runs cases: on both sides in this process, or on one of them.
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

int run_cases(const char *program, int argc, char **argv, const struct test_case *const *tables) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc == 1 && !strcmp(argv[0], "list")) {
        for (; *tables; tables++)
            for (const struct test_case *test = *tables; test->name; test++) puts(test->name);
        return 0;
    }
    bool loopback = argc >= 1 && !strcmp(argv[0], "loopback");
    bool server = argc >= 2 && !strcmp(argv[0], "server");
    bool client = argc >= 3 && !strcmp(argv[0], "client");
    if (!loopback && !server && !client) {
        fprintf(stderr, "usage: %s list|loopback|server PORT|client HOST PORT [CASE…]\n", program);
        return 2;
    }
    char **names = argv + (loopback ? 1 : server ? 2 : 3);
    int listener = server ? socket_listen(atoi(argv[1])) : -1;
    for (; *tables; tables++) {
        for (const struct test_case *test = *tables; test->name; test++) {
            if (!wanted(test->name, names)) continue;
            uint64_t begin = now_ns();
            bool ok = loopback ? run_loopback(test)
                      : server ? run_remote(test, ROLE_B, socket_accept(listener))
                               : run_remote(test, ROLE_A, socket_connect(argv[1], atoi(argv[2])));
            printf("%-9s %-36s %5lu ms\n", ok ? "ok" : "FAILED", test->name, (now_ns() - begin) / 1000000);
            ok ? passed_count++ : failed_count++;
        }
    }
    printf("%u passed, %u failed\n", passed_count, failed_count);
    return failed_count || !passed_count;
}
