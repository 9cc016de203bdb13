/* What a core can do at most: streaming reads and multiply-adds in registers, for df-bench. */
#ifndef DELTAFIN_LIMIT_H
#define DELTAFIN_LIMIT_H

#include <stddef.h>
#include <stdint.h>

/* Reads nbytes, with software prefetches that many bytes ahead (0: none; which is faster depends on the processor). The
 * result keeps the compiler from leaving it out. */
uint64_t limit_read(const char *isa, const uint8_t *from, size_t nbytes, size_t ahead);

/* Does steps rounds of independent multiply-adds; returns how many floating-point operations a round is. */
size_t limit_fma(const char *isa, size_t steps);

#endif
