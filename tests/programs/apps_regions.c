// Regions beyond plain ones: changed in place, paged on demand, device memory, windows, null, imported from other
// processes.
#define _GNU_SOURCE
#include "apps.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, PART = 3000 };

#define ALL_RIGHTS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define refuses(call, wanted_errno) (errno = 0, (call) == NULL && errno == (wanted_errno))

static void *pages(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

// WRITE, READ or an atomic add of 1 by E, from its buffer's `offset` to any address with any key.
static int post_to(struct endpoint *e, enum ibv_wr_opcode opcode, size_t offset, uint32_t length, uint64_t address,
                   uint32_t rkey) {
    struct ibv_sge sge = {(uintptr_t)e->memory + offset, length, e->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 7, .sg_list = &sge, .num_sge = 1, .opcode = opcode}, *bad;
    wr.wr.rdma.remote_addr = address;
    wr.wr.rdma.rkey = rkey;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = address;
        wr.wr.atomic.rkey = rkey;
        wr.wr.atomic.compare_add = 1;
    }
    return ibv_post_send(e->qp, &wr, &bad);
}

static bool reaches(struct endpoint *e, enum ibv_wr_opcode opcode, size_t offset, uint32_t length, uint64_t address,
                    uint32_t rkey) {
    want(!post_to(e, opcode, offset, length, address, rkey));
    return completes(e->send_cq, 7);
}

// Connects a pair again whose QPs are in any state.
static bool reconnect(struct pair *p) {
    want(qp_modify_state(p->a.qp, IBV_QPS_RESET) && qp_modify_state(p->b.qp, IBV_QPS_RESET));
    return connect_two(&p->a, &p->b);
}

// A request that ends with that status; the pair works again afterwards.
static bool ends_with(struct pair *p, enum ibv_wc_status status, enum ibv_wr_opcode opcode, uint32_t length,
                      uint64_t address, uint32_t rkey) {
    struct ibv_wc wc;
    want(!post_to(&p->a, opcode, 0, length, address, rkey) && poll_one(p->a.send_cq, &wc, 20000));
    if (wc.status != status) fprintf(stderr, "  status %s\n", ibv_wc_status_str(wc.status));
    want(wc.status == status);
    return reconnect(p);
}

// ---- ibv_rereg_mr

static bool reregister_moves_and_changes(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    uint8_t *here = pages(PAGE), *there = pages(PAGE);
    struct ibv_pd *other = ibv_alloc_pd(p.b.context);
    struct ibv_mr *mr = ibv_reg_mr(p.b.pd, here, PAGE, ALL_RIGHTS);
    want(here && there && other && mr);
    uint32_t lkey = mr->lkey, rkey = mr->rkey;
    fill(p.a.memory, PART, 1);
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, (uintptr_t)here, rkey) && holds(here, PART, 1));
    want(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, there, PAGE, 0));
    want(mr->addr == there && mr->length == PAGE && mr->lkey == lkey && mr->rkey == rkey);
    fill(p.a.memory, PART, 2);
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, (uintptr_t)there, rkey));
    want(holds(there, PART, 2) && holds(here, PART, 1));
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, 8, (uintptr_t)here, rkey));
    want(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_READ));
    want(reaches(&p.a, IBV_WR_RDMA_READ, 8000, PART, (uintptr_t)there, rkey) && holds(p.a.memory + 8000, PART, 2));
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, 8, (uintptr_t)there, rkey));
    want(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, other, NULL, 0, 0) && mr->pd == other);
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_READ, 8, (uintptr_t)there, rkey));
    int everything = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
    want(!ibv_rereg_mr(mr, everything, p.b.pd, here, 16, ALL_RIGHTS) && mr->pd == p.b.pd && mr->length == 16);
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, 16, (uintptr_t)here, rkey));
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, 17, (uintptr_t)here, rkey));
    want(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(other));
    munmap(here, PAGE), munmap(there, PAGE);
    return pair_close(&p);
}

static int changed(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access) {
    errno = 0;
    return ibv_rereg_mr(mr, flags, pd, addr, length, access);
}

