// A UCP program that compares every byte: tagged messages, streams, put, get and atomics, with memory from malloc at
// odd offsets that is freed and allocated again each round.
//
//   ucp ROUNDS SEED PORT [ADDRESS-OF-THE-SERVER]
//
// Both ends do the same at the same time, towards each other; a TCP connection carries addresses and keys, and keeps
// step.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include "die.h"

static int peer_socket, side; // 0 is the server
static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h endpoint;
static uint64_t random_state, bytes_checked;

static uint64_t mix(uint64_t value) {
    value += 0x9e3779b97f4a7c15;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
}

// The same on both sides.
static uint64_t common_random(void) {
    return mix(random_state++);
}

static uint8_t pattern(uint64_t stream, size_t index) {
    return mix(stream * 0x10001 + index / 8) >> (index % 8 * 8);
}

static void fill(uint8_t *to, uint64_t stream, size_t bytes) {
    for (size_t index = 0; index < bytes; index++)
        to[index] = pattern(stream, index);
}

static void check(const uint8_t *is, uint64_t stream, size_t from, size_t bytes, const char *what) {
    for (size_t index = 0; index < bytes; index++)
        if (is[index] != pattern(stream, from + index))
            die("WRONG on side %d: %s: byte %zu of %zu at %p is %02x, should be %02x", side, what, index, bytes,
                (const void *)is, is[index], pattern(stream, from + index));
    bytes_checked += bytes;
}

static void must(ucs_status_t status, const char *what) {
    if (status != UCS_OK)
        die("%s: %s", what, ucs_status_string(status));
}

// ---- the connection beside

static void connect_sockets(const char *address, int port) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    if (address) {
        inet_pton(AF_INET, address, &name.sin_addr);
        if (connect(fd, (void *)&name, sizeof name))
            die("connect to %s", address);
        peer_socket = fd;
    } else {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, (void *)&name, sizeof name) || listen(fd, 1) || (peer_socket = accept(fd, NULL, NULL)) < 0)
            die("listen on %d", port);
    }
    setsockopt(peer_socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

// Sends ours, receives theirs; the worker makes progress meanwhile, as the peer may wait for it.
static void swap_bytes(const void *ours, void *theirs, size_t bytes) {
    if (send(peer_socket, ours, bytes, MSG_NOSIGNAL) != (ssize_t)bytes)
        die("send");
    for (size_t have = 0; have < bytes;) {
        ssize_t got = recv(peer_socket, (char *)theirs + have, bytes - have, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN))
            die("the peer is gone");
        if (got > 0)
            have += got;
        else if (!ucp_worker_progress(worker))
            usleep(50);
    }
}

static void meet(void) {
    char ours = 1, theirs;
    swap_bytes(&ours, &theirs, 1);
}

// Swaps what has a length of its own.
static void *swap_blob(const void *ours, size_t bytes) {
    size_t their_bytes;
    swap_bytes(&bytes, &their_bytes, sizeof bytes);
    size_t most = bytes > their_bytes ? bytes : their_bytes;
    uint8_t *out = calloc(1, most), *in = calloc(1, most);
    memcpy(out, ours, bytes);
    swap_bytes(out, in, most);
    free(out);
    return in;
}

// ---- requests

static void wait_for(ucs_status_ptr_t request, const char *what) {
    if (UCS_PTR_IS_ERR(request))
        must(UCS_PTR_STATUS(request), what);
    if (!request)
        return;
    ucs_status_t status;
    while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS)
        ucp_worker_progress(worker);
    ucp_request_free(request);
    must(status, what);
}

static void flush(void) {
    ucp_request_param_t param = {0};
    wait_for(ucp_ep_flush_nbx(endpoint, &param), "flush");
}

#define MESSAGES 8
static const size_t SIZES[] = {1, 7, 63, 255, 1001, 4097, 8200, 9001, 65537, 100003, 300007, 1048579};

static size_t any_size(void) {
    return SIZES[common_random() % (sizeof SIZES / sizeof *SIZES)];
}

static void tagged(uint64_t stream) {
    uint8_t *in[MESSAGES], *out[MESSAGES];
    size_t bytes[MESSAGES], offset[MESSAGES];
    ucs_status_ptr_t requests[2 * MESSAGES];
    ucp_request_param_t param = {0};
    for (int number = 0; number < MESSAGES; number++) {
        bytes[number] = any_size(), offset[number] = 1 + common_random() % 63;
        out[number] = malloc(bytes[number] + 64), in[number] = calloc(1, bytes[number] + 64);
        fill(out[number] + offset[number], stream + 2 * number + side, bytes[number]);
        requests[number] =
            ucp_tag_send_nbx(endpoint, out[number] + offset[number], bytes[number], (stream << 8) + number, &param);
    }
    for (int number = MESSAGES - 1; number >= 0; number--)
        requests[MESSAGES + number] = ucp_tag_recv_nbx(worker, in[number] + offset[number], bytes[number],
                                                       (stream << 8) + number, UINT64_MAX, &param);
    for (int number = 0; number < 2 * MESSAGES; number++)
        wait_for(requests[number], "a tagged message");
    for (int number = 0; number < MESSAGES; number++) {
        check(in[number] + offset[number], stream + 2 * number + !side, 0, bytes[number], "a tagged message");
        for (size_t index = offset[number] + bytes[number]; index < bytes[number] + 64; index++)
            if (in[number][index])
                die("WRONG on side %d: a byte behind a tagged message", side);
        free(in[number]), free(out[number]);
    }
}

