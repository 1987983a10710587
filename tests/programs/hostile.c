// A library that is an enemy of its router.
//
//   hostile messages SEED SECONDS    nonsense on the control socket
//   hostile cm SEED SECONDS          requests of connection management, most of which mean something
//   hostile rings SEED SECONDS       nonsense in its own rings, while the router works on them
//
// Exit 0 means that the time is over; what matters is how the router and the others fare meanwhile.
#define _GNU_SOURCE
#include "by_hand.h"
#include "harness.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t random_state;

static uint64_t dice(uint64_t sides) { return random_next(&random_state) % sides; }

// ---- the control socket

enum { MESSAGE_BYTES = 70000, CONNECTIONS = 24, FDS = 30 };

static int connect_router(void) {
    int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/run/freeflow/router.sock"};
    if (!connect(sock, (struct sockaddr *)&address, sizeof address)) return sock;
    close(sock);
    return -1;
}

// The messages are postcard: numbers are LEB128, an enum is its variant's number, then its fields.
static size_t number(uint8_t *at, uint64_t value) {
    size_t n = 0;
    for (; value >= 128; value >>= 7) at[n++] = (uint8_t)(value | 128);
    at[n++] = (uint8_t)value;
    return n;
}

static size_t hello(uint8_t *at) {
    // As in by_hand.c.
    const uint64_t fields[] = {0, PROTOCOL_VERSION, PROTOCOL_VERSION, 0, 0, LAYOUT_VERSION, LAYOUT_VERSION, 7};
    size_t n = 0;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) n += number(at + n, fields[i]);
    memcpy(at + n, "hostile", 7);
    return n + 7;
}

static uint64_t plausible(void) {
    switch (dice(6)) {
    case 0: return dice(3);
    case 1: return dice(64);
    case 2: return (uint64_t)(uintptr_t)&random_state + dice(65536);
    case 3: return ~dice(3);
    case 4: return 1ull << dice(64);
    default: return random_next(&random_state);
    }
}

static size_t message(uint8_t *at) {
    size_t n = 0;
    if (dice(4) == 0) { // any bytes of any length, the longest allowed one and more included
        n = dice(8) ? dice(200) : 65530 + dice(12);
        for (size_t i = 0; i < n; i++) at[i] = (uint8_t)random_next(&random_state);
        return n;
    }
    n = number(at, dice(53)); // a request, known or not, with fields that may fit
    for (uint64_t fields = dice(28); fields > 0; fields--) n += number(at + n, plausible());
    if (dice(8) == 0) n = dice(n + 1);
    return n;
}

static void send_message(int sock, const uint8_t *bytes, size_t length) {
    struct iovec iov = {(void *)bytes, length};
    struct msghdr header = {.msg_iov = &iov, .msg_iovlen = 1};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(FDS * sizeof(int))];
    } control;
    int fds[FDS];
    unsigned count = dice(6) ? 0 : (unsigned)(1 + dice(FDS));
    int carried = dice(2) ? open("/dev/zero", O_RDWR | O_CLOEXEC) : dup(sock);
    for (unsigned i = 0; i < count; i++) fds[i] = carried;
    if (count) {
        memset(&control, 0, sizeof control);
        header.msg_control = &control;
        header.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *cmsg = CMSG_FIRSTHDR(&header);
        *cmsg = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(count * sizeof(int))};
        memcpy(CMSG_DATA(cmsg), fds, count * sizeof(int));
    }
    sendmsg(sock, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(carried);
}

static void close_received(const struct msghdr *header) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR((struct msghdr *)header, c)) {
        int fds[FDS];
        size_t bytes = c->cmsg_len - CMSG_LEN(0);
        if (c->cmsg_type != SCM_RIGHTS || bytes > sizeof fds) continue;
        memcpy(fds, CMSG_DATA(c), bytes);
        for (size_t i = 0; i < bytes / sizeof(int); i++) close(fds[i]);
    }
}

// ---- connection management

enum { CM_REQUEST = 49, CM_REPLY = 20, CM_KINDS = 20, CM_HANDLES = 16, CM_PORTS = 6, QP_TYPES = 6 };
// The objects that the router made for the enemy, of whichever connection: it may guess.
static uint64_t channels[CM_HANDLES], ids[CM_HANDLES];
static struct in_addr own_address;

static struct in_addr vnic_address(void) {
    struct ifaddrs *all = NULL;
    struct in_addr found = {0};
    if (getifaddrs(&all)) return found;
    for (struct ifaddrs *one = all; one; one = one->ifa_next)
        if (one->ifa_addr && one->ifa_addr->sa_family == AF_INET && strcmp(one->ifa_name, "lo"))
            found = ((struct sockaddr_in *)one->ifa_addr)->sin_addr;
    freeifaddrs(all);
    return found;
}

