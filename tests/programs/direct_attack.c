#define _GNU_SOURCE
#include "direct_attack.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define NONSENSE 0xeeeeeeeeeeeeeeeeull

bool booty_map(struct booty *booty, int fd, size_t bytes, bool writable) {
    void *memory = mmap(NULL, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
    booty->fd = fd;
    booty->bytes = bytes;
    booty->memory = memory == MAP_FAILED ? NULL : memory;
    return booty->memory != NULL;
}

static void *hammer(void *argument) {
    struct booty *booty = argument;
    while (!__atomic_load_n(&booty->shall_stop, __ATOMIC_RELAXED)) {
        for (size_t page = booty->first; page + PAGE <= booty->bytes; page += PAGE)
            for (size_t at = 0; at < 1024; at += 64) *(volatile uint64_t *)(booty->memory + page + booty->at + at) = NONSENSE;
        usleep(50); // where cores are few, the owner must get its turn
    }
    return NULL;
}

void booty_hammer(struct booty *booty) {
    booty->shall_stop = false;
    booty->is_hammering = !pthread_create(&booty->hammer, NULL, hammer, booty);
}

void booty_stop(struct booty *booty) {
    __atomic_store_n(&booty->shall_stop, true, __ATOMIC_RELAXED);
    if (booty->is_hammering) pthread_join(booty->hammer, NULL);
    booty->is_hammering = false;
}

static bool has(const volatile uint8_t *memory, size_t bytes, uint64_t word) {
    for (size_t at = 0; at < bytes; at += 8)
        if (*(const volatile uint64_t *)(memory + at) == word) return true;
    return false;
}

// By the old mapping, by a new one, and by reading the file.
bool sees(const struct booty *booty, uint64_t word) {
    uint64_t words[PAGE / 8];
    bool seen = booty->memory && has(booty->memory, booty->bytes, word);
    uint8_t *fresh = mmap(NULL, booty->bytes, PROT_READ, MAP_SHARED, booty->fd, 0);
    if (fresh != MAP_FAILED) {
        seen |= has(fresh, booty->bytes, word);
        munmap(fresh, booty->bytes);
    }
    for (size_t page = 0; page < booty->bytes; page += PAGE)
        seen |= pread(booty->fd, words, PAGE, (off_t)page) == PAGE && has((uint8_t *)words, PAGE, word);
    return seen;
}

static void count(struct outcome *outcome, bool succeeded) {
    outcome->written += succeeded;
    outcome->refused += !succeeded;
}

static bool write_by_mapping(int fd, size_t bytes) {
    void *fresh = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fresh == MAP_FAILED) return false;
    memset(fresh, 0xee, bytes);
    munmap(fresh, bytes);
    return true;
}

static bool write_by_mprotect(int fd, size_t bytes) {
    void *fresh = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (fresh == MAP_FAILED) return false;
    bool writable = !mprotect(fresh, bytes, PROT_READ | PROT_WRITE);
    if (writable) memset(fresh, 0xee, bytes);
    munmap(fresh, bytes);
    return writable;
}

static bool write_by_calls(int fd, size_t bytes) {
    uint8_t page[PAGE];
    size_t written = 0;
    memset(page, 0xee, sizeof page);
    for (size_t at = 0; at < bytes; at += PAGE) written += pwrite(fd, page, PAGE, (off_t)at) > 0;
    return written != 0;
}

static bool add_seals(int fd, int seals) { return fcntl(fd, F_ADD_SEALS, seals) == 0; }

static bool reseal(int fd, size_t bytes) {
    bool cut = !ftruncate(fd, 0) || !ftruncate(fd, (off_t)(2 * bytes)) || !ftruncate(fd, (off_t)bytes / 2);
    return cut || add_seals(fd, F_SEAL_WRITE) || add_seals(fd, F_SEAL_FUTURE_WRITE) || add_seals(fd, F_SEAL_SEAL);
}

bool booty_reseal(const struct booty *booty) { return reseal(booty->fd, booty->bytes); }

