/* Matrix kernels for NEON: the 16 lanes of a dot product are four registers, a quarter each.
 *
 * Few rows: weights are decoded in registers and used at once. Many rows: some rows of weights are decoded into the
 * cache, one stretch of k at a time, and multiplied in tiles; a tile's lanes are kept in scratch between stretches. A tile
 * does one quarter of the lanes for the whole stretch after the other, so that four times as many dot products fit. */
#if defined(__aarch64__)

#include <arm_neon.h>
#include <string.h>

#include "bf12.h"
#include "kernels.h"
#include "mxfp4_table.h"

#define INLINE static inline __attribute__((always_inline))

#define LANES 16
#define QUARTERS 4
#define FEW 4       /* rows up to which weights are decoded in registers */
#define FEW_N 4     /* rows of weights at a time then, at most */
#define TILE_ROWS 4 /* a tile: a quarter of the lanes of 4 rows by 6 outputs in 24 registers */
#define TILE_N 6
#define STRETCH 512 /* of k: six decoded rows of that length fill 12 KB of the first-level cache */
#define AHEAD 14336 /* bytes of weights that prefetches run ahead, in whole groups of outputs */
#define MOST_ROWS 64

typedef struct {
    float32x4_t quarter[QUARTERS];
} lanes; /* an array of these is an array of registers, the quarters in turn */

INLINE lanes zero(void)
{
    const float32x4_t z = vdupq_n_f32(0);
    return (lanes){{z, z, z, z}};
}

INLINE lanes load(const float *from)
{
    return (lanes){{vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)}};
}

INLINE void store(float *to, lanes v)
{
    for (int q = 0; q < QUARTERS; q++)
        vst1q_f32(to + 4 * q, v.quarter[q]);
}

INLINE lanes fma16(lanes a, lanes b, lanes c)
{
    for (int q = 0; q < QUARTERS; q++)
        c.quarter[q] = vfmaq_f32(c.quarter[q], a.quarter[q], b.quarter[q]);
    return c;
}

/* The first `count` of 16 floats, then `rest`. */
INLINE lanes load_some(const float *from, size_t count, float rest)
{
    float some[LANES];
    for (size_t i = 0; i < LANES; i++)
        some[i] = rest;
    memcpy(some, from, count * sizeof *some);
    return load(some);
}

/* ---- 16 weights, at any address ----
 * A tail load gives 1 to 15; the others are -0, which times an x of +0 leaves any lane as it was. */

typedef lanes load_weights(const uint8_t *w, const uint8_t *scale, size_t k);
typedef lanes load_tail(const uint8_t *w, size_t k, size_t count);

INLINE lanes widen_bf16(uint16x8_t first, uint16x8_t second)
{
    return (lanes){{
        vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(first), 16)),
        vreinterpretq_f32_u32(vshll_high_n_u16(first, 16)),
        vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(second), 16)),
        vreinterpretq_f32_u32(vshll_high_n_u16(second, 16)),
    }};
}

/* Two table look-ups give the halves of bf16. */
INLINE lanes load_mxfp4(const uint8_t *w, const uint8_t *scale, size_t k)
{
    const uint8x8_t packed = vld1_u8(w + k / 2);
    const uint8x8x2_t pairs = vzip_u8(vand_u8(packed, vdup_n_u8(15)), vshr_n_u8(packed, 4));
    const uint8x16_t codes = vcombine_u8(pairs.val[0], pairs.val[1]);
    const uint8_t(*table)[16] = mxfp4_bf16[scale[k / 32]];
    const uint8x16_t low = vqtbl1q_u8(vld1q_u8(table[0]), codes), high = vqtbl1q_u8(vld1q_u8(table[1]), codes);
    return widen_bf16(vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high)));
}

INLINE lanes load_bf16(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    return widen_bf16(vreinterpretq_u16_u8(vld1q_u8(w + 2 * k)), vreinterpretq_u16_u8(vld1q_u8(w + 2 * k + 16)));
}

