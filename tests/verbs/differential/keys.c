// Keys and bounds of memory regions, local and remote, for each opcode.
// InfiniBand specification 10.6.3.5 and 10.6.7 (keys, access), 9.7.4.1 (the responder's checks), 9.9.3 (its errors).
#include "trace.h"

#include <string.h>

static const struct {
    enum ibv_wr_opcode code;
    const char *name;
    bool receives, remote, writes_back;
    int right; // what the remote region must allow
} opcodes[] = {
    {IBV_WR_SEND, "send", true, false, false, 0},
    {IBV_WR_SEND_WITH_IMM, "send_imm", true, false, false, 0},
    {IBV_WR_RDMA_WRITE, "write", false, true, false, IBV_ACCESS_REMOTE_WRITE},
    {IBV_WR_RDMA_WRITE_WITH_IMM, "write_imm", true, true, false, IBV_ACCESS_REMOTE_WRITE},
    {IBV_WR_RDMA_READ, "read", false, true, true, IBV_ACCESS_REMOTE_READ},
    {IBV_WR_ATOMIC_CMP_AND_SWP, "cas", false, true, true, IBV_ACCESS_REMOTE_ATOMIC},
    {IBV_WR_ATOMIC_FETCH_AND_ADD, "faa", false, true, true, IBV_ACCESS_REMOTE_ATOMIC},
};

enum fault { BAD_KEY, BEYOND_END, BEFORE_BEGIN, WRONG_PD, DEREGISTERED, NO_RIGHT, QP_WITHOUT_RIGHT, WRAPPING };
static const char *const fault_names[] = {
    "bad_key", "beyond_end", "before_begin", "wrong_pd", "deregistered", "no_right", "qp_without_right", "wrapping"};

#define PACK(opcode, fault) ((long)(opcode) << 8 | (fault))
#define EXTRA_BYTES 4096

struct target {
    uint32_t key;
    uint64_t address;
};

// A region of a protection domain with the fault, and an address in it; `right` is the one to leave out.
static struct target faulty(struct ibv_pd *pd, enum fault fault, uint32_t length, int right, bool remote) {
    uint8_t *memory = memory_take(EXTRA_BYTES * 3) + EXTRA_BYTES;
    if (fault == WRONG_PD && !(pd = ibv_alloc_pd(pd->context))) give_up("allocate a protection domain");
    int access = fault == NO_RIGHT ? ALL_ACCESS & ~right : ALL_ACCESS;
    struct ibv_mr *mr = mr_open(pd, memory, EXTRA_BYTES, access);
    struct target target = {remote ? mr->rkey : mr->lkey, (uintptr_t)memory};
    if (fault == BAD_KEY) target.key ^= 0x5a5a5a00;
    if (fault == BEYOND_END) target.address += EXTRA_BYTES - length + 8;
    if (fault == BEFORE_BEGIN) target.address -= 8;
    if (fault == WRAPPING) target.address = UINT64_MAX - 7;
    if (fault == DEREGISTERED && ibv_dereg_mr(mr)) give_up("deregister");
    return target;
}

static void say_end(struct pair *pair) {
    say_states(pair);
    say_empty(pair);
    say_memory("A", pair->a.memory, pair->a.bytes);
    say_memory("B", pair->b.memory, pair->b.bytes);
}

// The requester's own memory: the request fails, the responder must not notice.
static void local(long packed) {
    size_t opcode = (size_t)packed >> 8;
    enum fault fault = (enum fault)(packed & 255);
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    uint32_t length = opcodes[opcode].right == IBV_ACCESS_REMOTE_ATOMIC ? 8 : 64;
    struct target target = faulty(pair.a.pd, fault, length, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                  IBV_ACCESS_REMOTE_ATOMIC, false);
    if (opcodes[opcode].receives) receive(&pair.b, 1, 0, 128);
    post(&pair.a, &(struct op){.id = 2, .code = opcodes[opcode].code, .at = target.address - (uintptr_t)pair.a.memory,
                               .len = length, .to = 64, .lkey = target.key});
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_RDMA_WRITE, .len = 8, .to = 512});
    sent(&pair.a, 2);
    say_end(&pair);
    no_events();
}

