/* Matrix kernels for AVX2 and FMA: the 16 lanes of a dot product are two registers, lanes 0 to 7 and 8 to 15.
 *
 * Few rows: weights are decoded in registers and used at once. Many rows: some rows of weights are decoded into the
 * cache, one stretch of k at a time, and multiplied in tiles; a tile's lanes are kept in scratch between stretches. A tile
 * does its low lanes for the whole stretch, then its high lanes, so that twice as many dot products fit the registers. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#include <immintrin.h>

#include "bf12.h"
#include "kernels.h"
#include "mxfp4_table.h"

#define INLINE static inline __attribute__((always_inline))

#define LANES 16
#define FEW 4       /* rows up to which weights are decoded in registers */
#define FEW_N 4     /* rows of weights at a time then, at most */
#define TILE_ROWS 4 /* a tile: half the lanes of 4 rows by 3 outputs in 12 registers */
#define TILE_N 3
#define GROUP_N 6     /* outputs whose weights are decoded together */
#define STRETCH 512   /* of k: six decoded rows of that length fill 12 KB of the first-level cache */
#define AHEAD 14336   /* bytes of weights that prefetches run ahead, in whole groups of outputs */
#define MOST_ROWS 64

typedef struct {
    __m256 low, high;
} lanes; /* an array of these is an array of registers, low and high in turn */

INLINE lanes zero(void) { return (lanes){_mm256_setzero_ps(), _mm256_setzero_ps()}; }

INLINE lanes load(const float *from) { return (lanes){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }

INLINE lanes fma16(lanes a, lanes b, lanes c)
{
    return (lanes){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

/* All bits of the first `count` of eight elements, 0 to 8. */
INLINE __m256i first(size_t count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The first `count` of eight floats, then `rest`. */
INLINE __m256 load_first(const float *from, size_t count, float rest)
{
    const __m256i mask = first(count);
    return _mm256_blendv_ps(_mm256_set1_ps(rest), _mm256_maskload_ps(from, mask), _mm256_castsi256_ps(mask));
}

INLINE size_t low_part(size_t count) { return count < 8 ? count : 8; }

INLINE lanes load_some(const float *from, size_t count, float rest)
{
    return (lanes){load_first(from, low_part(count), rest), load_first(from + low_part(count), count - low_part(count), rest)};
}

/* ---- 16 weights ----
 * A tail load gives 1 to 15; the others are -0, which times an x of +0 leaves any lane as it was. */

typedef lanes load_weights(const uint8_t *w, const uint8_t *scale, size_t k);
typedef lanes load_tail(const uint8_t *w, size_t k, size_t count);

INLINE __m256i both(const void *from) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(from)); }

/* Eight codes: seven magnitudes and zero by permutation, which looks at three bits of an index; the fourth is the sign. */
INLINE __m256 eight_mxfp4(const uint8_t *codes, __m256 magnitudes)
{
    int word;
    __builtin_memcpy(&word, codes, 4);
    __m256i c = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(c, 28)), _mm256_set1_ps(-0.0f));
    return _mm256_or_ps(_mm256_permutevar8x32_ps(magnitudes, c), sign);
}

INLINE lanes load_mxfp4(const uint8_t *w, const uint8_t *scale, size_t k)
{
    const __m256 magnitudes = _mm256_load_ps((const float *)mxfp4_f32[scale[k / 32]]);
    return (lanes){eight_mxfp4(w + k / 2, magnitudes), eight_mxfp4(w + k / 2 + 4, magnitudes)};
}

/* The same in columns, in about half the operations: two byte permutations look up the halves of bf16, of which every other
 * one is a float after a shift and the others after a mask. */
INLINE lanes load_mxfp4_columns(const uint8_t *w, const uint8_t *scale, size_t k)
{
    const __m256i shifts = _mm256_setr_epi64x(0, 0, 4, 4), upper = _mm256_set1_epi32(-0x10000);
    const uint8_t(*table)[16] = mxfp4_bf16[scale[k / 32]];
    const __m256i codes = _mm256_and_si256(_mm256_srlv_epi64(both(w + k / 32 * 16), shifts), _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(both(table[0]), codes), high = _mm256_shuffle_epi8(both(table[1]), codes);
    const __m256i words = k % 32 ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
    return (lanes){_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)), _mm256_castsi256_ps(_mm256_and_si256(words, upper))};
}

INLINE __m256 widen_bf16(__m128i words)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