INLINE lanes load_f32(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    lanes v;
    for (size_t q = 0; q < QUARTERS; q++)
        v.quarter[q] = vreinterpretq_f32_u8(vld1q_u8(w + 4 * k + 16 * q));
    return v;
}

INLINE lanes load_int8(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(w + k));
    const int16x8_t first = vmovl_s8(vget_low_s8(bytes)), second = vmovl_high_s8(bytes);
    return (lanes){{
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(first))),
        vcvtq_f32_s32(vmovl_high_s16(first)),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(second))),
        vcvtq_f32_s32(vmovl_high_s16(second)),
    }};
}

/* The bits that an exponent of a bf12 row puts into the upper and into the lower byte of a bf16, for each offset. */
struct exponents {
    uint8x16_t upper, lower;
};

INLINE struct exponents exponents_bf12(uint8_t base)
{
    static const uint8_t offsets[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint8x16_t exponents = vsubq_u8(vdupq_n_u8(base), vld1q_u8(offsets));
    return (struct exponents){vshrq_n_u8(exponents, 1), vshlq_n_u8(exponents, 7)};
}

INLINE lanes weights_bf12(uint8x16_t codes, uint8x16_t offsets, struct exponents exponents)
{
    const uint8x16_t sign = vdupq_n_u8(0x80);
    const uint8x16_t upper = vbslq_u8(sign, codes, vqtbl1q_u8(exponents.upper, offsets));
    const uint8x16_t lower = vbslq_u8(sign, vqtbl1q_u8(exponents.lower, offsets), codes);
    return widen_bf16(vreinterpretq_u16_u8(vzip1q_u8(lower, upper)), vreinterpretq_u16_u8(vzip2q_u8(lower, upper)));
}

/* What the codes of a group of 32 say. */
INLINE void load_bf12(const uint8_t *group, struct exponents exponents, lanes weights[2])
{
    const uint8x16_t pairs = vld1q_u8(group + 32);
    weights[0] = weights_bf12(vld1q_u8(group), vandq_u8(pairs, vdupq_n_u8(15)), exponents);
    weights[1] = weights_bf12(vld1q_u8(group + 16), vshrq_n_u8(pairs, 4), exponents);
}

INLINE lanes or_minus_zero(lanes v, size_t count)
{
    float some[LANES];
    store(some, v);
    for (size_t i = count; i < LANES; i++)
        some[i] = -0.0f;
    return load(some);
}

static lanes tail_bf16(const uint8_t *w, size_t k, size_t count)
{
    uint8_t bytes[2 * LANES] = {0};
    memcpy(bytes, w + 2 * k, 2 * count);
    return or_minus_zero(load_bf16(bytes, NULL, 0), count);
}

static lanes tail_f32(const uint8_t *w, size_t k, size_t count)
{
    uint8_t bytes[4 * LANES] = {0};
    memcpy(bytes, w + 4 * k, 4 * count);
    return or_minus_zero(load_f32(bytes, NULL, 0), count);
}

static lanes tail_int8(const uint8_t *w, size_t k, size_t count)
{
    uint8_t bytes[LANES] = {0};
    memcpy(bytes, w + k, count);
    return or_minus_zero(load_int8(bytes, NULL, 0), count);
}

/* The halving tree, as docs/arithmetic.md names its levels. */
INLINE float tree(lanes v)
{
    const float32x4_t a0 = vaddq_f32(v.quarter[0], v.quarter[2]), a1 = vaddq_f32(v.quarter[1], v.quarter[3]);
    const float32x4_t b = vaddq_f32(a0, a1);
    const float32x2_t c = vadd_f32(vget_low_f32(b), vget_high_f32(b));
    return vget_lane_f32(c, 0) + vget_lane_f32(c, 1);
}

/* What is the same for a format in all kernels; constants after inlining. */
struct format {
    load_weights *load; /* NULL: bf12, which has functions of its own; then all below is 0 */
    load_tail *tail; /* NULL where k is a multiple of 32, and there are scales for 32 */
    size_t line;     /* weights in 64 bytes */
    int scaled;      /* d->scale holds a float for each output */
};

INLINE void store_sum(const struct dots *d, size_t r, size_t j, lanes v, struct format f)
{
    float sum = tree(v);
    if (f.scaled) {
        float scale;
        memcpy(&scale, (const uint8_t *)d->scale + j * sizeof scale, sizeof scale);
        sum *= scale;
    }
    d->out[r * d->out_stride + j] = sum;
}

/* ---- few rows ---- */

/* The weights that are decoded together. */
INLINE size_t step_of(struct format f) { return f.tail ? LANES : 32; }

/* A step of weights of each of some outputs, times the rows of x; `at` is a constant. */
INLINE void few_step(lanes acc[FEW][FEW_N], const uint8_t *w, size_t stride, const uint8_t *scale, size_t scale_stride,
                     const float *x, size_t x_stride, size_t at, struct format f, size_t outputs, size_t rows)
{
    for (size_t i = 0; i < outputs; i++)
        for (size_t k = at; k < at + step_of(f); k += LANES) {
            const lanes weights = f.load(w + i * stride, scale + i * scale_stride, k);
            for (size_t r = 0; r < rows; r++)
                acc[r][i] = fma16(weights, load(x + r * x_stride + k), acc[r][i]);
        }
}

/* Some outputs from row j of the weights on; with a stride of 0 always the same, of which `count` are stored. */
INLINE void few_outputs(const struct dots *d, size_t j, size_t count, size_t stride, size_t scale_stride, struct format f,
                        size_t outputs, size_t rows)
{
    const uint8_t *w = (const uint8_t *)d->w + j * d->w_stride;
    const uint8_t *scale = f.tail ? w : (const uint8_t *)d->scale + j * d->scale_stride;
    const float *x = d->x;
    const size_t group = outputs * stride, groups_ahead = group && group < AHEAD ? AHEAD / group : 1;
    const uint8_t *next = w + groups_ahead * group;
    lanes acc[FEW][FEW_N];
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < outputs; i++)
            acc[r][i] = zero();
    size_t left = d->k;
    for (; left >= f.line; left -= f.line) {
        for (size_t i = 0; i < outputs; i++)
            __builtin_prefetch(next + 64 * i, 0, 2);
        next += 64 * outputs;
#pragma GCC unroll 8
        for (size_t at = 0; at < f.line; at += step_of(f))
            few_step(acc, w, stride, scale, scale_stride, x, d->x_stride, at, f, outputs, rows);
        w += 64;
        scale += f.tail ? 0 : f.line / 32;
        x += f.line;
    }
    for (; left >= step_of(f); left -= step_of(f)) {
        few_step(acc, w, stride, scale, scale_stride, x, d->x_stride, 0, f, outputs, rows);
        w += 64 / (f.line / step_of(f));
        scale += f.tail ? 0 : 1;
        x += step_of(f);
    }
    if (f.tail && left)
        for (size_t i = 0; i < outputs; i++) {
            const lanes weights = f.tail(w + i * stride, 0, left);
            for (size_t r = 0; r < rows; r++)
                acc[r][i] = fma16(weights, load_some(x + r * d->x_stride, left, 0.0f), acc[r][i]);
        }
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < count; i++)
            store_sum(d, r, j + i, acc[r][i], f);
}

