// Connections by rdma_cm in large numbers and with ends that die. tests/cm/test_cm_faults.py says which programs go
// together.
//
//   cm serve PORT                       accepts whatever comes, until SIGTERM; then says what it saw
//   cm hold PORT                        listens and never reads an event
//   cm cycle SERVER PORT COUNT          connects and closes so often
//   cm crowd SERVER PORT COUNT          so many requests at once; says which events came, when all have one
//   cm victims SERVER PORT COUNT SEED   children that connect and are killed at random, or come to an end in time
//   cm restart PORT SEED SECONDS        `serve` in a child that is killed at random and begun again
//   cm wait SERVER PORT                 connected, asleep for an event; says which came (the router's death)
//   cm wait-listening PORT              the same of a listener
//   cm unread SERVER PORT SECONDS       identifiers with events that nobody reads
//   cm data-server PORT, cm data SERVER PORT   private data of every length, also too long
//   cm nobody SERVER PORT               errors: nobody listens, no such address
#define _GNU_SOURCE
#include "cm.h"
#include "harness.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BACKLOG = 1024, CROWD_MAX = 1000, CHILD_SECONDS = 25, EVENT_KINDS = 20, HUNG = 3, DATA_ROUNDS = 3, NOBODYS_HOST = 199 };

static volatile sig_atomic_t is_over;
static void on_signal(int number) {
    (void)number;
    is_over = 1;
}

static void end_on_sigterm(void) {
    struct sigaction action = {.sa_handler = on_signal}; // without SA_RESTART: poll returns
    sigaction(SIGTERM, &action, NULL);
}

// ---- servers

struct seen {
    unsigned long requests, established, disconnected, failed;
    long open;
};

// A connection's context: not NULL once it is established.
static char is_open;

static void serve_event(struct rdma_cm_event *event, struct seen *seen) {
    struct rdma_cm_id *id = event->id;
    enum rdma_cm_event_type kind = event->event;
    if (kind == RDMA_CM_EVENT_CONNECT_REQUEST) {
        rdma_ack_cm_event(event);
        seen->requests++;
        id->context = NULL;
        struct rdma_conn_param accepted = parameters(NULL, 0);
        // The other end may have gone meanwhile.
        if (create_qp(id) && !rdma_accept(id, &accepted)) return;
        seen->failed++;
        destroy_id(id);
        return;
    }
    rdma_ack_cm_event(event);
    switch (kind) {
    case RDMA_CM_EVENT_ESTABLISHED:
        seen->established++, seen->open++;
        id->context = &is_open;
        return;
    case RDMA_CM_EVENT_TIMEWAIT_EXIT:
        return;
    case RDMA_CM_EVENT_DISCONNECTED:
        seen->disconnected++;
        break;
    default: // CONNECT_ERROR, UNREACHABLE, REJECTED: the other end died before it was established
        seen->failed++;
    }
    if (id->context == &is_open) seen->open--;
    rdma_disconnect(id);
    destroy_id(id);
}

static int serve(int port) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel) die("rdma_create_event_channel");
    struct rdma_cm_id *listener = listener_at(channel, port, BACKLOG);
    struct seen seen = {0};
    printf("listens\n");
    fflush(stdout);
    end_on_sigterm();
    while (!is_over) {
        struct rdma_cm_event *event = next_event(channel, 1000);
        if (event) serve_event(event, &seen);
        else if (errno != ETIMEDOUT && errno != EINTR) die("rdma_get_cm_event");
    }
    for (struct rdma_cm_event *event; (event = next_event(channel, 300));) serve_event(event, &seen);
    printf("%lu requests, %lu established, %lu disconnected, %lu failed, %ld open\n", seen.requests, seen.established,
           seen.disconnected, seen.failed, seen.open);
    destroy_id(listener);
    rdma_destroy_event_channel(channel);
    return 0;
}

static int hold(int port) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel) die("rdma_create_event_channel");
    listener_at(channel, port, BACKLOG);
    printf("listens\n");
    fflush(stdout);
    for (;;) pause();
}

// ---- clients

static bool one_cycle(struct rdma_event_channel *channel, const char *server, int port) {
    struct rdma_cm_id *id = resolved_id(channel, server, port, NULL);
    if (!id) return false;
    struct rdma_conn_param wanted = parameters(NULL, 0);
    bool good = !rdma_connect(id, &wanted) && expect_event(channel, RDMA_CM_EVENT_ESTABLISHED, EVENT_MS) &&
                !rdma_disconnect(id) && expect_event(channel, RDMA_CM_EVENT_DISCONNECTED, EVENT_MS);
    destroy_id(id);
    return good;
}

