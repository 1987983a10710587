// Traffic on the direct path, and on each other path alike: both ends check every byte and every
// order.
//
//   direct [-s SEED] [-n ROUNDS] [-u] loopback|server PORT|client HOST PORT [CASE…]
//
// Seed, rounds and -u (by UC, for the cases that fit it) have to be the same on both ends. A last word
// `held` runs what waits for a test to look at it.
#include "cases.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

uint64_t case_seed = 1;
unsigned case_rounds = 40;
enum ibv_qp_type case_type = IBV_QPT_RC;

int main(int argc, char **argv) {
    for (int option; (option = getopt(argc, argv, "+s:n:u")) != -1;) {
        switch (option) {
        case 's': case_seed = strtoull(optarg, NULL, 0); break;
        case 'n': case_rounds = (unsigned)strtoul(optarg, NULL, 0); break;
        case 'u': case_type = IBV_QPT_UC; break;
        default: return 2;
        }
    }
    const struct test_case *const tables[] = {mixed_cases, lane_cases, shared_cases, stop_cases, uc_cases, ud_cases, ud_order_cases, idle_cases, NULL};
    const struct test_case *const waits_for_test[] = {held_cases, NULL};
    bool held = argc && !strcmp(argv[argc - 1], "held");
    return run_cases("direct", argc - optind, argv + optind, held ? waits_for_test : tables);
}