/* `outputs` and `rows` are constants: together they fill the registers. */
INLINE void few(const struct dots *d, struct format f, size_t outputs, size_t rows)
{
    const size_t groups = d->n / outputs * outputs;
    for (size_t j = 0; j < groups; j += outputs)
        few_outputs(d, j, outputs, d->w_stride, d->scale_stride, f, outputs, rows);
    for (size_t j = groups; j < d->n; j++)
        few_outputs(d, j, 1, 0, 0, f, outputs, rows);
}

/* Decodes whole groups of a bf12 row from column k0 on, exceptions and all, and asks for as many at `next`. */
INLINE void decode_bf12(float *to, const uint8_t *w, uint8_t base, struct bf12_exceptions *exceptions, size_t k0, size_t k,
                        const uint8_t *next)
{
    const struct exponents exponents = exponents_bf12(base);
    const uint8_t *group = w + k0 / BF12_GROUP * BF12_BYTES;
    for (size_t at = 0; at < k; at += BF12_GROUP, group += BF12_BYTES, next += BF12_BYTES) {
        lanes weights[2];
        __builtin_prefetch(next);
        load_bf12(group, exponents, weights);
        store(to + at, weights[0]);
        store(to + at + LANES, weights[1]);
    }
    bf12_patch(exceptions, to, k0, k0 + k);
}

