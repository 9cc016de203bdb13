/* A vector of eight floats. The names are explained in lanes_scalar.h. */
#ifndef DELTAFIN_LANES_H
#define DELTAFIN_LANES_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANE static inline __attribute__((always_inline))
#define VEC 8

typedef __m256 vec;
typedef __m256i ivec;
typedef __m256 vmask;

LANE ivec lanes_below(size_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

LANE vec vec_load(const float *p) { return _mm256_loadu_ps(p); }
LANE void vec_store(float *p, vec a) { _mm256_storeu_ps(p, a); }
LANE vec vec_load_some(const float *p, size_t n) { return _mm256_maskload_ps(p, lanes_below(n)); }
LANE void vec_store_some(float *p, vec a, size_t n) { _mm256_maskstore_ps(p, lanes_below(n), a); }
LANE vec vec_set(float a) { return _mm256_set1_ps(a); }

LANE vec vec_widen(const uint16_t *p)
{
    __m128i bits = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
LANE vec vec_widen_some(const uint16_t *p, size_t n)
{
    uint16_t some[8] = {0};
    memcpy(some, (const void *)p, n * sizeof *some);
    return vec_widen(some);
}

LANE vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
LANE vec vec_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
LANE vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
LANE vec vec_div(vec a, vec b) { return _mm256_div_ps(a, b); }
LANE vec vec_sqrt(vec a) { return _mm256_sqrt_ps(a); }
LANE vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
LANE vec vec_fnma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
LANE vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); } /* a > b ? a : b, for NaN and zeros too */
LANE vec vec_min(vec a, vec b) { return _mm256_min_ps(a, b); }

LANE vmask vec_gt(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
LANE vmask vec_lt(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
LANE vmask vec_eq(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
LANE vmask vec_is_nan(vec a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
LANE vmask vec_first(size_t n) { return _mm256_castsi256_ps(lanes_below(n)); }
LANE vec vec_select(vmask m, vec yes, vec no) { return _mm256_blendv_ps(no, yes, m); }

LANE ivec vec_bits(vec a) { return _mm256_castps_si256(a); }
LANE vec vec_of_bits(ivec a) { return _mm256_castsi256_ps(a); }
LANE ivec ivec_set(int32_t a) { return _mm256_set1_epi32(a); }
LANE ivec ivec_add(ivec a, ivec b) { return _mm256_add_epi32(a, b); }
LANE ivec ivec_sub(ivec a, ivec b) { return _mm256_sub_epi32(a, b); }
LANE ivec ivec_and(ivec a, ivec b) { return _mm256_and_si256(a, b); }
LANE ivec ivec_or(ivec a, ivec b) { return _mm256_or_si256(a, b); }
LANE ivec ivec_left(ivec a, int n) { return _mm256_slli_epi32(a, n); }
LANE ivec ivec_right(ivec a, int n) { return _mm256_srai_epi32(a, n); }
LANE vec ivec_to_vec(ivec a) { return _mm256_cvtepi32_ps(a); }

LANE float vec_tree(vec a)
{
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

/* Each 128-bit half carries one vector's level of the tree. */
LANE void vec_tree4(float *out, vec a, vec b, vec c, vec d)
{
    vec ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    vec cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    vec acbd = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee)); /* a a c c | b b d d */
    vec sums = _mm256_add_ps(acbd, _mm256_movehdup_ps(acbd));                                     /* a . c . | b . d . */
    __m128 even = _mm256_castps256_ps128(sums), odd = _mm256_extractf128_ps(sums, 1);
    _mm_storeu_ps(out, _mm_unpacklo_ps(_mm_shuffle_ps(even, even, 0x88), _mm_shuffle_ps(odd, odd, 0x88)));
}

LANE float vec_highest(vec a)
{
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

#endif
