// Memory that the program shares by a file of its own: whichever kind it is, each byte is where it belongs, whatever
// becomes of the mapping and of the file.
//
// Which way the bytes take is counted by the test that runs these cases.
#define _GNU_SOURCE
#include "remap.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

enum { BYTES = 2 << 20, ROUNDS = 40 };

static int file_of(const char *name, size_t bytes) {
    int file = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    need(file >= 0 && ftruncate(file, (off_t)bytes) == 0);
    return file;
}

static uint8_t *map_shared(int file, size_t bytes, off_t from) {
    uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, from);
    need(memory != MAP_FAILED);
    return memory;
}

static uint8_t *map_over(uint8_t *at, size_t bytes, int flags, int file) {
    need(mmap(at, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, file, 0) == at);
    return at;
}

// ---- kinds

static uint8_t *anonymous(void) {
    return mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

static uint8_t *of_memfd(void) {
    int file = file_of("kind", 2 * BYTES);
    uint8_t *memory = map_shared(file, BYTES, 3 * PAGE);
    close(file);
    return memory;
}

static uint8_t *posix(void) {
    int file = shm_open("/freeflow-test-kind", O_RDWR | O_CREAT | O_EXCL, 0600);
    need(file >= 0 && shm_unlink("/freeflow-test-kind") == 0 && ftruncate(file, BYTES) == 0);
    uint8_t *memory = map_shared(file, BYTES, 0);
    close(file);
    return memory;
}

static uint8_t *system_v(void) {
    int id = shmget(IPC_PRIVATE, BYTES, IPC_CREAT | 0600);
    need(id >= 0);
    uint8_t *memory = shmat(id, NULL, 0);
    need(memory != (void *)-1 && shmctl(id, IPC_RMID, NULL) == 0);
    return memory;
}

static uint8_t *huge(void) {
    return mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB, -1, 0);
}

static uint8_t *ordinary(void) { return private_pages(BYTES, 0); }

static const struct {
    const char *name;
    uint8_t *(*make)(void);
} KINDS[] = {{"anonymous", anonymous}, {"memfd", of_memfd},  {"POSIX", posix},
             {"System V", system_v},   {"ordinary", ordinary}};
enum { KIND_COUNT = sizeof KINDS / sizeof *KINDS };

// Messages of all sizes and places, from one memory to the other and back.
static void exchange(uint8_t *a, uint8_t *b) {
    size_t length = BYTES - 2000;
    // The router allocates none of their pages.
    fill(a, BYTES, 0);
    fill(b, BYTES, 0);
    struct ibv_mr *from = reg(a + 1000, length), *to = reg(b + 1000, length);
    for (unsigned i = 0; i < ROUNDS; i++) {
        size_t bytes = i % 4 ? 1 + i * 577 : length - i, at = 1000 + i * 13 % (length - bytes + 1);
        fill(a + at, bytes, i);
        rdma(IBV_WR_RDMA_WRITE, from, a + at, to, b + at, bytes);
        need(is_filled(b + at, bytes, i));
        fill(b + at, bytes, i + 100);
        rdma(IBV_WR_RDMA_READ, from, a + at, to, b + at, bytes);
        need(is_filled(a + at, bytes, i + 100));
        fill(a + at, bytes, i + 50);
        message(from, a + at, to, b + at, bytes);
        need(is_filled(b + at, bytes, i + 50));
    }
    uint64_t *result = (uint64_t *)(a + 4096), *word = (uint64_t *)(b + 8192);
    *word = 40;
    for (unsigned i = 0; i < 10; i++) need(fetch_add(from, result, to, word, 2) == 40 + 2 * i);
    need(*word == 60);
    dereg(from);
    dereg(to);
}

