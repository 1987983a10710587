// An MPI program that compares every byte it receives: messages of odd sizes, datatypes with gaps, collectives.
// One-sided operations are in mpi_windows.c.
//
//   mpi ROUNDS SEED PART…      (a round of each in turn: two-sided, datatypes, collectives, bytes, aligned, values,
//                              swap)
//
// Each rank ends with 0 and the last line of rank 0 is `right: N bytes`, or the job is aborted and the first wrong byte
// named.
#include "mpi.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int rank, size;
uint64_t bytes_checked;
static uint64_t random_state;

static uint64_t mix(uint64_t value) {
    value += 0x9e3779b97f4a7c15;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
}

uint64_t common_random(void) {
    return mix(random_state++);
}

uint8_t pattern(uint64_t stream, size_t index) {
    return mix(stream * 0x10001 + index / 8) >> (index % 8 * 8);
}

void fill(void *to, uint64_t stream, size_t from, size_t bytes) {
    for (size_t index = 0; index < bytes; index++)
        ((uint8_t *)to)[index] = pattern(stream, from + index);
}

static void wrong(const char *what, const char *text) {
    fprintf(stderr, "WRONG on rank %d: %s: %s\n", rank, what, text);
    fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, 3);
}

void check(const void *data, uint64_t stream, size_t from, size_t bytes, const char *what) {
    const uint8_t *is = data;
    size_t count = 0, first = 0;
    for (size_t index = 0; index < bytes; index++)
        if (is[index] != pattern(stream, from + index) && count++ == 0)
            first = index;
    bytes_checked += bytes;
    if (count == 0)
        return;
    char text[200];
    snprintf(text, sizeof text, "%zu of %zu bytes at %p, the first at %zu: is %02x, should be %02x", count, bytes, data,
             first, is[first], pattern(stream, from + first));
    wrong(what, text);
}

void check_value(int64_t is, int64_t wanted, const char *what) {
    bytes_checked += sizeof is;
    if (is == wanted)
        return;
    char text[80];
    snprintf(text, sizeof text, "is %lld, should be %lld", (long long)is, (long long)wanted);
    wrong(what, text);
}

#define MESSAGES 12
static const size_t SIZES[] = {0, 1, 7, 63, 65, 1000, 4095, 4097, 8193, 20011, 65535, 65537, 100003, 300007, 1048577};

// A ring both ways: messages of several sizes at once, matched by tag in another order than sent, in memory that is
// allocated for each and freed afterwards. The bytes around each must stay.
void two_sided(int round) {
    int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    uint8_t *in[MESSAGES], *out[MESSAGES];
    size_t bytes[MESSAGES], offset[MESSAGES];
    MPI_Request requests[2 * MESSAGES];
    for (int number = 0; number < MESSAGES; number++) {
        bytes[number] = SIZES[common_random() % (sizeof SIZES / sizeof *SIZES)];
        offset[number] = 1 + common_random() % 64;
        uint64_t stream = round * 1000 + number;
        out[number] = malloc(bytes[number] + 128);
        in[number] = malloc(bytes[number] + 128);
        fill(out[number] + offset[number], stream << 8 | rank, 0, bytes[number]);
        fill(in[number], 77, 0, bytes[number] + 128);
    }
    // Every other round the messages come before anyone wants them.
    for (int step = 0; step < 2 * MESSAGES; step++) {
        int receive = round % 2 ? step >= MESSAGES : step < MESSAGES;
        int number = receive ? MESSAGES - 1 - step % MESSAGES : step % MESSAGES;
        if (receive)
            MPI_Irecv(in[number] + offset[number], bytes[number], MPI_BYTE, previous, number, MPI_COMM_WORLD,
                      &requests[step]);
        else
            MPI_Isend(out[number] + offset[number], bytes[number], MPI_BYTE, next, number, MPI_COMM_WORLD,
                      &requests[step]);
    }
    MPI_Waitall(2 * MESSAGES, requests, MPI_STATUSES_IGNORE);
    for (int number = 0; number < MESSAGES; number++) {
        uint64_t stream = round * 1000 + number;
        size_t end = offset[number] + bytes[number];
        check(in[number], 77, 0, offset[number], "before a message");
        check(in[number] + offset[number], stream << 8 | previous, 0, bytes[number], "a message");
        check(in[number] + end, 77, end, 128 - offset[number], "behind a message");
        free(in[number]), free(out[number]);
    }
}

struct mixed {
    char first;
    double second;
    short third[3];
};