static int cycle(const char *server, int port, unsigned count) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel) die("rdma_create_event_channel");
    uint64_t begin = now_ns();
    for (unsigned i = 0; i < count; i++)
        if (!one_cycle(channel, server, port)) die("cycle %u", i);
    double seconds = (double)(now_ns() - begin) / 1e9;
    rdma_destroy_event_channel(channel);
    printf("%u cycles, %.0f a second\n", count, count / seconds);
    return 0;
}

// Requests without a wait in between. Each must come to an end; the time is for all of them.
static int crowd(const char *server, int port, unsigned count) {
    static struct rdma_cm_id *ids[CROWD_MAX];
    unsigned kinds[EVENT_KINDS] = {0}, ended = 0;
    if (count > CROWD_MAX) return 2;
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel) die("rdma_create_event_channel");
    for (unsigned i = 0; i < count; i++)
        if (!(ids[i] = resolved_id(channel, server, port, (void *)(uintptr_t)i))) die("identifier %u", i);
    struct rdma_conn_param wanted = parameters(NULL, 0);
    for (unsigned i = 0; i < count; i++)
        if (rdma_connect(ids[i], &wanted)) die("rdma_connect %u", i);
    printf("connects\n");
    fflush(stdout);
    uint64_t begin = now_ns();
    while (ended < count && now_ns() - begin < EVENT_MS * 2 * 1000000ull) {
        struct rdma_cm_event *event = next_event(channel, 1000);
        if (!event) continue;
        kinds[event->event]++, ended++;
        rdma_ack_cm_event(event);
    }
    printf("%u of %u ended after %.1f s:", ended, count, (double)(now_ns() - begin) / 1e9);
    for (unsigned i = 0; i < EVENT_KINDS; i++)
        if (kinds[i]) printf(" %u %s", kinds[i], rdma_event_str(i));
    printf("\n");
    for (unsigned i = 0; i < count; i++) destroy_id(ids[i]);
    rdma_destroy_event_channel(channel);
    return ended == count ? 0 : HUNG;
}

// ---- ends that are killed

// Either end of a round may die at any time: whatever comes is good, as long as something comes.
static int victim(const char *server, int port) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel) return 1;
    struct rdma_cm_id *id = resolved_id(channel, server, port, NULL);
    if (!id) return 1;
    struct rdma_conn_param wanted = parameters(NULL, 0);
    if (rdma_connect(id, &wanted)) return 1;
    struct rdma_cm_event *event = next_event(channel, EVENT_MS);
    if (!event) return HUNG;
    bool established = event->event == RDMA_CM_EVENT_ESTABLISHED;
    rdma_ack_cm_event(event);
    if (established) {
        usleep(1000);
        rdma_disconnect(id); // refused where the other end was first
        event = next_event(channel, EVENT_MS);
        if (!event) return HUNG;
        rdma_ack_cm_event(event);
    }
    destroy_id(id);
    rdma_destroy_event_channel(channel);
    return 0;
}

static void die_with_parent(void) { prctl(PR_SET_PDEATHSIG, SIGKILL); }

static int victims(const char *server, int port, unsigned count, uint64_t seed) {
    unsigned killed = 0, ended = 0, failed = 0, hung = 0;
    for (unsigned i = 0; i < count; i++) {
        uint64_t chance = random_next(&seed);
        pid_t pid = fork();
        if (pid == 0) {
            die_with_parent();
            alarm(CHILD_SECONDS);
            _exit(victim(server, port));
        }
        // Half of them live; the others die within the first milliseconds, the program's start included.
        if (chance % 2) usleep((useconds_t)(chance / 2 % 12000)), kill(pid, SIGKILL);
        int status;
        waitpid(pid, &status, 0);
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) killed++;
        else if (!WIFEXITED(status) || WEXITSTATUS(status) == HUNG) hung++;
        else if (WEXITSTATUS(status)) failed++;
        else ended++;
    }
    printf("%u killed, %u came to an end, %u refused, %u hung\n", killed, ended, failed, hung);
    return hung ? HUNG : 0;
}

static int restart(int port, uint64_t seed, unsigned seconds) {
    unsigned count = 0;
    uint64_t end = now_ns() + seconds * 1000000000ull;
    end_on_sigterm();
    for (; !is_over && now_ns() < end; count++) {
        pid_t pid = fork();
        if (pid == 0) {
            die_with_parent();
            _exit(serve(port));
        }
        usleep((useconds_t)(20000 + random_next(&seed) % 80000));
        kill(pid, SIGKILL);
        int status;
        waitpid(pid, &status, 0);
        if (WIFEXITED(status)) die("the server ended by itself: %d", WEXITSTATUS(status));
    }
    printf("%u servers killed\n", count);
    return 0;
}

