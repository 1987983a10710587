// A library of its own: speaks with the router as the drop-in does, without it. For tests of what a process can do that
// keeps to the messages and to nothing else.
//
// One connection, one PD, one CQ, one RC QP. Each call returns false, or what the router said, when it is refused.
#ifndef FREEFLOW_TEST_BY_HAND_H
#define FREEFLOW_TEST_BY_HAND_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Of the messages, and of what is in shared memory: who says another one is sent away.
enum { PROTOCOL_VERSION = 1, LAYOUT_VERSION = 4 };

// The router's answers, as far as tests look at them: variants of VerbsError, and `GOOD`.
enum answer { GOOD = -1, INVALID_ARGUMENT = 0, NO_MEMORY, BUSY, NOT_SUPPORTED, BAD_ADDRESS, NOT_PERMITTED, NOT_FOUND, GONE = 1000 };

struct by_hand {
    int sock;
    uint64_t context, pd, cq, qp;
    uint32_t qpn;
    uint8_t *rings; // of the QP: the header of the send queue
};

// Requests that a grant is for; places in the header of a send queue, and what stands in one of them.
enum { FOR_READS, FOR_WRITES, FOR_ATOMICS, GRANT_KINDS, GRANTS_REVOKED = 12, ENTERED = 152 };
#define INSIDE (1ull << 32)

struct granted {
    uint64_t address, length, offset, bytes;
    bool writable;
    int fd;
};

bool by_hand_open(struct by_hand *hand);
bool by_hand_create_qp(struct by_hand *hand);
bool by_hand_connect_qp(struct by_hand *hand, const union ibv_gid *peer, uint32_t qpn);
enum answer by_hand_destroy_qp(struct by_hand *hand);
enum answer by_hand_ask_grant(struct by_hand *hand, uint32_t rkey, uint64_t address, uint32_t length, unsigned access,
                              struct granted *granted);
// An owner's part. A segment's memfd; what the router shall know of it; a region; the command pipe.
enum answer by_hand_create_segment(struct by_hand *hand, uint64_t bytes, uint64_t *segment, int *fd);
enum answer by_hand_map_part(struct by_hand *hand, uint64_t segment, const void *address, uint64_t bytes);
enum answer by_hand_register(struct by_hand *hand, const void *address, uint64_t bytes, unsigned access, uint32_t *rkey);
enum answer by_hand_borrow(struct by_hand *hand, const void *address, uint64_t bytes, uint64_t *segment);
enum answer by_hand_open_commands(struct by_hand *hand, int *pipe);
enum answer by_hand_confirm(struct by_hand *hand, uint64_t segment);
#endif
