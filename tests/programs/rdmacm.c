/* librdmacm by its C interface: synchronous and asynchronous identifiers, both ends in one process.
 *
 *   rdmacm alone            without a router: everything refuses, with the right errno
 *   rdmacm pair ADDRESS     with one; ADDRESS is this container's own
 *   rdmacm death            with one that ends after "ready"
 *
 * One line for each case, and exit status 1 if one failed. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *own_address;
static int failed;

#define NEED(condition)                                                                        \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            printf("  line %d: %s (errno %d, %s)\n", __LINE__, #condition, errno, strerror(errno)); \
            return false;                                                                      \
        }                                                                                      \
    } while (0)
#define FAILS_WITH(number, call) (errno = 0, (call) == -1 && errno == (number))

static struct sockaddr_in address_of(const char *ip, uint16_t port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, ip, &address.sin_addr);
    return address;
}

/* ---- without a router */

static bool no_device(void)
{
    struct rdma_cm_id *id;
    int count = 7;
    errno = 0;
    NEED(!rdma_create_event_channel() && errno == ENODEV);
    NEED(FAILS_WITH(ENODEV, rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP)));
    errno = 0;
    NEED(!rdma_get_devices(&count) && errno == ENODEV && count == 0);
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP}, *found;
    NEED(FAILS_WITH(ENODEV, rdma_getaddrinfo("127.0.0.1", "7471", &hints, &found)));
    return true;
}

static bool bad_arguments(void)
{
    struct rdma_cm_id *id;
    struct ibv_ece ece = {.vendor_id = 1};
    NEED(FAILS_WITH(EINVAL, rdma_ack_cm_event(NULL)));
    NEED(FAILS_WITH(EINVAL, rdma_create_id(NULL, NULL, NULL, RDMA_PS_TCP)));
    NEED(FAILS_WITH(EINVAL, rdma_create_id(NULL, &id, NULL, 0x999)));
    NEED(FAILS_WITH(EINVAL, rdma_getaddrinfo(NULL, NULL, NULL, NULL)));
    NEED(FAILS_WITH(EINVAL, rdma_set_local_ece(NULL, &ece)));
    NEED(!strcmp(rdma_event_str(RDMA_CM_EVENT_ESTABLISHED), "RDMA_CM_EVENT_ESTABLISHED"));
    NEED(!strcmp(rdma_event_str(99), "UNKNOWN EVENT"));
    return true;
}

/* ---- synchronous: a server thread and a client */

struct server {
    struct rdma_cm_id *listener;
    pthread_t thread;
    bool reject;
    bool ok;
};

static struct ibv_qp_init_attr small_qp(void)
{
    return (struct ibv_qp_init_attr){
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}, .sq_sig_all = 1};
}

static bool serve_one(struct server *server)
{
    struct rdma_cm_id *id;
    char text[64] = "";
    struct ibv_wc completion;
    NEED(!rdma_get_request(server->listener, &id));
    NEED(id->qp && id->verbs && id->pd && id->recv_cq && id->send_cq && id->port_num == 1);
    NEED(id->event && id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
    NEED(id->event->param.conn.private_data_len >= 5 && !memcmp(id->event->param.conn.private_data, "hello", 5));
    if (server->reject) {
        NEED(!rdma_reject(id, "no", 2));
        rdma_destroy_ep(id);
        return true;
    }
    struct ibv_mr *region = rdma_reg_msgs(id, text, sizeof text);
    NEED(region && !rdma_post_recv(id, NULL, text, sizeof text, region));
    struct rdma_conn_param parameters = {.private_data = "welcome", .private_data_len = 7, .rnr_retry_count = 7};
    NEED(!rdma_accept(id, &parameters));
    NEED(rdma_get_recv_comp(id, &completion) == 1 && completion.status == IBV_WC_SUCCESS);
    NEED(!strcmp(text, "over verbs"));
    NEED(!rdma_disconnect(id));
    NEED(!rdma_dereg_mr(region));
    rdma_destroy_ep(id);
    return true;
}

static void *serve(void *argument)
{
    struct server *server = argument;
    server->ok = serve_one(server);
    return NULL;
}

static bool start(struct server *server, bool reject, char *port)
{
    struct rdma_addrinfo hints = {.ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP}, *found;
    struct ibv_qp_init_attr init = small_qp();
    NEED(!rdma_getaddrinfo(own_address, "0", &hints, &found));
    NEED(!rdma_create_ep(&server->listener, found, NULL, &init));
    rdma_freeaddrinfo(found);
    NEED(!rdma_listen(server->listener, 4));
    NEED(rdma_get_src_port(server->listener) != 0);
    sprintf(port, "%d", ntohs(rdma_get_src_port(server->listener)));
    server->reject = reject;
    NEED(!pthread_create(&server->thread, NULL, serve, server));
    return true;
}

static bool finish(struct server *server)
{
    pthread_join(server->thread, NULL);
    rdma_destroy_ep(server->listener);
    return server->ok;
}

static struct rdma_cm_id *client_end(const char *port)
{
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP}, *found;
    struct ibv_qp_init_attr init = small_qp();
    struct rdma_cm_id *id = NULL;
    if (rdma_getaddrinfo(own_address, port, &hints, &found))
        return NULL;
    if (rdma_create_ep(&id, found, NULL, &init))
        id = NULL;
    rdma_freeaddrinfo(found);
    return id;
}

