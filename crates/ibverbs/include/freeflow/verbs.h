/* SPDX-License-Identifier: Apache-2.0
 *
 * FreeFlow's own additions to libibverbs. They stand in FreeFlow's libibverbs.so.1 under the version node FREEFLOW_1.0;
 * a program that should also run elsewhere looks for them with dlsym().
 */
#ifndef FREEFLOW_VERBS_H
#define FREEFLOW_VERBS_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Allocates memory that the router can reach by itself: transfers between such memory cost one copy, and no process is
 * woken for it. Memory regions may be registered over it with ibv_reg_mr(), in any context and protection domain of the
 * process, in whole or in part, and it can be used like any other memory.
 *
 * The memory is whole pages, aligned to a page. Fresh memory is zero, reused memory is not. A child of fork() shares it
 * with its parent, like any MAP_SHARED mapping; the child can't free what its parent allocated.
 *
 * Returns NULL and sets errno if it can't: ENODEV, no router answers; ENOMEM, a limit of the vNIC is reached; EINVAL,
 * the size is beyond the address space; EIO, the router went away.
 */
void *ibv_malloc(size_t size);

/* Frees memory that ibv_malloc() gave. Deregister the memory regions over it before. NULL is ignored.
 */
void ibv_free(void *memory);

#ifdef __cplusplus
}
#endif

#endif /* FREEFLOW_VERBS_H */