static void streamed(uint64_t stream) {
    size_t bytes = any_size(), offset = 1 + common_random() % 63, length;
    uint8_t *out = malloc(bytes + offset), *in = malloc(bytes + offset);
    ucp_request_param_t send = {0}, all = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_STREAM_RECV_FLAG_WAITALL};
    fill(out + offset, stream + side, bytes);
    ucs_status_ptr_t sending = ucp_stream_send_nbx(endpoint, out + offset, bytes, &send);
    wait_for(ucp_stream_recv_nbx(endpoint, in + offset, bytes, &length, &all), "a stream's receive");
    wait_for(sending, "a stream's send");
    check(in + offset, stream + !side, 0, bytes, "a stream");
    free(in), free(out);
}

struct exposed {
    uint64_t address, counter_address;
};

// Each puts into the first half of the other's memory, gets the second, and adds to its counter.
static void remote(uint64_t stream) {
    size_t bytes = 2 * any_size(), half = bytes / 2, offset = 16 + common_random() % 63;
    uint8_t *memory = malloc(bytes + offset + 16), *base = memory + offset;
    uint64_t *counter = (uint64_t *)(((uintptr_t)memory + 7) & ~7ul);
    fill(base, stream + side, bytes);
    *counter = 5;
    ucp_mem_map_params_t map = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                                .address = memory,
                                .length = bytes + offset};
    ucp_mem_h handle;
    void *packed, *their_packed;
    size_t packed_bytes;
    must(ucp_mem_map(context, &map, &handle), "ucp_mem_map");
    must(ucp_rkey_pack(context, handle, &packed, &packed_bytes), "ucp_rkey_pack");
    struct exposed ours = {(uintptr_t)base, (uintptr_t)counter}, theirs;
    swap_bytes(&ours, &theirs, sizeof ours);
    their_packed = swap_blob(packed, packed_bytes);
    ucp_rkey_h key;
    must(ucp_ep_rkey_unpack(endpoint, their_packed, &key), "ucp_ep_rkey_unpack");

    ucp_request_param_t param = {0};
    uint8_t *from = malloc(half + 5), *to = malloc(half + 3);
    fill(from + 5, stream + 2 + side, half);
    ucs_status_ptr_t put = ucp_put_nbx(endpoint, from + 5, half, theirs.address, key, &param);
    wait_for(ucp_get_nbx(endpoint, to + 3, half, theirs.address + half, key, &param), "a get");
    wait_for(put, "a put");
    check(to + 3, stream + !side, half, half, "a get");
    for (uint64_t number = 0; number < 10; number++) {
        uint64_t one = 1, found = 0;
        ucp_request_param_t fetch = {
            .op_attr_mask = UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_REPLY_BUFFER | UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
            .datatype = ucp_dt_make_contig(8),
            .reply_buffer = &found};
        wait_for(ucp_atomic_op_nbx(endpoint, UCP_ATOMIC_OP_ADD, &one, 1, theirs.counter_address, key, &fetch), "an add");
        if (found != 5 + number)
            die("WRONG on side %d: an add found %llu, should be %llu", side, (long long)found, (long long)(5 + number));
    }
    flush();
    meet();
    check(base, stream + 2 + !side, 0, half, "what was put");
    check(base + half, stream + side, half, half, "what was not put to");
    if (*counter != 15)
        die("WRONG on side %d: the counter is %llu", side, (unsigned long long)*counter);
    ucp_rkey_destroy(key);
    ucp_rkey_buffer_release(packed);
    must(ucp_mem_unmap(context, handle), "ucp_mem_unmap");
    meet(); // the other's key is gone too
    free(memory), free(their_packed), free(from), free(to);
}

static void begin(void) {
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_TAG | UCP_FEATURE_STREAM | UCP_FEATURE_RMA | UCP_FEATURE_AMO64};
    ucp_worker_params_t worker_params = {0};
    ucp_address_t *address;
    size_t bytes;
    must(ucp_init(&params, NULL, &context), "ucp_init");
    must(ucp_worker_create(context, &worker_params, &worker), "ucp_worker_create");
    must(ucp_worker_get_address(worker, &address, &bytes), "ucp_worker_get_address");
    ucp_ep_params_t endpoint_params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
                                       .address = swap_blob(address, bytes)};
    must(ucp_ep_create(worker, &endpoint_params, &endpoint), "ucp_ep_create");
    free((void *)endpoint_params.address);
    ucp_worker_release_address(worker, address);
    meet();
}

static void end(void) {
    ucp_request_param_t param = {0};
    flush();
    meet();
    wait_for(ucp_ep_close_nbx(endpoint, &param), "ucp_ep_close");
    meet();
    ucp_worker_destroy(worker);
    ucp_cleanup(context);
}

int main(int argc, char **argv) {
    if (argc < 4)
        die("usage: ucp ROUNDS SEED PORT [ADDRESS]");
    side = argc > 4;
    random_state = strtoull(argv[2], NULL, 10) << 20;
    connect_sockets(side ? argv[4] : NULL, atoi(argv[3]));
    begin();
    for (int round = 0; round < atoi(argv[1]); round++) {
        tagged(10000 + round * 100);
        streamed(10040 + round * 100);
        remote(10050 + round * 100);
    }
    end();
    printf("right: %llu bytes\n", (unsigned long long)bytes_checked);
    return 0;
}