// ---- the router's death

static int reported(struct rdma_event_channel *channel) {
    printf("ready\n");
    fflush(stdout);
    struct rdma_cm_event *event;
    int code = rdma_get_cm_event(channel, &event); // without poll: it has to wake up by itself
    printf("event %s %lu\n", code ? strerror(errno) : rdma_event_str(event->event), (unsigned long)now_ns());
    if (!code) rdma_ack_cm_event(event);
    return 0;
}

static int wait_connected(const char *server, int port) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id = channel ? resolved_id(channel, server, port, NULL) : NULL;
    if (!id) die("no identifier");
    struct rdma_conn_param wanted = parameters(NULL, 0);
    if (rdma_connect(id, &wanted) || !expect_event(channel, RDMA_CM_EVENT_ESTABLISHED, EVENT_MS)) die("no connection");
    int code = reported(channel);
    destroy_id(id);
    rdma_destroy_event_channel(channel);
    return code;
}

static int wait_listening(int port) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel) die("rdma_create_event_channel");
    struct rdma_cm_id *id = listener_at(channel, port, 8);
    int code = reported(channel);
    destroy_id(id);
    rdma_destroy_event_channel(channel);
    return code;
}

// ---- events that nobody reads

static int unread(const char *server, int port, unsigned seconds) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel) die("rdma_create_event_channel");
    struct sockaddr_in address = address_of(server, port);
    unsigned long made = 0, refused = 0;
    for (uint64_t end = now_ns() + seconds * 1000000000ull; now_ns() < end;) {
        struct rdma_cm_id *id;
        if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP)) {
            refused++;
            usleep(10000);
            continue;
        }
        made++;
        if (rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, RESOLVE_MS)) refused++;
    }
    printf("%lu identifiers, %lu refused\n", made, refused);
    fflush(stdout);
    _exit(0); // rdma_destroy_id would wait for the events
}

// ---- private data, errors

static void pattern(uint8_t *bytes, unsigned count, unsigned seed) {
    for (unsigned i = 0; i < count; i++) bytes[i] = (uint8_t)(seed + i * 7);
}

static void need_pattern(const struct rdma_cm_event *event, unsigned count, unsigned seed, const char *what) {
    uint8_t wanted[256];
    pattern(wanted, count, seed);
    const struct rdma_conn_param *got = &event->param.conn;
    if (got->private_data_len < count || memcmp(got->private_data, wanted, count))
        die("%s: private data of %u bytes differs from what was sent (%u bytes)", what, got->private_data_len, count);
}

static void need_refused(int code, const char *what) {
    if (code == 0 || errno != EINVAL) die("%s is not refused with EINVAL, but gives %d", what, code);
}

static int data_server(int port) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel) die("rdma_create_event_channel");
    struct rdma_cm_id *listener = listener_at(channel, port, 8);
    uint8_t bytes[256];
    printf("listens\n");
    fflush(stdout);
    for (unsigned round = 0; round < DATA_ROUNDS; round++) {
        struct rdma_cm_event *event = next_event(channel, EVENT_MS);
        if (!event || event->event != RDMA_CM_EVENT_CONNECT_REQUEST) die("no request");
        need_pattern(event, PRIVATE_REQ, round, "request");
        struct rdma_cm_id *id = event->id;
        rdma_ack_cm_event(event);
        pattern(bytes, sizeof bytes, round + 100);
        struct rdma_conn_param accepted = parameters(bytes, PRIVATE_REP + 1);
        if (round == 0) {
            need_refused(rdma_reject(id, bytes, PRIVATE_REJ + 1), "a rejection with too much private data");
            if (rdma_reject(id, bytes, PRIVATE_REJ)) die("rdma_reject");
        } else if (!create_qp(id)) {
            die("create_qp");
        } else if (round == 1) { // this ends the request, as Linux's does
            need_refused(rdma_accept(id, &accepted), "an answer with too much private data");
        } else {
            accepted.private_data_len = PRIVATE_REP;
            if (rdma_accept(id, &accepted)) die("rdma_accept");
            if (!expect_event(channel, RDMA_CM_EVENT_ESTABLISHED, EVENT_MS)) return 1;
            if (!expect_event(channel, RDMA_CM_EVENT_DISCONNECTED, EVENT_MS)) return 1;
        }
        destroy_id(id);
    }
    destroy_id(listener);
    rdma_destroy_event_channel(channel);
    printf("all right\n");
    return 0;
}

