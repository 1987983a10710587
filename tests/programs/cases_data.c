// Cases of arrival: every operation, on every type, from every kind of memory.
#define _GNU_SOURCE
#include "cases.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MESSAGES = 40, SLOT = 8192 };

static uint32_t message_bytes(enum ibv_qp_type type, unsigned i) {
    static const uint32_t sizes[] = {0, 1, 7, 8, 63, 64, 65, 500, 1023, 1024, 4000, 4096};
    uint32_t bytes = sizes[i % (sizeof sizes / sizeof *sizes)];
    return type != IBV_QPT_UD && i % 12 == 11 ? 8000 : bytes;
}

// The 40 bytes in front of a UD payload: an IPv6 header, or 20 zero ones, then an IPv4 header with a valid checksum.
static bool grh_is_right(const uint8_t *grh, const struct endpoint *e) {
    uint32_t sum = 0;
    if (gid_index() == IPV6_GID_INDEX)
        return grh[0] >> 4 == 6 && grh[6] == 17 && !memcmp(grh + 8, e->peer.gid.raw, 16) && !memcmp(grh + 24, e->mine.gid.raw, 16);
    for (int i = 0; i < 20; i++)
        if (grh[i]) return false;
    for (int i = 20; i < 40; i += 2) sum += (uint32_t)grh[i] << 8 | grh[i + 1];
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    return sum == 0xffff && grh[20] == 0x45 && grh[29] == 17 && !memcmp(grh + 32, e->peer.gid.raw + 12, 4) &&
           !memcmp(grh + 36, e->mine.gid.raw + 12, 4);
}

static void send_one(struct side *s, struct endpoint *e, unsigned i) {
    struct ibv_wc wc;
    uint32_t bytes = message_bytes(e->qp->qp_type, i);
    fill(e->memory, bytes, i);
    struct ibv_sge sge = {(uintptr_t)e->memory, bytes, e->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = bytes ? 1 : 0, .opcode = IBV_WR_SEND};
    if (i % 2) {
        wr.opcode = IBV_WR_SEND_WITH_IMM;
        wr.imm_data = htonl(i);
    }
    need(s, !post_work(e, &wr));
    need(s, poll_one(e->send_cq, &wc, 5000));
    need_status(s, wc, IBV_WC_SUCCESS);
    need(s, wc.wr_id == i && wc.opcode == IBV_WC_SEND && wc.qp_num == e->qp->qp_num);
}

static void receive_one(struct side *s, struct endpoint *e, unsigned i, uint32_t head) {
    struct ibv_wc wc;
    uint32_t bytes = message_bytes(e->qp->qp_type, i);
    need(s, poll_one(e->recv_cq, &wc, 5000));
    need_status(s, wc, IBV_WC_SUCCESS);
    need(s, wc.wr_id == i && wc.opcode == IBV_WC_RECV && wc.byte_len == bytes + head);
    need(s, !!(wc.wc_flags & IBV_WC_WITH_IMM) == i % 2);
    need(s, i % 2 == 0 || ntohl(wc.imm_data) == i);
    const uint8_t *slot = e->memory + (size_t)i * SLOT;
    need(s, holds(slot + head, bytes, i));
    if (!head) return;
    need(s, wc.wc_flags & IBV_WC_GRH);
    need(s, wc.src_qp == e->peer.qpn);
    need(s, grh_is_right(slot, e));
}

static void send_receive(struct side *s, struct endpoint *e, enum ibv_qp_type type, bool srq) {
    uint32_t head = type == IBV_QPT_UD ? GRH_BYTES : 0;
    need(s, endpoint_open(e, &(struct options){.type = type, .bytes = MESSAGES * SLOT, .srq = srq}));
    for (unsigned i = 0; s->role == ROLE_B && srq && i < MESSAGES; i++) need(s, !post_recv(e, i, i * SLOT, SLOT));
    need(s, endpoint_to_init(e));
    for (unsigned i = 0; s->role == ROLE_B && !srq && i < MESSAGES; i++) need(s, !post_recv(e, i, i * SLOT, SLOT));
    need(s, endpoint_connect(s, e));
    for (unsigned i = 0; i < MESSAGES && !s->failed; i++) s->role == ROLE_A ? send_one(s, e, i) : receive_one(s, e, i, head);
}

