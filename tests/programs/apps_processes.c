// Forks, several processes on one vNIC, loading at run time.
#define _GNU_SOURCE
#include "apps.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static bool ended_well(pid_t child) {
    int status = 0;
    want(waitpid(child, &status, 0) == child);
    want(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return true;
}

// A message each way.
static bool both_ways(struct pair *p, uint64_t seed) {
    fill(p->a.memory, 5000, seed);
    want(!post_recv(&p->b, seed, 8192, 5000) && !post_send(&p->a, seed, 0, 5000, 0));
    want(completes(p->b.recv_cq, seed) && completes(p->a.send_cq, seed));
    want(holds(p->b.memory + 8192, 5000, seed));
    fill(p->b.memory, 3000, seed + 1);
    want(!post_remote(&p->a, IBV_WR_RDMA_READ, seed, 32768, 3000, 0, 0));
    want(completes(p->a.send_cq, seed));
    want(holds(p->a.memory + 32768, 3000, seed + 1));
    return true;
}

static bool child_exits(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    want(both_ways(&p, 1));
    pid_t child = fork();
    if (!child) {
        memset(p.a.memory, 0xee, p.a.bytes); // copies of its own
        memset(p.b.memory, 0xee, p.b.bytes);
        _exit(0);
    }
    want(both_ways(&p, 2));
    want(ended_well(child));
    want(both_ways(&p, 3));
    return pair_close(&p);
}

// The child lives on for a while, and the parent's pages are shared copy-on-write all that time.
static bool parent_works_beside_child(void) {
    struct pair p;
    int pipe_ends[2];
    want(pair_open(&p, &(struct options){0}, NULL));
    want(!pipe(pipe_ends));
    pid_t child = fork();
    if (!child) {
        char byte;
        close(pipe_ends[1]);
        fill(p.b.memory, 5000, 99);
        _exit(read(pipe_ends[0], &byte, 1) != 0 || !holds(p.b.memory, 5000, 99));
    }
    close(pipe_ends[0]);
    for (uint64_t i = 0; i < 20; i++) want(both_ways(&p, 10 + i));
    close(pipe_ends[1]);
    want(ended_well(child));
    want(both_ways(&p, 50));
    return pair_close(&p);
}

// Descriptors that another program would get.
static unsigned inherited_descriptors(void) {
    unsigned count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        int flags = fcntl(fd, F_GETFD);
        count += flags >= 0 && !(flags & FD_CLOEXEC);
    }
    return count;
}

static bool child_runs_another_program(void) {
    struct pair p;
    unsigned inherited = inherited_descriptors();
    want(pair_open(&p, &(struct options){.events = true}, NULL));
    want(inherited_descriptors() == inherited);
    pid_t child = fork();
    if (!child) {
        execl("/bin/true", "true", (char *)NULL);
        _exit(9);
    }
    want(both_ways(&p, 2));
    want(ended_well(child));
    want(!system("true"));
    want(both_ways(&p, 3));
    return pair_close(&p);
}

static bool everything_fails_with_eio(struct pair *p) {
    struct ibv_wc wc;
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    want(post_send(&p->a, 1, 0, 8, 0) == EIO);
    want(post_recv(&p->a, 1, 0, 8) == EIO);
    want(ibv_poll_cq(p->a.send_cq, 1, &wc) < 0);
    want(ibv_req_notify_cq(p->a.send_cq, 0) == EIO);
    want(ibv_query_qp(p->a.qp, &attr, IBV_QP_STATE, &init) == EIO);
    want(!ibv_alloc_pd(p->a.context) && errno == EIO);
    want(!ibv_reg_mr(p->a.pd, p->a.memory, 8, 0) && errno == EIO);
    want(ibv_destroy_qp(p->a.qp) == EIO);
    return true;
}

static bool child_opens_the_device(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){.shared_memory = true}, NULL));
    pid_t child = fork();
    if (!child) {
        struct pair mine;
        bool ok = everything_fails_with_eio(&p) && pair_open(&mine, &(struct options){0}, NULL) && both_ways(&mine, 5) &&
                  pair_close(&mine);
        ok = ok && pair_open(&mine, &(struct options){.shared_memory = true}, NULL) && both_ways(&mine, 6);
        _exit(!ok); // and leaves everything behind
    }
    want(both_ways(&p, 2));
    want(ended_well(child));
    want(both_ways(&p, 3));
    return pair_close(&p);
}

// A child of a child, whose parent is gone.
static bool grandchild_opens_the_device(void) {
    struct pair p;
    int pipe_ends[2];
    char byte = 0;
    want(pair_open(&p, &(struct options){0}, NULL) && !pipe(pipe_ends));
    pid_t child = fork();
    if (!child) {
        if (fork()) _exit(0);
        struct pair mine;
        bool ok = pair_open(&mine, &(struct options){0}, NULL) && both_ways(&mine, 5) && pair_close(&mine);
        _exit(write(pipe_ends[1], ok ? "k" : "x", 1) != 1);
    }
    want(ended_well(child));
    want(read(pipe_ends[0], &byte, 1) == 1 && byte == 'k');
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    want(both_ways(&p, 3));
    return pair_close(&p);
}