static int data(const char *server, int port) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel) die("rdma_create_event_channel");
    uint8_t bytes[256];
    for (unsigned round = 0; round < DATA_ROUNDS; round++) {
        struct rdma_cm_id *id = resolved_id(channel, server, port, NULL);
        if (!id) return 1;
        pattern(bytes, sizeof bytes, round);
        struct rdma_conn_param wanted = parameters(bytes, PRIVATE_REQ + 1);
        need_refused(rdma_connect(id, &wanted), "a request with too much private data");
        wanted.private_data_len = PRIVATE_REQ;
        if (rdma_connect(id, &wanted)) die("rdma_connect after a refused one");
        struct rdma_cm_event *event = next_event(channel, EVENT_MS);
        if (!event) die("no answer");
        if (round < 2) {
            if (event->event != RDMA_CM_EVENT_REJECTED || event->status != 28)
                die("%s, status %d, instead of a rejection by the consumer", rdma_event_str(event->event), event->status);
            if (round == 0) need_pattern(event, PRIVATE_REJ, 100, "rejection");
        } else {
            if (event->event != RDMA_CM_EVENT_ESTABLISHED) die("%s", rdma_event_str(event->event));
            need_pattern(event, PRIVATE_REP, 102, "answer");
            if (rdma_disconnect(id)) die("rdma_disconnect");
        }
        rdma_ack_cm_event(event);
        if (round == 2 && !expect_event(channel, RDMA_CM_EVENT_DISCONNECTED, EVENT_MS)) return 1;
        destroy_id(id);
    }
    rdma_destroy_event_channel(channel);
    printf("all right\n");
    return 0;
}

static int nobody(const char *server, int port) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel) die("rdma_create_event_channel");
    struct rdma_cm_id *id = resolved_id(channel, server, port, NULL);
    if (!id) return 1;
    struct rdma_conn_param wanted = parameters(NULL, 0);
    if (rdma_connect(id, &wanted)) die("rdma_connect");
    struct rdma_cm_event *event = next_event(channel, EVENT_MS);
    if (!event || event->event != RDMA_CM_EVENT_REJECTED || event->status != 8)
        die("%s, status %d, where nobody listens", event ? rdma_event_str(event->event) : "no event", event ? event->status : 0);
    rdma_ack_cm_event(event);
    destroy_id(id);
    struct sockaddr_in address = address_of(server, port);
    address.sin_addr.s_addr = htonl((ntohl(address.sin_addr.s_addr) & ~0xffu) | NOBODYS_HOST);
    if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP)) die("rdma_create_id");
    if (!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, RESOLVE_MS)) {
        event = next_event(channel, EVENT_MS);
        if (!event || event->event != RDMA_CM_EVENT_ADDR_ERROR || event->status >= 0)
            die("%s for an address that is nobody's", event ? rdma_event_str(event->event) : "no event");
        rdma_ack_cm_event(event);
    }
    destroy_id(id);
    address = address_of("203.0.113.7", 0); // not this container's (RFC 5737)
    if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP)) die("rdma_create_id");
    if (!rdma_bind_addr(id, (struct sockaddr *)&address)) die("another's address could be bound");
    destroy_id(id);
    rdma_destroy_event_channel(channel);
    printf("all right\n");
    return 0;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    signal(SIGPIPE, SIG_IGN);
    if (argc == 3) {
        int port = atoi(argv[2]);
        if (!strcmp(what, "serve")) return serve(port);
        if (!strcmp(what, "hold")) return hold(port);
        if (!strcmp(what, "wait-listening")) return wait_listening(port);
        if (!strcmp(what, "data-server")) return data_server(port);
    }
    if (argc == 5 && !strcmp(what, "restart"))
        return restart(atoi(argv[2]), strtoull(argv[3], NULL, 0), (unsigned)atoi(argv[4]));
    if (argc < 4) return 2;
    int port = atoi(argv[3]);
    unsigned count = argc > 4 ? (unsigned)atoi(argv[4]) : 0;
    if (argc == 4 && !strcmp(what, "wait")) return wait_connected(argv[2], port);
    if (argc == 4 && !strcmp(what, "data")) return data(argv[2], port);
    if (argc == 4 && !strcmp(what, "nobody")) return nobody(argv[2], port);
    if (argc == 5 && !strcmp(what, "cycle")) return cycle(argv[2], port, count);
    if (argc == 5 && !strcmp(what, "crowd")) return crowd(argv[2], port, count);
    if (argc == 5 && !strcmp(what, "unread")) return unread(argv[2], port, count);
    if (argc == 6 && !strcmp(what, "victims")) return victims(argv[2], port, count, strtoull(argv[5], NULL, 0));
    return 2;
}
