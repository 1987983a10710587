// Memory that a container shares with the router and takes away again: two queue pairs of one process, connected to
// each other.
//
//   memory fill MIB GATE   punches all of it out, waits for a file to be there, WRITEs to every byte, compares; READs,
//                          atomics and SENDs of further holes.
//   memory move MIB GATE   the same, of ordinary memory with all of its pages, registered once the file is there.
//   memory punch ROUNDS    a thread WRITEs all over 256 MiB while they are allocated and punched out, ROUNDS times.
//   memory exchange GATE   WRITEs there and READs back, every byte compared, until the file is there; once at least.
//   memory bounce QPS      that many queue pairs WRITE 1 MiB each at the same time, of memory that is not shared.
//
// It prints `done` and what it did when all was right, and stays until it is killed (`fill`, `move`, `bounce`) or ends.
#include "connect.h"
#include "die.h"

#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MIB = 1 << 20, CHUNK = 256 * 1024, PAGE = 4096, PUNCH_MIB = 256, SECONDS_MAX = 300 };

static struct ibv_context *device;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qps[2];
static union ibv_gid gid;

enum { QPS_MAX = 4096 };

struct memory {
    unsigned char *at;
    size_t bytes;
    struct ibv_mr *mr;
};

static void open_pair(void) {
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    if (!list || !count || !(device = ibv_open_device(list[0])))
        die("no device");
    pd = ibv_alloc_pd(device);
    cq = ibv_create_cq(device, 64, NULL, NULL, 0);
    if (!pd || !cq || ibv_query_gid(device, 1, 0, &gid))
        die("no PD, CQ or GID");
    struct ibv_qp_init_attr attributes = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                          .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2}};
    for (int i = 0; i < 2; i++)
        if (!(qps[i] = ibv_create_qp(pd, &attributes)))
            die("no QP");
    connect_to(qps[0], qps[1]->qp_num, &gid);
    connect_to(qps[1], qps[0]->qp_num, &gid);
}

static struct memory allocate(size_t bytes) {
    void *(*allocator)(size_t) = (void *(*)(size_t))dlsym(RTLD_DEFAULT, "ibv_malloc");
    if (!allocator)
        die("the library has no ibv_malloc");
    struct memory memory = {.at = allocator(bytes), .bytes = bytes};
    int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    if (!memory.at || !(memory.mr = ibv_reg_mr(pd, memory.at, bytes, rights)))
        die("%zu bytes can't be had", bytes);
    return memory;
}

static void punch(struct memory *memory, size_t offset, size_t bytes) {
    for (size_t at = offset; at < offset + bytes; at += MIB) { // not across two segments
        size_t count = offset + bytes - at < MIB ? offset + bytes - at : MIB;
        if (madvise(memory->at + at, count, MADV_REMOVE))
            die("no hole can be punched");
    }
}

static void wait_for(int count) {
    for (struct ibv_wc wc; count;) {
        int got = ibv_poll_cq(cq, 1, &wc);
        if (got < 0)
            die("poll_cq failed");
        if (got && wc.status) {
            printf("failed: %s\n", ibv_wc_status_str(wc.status));
            exit(2);
        }
        count -= got;
    }
}

// One request from `here` to or from `there`.
static void request(enum ibv_wr_opcode opcode, struct memory *here, size_t at, uint32_t length, struct memory *there,
                    size_t to) {
    struct ibv_sge sge = {(uintptr_t)here->at + at, length, here->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = (uintptr_t)there->at + to;
        wr.wr.atomic.rkey = there->mr->rkey;
        wr.wr.atomic.compare_add = 5;
    } else {
        wr.wr.rdma.remote_addr = (uintptr_t)there->at + to;
        wr.wr.rdma.rkey = there->mr->rkey;
    }
    if (ibv_post_send(qps[0], &wr, &bad))
        die("a request can't be posted");
}

// The library puts its pages into segments. (Else no hole could be punched into it.)
static struct memory move(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        die("%zu bytes can't be had", bytes);
    struct memory memory = {.at = memset(at, 5, bytes), .bytes = bytes};
    int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    if (!(memory.mr = ibv_reg_mr(pd, memory.at, bytes, rights)))
        die("%zu bytes can't be registered", bytes);
    return memory;
}

static void fill(size_t mib, const char *gate, bool is_moved) {
    struct memory source = allocate(4 * MIB), target = {0};
    for (size_t i = 0; i < source.bytes; i++)
        source.at[i] = (unsigned char)(i * 7 + i / 4096);
    if (!is_moved) {
        target = allocate(mib * MIB);
        punch(&target, 0, target.bytes);
    }
    printf("empty\n");
    fflush(stdout);
    while (access(gate, F_OK))
        usleep(1000);
    if (is_moved)
        target = move(mib * MIB);
    for (size_t at = 0; at < target.bytes; at += CHUNK) {
        request(IBV_WR_RDMA_WRITE, &source, at % source.bytes, CHUNK, &target, at);
        wait_for(1);
    }
    for (size_t at = 0; at < target.bytes; at += source.bytes) {
        size_t count = target.bytes - at < source.bytes ? target.bytes - at : source.bytes;
        if (memcmp(target.at + at, source.at, count))
            die("WRITEs left other bytes near %zu MiB", at / MIB);
    }
    // Holes are zeros to READs, atomics and SENDs, in the source and in the destination.
    punch(&target, 0, MIB);
    memset(source.at, 9, MIB);
    request(IBV_WR_RDMA_READ, &source, 100, 3 * PAGE, &target, 50);
    wait_for(1);
    request(IBV_WR_ATOMIC_FETCH_AND_ADD, &source, 0, 8, &target, 64 * PAGE);
    wait_for(1);
    uint64_t before = *(volatile uint64_t *)source.at, after = *(volatile uint64_t *)(target.at + 64 * PAGE);
    struct ibv_sge sge = {(uintptr_t)target.at + 80 * PAGE + 10, 2 * PAGE, target.mr->lkey};
    struct ibv_recv_wr recv = {.sg_list = &sge, .num_sge = 1}, *bad;
    if (before || after != 5 || ibv_post_recv(qps[1], &recv, &bad))
        die("an atomic in a hole gave %lu and %lu", (unsigned long)before, (unsigned long)after);
    request(IBV_WR_SEND, &source, 2 * MIB, 2 * PAGE, &target, 0);
    wait_for(2);
    for (size_t i = 0; i < 3 * PAGE; i++)
        if (source.at[100 + i])
            die("a READ of a hole gave %d", source.at[100 + i]);
    if (memcmp(source.at + 2 * MIB, target.at + 80 * PAGE + 10, 2 * PAGE))
        die("a SEND into a hole left other bytes");
    printf("done %zu MiB\n", mib);
    fflush(stdout);
    pause();
}

