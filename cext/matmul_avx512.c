/* Matrix kernels for AVX-512 (F, BW, DQ, VL): the 16 lanes of a dot product are one register.
 *
 * Few rows: weights are decoded in registers and used at once. Many rows: some rows of weights are decoded into the
 * cache, one stretch of k at a time, and multiplied in tiles; a tile's lanes are kept in scratch between stretches. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include <immintrin.h>

#include "bf12.h"
#include "kernels.h"
#include "mxfp4_table.h"

#define INLINE static inline __attribute__((always_inline))

#define LANES 16
#define FEW 4       /* rows up to which weights are decoded in registers */
#define FEW_N 4     /* rows of weights at a time then, at most */
#define TILE_ROWS 4 /* a tile: 4 rows by 6 outputs in 24 registers */
#define TILE_N 6
#define AHEAD 14336 /* bytes of weights that prefetches run ahead, in whole groups of outputs */
#define STRETCH 512 /* of k: six decoded rows of that length fill 12 KB of the first-level cache */
#define MOST_ROWS 64

/* ---- 16 weights ----
 * A tail load gives 1 to 15; the others are -0, which times an x of +0 leaves any lane as it was. */

typedef __m512 load_weights(const uint8_t *w, const uint8_t *scale, size_t k);
typedef __m512 load_tail(const uint8_t *w, size_t k, __mmask16 some);

INLINE __m512 load_mxfp4(const uint8_t *w, const uint8_t *scale, size_t k)
{
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    int low, high;
    __builtin_memcpy(&low, w + k / 2, 4);
    __builtin_memcpy(&high, w + k / 2 + 4, 4);
    __m512i words = _mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xff00, high);
    __m512i codes = _mm512_srlv_epi32(words, shifts); /* vpermps looks at the low four bits only */
    return _mm512_permutexvar_ps(codes, _mm512_load_ps(mxfp4_f32[scale[k / 32]]));
}

/* The same in the order 0 8 1 9 2 10 .. 7 15, one operation cheaper. */
INLINE __m512 load_mxfp4_paired(const uint8_t *w, const uint8_t *scale, size_t k)
{
    const __m512i shifts = _mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28);
    long long word;
    __builtin_memcpy(&word, w + k / 2, 8);
    __m512i codes = _mm512_srlv_epi64(_mm512_set1_epi64(word), shifts);
    return _mm512_permutexvar_ps(codes, _mm512_load_ps(mxfp4_f32[scale[k / 32]]));
}

INLINE __m512 load_bf16(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    __m256i words = _mm256_loadu_si256((const __m256i *)(w + 2 * k));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

INLINE __m512 load_f32(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    return _mm512_loadu_ps(w + 4 * k);
}

INLINE __m512 load_int8(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(w + k))));
}

/* The exponent bits of a bf12 row for each offset. */
INLINE __m512i exponents_bf12(uint8_t base)
{
    const __m512i offsets = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i exponents = _mm512_sub_epi32(_mm512_set1_epi32(base), offsets);
    return _mm512_and_si512(_mm512_slli_epi32(exponents, 23), _mm512_set1_epi32(0x7f800000));
}

/* 16 codes, sign-extended, and the permutation of the exponents by offset, which looks at the low four bits only. */
INLINE __m512 weights_bf12(const uint8_t *from, __m512i offsets, __m512i exponents)
{
    const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
    const __m512i sign_and_mantissa = _mm512_set1_epi32((int)0x807f0000);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_slli_epi32(codes, 16), sign_and_mantissa,
                                                         _mm512_permutexvar_epi32(offsets, exponents), 0xea)); /* a & b | c */
}

/* What the codes of a group of 32 say. */
INLINE void load_bf12(const uint8_t *group, __m512i exponents, __m512 weights[2])
{
    const __m512i offsets = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(group + 32)));
    weights[0] = weights_bf12(group, offsets, exponents);
    weights[1] = weights_bf12(group + 16, _mm512_srli_epi32(offsets, 4), exponents);
}

INLINE __m512 or_minus_zero(__m512 v, __mmask16 some) { return _mm512_mask_mov_ps(_mm512_set1_ps(-0.0f), some, v); }

INLINE __m512 tail_bf16(const uint8_t *w, size_t k, __mmask16 some)
{
    __m256i words = _mm256_maskz_loadu_epi16(some, w + 2 * k);
    return or_minus_zero(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16)), some);
}

INLINE __m512 tail_f32(const uint8_t *w, size_t k, __mmask16 some)
{
    return or_minus_zero(_mm512_maskz_loadu_ps(some, w + 4 * k), some);
}