// Processes of one vNIC, each with its own session; each sends to the next one in a ring.
static bool processes_on_one_vnic(void) {
    enum { COUNT = 4, ROUNDS = 100 };
    int socks[COUNT][2];
    pid_t children[COUNT];
    for (unsigned i = 0; i < COUNT; i++) want(!socketpair(AF_UNIX, SOCK_STREAM, 0, socks[i]));
    for (unsigned i = 0; i < COUNT; i++) {
        if ((children[i] = fork())) continue;
        // `next` sends, `previous` receives.
        struct endpoint next = {0}, previous = {0};
        struct side forth = {ROLE_A, socks[i][0], "ring", false}, back = {ROLE_B, socks[(i + COUNT - 1) % COUNT][1], "ring", false};
        bool ok = endpoint_open(&next, &(struct options){.shared_memory = i % 2}) &&
                  endpoint_open(&previous, &(struct options){.shared_memory = i / 2});
        struct side *order[] = {&forth, &back};
        struct endpoint *ends[] = {&next, &previous};
        for (unsigned j = 0; ok && j < 2; j++) ok = endpoint_connect(order[(j + i) % 2], ends[(j + i) % 2]);
        for (uint64_t round = 0; ok && round < ROUNDS; round++) {
            fill(next.memory, 3000, round * COUNT + i);
            ok = !post_recv(&previous, round, 4096, 3000) && !post_send(&next, round, 0, 3000, 0) &&
                 completes(next.send_cq, round) && completes(previous.recv_cq, round) &&
                 holds(previous.memory + 4096, 3000, round * COUNT + (i + COUNT - 1) % COUNT);
        }
        _exit(!ok);
    }
    bool ok = true;
    for (unsigned i = 0; i < COUNT; i++) ok &= ended_well(children[i]);
    for (unsigned i = 0; i < COUNT; i++) close(socks[i][0]), close(socks[i][1]);
    return ok;
}

// As NCCL does it: by version, from a library that is opened at run time.
static bool names_by_version(void) {
    static const char *names[] = {
        "ibv_get_device_list", "ibv_free_device_list", "ibv_get_device_name", "ibv_open_device",    "ibv_close_device",
        "ibv_get_async_event", "ibv_ack_async_event",  "ibv_query_device",    "ibv_query_port",     "ibv_query_gid",
        "ibv_query_qp",        "ibv_alloc_pd",         "ibv_dealloc_pd",      "ibv_reg_mr",         "ibv_dereg_mr",
        "ibv_create_cq",       "ibv_destroy_cq",       "ibv_create_qp",       "ibv_modify_qp",      "ibv_destroy_qp",
        "ibv_fork_init",       "ibv_event_type_str"};
    for (unsigned round = 0; round < 20; round++) {
        void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
        want(library);
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) want(dlvsym(library, names[i], "IBVERBS_1.1"));
        want(dlvsym(library, "ibv_reg_mr_iova2", "IBVERBS_1.8") && dlvsym(library, "ibv_reg_dmabuf_mr", "IBVERBS_1.12"));
        want(dlvsym(library, "ibv_query_ece", "IBVERBS_1.10") && dlvsym(library, "ibv_query_port_speed", "IBVERBS_1.16"));
        struct ibv_device **(*list)(int *) = (struct ibv_device * *(*)(int *)) dlvsym(library, "ibv_get_device_list", "IBVERBS_1.1");
        struct ibv_context *(*open)(struct ibv_device *) =
            (struct ibv_context * (*)(struct ibv_device *)) dlvsym(library, "ibv_open_device", "IBVERBS_1.1");
        int (*close)(struct ibv_context *) = (int (*)(struct ibv_context *))dlvsym(library, "ibv_close_device", "IBVERBS_1.1");
        int count = 0;
        struct ibv_device **devices = list(&count);
        want(devices && count == 1);
        struct ibv_context *context = open(devices[0]);
        want(context && !close(context));
        free(devices); // some programs do; it costs a reference
        want(!dlclose(library));
    }
    return true;
}

const struct app_case process_cases[] = {
    {"child_exits", child_exits},
    {"parent_works_beside_child", parent_works_beside_child},
    {"child_runs_another_program", child_runs_another_program},
    {"child_opens_the_device", child_opens_the_device},
    {"grandchild_opens_the_device", grandchild_opens_the_device},
    {"processes_on_one_vnic", processes_on_one_vnic},
    {"names_by_version", names_by_version},
    {NULL, NULL},
};
