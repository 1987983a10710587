// The cases of `statuses`. Each runs on both sides at once, with an empty endpoint that the runner closes.
#ifndef FREEFLOW_TEST_CASES_H
#define FREEFLOW_TEST_CASES_H

#include "harness.h"

struct test_case {
    const char *name;
    void (*run)(struct side *side, struct endpoint *e);
};

// Each table ends with a case without a name.
extern const struct test_case data_cases[], error_cases[], event_cases[], limit_cases[];
#endif
