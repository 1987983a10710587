// Objects and what hangs on them: the order of destruction, limits of creation, what creation gives back.
// InfiniBand specification 11.2 (verbs that destroy answer "in use"); the man pages of the calls.
#include "trace.h"

#include <errno.h>
#include <string.h>

static struct ibv_pd *pd_open(void) {
    struct ibv_pd *pd = ibv_alloc_pd(device.context);
    if (!pd) give_up("allocate a protection domain");
    return pd;
}

static struct ibv_qp_init_attr qp_attr(struct ibv_cq *cq) {
    return (struct ibv_qp_init_attr){.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}};
}

static void pd_with_mr(long unused) {
    (void)unused;
    struct ibv_pd *pd = pd_open();
    struct ibv_mr *mr = mr_open(pd, memory_take(4096), 4096, ALL_ACCESS);
    say("deallocate the domain -> %s", result(ibv_dealloc_pd(pd)));
    say("deregister -> %s", result(ibv_dereg_mr(mr)));
    say("deallocate the domain -> %s", result(ibv_dealloc_pd(pd)));
}

static void pd_with_qp(long unused) {
    (void)unused;
    struct ibv_pd *pd = pd_open();
    struct ibv_cq *cq = cq_open(8, NULL);
    struct ibv_qp_init_attr init = qp_attr(cq);
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    say("create -> %s", pointer_result(qp));
    say("deallocate the domain -> %s", result(ibv_dealloc_pd(pd)));
    say("destroy the completion queue -> %s", result(ibv_destroy_cq(cq)));
    say("destroy the queue pair -> %s", result(ibv_destroy_qp(qp)));
    say("destroy the completion queue -> %s", result(ibv_destroy_cq(cq)));
    say("deallocate the domain -> %s", result(ibv_dealloc_pd(pd)));
}

static void pd_with_ah(long unused) {
    (void)unused;
    struct ibv_pd *pd = pd_open();
    struct ibv_ah_attr attr = address_of_device();
    struct ibv_ah *ah = ibv_create_ah(pd, &attr);
    say("create -> %s", pointer_result(ah));
    say("deallocate the domain -> %s", result(ibv_dealloc_pd(pd)));
    say("destroy -> %s", result(ibv_destroy_ah(ah)));
    say("deallocate the domain -> %s", result(ibv_dealloc_pd(pd)));
}

static void srq_with_qp(long unused) {
    (void)unused;
    struct ibv_pd *pd = pd_open();
    struct ibv_cq *cq = cq_open(8, NULL);
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 8, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(pd, &srq_init);
    struct ibv_qp_init_attr init = qp_attr(cq);
    init.srq = srq;
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    say("create -> %s", pointer_result(qp));
    say("destroy the shared queue -> %s", result(ibv_destroy_srq(srq)));
    say("destroy the queue pair -> %s", result(ibv_destroy_qp(qp)));
    say("destroy the shared queue -> %s", result(ibv_destroy_srq(srq)));
    say("deallocate the domain -> %s", result(ibv_dealloc_pd(pd)));
}

static void channel_with_cq(long unused) {
    (void)unused;
    struct ibv_comp_channel *channel = ibv_create_comp_channel(device.context);
    struct ibv_cq *cq = cq_open(8, channel);
    say("destroy the channel -> %s", result(ibv_destroy_comp_channel(channel)));
    say("destroy the completion queue -> %s", result(ibv_destroy_cq(cq)));
    say("destroy the channel -> %s", result(ibv_destroy_comp_channel(channel)));
}

// One completion queue for sends, another for receives: both are in use.
static void cqs_of_a_qp(long unused) {
    (void)unused;
    struct ibv_pd *pd = pd_open();
    struct ibv_cq *send = cq_open(8, NULL), *receive = cq_open(8, NULL);
    struct ibv_qp_init_attr init = qp_attr(send);
    init.recv_cq = receive;
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    say("destroy the one of sends -> %s", result(ibv_destroy_cq(send)));
    say("destroy the one of receives -> %s", result(ibv_destroy_cq(receive)));
    say("destroy the queue pair -> %s", result(ibv_destroy_qp(qp)));
    say("destroy the one of sends -> %s", result(ibv_destroy_cq(send)));
    say("destroy the one of receives -> %s", result(ibv_destroy_cq(receive)));
}

// A region may go while a request that names it is outstanding; the request fails then.
static void mr_in_use(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    struct ibv_mr *mr = mr_open(pair.b.pd, pair.b.memory + 4096, 4096, ALL_ACCESS);
    receive_key(&pair.b, 1, 4096, 64, mr->lkey);
    say("deregister -> %s", result(ibv_dereg_mr(mr)));
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 64});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say_states(&pair);
    say_memory("B", pair.b.memory, pair.b.bytes);
}

static void ah_in_use(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){.type = IBV_QPT_UD});
    receive(&pair.b, 1, 0, 1024);
    post(&pair.a, &(struct op){.id = 2, .code = IBV_WR_SEND, .len = 64});
    sent(&pair.a, 1);
    received(&pair.b, 1);
    say("destroy the handle -> %s", result(ibv_destroy_ah(pair.a.ah)));
}

