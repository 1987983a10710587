// Cases of the hint: programs whose requests go on taking the slow path, and programs that have nothing to hear of it.
#define _GNU_SOURCE
#include "remap.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MANY = 3000, FEW = 300 };

// WRITEs into a region: so many at least, and for so long at least, since the router's commands come on the way.
static void use_for(uint8_t *memory, size_t bytes, unsigned uses, double seconds) {
    uint8_t *other = private_pages(PAGE, 1);
    struct ibv_mr *from = reg(other, PAGE), *to = reg(memory, bytes);
    double begin = now_us();
    for (unsigned i = 0; i < uses || now_us() - begin < seconds * 1e6; i++) {
        rdma(IBV_WR_RDMA_WRITE, from, other, to, memory, bytes);
        if (i >= uses) usleep(1000);
    }
    need(!memcmp(memory, other, bytes));
    dereg(to);
    dereg(from);
    munmap(other, PAGE);
}

// Memory that no registration moves.
static uint8_t *executable_pages(void) {
    uint8_t *memory = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(memory != MAP_FAILED);
    return memory;
}

void case_hint(void) {
    uint8_t *memory = executable_pages();
    use_for(memory, PAGE, MANY, 1);
    pid_t child = fork();
    if (!child) {
        open_all();
        use_for(memory, PAGE, MANY, 1);
        _exit(0);
    }
    int status;
    need(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    use_for(memory + PAGE, PAGE, MANY, 0);
}

// Too little to matter.
void case_hint_little(void) { use_for(executable_pages(), PAGE, FEW, 0); }

void case_hint_ordinary(void) { use_for(private_pages(4 * PAGE, 1), PAGE, MANY, 1); }

// Pages that only the command thread can share.
void case_hint_partial(void) { use_for(private_pages(4 * PAGE, 1) + 100, 1000, MANY, 1); }

// The descriptor of stderr has become another file.
void case_hint_reused(void) {
    FILE *file = tmpfile();
    struct stat about;
    need(file && dup2(fileno(file), STDERR_FILENO) == STDERR_FILENO);
    use_for(executable_pages(), PAGE, MANY, 1);
    need(fstat(STDERR_FILENO, &about) == 0 && about.st_size == 0);
    need(close(STDERR_FILENO) == 0);
    use_for(executable_pages(), PAGE, MANY, 1);
    fclose(file);
}
