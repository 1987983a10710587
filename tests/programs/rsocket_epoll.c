// repoll_create, repoll_ctl and repoll_wait, in one container: rsocket_epoll ADDRESS PORT. By name and node, since the
// system's headers and library may be of before.
#define _GNU_SOURCE
#include "die.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <rdma/rsocket.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MILLISECONDS = 10000, WAITERS = 3 };

static int (*create)(int flags);
static int (*control)(int epoll, int operation, int fd, struct epoll_event *event);
static int (*await)(int epoll, struct epoll_event *events, int count, int timeout_ms);

static void *find(const char *name) {
    void *found = dlvsym(RTLD_DEFAULT, name, "RDMACM_1.5");
    if (!found) die("%s: %s", name, dlerror());
    return found;
}

static struct sockaddr_in address;

static void *connect_one(void *unused) {
    (void)unused;
    int fd = rsocket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || rconnect(fd, (struct sockaddr *)&address, sizeof address)) die("rconnect");
    return (void *)(long)fd;
}

static void make_pair(int ends[2]) {
    pthread_t thread;
    void *fd;
    int listener = rsocket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || rbind(listener, (struct sockaddr *)&address, sizeof address) || rlisten(listener, 1)) die("rlisten");
    if (pthread_create(&thread, NULL, connect_one, NULL)) die("pthread_create");
    ends[0] = raccept(listener, NULL, NULL);
    if (ends[0] < 0 || pthread_join(thread, &fd) || rclose(listener)) die("raccept");
    ends[1] = (int)(long)fd;
}

static void set(int epoll, int operation, int fd, uint32_t events) {
    struct epoll_event event = {.events = events, .data.u64 = 1000 + fd};
    if (control(epoll, operation, fd, &event)) die("repoll_ctl %d of %d", operation, fd);
}

static void refused(int epoll, int operation, int fd, struct epoll_event *event, int number) {
    errno = 0;
    if (control(epoll, operation, fd, event) != -1 || errno != number) die("repoll_ctl %d of %d: not %d", operation, fd, number);
}

// Expects one event within the time.
static void reported(int epoll, int fd, uint32_t events, const char *when) {
    struct epoll_event event = {0};
    int count = await(epoll, &event, 1, MILLISECONDS);
    if (count != 1 || event.data.u64 != (uint64_t)(1000 + fd) || event.events != events)
        die("%s: %d, events %x of %d", when, count, event.events, (int)event.data.u64);
}

static void quiet(int epoll, const char *when) {
    struct epoll_event event;
    if (await(epoll, &event, 1, 0) || await(epoll, &event, 1, 1)) die("%s: something was reported", when);
}

static void refusals(int epoll, int fd) {
    struct epoll_event event = {.events = EPOLLIN};
    refused(epoll, EPOLL_CTL_ADD, -1, &event, EBADF);
    refused(epoll, EPOLL_CTL_ADD, epoll, &event, EINVAL);
    refused(fd, EPOLL_CTL_ADD, epoll, &event, EINVAL);
    refused(epoll, 7, fd, &event, EINVAL);
    refused(epoll, EPOLL_CTL_ADD, fd, NULL, EFAULT);
    refused(epoll, EPOLL_CTL_MOD, fd, &event, ENOENT);
    refused(epoll, EPOLL_CTL_DEL, fd, NULL, ENOENT);
    set(epoll, EPOLL_CTL_ADD, fd, EPOLLIN);
    refused(epoll, EPOLL_CTL_ADD, fd, &event, EEXIST);
    if (await(epoll, &event, 0, 0) != -1 || errno != EINVAL) die("no room");
    if (await(fd, &event, 1, 0) != -1 || errno != EINVAL) die("an rsocket is no set");
    if (create(1) != -1 || errno != EINVAL) die("flags that are none");
}