static void qp_caps(long unused) {
    (void)unused;
    struct ibv_pd *pd = pd_open();
    struct ibv_cq *cq = cq_open(8, NULL);
    static const char *const names[] = {
        "max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data"};
    for (int i = 0; i < 5; i++) {
        struct ibv_qp_init_attr init = qp_attr(cq);
        uint32_t *caps[] = {&init.cap.max_send_wr, &init.cap.max_recv_wr, &init.cap.max_send_sge,
                            &init.cap.max_recv_sge, &init.cap.max_inline_data};
        *caps[i] = i < 2 ? (uint32_t)device.attr.max_qp_wr + 1 : i < 4 ? (uint32_t)device.attr.max_sge + 1 : 1u << 20;
        errno = 0;
        say("%s beyond the limit -> %s", names[i], pointer_result(ibv_create_qp(pd, &init)));
    }
    struct ibv_qp_init_attr init = qp_attr(cq);
    init.cap.max_inline_data = 20;
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    say("create -> %s", pointer_result(qp));
    say("given back: %d %d %d %d %d", init.cap.max_send_wr >= 4, init.cap.max_recv_wr >= 4, init.cap.max_send_sge >= 1,
        init.cap.max_recv_sge >= 1, init.cap.max_inline_data >= 20);
    memset(&init.cap, 0, sizeof init.cap);
    errno = 0;
    say("no caps at all -> %s", pointer_result(ibv_create_qp(pd, &init)));
}

static void qp_types(long unused) {
    (void)unused;
    struct ibv_pd *pd = pd_open();
    struct ibv_cq *cq = cq_open(8, NULL);
    static const struct {
        const char *name;
        enum ibv_qp_type type;
    } types[] = {{"RC", IBV_QPT_RC}, {"UC", IBV_QPT_UC}, {"UD", IBV_QPT_UD}, {"0", (enum ibv_qp_type)0},
                 {"77", (enum ibv_qp_type)77}, {"a driver's own", IBV_QPT_DRIVER}, {"raw packets", IBV_QPT_RAW_PACKET}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        struct ibv_qp_init_attr init = qp_attr(cq);
        init.qp_type = types[i].type;
        errno = 0;
        struct ibv_qp *qp = ibv_create_qp(pd, &init);
        say("type %s -> %s", types[i].name, pointer_result(qp));
        if (qp) say("destroy -> %s", result(ibv_destroy_qp(qp)));
    }
}

static void qp_of_two_domains(long unused) {
    (void)unused;
    struct ibv_pd *one = pd_open(), *two = pd_open();
    struct ibv_cq *cq = cq_open(8, NULL);
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 8, .max_sge = 1}};
    struct ibv_qp_init_attr init = qp_attr(cq);
    init.srq = ibv_create_srq(one, &srq_init);
    struct ibv_qp *qp = ibv_create_qp(two, &init);
    say("a queue pair and a shared queue of different domains -> %s", pointer_result(qp));
}

static void context_closed(long unused) {
    (void)unused;
    struct ibv_pd *pd = pd_open();
    struct ibv_context *second = ibv_open_device(device.context->device);
    say("open again -> %s, another context: %d", pointer_result(second), second != device.context);
    struct ibv_pd *other = ibv_alloc_pd(second);
    struct ibv_mr *mr = ibv_reg_mr(other, memory_take(4096), 4096, ALL_ACCESS);
    say("of the second: domain %s, region %s", pointer_result(other), pointer_result(mr));
    say("close the second, with objects -> %s", result(ibv_close_device(second)));
    say("deallocate the first's -> %s", result(ibv_dealloc_pd(pd)));
    say("close the first -> %s", result(ibv_close_device(device.context)));
}

// A request on a key of another context of the same process.
static void key_of_other_context(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    struct ibv_context *second = ibv_open_device(device.context->device);
    struct ibv_pd *other = ibv_alloc_pd(second);
    struct ibv_mr *mr = ibv_reg_mr(other, pair.a.memory, pair.a.bytes, ALL_ACCESS);
    if (!mr) give_up("register");
    post(&pair.a, &(struct op){.id = 1, .code = IBV_WR_RDMA_WRITE, .len = 8, .lkey = mr->lkey});
    sent(&pair.a, 1);
    say_states(&pair);
}

static void acknowledged_events(long unused) {
    (void)unused;
    struct pair pair;
    pair_open(&pair, &(struct options){0});
    struct ibv_comp_channel *channel = ibv_create_comp_channel(device.context);
    int flags = 0;
    say("a channel -> %s, a descriptor: %d, flags %d", pointer_result(channel), channel->fd >= 0, flags);
    say("references %d", channel->refcnt);
    struct ibv_cq *cq = cq_open(8, channel);
    say("references %d", channel->refcnt);
    say("destroy the queue -> %s", result(ibv_destroy_cq(cq)));
    say("references %d", channel->refcnt);
    say("destroy the channel -> %s", result(ibv_destroy_comp_channel(channel)));
}

void add_objects(void) {
    add(pd_with_mr, 0, "object_pd_with_mr");
    add(pd_with_qp, 0, "object_pd_with_qp");
    add(pd_with_ah, 0, "object_pd_with_ah");
    add(srq_with_qp, 0, "object_srq_with_qp");
    add(channel_with_cq, 0, "object_channel_with_cq");
    add(cqs_of_a_qp, 0, "object_cqs_of_a_qp");
    add(mr_in_use, 0, "object_mr_in_use");
    add(ah_in_use, 0, "object_ah_in_use");
    add(qp_caps, 0, "object_qp_caps");
    add(qp_types, 0, "object_qp_types");
    add(qp_of_two_domains, 0, "object_qp_of_two_domains");
    add(context_closed, 0, "object_context_closed");
    add(key_of_other_context, 0, "object_key_of_other_context");
    add(acknowledged_events, 0, "object_channel_references");
}
