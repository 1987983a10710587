// Data that arrives: each opcode, lengths, scatter and gather, atomics; and the fields of the completions.
// InfiniBand specification 9.4 (operations), 9.7.4.1.6 (messages of no bytes), 11.4.2.1 (what a completion says).
#include "trace.h"

#include <arpa/inet.h>
#include <string.h>

static const enum ibv_wr_opcode rc_opcodes[] = {
    IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ};
static const uint32_t lengths[] = {ZERO_LENGTH, 0, 1, 3, 1023, 1024, 1025, 4096, 10000, 32768};
#define LENGTHS (sizeof lengths / sizeof *lengths)

static bool is_receive(enum ibv_wr_opcode code) {
    return code == IBV_WR_SEND || code == IBV_WR_SEND_WITH_IMM || code == IBV_WR_RDMA_WRITE_WITH_IMM;
}

// One opcode with messages of all lengths, of RC or UC.
static void opcode(long packed) {
    struct pair pair;
    enum ibv_wr_opcode code = (enum ibv_wr_opcode)(packed & 255);
    pair_open(&pair, &(struct options){.type = (enum ibv_qp_type)(packed >> 8)});
    for (size_t i = 0; i < LENGTHS; i++) {
        if (is_receive(code)) receive(&pair.b, 100 + i, 0, 40000);
        post(&pair.a, &(struct op){.id = i, .code = code, .at = 8 * i, .len = lengths[i], .to = 3 * i,
                                   .imm = 0xabcd0000 + (uint32_t)i});
        sent(&pair.a, 1);
        if (is_receive(code)) received(&pair.b, 1);
        if (packed >> 8 == IBV_QPT_UC && code == IBV_WR_RDMA_WRITE) {
            receive(&pair.b, 200, 60000, 8); // the write is there when the message after it is
            post(&pair.a, &(struct op){.id = 300, .code = IBV_WR_SEND, .len = 8});
            sent(&pair.a, 1);
            received(&pair.b, 1);
        }
        say_memory("A", pair.a.memory, pair.a.bytes);
        say_memory("B", pair.b.memory, pair.b.bytes);
    }
    say_empty(&pair);
    say_states(&pair);
}