/* A group of weights times the rows of x. */
INLINE void few_group(lanes acc[FEW][FEW_N], size_t i, const lanes weights[2], const float *x, size_t x_stride, size_t rows)
{
    for (size_t half = 0; half < 2; half++)
        for (size_t r = 0; r < rows; r++)
            acc[r][i] = fma16(weights[half], load(x + r * x_stride + half * LANES), acc[r][i]);
}

/* Some outputs of a bf12 matrix from row j on. Groups without an exception are decoded in registers; the others, one in
 * hundreds of a real matrix, by way of memory. */
INLINE void few_outputs_bf12(const struct dots *d, size_t j, struct format f, size_t outputs, size_t rows)
{
    const uint8_t *w = (const uint8_t *)d->w + j * d->w_stride, *base = (const uint8_t *)d->scale + j;
    const size_t ahead = outputs * d->w_stride < AHEAD ? AHEAD : outputs * d->w_stride;
    const uint8_t *group = w, *next = w + ahead;
    struct bf12_exceptions exceptions[FEW_N];
    struct exponents exponents[FEW_N];
    lanes acc[FEW][FEW_N], weights[2];
    for (size_t i = 0; i < outputs; i++) {
        exceptions[i] = bf12_exceptions(d, j + i);
        exponents[i] = exponents_bf12(base[i]);
        for (size_t r = 0; r < rows; r++)
            acc[r][i] = zero();
    }
    for (size_t k = 0;; k += BF12_GROUP, group += BF12_BYTES, next += outputs * BF12_BYTES) {
        const size_t patched = bf12_patched(exceptions, outputs, d->k);
        for (; k < patched; k += BF12_GROUP, group += BF12_BYTES, next += outputs * BF12_BYTES) {
            for (size_t at = 0; at < outputs * BF12_BYTES; at += 64)
                __builtin_prefetch(next + at, 0, 2);
            for (size_t i = 0; i < outputs; i++) {
                load_bf12(group + i * d->w_stride, exponents[i], weights);
                few_group(acc, i, weights, d->x + k, d->x_stride, rows);
            }
        }
        if (k == d->k)
            break;
        for (size_t i = 0; i < outputs; i++) {
            float decoded[BF12_GROUP];
            decode_bf12(decoded, w + i * d->w_stride, base[i], &exceptions[i], k, BF12_GROUP, next);
            weights[0] = load(decoded);
            weights[1] = load(decoded + LANES);
            few_group(acc, i, weights, d->x + k, d->x_stride, rows);
        }
    }
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < outputs; i++)
            store_sum(d, r, j + i, acc[r][i], f);
}

/* `outputs` and `rows` are constants. */
INLINE void few_bf12(const struct dots *d, struct format f, size_t outputs, size_t rows)
{
    const size_t groups = d->n / outputs * outputs;
    for (size_t j = 0; j < groups; j += outputs)
        few_outputs_bf12(d, j, f, outputs, rows);
    for (size_t j = groups; j < d->n; j++)
        few_outputs_bf12(d, j, f, 1, rows);
}

/* ---- many rows ---- */