static bool reregister_refuses(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    uint8_t *here = pages(PAGE), *read_only = pages(PAGE);
    want(here && read_only && !mprotect(read_only, PAGE, PROT_READ));
    struct ibv_mr *mr = ibv_reg_mr(p.b.pd, here, PAGE, ALL_RIGHTS | IBV_ACCESS_MW_BIND);
    const int moves = IBV_REREG_MR_CHANGE_TRANSLATION, access = IBV_REREG_MR_CHANGE_ACCESS;
    want(changed(mr, 8, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL);
    want(changed(mr, moves, NULL, NULL, PAGE, 0) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL);
    want(changed(mr, moves, NULL, here, 0, 0) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL);
    want(changed(mr, moves, NULL, here, PAGE, 1) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL);
    want(changed(mr, 0, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_CMD && errno == EINVAL);
    want(changed(mr, access, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE) == IBV_REREG_MR_ERR_CMD && errno == EINVAL);
    want(changed(mr, moves, NULL, (void *)PAGE, PAGE, 0) == IBV_REREG_MR_ERR_CMD && errno == EFAULT);
    want(changed(mr, moves, NULL, read_only, PAGE, 0) == IBV_REREG_MR_ERR_CMD && errno == EFAULT);
    want(changed(mr, IBV_REREG_MR_CHANGE_PD, p.a.pd, NULL, 0, 0) == IBV_REREG_MR_ERR_CMD && errno == EINVAL);
    struct ibv_mr *null = ibv_alloc_null_mr(p.b.pd);
    want(null && changed(null, access, NULL, NULL, 0, 1) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL);
    struct ibv_mw *mw = ibv_alloc_mw(p.b.pd, IBV_MW_TYPE_1);
    struct ibv_mw_bind bind = {.wr_id = 3, .bind_info = {mr, (uintptr_t)here, PAGE, IBV_ACCESS_REMOTE_WRITE}};
    want(mw && !ibv_bind_mw(p.b.qp, mw, &bind) && completes(p.b.send_cq, 3));
    want(changed(mr, access, NULL, NULL, 0, 1) == IBV_REREG_MR_ERR_CMD && errno == EBUSY);
    want(ibv_dereg_mr(mr) == EBUSY);
    // After all that the region is as it was.
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, (uintptr_t)here, mr->rkey));
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, (uintptr_t)here, mw->rkey));
    want(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(mr) && !ibv_dereg_mr(null));
    munmap(here, PAGE), munmap(read_only, PAGE);
    return pair_close(&p);
}

// Writes are under way while the region moves: each either arrives whole or fails, and what it covered before stays
// still.
static bool reregister_under_traffic(void) {
    enum { BYTES = 1 << 20, WRITES = 16, ROUNDS = 10 };
    struct pair p;
    want(pair_open(&p, &(struct options){.bytes = BYTES}, NULL));
    uint8_t *place[2] = {pages(BYTES), pages(BYTES)}, *still = malloc(BYTES);
    want(place[0] && place[1] && still);
    struct ibv_mr *mr = ibv_reg_mr(p.b.pd, place[0], BYTES, ALL_RIGHTS);
    for (unsigned round = 0; round < ROUNDS; round++) {
        uint8_t *from = place[round % 2], *to = place[(round + 1) % 2];
        struct ibv_wc wc;
        unsigned failed = 0;
        fill(p.a.memory, BYTES, round);
        for (unsigned i = 0; i < WRITES; i++)
            want(!post_to(&p.a, IBV_WR_RDMA_WRITE, 0, BYTES, (uintptr_t)from, mr->rkey));
        want(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, to, BYTES, 0));
        memcpy(still, from, BYTES);
        for (unsigned i = 0; i < WRITES; i++) {
            want(poll_one(p.a.send_cq, &wc, 10000));
            want(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_WR_FLUSH_ERR);
            failed += wc.status != IBV_WC_SUCCESS;
        }
        want(!memcmp(still, from, BYTES));
        if (failed < WRITES) want(holds(from, BYTES, round));
        if (failed) want(reconnect(&p));
        want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, BYTES, (uintptr_t)to, mr->rkey) && holds(to, BYTES, round));
    }
    want(!ibv_dereg_mr(mr));
    free(still);
    munmap(place[0], BYTES), munmap(place[1], BYTES);
    return pair_close(&p);
}

// The same while the region gets the rights that it has: nobody notices, wherever its bytes are. By the direct path the
// first change takes granted memory back, so that later ones meet requests which the slow path carries.
static bool reregistered_alike(struct pair *p, struct ibv_mr *mr, int access, uint64_t seed) {
    enum { BYTES = 1 << 20, WRITES = 12 };
    uint8_t *memory = mr->addr;
    struct ibv_wc wc;
    fill(p->a.memory, BYTES, seed);
    for (unsigned i = 0; i < WRITES; i++)
        want(!post_to(&p->a, IBV_WR_RDMA_WRITE, 0, BYTES, (uintptr_t)memory, mr->rkey));
    for (unsigned i = 0; i < WRITES; i++) {
        want(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, access));
        want(!ibv_rereg_mr(p->a.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL_RIGHTS));
        want(poll_one(p->a.send_cq, &wc, 10000));
        if (wc.status != IBV_WC_SUCCESS) fprintf(stderr, "  request %u: %s\n", i, ibv_wc_status_str(wc.status));
        want(wc.status == IBV_WC_SUCCESS);
    }
    return holds(memory, BYTES, seed);
}

static bool reregister_alike_is_not_noticed(void) {
    enum { BYTES = 1 << 20, ROUNDS = 6 };
    struct pair p;
    want(pair_open(&p, &(struct options){.bytes = BYTES}, NULL));
    // On demand: always by the slow path.
    for (unsigned kind = 0; kind < 2; kind++) {
        int access = ALL_RIGHTS | (kind ? IBV_ACCESS_ON_DEMAND : 0);
        uint8_t *memory = pages(BYTES);
        struct ibv_mr *mr = memory ? ibv_reg_mr(p.b.pd, memory, BYTES, access) : NULL;
        want(mr);
        for (unsigned round = 0; round < ROUNDS; round++) want(reregistered_alike(&p, mr, access, round));
        want(!ibv_dereg_mr(mr));
        munmap(memory, BYTES);
    }
    return pair_close(&p);
}

