/* A vector of sixteen floats; needs AVX-512 F, BW, DQ and VL. The names are explained in lanes_scalar.h. */
#ifndef DELTAFIN_LANES_H
#define DELTAFIN_LANES_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define LANE static inline __attribute__((always_inline))
#define VEC 16

typedef __m512 vec;
typedef __m512i ivec;
typedef __mmask16 vmask;

LANE vmask vec_first(size_t n) { return (vmask)((1u << n) - 1); }

LANE vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
LANE void vec_store(float *p, vec a) { _mm512_storeu_ps(p, a); }
LANE vec vec_load_some(const float *p, size_t n) { return _mm512_maskz_loadu_ps(vec_first(n), p); }
LANE void vec_store_some(float *p, vec a, size_t n) { _mm512_mask_storeu_ps(p, vec_first(n), a); }
LANE vec vec_set(float a) { return _mm512_set1_ps(a); }

LANE vec vec_widen(const uint16_t *p)
{
    __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
LANE vec vec_widen_some(const uint16_t *p, size_t n)
{
    __m256i bits = _mm256_maskz_loadu_epi16(vec_first(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

LANE vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
LANE vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
LANE vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
LANE vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
LANE vec vec_sqrt(vec a) { return _mm512_sqrt_ps(a); }
LANE vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
LANE vec vec_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
LANE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); } /* a > b ? a : b, for NaN and zeros too */
LANE vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }

LANE vmask vec_gt(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
LANE vmask vec_lt(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
LANE vmask vec_eq(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
LANE vmask vec_is_nan(vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
LANE vec vec_select(vmask m, vec yes, vec no) { return _mm512_mask_blend_ps(m, no, yes); }

LANE ivec vec_bits(vec a) { return _mm512_castps_si512(a); }
LANE vec vec_of_bits(ivec a) { return _mm512_castsi512_ps(a); }
LANE ivec ivec_set(int32_t a) { return _mm512_set1_epi32(a); }
LANE ivec ivec_add(ivec a, ivec b) { return _mm512_add_epi32(a, b); }
LANE ivec ivec_sub(ivec a, ivec b) { return _mm512_sub_epi32(a, b); }
LANE ivec ivec_and(ivec a, ivec b) { return _mm512_and_si512(a, b); }
LANE ivec ivec_or(ivec a, ivec b) { return _mm512_or_si512(a, b); }
LANE ivec ivec_left(ivec a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
LANE ivec ivec_right(ivec a, int n) { return _mm512_srai_epi32(a, (unsigned)n); }
LANE vec ivec_to_vec(ivec a) { return _mm512_cvtepi32_ps(a); }

LANE __m256 lanes_low(vec a) { return _mm512_castps512_ps256(a); }
LANE __m256 lanes_high(vec a) { return _mm512_extractf32x8_ps(a, 1); }

LANE float vec_tree(vec v)
{
    __m256 a = _mm256_add_ps(lanes_low(v), lanes_high(v));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

/* Each 256-bit half, then each 128-bit quarter, carries one vector's level of the tree. */
LANE void vec_tree4(float *out, vec a, vec b, vec c, vec d)
{
    vec ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); /* a a b b */
    vec cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee)); /* c c d d */
    vec abcd = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)); /* a b c d */
    vec pairs = _mm512_add_ps(abcd, _mm512_shuffle_ps(abcd, abcd, 0x4e));
    vec sums = _mm512_add_ps(pairs, _mm512_movehdup_ps(pairs));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums)));
}

LANE float vec_highest(vec v)
{
    __m256 a = _mm256_max_ps(lanes_low(v), lanes_high(v));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

#endif
