// Single promises of rdma_cm, each by a program of its own: addresses that come late or never, ports that want a
// privilege, events that pile up, a connection that fails at the last step. The last line says what was seen.
#define _GNU_SOURCE
#include "cm.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SLACK_MS = 10000 }; // a busy machine

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static struct rdma_event_channel *new_channel(void) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel) die("rdma_create_event_channel");
    return channel;
}

static struct rdma_cm_id *resolving(struct rdma_event_channel *channel, const char *host, int ms, void *context) {
    struct sockaddr_in address = address_of(host, 7471);
    struct rdma_cm_id *id;
    if (rdma_create_id(channel, &id, context, RDMA_PS_TCP)) die("rdma_create_id");
    if (rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, ms)) die("rdma_resolve_addr");
    return id;
}

// Nobody is there: -ETIMEDOUT after the time that was given, and once more on the same identifier.
static int absent(const char *host, int ms) {
    struct rdma_event_channel *channel = new_channel();
    double begun = now_ms(), took = 0;
    struct rdma_cm_id *id = resolving(channel, host, ms, NULL);
    for (int turn = 0; turn < 2; turn++) {
        struct rdma_cm_event *event = next_event(channel, EVENT_MS);
        took = now_ms() - begun;
        if (!event || event->event != RDMA_CM_EVENT_ADDR_ERROR || event->status != -ETIMEDOUT)
            die("%s, %d", event ? rdma_event_str(event->event) : "no event", event ? event->status : 0);
        rdma_ack_cm_event(event);
        if (took < ms - 1 || took > ms + SLACK_MS) die("after %.0f ms", took);
        begun = now_ms();
        struct sockaddr_in address = address_of(host, 7471);
        if (!turn && rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, ms)) die("it can't try again");
    }
    destroy_id(id);
    rdma_destroy_event_channel(channel);
    // The synchronous call says the same.
    struct sockaddr_in address = address_of(host, 7471);
    if (rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP)) die("rdma_create_id");
    if (!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 10) || errno != ETIMEDOUT) die("without a channel");
    destroy_id(id);
    printf("ETIMEDOUT after %.0f ms\n", took);
    return 0;
}

// Somebody comes while it waits.
static int late(const char *host, int ms) {
    struct rdma_event_channel *channel = new_channel();
    struct rdma_cm_id *id = resolving(channel, host, ms, NULL);
    struct pollfd pollfd = {.fd = channel->fd, .events = POLLIN};
    if (poll(&pollfd, 1, 50)) die("somebody is there already");
    double begun = now_ms();
    printf("waits\n");
    fflush(stdout);
    if (!expect_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED, ms + SLACK_MS)) return 1;
    double took = now_ms() - begun;
    if (rdma_resolve_route(id, RESOLVE_MS) || !expect_event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, EVENT_MS)) return 1;
    if (!create_qp(id)) die("rdma_create_qp");
    destroy_id(id);
    rdma_destroy_event_channel(channel);
    printf("found after %.0f ms\n", took);
    return 0;
}

// Many wait for long; some are destroyed, the rest is left behind by the end of the process.
static int leave(const char *host, int count) {
    struct rdma_event_channel *channel = new_channel();
    struct rdma_cm_id **ids = calloc((size_t)count, sizeof *ids);
    if (!ids) die("calloc");
    for (int i = 0; i < count; i++) ids[i] = resolving(channel, host, 600000, NULL);
    for (int i = 0; i < count; i += 2) destroy_id(ids[i]);
    printf("%d waited\n", count);
    fflush(stdout);
    _exit(0);
}