// The responder's memory: a NAK, and an error of its queue pair.
static void remote(long packed) {
    size_t opcode = (size_t)packed >> 8;
    enum fault fault = (enum fault)(packed & 255);
    struct pair pair;
    int qp_access = fault == QP_WITHOUT_RIGHT ? ALL_ACCESS & ~opcodes[opcode].right : ALL_ACCESS;
    pair_open(&pair, &(struct options){.qp_access = qp_access});
    uint32_t length = opcodes[opcode].right == IBV_ACCESS_REMOTE_ATOMIC ? 8 : 64;
    struct target target = faulty(pair.b.pd, fault, length, opcodes[opcode].right, true);
    receive(&pair.b, 1, 0, 128);
    post(&pair.a, &(struct op){.id = 2, .code = opcodes[opcode].code, .len = length, .remote = target.address,
                               .rkey = target.key});
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_RDMA_WRITE, .len = 8, .to = 512});
    sent(&pair.a, 2);
    received(&pair.b, 1);
    say_end(&pair);
}

// The same from UC, where no NAK exists: the message is dropped and the next one arrives.
static void remote_of_uc(long packed) {
    size_t opcode = (size_t)packed >> 8;
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UC});
    struct target target = faulty(pair.b.pd, (enum fault)(packed & 255), 64, opcodes[opcode].right, true);
    receive(&pair.b, 1, 0, 128);
    post(&pair.a, &(struct op){.id = 2, .code = opcodes[opcode].code, .len = 64, .remote = target.address,
                               .rkey = target.key});
    sent(&pair.a, 1);
    say_states(&pair);
    post(&pair.a, &(struct op){.id = 3, .code = IBV_WR_SEND, .len = 8});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_end(&pair);
}

// A message of no bytes looks at no key (InfiniBand specification 9.7.4.1.6).
static void zero_bytes(long packed) {
    size_t opcode = (size_t)packed >> 8;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    receive(&pair.b, 1, 0, 128);
    post(&pair.a, &(struct op){.id = 2, .code = opcodes[opcode].code, .len = packed & 1 ? 0 : ZERO_LENGTH,
                               .remote = 8, .rkey = 0xdeadbeef, .lkey = 0xdeadbeef});
    sent(&pair.a, 1);
    if (opcodes[opcode].receives) received(&pair.b, 1);
    say_end(&pair);
}

// The receiver's memory: its completion says so, and the sender learns of it.
static void receiving(long packed) {
    size_t opcode = (size_t)packed >> 8;
    enum fault fault = (enum fault)(packed & 255);
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    struct target target = faulty(pair.b.pd, fault, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                  IBV_ACCESS_REMOTE_ATOMIC, false);
    receive_key(&pair.b, 1, target.address - (uintptr_t)pair.b.memory, 64, target.key);
    receive(&pair.b, 2, 0, 64);
    post(&pair.a, &(struct op){.id = 3, .code = opcodes[opcode].code, .len = 64, .to = 512, .imm = 9});
    sent(&pair.a, 1);
    received(&pair.b, opcodes[opcode].remote ? 1 : 2);
    say_end(&pair);
}

// A fault after good elements: what of the message has arrived is not defined, what has not may not complete.
static void second_element(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    struct ibv_sge sge[2] = {{(uintptr_t)pair.a.memory, 8, pair.a.mr->lkey},
                             {(uintptr_t)pair.a.memory, 8, pair.a.mr->lkey ^ 0x5a5a5a00}};
    struct ibv_send_wr wr = {.wr_id = 2, .sg_list = sge, .num_sge = 2, .opcode = IBV_WR_SEND,
                             .send_flags = IBV_SEND_SIGNALED}, *bad;
    receive(&pair.b, 1, 0, 128);
    say("send -> %s", result(ibv_post_send(pair.a.qp, &wr, &bad)));
    sent(&pair.a, 1);
    say_states(&pair);
    say_empty(&pair);
}

static void registration(long unused) {
    (void)unused;
    static const struct {
        const char *what;
        int access;
    } cases[] = {
        {"nothing", 0}, {"local write", IBV_ACCESS_LOCAL_WRITE}, {"remote read alone", IBV_ACCESS_REMOTE_READ},
        {"remote write without local", IBV_ACCESS_REMOTE_WRITE},
        {"remote atomic without local write", IBV_ACCESS_REMOTE_ATOMIC}, {"everything", ALL_ACCESS},
        {"relaxed ordering", IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING}, {"an unknown bit", 1 << 18},
    };
    struct ibv_pd *pd = ibv_alloc_pd(device.context);
    uint8_t *memory = memory_take(8192);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ibv_mr *mr = ibv_reg_mr(pd, memory, 8192, (unsigned)cases[i].access);
        say("%s -> %s", cases[i].what, pointer_result(mr));
        if (mr) say("addr %d, length %zu, pd %d, context %d", mr->addr == memory, mr->length, mr->pd == pd,
                    mr->context == device.context);
        if (mr) say("deregister -> %s", result(ibv_dereg_mr(mr)));
    }
    say("no memory -> %s", pointer_result(ibv_reg_mr(pd, (void *)8, 4096, IBV_ACCESS_LOCAL_WRITE)));
    say("memory that wraps -> %s", pointer_result(ibv_reg_mr(pd, memory, SIZE_MAX - 4096, IBV_ACCESS_LOCAL_WRITE)));
}