/* One tile over one stretch of k, as far as it is whole groups of lanes, a quarter of the lanes: w, x and kept point to that
 * quarter. w: TILE_N rows of decoded weights; kept: what the stretches before left, and what this one leaves. `rows` is a
 * constant. */
INLINE void quarter_tile(const float *w, const float *x, size_t x_stride, size_t k, float32x4_t *kept, size_t rows)
{
    float32x4_t acc[TILE_ROWS][TILE_N];
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < TILE_N; i++)
            acc[r][i] = kept[QUARTERS * (r * TILE_N + i)];
    for (const float *end = w + k; w < end; w += LANES, x += LANES) {
        float32x4_t weights[TILE_N];
        for (size_t i = 0; i < TILE_N; i++)
            weights[i] = vld1q_f32(w + i * STRETCH);
        for (size_t r = 0; r < rows; r++) {
            const float32x4_t v = vld1q_f32(x + r * x_stride);
            for (size_t i = 0; i < TILE_N; i++)
                acc[r][i] = vfmaq_f32(acc[r][i], weights[i], v);
        }
    }
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < TILE_N; i++)
            kept[QUARTERS * (r * TILE_N + i)] = acc[r][i];
}

INLINE void tile(const float *w, const float *x, size_t x_stride, size_t k, lanes *kept, size_t rows)
{
    for (size_t q = 0; q < QUARTERS; q++)
        quarter_tile(w + 4 * q, x + 4 * q, x_stride, k, kept->quarter + q, rows);
}

/* The last few elements, whose weights are followed by -0. */
static __attribute__((noinline)) void tile_tail(const float *w, const float *x, size_t x_stride, size_t k, lanes *kept, size_t rows)
{
    for (size_t r = 0; r < rows; r++) {
        const lanes v = load_some(x + r * x_stride, k, 0.0f);
        for (size_t i = 0; i < TILE_N; i++)
            kept[r * TILE_N + i] = fma16(load(w + i * STRETCH), v, kept[r * TILE_N + i]);
    }
}

static __attribute__((noinline)) void tiles(const float *w, const float *x, size_t x_stride, size_t k, lanes *kept, size_t rows)
{
    const size_t whole = k / LANES * LANES;
    if (whole) {
        size_t r = 0;
        for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
            tile(w, x + r * x_stride, x_stride, whole, kept + r * TILE_N, TILE_ROWS);
        switch (rows - r) {
        case 3: tile(w, x + r * x_stride, x_stride, whole, kept + r * TILE_N, 3); break;
        case 2: tile(w, x + r * x_stride, x_stride, whole, kept + r * TILE_N, 2); break;
        case 1: tile(w, x + r * x_stride, x_stride, whole, kept + r * TILE_N, 1); break;
        }
    }
    if (whole < k)
        tile_tail(w + whole, x + whole, x_stride, k - whole, kept, rows);
}

/* Decodes k weights of a row from k0 on, and asks for as many at `next`. */
INLINE void decode(float *to, const uint8_t *w, const uint8_t *scale, size_t k0, size_t k, const uint8_t *next, struct format f)
{
    size_t at = 0;
    for (; at + f.line <= k; at += f.line, next += 64) {
        __builtin_prefetch(next);
        for (size_t step = 0; step < f.line; step += LANES)
            store(to + at + step, f.load(w, scale, k0 + at + step));
    }
    for (; at + LANES <= k; at += LANES)
        store(to + at, f.load(w, scale, k0 + at));
    if (f.tail && at < k)
        store(to + at, f.tail(w, k0 + at, k - at));
}

/* Decodes k weights of row j from k0 on, and asks for as many of what is decoded next. */
INLINE void decode_row(const struct dots *d, size_t j, size_t k0, size_t k, struct bf12_exceptions *exceptions, float *to,
                       struct format f)
{
    const uint8_t *w = (const uint8_t *)d->w + j * d->w_stride;
    const uint8_t *scale = f.tail ? w : (const uint8_t *)d->scale + j * d->scale_stride;
    const size_t nbytes = f.load ? 64 / (f.line / LANES) : BF12_BYTES / 2; /* of 16 weights */
    const uint8_t *next = k0 + k < d->k ? w + (k0 + k) / LANES * nbytes : w + TILE_N * d->w_stride;
    if (f.load)
        decode(to, w, scale, k0, k, next, f);
    else
        decode_bf12(to, w, *scale, exceptions, k0, k, next);
}

