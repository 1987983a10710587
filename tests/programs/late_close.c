// rdma_destroy_ep in the place of librdmacm's: the first connection of a process ends half a second later. To be
// preloaded into programs of libfabric 1.17, which destroys the QP of a peer that has gone before it has polled what is
// in its CQ (rxm_ep_do_progress: a poll that finds nothing, then the events), and so loses its last completions, if the
// peer went between the two.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <rdma/rdma_cma.h>
#include <unistd.h>

void rdma_destroy_ep(struct rdma_cm_id *id) {
    static int was_called;
    void (*destroy)(struct rdma_cm_id *) = (void (*)(struct rdma_cm_id *))dlsym(RTLD_NEXT, "rdma_destroy_ep");
    if (!__atomic_exchange_n(&was_called, 1, __ATOMIC_RELAXED))
        usleep(500000);
    destroy(id);
}