// ---- rights and kinds

static bool access_bits(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    uint8_t *memory = pages(PAGE);
    struct ibv_mr *mr = ibv_reg_mr(p.b.pd, memory, PAGE, ALL_RIGHTS | IBV_ACCESS_ZERO_BASED);
    want(mr && mr->addr == memory);
    fill(p.a.memory, PART, 4);
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, 100, mr->rkey) && holds(memory + 100, PART, 4));
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, 8, (uintptr_t)memory, mr->rkey));
    want(!ibv_dereg_mr(mr));
    enum { FLUSH_GLOBAL = 1 << 8, FLUSH_PERSISTENT = 1 << 9 };
    want((mr = ibv_reg_mr(p.b.pd, memory, PAGE, ALL_RIGHTS | FLUSH_GLOBAL | IBV_ACCESS_MW_BIND)) && !ibv_dereg_mr(mr));
    want(refuses(ibv_reg_mr(p.b.pd, memory, PAGE, ALL_RIGHTS | FLUSH_PERSISTENT), EOPNOTSUPP));
    want(refuses(ibv_reg_mr(p.b.pd, memory, PAGE, 1 << 15), EINVAL));
    munmap(memory, PAGE);
    return pair_close(&p);
}

// `struct ibv_mr_init_attr` of newer headers, as far as it is used here.
struct mr_init {
    size_t length;
    int access;
    uint64_t comp_mask, iova;
    void *addr;
    int fd;
    uint64_t fd_offset;
    void *dmah, *buf;
};

static bool registration_by_attributes(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    enum { IOVA = 1, ADDR = 2, FD = 4, DMAH = 16 };
    struct ibv_mr *(*reg)(struct ibv_pd *, struct mr_init *) = (struct ibv_mr * (*)(struct ibv_pd *, struct mr_init *))
        dlsym(RTLD_DEFAULT, "ibv_reg_mr_ex");
    uint8_t *memory = pages(PAGE);
    struct mr_init init = {.length = PAGE, .access = ALL_RIGHTS, .comp_mask = ADDR | IOVA, .iova = 1 << 20, .addr = memory};
    struct ibv_mr *mr;
    want(reg && memory && (mr = reg(p.b.pd, &init)));
    fill(p.a.memory, PART, 5);
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, (1 << 20) + 8, mr->rkey) && holds(memory + 8, PART, 5));
    want(!ibv_dereg_mr(mr));
    init.comp_mask = 0;
    want(refuses(reg(p.b.pd, &init), EINVAL));
    init.comp_mask = ADDR | FD;
    want(refuses(reg(p.b.pd, &init), EINVAL));
    init.comp_mask = FD;
    want(refuses(reg(p.b.pd, &init), EOPNOTSUPP));
    init.comp_mask = ADDR | DMAH;
    want(refuses(reg(p.b.pd, &init), EOPNOTSUPP));
    munmap(memory, PAGE);
    return pair_close(&p);
}

static bool null_region(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    struct ibv_mr *null_a = ibv_alloc_null_mr(p.a.pd), *null_b = ibv_alloc_null_mr(p.b.pd);
    want(null_a && null_b);
    memset(p.b.memory, 0xee, PAGE);
    struct ibv_sge nothing = {12345, PART, null_a->lkey};
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &nothing, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    want(!post_recv(&p.b, 2, 0, PAGE) && !ibv_post_send(p.a.qp, &wr, &bad));
    want(completes(p.a.send_cq, 1) && completes(p.b.recv_cq, 2));
    for (unsigned i = 0; i < PAGE; i++) want(p.b.memory[i] == (i < PART ? 0 : 0xee));
    want(!post_recv_key(&p.b, 3, 0, PART, null_b->lkey) && !post_send(&p.a, 4, 0, PART, 0));
    want(completes(p.a.send_cq, 4) && completes(p.b.recv_cq, 3));
    want(p.b.memory[0] == 0 && p.b.memory[PART] == 0xee);
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, 8, 0, null_b->lkey));
    want(!ibv_dereg_mr(null_a) && !ibv_dereg_mr(null_b));
    return pair_close(&p);
}

// ---- windows of type 1