static void send_rc(struct side *s, struct endpoint *e) { send_receive(s, e, IBV_QPT_RC, false); }
static void send_uc(struct side *s, struct endpoint *e) { send_receive(s, e, IBV_QPT_UC, false); }
static void send_ud(struct side *s, struct endpoint *e) { send_receive(s, e, IBV_QPT_UD, false); }
static void send_rc_srq(struct side *s, struct endpoint *e) { send_receive(s, e, IBV_QPT_RC, true); }
static void send_ud_srq(struct side *s, struct endpoint *e) { send_receive(s, e, IBV_QPT_UD, true); }

// WRITE, WRITE with immediate and READ of so many bytes; side B is passive but for the receive that the immediate
// takes.
static void one_sided(struct side *s, struct endpoint *e, struct options options, uint32_t bytes) {
    struct ibv_wc wc;
    options.bytes = options.bytes ? options.bytes : 2 * (size_t)bytes;
    need(s, endpoint_open(e, &options));
    need(s, endpoint_to_init(e));
    if (s->role == ROLE_B) need(s, !post_recv(e, 77, 0, 0));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A) {
        fill(e->memory, bytes, 5);
        need(s, !post_remote(e, IBV_WR_RDMA_WRITE, 1, 0, bytes, 0, 0));
        need(s, poll_one(e->send_cq, &wc, 20000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.opcode == IBV_WC_RDMA_WRITE);
        struct ibv_sge sge = {(uintptr_t)e->memory, bytes, e->mr->lkey};
        struct ibv_send_wr wr = {.wr_id = 2, .sg_list = &sge, .num_sge = 1, .imm_data = htonl(99)};
        wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        wr.wr.rdma.remote_addr = e->peer.memory;
        wr.wr.rdma.rkey = e->peer.rkey;
        need(s, !post_work(e, &wr));
        need(s, poll_one(e->send_cq, &wc, 20000));
        need_status(s, wc, IBV_WC_SUCCESS);
    } else {
        need(s, poll_one(e->recv_cq, &wc, 20000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.wr_id == 77 && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.byte_len == bytes);
        need(s, wc.wc_flags & IBV_WC_WITH_IMM && ntohl(wc.imm_data) == 99);
        need(s, holds(e->memory, bytes, 5));
        fill(e->memory, bytes, 6);
    }
    if (options.type == IBV_QPT_UC) return;
    need(s, meet(s));
    if (s->role == ROLE_B) return;
    need(s, !post_remote(e, IBV_WR_RDMA_READ, 3, bytes, bytes, 0, 0));
    need(s, poll_one(e->send_cq, &wc, 20000));
    need_status(s, wc, IBV_WC_SUCCESS);
    need(s, wc.opcode == IBV_WC_RDMA_READ && wc.byte_len == bytes);
    need(s, holds(e->memory + bytes, bytes, 6));
}

static void one_sided_rc(struct side *s, struct endpoint *e) { one_sided(s, e, (struct options){0}, 12345); }
static void one_sided_uc(struct side *s, struct endpoint *e) { one_sided(s, e, (struct options){.type = IBV_QPT_UC}, 12345); }
static void one_sided_8_mib(struct side *s, struct endpoint *e) { one_sided(s, e, (struct options){0}, 8 << 20); }

static void one_sided_ibv_malloc(struct side *s, struct endpoint *e) {
    one_sided(s, e, (struct options){.shared_memory = true}, 3 << 20);
}

static void one_sided_stack(struct side *s, struct endpoint *e) {
    uint8_t memory[2 * 30000 + 3];
    one_sided(s, e, (struct options){.memory = memory + 3, .bytes = sizeof memory - 3}, 30000);
    // The memory goes away with this frame, so the endpoint goes first.
    if (!s->failed) meet(s);
    if (!endpoint_close(e)) fail(s, __FILE__, __LINE__, "something could not be destroyed");
}

static void one_sided_file(struct side *s, struct endpoint *e) {
    char name[] = "/tmp/freeflow-file.XXXXXX";
    int fd = mkstemp(name);
    need(s, fd >= 0);
    unlink(name);
    need(s, !ftruncate(fd, 1 << 20));
    void *memory = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    need(s, memory != MAP_FAILED);
    one_sided(s, e, (struct options){.memory = memory, .bytes = 1 << 20}, 500001);
}

static void one_sided_1_gib(struct side *s, struct endpoint *e) {
    uint64_t available = (uint64_t)sysconf(_SC_AVPHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t theirs;
    need(s, socket_swap(s->sock, &available, &theirs, sizeof available));
    if (available < 8ull << 30 || theirs < 8ull << 30) return; // both sides know, and agree
    one_sided(s, e, (struct options){.timeout = 18}, 1u << 30);
}

static void atomics(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){0}));
    *(uint64_t *)e->memory = 40;
    need(s, endpoint_connect(s, e));
    struct ibv_wc wc;
    if (s->role == ROLE_A) {
        struct ibv_sge sge = {(uintptr_t)e->memory + 64, 8, e->mr->lkey};
        struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD};
        wr.wr.atomic.remote_addr = e->peer.memory;
        wr.wr.atomic.rkey = e->peer.rkey;
        wr.wr.atomic.compare_add = 2;
        need(s, !post_work(e, &wr));
        need(s, poll_one(e->send_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.opcode == IBV_WC_FETCH_ADD && *(uint64_t *)(e->memory + 64) == 40);
        wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
        for (unsigned i = 0; i < 2; i++) { // the second one finds another value and changes nothing
            wr.wr.atomic.compare_add = 42;
            wr.wr.atomic.swap = 1000 + i;
            need(s, !post_work(e, &wr));
            need(s, poll_one(e->send_cq, &wc, 5000));
            need_status(s, wc, IBV_WC_SUCCESS);
            need(s, wc.opcode == IBV_WC_COMP_SWAP && *(uint64_t *)(e->memory + 64) == (i ? 1000 : 42));
        }
    }
    need(s, meet(s));
    if (s->role == ROLE_B) need(s, *(uint64_t *)e->memory == 1000);
}

