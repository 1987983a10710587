// Processes that hold up whoever looks at them, and a victim beside them that only uses control verbs.
//
//   stalls fuse|mprotect CONNECTS   connects, then stays in execve, while a sibling that shares its memory has the mmap
//                                   lock: for as long as a FUSE daemon does not answer, or again and again. Until
//                                   SIGTERM.
//   stalls borrow                   asks the router again and again to map a FUSE file of its own, whose daemon answers
//                                   neither writes nor questions about its file system
//   stalls exec-loop|dies SECONDS   connects and runs another program at once; connects and dies at once
//   stalls idle                     opens the device, registers memory and waits
//   stalls connect CONNECTS         has so many connections, and says nothing
//   stalls victim                   control verbs until SIGTERM; a dot for each hundred
//   stalls once                     one session
#define _GNU_SOURCE
#include "by_hand.h"
#include "die.h"

#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/fuse.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { EXIT_NOT_HERE = 77, STACK_BYTES = 65536, PAGE_BYTES = 4096, RUN_SECONDS_MAX = 120 };

// Shared by processes that do not share their memory.
struct signs {
    _Atomic bool locked;  // the mmap lock is held
    _Atomic bool execing; // the last thing before execve
};
static struct signs *signs;
static int connects;
static bool is_silent_about_itself;
static char *fuse_page;
static struct sockaddr_un address; // the router's
static volatile sig_atomic_t ended;

static void end(int number) {
    (void)number;
    ended = 1;
}

// A signal that came between a look at `ended` and `pause` would be waited for again.
static void wait_for_end(void) {
    sigset_t ends, before;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGALRM);
    sigprocmask(SIG_BLOCK, &ends, &before);
    while (!ended) sigsuspend(&before);
    sigprocmask(SIG_SETMASK, &before, NULL);
}

// The queue of the router's socket may be full: then it is.
static void connect_some(void) {
    for (int i = 0; i < connects; i++) {
        int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (sock < 0) return;
        (void)!connect(sock, (const void *)&address, sizeof address);
    }
}

static void put(const char *path, const char *text) {
    int fd = open(path, O_WRONLY);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) die("%s", path);
    close(fd);
}

// ---- a file system that answers all but WRITE

static size_t answer(const struct fuse_in_header *in, void *body, int *opens) {
    const void *arguments = in + 1;
    bool is_root = in->nodeid == FUSE_ROOT_ID;
    struct fuse_attr attributes = {.ino = in->nodeid, .nlink = 1, .size = is_root ? 0 : PAGE_BYTES,
                                   .mode = is_root ? S_IFDIR | 0755 : S_IFREG | 0666};
    switch (in->opcode) {
    case FUSE_INIT: {
        const struct fuse_init_in *asked = arguments;
        struct fuse_init_out *out = body;
        *out = (struct fuse_init_out){.major = FUSE_KERNEL_VERSION, .minor = asked->minor < 31 ? asked->minor : 31,
                                      .max_write = PAGE_BYTES};
        return sizeof *out;
    }
    case FUSE_LOOKUP: {
        struct fuse_entry_out *out = body;
        attributes = (struct fuse_attr){.ino = 2, .nlink = 1, .size = PAGE_BYTES, .mode = S_IFREG | 0666};
        *out = (struct fuse_entry_out){.nodeid = 2, .entry_valid = 600, .attr_valid = 600, .attr = attributes};
        return sizeof *out;
    }
    case FUSE_GETATTR:
    case FUSE_SETATTR: {
        struct fuse_attr_out *out = body;
        *out = (struct fuse_attr_out){.attr_valid = 600, .attr = attributes};
        return sizeof *out;
    }
    case FUSE_OPEN: {
        // The second one bypasses the page cache: to map it, what the first one's left dirty there is written back
        // first.
        struct fuse_open_out *out = body;
        *out = (struct fuse_open_out){.fh = ++*opens, .open_flags = FOPEN_KEEP_CACHE | (*opens > 1 ? FOPEN_DIRECT_IO : 0)};
        return sizeof *out;
    }
    case FUSE_READ: {
        const struct fuse_read_in *asked = arguments;
        return asked->offset >= PAGE_BYTES ? 0 : asked->size < PAGE_BYTES ? asked->size : PAGE_BYTES;
    }
    default:
        return 0;
    }
}