static void learn_handle(const uint8_t *reply, ssize_t bytes) {
    if (bytes < 3 || reply[0] != CM_REPLY || reply[1] > 1) return;
    uint64_t handle = 0;
    for (ssize_t i = 2, shift = 0; i < bytes && shift < 64; i++, shift += 7) {
        handle |= (uint64_t)(reply[i] & 127) << shift;
        if (reply[i] < 128) break;
    }
    (reply[1] ? ids : channels)[dice(CM_HANDLES)] = handle;
}

static size_t handle(uint8_t *at, const uint64_t *known) { return number(at, dice(16) ? known[dice(CM_HANDLES)] : plausible()); }

static size_t bytes_of(uint8_t *at, size_t count) {
    size_t n = number(at, count);
    for (size_t i = 0; i < count; i++) at[n++] = (uint8_t)random_next(&random_state);
    return n;
}

// A GID and a port: the wildcard's, its own, a neighbour's, anybody's.
static size_t cm_address(uint8_t *at) {
    memset(at, 0, 16);
    if (dice(8)) {
        at[10] = at[11] = 0xff;
        if (dice(4)) memcpy(at + 12, &own_address, 4), at[15] = dice(2) ? at[15] : (uint8_t)dice(12);
    } else {
        for (int i = 0; i < 16; i++) at[i] = (uint8_t)random_next(&random_state);
    }
    return 16 + number(at + 16, dice(4) ? 7471 + dice(CM_PORTS) : dice(70000));
}

static size_t cm_parameters(uint8_t *at) {
    size_t n = bytes_of(at, dice(8) ? dice(60) : dice(400));
    at[n++] = (uint8_t)dice(20), at[n++] = (uint8_t)dice(20); // resources, depth
    at[n++] = (uint8_t)dice(2);
    at[n++] = (uint8_t)dice(9), at[n++] = (uint8_t)dice(9);
    at[n++] = (uint8_t)dice(2);
    n += number(at + n, dice(2) ? dice(4096) : plausible() & 0xffffffff); // QPN
    n += number(at + n, dice(2) ? 0 : plausible() & 0xffffffff);          // Q_Key
    n += number(at + n, dice(2));
    return n + number(at + n, dice(2));
}

// In the order of `CmRequest`.
static size_t cm_message(uint8_t *at) {
    unsigned kind = (unsigned)dice(CM_KINDS);
    size_t n = number(at, CM_REQUEST);
    n += number(at + n, kind);
    if (kind == 0) return n;
    n += handle(at + n, kind <= 2 || kind == 5 ? channels : ids);
    switch (kind) {
    case 2: // CreateId
        n += number(at + n, dice(5));
        n += number(at + n, dice(QP_TYPES));
        return n + number(at + n, plausible());
    case 4: return n + handle(at + n, channels); // MigrateId
    case 5: {                                    // Repost
        uint64_t records = dice(8) ? dice(4) : dice(300);
        n += number(at + n, records);
        for (; records > 0; records--) n += bytes_of(at + n, dice(8) ? dice(100) : dice(200) + 900);
        return n;
    }
    case 6: return n + cm_address(at + n); // Bind
    case 7:                                // ResolveAddress
        at[n++] = (uint8_t)dice(2);
        if (at[n - 1]) n += cm_address(at + n);
        n += cm_address(at + n);
        return n + number(at + n, dice(3000));
    case 8: case 9: return n + number(at + n, dice(2) ? dice(3000) : plausible() & 0xffffffff); // ResolveRoute, Listen
    case 10: return n + cm_parameters(at + n);                                                  // Connect
    case 11: n += number(at + n, plausible()); return n + cm_parameters(at + n);                // Accept
    case 12: n += bytes_of(at + n, dice(300)); at[n++] = (uint8_t)dice(2); return n;            // Reject
    case 16: return n + number(at + n, dice(8));                                                // InitQpAttributes
    case 17: case 18:                                                                           // multicast
        memset(at + n, 0, 16), at[n] = 0xff, at[n + 1] = 0x0e, at[n + 15] = (uint8_t)dice(8), n += 16;
        if (kind == 17) at[n++] = (uint8_t)dice(2), n += number(at + n, plausible());
        return n;
    case 19: n += number(at + n, dice(5)); at[n++] = (uint8_t)dice(40); return n; // SetOption
    default: return n;
    }
}

