/* Functions that programs took from glibc's static part (libc_nonshared.a) in version 2.17: stat and its relatives,
   which libc.so.6 has since 2.33 only, and pthread_atfork. The functions behind them are in every glibc. On x86-64 stat
   and stat64 are the same. */
#define STAT_VERSION 1 /* of struct stat: the kernel's */
#define HIDDEN __attribute__((visibility("hidden")))

struct stat;
typedef void handler(void);

extern int __xstat64(int version, const char *path, struct stat *result);
extern int __lxstat64(int version, const char *path, struct stat *result);
extern int __fxstat64(int version, int fd, struct stat *result);
extern int __fxstatat64(int version, int folder, const char *path, struct stat *result, int flags);
extern int __register_atfork(handler *prepare, handler *parent, handler *child, void *owner);
extern HIDDEN void *__dso_handle; /* this library, by the compiler's crtbeginS.o */

HIDDEN int stat64(const char *path, struct stat *result) { return __xstat64(STAT_VERSION, path, result); }
HIDDEN int lstat64(const char *path, struct stat *result) { return __lxstat64(STAT_VERSION, path, result); }
HIDDEN int fstat64(int fd, struct stat *result) { return __fxstat64(STAT_VERSION, fd, result); }
HIDDEN int fstatat64(int folder, const char *path, struct stat *result, int flags) {
    return __fxstatat64(STAT_VERSION, folder, path, result, flags);
}

HIDDEN int stat(const char *path, struct stat *result) { return stat64(path, result); }
HIDDEN int lstat(const char *path, struct stat *result) { return lstat64(path, result); }
HIDDEN int fstat(int fd, struct stat *result) { return fstat64(fd, result); }
HIDDEN int fstatat(int folder, const char *path, struct stat *result, int flags) {
    return fstatat64(folder, path, result, flags);
}

HIDDEN int pthread_atfork(handler *prepare, handler *parent, handler *child) {
    return __register_atfork(prepare, parent, child, &__dso_handle);
}