// Gathered from several places, scattered over several; elements of no bytes between them.
static void scatter_gather(long code) {
    struct pair pair;
    pair_open(&pair, &(struct options){.send_sge = 4, .recv_sge = 4});
    struct ibv_sge from[4], to[4];
    static const uint32_t from_bytes[4] = {100, 0, 1500, 7}, to_bytes[4] = {7, 1000, 0, 2000};
    for (size_t i = 0; i < 4; i++) {
        from[i] = (struct ibv_sge){(uintptr_t)pair.a.memory + 5000 * i, from_bytes[i], pair.a.mr->lkey};
        to[i] = (struct ibv_sge){(uintptr_t)pair.b.memory + 5000 * (3 - i) + 1, to_bytes[i], pair.b.mr->lkey};
    }
    struct ibv_recv_wr receive_wr = {.wr_id = 1, .sg_list = to, .num_sge = 4}, *bad_receive;
    struct ibv_send_wr wr = {.wr_id = 2, .sg_list = from, .num_sge = 4, .opcode = (enum ibv_wr_opcode)code,
                             .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)pair.b.memory + 30001;
    wr.wr.rdma.rkey = pair.b.mr->rkey;
    say("receive -> %s", result(ibv_post_recv(pair.b.qp, &receive_wr, &bad_receive)));
    say("send -> %s", result(ibv_post_send(pair.a.qp, &wr, &bad)));
    sent(&pair.a, 1);
    if (is_receive((enum ibv_wr_opcode)code)) received(&pair.b, 1);
    say_memory("A", pair.a.memory, pair.a.bytes);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

// Inline data gathered from memory that is in no region.
static void inline_gather(long code) {
    struct pair pair;
    pair_open(&pair, &(struct options){.send_sge = 3, .inline_bytes = 48});
    char words[3][20] = {"one", "two", "three"};
    struct ibv_sge from[3];
    for (size_t i = 0; i < 3; i++) from[i] = (struct ibv_sge){(uintptr_t)words[i], 16, 0};
    struct ibv_send_wr wr = {.wr_id = 2, .sg_list = from, .num_sge = 3, .opcode = (enum ibv_wr_opcode)code,
                             .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE, .imm_data = htonl(77)}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)pair.b.memory + 100;
    wr.wr.rdma.rkey = pair.b.mr->rkey;
    receive(&pair.b, 1, 1000, 100);
    say("send -> %s", result(ibv_post_send(pair.a.qp, &wr, &bad)));
    memset(words, 0, sizeof words);
    sent(&pair.a, 1);
    if (is_receive((enum ibv_wr_opcode)code)) received(&pair.b, 1);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

static void say_word(const char *what, const uint8_t *memory) {
    uint64_t word;
    memcpy(&word, memory, 8);
    say("%s: %016lx", what, (unsigned long)word);
}

static void atomics(long unused) {
    (void)unused;
    static const struct {
        enum ibv_wr_opcode code;
        uint64_t before, compare, swap;
    } cases[] = {
        {IBV_WR_ATOMIC_FETCH_AND_ADD, 5, 3, 0}, {IBV_WR_ATOMIC_FETCH_AND_ADD, UINT64_MAX, 1, 0},
        {IBV_WR_ATOMIC_FETCH_AND_ADD, 0xffffffff, 1, 0}, {IBV_WR_ATOMIC_FETCH_AND_ADD, 7, UINT64_MAX, 0},
        {IBV_WR_ATOMIC_CMP_AND_SWP, 9, 9, 0x1122334455667788}, {IBV_WR_ATOMIC_CMP_AND_SWP, 9, 8, 1},
        {IBV_WR_ATOMIC_CMP_AND_SWP, 0, 0, 0},
    };
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memcpy(pair.b.memory + 64, &cases[i].before, 8);
        post(&pair.a, &(struct op){.id = i, .code = cases[i].code, .at = 16, .len = 8, .to = 64,
                                   .compare = cases[i].compare, .swap = cases[i].swap});
        sent(&pair.a, 1);
        say_word("was", pair.a.memory + 16);
        say_word("is", pair.b.memory + 64);
    }
    say_memory("A", pair.a.memory, pair.a.bytes);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

// Sixteen additions from each end to one word, at once.
static void atomics_of_both(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.send_wr = 32, .all_signaled = true});
    memset(pair.b.memory, 0, 64);
    struct ibv_mr *for_b = mr_open(pair.a.pd, pair.b.memory, pair.b.bytes, ALL_ACCESS);
    for (uint64_t i = 0; i < 16; i++) {
        struct op op = {.id = i, .code = IBV_WR_ATOMIC_FETCH_AND_ADD, .at = 8 * i + 64, .len = 8, .compare = 1 + i,
                        .remote = (uintptr_t)pair.b.memory};
        int a = post_quietly(&pair.a, &op);
        op.rkey = for_b->rkey;
        int b = post_quietly(&pair.b, &op);
        if (a || b) say("posting -> %d, %d", a, b);
    }
    sent(&pair.a, 16);
    sent(&pair.b, 16);
    say_word("sum", pair.b.memory);
}

