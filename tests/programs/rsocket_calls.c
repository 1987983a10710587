// Runs under the preload library, in one container: several messages a call, and connections that signal handlers
// close.
#define _GNU_SOURCE
#include "die.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { TURNS = 60, PIECES = 5, PIECE_BYTES = 3000, SECONDS = 50 };

static struct sockaddr_in address;
static int listener;

static void *connect_one(void *unused) {
    (void)unused;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    return (void *)(long)fd;
}

static void make_pair(int ends[2]) {
    pthread_t thread;
    void *fd;
    if (pthread_create(&thread, NULL, connect_one, NULL)) die("pthread_create");
    ends[0] = accept(listener, NULL, NULL);
    if (ends[0] < 0 || pthread_join(thread, &fd)) die("accept");
    ends[1] = (int)(long)fd;
}

static void batches(void) {
    int ends[2];
    make_pair(ends);
    static char sent[PIECES][PIECE_BYTES], got[PIECES][PIECE_BYTES];
    struct iovec out[PIECES], in[PIECES];
    struct mmsghdr outward[PIECES] = {0}, inward[PIECES] = {0};
    for (int i = 0; i < PIECES; i++) {
        memset(sent[i], 'a' + i, PIECE_BYTES);
        out[i] = (struct iovec){sent[i], PIECE_BYTES};
        in[i] = (struct iovec){got[i], PIECE_BYTES};
        outward[i].msg_hdr = (struct msghdr){.msg_iov = &out[i], .msg_iovlen = 1};
        inward[i].msg_hdr = (struct msghdr){.msg_iov = &in[i], .msg_iovlen = 1};
    }
    if (recvmmsg(ends[1], inward, PIECES, MSG_DONTWAIT, NULL) != -1 || errno != EAGAIN) die("there is nothing yet");
    struct timespec wrong = {.tv_nsec = 1000000000};
    if (recvmmsg(ends[1], inward, PIECES, 0, &wrong) != -1 || errno != EINVAL) die("a time that is none");
    if (sendmmsg(ends[0], outward, PIECES, 0) != PIECES) die("sendmmsg");
    for (int i = 0; i < PIECES; i++)
        if (outward[i].msg_len != PIECE_BYTES) die("message %d: %u bytes", i, outward[i].msg_len);
    // All pieces whole, then what the kernel says when the other end is closed: messages of no bytes.
    if (recvmmsg(ends[1], inward, PIECES, MSG_WAITALL, NULL) != PIECES) die("recvmmsg");
    for (int i = 0; i < PIECES; i++)
        if (inward[i].msg_len != PIECE_BYTES) die("message %d: %u bytes came", i, inward[i].msg_len);
    if (memcmp(sent, got, sizeof sent)) die("other bytes");
    if (send(ends[0], "x", 1, 0) != 1) die("send");
    int count = recvmmsg(ends[1], inward, PIECES, MSG_WAITFORONE, NULL);
    if (count != 1 || inward[0].msg_len != 1) die("MSG_WAITFORONE: %d messages", count);
    struct timespec none = {0};
    if (send(ends[0], "y", 1, 0) != 1 || recvmmsg(ends[1], inward, PIECES, 0, &none) != 1) die("no time left after one");
    close(ends[0]);
    if (recvmmsg(ends[1], inward, PIECES, 0, NULL) != PIECES || inward[0].msg_len) die("the end");
    close(ends[1]);
    printf("batches\n");
}

static volatile sig_atomic_t victim, closed;

static void on_signal(int number) {
    (void)number;
    close(victim);
    closed = 1;
}

// The handler interrupts its own thread anywhere in a call on that very connection, or on another.
static void signals(void) {
    int quiet[2];
    make_pair(quiet);
    signal(SIGUSR1, on_signal);
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    if (timer_create(CLOCK_MONOTONIC, &event, &timer)) die("timer_create");
    unsigned seed = 1;
    for (int turn = 0; turn < TURNS; turn++) {
        int ends[2];
        char byte = 'x';
        make_pair(ends);
        victim = ends[0];
        closed = 0;
        struct itimerspec soon = {.it_value.tv_nsec = 20000 + rand_r(&seed) % 300000};
        if (timer_settime(timer, 0, &soon, NULL)) die("timer_settime");
        while (!closed) {
            int fd = turn % 2 ? ends[0] : quiet[0];
            if (send(fd, &byte, 1, MSG_DONTWAIT) < 0 && closed) break;
            if (recv(turn % 2 ? ends[1] : quiet[1], &byte, 1, MSG_DONTWAIT) < 0 && closed) break;
        }
        // It takes a call until what a handler left is closed.
        (void)!recv(quiet[1], &byte, 1, MSG_DONTWAIT);
        while (recv(ends[1], &byte, 1, 0) > 0) {}
        close(ends[1]);
    }
    while (recv(quiet[1], &seed, sizeof seed, MSG_DONTWAIT) > 0) {}
    if (send(quiet[0], "well", 4, 0) != 4 || recv(quiet[1], &seed, 4, MSG_WAITALL) != 4) die("the quiet connection");
    printf("signals\n");
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    alarm(SECONDS); // what hangs ends
    setvbuf(stdout, NULL, _IOLBF, 0);
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[2]))};
    if (inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) return 2;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8)) die("listen");
    batches();
    signals();
    printf("well\n");
    return 0;
}