static void serve_fuse(int device) {
    static _Alignas(16) char in[1 << 20], out[2 * PAGE_BYTES];
    int opens = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        ssize_t bytes = read(device, in, sizeof in);
        if (bytes < 0 && (errno == EINTR || errno == ENOENT)) continue;
        if (bytes < 0) _exit(0);
        const struct fuse_in_header *asked = (const void *)in;
        if (asked->opcode == FUSE_WRITE) signs->locked = true;
        bool is_silent = asked->opcode == FUSE_WRITE || asked->opcode == FUSE_FORGET || asked->opcode == FUSE_BATCH_FORGET
                         || asked->opcode == FUSE_INTERRUPT || (is_silent_about_itself && asked->opcode == FUSE_STATFS);
        if (is_silent) continue;
        memset(out, 0, sizeof out);
        struct fuse_out_header *header = (void *)out;
        size_t length = sizeof *header + answer(asked, header + 1, &opens);
        *header = (struct fuse_out_header){.len = (uint32_t)length, .unique = asked->unique};
        if (write(device, out, length) < 0 && errno != ENOENT) _exit(1);
    }
}

// A descriptor whose mmap waits for the daemon. Exits with EXIT_NOT_HERE where there is no FUSE.
static int slow_to_map(void) {
    uid_t uid = getuid();
    gid_t gid = getgid();
    char map[64], directory[] = "/tmp/stalls.XXXXXX", options[128], path[64];
    // In this order: a device that was opened in another user namespace can't be mounted.
    int device = unshare(CLONE_NEWUSER | CLONE_NEWNS) ? -1 : open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (device < 0) {
        printf("no FUSE here: %s\n", strerror(errno));
        exit(EXIT_NOT_HERE);
    }
    put("/proc/self/setgroups", "deny");
    snprintf(map, sizeof map, "0 %u 1", uid);
    put("/proc/self/uid_map", map);
    snprintf(map, sizeof map, "0 %u 1", gid);
    put("/proc/self/gid_map", map);
    // The mount point goes away with the directory above it, which is this mount namespace's own.
    if (mount("none", "/tmp", "tmpfs", 0, NULL) || !mkdtemp(directory)) die("a directory");
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", device);
    if (mount("stalls", directory, "fuse", MS_NOSUID | MS_NODEV, options)) die("mount");
    if (!fork()) serve_fuse(device);
    close(device);
    snprintf(path, sizeof path, "%s/file", directory);
    int cached = open(path, O_RDWR | O_CLOEXEC), uncached = open(path, O_RDWR | O_CLOEXEC);
    if (cached < 0 || uncached < 0) die("%s", path);
    char *page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, cached, 0);
    if (page == MAP_FAILED) die("mmap");
    page[0] = 1;
    fuse_page = page;
    return uncached;
}

// ---- two that share their memory

static int slow_fd;
static char *large;
static size_t large_bytes;

static int hold_by_fuse(void *unused) {
    (void)unused;
    (void)!mmap(NULL, PAGE_BYTES, PROT_READ, MAP_PRIVATE, slow_fd, 0);
    _exit(0);
}

static int hold_by_mprotect(void *unused) {
    (void)unused;
    for (int protection = PROT_NONE;; protection = protection == PROT_NONE ? PROT_READ : PROT_NONE) {
        signs->locked = true;
        if (mprotect(large, large_bytes, protection)) _exit(1);
        signs->locked = false;
        usleep(200);
    }
}

static char *const nothing[] = {NULL};
static char *const arguments_of_true[] = {"true", NULL};

static int run_another(void *unused) {
    (void)unused;
    while (!signs->locked) {}
    connect_some();
    signs->execing = true;
    execve("/bin/true", arguments_of_true, nothing);
    _exit(1);
}

// A thread that runs while another holds the mmap lock must not fault: it makes every call, and touches every page,
// before.
static void touch_all(void) {
    int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    (void)!connect(-1, (const void *)&address, sizeof address);
    close(sock);
    execve("/nonexistent", arguments_of_true, nothing);
    (void)!mmap(NULL, 0, PROT_READ, MAP_PRIVATE, slow_fd, 0);
    usleep(1);
}