static bool windows_of_type_1(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    uint8_t *memory = pages(2 * PAGE);
    struct ibv_mr *mr = ibv_reg_mr(p.b.pd, memory, 2 * PAGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    struct ibv_mr *plain = ibv_reg_mr(p.b.pd, memory, PAGE, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_mw *mw = ibv_alloc_mw(p.b.pd, IBV_MW_TYPE_1);
    want(memory && mr && plain && mw && refuses(ibv_alloc_mw(p.b.pd, 3), EINVAL));
    uint32_t unbound = mw->rkey;
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, 8, (uintptr_t)memory, unbound));
    struct ibv_mw_bind bind = {.wr_id = 3, .bind_info = {mr, (uintptr_t)memory + PAGE, PAGE, IBV_ACCESS_REMOTE_WRITE}};
    want(!ibv_bind_mw(p.b.qp, mw, &bind) && completes(p.b.send_cq, 3));
    uint32_t first = mw->rkey;
    want(first != unbound && first >> 8 == unbound >> 8 && ibv_dereg_mr(mr) == EBUSY);
    fill(p.a.memory, PART, 6);
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, (uintptr_t)memory + PAGE, first) && holds(memory + PAGE, PART, 6));
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, 8, (uintptr_t)memory, first));
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_READ, 8, (uintptr_t)memory + PAGE, first));
    // Bound again, elsewhere: the old key is void. Only windows of type 2 count from zero.
    bind.bind_info.addr = (uintptr_t)memory;
    bind.bind_info.mw_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED;
    want(ibv_bind_mw(p.b.qp, mw, &bind) == EINVAL && mw->rkey == first);
    bind.bind_info.mw_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    want(!ibv_bind_mw(p.b.qp, mw, &bind) && completes(p.b.send_cq, 3) && mw->rkey != first);
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, (uintptr_t)memory, mw->rkey) && holds(memory, PART, 6));
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, 8, (uintptr_t)memory + PAGE, first));
    // A length of zero takes the binding away.
    bind.bind_info = (struct ibv_mw_bind_info){mr, 0, 0, 0};
    want(!ibv_bind_mw(p.b.qp, mw, &bind) && completes(p.b.send_cq, 3));
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, 8, (uintptr_t)memory, mw->rkey));
    // A region without MW_BIND.
    struct ibv_wc wc;
    bind.bind_info = (struct ibv_mw_bind_info){plain, (uintptr_t)memory, 8, IBV_ACCESS_REMOTE_READ};
    want(!ibv_bind_mw(p.b.qp, mw, &bind) && poll_one(p.b.send_cq, &wc, 10000) && wc.status == IBV_WC_MW_BIND_ERR);
    bind.bind_info = (struct ibv_mw_bind_info){NULL, (uintptr_t)memory, 8, 0};
    want(ibv_bind_mw(p.b.qp, mw, &bind) == EINVAL);
    want(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(mr) && !ibv_dereg_mr(plain));
    munmap(memory, 2 * PAGE);
    return pair_close(&p);
}

// ---- on-demand paging

// Mapped where nothing is: another thread, as the library's that shares pages, may have something there for a moment.
static bool map_at(uint8_t *memory, size_t bytes) {
    for (int tries = 0; tries < 1000; tries++) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
        if (mmap(memory, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == memory) return true;
        if (errno != EEXIST) return false;
        usleep(1000);
    }
    return false;
}

static bool implicit_on_demand(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    struct ibv_mr *mr = ibv_reg_mr(p.b.pd, NULL, SIZE_MAX, ALL_RIGHTS | IBV_ACCESS_ON_DEMAND);
    // Where no other mapping comes while it is away: the kernel begins at the upper end; nor is it a sanitizer's.
    uint8_t *memory = (uint8_t *)(1ull << 45), *heap = malloc(PART);
    want(mr && heap && map_at(memory, 4 * PAGE));
    fill(p.a.memory, PART, 8);
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, (uintptr_t)memory + 5, mr->rkey) && holds(memory + 5, PART, 8));
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, (uintptr_t)heap, mr->rkey) && holds(heap, PART, 8));
    // The present mapping counts, not the one before.
    want(!madvise(memory, 4 * PAGE, MADV_DONTNEED));
    want(reaches(&p.a, IBV_WR_RDMA_READ, 8000, 8, (uintptr_t)memory + 5, mr->rkey) && !p.a.memory[8000]);
    want(!munmap(memory, 4 * PAGE));
    want(ends_with(&p, IBV_WC_REM_OP_ERR, IBV_WR_RDMA_WRITE, PART, (uintptr_t)memory, mr->rkey));
    want(map_at(memory, 4 * PAGE));
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, (uintptr_t)memory + PAGE, mr->rkey) && holds(memory + PAGE, PART, 8));
    want(refuses(ibv_reg_mr(p.b.pd, NULL, SIZE_MAX, ALL_RIGHTS), EFAULT));
    want(!ibv_dereg_mr(mr));
    // An explicit region may be made before there is memory.
    want(!munmap(memory, 4 * PAGE));
    want((mr = ibv_reg_mr(p.b.pd, memory, 4 * PAGE, ALL_RIGHTS | IBV_ACCESS_ON_DEMAND)));
    want(map_at(memory, 4 * PAGE));
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, (uintptr_t)memory, mr->rkey) && holds(memory, PART, 8));
    want(!ibv_dereg_mr(mr));
    free(heap);
    munmap(memory, 4 * PAGE);
    return pair_close(&p);
}

