// Reaches every limit that `ibv_devinfo -v` prints: so many can be made, one more is refused as a NIC would, and what a
// zero stands for refuses. One line a limit; the last line counts.
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static struct ibv_context *context;
static struct ibv_device_attr_ex device;
static struct ibv_port_attr port;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static int passed, failed;

static void result(int good, const char *name, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printf("%-7s %s: %s\n", good ? "ok" : "FAILED", name, text);
    good ? passed++ : failed++;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

// ---- counts: one after the other until no more can be made

static union ibv_gid own_gid;
static uint8_t *memory;

static void *make_mr(void) { return ibv_reg_mr(pd, memory, 1, IBV_ACCESS_LOCAL_WRITE); }
static int unmake_mr(void *mr) { return ibv_dereg_mr(mr); }
static void *make_mw(void) { return ibv_alloc_mw(pd, IBV_MW_TYPE_1); }
static int unmake_mw(void *mw) { return ibv_dealloc_mw(mw); }
static void *make_pd(void) { return ibv_alloc_pd(context); }
static int unmake_pd(void *one) { return ibv_dealloc_pd(one); }
static void *make_cq(void) { return ibv_create_cq(context, 1, NULL, NULL, 0); }
static int unmake_cq(void *one) { return ibv_destroy_cq(one); }
static void *make_qp(void) {
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {1, 1, 1, 1, 0}};
    return ibv_create_qp(pd, &init);
}
static int unmake_qp(void *qp) { return ibv_destroy_qp(qp); }
static void *make_srq(void) {
    struct ibv_srq_init_attr init = {.attr = {.max_wr = 1, .max_sge = 1}};
    return ibv_create_srq(pd, &init);
}
static int unmake_srq(void *srq) { return ibv_destroy_srq(srq); }
static void *make_ah(void) {
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = own_gid, .hop_limit = 1}};
    return ibv_create_ah(pd, &attr);
}
static int unmake_ah(void *ah) { return ibv_destroy_ah(ah); }

static void count(const char *name, long limit, long used, void *(*make)(void), int (*unmake)(void *)) {
    void **made = calloc(limit + 1, sizeof *made);
    if (!made) die("calloc");
    long number = 0;
    errno = 0;
    while (number < limit + 1 && (made[number] = make())) number++;
    int reason = errno;
    long left = 0;
    for (long i = 0; i < number; i++) left += unmake(made[i]) != 0;
    void *again = make();
    result(number + used == limit && reason == ENOMEM && !left && again, name, "%ld of %ld, then %s; %ld not freed%s",
           number + used, limit, strerror(reason), left, again ? "" : "; none can be made after that");
    if (again) unmake(again);
    free(made);
}

// ---- sizes: the largest is granted, one more is EINVAL

static struct ibv_qp *queue_pair(enum ibv_qp_type type, struct ibv_qp_cap cap) {
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = type, .cap = cap};
    return ibv_create_qp(pd, &init);
}

static void capability(const char *name, struct ibv_qp_cap most, struct ibv_qp_cap more) {
    struct ibv_qp *qp = queue_pair(IBV_QPT_RC, most);
    int granted = qp != NULL;
    if (qp) ibv_destroy_qp(qp);
    errno = 0;
    qp = queue_pair(IBV_QPT_RC, more);
    int reason = errno;
    result(granted && !qp && reason == EINVAL, name, "%s, then %s", granted ? "granted" : "refused",
           qp ? "granted" : strerror(reason));
    if (qp) ibv_destroy_qp(qp);
}