void case_borrowed(void) {
    for (int a = 0; a < KIND_COUNT; a++)
        for (int b = 0; b < KIND_COUNT; b++) {
            uint8_t *from = KINDS[a].make(), *to = KINDS[b].make();
            need(from != MAP_FAILED && to != MAP_FAILED);
            exchange(from, to);
            munmap(from, BYTES);
            munmap(to, BYTES);
        }
    // Parts of one file, and small regions of it in any order.
    int file = file_of("parts", BYTES);
    uint8_t *low = map_shared(file, BYTES / 2, 0), *high = map_shared(file, BYTES / 2, BYTES / 2);
    uint8_t *all = map_shared(file, BYTES, 0);
    fill(all, BYTES, 0);
    struct ibv_mr *one = reg(low + 100, BYTES / 2 - 200), *other = reg(high + 7, 5000), *whole = reg(all, BYTES);
    fill(all, BYTES / 2, 3);
    rdma(IBV_WR_RDMA_WRITE, whole, all, other, high + 7, 5000);
    need(!memcmp(all + BYTES / 2 + 7, all, 5000));
    rdma(IBV_WR_RDMA_READ, whole, all + BYTES - 300, one, low + 100, 300);
    need(!memcmp(high + BYTES / 2 - 300, low + 100, 300));
    dereg(one);
    rdma(IBV_WR_RDMA_WRITE, whole, all, other, high + 8, 4000);
    need(!memcmp(high + 8, low, 4000));
    dereg(whole);
    dereg(other);
    struct ibv_mr *many[64];
    for (size_t i = 0; i < 64; i++) many[i] = reg(all + i * 37 % 64 * 8000, 4000);
    for (size_t i = 0; i < 64; i++) {
        size_t at = i * 37 % 64 * 8000, to = (i + 1) % 64 * 37 % 64 * 8000;
        fill(all + at, 4000, (unsigned)i);
        rdma(IBV_WR_RDMA_WRITE, many[i], all + at, many[(i + 1) % 64], all + to, 4000);
        need(is_filled(all + to, 4000, (unsigned)i));
    }
    for (size_t i = 0; i < 64; i++) dereg(many[i * 5 % 64]);
    munmap(low, BYTES / 2);
    munmap(high, BYTES / 2);
    munmap(all, BYTES);
    close(file);
}

// ---- memory that can't be borrowed

void case_borrowed_not(void) {
    uint8_t *from = huge(), *to = huge();
    if (from != MAP_FAILED && to != MAP_FAILED) {
        exchange(from, to);
        printf("hugetlb was there\n");
    }
    if (from != MAP_FAILED) munmap(from, BYTES);
    if (to != MAP_FAILED) munmap(to, BYTES);
    uint8_t *peer = private_pages(BYTES, 1);
    struct ibv_mr *peer_mr = reg(peer, BYTES);
    int file = file_of("sealed", BYTES);
    uint8_t *memory = map_shared(file, BYTES, 0);
    need(fcntl(file, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0);
    struct ibv_mr *mr = reg(memory, BYTES);
    rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, mr, memory, BYTES);
    need(!memcmp(memory, peer, BYTES));
    dereg(mr);
    // Changed behind the sealed mapping: for reading alone.
    uint8_t *read_only = mmap(NULL, BYTES, PROT_READ, MAP_SHARED, file, 0);
    need(read_only != MAP_FAILED);
    mr = ibv_reg_mr(pd, read_only, BYTES, IBV_ACCESS_REMOTE_READ);
    need(mr != NULL && ibv_reg_mr(pd, read_only, BYTES, ALL_ACCESS) == NULL);
    fill(memory, BYTES, 5);
    rdma(IBV_WR_RDMA_READ, peer_mr, peer, mr, read_only, BYTES);
    need(is_filled(peer, BYTES, 5));
    dereg(mr);
    munmap(memory, BYTES);
    munmap(read_only, BYTES);
    close(file);
    // A file's private pages are the program's own.
    file = file_of("private", BYTES);
    memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    uint8_t *shared = map_shared(file, BYTES, 0);
    fill(shared, BYTES, 2);
    memory[0] = 9;
    mr = reg(memory, BYTES);
    rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, mr, memory + PAGE, BYTES - PAGE);
    need(memory[0] == 9 && !memcmp(memory + PAGE, peer, BYTES - PAGE) && is_filled(shared, BYTES, 2));
    dereg(mr);
    munmap(memory, BYTES);
    munmap(shared, BYTES);
    close(file);
    // On a disk, if that is one.
    FILE *disk = tmpfile();
    need(disk && ftruncate(fileno(disk), BYTES) == 0);
    memory = map_shared(fileno(disk), BYTES, 0);
    mr = reg(memory, BYTES);
    fill(peer, BYTES, 6);
    rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, mr, memory, BYTES);
    need(is_filled(memory, BYTES, 6));
    dereg(mr);
    dereg(peer_mr);
    munmap(memory, BYTES);
    munmap(peer, BYTES);
    fclose(disk);
}