static bool advice(void) {
    struct endpoint e = {0};
    want(endpoint_open(&e, &(struct options){0}));
    struct ibv_pd *other = ibv_alloc_pd(e.context);
    uint8_t *memory = pages(4 * PAGE);
    unsigned char resident[4] = {0};
    struct ibv_mr *mr = ibv_reg_mr(e.pd, memory, 4 * PAGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);
    struct ibv_mr *readable = ibv_reg_mr(e.pd, memory, 4 * PAGE, IBV_ACCESS_ON_DEMAND);
    want(other && memory && mr && readable);
    const enum ibv_advise_mr_advice read = IBV_ADVISE_MR_ADVICE_PREFETCH, write = IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;
    struct ibv_sge sge = {(uintptr_t)memory + PAGE, 2 * PAGE, mr->lkey};
    want(!ibv_advise_mr(e.pd, 2, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1)); // PREFETCH_NO_FAULT
    want(!mincore(memory, 4 * PAGE, resident) && !(resident[1] & 1));
    want(!ibv_advise_mr(e.pd, write, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
    want(!mincore(memory, 4 * PAGE, resident) && (resident[1] & 1) && (resident[2] & 1) && !(resident[3] & 1));
    want(!ibv_advise_mr(e.pd, read, 0, &sge, 1));
    want(ibv_advise_mr(e.pd, read, 2, &sge, 1) == EINVAL);
    want(ibv_advise_mr(e.pd, read, 0, &sge, 0) == EINVAL);
    want(ibv_advise_mr(e.pd, 77, 0, &sge, 1) == EOPNOTSUPP);
    want(ibv_advise_mr(other, read, 0, &sge, 1) == EPERM);
    sge.lkey = readable->lkey;
    want(!ibv_advise_mr(e.pd, read, 0, &sge, 1) && ibv_advise_mr(e.pd, write, 0, &sge, 1) == EPERM);
    sge.lkey = e.mr->lkey; // not paged on demand
    want(ibv_advise_mr(e.pd, read, 0, &sge, 1) == ENOENT);
    sge = (struct ibv_sge){(uintptr_t)memory + PAGE, 3 * PAGE + 1, mr->lkey};
    want(ibv_advise_mr(e.pd, read, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1) == EFAULT);
    sge = (struct ibv_sge){(uintptr_t)memory, 4 * PAGE, mr->lkey};
    want(!munmap(memory + PAGE, PAGE) && ibv_advise_mr(e.pd, read, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1) == EFAULT);
    want(!ibv_dereg_mr(mr) && ibv_advise_mr(e.pd, read, 0, &sge, 1) == ENOENT);
    want(!ibv_dereg_mr(readable) && !ibv_dealloc_pd(other));
    munmap(memory, 4 * PAGE);
    return endpoint_close(&e);
}

// ---- device memory

static bool device_memory(void) {
    struct pair p;
    want(pair_open(&p, &(struct options){0}, NULL));
    struct ibv_alloc_dm_attr attr = {.length = 2 * PAGE + 4, .log_align_req = 6};
    struct ibv_dm *dm = ibv_alloc_dm(p.b.context, &attr);
    uint8_t copy[2 * PAGE + 4];
    want(dm && !ibv_memcpy_from_dm(copy, dm, 0, sizeof copy) && !copy[0] && !copy[sizeof copy - 1]);
    struct ibv_mr *mr = ibv_reg_dm_mr(p.b.pd, dm, 8, 2 * PAGE - 4, ALL_RIGHTS | IBV_ACCESS_ZERO_BASED);
    want(mr && !mr->addr && ibv_free_dm(dm) == EBUSY);
    fill(p.a.memory, PART, 9);
    want(reaches(&p.a, IBV_WR_RDMA_WRITE, 0, PART, 96, mr->rkey));
    want(!ibv_memcpy_from_dm(copy, dm, 104, PART) && holds(copy, PART, 9));
    want(reaches(&p.a, IBV_WR_RDMA_READ, 8000, PART, 96, mr->rkey) && holds(p.a.memory + 8000, PART, 9));
    uint64_t value = 41;
    want(!ibv_memcpy_to_dm(dm, 16, &value, 8) && reaches(&p.a, IBV_WR_ATOMIC_FETCH_AND_ADD, 16, 8, 8, mr->rkey));
    want(!memcmp(p.a.memory + 16, &value, 8) && !ibv_memcpy_from_dm(&value, dm, 16, 8) && value == 42);
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, 8, 2 * PAGE - 8, mr->rkey));
    // As the source of a SEND.
    struct ibv_sge sge = {96, PART, mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 5, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    want(!post_recv(&p.a, 6, 20000, PART) && !ibv_post_send(p.b.qp, &wr, &bad));
    want(completes(p.b.send_cq, 5) && completes(p.a.recv_cq, 6) && holds(p.a.memory + 20000, PART, 9));
    want(ibv_memcpy_to_dm(dm, 2, copy, 4) == EINVAL && ibv_memcpy_to_dm(dm, 4, copy, 2) == EINVAL);
    want(ibv_memcpy_from_dm(copy, dm, 2 * PAGE + 4, 4) == EFAULT);
    want(refuses(ibv_reg_dm_mr(p.b.pd, dm, 0, PAGE, IBV_ACCESS_LOCAL_WRITE), EINVAL));
    want(refuses(ibv_reg_dm_mr(p.b.pd, dm, 8, 2 * PAGE, IBV_ACCESS_ZERO_BASED), EINVAL));
    want(!ibv_dereg_mr(mr));
    // A region without bytes gives nothing.
    want((mr = ibv_reg_dm_mr(p.b.pd, dm, 0, 0, ALL_RIGHTS | IBV_ACCESS_ZERO_BASED)) && !mr->length);
    want(ibv_free_dm(dm) == EBUSY && ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, 4, 0, mr->rkey));
    want(ends_with(&p, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_READ, 1, UINT64_MAX, mr->rkey));
    want(!ibv_dereg_mr(mr) && !ibv_free_dm(dm));
    attr.comp_mask = 1;
    want(refuses(ibv_alloc_dm(p.b.context, &attr), EINVAL));
    return pair_close(&p);
}