// This process is the trick; the one that started it has memory of its own, and can speak.
static void be_stuck(bool by_fuse) {
    static char stacks[2][STACK_BYTES] __attribute__((aligned(16)));
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    memset(stacks, 1, sizeof stacks);
    if (by_fuse) {
        slow_fd = slow_to_map();
    } else {
        large_bytes = (size_t)2 << 30;
        large = mmap(NULL, large_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (large == MAP_FAILED) die("mmap");
        madvise(large, large_bytes, MADV_NOHUGEPAGE);
        for (size_t at = 0; at < large_bytes; at += PAGE_BYTES) (void)*(volatile char *)(large + at);
    }
    touch_all();
    int (*holder)(void *) = by_fuse ? hold_by_fuse : hold_by_mprotect;
    if (clone(holder, stacks[0] + STACK_BYTES, CLONE_VM | SIGCHLD, NULL) < 0) die("clone");
    do {
        int id = clone(run_another, stacks[1] + STACK_BYTES, CLONE_VM | SIGCHLD, NULL);
        if (id < 0) die("clone");
        waitpid(id, NULL, 0);
    } while (!by_fuse);
    _exit(0);
}

static int stuck(bool by_fuse) {
    signs = mmap(NULL, sizeof *signs, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (signs == MAP_FAILED) die("mmap");
    int id = fork(), status;
    if (!id) {
        setpgid(0, 0);
        be_stuck(by_fuse);
    }
    while (!ended && !signs->execing) {
        if (waitpid(id, &status, WNOHANG) == id) return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
        usleep(1000);
    }
    printf("in force\n");
    wait_for_end();
    kill(-id, SIGKILL);
    waitpid(id, NULL, 0);
    return 0;
}

// ---- a file whose faults are a daemon's

static int borrow_fuse(void) {
    struct by_hand hand;
    uint64_t segment;
    is_silent_about_itself = true;
    int id = fork();
    if (!id) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        slow_to_map();
        char *shared = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (!by_hand_open(&hand)) die("no session");
        if (by_hand_borrow(&hand, shared, PAGE_BYTES, &segment) == GOOD) printf("memory is borrowed\n");
        printf("in force\n");
        for (;;) {
            if (by_hand_borrow(&hand, fuse_page, PAGE_BYTES, &segment) == GOOD) die("a FUSE file was borrowed");
            printf("refused\n");
            usleep(10000);
        }
    }
    while (!ended) {
        int status;
        if (waitpid(id, &status, WNOHANG) == id) return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
        usleep(1000);
    }
    kill(id, SIGKILL);
    waitpid(id, NULL, 0);
    return 0;
}

// ---- the others

static int in_a_hurry(char **arguments, bool dies) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    // Given on as the time to end at.
    long until = atol(arguments[2]);
    char text[32];
    if (until < 10000) {
        printf("in force\n");
        until += now.tv_sec + 10000;
    }
    connects = 2;
    if (dies) {
        while (now.tv_sec + 10000 < until) {
            int id = fork();
            if (!id) {
                connect_some();
                _exit(0);
            }
            waitpid(id, NULL, 0);
            clock_gettime(CLOCK_MONOTONIC, &now);
        }
        return 0;
    }
    if (now.tv_sec + 10000 >= until) return 0;
    connect_some();
    snprintf(text, sizeof text, "%ld", until);
    execl("/proc/self/exe", arguments[0], arguments[1], text, NULL);
    die("exec");
}

static struct ibv_context *device(void) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    if (!context) die("no device");
    return context;
}

static int idle(void) {
    static char memory[1 << 20] __attribute__((aligned(4096)));
    struct ibv_pd *pd = ibv_alloc_pd(device());
    if (!pd || !ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)) die("a region");
    printf("in force\n");
    wait_for_end();
    return 0;
}

static int victim(void) {
    struct ibv_context *context = device();
    printf("ready\n");
    for (unsigned count = 1; !ended; count++) {
        struct ibv_pd *pd = ibv_alloc_pd(context);
        if (!pd || ibv_dealloc_pd(pd)) die("a control verb failed");
        if (count % 100 == 0) printf(".\n");
        usleep(500);
    }
    printf("all answered\n");
    return ibv_close_device(context);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGTERM, end);
    signal(SIGALRM, end);
    // Others can't even look at a process that is stuck: it does not stay so, whatever becomes of the test.
    alarm(RUN_SECONDS_MAX);
    const char *path = getenv("FREEFLOW_SOCKET");
    address.sun_family = AF_UNIX;
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path ? path : "/run/freeflow/router.sock");
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "victim")) alarm(0);
    connects = argc > 2 ? atoi(argv[2]) : 0;
    if (!strcmp(what, "fuse") || !strcmp(what, "mprotect")) return stuck(!strcmp(what, "fuse"));
    if (argc > 2 && (!strcmp(what, "exec-loop") || !strcmp(what, "dies"))) return in_a_hurry(argv, !strcmp(what, "dies"));
    if (!strcmp(what, "borrow")) return borrow_fuse();
    if (!strcmp(what, "idle")) return idle();
    if (!strcmp(what, "victim")) return victim();
    if (!strcmp(what, "once")) return ibv_close_device(device());
    if (!strcmp(what, "connect")) {
        connect_some();
        printf("in force\n");
        wait_for_end();
        return 0;
    }
    return 2;
}