// ---- files that change

static void holes(int file, uint8_t *memory, struct ibv_mr *mr, uint8_t *peer, struct ibv_mr *peer_mr) {
    for (unsigned i = 0; i < ROUNDS; i++) {
        fill(memory, BYTES, i);
        size_t at = i % 6 * 64 * PAGE, bytes = (i % 5 + 1) * 32 * PAGE;
        if (i & 1) need(madvise(memory + at, bytes, MADV_REMOVE) == 0);
        else need(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at, (off_t)bytes) == 0);
        memset(peer, 1, bytes);
        rdma(IBV_WR_RDMA_READ, peer_mr, peer, mr, memory + at, bytes);
        for (size_t n = 0; n < bytes; n++) need(peer[n] == 0);
        need(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at, (off_t)bytes) == 0);
        fill(peer, bytes, i + 9);
        rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, mr, memory + at, bytes);
        need(is_filled(memory + at, bytes, i + 9));
    }
}

static enum ibv_wc_status write_by(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_mr *from, void *local,
                                   struct ibv_mr *to, void *remote, size_t bytes) {
    struct ibv_sge sge = {(uintptr_t)local, (uint32_t)bytes, from->lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
                                   .send_flags = IBV_SEND_SIGNALED, .wr.rdma = {(uintptr_t)remote, to->rkey}};
    struct ibv_wc wc;
    need(ibv_post_send(qp, &wr, &bad) == 0);
    while (!ibv_poll_cq(cq, 1, &wc)) {}
    return wc.status;
}

// One WRITE by queue pairs of its own: an error ends them.
static enum ibv_wc_status write_once(struct ibv_mr *from, void *local, struct ibv_mr *to, void *remote, size_t bytes) {
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *one = ibv_create_qp(pd, &init), *other = ibv_create_qp(pd, &init);
    need(cq && one && other);
    connect_qp(one, other->qp_num);
    connect_qp(other, one->qp_num);
    enum ibv_wc_status status = write_by(one, cq, from, local, to, remote, bytes);
    need(ibv_destroy_qp(one) == 0 && ibv_destroy_qp(other) == 0 && ibv_destroy_cq(cq) == 0);
    return status;
}

void case_borrowed_changes(void) {
    int file = file_of("changes", BYTES);
    uint8_t *memory = map_shared(file, BYTES, 0), *peer = private_pages(BYTES, 1);
    struct ibv_mr *mr = reg(memory, BYTES), *peer_mr = reg(peer, BYTES);
    holes(file, memory, mr, peer, peer_mr);
    // A file that is shorter than its mapping has nothing there, and a longer one has it again.
    for (unsigned i = 0; i < 5; i++) {
        need(ftruncate(file, BYTES / 2) == 0);
        need(write_once(peer_mr, peer, mr, memory + BYTES / 4, BYTES / 2) != IBV_WC_SUCCESS);
        need(write_once(mr, memory + BYTES / 4, peer_mr, peer, BYTES / 2) != IBV_WC_SUCCESS);
        fill(peer, BYTES, i);
        rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, mr, memory, BYTES / 2);
        need(is_filled(memory, BYTES / 2, i));
        need(ftruncate(file, 0) == 0);
        need(write_once(peer_mr, peer, mr, memory, 8) != IBV_WC_SUCCESS);
        need(ftruncate(file, BYTES) == 0);
        rdma(IBV_WR_RDMA_READ, peer_mr, peer, mr, memory, BYTES);
        for (size_t n = 0; n < BYTES; n++) need(peer[n] == 0);
        fill(peer, BYTES, i + 20);
        rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, mr, memory, BYTES);
        need(is_filled(memory, BYTES, i + 20));
    }
    dereg(mr);
    dereg(peer_mr);
    munmap(memory, BYTES);
    munmap(peer, BYTES);
    close(file);
}