// False when the router has hung up.
static bool take_replies(int sock) {
    static uint8_t reply[MESSAGE_BYTES];
    char control[512];
    for (;;) {
        struct iovec iov = {reply, sizeof reply};
        struct msghdr header = {
            .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        ssize_t n = recvmsg(sock, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (n < 0) return errno == EAGAIN;
        if (n == 0) return false;
        learn_handle(reply, n);
        close_received(&header);
    }
}

static int fuzz_messages(uint64_t end, size_t (*make)(uint8_t *)) {
    static uint8_t bytes[MESSAGE_BYTES];
    int socks[CONNECTIONS];
    bool deaf[CONNECTIONS]; // never reads: its replies pile up
    unsigned long sent = 0, refused = 0, opened = 0;
    memset(socks, -1, sizeof socks);
    while (now_ns() < end) {
        unsigned i = (unsigned)dice(CONNECTIONS);
        if (socks[i] < 0) {
            if ((socks[i] = connect_router()) < 0) {
                refused++;
                usleep(1000);
                continue;
            }
            opened++;
            deaf[i] = dice(8) == 0;
            if (dice(8)) send_message(socks[i], bytes, hello(bytes));
        }
        for (uint64_t burst = 1 + dice(20); burst > 0; burst--, sent++) send_message(socks[i], bytes, (dice(50) ? make : message)(bytes));
        bool open = deaf[i] || take_replies(socks[i]);
        if (dice(60) == 0) shutdown(socks[i], dice(2) ? SHUT_WR : SHUT_RD);
        if (!open || dice(40) == 0) {
            close(socks[i]);
            socks[i] = -1;
        }
    }
    printf("%lu connections, %lu messages, %lu refused\n", opened, sent, refused);
    return 0;
}

// ---- the rings

enum { AREAS = 64, VICTIM_MS = 80, QUEUE_SLOTS = 64, QUEUE_HEAD_LINES = 4 };
static struct area {
    uint8_t *start;
    size_t bytes;
} areas[AREAS];
static unsigned area_count;

// Only what may be right: a router that hangs up on the first nonsense would never meet the finer kind.
static bool subtle;

static void find_areas(void) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[600];
    area_count = 0;
    while (maps && fgets(line, sizeof line, maps) && area_count < AREAS) {
        uint64_t start, end;
        char rights[5];
        if (!strstr(line, "/memfd:") || sscanf(line, "%lx-%lx %4s", &start, &end, rights) != 3) continue;
        if (strcmp(rights, "rw-s")) continue;
        areas[area_count++] = (struct area){(uint8_t *)(uintptr_t)start, end - start};
    }
    if (maps) fclose(maps);
}

// Tries to cut or punch the segments, and wakes the router by every eventfd there is.
static void abuse_descriptors(void) {
    DIR *dir = opendir("/proc/self/fd");
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        char path[300], target[300];
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        ssize_t n = readlink(path, target, sizeof target - 1);
        int fd = atoi(entry->d_name);
        if (n <= 0 || fd <= 2) continue;
        target[n] = 0;
        if (strstr(target, "/memfd:")) {
            if (!ftruncate(fd, 0)) fprintf(stderr, "  a segment could be cut short\n");
            if (dice(4) == 0) fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096);
        } else if (strstr(target, "eventfd")) {
            uint64_t many = 1 + dice(1000);
            if (write(fd, &many, sizeof many) < 0) continue;
        }
    }
    if (dir) closedir(dir);
}

// A slot of 64 bytes that looks like a request: right number, then a mixture of sense and nonsense.
static void forge_slot(uint8_t *slot, const struct endpoint *e, uint32_t sequence) {
    uint8_t bytes[64];
    for (unsigned i = 0; i < 64; i++) bytes[i] = (uint8_t)random_next(&random_state);
    if (subtle || dice(2)) bytes[8] = (uint8_t)dice(subtle ? 7 : 16);                           // operation
    if (subtle || dice(2)) bytes[9] = (uint8_t)dice(subtle ? 8 : 32);                           // flags
    if (subtle || dice(2)) bytes[10] = (uint8_t)dice(subtle ? e->options.send_sge + 1 : 34);    // entries
    if (subtle) bytes[11] = 0;
    uint64_t remote = e->mine.memory + dice(2 * e->bytes), local = e->mine.memory + dice(2 * e->bytes);
    uint32_t length = (uint32_t)(dice(4) ? dice(2 * e->bytes) : plausible());
    if (dice(4)) memcpy(bytes + 16, &remote, 8);
    if (dice(4)) memcpy(bytes + 24, &e->mr->rkey, 4);
    if (dice(4)) memcpy(bytes + 48, &local, 8);
    if (dice(4)) memcpy(bytes + 56, &length, 4);
    if (dice(4)) memcpy(bytes + 60, &e->mr->lkey, 4);
    memcpy(slot, bytes, 12);
    memcpy(slot + 16, bytes + 16, 48);
    __atomic_store_n((uint32_t *)(slot + 12), sequence, __ATOMIC_RELEASE);
}