INLINE __m512 tail_int8(const uint8_t *w, size_t k, __mmask16 some)
{
    return or_minus_zero(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(some, w + k))), some);
}

/* ---- the end of a dot product ---- */

/* The halving trees of eight times 16 lanes. */
INLINE __m256 trees(const __m512 v[8])
{
    __m512 a[4], b[2]; /* as docs/arithmetic.md names them: a holds two trees, b four, c eight */
    for (int i = 0; i < 4; i++)
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                             _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
    for (int i = 0; i < 2; i++)
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
    __m512d b0 = _mm512_castps_pd(b[0]), b1 = _mm512_castps_pd(b[1]);
    __m512 c = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(b0, b1)), _mm512_castpd_ps(_mm512_unpackhi_pd(b0, b1)));
    __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(c, c, 0x88), _mm512_shuffle_ps(c, c, 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums));
}

INLINE __m512 paired(__m512 v)
{
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    return _mm512_permutexvar_ps(order, v);
}

INLINE __m512 unpaired(__m512 v)
{
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    return _mm512_permutexvar_ps(order, v);
}

/* Stores count dot products, times the rows' scales for int8. */
INLINE void store_sums(float *out, __m256 sums, const float *row_scale, size_t count)
{
    __mmask8 some = (__mmask8)((1u << count) - 1);
    if (row_scale)
        sums = _mm256_mul_ps(sums, _mm256_maskz_loadu_ps(some, row_scale));
    _mm256_mask_storeu_ps(out, some, sums);
}

/* ---- few rows ---- */

/* What is the same for a format in all kernels; constants after inlining. */
struct format {
    load_weights *load; /* NULL: bf12, which has functions of its own; then all below is 0 */
    load_tail *tail; /* NULL where k is a multiple of 16 */
    size_t line;     /* weights in 64 bytes */
    size_t alone;    /* rows of weights at a time for one row of x, which is a matter of streams from memory */
    int paired;      /* load gives the paired order, and x is in it too */
    int scaled;      /* d->scale holds a float for each output */
};

INLINE const float *row_scale(const struct dots *d, struct format f, size_t j)
{
    return f.scaled ? (const float *)d->scale + j : NULL;
}

/* 16 weights of each of some outputs, times the rows of x; `at` is a constant. */
INLINE void few_step(__m512 acc[FEW][FEW_N], const uint8_t *w, size_t stride, const uint8_t *scale, size_t scale_stride,
                     const float *x, size_t x_stride, size_t at, struct format f, size_t outputs, size_t rows)
{
    for (size_t i = 0; i < outputs; i++) {
        const __m512 weights = f.load(w + i * stride, scale + i * scale_stride, at);
        for (size_t r = 0; r < rows; r++)
            acc[r][i] = _mm512_fmadd_ps(weights, _mm512_loadu_ps(x + r * x_stride + at), acc[r][i]);
    }
}

INLINE void store_few(const struct dots *d, size_t j, size_t count, __m512 acc[FEW][FEW_N], struct format f, size_t outputs,
                      size_t rows)
{
    for (size_t r = 0; r < rows; r++) {
        __m512 v[8];
        for (size_t i = 0; i < 8; i++)
            v[i] = f.paired ? unpaired(acc[r][i % outputs]) : acc[r][i % outputs];
        store_sums(d->out + r * d->out_stride + j, trees(v), row_scale(d, f, j), count);
    }
}