// Faults of the router's mapping are the kernel's, also where the program handles those of its own.
void case_borrowed_faults(void) {
    int faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
    struct uffdio_api api = {UFFD_API, UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM, 0};
    if (faults < 0 || ioctl(faults, UFFDIO_API, &api)) {
        printf("no userfaultfd here (errno %d)\n", errno);
        return;
    }
    int file = file_of("faults", BYTES);
    uint8_t *memory = map_shared(file, BYTES, 0), *peer = private_pages(BYTES, 1);
    struct uffd_msg message;
    fill(memory, BYTES, 7);
    struct uffdio_register range = {.range = {(uintptr_t)memory, BYTES}, .mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR};
    need(ioctl(faults, UFFDIO_REGISTER, &range) == 0);
    struct ibv_mr *mr = reg(memory, BYTES), *peer_mr = reg(peer, BYTES);
    // Pages that are there, but not in this process's page table.
    need(madvise(memory, BYTES, MADV_DONTNEED) == 0);
    rdma(IBV_WR_RDMA_READ, peer_mr, peer, mr, memory, BYTES);
    need(is_filled(peer, BYTES, 7));
    fill(peer, BYTES, 8);
    rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, mr, memory, BYTES);
    need(read(faults, &message, sizeof message) < 0 && errno == EAGAIN);
    close(faults);
    need(is_filled(memory, BYTES, 8));
    dereg(mr);
    dereg(peer_mr);
    munmap(memory, BYTES);
    munmap(peer, BYTES);
    close(file);
}

// ---- mappings that change

void case_borrowed_renewed(void) {
    uint8_t *peer = private_pages(BYTES, 1);
    struct ibv_mr *peer_mr = reg(peer, BYTES);
    for (unsigned i = 0; i < 12; i++) {
        int file = file_of("before", BYTES), next = file_of("after", BYTES);
        uint8_t *before = map_shared(file, BYTES, 0), *memory = map_shared(file, BYTES, 0), *after = NULL;
        struct ibv_mr *old = reg(memory, BYTES);
        fill(peer, BYTES, i);
        rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, old, memory, BYTES);
        need(is_filled(before, BYTES, i));
        switch (i % 4) {
        case 0: after = map_over(memory, BYTES, MAP_SHARED, next); break;
        case 1: after = map_over(memory, BYTES, MAP_PRIVATE | MAP_ANONYMOUS, -1); break;
        case 2:
            need(munmap(memory, BYTES) == 0);
            after = map_over(memory, BYTES, MAP_SHARED, next);
            break;
        default: // it goes, and lives on where it went
            after = mremap(memory, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, map_shared(next, BYTES, 0));
            need(after != MAP_FAILED && after != memory);
            map_over(memory, BYTES, MAP_SHARED | MAP_ANONYMOUS, -1);
        }
        // A part of it, which begins and ends inside pages.
        size_t at = 5 * PAGE + 100, bytes = BYTES - 11 * PAGE;
        struct ibv_mr *mr = reg(after + at, bytes);
        fill(peer, BYTES, i + 30);
        rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, mr, after + at, bytes);
        need(!memcmp(after + at, peer, bytes));
        need(i % 4 == 3 ? !memcmp(before + at, peer, bytes) : is_filled(before, BYTES, i));
        after[at] ^= 255;
        rdma(IBV_WR_RDMA_READ, peer_mr, peer, mr, after + at, bytes);
        need(!memcmp(after + at, peer, bytes));
        if (i % 4 == 3) {
            struct ibv_mr *here = reg(memory, BYTES);
            fill(peer, BYTES, i + 60);
            rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, here, memory, BYTES);
            need(is_filled(memory, BYTES, i + 60) && before[0] != peer[0]);
            dereg(here);
            munmap(after, BYTES);
        }
        dereg(i & 1 ? mr : old);
        dereg(i & 1 ? old : mr);
        munmap(memory, BYTES);
        munmap(before, BYTES);
        close(file);
        close(next);
    }
    // Detached, and something else attached there.
    int ids[2];
    for (int i = 0; i < 2; i++) need((ids[i] = shmget(IPC_PRIVATE, BYTES, IPC_CREAT | 0600)) >= 0);
    uint8_t *memory = shmat(ids[0], NULL, 0);
    need(memory != (void *)-1);
    struct ibv_mr *old = reg(memory, BYTES);
    need(shmdt(memory) == 0 && shmat(ids[1], memory, 0) == memory);
    struct ibv_mr *mr = reg(memory, BYTES);
    fill(peer, BYTES, 3);
    rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, mr, memory, BYTES);
    need(is_filled(memory, BYTES, 3));
    dereg(mr);
    dereg(old);
    need(shmdt(memory) == 0);
    for (int i = 0; i < 2; i++) need(shmctl(ids[i], IPC_RMID, NULL) == 0);
    dereg(peer_mr);
    munmap(peer, BYTES);
}