INLINE lanes load_bf16(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    const __m128i *words = (const __m128i *)(w + 2 * k);
    return (lanes){widen_bf16(_mm_loadu_si128(words)), widen_bf16(_mm_loadu_si128(words + 1))};
}

INLINE lanes load_f32(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    return (lanes){_mm256_loadu_ps((const float *)(w + 4 * k)), _mm256_loadu_ps((const float *)(w + 4 * k) + 8)};
}

INLINE __m256 widen_int8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

INLINE lanes load_int8(const uint8_t *w, const uint8_t *scale, size_t k)
{
    (void)scale;
    return (lanes){widen_int8(_mm_loadl_epi64((const __m128i *)(w + k))), widen_int8(_mm_loadl_epi64((const __m128i *)(w + k + 8)))};
}

/* The bits that an exponent of a bf12 row puts into the upper and into the lower byte of a bf16, for each offset; in both
 * 128-bit halves. */
struct exponents {
    __m256i upper, lower;
};

INLINE struct exponents exponents_bf12(uint8_t base)
{
    const __m128i offsets = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i exponents = _mm_sub_epi8(_mm_set1_epi8((char)base), offsets);
    return (struct exponents){
        _mm256_broadcastsi128_si256(_mm_and_si128(_mm_srli_epi16(exponents, 1), _mm_set1_epi8(0x7f))),
        _mm256_broadcastsi128_si256(_mm_and_si128(_mm_slli_epi16(exponents, 7), _mm_set1_epi8((char)0x80))),
    };
}

/* What the codes of a group of 32 say. Bytes are first put into the order of which two rounds of unpacking, each within a
 * 128-bit half, make the order of lanes: 0 8 16 24 and 4 12 20 28, each with the three that follow it. */
INLINE void load_bf12(const uint8_t *group, struct exponents exponents, lanes weights[2])
{
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7), order_offsets = _mm256_setr_epi32(0, 2, 0, 2, 1, 3, 1, 3);
    const __m256i sign = _mm256_set1_epi8((char)0x80), zeros = _mm256_setzero_si256();
    const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)group), order);
    const __m256i pairs = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(group + 32)));
    const __m256i halves = _mm256_srlv_epi64(_mm256_permutevar8x32_epi32(pairs, order_offsets), _mm256_setr_epi64x(0, 4, 0, 4));
    const __m256i offsets = _mm256_and_si256(halves, _mm256_set1_epi8(15));
    const __m256i upper = _mm256_or_si256(_mm256_and_si256(sign, codes), _mm256_shuffle_epi8(exponents.upper, offsets));
    const __m256i lower = _mm256_or_si256(_mm256_andnot_si256(sign, codes), _mm256_shuffle_epi8(exponents.lower, offsets));
    const __m256i words[2] = {_mm256_unpacklo_epi8(lower, upper), _mm256_unpackhi_epi8(lower, upper)};
    for (int i = 0; i < 2; i++)
        weights[i] = (lanes){
            _mm256_castsi256_ps(_mm256_unpacklo_epi16(zeros, words[i])),
            _mm256_castsi256_ps(_mm256_unpackhi_epi16(zeros, words[i])),
        };
}

INLINE lanes or_minus_zero(lanes v, size_t count)
{
    const __m256 rest = _mm256_set1_ps(-0.0f);
    return (lanes){
        _mm256_blendv_ps(rest, v.low, _mm256_castsi256_ps(first(low_part(count)))),
        _mm256_blendv_ps(rest, v.high, _mm256_castsi256_ps(first(count - low_part(count)))),
    };
}

static lanes tail_bf16(const uint8_t *w, size_t k, size_t count)
{
    uint8_t bytes[2 * LANES] = {0};
    __builtin_memcpy(bytes, w + 2 * k, 2 * count);
    return or_minus_zero(load_bf16(bytes, NULL, 0), count);
}

static lanes tail_f32(const uint8_t *w, size_t k, size_t count) { return load_some((const float *)(w + 4 * k), count, -0.0f); }

static lanes tail_int8(const uint8_t *w, size_t k, size_t count)
{
    uint8_t bytes[LANES] = {0};
    __builtin_memcpy(bytes, w + k, count);
    return or_minus_zero(load_int8(bytes, NULL, 0), count);
}

/* ---- the end of a dot product ---- */