// Sends with one datatype and receives with it into other memory: gaps stay as they were.
static void with_type(MPI_Datatype type, int count, const char *what) {
    MPI_Aint lowest, extent, true_lowest, true_extent;
    MPI_Type_get_extent(type, &lowest, &extent);
    MPI_Type_get_true_extent(type, &true_lowest, &true_extent);
    int packed_bytes, position = 0;
    MPI_Type_size(type, &packed_bytes);
    packed_bytes *= count;
    size_t bytes = extent * count + true_extent;
    uint8_t *out = malloc(bytes), *in = malloc(bytes), *wanted = malloc(bytes), *packed = malloc(packed_bytes + 1);
    int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    fill(out, 500 + rank, 0, bytes);
    fill(in, 600, 0, bytes);
    MPI_Sendrecv(out, count, type, next, 5, in, count, type, previous, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    // The expected bytes: the gaps of `in`, and the sender's bytes where the type has any.
    uint8_t *theirs = malloc(bytes);
    fill(theirs, 500 + previous, 0, bytes);
    fill(wanted, 600, 0, bytes);
    MPI_Pack(theirs, count, type, packed, packed_bytes, &position, MPI_COMM_SELF);
    position = 0;
    MPI_Unpack(packed, packed_bytes, &position, wanted, count, type, MPI_COMM_SELF);
    for (size_t index = 0; index < bytes; index++)
        if (in[index] != wanted[index])
            check_value(in[index], wanted[index], what);
    bytes_checked += bytes;
    free(out), free(in), free(wanted), free(packed), free(theirs);
}

void datatypes(int round) {
    (void)round;
    MPI_Datatype vector, structure, resized, indexed;
    MPI_Type_vector(1 + common_random() % 5000, 3, 7, MPI_SHORT, &vector);
    MPI_Type_commit(&vector);
    with_type(vector, 1 + common_random() % 3, "a vector");
    int lengths[] = {1, 1, 3};
    MPI_Aint places[] = {offsetof(struct mixed, first), offsetof(struct mixed, second), offsetof(struct mixed, third)};
    MPI_Datatype types[] = {MPI_CHAR, MPI_DOUBLE, MPI_SHORT};
    MPI_Type_create_struct(3, lengths, places, types, &structure);
    MPI_Type_create_resized(structure, 0, sizeof(struct mixed), &resized);
    MPI_Type_commit(&resized);
    with_type(resized, 1 + common_random() % 20000, "a structure");
    int blocks[] = {1, 4001, 17}, starts[] = {3, 11, 5000};
    MPI_Type_indexed(3, blocks, starts, MPI_BYTE, &indexed);
    MPI_Type_commit(&indexed);
    with_type(indexed, 1 + common_random() % 40, "blocks");
    MPI_Type_free(&vector), MPI_Type_free(&structure), MPI_Type_free(&resized), MPI_Type_free(&indexed);
}

void collectives(int round) {
    size_t bytes = 1 + common_random() % 70000;
    uint8_t *out = malloc(bytes * size), *in = malloc(bytes * size);
    for (int to = 0; to < size; to++)
        fill(out + to * bytes, 700 + rank * 16 + to, 0, bytes);
    MPI_Alltoall(out, bytes, MPI_BYTE, in, bytes, MPI_BYTE, MPI_COMM_WORLD);
    for (int from = 0; from < size; from++)
        check(in + from * bytes, 700 + from * 16 + rank, 0, bytes, "all to all");
    int root = common_random() % size;
    if (rank == root)
        fill(in, 800 + round, 0, bytes);
    MPI_Bcast(in, bytes, MPI_BYTE, root, MPI_COMM_WORLD);
    check(in, 800 + round, 0, bytes, "broadcast");
    free(out), free(in);
    int count = 1 + common_random() % 20000;
    int64_t *mine = malloc(count * sizeof *mine), *sums = malloc(count * sizeof *sums);
    for (int index = 0; index < count; index++)
        mine[index] = (int64_t)index * (rank + 1) + round;
    MPI_Allreduce(mine, sums, count, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    for (int index = 0; index < count; index++)
        check_value(sums[index], (int64_t)index * size * (size + 1) / 2 + (int64_t)round * size, "a sum");
    free(mine), free(sums);
}

static const struct {
    const char *name;
    void (*function)(int);
} PARTS[] = {{"two-sided", two_sided},
             {"datatypes", datatypes},
             {"collectives", collectives},
             {"bytes", one_sided_bytes},
             {"aligned", one_sided_aligned},
             {"values", one_sided_values},
             {"swap", one_sided_swap}};

static void (*part(const char *name))(int) {
    for (size_t number = 0; number < sizeof PARTS / sizeof *PARTS; number++)
        if (strcmp(PARTS[number].name, name) == 0)
            return PARTS[number].function;
    wrong(name, "no such part");
    abort();
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    random_state = (argc > 2 ? strtoull(argv[2], NULL, 10) : 1) << 20;
    // Memory goes and comes with each buffer, and the parts take turns, as caches of registrations make mistakes there.
    mallopt(M_MMAP_THRESHOLD, 32768);
    for (int round = 0; round < rounds; round++)
        for (int number = 3; number < argc; number++)
            part(argv[number])(round);
    uint64_t sum = 0;
    MPI_Reduce(&bytes_checked, &sum, 1, MPI_UINT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("right: %llu bytes\n", (unsigned long long)sum);
        fflush(stdout);
    }
    return MPI_Finalize();
}