struct outcome booty_try_all(const struct booty *booty, uint64_t secret) {
    struct outcome outcome = {.seen = sees(booty, secret)};
    size_t bytes = booty->bytes;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", booty->fd);
    int reopened = open(path, O_RDWR | O_CLOEXEC);
    const int descriptors[] = {booty->fd, reopened};
    for (int i = 0; i < 2 && descriptors[i] >= 0; i++) {
        int fd = descriptors[i];
        count(&outcome, write_by_mapping(fd, bytes));
        count(&outcome, write_by_mprotect(fd, bytes));
        count(&outcome, write_by_calls(fd, bytes));
        count(&outcome, !fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)bytes));
        outcome.resealed += reseal(fd, bytes);
    }
    if (reopened >= 0) close(reopened);
    if (booty->memory) {
        count(&outcome, !mprotect(booty->memory, bytes, PROT_READ | PROT_WRITE));
        if (outcome.written) memset(booty->memory, 0xee, bytes);
        count(&outcome, !madvise(booty->memory, bytes, MADV_REMOVE));
        if (outcome.written) memset(booty->memory, 0xee, bytes);
    }
    outcome.seen |= sees(booty, secret);
    return outcome;
}

struct outcome outcome_sum(struct outcome a, struct outcome b) {
    return (struct outcome){a.seen + b.seen, a.resealed + b.resealed, a.written + b.written, a.refused + b.refused};
}

// ---- the other container's process: each message is a word, 0 with the descriptor, else the secret

struct given {
    uint64_t secret, bytes;
    uint32_t at, writable;
};

static bool receive(int sock, struct given *given, int *fd) {
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = {given, sizeof *given};
    struct msghdr header = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    if (recvmsg(sock, &header, MSG_CMSG_CLOEXEC) != sizeof *given) return false;
    struct cmsghdr *c = CMSG_FIRSTHDR(&header);
    if (c && c->cmsg_type == SCM_RIGHTS) memcpy(fd, CMSG_DATA(c), sizeof *fd);
    return true;
}

static void serve(int sock) {
    struct booty booty = {.fd = -1};
    struct given given;
    for (int fd = -1; receive(sock, &given, &fd);) {
        struct outcome outcome = {0};
        if (given.secret) {
            outcome = booty_try_all(&booty, given.secret);
        } else {
            booty.at = given.at;
            outcome.refused = !booty_map(&booty, fd, given.bytes, given.writable);
            for (size_t page = 0; given.writable && booty.memory && page < booty.bytes; page += PAGE)
                *(volatile uint64_t *)(booty.memory + page + booty.at) = NONSENSE;
            if (given.writable && booty.memory) booty_hammer(&booty);
        }
        if (send(sock, &outcome, sizeof outcome, MSG_NOSIGNAL) != sizeof outcome) break;
    }
    booty_stop(&booty);
    if (booty.memory) munmap(booty.memory, booty.bytes);
    if (booty.fd >= 0) close(booty.fd);
}

static struct sockaddr_un at_path(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    return address;
}

int colluder_run(const char *path) {
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = at_path(path);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8)) return 1;
    printf("ready\n");
    for (int sock; (sock = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0; close(sock)) serve(sock);
    return 1;
}

int colluder_meet(const char *path) {
    int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = at_path(path);
    struct timeval limit = {20, 0};
    setsockopt(sock, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return connect(sock, (struct sockaddr *)&address, sizeof address) ? -1 : sock;
}

bool colluder_give(int sock, const struct booty *booty) {
    bool writable = booty->at != 0;
    struct given given = {0, booty->bytes, COLLUDER_AT, writable};
    struct iovec iov = {&given, sizeof given};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr header = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control.bytes};
    *CMSG_FIRSTHDR(&header) =
        (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
    memcpy(CMSG_DATA(CMSG_FIRSTHDR(&header)), &booty->fd, sizeof(int));
    struct outcome outcome;
    return sendmsg(sock, &header, MSG_NOSIGNAL) == sizeof given && recv(sock, &outcome, sizeof outcome, 0) == sizeof outcome &&
           !outcome.refused;
}

struct outcome colluder_try(int sock, uint64_t secret) {
    struct given given = {.secret = secret};
    struct outcome outcome = {.seen = 1, .resealed = 1}; // of one that does not answer
    if (send(sock, &given, sizeof given, MSG_NOSIGNAL) == sizeof given) recv(sock, &outcome, sizeof outcome, 0);
    return outcome;
}