static bool device_memory_runs_out(void) {
    struct ibv_context *context = open_first_device();
    struct ibv_device_attr_ex attr;
    want(context && !ibv_query_device_ex(context, NULL, &attr) && attr.max_dm_size >= 4 * PAGE);
    struct ibv_alloc_dm_attr half = {.length = attr.max_dm_size / 2}, whole = {.length = attr.max_dm_size},
                             more = {.length = attr.max_dm_size + 1}, one = {.length = 1};
    want(refuses(ibv_alloc_dm(context, &more), EINVAL) && refuses(ibv_alloc_dm(context, &(struct ibv_alloc_dm_attr){0}), EINVAL));
    struct ibv_dm *first = ibv_alloc_dm(context, &half), *second = ibv_alloc_dm(context, &half);
    want(first && second && refuses(ibv_alloc_dm(context, &one), ENOMEM));
    want(!ibv_free_dm(second) && refuses(ibv_alloc_dm(context, &whole), ENOMEM) && !ibv_free_dm(first));
    want((first = ibv_alloc_dm(context, &whole)) != NULL);
    // Objects that the program leaves go with the context.
    want(!ibv_close_device(context));
    want((context = open_first_device()) && !ibv_close_device(context));
    return true;
}

// ---- parent domains

// No parent domain goes before what was made with it.
static bool parent_in_use(struct ibv_context *context, struct ibv_pd *parent) {
    struct ibv_cq_init_attr_ex attr = {.cqe = 4, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = parent};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &attr);
    want(cq && ibv_dealloc_pd(parent) == EBUSY);
    struct ibv_qp_init_attr init = {
        .send_cq = ibv_cq_ex_to_cq(cq), .recv_cq = ibv_cq_ex_to_cq(cq), .cap = {1, 1, 1, 1, 0}, .qp_type = IBV_QPT_UD};
    struct ibv_qp *qp = ibv_create_qp(parent, &init);
    want(qp && qp->pd == parent && !ibv_destroy_qp(qp));
    want(!ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
    struct ibv_srq *srq = ibv_create_srq(parent, &(struct ibv_srq_init_attr){.attr = {1, 1, 0}});
    want(srq && ibv_dealloc_pd(parent) == EBUSY && !ibv_destroy_srq(srq));
    struct ibv_mw *mw = ibv_alloc_mw(parent, IBV_MW_TYPE_2);
    want(mw && ibv_dealloc_pd(parent) == EBUSY && !ibv_dealloc_mw(mw));
    struct ibv_ah_attr route = {.is_global = 1, .port_num = 1};
    want(!ibv_query_gid(context, 1, 0, &route.grh.dgid));
    struct ibv_ah *ah = ibv_create_ah(parent, &route);
    want(ah && ibv_dealloc_pd(parent) == EBUSY && !ibv_destroy_ah(ah));
    // A region that changes its PD.
    struct ibv_pd *plain = ibv_alloc_pd(context);
    void *memory = pages(PAGE);
    struct ibv_mr *mr = ibv_reg_mr(plain, memory, PAGE, IBV_ACCESS_LOCAL_WRITE);
    want(mr && !ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, parent, NULL, 0, 0) && mr->pd == parent);
    want(ibv_dealloc_pd(parent) == EBUSY && !ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, plain, NULL, 0, 0));
    want(ibv_dealloc_pd(plain) == EBUSY && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(plain));
    munmap(memory, PAGE);
    return true;
}

static bool parent_domains(void) {
    struct ibv_context *context = open_first_device();
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_td *td = ibv_alloc_td(context, &(struct ibv_td_init_attr){0});
    want(context && pd && td && refuses(ibv_alloc_td(context, &(struct ibv_td_init_attr){1}), EINVAL));
    want(refuses(ibv_alloc_parent_domain(context, &(struct ibv_parent_domain_init_attr){0}), EINVAL));
    want(refuses(ibv_alloc_parent_domain(context, &(struct ibv_parent_domain_init_attr){.pd = pd, .comp_mask = 8}), EINVAL));
    struct ibv_pd *parent = ibv_alloc_parent_domain(context, &(struct ibv_parent_domain_init_attr){.pd = pd, .td = td});
    want(parent && parent != pd && parent->context == context);
    want(ibv_dealloc_pd(pd) == EBUSY && ibv_dealloc_td(td) == EBUSY);
    struct ibv_context *other = open_first_device();
    struct ibv_cq_init_attr_ex foreign = {.cqe = 4, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = parent};
    want(other && refuses(ibv_create_cq_ex(other, &foreign), EINVAL) && !ibv_close_device(other));
    struct ibv_pd *second = ibv_alloc_parent_domain(context, &(struct ibv_parent_domain_init_attr){.pd = parent});
    uint8_t *memory = pages(PAGE);
    struct ibv_mr *mr = ibv_reg_mr(parent, memory, PAGE, ALL_RIGHTS);
    want(second && mr && mr->pd == parent);
    want(!ibv_dereg_mr(mr) && parent_in_use(context, parent) && !ibv_dealloc_pd(parent) && !ibv_dealloc_td(td));
    want(ibv_dealloc_pd(pd) == EBUSY && !ibv_dealloc_pd(second) && !ibv_dealloc_pd(pd));
    munmap(memory, PAGE);
    return !ibv_close_device(context);
}

