// Listeners at any port of a container with several vNICs, beside programs that have half of the ports at one of them.
//
//     cm_ports ADDRESS      ADDRESS: of the second vNIC
#include "cm.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { FIRST = 32768, LAST = 60999, TRIES = 20 };

static struct rdma_event_channel *channel;

static struct rdma_cm_id *new_id(void) {
    struct rdma_cm_id *id;
    if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP)) die("rdma_create_id");
    return id;
}

static int bind_at(struct rdma_cm_id *id, const char *host, int port) {
    struct sockaddr_in address = address_of(host, port);
    return rdma_bind_addr(id, (struct sockaddr *)&address);
}

static int port_of(struct rdma_cm_id *id) {
    return ntohs(rdma_get_src_port(id));
}

// Whether somebody has the port at this address.
static bool is_taken(const char *host, int port) {
    struct rdma_cm_id *id = new_id();
    bool taken = bind_at(id, host, port) != 0;
    if (taken && errno != EADDRINUSE && errno != EADDRNOTAVAIL) die("bind to %s:%d", host, port);
    destroy_id(id);
    return taken;
}

int main(int count, char **words) {
    if (count != 2) die("cm_ports ADDRESS");
    const char *host = words[1];
    channel = rdma_create_event_channel();
    if (!channel) die("rdma_create_event_channel");
    for (int port = FIRST; port <= LAST; port += 2)
        if (bind_at(new_id(), host, port)) die("bind to %s:%d", host, port);
    for (int number = 0; number < TRIES; number++) {
        struct rdma_cm_id *bound = new_id(), *unbound = new_id();
        if (bind_at(bound, NULL, 0)) die("bind to any port");
        int port = port_of(bound);
        if (port % 2 == 0) die("port %d is another's at %s", port, host);
        if (!is_taken(host, port)) die("port %d is free at %s before the program listens", port, host);
        if (rdma_listen(bound, 1)) die("listen at port %d", port);
        if (port_of(bound) != port) die("port %d has become %d", port, port_of(bound));
        if (rdma_listen(unbound, 1)) die("listen at any port");
        if (port_of(unbound) % 2 == 0 || !is_taken(host, port_of(unbound))) die("listens at port %d", port_of(unbound));
        destroy_id(bound);
        destroy_id(unbound);
        if (is_taken(host, port)) die("port %d is still taken", port);
    }
    // Once it talks to a peer of one vNIC, it has the port at that one alone.
    struct rdma_cm_id *client = new_id();
    if (bind_at(client, NULL, 0)) die("bind to any port");
    int port = port_of(client);
    struct sockaddr_in itself = address_of(host, port);
    if (rdma_resolve_addr(client, NULL, (struct sockaddr *)&itself, RESOLVE_MS)) die("rdma_resolve_addr");
    if (!expect_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED, EVENT_MS)) die("not resolved");
    if (port_of(client) != port) die("port %d has become %d", port, port_of(client));
    puts("ok");
    return 0;
}