/* Some outputs from row j of the weights on; with a stride of 0 always the same, of which `count` are stored. */
INLINE void few_outputs(const struct dots *d, size_t j, size_t count, size_t stride, size_t scale_stride, const float *x,
                        size_t x_stride, struct format f, size_t outputs, size_t rows)
{
    const uint8_t *w = (const uint8_t *)d->w + j * d->w_stride;
    const uint8_t *scale = f.tail ? w : (const uint8_t *)d->scale + j * d->scale_stride;
    const size_t group = outputs * stride, groups_ahead = group && group < AHEAD ? AHEAD / group : 1;
    const uint8_t *next = w + groups_ahead * group;
    __m512 acc[FEW][FEW_N];
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < outputs; i++)
            acc[r][i] = _mm512_setzero_ps();
    if (!f.tail)
        for (size_t at = 0; at < outputs * scale_stride; at += 64)
            _mm_prefetch(scale + groups_ahead * outputs * scale_stride + at, _MM_HINT_T0);
    size_t left = d->k;
    for (; left >= f.line; left -= f.line) {
        for (size_t i = 0; i < outputs; i++)
            _mm_prefetch(next + 64 * i, _MM_HINT_T1);
        next += 64 * outputs;
#pragma GCC unroll 8
        for (size_t at = 0; at < f.line; at += LANES)
            few_step(acc, w, stride, scale, scale_stride, x, x_stride, at, f, outputs, rows);
        w += 64;
        scale += f.tail ? 0 : f.line / 32;
        x += f.line;
    }
    const size_t step = f.tail ? LANES : 32;
    for (; left >= step; left -= step) {
        for (size_t at = 0; at < step; at += LANES)
            few_step(acc, w, stride, scale, scale_stride, x, x_stride, at, f, outputs, rows);
        w += 64 / (f.line / step);
        scale += f.tail ? 0 : 1;
        x += step;
    }
    if (f.tail && left) {
        const __mmask16 some = (__mmask16)((1u << left) - 1);
        for (size_t i = 0; i < outputs; i++) {
            const __m512 weights = f.tail(w + i * stride, 0, some);
            for (size_t r = 0; r < rows; r++)
                acc[r][i] = _mm512_fmadd_ps(weights, _mm512_maskz_loadu_ps(some, x + r * x_stride), acc[r][i]);
        }
    }
    store_few(d, j, count, acc, f, outputs, rows);
}

/* `outputs` and `rows` are constants. */
INLINE void few(const struct dots *d, const float *x, size_t x_stride, struct format f, size_t outputs, size_t rows)
{
    const size_t groups = d->n / outputs * outputs;
    for (size_t j = 0; j < groups; j += outputs)
        few_outputs(d, j, outputs, d->w_stride, d->scale_stride, x, x_stride, f, outputs, rows);
    for (size_t j = groups; j < d->n; j++)
        few_outputs(d, j, 1, 0, 0, x, x_stride, f, outputs, rows);
}

/* Decodes whole groups of a bf12 row from column k0 on, exceptions and all, and asks for as many at `next`. */
INLINE void decode_bf12(float *to, const uint8_t *w, uint8_t base, struct bf12_exceptions *exceptions, size_t k0, size_t k,
                        const uint8_t *next)
{
    const __m512i exponents = exponents_bf12(base);
    const uint8_t *group = w + k0 / BF12_GROUP * BF12_BYTES;
    for (size_t at = 0; at < k; at += BF12_GROUP, group += BF12_BYTES, next += BF12_BYTES) {
        __m512 weights[2];
        _mm_prefetch(next, _MM_HINT_T0);
        load_bf12(group, exponents, weights);
        _mm512_store_ps(to + at, weights[0]);
        _mm512_store_ps(to + at + LANES, weights[1]);
    }
    bf12_patch(exceptions, to, k0, k0 + k);
}

/* A group of weights times the rows of x. */
INLINE void few_group(__m512 acc[FEW][FEW_N], size_t i, const __m512 weights[2], const float *x, size_t x_stride, size_t rows)
{
    for (size_t half = 0; half < 2; half++)
        for (size_t r = 0; r < rows; r++)
            acc[r][i] = _mm512_fmadd_ps(weights[half], _mm512_loadu_ps(x + r * x_stride + half * LANES), acc[r][i]);
}

/* Some outputs of a bf12 matrix from row j on. Groups without an exception are decoded in registers; the others, one in
 * hundreds of a real matrix, by way of memory. */
