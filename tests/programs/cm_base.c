// See cm.h.
#define _GNU_SOURCE
#include "cm.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sockaddr_in address_of(const char *host, int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (host && inet_pton(AF_INET, host, &address.sin_addr) != 1) die("no address: %s", host);
    return address;
}

struct rdma_cm_event *next_event(struct rdma_event_channel *channel, int ms) {
    struct pollfd pollfd = {.fd = channel->fd, .events = POLLIN};
    struct rdma_cm_event *event;
    if (poll(&pollfd, 1, ms) != 1) {
        errno = ETIMEDOUT;
        return NULL;
    }
    return rdma_get_cm_event(channel, &event) ? NULL : event;
}

bool expect_event(struct rdma_event_channel *channel, enum rdma_cm_event_type kind, int ms) {
    struct rdma_cm_event *event = next_event(channel, ms);
    if (!event) {
        fprintf(stderr, "no %s: %s\n", rdma_event_str(kind), strerror(errno));
        return false;
    }
    bool good = event->event == kind;
    if (!good) fprintf(stderr, "%s (%d) instead of %s\n", rdma_event_str(event->event), event->status, rdma_event_str(kind));
    rdma_ack_cm_event(event);
    return good;
}

bool create_qp(struct rdma_cm_id *id) {
    struct ibv_qp_init_attr attributes = {
        .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}};
    return !rdma_create_qp(id, NULL, &attributes);
}

void destroy_id(struct rdma_cm_id *id) {
    if (id->qp) rdma_destroy_qp(id);
    if (rdma_destroy_id(id)) die("rdma_destroy_id");
}

struct rdma_cm_id *resolved_id(struct rdma_event_channel *channel, const char *host, int port, void *context) {
    struct sockaddr_in address = address_of(host, port);
    struct rdma_cm_id *id;
    if (rdma_create_id(channel, &id, context, RDMA_PS_TCP)) return NULL;
    bool good = !rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, RESOLVE_MS) &&
                expect_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED, EVENT_MS) && !rdma_resolve_route(id, RESOLVE_MS) &&
                expect_event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, EVENT_MS) && create_qp(id);
    if (good) return id;
    fprintf(stderr, "not resolved: %s\n", strerror(errno));
    destroy_id(id);
    return NULL;
}

struct rdma_cm_id *listener_at(struct rdma_event_channel *channel, int port, int backlog) {
    struct sockaddr_in address = address_of(NULL, port);
    struct rdma_cm_id *id;
    if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP)) die("rdma_create_id");
    if (rdma_bind_addr(id, (struct sockaddr *)&address)) die("rdma_bind_addr");
    if (rdma_listen(id, backlog)) die("rdma_listen");
    return id;
}

struct rdma_conn_param parameters(const void *private_data, unsigned bytes) {
    return (struct rdma_conn_param){.private_data = private_data,
                                    .private_data_len = (uint8_t)bytes,
                                    .responder_resources = 1,
                                    .initiator_depth = 1,
                                    .retry_count = 5,
                                    .rnr_retry_count = 5};
}