// An iova of one's own: keys count from it.
static void iova(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    struct ibv_mr *mr = ibv_reg_mr_iova(pair.b.pd, pair.b.memory, 8192, 0x10000, ALL_ACCESS);
    say("register -> %s", pointer_result(mr));
    if (!mr) return;
    post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_RDMA_WRITE, .len = 64, .remote = 0x10100, .rkey = mr->rkey});
    sent(&pair.a, 1);
    say_memory("B", pair.b.memory, pair.b.bytes);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_RDMA_WRITE, .len = 64, .to = 64, .rkey = mr->rkey});
    sent(&pair.a, 1);
    say_end(&pair);
}

// Properties that are not to change are not named: ibv_rereg_mr(3).
static void rereg(long flags) {
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    uint8_t *other = memory_take(8192);
    struct ibv_pd *pd = ibv_alloc_pd(pair.b.pd->context);
    uint32_t rkey = pair.b.mr->rkey;
    bool move = flags & IBV_REREG_MR_CHANGE_TRANSLATION, access = flags & IBV_REREG_MR_CHANGE_ACCESS;
    int rc = ibv_rereg_mr(pair.b.mr, (int)flags, flags & IBV_REREG_MR_CHANGE_PD ? pd : NULL, move ? other : NULL,
                          move ? 8192 : 0, access ? ALL_ACCESS & ~IBV_ACCESS_REMOTE_WRITE : 0);
    say("rereg -> %d, errno %s", rc, rc ? result(-1) : "0");
    post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_RDMA_WRITE, .len = 64, .rkey = rkey});
    sent(&pair.a, 1);
    say_end(&pair);
}

// Arguments that contradict the flags; the region stays as it was.
static void rereg_wrongly(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    struct ibv_mr *mr = pair.b.mr;
    int rc = ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 0, 0);
    say("a translation to nowhere -> %d, errno %s", rc, result(-1));
    rc = ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, pair.b.pd, NULL, 0, ALL_ACCESS);
    say("access that is not to change -> %d, errno %s", rc, result(-1));
    rc = ibv_rereg_mr(mr, 1 << 6, NULL, NULL, 0, 0);
    say("an unknown flag -> %d, errno %s", rc, result(-1));
    post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_RDMA_WRITE, .len = 64});
    sent(&pair.a, 1);
    say_end(&pair);
}

void add_keys(void) {
    for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++) {
        for (enum fault fault = BAD_KEY; fault <= NO_RIGHT; fault++) {
            if (fault == NO_RIGHT && !opcodes[i].writes_back) continue;
            add(local, PACK(i, fault), "key_local_%s_%s", opcodes[i].name, fault_names[fault]);
        }
        for (enum fault fault = BAD_KEY; fault <= WRAPPING && opcodes[i].remote; fault++)
            add(remote, PACK(i, fault), "key_remote_%s_%s", opcodes[i].name, fault_names[fault]);
        for (enum fault fault = BAD_KEY; fault <= NO_RIGHT && opcodes[i].receives; fault++)
            add(receiving, PACK(i, fault), "key_receive_%s_%s", opcodes[i].name, fault_names[fault]);
        if (opcodes[i].right == IBV_ACCESS_REMOTE_WRITE) {
            add(remote_of_uc, PACK(i, BAD_KEY), "key_uc_%s_bad_key", opcodes[i].name);
            add(remote_of_uc, PACK(i, NO_RIGHT), "key_uc_%s_no_right", opcodes[i].name);
        }
        if (opcodes[i].right == IBV_ACCESS_REMOTE_ATOMIC) continue;
        add(zero_bytes, PACK(i, 0), "key_unused_%s_no_elements", opcodes[i].name);
        add(zero_bytes, PACK(i, 1), "key_unused_%s_empty_element", opcodes[i].name);
    }
    add(second_element, 0, "key_second_element");
    add(registration, 0, "mr_registration");
    add(iova, 0, "mr_iova");
    add(rereg, IBV_REREG_MR_CHANGE_TRANSLATION, "mr_rereg_translation");
    add(rereg, IBV_REREG_MR_CHANGE_PD, "mr_rereg_pd");
    add(rereg, IBV_REREG_MR_CHANGE_ACCESS, "mr_rereg_access");
    add(rereg, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS, "mr_rereg_translation_and_access");
    add(rereg_wrongly, 0, "mr_rereg_wrongly");
}