static void queue_sizes(void) {
    uint32_t wr = device.orig_attr.max_qp_wr, sge = device.orig_attr.max_sge;
    capability("max_qp_wr, sends", (struct ibv_qp_cap){wr, 1, 1, 1, 0}, (struct ibv_qp_cap){wr + 1, 1, 1, 1, 0});
    capability("max_qp_wr, receives", (struct ibv_qp_cap){1, wr, 1, 1, 0}, (struct ibv_qp_cap){1, wr + 1, 1, 1, 0});
    capability("max_sge, sends", (struct ibv_qp_cap){1, 1, sge, 1, 0}, (struct ibv_qp_cap){1, 1, sge + 1, 1, 0});
    capability("max_sge, receives", (struct ibv_qp_cap){1, 1, 1, sge, 0}, (struct ibv_qp_cap){1, 1, 1, sge + 1, 0});
    struct ibv_cq *most = ibv_create_cq(context, device.orig_attr.max_cqe, NULL, NULL, 0);
    errno = 0;
    struct ibv_cq *more = ibv_create_cq(context, device.orig_attr.max_cqe + 1, NULL, NULL, 0);
    result(most && !more && errno == EINVAL, "max_cqe", "%d %s, one more %s", device.orig_attr.max_cqe,
           most ? "granted" : "refused", more ? "granted" : strerror(errno));
    if (most) ibv_destroy_cq(most);
    if (more) ibv_destroy_cq(more);
    struct ibv_srq_init_attr init = {.attr = {device.orig_attr.max_srq_wr, device.orig_attr.max_srq_sge, 0}};
    struct ibv_srq *srq = ibv_create_srq(pd, &init);
    init.attr.max_wr = device.orig_attr.max_srq_wr + 1;
    struct ibv_srq *longer = ibv_create_srq(pd, &init);
    init.attr = (struct ibv_srq_attr){1, device.orig_attr.max_srq_sge + 1, 0};
    struct ibv_srq *wider = ibv_create_srq(pd, &init);
    result(srq && !longer && !wider, "max_srq_wr, max_srq_sge", "%s, %s, %s", srq ? "granted" : "refused",
           longer ? "longer granted" : "longer refused", wider ? "wider granted" : "wider refused");
    if (srq) ibv_destroy_srq(srq);
    errno = 0;
    struct ibv_cq *vector = ibv_create_cq(context, 1, NULL, NULL, context->num_comp_vectors);
    result(!vector && errno == EINVAL, "num_comp_vectors", "vector %d gives %s", context->num_comp_vectors,
           vector ? "a CQ" : strerror(errno));
}

// ---- attributes of a QP

static int to_init(struct ibv_qp *qp, int pkey_index) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .pkey_index = pkey_index};
    return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static int to_rtr(struct ibv_qp *qp, uint8_t depth) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = port.active_mtu, .dest_qp_num = qp->qp_num,
                               .max_dest_rd_atomic = depth, .min_rnr_timer = 1};
    attr.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh = {.dgid = own_gid, .hop_limit = 1}};
    return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static int to_rts(struct ibv_qp *qp, uint8_t depth) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
                               .max_rd_atomic = depth};
    return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                        IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

static void read_depths(void) {
    int responder = device.orig_attr.max_qp_rd_atom, requester = device.orig_attr.max_qp_init_rd_atom;
    struct ibv_qp *qp = queue_pair(IBV_QPT_RC, (struct ibv_qp_cap){1, 1, 1, 1, 0});
    if (!qp) die("ibv_create_qp");
    result(to_init(qp, device.orig_attr.max_pkeys) == EINVAL && to_init(qp, device.orig_attr.max_pkeys - 1) == 0,
           "max_pkeys", "%d", device.orig_attr.max_pkeys);
    result(to_rtr(qp, responder + 1) == EINVAL && to_rtr(qp, responder) == 0, "max_qp_rd_atom", "%d", responder);
    result(to_rts(qp, requester + 1) == EINVAL && to_rts(qp, requester) == 0, "max_qp_init_rd_atom", "%d", requester);
    ibv_destroy_qp(qp);
}

// ---- messages

static int poll_status(void) {
    struct ibv_wc wc;
    for (long spins = 0; spins < 200 * 1000 * 1000L; spins++) {
        int n = ibv_poll_cq(cq, 1, &wc);
        if (n < 0) return -1;
        if (n == 1) return wc.status;
    }
    return -1;
}