// Memory that is deregistered, and that the program has no mapping of any more, is free.
void case_borrowed_freed(void) {
    const size_t bytes = 32 * MIB;
    struct statvfs now;
    need(statvfs("/dev/shm", &now) == 0);
    unsigned long free_before = now.f_bfree, whole = bytes / now.f_bsize;
    int file = shm_open("/freeflow-test-freed", O_RDWR | O_CREAT | O_EXCL, 0600);
    need(file >= 0 && shm_unlink("/freeflow-test-freed") == 0 && ftruncate(file, (off_t)bytes) == 0);
    uint8_t *memory = map_shared(file, bytes, 0);
    close(file);
    fill(memory, bytes, 1);
    struct ibv_mr *mr = reg(memory, bytes), *part = reg(memory + 100, 5000);
    need(munmap(memory, bytes) == 0);
    dereg(mr);
    need(statvfs("/dev/shm", &now) == 0 && now.f_bfree + whole / 2 < free_before);
    dereg(part);
    need(statvfs("/dev/shm", &now) == 0 && now.f_bfree + whole / 2 > free_before);
}

// ---- several processes

static void count_up(struct ibv_mr *mr, void *memory, unsigned times) {
    uint8_t *own = private_pages(PAGE, 1);
    struct ibv_mr *result = reg(own, PAGE);
    for (unsigned i = 0; i < times; i++) fetch_add(result, (uint64_t *)own, mr, memory, 1);
    dereg(result);
    munmap(own, PAGE);
}

