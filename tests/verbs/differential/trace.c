// The program: a list of scenarios, each run in a process of its own; and how things are named in traces.
#define _GNU_SOURCE
#include "trace.h"

#include <errno.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SCENARIO_SECONDS 40

static struct {
    char name[64];
    scenario_function run;
    long argument;
    bool dangerous;
} scenarios[1024];
static size_t scenario_count;
static bool spare_the_kernel;

static void add_any(scenario_function run, long argument, bool dangerous, const char *format, va_list arguments) {
    if (scenario_count == sizeof scenarios / sizeof *scenarios) abort();
    vsnprintf(scenarios[scenario_count].name, sizeof scenarios->name, format, arguments);
    scenarios[scenario_count].run = run;
    scenarios[scenario_count].dangerous = dangerous;
    scenarios[scenario_count++].argument = argument;
}

void add(scenario_function run, long argument, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    add_any(run, argument, false, format, arguments);
    va_end(arguments);
}

void add_dangerous(scenario_function run, long argument, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    add_any(run, argument, true, format, arguments);
    va_end(arguments);
}

// ---- the trace

void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
}

const char *result(int rc) {
    const char *name = strerrorname_np(rc == -1 ? errno : rc < 0 ? -rc : rc);
    return rc == 0 ? "0" : name ? name : "unknown errno";
}

const char *pointer_result(const void *pointer) {
    return pointer ? "ok" : errno ? result(errno) : "refused without an errno";
}

void give_up(const char *what) {
    say("cannot go on: %s: %s", what, result(errno));
    fflush(stdout);
    _exit(0);
}

void not_offered(const char *what) {
    say("not offered: %s", what);
    fflush(stdout);
    _exit(0);
}

const char *opcode_name(enum ibv_wr_opcode opcode) {
    static const char *const names[] = {
        [IBV_WR_RDMA_WRITE] = "WRITE", [IBV_WR_RDMA_WRITE_WITH_IMM] = "WRITE_IMM", [IBV_WR_SEND] = "SEND",
        [IBV_WR_SEND_WITH_IMM] = "SEND_IMM", [IBV_WR_RDMA_READ] = "READ", [IBV_WR_ATOMIC_CMP_AND_SWP] = "CAS",
        [IBV_WR_ATOMIC_FETCH_AND_ADD] = "FAA", [IBV_WR_LOCAL_INV] = "LOCAL_INV", [IBV_WR_BIND_MW] = "BIND_MW",
        [IBV_WR_SEND_WITH_INV] = "SEND_INV", [IBV_WR_TSO] = "TSO",
    };
    return opcode < sizeof names / sizeof *names ? names[opcode] : "unknown opcode";
}

const char *wc_opcode_name(enum ibv_wc_opcode opcode) {
    switch (opcode) {
        case IBV_WC_SEND: return "SEND";
        case IBV_WC_RDMA_WRITE: return "WRITE";
        case IBV_WC_RDMA_READ: return "READ";
        case IBV_WC_COMP_SWAP: return "CAS";
        case IBV_WC_FETCH_ADD: return "FAA";
        case IBV_WC_BIND_MW: return "BIND_MW";
        case IBV_WC_LOCAL_INV: return "LOCAL_INV";
        case IBV_WC_RECV: return "RECV";
        case IBV_WC_RECV_RDMA_WITH_IMM: return "RECV_WRITE_IMM";
        default: return "unknown opcode";
    }
}

const char *state_name(enum ibv_qp_state state) {
    static const char *const names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
    return (unsigned)state < sizeof names / sizeof *names ? names[state] : "unknown state";
}

const char *type_name(enum ibv_qp_type type) { return type == IBV_QPT_UD ? "ud" : type == IBV_QPT_UC ? "uc" : "rc"; }

const char *status_name(enum ibv_wc_status status) {
    static const char *const names[] = {
        "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "MW_BIND_ERR",
        "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR",
        "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR", "REM_ABORT_ERR", "INV_EECN_ERR",
        "INV_EEC_STATE_ERR", "FATAL_ERR", "RESP_TIMEOUT_ERR", "GENERAL_ERR",
    };
    return (unsigned)status < sizeof names / sizeof *names ? names[status] : "unknown status";
}

// ---- running

static void run_one(size_t index) {
    printf("== %s\n", scenarios[index].name);
    if (spare_the_kernel && scenarios[index].dangerous) {
        printf("not run: the kernel would not survive it\n");
        return;
    }
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        setvbuf(stdout, NULL, _IOLBF, 0);
        alarm(SCENARIO_SECONDS);
        device_open();
        scenarios[index].run(scenarios[index].argument);
        fflush(stdout);
        _exit(0);
    }
    int status = 0;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    if (child < 0) printf("no process\n");
    else if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) printf("timeout\n");
    else if (WIFSIGNALED(status)) printf("killed by SIG%s\n", sigabbrev_np(WTERMSIG(status)));
    fflush(stdout);
}

static int usage(void) {
    fprintf(stderr, "usage: differential [--spare-the-kernel] [--wait MS] list|all|PATTERN…\n");
    return 2;
}

int main(int argc, char **argv) {
    add_states();
    add_attributes();
    add_posting();
    add_data();
    add_keys();
    add_errors();
    add_flow();
    add_cq();
    add_srq();
    add_ud();
    add_windows();
    add_objects();
    add_extended();
    int first = 1;
    for (; first < argc && argv[first][0] == '-'; first++) {
        if (!strcmp(argv[first], "--spare-the-kernel")) spare_the_kernel = true;
        else if (!strcmp(argv[first], "--wait") && first + 1 < argc) wait_ms = atoi(argv[++first]);
        else return usage();
    }
    if (first >= argc) return usage();
    bool list = !strcmp(argv[first], "list"), any = false;
    for (size_t i = 0; i < scenario_count; i++) {
        bool wanted = list || !strcmp(argv[first], "all");
        for (int word = first; word < argc && !wanted; word++) wanted = !fnmatch(argv[word], scenarios[i].name, 0);
        if (!wanted) continue;
        any = true;
        if (list) printf("%s\n", scenarios[i].name);
        else run_one(i);
    }
    return any ? 0 : usage();
}