// From the null region into the null region: not one byte has to be there.
static void largest_message(void) {
    struct ibv_mr *nothing = ibv_alloc_null_mr(pd);
    struct ibv_qp *qp = queue_pair(IBV_QPT_RC, (struct ibv_qp_cap){2, 2, 2, 2, 0});
    if (!nothing || !qp || to_init(qp, 0) || to_rtr(qp, 1) || to_rts(qp, 1)) die("largest_message");
    for (int more = 0; more <= 1; more++) {
        struct ibv_sge sges[2] = {{0, port.max_msg_sz, nothing->lkey}, {0, 1, nothing->lkey}};
        struct ibv_recv_wr receive = {.sg_list = sges, .num_sge = 2}, *bad_receive;
        struct ibv_send_wr send = {.sg_list = sges, .num_sge = 1 + more, .opcode = IBV_WR_SEND,
                                   .send_flags = IBV_SEND_SIGNALED}, *bad_send;
        if (ibv_post_recv(qp, &receive, &bad_receive) || ibv_post_send(qp, &send, &bad_send)) die("post");
        int first = poll_status(), second = poll_status();
        if (!more) {
            result(first == IBV_WC_SUCCESS && second == IBV_WC_SUCCESS, "max_msg_sz", "%u bytes: %s, %s",
                   port.max_msg_sz, ibv_wc_status_str(first), ibv_wc_status_str(second));
        } else {
            result(first == IBV_WC_LOC_LEN_ERR && second == IBV_WC_WR_FLUSH_ERR, "max_msg_sz, one byte more", "%s, %s",
                   ibv_wc_status_str(first), ibv_wc_status_str(second));
        }
    }
    ibv_destroy_qp(qp);
    ibv_dereg_mr(nothing);
}

// ---- memory

static void region_sizes(void) {
    uint64_t most = device.orig_attr.max_mr_size;
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, most, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);
    int granted = mr != NULL, reason = errno;
    if (mr) ibv_dereg_mr(mr);
    errno = 0;
    mr = ibv_reg_mr(pd, memory, most + 1, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);
    result(granted && !mr && errno == ENOMEM, "max_mr_size", "%#llx: %s; one byte more: %s", (unsigned long long)most,
           granted ? "registered" : strerror(reason), mr ? "registered" : strerror(errno));
    if (mr) ibv_dereg_mr(mr);
}

static void device_memory(void) {
    struct ibv_alloc_dm_attr attr = {.length = device.max_dm_size};
    struct ibv_dm *most = ibv_alloc_dm(context, &attr);
    attr.length = 1;
    errno = 0;
    struct ibv_dm *more = ibv_alloc_dm(context, &attr);
    result(device.max_dm_size && most && !more && errno == ENOMEM, "max_dm_size", "%llu: %s; one byte more: %s",
           (unsigned long long)device.max_dm_size, most ? "allocated" : "refused", more ? "allocated" : strerror(errno));
    if (most) ibv_free_dm(most);
    if (more) ibv_free_dm(more);
}

// ---- multicast

static union ibv_gid group(unsigned number) {
    union ibv_gid gid = {.raw = {[10] = 0xff, [11] = 0xff, [12] = 239}};
    gid.raw[13] = number >> 16, gid.raw[14] = number >> 8, gid.raw[15] = number;
    return gid;
}

static void multicast(void) {
    unsigned groups = device.orig_attr.max_mcast_grp, each = device.orig_attr.max_mcast_qp_attach;
    struct ibv_qp **qps = calloc(each + 1, sizeof *qps);
    if (!qps) die("calloc");
    for (unsigned i = 0; i <= each; i++) {
        qps[i] = queue_pair(IBV_QPT_UD, (struct ibv_qp_cap){1, 1, 1, 1, 0});
        if (!qps[i]) die("ibv_create_qp");
    }
    unsigned attached = 0;
    int reason = 0;
    union ibv_gid gid;
    for (; attached <= groups; attached++) {
        gid = group(attached + 1);
        reason = ibv_attach_mcast(qps[0], &gid, 0);
        if (reason) break;
    }
    result(attached == groups && reason == ENOMEM, "max_mcast_grp", "%u of %u, then %s", attached, groups,
           strerror(reason));
    for (unsigned i = 0; i < attached; i++) {
        gid = group(i + 1);
        if (ibv_detach_mcast(qps[0], &gid, 0)) result(0, "ibv_detach_mcast", "group %u", i + 1);
    }
    gid = group(1);
    unsigned members = 0;
    while (members <= each && !(reason = ibv_attach_mcast(qps[members], &gid, 0))) members++;
    result(members == each && reason == ENOMEM, "max_mcast_qp_attach", "%u of %u, then %s", members, each,
           strerror(reason));
    result((unsigned)device.orig_attr.max_total_mcast_qp_attach == groups * each, "max_total_mcast_qp_attach", "%d",
           device.orig_attr.max_total_mcast_qp_attach);
    for (unsigned i = 0; i <= each; i++) ibv_destroy_qp(qps[i]);
    free(qps);
}

