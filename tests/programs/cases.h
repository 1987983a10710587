// Cases, of `statuses` and of `direct`. Each runs on both sides at once, with an empty endpoint that the runner closes.
#ifndef FREEFLOW_TEST_CASES_H
#define FREEFLOW_TEST_CASES_H

#include "harness.h"

struct test_case {
    const char *name;
    void (*run)(struct side *side, struct endpoint *e);
};

// Each table ends with a case without a name.
extern const struct test_case data_cases[], error_cases[], event_cases[], limit_cases[];
extern const struct test_case mixed_cases[], lane_cases[], shared_cases[], stop_cases[], uc_cases[], ud_cases[], ud_order_cases[], idle_cases[], held_cases[];

// `list`; or `loopback`, `server PORT` or `client HOST PORT`, and then words: each case whose name has one of them
// runs, or all do. `tables` ends with NULL. The program's exit code.
int run_cases(const char *program, int argc, char **argv, const struct test_case *const *tables);

// The same on both sides, from `direct`'s command line.
extern uint64_t case_seed;
extern unsigned case_rounds;
extern enum ibv_qp_type case_type; // of those queue pairs that may be RC or UC
#endif