// ---- objects of another process

// Facts that the exporter gives besides the descriptor.
struct exported {
    uint32_t pd, mr, dm;
    uint64_t memory;
};

static bool send_descriptor(int sock, int descriptor, const struct exported *what) {
    char room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec bytes = {(void *)what, sizeof *what};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    return sendmsg(sock, &message, 0) == sizeof *what;
}

static int take_descriptor(int sock, struct exported *what) {
    char room[CMSG_SPACE(sizeof(int))];
    int descriptor = -1;
    struct iovec bytes = {what, sizeof *what};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    if (recvmsg(sock, &message, 0) == sizeof *what) memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
    return descriptor;
}

// A QP in a PD, with what `connect_two` needs.
static bool qp_in(struct ibv_pd *pd, struct endpoint *e) {
    memset(e, 0, sizeof *e);
    want((e->send_cq = ibv_create_cq(pd->context, 16, NULL, NULL, 0)));
    struct ibv_qp_init_attr init = {.send_cq = e->send_cq, .recv_cq = e->send_cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
                                    .cap = {.max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
    want((e->qp = ibv_create_qp(pd, &init)));
    e->mine = (struct address){.qpn = e->qp->qp_num, .psn = 1};
    return !ibv_query_gid(pd->context, 1, 0, &e->mine.gid);
}

// Works with what another process exported: moves bytes within its region, and through device memory that both see.
static bool import_and_work(int descriptor, const struct exported *other) {
    struct ibv_context *context = ibv_import_device(descriptor);
    want(context && context->cmd_fd == descriptor);
    want(refuses(ibv_import_pd(context, other->pd + 77), ENOENT) && refuses(ibv_import_dm(context, other->dm + 77), ENOENT));
    struct ibv_pd *pd = ibv_import_pd(context, other->pd);
    want(pd && refuses(ibv_import_mr(pd, other->mr + 77), ENOENT));
    struct ibv_mr *mr = ibv_import_mr(pd, other->mr);
    want(mr && !mr->addr && mr->length == 4 * PAGE);
    struct endpoint a, b;
    want(qp_in(pd, &a) && qp_in(pd, &b) && connect_two(&a, &b));
    a.memory = (uint8_t *)(uintptr_t)other->memory; // the exporter's, mapped there and not here
    a.mr = mr;
    want(reaches(&a, IBV_WR_RDMA_WRITE, 0, PART, other->memory + 2 * PAGE, mr->rkey));
    struct ibv_dm *dm = ibv_import_dm(context, other->dm);
    uint8_t copy[PAGE];
    want(dm && !ibv_memcpy_from_dm(copy, dm, 0, PAGE) && holds(copy, PAGE, 21));
    struct ibv_mr *dm_mr = ibv_reg_dm_mr(pd, dm, 0, 2 * PAGE, ALL_RIGHTS | IBV_ACCESS_ZERO_BASED);
    want(dm_mr && reaches(&a, IBV_WR_RDMA_WRITE, 0, PART, PAGE, dm_mr->rkey));
    want(!ibv_dereg_mr(dm_mr));
    ibv_unimport_dm(dm);
    ibv_unimport_mr(mr);
    want(!ibv_destroy_qp(a.qp) && !ibv_destroy_qp(b.qp) && !ibv_destroy_cq(a.send_cq) && !ibv_destroy_cq(b.send_cq));
    ibv_unimport_pd(pd);
    return !ibv_close_device(context) && fcntl(descriptor, F_GETFD) < 0;
}

struct exporter {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    struct ibv_dm *dm;
    uint8_t *memory;
    struct exported what;
};

static bool export_objects(struct exporter *x) {
    struct ibv_alloc_dm_attr attr = {.length = 2 * PAGE};
    want((x->context = open_first_device()) && (x->pd = ibv_alloc_pd(x->context)) && (x->memory = pages(4 * PAGE)));
    want((x->mr = ibv_reg_mr(x->pd, x->memory, 4 * PAGE, ALL_RIGHTS)) && (x->dm = ibv_alloc_dm(x->context, &attr)));
    uint8_t bytes[PAGE];
    fill(bytes, PAGE, 21);
    fill(x->memory, PART, 20);
    want(!ibv_memcpy_to_dm(x->dm, 0, bytes, PAGE));
    x->what = (struct exported){x->pd->handle, x->mr->handle, x->dm->handle, (uintptr_t)x->memory};
    return true;
}

static bool exporter_sees(struct exporter *x) {
    uint8_t bytes[PAGE];
    want(holds(x->memory + 2 * PAGE, PART, 20));
    want(!ibv_memcpy_from_dm(bytes, x->dm, PAGE, PAGE) && holds(bytes, PART, 20));
    memset(x->memory + 2 * PAGE, 0, PAGE);
    return true;
}

static bool exporter_close(struct exporter *x) {
    want(!ibv_free_dm(x->dm) && !ibv_dereg_mr(x->mr) && !ibv_dealloc_pd(x->pd) && !ibv_close_device(x->context));
    munmap(x->memory, 4 * PAGE);
    return true;
}

static bool ended_well(pid_t child) {
    int status = 0;
    want(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return true;
}

static bool imports_in_another_process(void) {
    int socks[2];
    char byte = 0;
    want(!socketpair(AF_UNIX, SOCK_STREAM, 0, socks));
    pid_t child = fork();
    if (!child) {
        struct exported what;
        close(socks[0]);
        int descriptor = take_descriptor(socks[1], &what), second = dup(descriptor);
        bool ok = descriptor >= 0 && import_and_work(descriptor, &what) && write(socks[1], "k", 1) == 1;
        // Once the exporter closed its context, the pass is void.
        ok = ok && read(socks[1], &byte, 1) == 1 && refuses(ibv_import_device(second), ENOENT);
        _exit(!ok);
    }
    close(socks[1]);
    struct exporter x;
    want(export_objects(&x) && send_descriptor(socks[0], x.context->cmd_fd, &x.what));
    want(read(socks[0], &byte, 1) == 1 && exporter_sees(&x) && exporter_close(&x));
    want(write(socks[0], "c", 1) == 1 && ended_well(child));
    close(socks[0]);
    int null[2];
    want(!pipe(null) && refuses(ibv_import_device(null[0]), EINVAL) && refuses(ibv_import_device(-1), EINVAL));
    close(null[0]), close(null[1]);
    return true;
}

// A child imports its parent's context from what it inherited, and allocates device memory in its copy of it.
static bool child_imports_its_parent(void) {
    struct exporter x;
    want(export_objects(&x));
    for (unsigned i = 0; i < 3; i++) {
        pid_t child = fork();
        if (!child) {
            struct ibv_device_attr_ex attr;
            struct ibv_alloc_dm_attr length = {.length = PAGE};
            uint64_t value = 7, read = 0;
            struct ibv_dm *dm = ibv_query_device_ex(x.context, NULL, &attr) ? NULL : ibv_alloc_dm(x.context, &length);
            bool ok = dm && !ibv_memcpy_to_dm(dm, 8, &value, 8) && !ibv_memcpy_from_dm(&read, dm, 8, 8) && read == 7;
            ok = ok && !ibv_free_dm(dm) && import_and_work(dup(x.context->cmd_fd), &x.what);
            _exit(!ok);
        }
        want(ended_well(child) && exporter_sees(&x));
    }
    return exporter_close(&x);
}

// An importer keeps a PD: the owner may go first.
static bool an_imported_pd_outlives_its_owner(void) {
    struct exporter x;
    struct endpoint a, b;
    want(export_objects(&x));
    struct ibv_context *context = ibv_import_device(dup(x.context->cmd_fd));
    struct ibv_pd *pd = ibv_import_pd(context, x.what.pd);
    want(context && pd && qp_in(pd, &a) && qp_in(pd, &b) && connect_two(&a, &b));
    want(exporter_close(&x));
    uint8_t *memory = pages(PAGE);
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, PAGE, ALL_RIGHTS);
    want(memory && mr);
    a.memory = memory;
    a.mr = mr;
    fill(memory, 1000, 30);
    want(reaches(&a, IBV_WR_RDMA_WRITE, 0, 1000, (uintptr_t)memory + 2048, mr->rkey) && holds(memory + 2048, 1000, 30));
    want(ibv_dealloc_pd(pd) == EBUSY);
    // Objects left in it go with the context.
    munmap(memory, PAGE);
    return !ibv_close_device(context);
}

const struct app_case region_cases[] = {
    {"reregister_moves_and_changes", reregister_moves_and_changes},
    {"reregister_refuses", reregister_refuses},
    {"reregister_under_traffic", reregister_under_traffic},
    {"reregister_alike_is_not_noticed", reregister_alike_is_not_noticed},
    {"access_bits", access_bits},
    {"registration_by_attributes", registration_by_attributes},
    {"null_region", null_region},
    {"windows_of_type_1", windows_of_type_1},
    {"implicit_on_demand", implicit_on_demand},
    {"advice", advice},
    {"device_memory", device_memory},
    {"device_memory_runs_out", device_memory_runs_out},
    {"parent_domains", parent_domains},
    {"imports_in_another_process", imports_in_another_process},
    {"child_imports_its_parent", child_imports_its_parent},
    {"an_imported_pd_outlives_its_owner", an_imported_pd_outlives_its_owner},
    {0},
};