// ---- what is zero

static void refusals(void) {
    struct ibv_qp_cap cap = {1, 1, 1, 1, 0};
    errno = 0;
    struct ibv_qp *raw = queue_pair(IBV_QPT_RAW_PACKET, cap);
    result(!device.orig_attr.max_raw_ethy_qp && !raw && errno == EOPNOTSUPP, "max_raw_ethy_qp", "%s",
           raw ? "created" : strerror(errno));
    struct ibv_wq_init_attr wq_init = {.wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 1, .pd = pd, .cq = cq};
    errno = 0;
    struct ibv_wq *wq = ibv_create_wq(context, &wq_init);
    result(!device.max_wq_type_rq && !wq && errno == EOPNOTSUPP, "max_wq_type_rq", "%s", wq ? "created" : strerror(errno));
    struct ibv_srq_init_attr_ex srq_init = {.attr = {.max_wr = 1, .max_sge = 1},
                                            .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
                                                         IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM,
                                            .srq_type = IBV_SRQT_TM, .pd = pd, .cq = cq};
    errno = 0;
    struct ibv_srq *srq = ibv_create_srq_ex(context, &srq_init);
    result(!device.tm_caps.max_num_tags && !srq && errno == EOPNOTSUPP, "tag matching", "%s",
           srq ? "created" : strerror(errno));
    struct ibv_flow_attr flow_attr = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof flow_attr, .port = 1};
    struct ibv_qp *qp = queue_pair(IBV_QPT_UD, cap);
    errno = 0;
    struct ibv_flow *flow = qp ? ibv_create_flow(qp, &flow_attr) : NULL;
    result(!flow && errno == EOPNOTSUPP, "flow steering", "%s", flow ? "created" : strerror(errno));
    struct ibv_qp_rate_limit_attr limit = {.rate_limit = 1000};
    int reason = qp ? ibv_modify_qp_rate_limit(qp, &limit) : 0;
    result(!device.packet_pacing_caps.qp_rate_limit_max && reason == EOPNOTSUPP, "packet pacing", "%s",
           strerror(reason));
    if (qp) ibv_destroy_qp(qp);
    struct ibv_port_attr other;
    union ibv_gid gid;
    result(ibv_query_port(context, device.orig_attr.phys_port_cnt + 1, &other) != 0, "phys_port_cnt", "%d",
           device.orig_attr.phys_port_cnt);
    result(ibv_query_gid(context, 1, port.gid_tbl_len - 1, &gid) == 0 && ibv_query_gid(context, 1, port.gid_tbl_len, &gid),
           "gid_tbl_len", "%d", port.gid_tbl_len);
    result(!device.rss_caps.supported_qpts && !device.tso_caps.max_tso && !device.raw_packet_caps, "RSS, TSO, raw", "none");
}

int main(void) {
    struct ibv_device **devices = ibv_get_device_list(NULL);
    if (!devices || !devices[0] || !(context = ibv_open_device(devices[0]))) die("ibv_open_device");
    ibv_free_device_list(devices);
    if (ibv_query_device_ex(context, NULL, &device) || ibv_query_port(context, 1, &port) ||
        ibv_query_gid(context, 1, 0, &own_gid))
        die("query");
    pd = ibv_alloc_pd(context);
    cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!pd || !cq || memory == MAP_FAILED) die("setup");
    struct ibv_device_attr *most = &device.orig_attr;
    count("max_pd", most->max_pd, 1, make_pd, unmake_pd);
    count("max_mr", most->max_mr, 0, make_mr, unmake_mr);
    count("max_mw", most->max_mw, 0, make_mw, unmake_mw);
    count("max_ah", most->max_ah, 0, make_ah, unmake_ah);
    count("max_cq", most->max_cq, 1, make_cq, unmake_cq);
    count("max_qp", most->max_qp, 0, make_qp, unmake_qp);
    count("max_srq", most->max_srq, 0, make_srq, unmake_srq);
    queue_sizes();
    read_depths();
    largest_message();
    region_sizes();
    device_memory();
    multicast();
    refusals();
    ibv_destroy_cq(cq);
    ibv_dealloc_pd(pd);
    if (ibv_close_device(context)) die("ibv_close_device");
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
