// Ends the program where a condition does not hold, with the place and the condition.
#ifndef FREEFLOW_TEST_MUST_H
#define FREEFLOW_TEST_MUST_H

#include <stdio.h>
#include <stdlib.h>

#define must(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#endif