static bool synchronous(void)
{
    struct server server = {0};
    char port[16], text[] = "over verbs";
    struct ibv_wc completion;
    NEED(start(&server, false, port));
    struct rdma_cm_id *id = client_end(port);
    NEED(id && id->qp && id->route.num_paths == 1 && id->route.path_rec);
    NEED(rdma_get_dst_port(id) == htons(atoi(port)) && rdma_get_src_port(id) != 0);
    NEED(rdma_get_local_addr(id)->sa_family == AF_INET);
    NEED(FAILS_WITH(EINVAL, rdma_get_request(id, NULL)));
    struct rdma_conn_param parameters = {
        .private_data = "hello", .private_data_len = 5, .retry_count = 7, .rnr_retry_count = 7};
    NEED(!rdma_connect(id, &parameters));
    NEED(id->event && id->event->event == RDMA_CM_EVENT_ESTABLISHED);
    NEED(id->event->param.conn.private_data_len >= 7 && !memcmp(id->event->param.conn.private_data, "welcome", 7));
    struct ibv_mr *region = rdma_reg_msgs(id, text, sizeof text);
    NEED(region && !rdma_post_send(id, NULL, text, sizeof text, region, 0));
    NEED(rdma_get_send_comp(id, &completion) == 1 && completion.status == IBV_WC_SUCCESS);
    NEED(!rdma_disconnect(id));
    NEED(!rdma_dereg_mr(region));
    rdma_destroy_ep(id);
    return finish(&server);
}

static bool rejected(void)
{
    struct server server = {0};
    char port[16];
    NEED(start(&server, true, port));
    struct rdma_cm_id *id = client_end(port);
    NEED(id);
    struct rdma_conn_param parameters = {.private_data = "hello", .private_data_len = 5};
    NEED(FAILS_WITH(ECONNREFUSED, rdma_connect(id, &parameters)));
    NEED(id->event->event == RDMA_CM_EVENT_REJECTED && id->event->status == 28);
    NEED(id->event->param.conn.private_data_len >= 2 && !memcmp(id->event->param.conn.private_data, "no", 2));
    rdma_destroy_ep(id);
    return finish(&server);
}

static bool nobody_listens(void)
{
    struct rdma_cm_id *id = client_end("9");
    NEED(id);
    struct rdma_conn_param parameters = {0};
    NEED(FAILS_WITH(ECONNREFUSED, rdma_connect(id, &parameters)));
    NEED(id->event->status == 8);
    rdma_destroy_ep(id);
    return true;
}

/* ---- asynchronous */

static bool expect(struct rdma_event_channel *channel, struct rdma_cm_id *id, enum rdma_cm_event_type kind)
{
    struct rdma_cm_event *event;
    NEED(!rdma_get_cm_event(channel, &event));
    if (event->event != kind)
        printf("  got %s (%d)\n", rdma_event_str(event->event), event->status);
    NEED(event->event == kind && event->status == 0 && (!id || event->id == id));
    NEED(!rdma_ack_cm_event(event));
    return true;
}