void case_borrowed_processes(void) {
    enum { PROCESSES = 4, TIMES = 2000 };
    uint8_t *memory = anonymous();
    need(memory != MAP_FAILED);
    memset(memory, 0, BYTES);
    struct ibv_mr *mr = reg(memory, BYTES);
    count_up(mr, memory, 10);
    pid_t children[PROCESSES];
    for (int i = 0; i < PROCESSES; i++) {
        need((children[i] = fork()) >= 0);
        if (children[i]) continue;
        // The parent's memory, by a device of its own.
        open_all();
        struct ibv_mr *own = reg(memory, BYTES);
        count_up(own, memory, TIMES);
        fill(memory + (size_t)(i + 1) * 64 * PAGE, 64 * PAGE, (unsigned)i);
        dereg(own);
        close_all();
        _exit(0);
    }
    count_up(mr, memory, TIMES);
    for (int i = 0; i < PROCESSES; i++) {
        int status;
        need(waitpid(children[i], &status, 0) == children[i] && status == 0);
    }
    need(*(uint64_t *)memory == 10 + (PROCESSES + 1) * TIMES);
    uint8_t *peer = private_pages(BYTES, 1);
    struct ibv_mr *peer_mr = reg(peer, BYTES);
    rdma(IBV_WR_RDMA_READ, peer_mr, peer, mr, memory, BYTES);
    for (int i = 0; i < PROCESSES; i++) need(is_filled(peer + (size_t)(i + 1) * 64 * PAGE, 64 * PAGE, (unsigned)i));
    // A child without a device sees what peers write, as before.
    pid_t child = fork();
    need(child >= 0);
    if (!child) {
        volatile uint8_t *last = memory + BYTES - 1;
        while (*last != 77) {}
        memory[PAGE] = 78;
        _exit(0);
    }
    memset(peer, 77, BYTES);
    rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, mr, memory, BYTES);
    int status;
    need(waitpid(child, &status, 0) == child && status == 0);
    rdma(IBV_WR_RDMA_READ, peer_mr, peer, mr, memory + PAGE, 8);
    need(peer[0] == 78 && peer[1] == 77);
    dereg(mr);
    dereg(peer_mr);
    munmap(memory, BYTES);
    munmap(peer, BYTES);
}

// ---- atomics

enum { ADDITIONS = 100000, IN_FLIGHT = 4 };

struct adder {
    struct ibv_mr *mr;
    uint8_t *at;
};

// Adds one again and again, with several requests under way.
static void *add_on(void *argument) {
    const struct adder *adder = argument;
    struct ibv_cq *own_cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {.send_cq = own_cq, .recv_cq = own_cq, .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = 16, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
    need(own_cq != NULL);
    struct ibv_qp *one = ibv_create_qp(pd, &init), *other = ibv_create_qp(pd, &init);
    need(one && other);
    connect_qp(one, other->qp_num);
    connect_qp(other, one->qp_num);
    uint64_t *result = (uint64_t *)private_pages(4096, 1);
    struct ibv_mr *local = reg(result, 4096);
    for (unsigned posted = 0, done = 0; done < ADDITIONS;) {
        struct ibv_sge sge = {(uintptr_t)result, 8, local->lkey};
        struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
                                       .send_flags = IBV_SEND_SIGNALED,
                                       .wr.atomic = {.remote_addr = (uintptr_t)adder->at, .compare_add = 1,
                                                     .rkey = adder->mr->rkey}};
        for (; posted < ADDITIONS && posted - done < IN_FLIGHT; posted++) need(ibv_post_send(one, &wr, &bad) == 0);
        struct ibv_wc wc[IN_FLIGHT];
        int count = ibv_poll_cq(own_cq, IN_FLIGHT, wc);
        need(count >= 0);
        for (int i = 0; i < count; i++) need(wc[i].status == IBV_WC_SUCCESS);
        done += (unsigned)count;
        if (!count) sched_yield();
    }
    dereg(local);
    munmap(result, 4096);
    need(!ibv_destroy_qp(one) && !ibv_destroy_qp(other) && !ibv_destroy_cq(own_cq));
    return NULL;
}

// One word of a file that lies at two addresses, of which the router maps one and takes the slow path to the other.
void case_borrowed_atomics(void) {
    int file = memfd_create("atomics", MFD_CLOEXEC);
    need(file >= 0 && ftruncate(file, BYTES) == 0);
    struct adder adders[2];
    for (int i = 0; i < 2; i++) {
        adders[i].at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        need(adders[i].at != MAP_FAILED);
        memset(adders[i].at, 0, BYTES);
        adders[i].mr = ibv_reg_mr(pd, adders[i].at, BYTES, ALL_ACCESS | (i ? IBV_ACCESS_ON_DEMAND : 0));
        need(adders[i].mr != NULL);
    }
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) need(pthread_create(&threads[i], NULL, add_on, &adders[i]) == 0);
    for (int i = 0; i < 2; i++) need(pthread_join(threads[i], NULL) == 0);
    need(*(volatile uint64_t *)adders[0].at == 2 * ADDITIONS);
    for (int i = 0; i < 2; i++) {
        dereg(adders[i].mr);
        munmap(adders[i].at, BYTES);
    }
    close(file);
}