/* The halving trees of eight times 16 lanes. */
INLINE __m256 trees(const lanes v[8])
{
    __m256 a[8], b[4], c[2]; /* as docs/arithmetic.md names them: a holds one tree, b two, c four */
    for (int i = 0; i < 8; i++)
        a[i] = _mm256_add_ps(v[i].low, v[i].high);
    for (int i = 0; i < 4; i++)
        b[i] = _mm256_add_ps(_mm256_permute2f128_ps(a[2 * i], a[2 * i + 1], 0x20),
                             _mm256_permute2f128_ps(a[2 * i], a[2 * i + 1], 0x31));
    for (int i = 0; i < 2; i++) {
        __m256d b0 = _mm256_castps_pd(b[2 * i]), b1 = _mm256_castps_pd(b[2 * i + 1]);
        c[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(b0, b1)), _mm256_castpd_ps(_mm256_unpackhi_pd(b0, b1)));
    }
    __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(c[0], c[1], 0x88), _mm256_shuffle_ps(c[0], c[1], 0xdd));
    return _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Columns are the lanes in the order 0 4 8 12 1 5 9 13, 2 6 10 14 3 7 11 15. */
INLINE lanes into_columns(lanes v)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256 low = _mm256_permutevar8x32_ps(v.low, order), high = _mm256_permutevar8x32_ps(v.high, order); /* 0 4 1 5 2 6 3 7 */
    __m256d l = _mm256_castps_pd(low), h = _mm256_castps_pd(high);
    __m256 even = _mm256_castpd_ps(_mm256_unpacklo_pd(l, h)), odd = _mm256_castpd_ps(_mm256_unpackhi_pd(l, h));
    /* 0 4 8 12 2 6 10 14 and 1 5 9 13 3 7 11 15 */
    return (lanes){_mm256_permute2f128_ps(even, odd, 0x20), _mm256_permute2f128_ps(even, odd, 0x31)};
}

INLINE lanes out_of_columns(lanes v)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return (lanes){
        _mm256_permutevar8x32_ps(_mm256_unpacklo_ps(v.low, v.high), order),
        _mm256_permutevar8x32_ps(_mm256_unpackhi_ps(v.low, v.high), order),
    };
}

INLINE void store(float *to, lanes v)
{
    _mm256_store_ps(to, v.low);
    _mm256_store_ps(to + 8, v.high);
}

/* Stores count dot products, times the rows' scales for int8. */
INLINE void store_sums(float *out, __m256 sums, const float *row_scale, size_t count)
{
    const __m256i some = first(count);
    if (row_scale)
        sums = _mm256_mul_ps(sums, _mm256_maskload_ps(row_scale, some));
    _mm256_maskstore_ps(out, some, sums);
}

/* What is the same for a format in all kernels; constants after inlining. */
struct format {
    load_weights *load; /* NULL: bf12, which has functions of its own; then all below is 0 */
    load_tail *tail; /* NULL where k is a multiple of 32, and there are scales for 32 */
    size_t line;     /* weights in 64 bytes */
    int columns;     /* load gives columns, and x is in them too */
    int scaled;      /* d->scale holds a float for each output */
};