// 30 pieces gathered, 30 scattered, cut at other places.
static void scatter_gather(struct side *s, struct endpoint *e) {
    enum { PIECES = 30, TOTAL = PIECES * 100 };
    need(s, endpoint_open(e, &(struct options){.send_sge = PIECES, .recv_sge = PIECES}));
    need(s, endpoint_to_init(e));
    struct ibv_sge sges[PIECES];
    struct ibv_wc wc;
    uint8_t whole[TOTAL];
    size_t at = 0;
    fill(whole, TOTAL, 9);
    for (unsigned i = 0; i < PIECES; i++) {
        uint32_t bytes = s->role == ROLE_A ? 100 : i % 2 ? 150 : 50;
        sges[i] = (struct ibv_sge){(uintptr_t)e->memory + i * 1000 + i, bytes, e->mr->lkey};
        if (s->role == ROLE_A) memcpy((void *)(uintptr_t)sges[i].addr, whole + at, bytes);
        at += bytes;
    }
    struct ibv_recv_wr recv = {.wr_id = 1, .sg_list = sges, .num_sge = PIECES}, *bad;
    if (s->role == ROLE_B) need(s, !ibv_post_recv(e->qp, &recv, &bad));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_A) {
        struct ibv_send_wr wr = {.wr_id = 1, .sg_list = sges, .num_sge = PIECES, .opcode = IBV_WR_SEND};
        need(s, !post_work(e, &wr));
    }
    need(s, poll_one(s->role == ROLE_A ? e->send_cq : e->recv_cq, &wc, 5000));
    need_status(s, wc, IBV_WC_SUCCESS);
    if (s->role == ROLE_A) return;
    need(s, wc.byte_len == TOTAL);
    for (unsigned i = 0, done = 0; i < PIECES; done += sges[i].length, i++)
        need(s, !memcmp((void *)(uintptr_t)sges[i].addr, whole + done, sges[i].length));
}

