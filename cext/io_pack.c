#include "io_pack.h"
#include "fpenv.h"

#include <string.h>

#define EXPONENT_MASK 0xff
#define WIDEST_OFFSET 15

static unsigned exponent_of(uint16_t bits) { return bits >> 7 & EXPONENT_MASK; }

/* The largest weight without its sign: of 15 bits, exponent first, so one signed maximum a weight. */
static uint16_t largest_magnitude(const uint16_t *row, size_t k)
{
    int16_t largest = 0;
    for (size_t c = 0; c < k; c++) {
        int16_t magnitude = (int16_t)(row[c] & 0x7fff);
        largest = magnitude > largest ? magnitude : largest;
    }
    return (uint16_t)largest;
}

/* The least biased exponent that four bits below the base can say; 0 belongs to zeros and subnormal numbers. */
static uint16_t least_exponent(unsigned base) { return base > WIDEST_OFFSET ? (uint16_t)(base - WIDEST_OFFSET) : 1; }

static uint32_t count_exceptions(const uint16_t *row, size_t k, uint16_t least)
{
    uint32_t count = 0;
    for (size_t c = 0; c < k; c += BF12_COLUMNS) {
        uint16_t here = 0; /* narrow, so that a vector counts many at once */
        for (size_t i = 0; i < BF12_COLUMNS; i++)
            here = (uint16_t)(here + ((uint16_t)(row[c + i] >> 7 & EXPONENT_MASK) < least));
        count += here;
    }
    return count;
}

void bf12_measure(const struct bf12 *to, const uint16_t *bits)
{
    to->starts[0] = 0;
    for (size_t r = 0; r < to->n; r++) {
        const uint16_t *row = bits + r * to->k;
        unsigned base = exponent_of(largest_magnitude(row, to->k));
        to->base[r] = (uint8_t)base;
        to->starts[r + 1] = to->starts[r] + count_exceptions(row, to->k, least_exponent(base));
    }
}

/* The 48 bytes of 32 weights; an exception's offset is 0. Returns whether there is one. */
static int pack_group(uint8_t *codes, const uint16_t *weights, unsigned base, uint16_t least)
{
    uint8_t offsets[BF12_COLUMNS];
    uint16_t low = 0;
    for (size_t c = 0; c < BF12_COLUMNS; c++)
        codes[c] = (uint8_t)((weights[c] >> 8 & 0x80) | (weights[c] & 0x7f));
    for (size_t c = 0; c < BF12_COLUMNS; c++) {
        uint16_t exponent = weights[c] >> 7 & EXPONENT_MASK;
        uint16_t below = (uint16_t)-(exponent < least);
        offsets[c] = (uint8_t)((base - exponent) & (uint16_t)~below);
        low |= below;
    }
    for (size_t b = 0; b < BF12_COLUMNS / 2; b++)
        codes[BF12_COLUMNS + b] = (uint8_t)((offsets[b] & 15) | offsets[BF12_COLUMNS / 2 + b] << 4);
    return low != 0;
}

size_t bf12_pack(const struct bf12 *to, const uint16_t *bits)
{
    const size_t row_nbytes = to->k / BF12_COLUMNS * BF12_GROUP_NBYTES;
    if (to->n && to->starts[0] != 0)
        return 0;
    for (size_t r = 0; r < to->n; r++) {
        const uint16_t *row = bits + r * to->k;
        const unsigned base = to->base[r];
        const uint16_t least = least_exponent(base);
        uint32_t at = to->starts[r];
        const uint32_t end = to->starts[r + 1];
        uint8_t *codes = to->codes + r * row_nbytes;
        if (base != exponent_of(largest_magnitude(row, to->k)) || end < at || end > to->starts[to->n])
            return r;
        for (size_t c = 0; c < to->k; c += BF12_COLUMNS, codes += BF12_GROUP_NBYTES) {
            if (!pack_group(codes, row + c, base, least))
                continue;
            for (size_t i = c; i < c + BF12_COLUMNS; i++)
                if (exponent_of(row[i]) < least) {
                    if (at == end)
                        return r;
                    to->columns[at] = (uint16_t)i;
                    to->values[at++] = row[i];
                }
        }
        if (at != end)
            return r;
    }
    return to->n;
}

static void unpack_group(uint16_t *weights, const uint8_t *codes, unsigned base)
{
    for (size_t c = 0; c < BF12_COLUMNS; c++) {
        unsigned nibbles = codes[BF12_COLUMNS + c % (BF12_COLUMNS / 2)];
        unsigned offset = c < BF12_COLUMNS / 2 ? nibbles & 15 : nibbles >> 4;
        unsigned exponent = (base - offset) & EXPONENT_MASK;
        weights[c] = (uint16_t)((codes[c] & 0x80u) << 8 | exponent << 7 | (codes[c] & 0x7fu));
    }
}

size_t bf12_unpack(uint16_t *bits, const struct bf12 *from, size_t exceptions)
{
    const size_t groups = from->k / BF12_COLUMNS;
    const uint8_t *codes = from->codes;
    if (from->n && from->starts[0] != 0)
        return 0;
    if (from->n && from->starts[from->n] != exceptions)
        return from->n - 1;
    for (size_t r = 0; r < from->n; r++) {
        uint16_t *row = bits + r * from->k;
        const size_t at = from->starts[r], end = from->starts[r + 1];
        if (end < at || end > exceptions)
            return r;
        for (size_t g = 0; g < groups; g++, codes += BF12_GROUP_NBYTES)
            unpack_group(row + g * BF12_COLUMNS, codes, from->base[r]);
        for (size_t i = at; i < end; i++) {
            if (from->columns[i] >= from->k || (i > at && from->columns[i] <= from->columns[i - 1]))
                return r;
            row[from->columns[i]] = from->values[i];
        }
    }
    return from->n;
}

static float bf16_to_float(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Adding and taking away 1.5 * 2^23 rounds to the nearest whole number, ties to even, and needs no library. */
#define ROUNDER 12582912.0f

static void int8_row(int8_t *q, const uint16_t *row, size_t k, float scale)
{
    for (size_t c = 0; c < k; c++) {
        float whole = (bf16_to_float(row[c]) / scale + ROUNDER) - ROUNDER;
        whole = whole > 127.0f ? 127.0f : whole;
        whole = whole < -127.0f ? -127.0f : whole;
        q[c] = (int8_t)whole;
    }
}

size_t int8_pack(int8_t *q, float *scale, const uint16_t *bits, size_t n, size_t k)
{
    const fpenv found = fpenv_enter(); /* subnormal weights and scales count */
    size_t r = 0;
    for (; r < n; r++) {
        const uint16_t *row = bits + r * k;
        const uint16_t largest = largest_magnitude(row, k);
        if (exponent_of(largest) == EXPONENT_MASK)
            break;
        scale[r] = bf16_to_float(largest) / 127.0f;
        if (largest == 0)
            memset(q + r * k, 0, k);
        else
            int8_row(q + r * k, row, k, scale[r]);
    }
    fpenv_leave(found);
    return r;
}