INLINE const float *row_scale(const struct dots *d, struct format f, size_t j)
{
    return f.scaled ? (const float *)d->scale + j : NULL;
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

INLINE void store_few(const struct dots *d, size_t j, size_t count, lanes acc[FEW][FEW_N], struct format f, size_t outputs,
                      size_t rows)
{
    for (size_t r = 0; r < rows; r++) {
        lanes v[8];
        for (size_t i = 0; i < 8; i++)
            v[i] = f.columns ? out_of_columns(acc[r][i % outputs]) : acc[r][i % outputs];
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
    lanes acc[FEW][FEW_N];
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < outputs; i++)
            acc[r][i] = zero();
    if (!f.tail)
        for (size_t at = 0; at < outputs * scale_stride; at += 64)
            _mm_prefetch((const char *)scale + groups_ahead * outputs * scale_stride + at, _MM_HINT_T0);
    size_t left = d->k;
    for (; left >= f.line; left -= f.line) {
        for (size_t i = 0; i < outputs; i++)
            _mm_prefetch((const char *)next + 64 * i, _MM_HINT_T1);
        next += 64 * outputs;
#pragma GCC unroll 8
        for (size_t at = 0; at < f.line; at += step_of(f))
            few_step(acc, w, stride, scale, scale_stride, x, x_stride, at, f, outputs, rows);
        w += 64;
        scale += f.tail ? 0 : f.line / 32;
        x += f.line;
    }
    for (; left >= step_of(f); left -= step_of(f)) {
        few_step(acc, w, stride, scale, scale_stride, x, x_stride, 0, f, outputs, rows);
        w += 64 / (f.line / step_of(f));
        scale += f.tail ? 0 : 1;
        x += step_of(f);
    }
    if (f.tail && left)
        for (size_t i = 0; i < outputs; i++) {
            const lanes weights = f.tail(w + i * stride, 0, left);
            for (size_t r = 0; r < rows; r++)
                acc[r][i] = fma16(weights, load_some(x + r * x_stride, left, 0.0f), acc[r][i]);
        }
    store_few(d, j, count, acc, f, outputs, rows);
}

/* `outputs` and `rows` are constants: together they fill the registers. */
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
    const struct exponents exponents = exponents_bf12(base);
    const uint8_t *group = w + k0 / BF12_GROUP * BF12_BYTES;
    for (size_t at = 0; at < k; at += BF12_GROUP, group += BF12_BYTES, next += BF12_BYTES) {
        lanes weights[2];
        _mm_prefetch((const char *)next, _MM_HINT_T0);
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
                _mm_prefetch((const char *)next + at, _MM_HINT_T1);
            for (size_t i = 0; i < outputs; i++) {
                load_bf12(group + i * d->w_stride, exponents[i], weights);
                few_group(acc, i, weights, d->x + k, d->x_stride, rows);
            }
        }
        if (k == d->k)
            break;
        for (size_t i = 0; i < outputs; i++) {
            float decoded[BF12_GROUP] __attribute__((aligned(32)));
            decode_bf12(decoded, w + i * d->w_stride, base[i], &exceptions[i], k, BF12_GROUP, next);
            weights[0] = load(decoded);
            weights[1] = load(decoded + LANES);
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

/* One tile over one stretch of k, as far as it is whole groups of lanes, half of the lanes: w, x and kept point to that half.
 * w: three rows of decoded weights; kept: what the stretches before left, and what this one leaves. `rows` is a constant. */
INLINE void half_tile(const float *w, const float *x, size_t x_stride, size_t k, __m256 *kept, size_t rows)
{
    __m256 acc[TILE_ROWS][TILE_N];
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < TILE_N; i++)
            acc[r][i] = kept[2 * (r * GROUP_N + i)];
    for (const float *end = w + k; w < end; w += LANES, x += LANES) {
        __m256 weights[TILE_N];
        for (size_t i = 0; i < TILE_N; i++)
            weights[i] = _mm256_load_ps(w + i * STRETCH);
        for (size_t r = 0; r < rows; r++) {
            const __m256 v = _mm256_loadu_ps(x + r * x_stride);
            for (size_t i = 0; i < TILE_N; i++)
                acc[r][i] = _mm256_fmadd_ps(weights[i], v, acc[r][i]);
        }
    }
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < TILE_N; i++)
            kept[2 * (r * GROUP_N + i)] = acc[r][i];
}

INLINE void tile(const float *w, const float *x, size_t x_stride, size_t k, __m256 *kept, size_t rows)
{
    for (size_t i = 0; i < GROUP_N; i += TILE_N)
        for (size_t half = 0; half < 2; half++)
            half_tile(w + i * STRETCH + 8 * half, x + 8 * half, x_stride, k, kept + 2 * i + half, rows);
}

/* The last few elements, whose weights are followed by -0. Apart, so that tile keeps to its registers. */
static __attribute__((noinline)) void tile_tail(const float *w, const float *x, size_t x_stride, size_t k, lanes *kept, size_t rows)
{
    for (size_t r = 0; r < rows; r++) {
        const lanes v = load_some(x + r * x_stride, k, 0.0f);
        for (size_t i = 0; i < GROUP_N; i++)
            kept[r * GROUP_N + i] = fma16(load(w + i * STRETCH), v, kept[r * GROUP_N + i]);
    }
}