// An inline payload is the sender's again once the post returns, and needs no key.
static void inline_data(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.inline_bytes = 1024}));
    need(s, endpoint_to_init(e));
    for (unsigned i = 0; s->role == ROLE_B && i < 20; i++) need(s, !post_recv(e, i, i * 1024, 1024));
    need(s, endpoint_connect(s, e));
    struct ibv_wc wc;
    for (unsigned i = 0; i < 20; i++) {
        uint32_t bytes = i == 19 ? 1024 : i * 53;
        if (s->role == ROLE_A) {
            uint8_t payload[1024];
            fill(payload, bytes, i);
            struct ibv_sge sge = {(uintptr_t)payload, bytes, 0xdead};
            struct ibv_send_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND};
            wr.send_flags = IBV_SEND_INLINE;
            need(s, !post_work(e, &wr));
            memset(payload, 0xff, sizeof payload);
        }
        need(s, poll_one(s->role == ROLE_A ? e->send_cq : e->recv_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
        if (s->role == ROLE_B) need(s, wc.byte_len == bytes && holds(e->memory + i * 1024, bytes, i));
    }
    if (s->role == ROLE_B) return;
    struct ibv_sge sge = {(uintptr_t)e->memory, 4096, e->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE};
    need(s, post_work(e, &wr) != 0);
}