static void atomic_misaligned(long code) {
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    receive(&pair.b, 1, 0, 64);
    post(&pair.a, &(struct op){.id = 2, .code = (enum ibv_wr_opcode)code, .len = 8, .to = 4, .compare = 1});
    sent(&pair.a, 1);
    say_states(&pair);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

// An atomic operation returns eight bytes: into less, into more, into two pieces.
static void atomic_lengths(long length) {
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    post(&pair.a, &(struct op){
        .id = 2, .code = IBV_WR_ATOMIC_FETCH_AND_ADD, .len = (uint32_t)length, .to = 8, .compare = 1});
    sent(&pair.a, 1);
    say_states(&pair);
    say_memory("A", pair.a.memory, 64);
}

static void large_message(long code) {
    struct pair pair;
    const size_t bytes = 8u << 20; // the largest that Linux's rxe takes
    pair_open(&pair, &(struct options){.bytes = bytes});
    struct ibv_port_attr port;
    if (ibv_query_port(device.context, 1, &port)) give_up("query the port");
    say("as long as the port allows, or allowed: %d", port.max_msg_sz >= bytes);
    if (is_receive((enum ibv_wr_opcode)code)) receive(&pair.b, 1, 0, (uint32_t)bytes);
    post(&pair.a, &(struct op){.id = 2, .code = (enum ibv_wr_opcode)code, .len = (uint32_t)bytes, .imm = 1});
    sent(&pair.a, 1);
    if (is_receive((enum ibv_wr_opcode)code)) received(&pair.b, 1);
    say("equal: %d", !memcmp(pair.a.memory, pair.b.memory, bytes));
}

// A message to oneself, within one region, and from a region that lies within another.
static void overlapping_regions(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    struct ibv_mr *inner = mr_open(pair.a.pd, pair.a.memory + 4096, 4096, ALL_ACCESS);
    say("keys differ: %d", inner->lkey != pair.a.mr->lkey && inner->rkey != pair.a.mr->rkey);
    receive(&pair.b, 1, 0, 4096);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .at = 4096, .len = 4096, .lkey = inner->lkey});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say("deregister the inner one -> %s", result(ibv_dereg_mr(inner)));
    receive(&pair.b, 3, 8192, 4096);
    post(&pair.a, &(struct op){.id = 4, .code = IBV_WR_SEND, .at = 4096, .len = 4096});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

// The flags of a sender's completion, as they are.
static void flags_of_sends(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    for (size_t i = 0; i < sizeof rc_opcodes / sizeof *rc_opcodes; i++) {
        receive(&pair.b, i, 0, 64);
        post(&pair.a, &(struct op){.id = i, .code = rc_opcodes[i], .len = 8, .to = 64, .imm = 5});
        struct ibv_wc wc = {0};
        if (take(pair.a.send_cq, &wc)) say("%s: flags %x", wc_opcode_name(wc.opcode), wc.wc_flags);
    }
}

// Only some requests want a completion; the others leave none, but their places are free after the next one's.
static void selective_signaling(long all) {
    struct pair pair;
    pair_open(&pair, &(struct options){.all_signaled = all, .send_wr = 8});
    for (int round = 0; round < 3; round++) {
        for (uint64_t i = 0; i < 7; i++)
            post(&pair.a, &(struct op){.id = i, .code = IBV_WR_RDMA_WRITE, .len = 16, .at = 16 * i, .to = 16 * i,
                                       .flags = i < 6 ? UNSIGNALED : 0});
        sent(&pair.a, all ? 7 : 1);
        say_empty(&pair);
    }
    say_memory("B", pair.b.memory, pair.b.bytes);
}

void add_data(void) {
    for (size_t i = 0; i < sizeof rc_opcodes / sizeof *rc_opcodes; i++) {
        static const char *const names[] = {"send", "send_imm", "write", "write_imm", "read"};
        add(opcode, IBV_QPT_RC << 8 | rc_opcodes[i], "data_rc_%s", names[i]);
        if (rc_opcodes[i] != IBV_WR_RDMA_READ) add(opcode, IBV_QPT_UC << 8 | rc_opcodes[i], "data_uc_%s", names[i]);
        if (i != 1 && i != 3) add(scatter_gather, rc_opcodes[i], "data_scatter_gather_%s", names[i]);
        if (rc_opcodes[i] != IBV_WR_RDMA_READ) add(inline_gather, rc_opcodes[i], "data_inline_gather_%s", names[i]);
        if (i != 1 && i != 3) add(large_message, rc_opcodes[i], "data_large_%s", names[i]);
    }
    add(atomics, 0, "data_atomics");
    add(atomics_of_both, 0, "data_atomics_of_both");
    add(atomic_misaligned, IBV_WR_ATOMIC_FETCH_AND_ADD, "data_atomic_misaligned_faa");
    add(atomic_misaligned, IBV_WR_ATOMIC_CMP_AND_SWP, "data_atomic_misaligned_cas");
    add(atomic_lengths, 4, "data_atomic_into_4_bytes");
    add(atomic_lengths, 16, "data_atomic_into_16_bytes");
    add(overlapping_regions, 0, "data_overlapping_regions");
    add(flags_of_sends, 0, "data_flags_of_sends");
    add(selective_signaling, 0, "data_selective_signaling");
    add(selective_signaling, 1, "data_all_signaled");
}