static __attribute__((noinline)) void tiles(const float *w, const float *x, size_t x_stride, size_t k, lanes *kept, size_t rows)
{
    const size_t whole = k / LANES * LANES;
    if (whole) {
        size_t r = 0;
        for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
            tile(w, x + r * x_stride, x_stride, whole, &kept[r * GROUP_N].low, TILE_ROWS);
        switch (rows - r) {
        case 3: tile(w, x + r * x_stride, x_stride, whole, &kept[r * GROUP_N].low, 3); break;
        case 2: tile(w, x + r * x_stride, x_stride, whole, &kept[r * GROUP_N].low, 2); break;
        case 1: tile(w, x + r * x_stride, x_stride, whole, &kept[r * GROUP_N].low, 1); break;
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
        _mm_prefetch((const char *)next, _MM_HINT_T0);
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
    const uint8_t *next = k0 + k < d->k ? w + (k0 + k) / LANES * nbytes : w + GROUP_N * d->w_stride;
    if (f.load)
        decode(to, w, scale, k0, k, next, f);
    else
        decode_bf12(to, w, *scale, exceptions, k0, k, next);
}

/* Up to MOST_ROWS rows from row0 on. kept: rows by GROUP_N; decoded: GROUP_N stretches. */
INLINE void many(const struct dots *d, size_t row0, size_t rows, struct format f, lanes *kept, float *decoded)
{
    for (size_t j = 0; j < d->n; j += GROUP_N) {
        const size_t count = d->n - j < GROUP_N ? d->n - j : GROUP_N; /* what is decoded past it is of an earlier group */
        struct bf12_exceptions exceptions[GROUP_N] = {{0}};
        for (size_t i = 0; !f.load && i < count; i++)
            exceptions[i] = bf12_exceptions(d, j + i);
        for (size_t i = 0; i < rows * GROUP_N; i++)
            kept[i] = zero();
        for (size_t k0 = 0; k0 < d->k; k0 += STRETCH) {
            const size_t k = d->k - k0 < STRETCH ? d->k - k0 : STRETCH;
            for (size_t i = 0; i < count; i++)
                decode_row(d, j + i, k0, k, &exceptions[i], decoded + i * STRETCH, f);
            tiles(decoded, d->x + row0 * d->x_stride + k0, d->x_stride, k, kept, rows);
        }
        for (size_t r = 0; r < rows; r++) {
            lanes v[8];
            for (size_t i = 0; i < 8; i++)
                v[i] = kept[r * GROUP_N + i % GROUP_N];
            store_sums(d->out + (row0 + r) * d->out_stride + j, trees(v), row_scale(d, f, j), count);
        }
    }
}

/* scratch: the lanes of up to MOST_ROWS rows by GROUP_N outputs, then GROUP_N decoded stretches. */
INLINE void many_blocks(const struct dots *d, struct format f, void *scratch)
{
    lanes *kept = scratch;
    float *decoded = (float *)(kept + MOST_ROWS * GROUP_N);
    for (size_t i = 0; i < GROUP_N * STRETCH; i += LANES)
        store(decoded + i, zero()); /* groups of fewer outputs multiply what was there */
    for (size_t r = 0; r < d->rows; r += MOST_ROWS)
        many(d, r, d->rows - r < MOST_ROWS ? d->rows - r : MOST_ROWS, f, kept, decoded);
}

/* ---- the formats ---- */

INLINE void few_rows(const struct dots *d, const float *x, size_t x_stride, struct format f)
{
    switch (d->rows) {
    case 1: few(d, x, x_stride, f, 4, 1); break;
    case 2: few(d, x, x_stride, f, 2, 2); break;
    case 3: few(d, x, x_stride, f, 1, 3); break;
    case 4: few(d, x, x_stride, f, 1, 4); break;
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
        many_blocks(d, (struct format){load_mxfp4, NULL, 128, 0, 0}, scratch);
        return;
    }
    float *x = scratch;
    for (size_t r = 0; r < d->rows; r++)
        for (size_t k = 0; k < d->k; k += LANES)
            store(x + r * d->k + k, into_columns(load(d->x + r * d->x_stride + k)));
    few_rows(d, x, d->k, (struct format){load_mxfp4_columns, NULL, 128, 1, 0});
}

static void dots_bf16(const struct dots *d, void *scratch) { dots(d, (struct format){load_bf16, tail_bf16, 32, 0, 0}, scratch); }
static void dots_f32(const struct dots *d, void *scratch) { dots(d, (struct format){load_f32, tail_f32, 16, 0, 0}, scratch); }
static void dots_int8(const struct dots *d, void *scratch) { dots(d, (struct format){load_int8, tail_int8, 64, 0, 1}, scratch); }

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

const struct matmul_kernels matmul_avx2 = {dots_mxfp4, dots_bf16, dots_f32, dots_int8, dots_bf12};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
