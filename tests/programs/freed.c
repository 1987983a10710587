// Hands the library memory that was freed: tests/verbs/test_sanitizers.py shows by it that a report would come.
#include "harness.h"

#include <stdlib.h>

int main(void) {
    struct endpoint e;
    if (!endpoint_open(&e, &(struct options){0})) return 3;
    struct ibv_device_attr *volatile attributes = malloc(sizeof *attributes);
    free(attributes);
    return ibv_query_device(e.context, attributes) ? 4 : 0;
}
