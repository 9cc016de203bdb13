/* bf12: bf16 without loss in 12 bits a weight, but for a few exceptions that lie apart.
 *
 * A row of k weights (k a multiple of 32) has a base, the largest biased exponent in it, and for each group of 32 columns
 * 48 bytes: 32 of sign << 7 | mantissa, then 16 of exponent offsets, of column b in the low half of byte b and of column
 * 16 + b in the high half. The biased exponent is base - offset, modulo 256. What that cannot say (zeros, subnormal numbers,
 * exponents more than 15 below the base) is an exception, whose codes may say anything and are replaced before they are
 * multiplied. */
#ifndef DELTAFIN_BF12_H
#define DELTAFIN_BF12_H

#include <stdint.h>
#include <string.h>

#include "kernels.h"

#define BF12_GROUP 32 /* weights in a group */
#define BF12_BYTES 48 /* and its bytes */

/* The exceptions of one row that are still to come, in ascending columns. */
struct bf12_exceptions {
    const uint8_t *columns, *values; /* of the next one; u16 at any address */
    size_t left;
    size_t column;                   /* of the next one; SIZE_MAX after the last */
};

static inline size_t bf12_u16(const uint8_t *from)
{
    uint16_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline struct bf12_exceptions bf12_exceptions(const struct dots *d, size_t j)
{
    uint32_t starts[2];
    memcpy(starts, (const uint8_t *)d->starts + j * sizeof *starts, sizeof starts);
    const uint8_t *columns = (const uint8_t *)d->columns + 2 * (size_t)starts[0];
    const size_t left = starts[1] - starts[0];
    return (struct bf12_exceptions){
        .columns = columns,
        .values = (const uint8_t *)d->values + 2 * (size_t)starts[0],
        .left = left,
        .column = left ? bf12_u16(columns) : SIZE_MAX,
    };
}

/* The first column of the next group in which one of some rows has an exception, or k. */
static inline size_t bf12_patched(const struct bf12_exceptions *rows, size_t count, size_t k)
{
    for (size_t i = 0; i < count; i++)
        k = rows[i].column < k ? rows[i].column / BF12_GROUP * BF12_GROUP : k;
    return k;
}

/* Puts the exceptions before column `until` where they belong; `to` holds the decoded weights from column `from` on. */
static inline void bf12_patch(struct bf12_exceptions *e, float *to, size_t from, size_t until)
{
    while (e->column < until) {
        const uint32_t bits = (uint32_t)bf12_u16(e->values) << 16;
        memcpy(to + (e->column - from), &bits, sizeof bits);
        e->columns += 2;
        e->values += 2;
        e->left--;
        e->column = e->left ? bf12_u16(e->columns) : SIZE_MAX;
    }
}

#endif