static void exchange(const char *gate) {
    struct memory here = allocate(MIB), there = allocate(MIB);
    unsigned long rounds = 0;
    do {
        memset(here.at, (int)(rounds + 1), CHUNK);
        memset(here.at + CHUNK, 0, CHUNK);
        request(IBV_WR_RDMA_WRITE, &here, 0, CHUNK, &there, 0);
        wait_for(1);
        request(IBV_WR_RDMA_READ, &here, CHUNK, CHUNK, &there, 0);
        wait_for(1);
        if (memcmp(here.at, here.at + CHUNK, CHUNK) || there.at[CHUNK - 1] != (unsigned char)(rounds + 1))
            die("exchange %lu left other bytes", rounds);
        if (!rounds++) {
            printf("begun\n");
            fflush(stdout);
        }
    } while (access(gate, F_OK));
    printf("done %lu exchanges\n", rounds);
}

// Of ordinary memory, which only the slow path reaches (FREEFLOW_REMAP=off).
static void bounce(int count) {
    static struct ibv_qp *all[QPS_MAX];
    struct ibv_cq *completions = ibv_create_cq(device, count, NULL, NULL, 0);
    struct ibv_qp_init_attr attributes = {.send_cq = completions, .recv_cq = completions, .qp_type = IBV_QPT_RC,
                                          .cap = {.max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1}};
    if (count % 2 || count > QPS_MAX || !completions)
        die("no CQ for %d QPs", count);
    for (int i = 0; i < count; i++)
        if (!(all[i] = ibv_create_qp(pd, &attributes)))
            die("no QP %d", i);
    for (int i = 0; i < count; i++)
        connect_to(all[i], all[i ^ 1]->qp_num, &gid);
    unsigned char *memory = malloc(4 * MIB);
    memset(memory, 3, 2 * MIB);
    memset(memory + 2 * MIB, 0, 2 * MIB);
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, 4 * MIB, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (!mr)
        die("no MR");
    for (int i = 0; i < count; i++) {
        struct ibv_sge sge = {(uintptr_t)memory, MIB, mr->lkey};
        struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
                                 .wr.rdma = {(uintptr_t)memory + 2 * MIB, mr->rkey}}, *bad;
        if (ibv_post_send(all[i], &wr, &bad))
            die("WRITE %d can't be posted", i);
    }
    cq = completions;
    wait_for(count);
    if (memcmp(memory, memory + 2 * MIB, MIB))
        die("the WRITEs left other bytes");
    printf("done %d\n", count);
    fflush(stdout);
    pause();
}

static atomic_bool is_over;
static atomic_ulong write_count;

static void *write_all_over(void *argument) {
    struct memory *target = argument, source = allocate(PAGE);
    for (unsigned seed = 1; !is_over; write_count++) {
        request(IBV_WR_RDMA_WRITE, &source, 0, 64, target, (size_t)(rand_r(&seed) % (target->bytes / PAGE)) * PAGE);
        wait_for(1);
    }
    return NULL;
}

static void punch_rounds(int rounds) {
    struct memory target = allocate((size_t)PUNCH_MIB * MIB);
    size_t const at_once = 16 * MIB; // as much as one call can: a whole segment, where it begins there
    pthread_t writer;
    if (pthread_create(&writer, NULL, write_all_over, &target))
        die("no thread");
    for (int round = 0; round < rounds; round++) {
        for (size_t at = 0; at < target.bytes; at += PAGE)
            target.at[at] = 1;
        for (size_t at = 0; at < target.bytes; at += at_once)
            if (madvise(target.at + at, at_once, MADV_REMOVE))
                die("no hole can be punched");
    }
    is_over = true;
    pthread_join(writer, NULL);
    printf("done %d rounds, %lu writes\n", rounds, (unsigned long)write_count);
}

int main(int count, char **words) {
    if (count < 3)
        return 64;
    alarm(SECONDS_MAX);
    open_pair();
    if (count == 4)
        fill((size_t)atoi(words[2]), words[3], !strcmp(words[1], "move"));
    else if (!strcmp(words[1], "exchange"))
        exchange(words[2]);
    else if (!strcmp(words[1], "bounce"))
        bounce(atoi(words[2]));
    else
        punch_rounds(atoi(words[2]));
    return 0;
}
