// Verbs' data, completion statuses, events and limits through the C interface.
//
//   statuses list                       names the cases
//   statuses loopback [CASE…]           both sides in this process
//   statuses server PORT [CASE…]        side B; the same cases on both ends
//   statuses client HOST PORT [CASE…]   side A
#include "cases.h"

int main(int argc, char **argv) {
    const struct test_case *const tables[] = {data_cases, error_cases, event_cases, limit_cases, NULL};
    return run_cases("statuses", argc - 1, argv + 1, tables);
}