// ---- enemies

static _Atomic bool is_over;

struct swapped {
    uint8_t *at;
    int own, others;
};

// The thread that has either file at the address, in turn.
static void *swap(void *argument) {
    struct swapped *s = argument;
    while (!is_over) {
        need(mmap(s->at, BYTES, PROT_READ, MAP_SHARED | MAP_FIXED, s->others, 0) == s->at);
        need(mmap(s->at, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, s->own, 0) == s->at);
    }
    return NULL;
}

// A file that the process may only read is never written by the router, whenever the mapping changes.
void case_borrowed_swapped(void) {
    char name[64];
    int writer = file_of("others", BYTES), own = file_of("own", BYTES);
    uint8_t *others = map_shared(writer, BYTES, 0), *peer = private_pages(PAGE, 1);
    fill(others, BYTES, 1);
    snprintf(name, sizeof name, "/proc/self/fd/%d", writer);
    struct swapped s = {.own = own, .others = open(name, O_RDONLY | O_CLOEXEC)};
    need(s.others >= 0);
    s.at = map_shared(own, BYTES, 0);
    struct ibv_mr *peer_mr = reg(peer, PAGE);
    memset(peer, 200, PAGE);
    pthread_t thread;
    need(pthread_create(&thread, NULL, swap, &s) == 0);
    unsigned registered = 0, written = 0;
    for (double end = now_us() + seconds() * 1e6; now_us() < end;) {
        // Refused while it can't be written to.
        struct ibv_mr *mr = ibv_reg_mr(pd, s.at, BYTES, ALL_ACCESS);
        if (!mr) continue;
        registered++;
        for (size_t i = 0; i < 4; i++) written += write_once(peer_mr, peer, mr, s.at + i * PAGE, PAGE) == IBV_WC_SUCCESS;
        dereg(mr);
        need(is_filled(others, BYTES, 1));
    }
    is_over = true;
    pthread_join(thread, NULL);
    need(registered > 0 && written > 0 && is_filled(others, BYTES, 1));
    dereg(peer_mr);
    printf("%u registered, %u written\n", registered, written);
}

static void *cut_and_grow(void *argument) {
    int file = *(int *)argument;
    for (unsigned i = 0; !is_over; i++) {
        ftruncate(file, i % 3 ? (off_t)(i % 7 * 64 * PAGE) : 0);
        fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, BYTES / 2);
        ftruncate(file, BYTES);
    }
    return NULL;
}

// Others of the host, and of this process, go on while a file is cut and grows under its region.
void case_borrowed_storm(void) {
    int file = file_of("storm", BYTES);
    uint8_t *memory = map_shared(file, BYTES, 0), *peer = private_pages(BYTES, 1), *calm = private_pages(BYTES, 2);
    struct ibv_mr *mr = reg(memory, BYTES), *peer_mr = reg(peer, BYTES), *calm_mr = reg(calm, BYTES);
    pthread_t thread;
    need(pthread_create(&thread, NULL, cut_and_grow, &file) == 0);
    unsigned good = 0, bad = 0;
    for (double end = now_us() + seconds() * 1e6; now_us() < end;) {
        size_t bytes = (good + bad) % 5 * 100000 + 64;
        bool is_good = write_once(peer_mr, peer, mr, memory, bytes) == IBV_WC_SUCCESS;
        is_good ? good++ : bad++;
        rdma(IBV_WR_RDMA_WRITE, peer_mr, peer, calm_mr, calm, bytes);
        need(!memcmp(calm, peer, bytes));
    }
    is_over = true;
    pthread_join(thread, NULL);
    need(good > 0 && bad > 0);
    dereg(mr);
    dereg(peer_mr);
    dereg(calm_mr);
    printf("%u written, %u refused\n", good, bad);
}
