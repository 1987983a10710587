// Common parts of the MPI program: a pattern for each byte, and an end that names the first wrong
// one.
#ifndef FREEFLOW_TEST_MPI_H
#define FREEFLOW_TEST_MPI_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

extern int rank, size;
extern uint64_t bytes_checked;

// The same sequence on every rank, so that sizes and orders agree without a message.
uint64_t common_random(void);
// The byte at `index` of the stream `stream`.
uint8_t pattern(uint64_t stream, size_t index);
void fill(void *to, uint64_t stream, size_t from, size_t bytes);
// Ends the job when a byte is not the pattern's; `what` and the stream go into the message.
void check(const void *data, uint64_t stream, size_t from, size_t bytes, const char *what);
void check_value(int64_t is, int64_t wanted, const char *what);

void two_sided(int round);
void datatypes(int round);
void collectives(int round);
void one_sided_bytes(int round);
void one_sided_aligned(int round);
void one_sided_values(int round);
void one_sided_swap(int round);

#endif