INLINE void few_outputs_bf12(const struct dots *d, size_t j, struct format f, size_t outputs, size_t rows)
{
    const uint8_t *w = (const uint8_t *)d->w + j * d->w_stride, *base = (const uint8_t *)d->scale + j;
    const size_t ahead = outputs * d->w_stride < AHEAD ? AHEAD : outputs * d->w_stride;
    const uint8_t *group = w, *next = w + ahead;
    struct bf12_exceptions exceptions[FEW_N];
    __m512i exponents[FEW_N];
    __m512 acc[FEW][FEW_N], weights[2];
    for (size_t i = 0; i < outputs; i++) {
        exceptions[i] = bf12_exceptions(d, j + i);
        exponents[i] = exponents_bf12(base[i]);
        for (size_t r = 0; r < rows; r++)
            acc[r][i] = _mm512_setzero_ps();
    }
    for (size_t k = 0;; k += BF12_GROUP, group += BF12_BYTES, next += outputs * BF12_BYTES) {
        const size_t patched = bf12_patched(exceptions, outputs, d->k);
        for (; k < patched; k += BF12_GROUP, group += BF12_BYTES, next += outputs * BF12_BYTES) {
            for (size_t at = 0; at < outputs * BF12_BYTES; at += 64)
                _mm_prefetch(next + at, _MM_HINT_T1);
            for (size_t i = 0; i < outputs; i++) {
                load_bf12(group + i * d->w_stride, exponents[i], weights);
                few_group(acc, i, weights, d->x + k, d->x_stride, rows);
            }
        }
        if (k == d->k)
            break;
        for (size_t i = 0; i < outputs; i++) {
            float decoded[BF12_GROUP] __attribute__((aligned(64)));
            decode_bf12(decoded, w + i * d->w_stride, base[i], &exceptions[i], k, BF12_GROUP, next);
            weights[0] = _mm512_load_ps(decoded);
            weights[1] = _mm512_load_ps(decoded + LANES);
            few_group(acc, i, weights, d->x + k, d->x_stride, rows);
        }
    }
    store_few(d, j, outputs, acc, f, outputs, rows);
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

/* One tile over one stretch of k, as far as it is whole groups of lanes. w: TILE_N rows of decoded weights; lanes: what the
 * stretches before left, and what this one leaves. `rows` is a constant. */
INLINE void tile(const float *w, const float *x, size_t x_stride, size_t k, __m512 *lanes, size_t rows)
{
    __m512 acc[TILE_ROWS][TILE_N];
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < TILE_N; i++)
            acc[r][i] = lanes[r * TILE_N + i];
    for (const float *end = w + k; w < end; w += LANES, x += LANES) {
        __m512 weights[TILE_N];
        for (size_t i = 0; i < TILE_N; i++)
            weights[i] = _mm512_load_ps(w + i * STRETCH);
        for (size_t r = 0; r < rows; r++) {
            __m512 v = _mm512_loadu_ps(x + r * x_stride);
            for (size_t i = 0; i < TILE_N; i++)
                acc[r][i] = _mm512_fmadd_ps(weights[i], v, acc[r][i]);
        }
    }
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < TILE_N; i++)
            lanes[r * TILE_N + i] = acc[r][i];
}

/* The last few elements, whose weights are followed by -0. Apart, so that tile keeps to its registers. */
static __attribute__((noinline)) void tile_tail(const float *w, const float *x, size_t x_stride, size_t k, __m512 *lanes, size_t rows)
{
    const __mmask16 some = (__mmask16)((1u << k) - 1);
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < TILE_N; i++)
            lanes[r * TILE_N + i] = _mm512_fmadd_ps(_mm512_load_ps(w + i * STRETCH),
                                                    _mm512_maskz_loadu_ps(some, x + r * x_stride), lanes[r * TILE_N + i]);
}

static __attribute__((noinline)) void tiles(const float *w, const float *x, size_t x_stride, size_t k, __m512 *lanes, size_t rows)
{
    const size_t whole = k / LANES * LANES;
    if (whole) {
        size_t r = 0;
        for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
            tile(w, x + r * x_stride, x_stride, whole, lanes + r * TILE_N, TILE_ROWS);
        switch (rows - r) {
        case 3: tile(w, x + r * x_stride, x_stride, whole, lanes + r * TILE_N, 3); break;
        case 2: tile(w, x + r * x_stride, x_stride, whole, lanes + r * TILE_N, 2); break;
        case 1: tile(w, x + r * x_stride, x_stride, whole, lanes + r * TILE_N, 1); break;
        }
    }
    if (whole < k)
        tile_tail(w + whole, x + whole, x_stride, k - whole, lanes, rows);
}

