/* The specification in code: one lane at a time, as docs/arithmetic.md says it. */
#include <math.h>
#include <string.h>

#include "bf12.h"
#include "kernels.h"
#include "mxfp4_table.h"

#define LANES 16

static float halving_tree(const float *lane)
{
    float a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; i++)
        b[i] = a[i] + a[i + 4];
    for (int i = 0; i < 2; i++)
        c[i] = b[i] + b[i + 2];
    return c[0] + c[1];
}

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Element k of one row of weights. The bytes may lie at any address. */
typedef float weight(const uint8_t *w, const uint8_t *scale, size_t k);

static float weight_mxfp4(const uint8_t *w, const uint8_t *scale, size_t k)
{
    return from_bits(mxfp4_f32[scale[k / 32]][k & 1 ? w[k / 2] >> 4 : w[k / 2] & 15]);
}

static float weight_bf16(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    uint16_t word;
    memcpy(&word, w + 2 * k, sizeof word);
    return from_bits((uint32_t)word << 16);
}

static float weight_f32(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    float value;
    memcpy(&value, w + 4 * k, sizeof value);
    return value;
}

static float weight_int8(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    return (float)(int8_t)w[k];
}

/* What the codes say; an exception is still to be put in its place. */
static float weight_bf12(const uint8_t *w, const uint8_t *base, size_t k)
{
    const uint8_t *group = w + k / BF12_GROUP * BF12_BYTES;
    const size_t column = k % BF12_GROUP;
    const uint32_t code = group[column], offsets = group[BF12_GROUP + column % 16];
    const uint32_t exponent = (*base - (column < 16 ? offsets & 15 : offsets >> 4)) & 255;
    return from_bits((code & 128) << 24 | exponent << 23 | (code & 127) << 16);
}

static inline __attribute__((always_inline)) void dots(const struct dots *d, weight *value)
{
    for (size_t j = 0; j < d->n; j++) {
        const uint8_t *w = (const uint8_t *)d->w + j * d->w_stride;
        const uint8_t *scale = d->scale ? (const uint8_t *)d->scale + j * d->scale_stride : NULL;
        for (size_t r = 0; r < d->rows; r++) {
            const float *x = d->x + r * d->x_stride;
            float lane[LANES] = {0};
            for (size_t k = 0; k < d->k; k++)
                lane[k % LANES] = fmaf(value(w, scale, k), x[k], lane[k % LANES]);
            d->out[r * d->out_stride + j] = halving_tree(lane);
        }
    }
}

static void dots_mxfp4(const struct dots *d, void *scratch)
{
    (void)scratch;
    dots(d, weight_mxfp4);
}

static void dots_bf16(const struct dots *d, void *scratch)
{
    (void)scratch;
    dots(d, weight_bf16);
}

static void dots_f32(const struct dots *d, void *scratch)
{
    (void)scratch;
    dots(d, weight_f32);
}

static void dots_int8(const struct dots *d, void *scratch)
{
    (void)scratch;
    dots(d, weight_int8);
    for (size_t j = 0; j < d->n; j++) {
        float scale = weight_f32(d->scale, NULL, j);
        for (size_t r = 0; r < d->rows; r++)
            d->out[r * d->out_stride + j] *= scale;
    }
}

static void dots_bf12(const struct dots *d, void *scratch)
{
    (void)scratch;
    for (size_t j = 0; j < d->n; j++) {
        const uint8_t *w = (const uint8_t *)d->w + j * d->w_stride, *base = (const uint8_t *)d->scale + j;
        for (size_t r = 0; r < d->rows; r++) {
            const float *x = d->x + r * d->x_stride;
            struct bf12_exceptions exceptions = bf12_exceptions(d, j);
            float lane[LANES] = {0};
            for (size_t k = 0; k < d->k; k++) {
                float value = weight_bf12(w, base, k);
                bf12_patch(&exceptions, &value, k, k + 1);
                lane[k % LANES] = fmaf(value, x[k], lane[k % LANES]);
            }
            d->out[r * d->out_stride + j] = halving_tree(lane);
        }
    }
}

const struct matmul_kernels matmul_scalar = {dots_mxfp4, dots_bf16, dots_f32, dots_int8, dots_bf12};
