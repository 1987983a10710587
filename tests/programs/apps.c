// Uses of verbs besides plain transfers: threads, forks, many objects, all kinds of memory, exact
// returns.
//
//   apps [CASE…]     every case in this process and its children
#include "apps.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

bool app_fail(const char *file, int line, const char *condition) {
    const char *base = strrchr(file, '/');
    fprintf(stderr, "  %s:%d: %s (errno %s)\n", base ? base + 1 : file, line, condition, strerror(errno));
    return false;
}

bool connect_two(struct endpoint *a, struct endpoint *b) {
    want(endpoint_to_init(a) && endpoint_to_init(b));
    a->peer = b->mine;
    b->peer = a->mine;
    want(endpoint_to_rtr(a) && endpoint_to_rtr(b));
    want(endpoint_to_rts(a) && endpoint_to_rts(b));
    return true;
}

bool pair_open(struct pair *p, const struct options *first, const struct options *second) {
    memset(p, 0, sizeof *p);
    want(endpoint_open(&p->a, first) && endpoint_open(&p->b, second ? second : first));
    return connect_two(&p->a, &p->b);
}

bool pair_close(struct pair *p) {
    bool a = endpoint_close(&p->a), b = endpoint_close(&p->b);
    return a && b;
}

bool completes(struct ibv_cq *cq, uint64_t wr_id) {
    struct ibv_wc wc;
    want(poll_one(cq, &wc, 10000));
    if (wc.status != IBV_WC_SUCCESS) fprintf(stderr, "  status %s\n", ibv_wc_status_str(wc.status));
    want(wc.status == IBV_WC_SUCCESS && wc.wr_id == wr_id);
    return true;
}

static bool wanted(const char *name, char **names) {
    if (!*names) return true;
    for (; *names; names++)
        if (strstr(name, *names)) return true;
    return false;
}

int main(int argc, char **argv) {
    (void)argc;
    setvbuf(stdout, NULL, _IOLBF, 0);
    unsigned passed = 0, failed = 0;
    const struct app_case *tables[] = {thread_cases, process_cases, memory_cases,
                                       meaning_cases, queue_cases,   xrc_cases,     region_cases};
    for (size_t table = 0; table < sizeof tables / sizeof *tables; table++) {
        for (const struct app_case *test = tables[table]; test->name; test++) {
            if (!wanted(test->name, argv + 1)) continue;
            uint64_t begin = now_ns();
            bool ok = test->run();
            printf("%-9s %-36s %5lu ms\n", ok ? "ok" : "FAILED", test->name, (now_ns() - begin) / 1000000);
            ok ? passed++ : failed++;
        }
    }
    printf("%u passed, %u failed\n", passed, failed);
    return failed || !passed;
}
