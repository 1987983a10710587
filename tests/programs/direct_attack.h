// Attacks of a process with the descriptor and the mapping of memory that it was granted once.
#ifndef FREEFLOW_TEST_DIRECT_ATTACK_H
#define FREEFLOW_TEST_DIRECT_ATTACK_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PAGE = 4096, PAGES = 16, BYTES = PAGES * PAGE };
// Where in each page the two enemies write while they may; the owner's counter is the page's first word.
enum { ATTACKER_AT = 1024, COLLUDER_AT = 2048, OWNER_AT = 3072 };

struct booty {
    int fd;
    uint8_t *memory; // NULL: not mapped
    size_t bytes;
    size_t first; // where the pages begin that `hammer` writes
    unsigned at;  // and where in each
    pthread_t hammer;
    bool is_hammering, shall_stop;
};

// Results of the attempts.
struct outcome {
    uint32_t seen;     // the owner's new words were there
    uint32_t resealed; // the file could be cut, grown or sealed
    uint32_t written;  // ways by which something was written, into whatever
    uint32_t refused;
};

bool booty_map(struct booty *booty, int fd, size_t bytes, bool writable);
void booty_hammer(struct booty *booty);
void booty_stop(struct booty *booty);
// Whether the file's size or seals could be changed.
bool booty_reseal(const struct booty *booty);
bool sees(const struct booty *booty, uint64_t word);
// Everything that there is to try. `secret` is a word that the owner has written since the right ended.
struct outcome booty_try_all(const struct booty *booty, uint64_t secret);
struct outcome outcome_sum(struct outcome a, struct outcome b);

// A process in another container that gets the descriptor and does the same, by the socket of this path.
int colluder_run(const char *path);
int colluder_meet(const char *path);
bool colluder_give(int sock, const struct booty *booty);
struct outcome colluder_try(int sock, uint64_t secret);
#endif