/* Decodes k weights of a row from k0 on, and asks for as many at `next`. */
INLINE void decode(float *to, const uint8_t *w, const uint8_t *scale, size_t k0, size_t k, const uint8_t *next, struct format f)
{
    size_t at = 0;
    for (; at + f.line <= k; at += f.line, next += 64) {
        _mm_prefetch(next, _MM_HINT_T0);
        for (size_t step = 0; step < f.line; step += LANES)
            _mm512_store_ps(to + at + step, f.load(w, scale, k0 + at + step));
    }
    for (; at + LANES <= k; at += LANES)
        _mm512_store_ps(to + at, f.load(w, scale, k0 + at));
    if (f.tail && at < k) {
        const __mmask16 some = (__mmask16)((1u << (k - at)) - 1);
        _mm512_store_ps(to + at, f.tail(w, k0 + at, some));
    }
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

/* Up to MOST_ROWS rows from row0 on. lanes: rows by TILE_N; decoded: TILE_N stretches. */
INLINE void many(const struct dots *d, size_t row0, size_t rows, struct format f, __m512 *lanes, float *decoded)
{
    for (size_t j = 0; j < d->n; j += TILE_N) {
        const size_t count = d->n - j < TILE_N ? d->n - j : TILE_N; /* what is decoded past it is of an earlier group */
        struct bf12_exceptions exceptions[TILE_N] = {{0}};
        for (size_t i = 0; !f.load && i < count; i++)
            exceptions[i] = bf12_exceptions(d, j + i);
        for (size_t i = 0; i < rows * TILE_N; i++)
            lanes[i] = _mm512_setzero_ps();
        for (size_t k0 = 0; k0 < d->k; k0 += STRETCH) {
            const size_t k = d->k - k0 < STRETCH ? d->k - k0 : STRETCH;
            for (size_t i = 0; i < count; i++)
                decode_row(d, j + i, k0, k, &exceptions[i], decoded + i * STRETCH, f);
            tiles(decoded, d->x + row0 * d->x_stride + k0, d->x_stride, k, lanes, rows);
        }
        for (size_t r = 0; r < rows; r++) {
            __m512 v[8];
            for (size_t i = 0; i < 8; i++)
                v[i] = lanes[r * TILE_N + i % TILE_N];
            store_sums(d->out + (row0 + r) * d->out_stride + j, trees(v), row_scale(d, f, j), count);
        }
    }
}

/* scratch: the lanes of up to MOST_ROWS rows by TILE_N outputs, then TILE_N decoded stretches. */
INLINE void many_blocks(const struct dots *d, struct format f, void *scratch)
{
    __m512 *lanes = scratch;
    float *decoded = (float *)(lanes + MOST_ROWS * TILE_N);
    for (size_t i = 0; i < TILE_N * STRETCH; i += LANES)
        _mm512_store_ps(decoded + i, _mm512_setzero_ps()); /* groups of fewer outputs multiply what was there */
    for (size_t r = 0; r < d->rows; r += MOST_ROWS)
        many(d, r, d->rows - r < MOST_ROWS ? d->rows - r : MOST_ROWS, f, lanes, decoded);
}

/* ---- the formats ---- */

INLINE void few_rows(const struct dots *d, const float *x, size_t x_stride, struct format f)
{
    switch (d->rows) {
    case 1: few(d, x, x_stride, f, f.alone, 1); break;
    case 2: few(d, x, x_stride, f, FEW_N, 2); break;
    case 3: few(d, x, x_stride, f, FEW_N, 3); break;
    case 4: few(d, x, x_stride, f, FEW_N, 4); break;
    }
}

INLINE void dots(const struct dots *d, struct format f, void *scratch)
{
    if (d->rows > FEW)
        many_blocks(d, f, scratch);
    else
        few_rows(d, d->x, d->x_stride, f);
}

static void dots_mxfp4(const struct dots *d, void *scratch)
{
    if (d->rows > FEW || d->rows * d->k * sizeof(float) > DOTS_SCRATCH) {
        many_blocks(d, (struct format){load_mxfp4, NULL, 128, 4, 0, 0}, scratch);
        return;
    }
    float *x = scratch;
    for (size_t r = 0; r < d->rows; r++)
        for (size_t k = 0; k < d->k; k += LANES)
            _mm512_storeu_ps(x + r * d->k + k, paired(_mm512_loadu_ps(d->x + r * d->x_stride + k)));
    few_rows(d, x, d->k, (struct format){load_mxfp4_paired, NULL, 128, 4, 1, 0});
}

static void dots_bf16(const struct dots *d, void *scratch) { dots(d, (struct format){load_bf16, tail_bf16, 32, 2, 0, 0}, scratch); }
static void dots_f32(const struct dots *d, void *scratch) { dots(d, (struct format){load_f32, tail_f32, 16, 4, 0, 0}, scratch); }
static void dots_int8(const struct dots *d, void *scratch) { dots(d, (struct format){load_int8, tail_int8, 64, 4, 0, 1}, scratch); }

static void dots_bf12(const struct dots *d, void *scratch)
{
    const struct format f = {.load = NULL};
    switch (d->rows) {
    case 0: break;
    case 1: few_bf12(d, f, 2, 1); break;
    case 2: few_bf12(d, f, FEW_N, 2); break;
    case 3: few_bf12(d, f, FEW_N, 3); break;
    case 4: few_bf12(d, f, FEW_N, 4); break;
    default: many_blocks(d, f, scratch);
    }
}

const struct matmul_kernels matmul_avx512 = {dots_mxfp4, dots_bf16, dots_f32, dots_int8, dots_bf12};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