static bool events(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel(), *other = rdma_create_event_channel();
    struct rdma_cm_id *id, *neighbour;
    struct rdma_cm_event *event;
    struct sockaddr_in destination = address_of(own_address, 7471);
    NEED(channel && other);
    NEED(!rdma_create_id(channel, &id, &failed, RDMA_PS_TCP) && id->context == &failed && id->channel == channel);
    NEED(!rdma_create_id(channel, &neighbour, NULL, RDMA_PS_UDP) && neighbour->qp_type == IBV_QPT_UD);
    NEED(!fcntl(channel->fd, F_SETFL, O_NONBLOCK));
    NEED(FAILS_WITH(EAGAIN, rdma_get_cm_event(channel, &event)));
    NEED(!fcntl(channel->fd, F_SETFL, 0));
    NEED(FAILS_WITH(EINVAL, rdma_resolve_route(id, 1000)));
    NEED(!rdma_resolve_addr(neighbour, NULL, (struct sockaddr *)&destination, 1000));
    NEED(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&destination, 1000));
    /* What waits for it comes along, what waits for the other stays. */
    struct pollfd both[2] = {{.fd = channel->fd, .events = POLLIN}};
    NEED(poll(both, 1, 5000) == 1);
    usleep(100 * 1000);
    NEED(!rdma_migrate_id(id, other) && id->channel == other);
    both[1] = (struct pollfd){.fd = other->fd, .events = POLLIN};
    NEED(poll(both, 1, 5000) == 1 && poll(both + 1, 1, 5000) == 1);
    NEED(expect(channel, neighbour, RDMA_CM_EVENT_ADDR_RESOLVED));
    NEED(expect(other, id, RDMA_CM_EVENT_ADDR_RESOLVED));
    NEED(poll(both, 2, 0) == 0);
    NEED(id->verbs && id->verbs == neighbour->verbs && id->pd && id->port_num == 1);
    NEED(!rdma_resolve_route(id, 1000) && expect(other, id, RDMA_CM_EVENT_ROUTE_RESOLVED));
    NEED(id->route.num_paths == 1 && id->route.path_rec->pkey == 0xffff);
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_INIT};
    int mask = 0;
    NEED(!rdma_init_qp_attr(id, &attributes, &mask) && (mask & IBV_QP_STATE) && attributes.port_num == 1);
    uint8_t service = 8;
    int yes = 1;
    NEED(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &service, 1));
    NEED(FAILS_WITH(EINVAL, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &yes, sizeof yes)));
    NEED(FAILS_WITH(ENOSYS, rdma_set_option(id, RDMA_OPTION_ID, 77, &yes, sizeof yes)));
    /* Thrown away unread with its identifier, and nobody is notified of it any more. */
    NEED(FAILS_WITH(EINVAL, rdma_resolve_route(id, 1000)));
    NEED(!rdma_resolve_route(neighbour, 1000));
    NEED(poll(both, 1, 5000) == 1);
    NEED(!rdma_destroy_id(neighbour));
    NEED(poll(both, 1, 0) == 0);
    NEED(!rdma_destroy_id(id));
    rdma_destroy_event_channel(channel);
    rdma_destroy_event_channel(other);
    return true;
}

static bool addresses(void)
{
    struct rdma_cm_id *one, *two, *three;
    struct sockaddr_in any = address_of("0.0.0.0", 0), foreign = address_of("192.0.2.1", 0), taken;
    NEED(!rdma_create_id(NULL, &one, NULL, RDMA_PS_TCP) && !rdma_create_id(NULL, &two, NULL, RDMA_PS_TCP));
    NEED(FAILS_WITH(EADDRNOTAVAIL, rdma_bind_addr(one, (struct sockaddr *)&foreign)));
    NEED(!rdma_bind_addr(one, (struct sockaddr *)&any) && rdma_get_src_port(one) != 0 && !one->verbs);
    taken = any;
    taken.sin_port = rdma_get_src_port(one);
    /* The kernel's distinction: the wildcard's port is not available, an address' is in use. */
    NEED(FAILS_WITH(EADDRNOTAVAIL, rdma_bind_addr(two, (struct sockaddr *)&taken)));
    struct sockaddr_in own = address_of(own_address, 0);
    NEED(!rdma_bind_addr(two, (struct sockaddr *)&own) && two->verbs && two->pd);
    own.sin_port = rdma_get_src_port(two);
    NEED(!rdma_create_id(NULL, &three, NULL, RDMA_PS_TCP));
    NEED(FAILS_WITH(EADDRINUSE, rdma_bind_addr(three, (struct sockaddr *)&own)));
    struct sockaddr unknown = {.sa_family = AF_UNIX};
    NEED(FAILS_WITH(EINVAL, rdma_bind_addr(three, &unknown)));
    struct ibv_qp_init_attr init = small_qp();
    NEED(FAILS_WITH(EINVAL, rdma_create_qp(three, NULL, &init)));
    NEED(!rdma_destroy_id(one) && !rdma_destroy_id(two) && !rdma_destroy_id(three));
    return true;
}

