// The differential suite: scenarios whose trace is the same on every device that follows the standard.
//
// A scenario is a function that uses verbs and says what happened: every return code, errno, completion, event and a
// digest of the memory. What two devices may do differently is not said: numbers of queue pairs, keys, addresses and
// handles have names instead, sizes that a device rounds up are compared with what was asked, and time does not appear.
// Each scenario runs in a process of its own and is ended after a while; its trace then says so.
#ifndef FREEFLOW_DIFFERENTIAL_TRACE_H
#define FREEFLOW_DIFFERENTIAL_TRACE_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// ---- scenarios

typedef void (*scenario_function)(long argument);
void add(scenario_function run, long argument, const char *format, ...) __attribute__((format(printf, 3, 4)));
// The same for one that Linux 6.1 does not survive: with --spare-the-kernel it says so and does nothing.
void add_dangerous(scenario_function run, long argument, const char *format, ...) __attribute__((format(printf, 3, 4)));
void add_attributes(void);
void add_cq(void);
void add_data(void);
void add_errors(void);
void add_extended(void);
void add_flow(void);
void add_keys(void);
void add_objects(void);
void add_posting(void);
void add_srq(void);
void add_states(void);
void add_ud(void);
void add_windows(void);

// ---- the trace

void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
// Result of a call: `0` or the name of an errno, also where the call returns -1 and sets errno.
const char *result(int rc);
// The same for a call that gives a pointer; errno counts.
const char *pointer_result(const void *pointer);
// Ends the scenario: something that it needs did not work.
void give_up(const char *what) __attribute__((noreturn));
// Ends the scenario: the device lacks something.
void not_offered(const char *what) __attribute__((noreturn));

const char *opcode_name(enum ibv_wr_opcode opcode);
const char *state_name(enum ibv_qp_state state);
const char *type_name(enum ibv_qp_type type);
const char *status_name(enum ibv_wc_status status);
const char *wc_opcode_name(enum ibv_wc_opcode opcode);

// ---- the device

struct device {
    struct ibv_context *context;
    struct ibv_device_attr attr;
    int gid_index; // of an address of IPv4
    union ibv_gid gid;
};
extern struct device device;
// The device of ends B: on another host, where the environment names that one's socket in
// DIFFERENTIAL_PEER, else `device`.
extern struct device *peer_device;
void device_open(void);

// ---- two ends, on one device or on those of two hosts

#define NONE (-1) // where 0 stands for the default
#define QKEY 0x11111111u
#define GRH_BYTES 40
#define BUFFER_BYTES 65536
#define ALL_ACCESS \
    (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

struct options {
    enum ibv_qp_type type;                                // 0: RC
    int send_wr, recv_wr, send_sge, recv_sge, inline_bytes; // 0: 16, 16, 2, 2, 0
    int cqe;                                              // 0: 64
    bool channel;                                         // completion channels
    bool srq;                                             // end B receives from an SRQ of recv_wr requests
    bool all_signaled;                                    // sq_sig_all
    bool unconnected;                                     // the queue pairs stay in RESET
    int timeout, retry, rnr_retry, rnr_timer;             // 0: 18, 7, 7, 1
    int rd_atomic, dest_rd_atomic;                        // 0: 4
    int mr_access, qp_access;                             // 0: everything
    size_t bytes;                                         // of each buffer; 0: BUFFER_BYTES
};

struct end {
    const char *name;
    struct device *device;
    struct options options;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    struct ibv_ah *ah; // of UD: to the peer
    uint8_t *memory;
    size_t bytes;
    struct end *peer;
};

struct pair {
    struct end a, b;
};

void pair_open(struct pair *pair, const struct options *options);
void end_open(struct end *end, const char *name, const struct options *options);
void end_connect(struct end *end); // to its peer, from RESET to RTS
void pair_again(struct pair *pair); // both through RESET to RTS
struct ibv_cq *cq_open(int entries, struct ibv_comp_channel *channel);
uint8_t *memory_take(size_t bytes);
struct ibv_mr *mr_open(struct ibv_pd *pd, void *memory, size_t bytes, int access);
void name_qp(uint32_t number, enum ibv_qp_type type, const char *name); // for traces
const char *qp_name(uint32_t number);

// ---- states

// Every field has a value that is right for a connection to queue pair `peer` of this device.
void attr_fill(struct ibv_qp_attr *attr, const struct options *options, enum ibv_qp_type type, uint32_t peer);
struct ibv_ah_attr address_of_device(void); // as ends A on the same host write it
struct ibv_ah_attr address_of_peer(void);   // of ends B, as ends A write it
struct ibv_ah_attr path_of(const struct end *end);
// Attributes that a transition from RESET to INIT, INIT to RTR or RTR to RTS must name;
// IBV_QP_STATE alone for others.
int required_mask(enum ibv_qp_type type, enum ibv_qp_state to);
int modify(struct ibv_qp *qp, enum ibv_qp_state to); // with no more than IBV_QP_STATE
void say_modify(struct end *end, enum ibv_qp_state to);
// Takes the queue pair from RESET to the state; false if the device does not get there.
bool reach(struct end *end, enum ibv_qp_state state);
const char *queried_state(struct ibv_qp *qp);
void say_states(struct pair *pair);
// Until the queue pair is in the state by itself (an error, a drained queue).
void wait_for_state(struct end *end, enum ibv_qp_state state);

// ---- work

#define UNSIGNALED (1u << 30)
#define ZERO_LENGTH UINT32_MAX

struct op {
    uint64_t id;
    enum ibv_wr_opcode code; // RDMA_WRITE is 0
    size_t at, to;           // offsets in the end's own buffer, in the peer's
    uint32_t len;            // ZERO_LENGTH: no scatter-gather element at all
    unsigned flags;          // IBV_SEND_SIGNALED is added unless UNSIGNALED
    uint32_t lkey, rkey;     // 0: of the end's region, of the peer's
    uint64_t remote;         // 0: the peer's buffer plus `to`
    uint32_t imm;            // immediate data, or the key to invalidate
    uint64_t compare, swap;  // or the number to add, in `compare`
    uint32_t qpn, qkey;      // of UD; 0: the peer's, QKEY
    struct ibv_ah *ah;       // of UD; NULL: the end's
};
int post_quietly(struct end *end, const struct op *op);
void post(struct end *end, const struct op *op); // and says what it gave
int receive_quietly(struct end *end, uint64_t id, size_t at, uint32_t len, uint32_t lkey);
void receive(struct end *end, uint64_t id, size_t at, uint32_t len);
void receive_key(struct end *end, uint64_t id, size_t at, uint32_t len, uint32_t lkey);

// ---- what happens

// Says the next `count` completions of the end's queue, or that one did not come.
void sent(struct end *end, int count);
void let_it_come(void);
void received(struct end *end, int count);
void say_completion(const char *where, const struct ibv_wc *wc);
int take(struct ibv_cq *cq, struct ibv_wc *wc); // waits; 1 or 0
// Says that the queues are empty, or what is in them. Call it only when nothing can be under way.
void say_empty(struct pair *pair);
// Says the next `count` asynchronous events in the order of their kinds, acknowledged.
void events(int count);
void no_events(void);
bool readable(int fd, int ms);
void memory_fill(uint8_t *memory, size_t bytes, uint32_t seed);
void say_memory(const char *what, const uint8_t *memory, size_t bytes);
uint64_t now_ms(void);
extern int wait_ms; // how long to wait for what should come

#endif
