// Common parts of the cases of `apps`: two connected endpoints in one process, and checks that
// leave the case.
#ifndef FREEFLOW_TEST_APPS_H
#define FREEFLOW_TEST_APPS_H

#include "harness.h"

struct app_case {
    const char *name;
    bool (*run)(void);
};

extern const struct app_case thread_cases[], process_cases[], memory_cases[], meaning_cases[], queue_cases[],
    xrc_cases[], region_cases[];

// Says where, and makes the case fail.
bool app_fail(const char *file, int line, const char *condition);
#define want(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) return app_fail(__FILE__, __LINE__, #condition);                                             \
    } while (0)

struct pair {
    struct endpoint a, b;
};

// Both ends in this process, each with its own context; `first` has the options of A, `second` of B (NULL: as A).
bool pair_open(struct pair *p, const struct options *first, const struct options *second);
bool pair_close(struct pair *p);
// Connects two endpoints that are open.
bool connect_two(struct endpoint *a, struct endpoint *b);
// One completion that succeeded.
bool completes(struct ibv_cq *cq, uint64_t wr_id);

#endif