static void *read_one(void *channel)
{
    struct rdma_cm_event *event;
    rdma_get_cm_event(channel, &event);
    return NULL;
}

/* Programs end their event threads so. */
static bool cancelled(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id;
    pthread_t reader;
    void *result = NULL;
    NEED(channel && !pthread_create(&reader, NULL, read_one, channel));
    usleep(50 * 1000);
    NEED(!pthread_cancel(reader) && !pthread_join(reader, &result) && result == PTHREAD_CANCELED);
    NEED(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) && !rdma_destroy_id(id));
    rdma_destroy_event_channel(channel);
    return true;
}

/* A child has nothing of its parent's, and may begin again. */
static bool forked(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id, *own;
    struct rdma_cm_event *event;
    NEED(channel && !rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
    pid_t child = fork();
    if (child == 0) {
        bool ok = FAILS_WITH(EIO, rdma_get_cm_event(channel, &event)) && FAILS_WITH(EIO, rdma_destroy_id(id)) &&
                  FAILS_WITH(EIO, rdma_create_id(channel, &own, NULL, RDMA_PS_TCP)) &&
                  !rdma_create_id(NULL, &own, NULL, RDMA_PS_TCP) && !rdma_destroy_id(own);
        _exit(ok ? 0 : 1);
    }
    int status = 1;
    NEED(waitpid(child, &status, 0) == child && status == 0);
    NEED(!rdma_destroy_id(id));
    rdma_destroy_event_channel(channel);
    return true;
}

/* ---- the router ends */

static bool router_ends(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *ids[2], *alone;
    struct rdma_cm_event *event;
    struct sockaddr_in any = address_of("0.0.0.0", 0);
    NEED(channel && !rdma_create_id(NULL, &alone, NULL, RDMA_PS_TCP));
    for (int i = 0; i < 2; i++)
        NEED(!rdma_create_id(channel, &ids[i], NULL, RDMA_PS_TCP));
    printf("ready\n");
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        NEED(!rdma_get_cm_event(channel, &event));
        NEED(event->event == RDMA_CM_EVENT_DEVICE_REMOVAL && event->id == ids[i]);
        NEED(!rdma_ack_cm_event(event));
    }
    for (int i = 0; i < 3; i++)
        NEED(FAILS_WITH(EIO, rdma_get_cm_event(channel, &event)));
    NEED(FAILS_WITH(EIO, rdma_bind_addr(alone, (struct sockaddr *)&any)));
    NEED(!rdma_destroy_id(ids[0]) && !rdma_destroy_id(ids[1]) && !rdma_destroy_id(alone));
    rdma_destroy_event_channel(channel);
    return true;
}

/* ---- */

static void run(const char *name, bool (*body)(void))
{
    bool ok = body();
    printf("%s %s\n", ok ? "ok  " : "FAIL", name);
    fflush(stdout);
    failed += !ok;
}

int main(int count, char **arguments)
{
    if (count == 2 && !strcmp(arguments[1], "alone")) {
        run("no device without a router", no_device);
        run("bad arguments", bad_arguments);
    } else if (count == 2 && !strcmp(arguments[1], "death")) {
        run("the router ends", router_ends);
    } else if (count == 3) {
        own_address = arguments[2];
        run("bad arguments", bad_arguments);
        run("addresses and ports", addresses);
        run("events, migration, options", events);
        run("synchronous identifiers", synchronous);
        run("a rejection with its reason", rejected);
        run("nobody listens", nobody_listens);
        run("a reader that is cancelled", cancelled);
        run("a forked child", forked);
    } else {
        fprintf(stderr, "usage: rdmacm alone | pair ADDRESS | death\n");
        return 2;
    }
    return failed ? 1 : 0;
}
