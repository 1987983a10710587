// Common parts of the C test programs: two sides that agree over a socket, an endpoint (one QP and
// what it needs), checks.
//
// A *side* is one half of a test: role A begins, role B answers. Both run in one process (loopback), or each in its own
// container. They keep step by `meet`, which every side must reach; a side that fails closes its socket, so that the
// other one does not wait.
#ifndef FREEFLOW_TEST_HARNESS_H
#define FREEFLOW_TEST_HARNESS_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum role { ROLE_A, ROLE_B };

struct side {
    enum role role;
    int sock;
    const char *test; // name of the case that runs
    bool failed;
};

enum { IPV6_GID_INDEX = 2 };

// Address of one endpoint, for the other.
struct address {
    uint32_t qpn, psn, rkey, qkey;
    uint64_t memory, bytes;
    union ibv_gid gid;
};

struct options {
    enum ibv_qp_type type;      // 0: RC
    uint32_t send_wr, recv_wr;  // 0: 64
    uint32_t send_sge, recv_sge; // 0: 1
    uint32_t inline_bytes;
    int cqe;                    // 0: 256
    bool events;                // a completion channel for both CQs
    bool srq;
    bool unsignaled;            // sq_sig_all = 0
    uint8_t timeout, retry, rnr_retry, rnr_timer; // 0: 14, 7, 7, 1; NEVER: really 0
    int mr_access;              // 0: everything; NEVER_ACCESS: local write only
    int qp_access;              // likewise
    size_t bytes;               // of the buffer; 0: 64 KiB
    void *memory;               // use this as the buffer
    bool shared_memory;         // take the buffer from FreeFlow's ibv_malloc
};
#define NEVER 0xff
#define NEVER_ACCESS (1 << 30)

struct endpoint {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp *qp;
    struct ibv_ah *ah;
    struct ibv_mr *mr;
    uint8_t *memory;
    size_t bytes;
    bool owns_memory, shared_memory;
    uint32_t unacked_events;
    struct options options;
    struct address mine, peer;
};

#define QKEY 0x11111111u
#define GRH_BYTES 40

uint64_t now_ns(void);
void sleep_ms(unsigned ms);

// Checks. `need` leaves the case at the first failure.
void fail(struct side *side, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
#define need(side, condition)                                                                                         \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fail(side, __FILE__, __LINE__, "%s", #condition);                                                          \
            return;                                                                                                    \
        }                                                                                                              \
    } while (0)
#define need_status(side, wc, wanted)                                                                                  \
    do {                                                                                                               \
        if ((wc).status != (wanted)) {                                                                                 \
            fail(side, __FILE__, __LINE__, "wanted status %s, got %s (wr_id %lu)", ibv_wc_status_str(wanted),          \
                 ibv_wc_status_str((wc).status), (unsigned long)(wc).wr_id);                                           \
            return;                                                                                                    \
        }                                                                                                              \
    } while (0)

// Sockets. All of them give up after 20 seconds.
int socket_listen(int port);
int socket_accept(int listener);
int socket_connect(const char *host, int port);
bool socket_swap(int sock, const void *mine, void *theirs, size_t bytes);
bool meet(struct side *side);

// Endpoints. Each step returns false and says why on stderr.
struct ibv_context *open_first_device(void);
bool endpoint_open(struct endpoint *e, const struct options *options);
bool endpoint_to_init(struct endpoint *e);
bool endpoint_to_rtr(struct endpoint *e);
bool endpoint_to_rts(struct endpoint *e);
bool endpoint_connect(struct side *side, struct endpoint *e); // all of the above, then `meet`
int gid_index(void);                  // by which they speak: FREEFLOW_TEST_GID_INDEX, else 0
union ibv_gid gid_of(const char *ip); // of an address, IPv4 or IPv6; ends the program if it is none
bool endpoint_close(struct endpoint *e);                      // false if something could not be destroyed
enum ibv_qp_state qp_state(struct ibv_qp *qp);
bool qp_modify_state(struct ibv_qp *qp, enum ibv_qp_state state);

// Work. Offsets are into the buffer; `remote` too. 0 is success, else errno.
int post_recv(struct endpoint *e, uint64_t wr_id, size_t offset, uint32_t length);
int post_recv_key(struct endpoint *e, uint64_t wr_id, size_t offset, uint32_t length, uint32_t lkey);
int post_send(struct endpoint *e, uint64_t wr_id, size_t offset, uint32_t length, unsigned flags);
int post_remote(struct endpoint *e, enum ibv_wr_opcode opcode, uint64_t wr_id, size_t offset, uint32_t length,
                uint64_t remote, unsigned flags);
int post_work(struct endpoint *e, struct ibv_send_wr *wr); // fills in the UD address

// Takes one completion, within so many milliseconds.
bool poll_one(struct ibv_cq *cq, struct ibv_wc *wc, unsigned ms);
// The next asynchronous event of a kind, acknowledged; others are acknowledged and dropped.
bool wait_async(struct ibv_context *context, enum ibv_event_type kind, unsigned ms);
bool fd_readable(int fd, unsigned ms);

// Bytes that say where they belong.
void fill(void *memory, size_t bytes, uint64_t seed);
bool holds(const void *memory, size_t bytes, uint64_t seed);

uint64_t random_next(uint64_t *state); // splitmix64
#endif
