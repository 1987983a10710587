// Common parts of tests/programs/cm*.c: one identifier, one event channel with a time limit.
#ifndef FREEFLOW_TEST_CM_H
#define FREEFLOW_TEST_CM_H

#include "die.h"

#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    EVENT_MS = 15000,          // nothing takes longer, whatever dies
    RESOLVE_MS = 2000,
    PRIVATE_REQ = 56,          // what of each message's private data is the user's: RDMA_PS_TCP
    PRIVATE_REP = 196,
    PRIVATE_REJ = 148,
};

struct sockaddr_in address_of(const char *host, int port);

// The next event, or NULL when the time is over.
struct rdma_cm_event *next_event(struct rdma_event_channel *channel, int ms);
// Takes and acknowledges the next event, which must be this one; false, with a line on stderr, if it is not.
bool expect_event(struct rdma_event_channel *channel, enum rdma_cm_event_type kind, int ms);

// An identifier with its address and route resolved, and a QP; NULL, with a line on stderr, if that fails.
struct rdma_cm_id *resolved_id(struct rdma_event_channel *channel, const char *host, int port, void *context);
bool create_qp(struct rdma_cm_id *id);
void destroy_id(struct rdma_cm_id *id); // and its QP
struct rdma_cm_id *listener_at(struct rdma_event_channel *channel, int port, int backlog);
struct rdma_conn_param parameters(const void *private_data, unsigned bytes);
#endif
