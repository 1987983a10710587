// How the C tests end that have nothing more to try: one line, with errno.
#ifndef FREEFLOW_TEST_DIE_H
#define FREEFLOW_TEST_DIE_H

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((format(printf, 1, 2), noreturn)) static inline void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int number = errno;
    fflush(stdout);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, " (errno %d: %s)\n", number, strerror(number));
    va_end(arguments);
    exit(1);
}

#endif
