// An MPI program of two ranks that measures, with buffers from malloc; rank 0 prints a line for each figure. Whether
// bytes arrive is mpi.c's business.
//
//   mpi_speed SHARE            (one of SHARE iterations is made)
//
//   pingpong BYTES US          half a round trip, the median of ten parts of the run
//   stream BYTES MB/S          windows of 16 messages, each answered once
//   allreduce BYTES US         of doubles
//   put BYTES US, get BYTES US one operation and its flush; the other rank only waits in a barrier
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PARTS 10
#define WINDOW 16
#define BYTES_MAX ((size_t)4 << 20)

static int rank, peer;
static long share = 1;
static char *out, *in;
static MPI_Win window;

static void *allocated(size_t bytes) {
    void *memory = malloc(bytes);
    if (memory == NULL)
        MPI_Abort(MPI_COMM_WORLD, 2);
    return memset(memory, 1, bytes);
}

static void pingpong(size_t bytes) {
    if (rank == 0) {
        MPI_Send(out, (int)bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
        MPI_Recv(in, (int)bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
        MPI_Recv(in, (int)bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(out, (int)bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
    }
}

static void stream(size_t bytes) {
    MPI_Request requests[WINDOW];
    char answer = 0;
    for (int number = 0; number < WINDOW; number++)
        if (rank == 0)
            MPI_Isend(out, (int)bytes, MPI_BYTE, peer, 2, MPI_COMM_WORLD, &requests[number]);
        else
            MPI_Irecv(in, (int)bytes, MPI_BYTE, peer, 2, MPI_COMM_WORLD, &requests[number]);
    MPI_Waitall(WINDOW, requests, MPI_STATUSES_IGNORE);
    if (rank == 0)
        MPI_Recv(&answer, 1, MPI_BYTE, peer, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    else
        MPI_Send(&answer, 1, MPI_BYTE, peer, 3, MPI_COMM_WORLD);
}

static void allreduce(size_t bytes) {
    MPI_Allreduce(out, in, (int)(bytes / sizeof(double)), MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

static void put(size_t bytes) {
    if (rank != 0)
        return;
    MPI_Put(out, (int)bytes, MPI_BYTE, peer, 0, (int)bytes, MPI_BYTE, window);
    MPI_Win_flush(peer, window);
}

static void get(size_t bytes) {
    if (rank != 0)
        return;
    MPI_Get(in, (int)bytes, MPI_BYTE, peer, 0, (int)bytes, MPI_BYTE, window);
    MPI_Win_flush(peer, window);
}

static int by_size(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

// The median over parts of the run, microseconds for one `step`.
static double median_us(void (*step)(size_t), size_t bytes, long count) {
    double parts[PARTS];
    long each = count / share / PARTS + 1;
    memset(out, 0, bytes);
    for (long warm = 0; warm < each; warm++)
        step(bytes);
    for (int part = 0; part < PARTS; part++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begun = MPI_Wtime();
        for (long number = 0; number < each; number++)
            step(bytes);
        parts[part] = (MPI_Wtime() - begun) * 1e6 / (double)each;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    qsort(parts, PARTS, sizeof parts[0], by_size);
    return parts[PARTS / 2];
}

static void say(const char *name, size_t bytes, double figure) {
    if (rank == 0) {
        printf("%s %zu %.3f\n", name, bytes, figure);
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    static const struct {
        size_t bytes;
        long count;
    } messages[] = {{8, 100000}, {1 << 10, 100000}, {64 << 10, 10000}, {1 << 20, 1000}, {4 << 20, 300}};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    peer = 1 - rank;
    if (argc > 1)
        share = atol(argv[1]);
    out = allocated(BYTES_MAX);
    in = allocated(BYTES_MAX);
    for (size_t number = 0; number < sizeof messages / sizeof messages[0]; number++)
        say("pingpong", messages[number].bytes, median_us(pingpong, messages[number].bytes, messages[number].count) / 2);
    say("stream", 1 << 20, WINDOW * (double)(1 << 20) / median_us(stream, 1 << 20, 200));
    say("allreduce", 8, median_us(allreduce, 8, 50000));
    say("allreduce", 1 << 20, median_us(allreduce, 1 << 20, 500));
    void *exposed = allocated(BYTES_MAX);
    MPI_Win_create(exposed, (MPI_Aint)BYTES_MAX, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
    MPI_Win_lock_all(0, window);
    say("put", 8, median_us(put, 8, 50000));
    say("put", 1 << 20, median_us(put, 1 << 20, 1000));
    say("get", 8, median_us(get, 8, 50000));
    say("get", 1 << 20, median_us(get, 1 << 20, 1000));
    MPI_Win_unlock_all(window);
    MPI_Win_free(&window);
    free(exposed);
    free(out);
    free(in);
    return MPI_Finalize();
}