static void scribble(const struct endpoint *e) {
    struct area *area = &areas[dice(area_count)];
    uint8_t *line = area->start + dice(area->bytes / 64) * 64;
    switch (subtle ? 2 + dice(4) : dice(6)) {
    case 0: // any word
        __atomic_store_n((uint32_t *)(line + dice(16) * 4), (uint32_t)plausible(), __ATOMIC_RELAXED);
        break;
    case 1: // one bit
        __atomic_fetch_xor((uint32_t *)(line + dice(16) * 4), 1u << dice(32), __ATOMIC_RELAXED);
        break;
    case 2: // doorbells, and the words that say that some rang
        __atomic_store_n((uint64_t *)(area->start + dice(16) * 64), ~0ull, __ATOMIC_SEQ_CST);
        if (area->bytes > 8192) __atomic_store_n((uint64_t *)(area->start + 4096 + dice(4) * 8), ~0ull, __ATOMIC_SEQ_CST);
        break;
    default: // requests with the numbers that the router expects: a head of four lines, then the slots
        for (uint32_t i = 0, first = (uint32_t)dice(QUEUE_SLOTS), lap = (uint32_t)dice(4); i < 16; i++) {
            uint32_t position = first + i + lap * QUEUE_SLOTS;
            uint8_t *slot = area->start + (QUEUE_HEAD_LINES + position % QUEUE_SLOTS) * 64;
            if (slot + 64 <= area->start + area->bytes) forge_slot(slot, e, position + 1);
        }
    }
}

// Connects two queue pairs with each other, and then never uses the library again.
static int one_vandal(uint64_t seed) {
    random_state = seed;
    subtle = dice(2);
    struct endpoint e[2] = {0};
    struct options options = {.send_sge = dice(2) ? 30 : 1, .recv_sge = dice(2) ? 30 : 1, .srq = dice(3) == 0};
    options.type = dice(3) == 0 ? IBV_QPT_UD : dice(3) == 0 ? IBV_QPT_UC : IBV_QPT_RC;
    options.shared_memory = dice(2);
    for (int i = 0; i < 2; i++)
        if (!endpoint_open(&e[i], &options)) return 1;
    for (int i = 0; i < 2; i++) e[i].peer = e[1 - i].mine;
    for (int i = 0; i < 2; i++)
        if (!endpoint_to_init(&e[i]) || !endpoint_to_rtr(&e[i]) || !endpoint_to_rts(&e[i])) return 1;
    for (int i = 0; i < 20; i++) post_recv(&e[1], (uint64_t)i, 0, 4096);
    for (int i = 0; i < 20; i++) post_send(&e[0], (uint64_t)i, 0, 512, 0);
    find_areas();
    if (!area_count) {
        fprintf(stderr, "  no shared ring was found\n");
        return 3;
    }
    uint64_t end = now_ns() + VICTIM_MS * 1000000ull;
    for (unsigned i = 0; now_ns() < end; i++) {
        for (int j = 0; j < 200; j++) scribble(&e[i % 2]);
        usleep(50); // where cores are few, the router must get its turn
        if (i % 4 == 0) abuse_descriptors();
    }
    return 0; // leaves everything behind
}

static int spoil_rings(uint64_t end) {
    unsigned long done = 0, blind = 0, refused = 0;
    while (now_ns() < end) {
        uint64_t seed = random_next(&random_state);
        pid_t pid = fork();
        if (pid == 0) {
            alarm(5);
            _exit(one_vandal(seed));
        }
        int status;
        waitpid(pid, &status, 0);
        done++;
        blind += WIFEXITED(status) && WEXITSTATUS(status) == 3;
        refused += WIFEXITED(status) && WEXITSTATUS(status) == 1;
    }
    printf("%lu processes scribbled, %lu were refused a queue pair\n", done - refused, refused);
    return blind != 0 || done == refused;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    random_state = strtoull(argv[2], NULL, 0);
    signal(SIGPIPE, SIG_IGN);
    uint64_t end = now_ns() + strtoull(argv[3], NULL, 0) * 1000000000u;
    if (!strcmp(argv[1], "messages")) return fuzz_messages(end, message);
    if (!strcmp(argv[1], "cm")) {
        own_address = vnic_address();
        return fuzz_messages(end, cm_message);
    }
    if (!strcmp(argv[1], "rings")) return spoil_rings(end);
    return 2;
}
