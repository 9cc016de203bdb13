/* Encodings of BF16 matrices in packs: bf12 and int8. docs/packs.md describes them, cext/bf12.h as the kernels see it. */
#ifndef DELTAFIN_IO_PACK_H
#define DELTAFIN_IO_PACK_H

#include <stddef.h>
#include <stdint.h>

#define BF12_COLUMNS 32       /* weights in a group */
#define BF12_GROUP_NBYTES 48  /* and the bytes of its codes */
#define BF12_MOST_COLUMNS 65536

/* A matrix [n, k] in bf12; k is a multiple of BF12_COLUMNS, at most BF12_MOST_COLUMNS. */
struct bf12 {
    size_t n, k;
    uint8_t *codes;    /* [n, k / 32 * 48] */
    uint8_t *base;     /* [n] the largest biased exponent of the row */
    uint32_t *starts;  /* [n + 1] row r has the exceptions starts[r] .. starts[r + 1] */
    uint16_t *columns; /* [starts[n]] ascending within a row */
    uint16_t *values;  /* [starts[n]] what stands there, as BF16 */
};

/* Fills in base and starts of bits[n, k]; the caller sees to it that n * k fits 32 bits. */
void bf12_measure(const struct bf12 *to, const uint16_t *bits);

/* Fills in codes, columns and values, once base and starts are as bf12_measure left them. Returns n, or the first row
 * whose base or starts are not those of bits; nothing is written outside the arrays. */
size_t bf12_pack(const struct bf12 *to, const uint16_t *bits);

/* Fills bits[n, k]. `exceptions` is the length of columns and values. Returns n, or the first row whose starts or columns
 * are malformed. */
size_t bf12_unpack(uint16_t *bits, const struct bf12 *from, size_t exceptions);

/* Rounds each row to q * scale: scale = largest magnitude / 127, q = nearest (ties to even) in -127 .. 127; a row of zeros
 * has scale 0. q[n, k], scale[n]. Returns n, or the first row that holds an infinity or NaN. */
size_t int8_pack(int8_t *q, float *scale, const uint16_t *bits, size_t n, size_t k);

#endif