/* Up to MOST_ROWS rows from row0 on. kept: rows by TILE_N; decoded: TILE_N stretches. */
INLINE void many(const struct dots *d, size_t row0, size_t rows, struct format f, lanes *kept, float *decoded)
{
    for (size_t j = 0; j < d->n; j += TILE_N) {
        const size_t count = d->n - j < TILE_N ? d->n - j : TILE_N; /* what is decoded past it is of an earlier group */
        struct bf12_exceptions exceptions[TILE_N] = {{0}};
        for (size_t i = 0; !f.load && i < count; i++)
            exceptions[i] = bf12_exceptions(d, j + i);
        for (size_t i = 0; i < rows * TILE_N; i++)
            kept[i] = zero();
        for (size_t k0 = 0; k0 < d->k; k0 += STRETCH) {
            const size_t k = d->k - k0 < STRETCH ? d->k - k0 : STRETCH;
            for (size_t i = 0; i < count; i++)
                decode_row(d, j + i, k0, k, &exceptions[i], decoded + i * STRETCH, f);
            tiles(decoded, d->x + row0 * d->x_stride + k0, d->x_stride, k, kept, rows);
        }
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < count; i++)
                store_sum(d, row0 + r, j + i, kept[r * TILE_N + i], f);
    }
}

/* scratch: the lanes of up to MOST_ROWS rows by TILE_N outputs, then TILE_N decoded stretches. */
INLINE void many_blocks(const struct dots *d, struct format f, void *scratch)
{
    lanes *kept = scratch;
    float *decoded = (float *)(kept + MOST_ROWS * TILE_N);
    for (size_t i = 0; i < TILE_N * STRETCH; i += LANES)
        store(decoded + i, zero()); /* groups of fewer outputs multiply what was there */
    for (size_t r = 0; r < d->rows; r += MOST_ROWS)
        many(d, r, d->rows - r < MOST_ROWS ? d->rows - r : MOST_ROWS, f, kept, decoded);
}

/* ---- the formats ---- */

INLINE void dots(const struct dots *d, struct format f, void *scratch)
{
    switch (d->rows) {
    case 0: break;
    case 1: few(d, f, 4, 1); break;
    case 2: few(d, f, 2, 2); break;
    case 3: few(d, f, 1, 3); break;
    case 4: few(d, f, 1, 4); break;
    default: many_blocks(d, f, scratch);
    }
}

static void dots_mxfp4(const struct dots *d, void *scratch) { dots(d, (struct format){load_mxfp4, NULL, 128, 0}, scratch); }
static void dots_bf16(const struct dots *d, void *scratch) { dots(d, (struct format){load_bf16, tail_bf16, 32, 0}, scratch); }
static void dots_f32(const struct dots *d, void *scratch) { dots(d, (struct format){load_f32, tail_f32, 16, 0}, scratch); }
static void dots_int8(const struct dots *d, void *scratch) { dots(d, (struct format){load_int8, tail_int8, 64, 1}, scratch); }

static void dots_bf12(const struct dots *d, void *scratch)
{
    const struct format f = {.load = NULL};
    switch (d->rows) {
    case 0: break;
    case 1: few_bf12(d, f, 2, 1); break;
    case 2: few_bf12(d, f, 2, 2); break;
    case 3: few_bf12(d, f, 1, 3); break;
    case 4: few_bf12(d, f, 1, 4); break;
    default: many_blocks(d, f, scratch);
    }
}

const struct matmul_kernels matmul_neon = {dots_mxfp4, dots_bf16, dots_f32, dots_int8, dots_bf12};

#endif