// A send fenced behind a READ carries what the READ brought.
static void fence(struct side *s, struct endpoint *e) {
    need(s, endpoint_open(e, &(struct options){.bytes = 1 << 20}));
    need(s, endpoint_to_init(e));
    if (s->role == ROLE_B) fill(e->memory, 400000, 3);
    if (s->role == ROLE_B) need(s, !post_recv(e, 1, 500000, 400000));
    need(s, endpoint_connect(s, e));
    struct ibv_wc wc;
    if (s->role == ROLE_A) {
        need(s, !post_remote(e, IBV_WR_RDMA_READ, 1, 0, 400000, 0, 0));
        need(s, !post_send(e, 2, 0, 400000, IBV_SEND_FENCE));
        for (unsigned i = 1; i <= 2; i++) {
            need(s, poll_one(e->send_cq, &wc, 5000));
            need_status(s, wc, IBV_WC_SUCCESS);
            need(s, wc.wr_id == i);
        }
    } else {
        need(s, poll_one(e->recv_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, holds(e->memory + 500000, 400000, 3));
    }
}

// A program that polls on memory sees the last byte of a WRITE only after all the others.
static void last_byte_last(struct side *s, struct endpoint *e) {
    enum { BYTES = 60000, ROUNDS = 200 };
    need(s, endpoint_open(e, &(struct options){.bytes = 2 * BYTES}));
    need(s, endpoint_connect(s, e));
    struct ibv_wc wc;
    for (unsigned round = 1; round <= ROUNDS; round++) {
        if (s->role == ROLE_A) {
            memset(e->memory, (int)(round & 0xff), BYTES);
            need(s, !post_remote(e, IBV_WR_RDMA_WRITE, round, 0, BYTES, 0, 0));
            need(s, poll_one(e->send_cq, &wc, 5000));
            need_status(s, wc, IBV_WC_SUCCESS);
        } else {
            volatile uint8_t *memory = e->memory;
            uint64_t end = now_ns() + 5000000000u;
            for (unsigned i = 0; memory[BYTES - 1] != (round & 0xff); i++) need(s, i % 1024 || now_ns() < end);
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            for (unsigned i = 0; i < BYTES; i += 97) need(s, memory[i] == (round & 0xff));
        }
        need(s, meet(s));
    }
}

// A list of work requests in one call, of which only the last is signaled.
static void unsignaled(struct side *s, struct endpoint *e) {
    enum { COUNT = 32 };
    need(s, endpoint_open(e, &(struct options){.unsignaled = true}));
    need(s, endpoint_connect(s, e));
    if (s->role == ROLE_B) return;
    struct ibv_sge sge = {(uintptr_t)e->memory, 8, e->mr->lkey};
    struct ibv_send_wr list[COUNT];
    struct ibv_wc wc;
    for (unsigned round = 0; round < 20; round++) {
        for (unsigned i = 0; i < COUNT; i++) {
            list[i] = (struct ibv_send_wr){
                .wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .next = &list[i + 1]};
            list[i].wr.rdma.remote_addr = e->peer.memory + i * 8;
            list[i].wr.rdma.rkey = e->peer.rkey;
        }
        list[COUNT - 1].next = NULL;
        list[COUNT - 1].send_flags = IBV_SEND_SIGNALED;
        need(s, !post_work(e, list));
        need(s, poll_one(e->send_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.wr_id == COUNT - 1);
        need(s, ibv_poll_cq(e->send_cq, 1, &wc) == 0);
    }
}

// Either side sends to a group in turn, and both get each message.
static void multicast(struct side *s, struct endpoint *e) {
    const union ibv_gid group = gid_of(gid_index() == IPV6_GID_INDEX ? "ff15::707" : "239.7.7.7");
    struct ibv_ah_attr path = {
        .is_global = 1, .port_num = 1, .grh = {.dgid = group, .sgid_index = (uint8_t)gid_index(), .hop_limit = 1}};
    struct ibv_wc wc;
    need(s, endpoint_open(e, &(struct options){.type = IBV_QPT_UD, .bytes = (MESSAGES + 1) * SLOT}));
    need(s, endpoint_to_init(e));
    for (unsigned i = 0; i < MESSAGES; i++) need(s, !post_recv(e, i, (i + 1) * SLOT, SLOT));
    need(s, endpoint_connect(s, e));
    need(s, !ibv_attach_mcast(e->qp, &group, 0) && meet(s));
    // A host that has not heard of the other's members yet sends them nothing.
    sleep_ms(1000);
    struct ibv_ah *to_group = ibv_create_ah(e->pd, &path);
    need(s, to_group);
    struct ibv_sge sge = {(uintptr_t)e->memory, 1000, e->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    wr.wr.ud.ah = to_group;
    wr.wr.ud.remote_qpn = 0xffffff;
    wr.wr.ud.remote_qkey = QKEY;
    for (unsigned i = 0; i < MESSAGES && !s->failed; i++) {
        bool mine = i % 2 == (s->role == ROLE_A);
        fill(e->memory, 1000, i);
        wr.wr_id = i;
        need(s, !mine || (!ibv_post_send(e->qp, &wr, &bad) && poll_one(e->send_cq, &wc, 5000)));
        need(s, poll_one(e->recv_cq, &wc, 5000));
        need_status(s, wc, IBV_WC_SUCCESS);
        need(s, wc.wr_id == i && wc.byte_len == 1000 + GRH_BYTES);
        need(s, wc.src_qp == (mine ? e->qp->qp_num : e->peer.qpn));
        need(s, holds(e->memory + (i + 1) * SLOT + GRH_BYTES, 1000, i));
        // Messages of two senders have no order: an answer may be here before the sender's own copy.
        need(s, meet(s));
    }
    need(s, !ibv_detach_mcast(e->qp, &group, 0) && !ibv_destroy_ah(to_group));
}

const struct test_case data_cases[] = {
    {"send_rc", send_rc},
    {"send_uc", send_uc},
    {"send_ud", send_ud},
    {"send_rc_srq", send_rc_srq},
    {"send_ud_srq", send_ud_srq},
    {"one_sided_rc", one_sided_rc},
    {"one_sided_uc", one_sided_uc},
    {"one_sided_8_mib", one_sided_8_mib},
    {"one_sided_ibv_malloc", one_sided_ibv_malloc},
    {"one_sided_stack", one_sided_stack},
    {"one_sided_file", one_sided_file},
    {"one_sided_1_gib", one_sided_1_gib},
    {"atomics", atomics},
    {"scatter_gather", scatter_gather},
    {"inline_data", inline_data},
    {"fence", fence},
    {"last_byte_last", last_byte_last},
    {"unsignaled", unsignaled},
    {"multicast", multicast},
    {NULL, NULL},
};