// Level; one-shot; a condition at a time.
static void conditions(int epoll, int ends[2]) {
    char bytes[4];
    quiet(epoll, "nothing came");
    set(epoll, EPOLL_CTL_MOD, ends[0], EPOLLIN | EPOLLOUT);
    reported(epoll, ends[0], EPOLLOUT, "room");
    set(epoll, EPOLL_CTL_MOD, ends[0], EPOLLIN | EPOLLET);
    if (rsend(ends[1], "ab", 2, 0) != 2) die("rsend");
    reported(epoll, ends[0], EPOLLIN, "a byte");
    if (rrecv(ends[0], bytes, 1, 0) != 1) die("rrecv");
    reported(epoll, ends[0], EPOLLIN, "another byte");
    reported(epoll, ends[0], EPOLLIN, "still the byte");
    set(epoll, EPOLL_CTL_MOD, ends[0], EPOLLIN | EPOLLONESHOT);
    reported(epoll, ends[0], EPOLLIN, "one shot");
    quiet(epoll, "after the shot");
    set(epoll, EPOLL_CTL_MOD, ends[0], EPOLLIN);
    reported(epoll, ends[0], EPOLLIN, "armed again");
}

// An ordinary descriptor beside an rsocket that is always ready, with room for one event.
static void others(int epoll, int rsocket) {
    int ends[2], heard = 0;
    if (pipe(ends)) die("pipe");
    set(epoll, EPOLL_CTL_ADD, ends[0], EPOLLIN);
    if (write(ends[1], "x", 1) != 1) die("write");
    struct epoll_event events[4];
    for (int turn = 0; turn < 4; turn++) {
        if (await(epoll, events, 1, MILLISECONDS) != 1) die("one event");
        heard |= events[0].data.u64 == (uint64_t)(1000 + rsocket) ? 1 : 2;
    }
    if (heard != 3 || await(epoll, events, 4, MILLISECONDS) != 2) die("both: %d", heard);
    set(epoll, EPOLL_CTL_DEL, rsocket, 0);
    reported(epoll, ends[0], EPOLLIN, "the pipe");
    set(epoll, EPOLL_CTL_DEL, ends[0], 0);
    quiet(epoll, "an empty set");
    close(ends[0]);
    close(ends[1]);
}

static int shared;
static int joined;

static void *wait_for_it(void *unused) {
    (void)unused;
    reported(shared, joined, EPOLLIN, "a thread that waits");
    return NULL;
}

// Threads wait before the rsocket joins, and before its bytes come.
static void threads(int epoll, int ends[2]) {
    pthread_t waiters[WAITERS];
    shared = epoll, joined = ends[0];
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < WAITERS; i++)
            if (pthread_create(&waiters[i], NULL, wait_for_it, NULL)) die("pthread_create");
        usleep(200000);
        if (turn) {
            if (rsend(ends[1], "x", 1, 0) != 1) die("rsend");
        } else {
            set(epoll, EPOLL_CTL_ADD, ends[0], EPOLLIN);
        }
        for (int i = 0; i < WAITERS; i++) pthread_join(waiters[i], NULL);
        char bytes[4];
        if (!turn && rrecv(ends[0], bytes, sizeof bytes, 0) < 1) die("rrecv");
    }
}

int main(int count, char **words) {
    if (count != 3) return 2;
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(atoi(words[2]))};
    inet_pton(AF_INET, words[1], &address.sin_addr);
    create = find("repoll_create");
    control = find("repoll_ctl");
    await = find("repoll_wait");
    int ends[2], epoll = create(O_CLOEXEC | O_NONBLOCK);
    if (epoll < 0 || fcntl(epoll, F_GETFD) != FD_CLOEXEC) die("repoll_create");
    make_pair(ends);
    refusals(epoll, ends[0]);
    conditions(epoll, ends);
    others(epoll, ends[0]);
    threads(epoll, ends);
    if (rshutdown(ends[1], SHUT_RDWR)) die("rshutdown");
    char bytes[4];
    while (rrecv(ends[0], bytes, sizeof bytes, 0) > 0)
        ;
    struct epoll_event event;
    int status;
    pid_t child = fork();
    if (!child) _exit(await(epoll, &event, 1, 0) != -1 || errno != EINVAL);
    if (child < 0 || waitpid(child, &status, 0) != child || status) die("a child has its parent's set");
    if (await(epoll, &event, 1, MILLISECONDS) != 1 || !(event.events & EPOLLHUP)) die("the end: %x", event.events);
    if (rclose(ends[0]) || rclose(ends[1])) die("rclose");
    quiet(epoll, "after the rsocket's end");
    if (rclose(epoll) || fcntl(epoll, F_GETFD) != -1) die("rclose of a set");
    printf("well\n");
    return 0;
}
