// A container that takes all that its vNIC's limits give it, and keeps it.
//
//   hoard MOST WRITERS   has the router write to a CQ of 128 MiB whose completions nobody polls, 2 MiB by each of
//                        WRITERS queue pairs (64 fill it), makes further CQs of that size, and then QPs, SRQs, CQs,
//                        PDs, AHs, memory windows and regions: of each until it is refused with ENOMEM, MOST at most.
//
// It prints `made COUNT NAME` for each kind, `done`, and then stays until it is killed.
#include "connect.h"
#include "die.h"

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// WRITERS_MAX queues of the longest size fill a CQ of FILL_CQE entries: 128 MiB.
enum { WRITERS_MAX = 64, DEPTH = 32768, FILL_CQE = WRITERS_MAX * DEPTH, LARGE_MAX = 16, SECONDS_MAX = 300 };

static struct ibv_context *device;
static struct ibv_pd *pd;
static struct ibv_cq *small;
static union ibv_gid gid;
static unsigned char memory[4096] __attribute__((aligned(4096)));

// Completions of WRITEs without bytes, which nobody polls.
static void fill(int writers) {
    struct ibv_cq *cq = ibv_create_cq(device, FILL_CQE, NULL, NULL, 0);
    if (!cq)
        die("no CQ of %d entries", FILL_CQE);
    for (int i = 0; i < writers; i++) {
        struct ibv_qp_init_attr attributes = {.send_cq = cq, .recv_cq = small, .qp_type = IBV_QPT_RC,
                                              .cap = {.max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
        struct ibv_qp *qp = ibv_create_qp(pd, &attributes);
        if (!qp)
            die("no QP of %d requests", DEPTH);
        connect_to(qp, qp->qp_num, &gid);
        struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
        for (int n = 0; n < DEPTH; n++)
            if (ibv_post_send(qp, &wr, &bad))
                die("request %d can't be posted", n);
    }
    printf("posted %d\n", writers * DEPTH);
    fflush(stdout);
}

static void *make_large_cq(void) { return ibv_create_cq(device, FILL_CQE, NULL, NULL, 0); }
static void *make_cq(void) { return ibv_create_cq(device, 1, NULL, NULL, 0); }
static void *make_pd(void) { return ibv_alloc_pd(device); }
static void *make_mr(void) { return ibv_reg_mr(pd, memory, 1, IBV_ACCESS_LOCAL_WRITE); }
static void *make_mw(void) { return ibv_alloc_mw(pd, IBV_MW_TYPE_1); }
static void *make_qp(void) {
    struct ibv_qp_init_attr init = {.send_cq = small, .recv_cq = small, .qp_type = IBV_QPT_RC, .cap = {1, 1, 1, 1, 0}};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    if (qp)
        connect_to(qp, qp->qp_num, &gid);
    return qp;
}
static void *make_srq(void) {
    struct ibv_srq_init_attr init = {.attr = {.max_wr = 1, .max_sge = 1}};
    return ibv_create_srq(pd, &init);
}
static void *make_ah(void) {
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 1}};
    return ibv_create_ah(pd, &attr);
}

static void make_all(const char *name, void *(*make)(void), int most) {
    int count = 0;
    errno = 0;
    while (count < most && make())
        count++;
    if (count < most && errno != ENOMEM)
        die("%s %d: %s", name, count, strerror(errno));
    printf("made %d %s\n", count, name);
    fflush(stdout);
}

int main(int count, char **words) {
    int most = count == 3 ? atoi(words[1]) : 0, writers = count == 3 ? atoi(words[2]) : 0;
    if (most <= 0 || writers <= 0 || writers > WRITERS_MAX)
        return 64;
    alarm(SECONDS_MAX);
    int number;
    struct ibv_device **list = ibv_get_device_list(&number);
    if (!list || !number || !(device = ibv_open_device(list[0])))
        die("no device");
    pd = ibv_alloc_pd(device);
    small = ibv_create_cq(device, 16, NULL, NULL, 0);
    if (!pd || !small || ibv_query_gid(device, 1, 0, &gid))
        die("no PD, CQ or GID");
    fill(writers);
    make_all("large-cqs", make_large_cq, LARGE_MAX);
    make_all("qps", make_qp, most);
    make_all("srqs", make_srq, most);
    make_all("cqs", make_cq, most);
    make_all("pds", make_pd, most);
    make_all("ahs", make_ah, most);
    make_all("mws", make_mw, most);
    make_all("mrs", make_mr, most);
    printf("done\n");
    fflush(stdout);
    pause();
}