// More events than the channel's socket holds: all come, one a read and in order, and the descriptor is readable for
// each.
static int owed(const char *host, int count) {
    struct rdma_event_channel *channel = new_channel();
    for (int i = 0; i < count; i++) resolving(channel, host, RESOLVE_MS, (void *)(intptr_t)i);
    if (fcntl(channel->fd, F_SETFL, O_NONBLOCK)) die("fcntl");
    double longest = 0;
    for (int i = 0; i < count; i++) {
        double begun = now_ms();
        struct rdma_cm_event *event = next_event(channel, EVENT_MS);
        if (!event) die("event %d of %d does not come", i, count);
        if (now_ms() - begun > longest) longest = now_ms() - begun;
        if (event->event != RDMA_CM_EVENT_ADDR_RESOLVED || event->id->context != (void *)(intptr_t)i)
            die("%s of %ld in the place of %d", rdma_event_str(event->event), (long)(intptr_t)event->id->context, i);
        struct rdma_cm_id *id = event->id;
        rdma_ack_cm_event(event);
        // Every other one is destroyed at once, while events of later ones are owed.
        if (i % 2) destroy_id(id);
    }
    struct pollfd pollfd = {.fd = channel->fd, .events = POLLIN};
    if (poll(&pollfd, 1, 100)) die("more events than identifiers");
    printf("%d events, the longest wait for one %.1f ms\n", count, longest);
    return 0;
}

static int bound(int port) {
    struct sockaddr_in address = address_of(NULL, port);
    struct rdma_cm_id *id;
    if (rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP)) die("rdma_create_id");
    int number = rdma_bind_addr(id, (struct sockaddr *)&address) ? errno : 0;
    destroy_id(id);
    return number;
}

// Ports below 1024 are for who has CAP_NET_BIND_SERVICE, or where the network namespace says that they are everybody's.
static int ports(void) {
    int start = 1024;
    FILE *file = fopen("/proc/sys/net/ipv4/ip_unprivileged_port_start", "r");
    if (!file || fscanf(file, "%d", &start) != 1) die("ip_unprivileged_port_start");
    fclose(file);
    if (bound(80)) die("root and port 80");
    if (seteuid(65534)) die("seteuid");
    int low = bound(80), high = bound(1024), any = bound(0);
    if (low != (start > 80 ? EACCES : 0) || high || any) die("without the privilege: %d, %d, %d", low, high, any);
    if (seteuid(0) || bound(80)) die("root again");
    printf("port 80 without the privilege: %s\n", low ? strerrorname_np(low) : "everybody's here");
    return 0;
}

// The queue pair can't be brought to RTS when the answer comes: CONNECT_ERROR, and nothing after it.
static int connect_error(const char *host, int port, int tries) {
    struct rdma_event_channel *channel = new_channel();
    struct rdma_cm_id *id = resolved_id(channel, host, port, NULL);
    if (!id) return 1;
    struct rdma_conn_param how = parameters(NULL, 0);
    if (rdma_connect(id, &how)) die("rdma_connect");
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    if (ibv_modify_qp(id->qp, &error, IBV_QP_STATE)) die("ibv_modify_qp");
    struct rdma_cm_event *event = next_event(channel, EVENT_MS);
    if (event && event->event == RDMA_CM_EVENT_ESTABLISHED && tries > 0) { // the other end was quicker
        rdma_ack_cm_event(event);
        destroy_id(id);
        rdma_destroy_event_channel(channel);
        return connect_error(host, port, tries - 1);
    }
    if (!event || event->event != RDMA_CM_EVENT_CONNECT_ERROR || event->status >= 0)
        die("%s", event ? rdma_event_str(event->event) : "no event");
    printf("CONNECT_ERROR, %s\n", strerrorname_np(-event->status));
    rdma_ack_cm_event(event);
    destroy_id(id);
    return 0;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (argc == 2 && !strcmp(what, "ports")) return ports();
    if (argc != 4) return 2;
    int number = atoi(argv[3]);
    if (!strcmp(what, "absent")) return absent(argv[2], number);
    if (!strcmp(what, "late")) return late(argv[2], number);
    if (!strcmp(what, "leave")) return leave(argv[2], number);
    if (!strcmp(what, "owed")) return owed(argv[2], number);
    if (!strcmp(what, "connect-error")) return connect_error(argv[2], number, 200);
    return 2;
}
