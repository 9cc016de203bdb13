/* A vector of four floats. The names are explained in lanes_scalar.h. */
#ifndef DELTAFIN_LANES_H
#define DELTAFIN_LANES_H

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANE static inline __attribute__((always_inline))
#define VEC 4

typedef float32x4_t vec;
typedef int32x4_t ivec;
typedef uint32x4_t vmask;

LANE vmask vec_first(size_t n)
{
    static const uint32_t number[4] = {0, 1, 2, 3};
    return vcltq_u32(vld1q_u32(number), vdupq_n_u32((uint32_t)n));
}

LANE vec vec_load(const float *p) { return vld1q_f32(p); }
LANE void vec_store(float *p, vec a) { vst1q_f32(p, a); }
LANE vec vec_load_some(const float *p, size_t n)
{
    float some[4] = {0};
    memcpy(some, (const void *)p, n * sizeof *some);
    return vld1q_f32(some);
}
LANE void vec_store_some(float *p, vec a, size_t n)
{
    float some[4];
    vst1q_f32(some, a);
    memcpy(p, some, n * sizeof *some);
}
LANE vec vec_set(float a) { return vdupq_n_f32(a); }

LANE vec vec_widen(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
LANE vec vec_widen_some(const uint16_t *p, size_t n)
{
    uint16_t some[4] = {0};
    memcpy(some, (const void *)p, n * sizeof *some);
    return vec_widen(some);
}

LANE vec vec_add(vec a, vec b) { return vaddq_f32(a, b); }
LANE vec vec_sub(vec a, vec b) { return vsubq_f32(a, b); }
LANE vec vec_mul(vec a, vec b) { return vmulq_f32(a, b); }
LANE vec vec_div(vec a, vec b) { return vdivq_f32(a, b); }
LANE vec vec_sqrt(vec a) { return vsqrtq_f32(a); }
LANE vec vec_fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
LANE vec vec_fnma(vec a, vec b, vec c) { return vfmsq_f32(c, a, b); }
LANE vmask vec_gt(vec a, vec b) { return vcgtq_f32(a, b); }
LANE vmask vec_lt(vec a, vec b) { return vcltq_f32(a, b); }
LANE vmask vec_eq(vec a, vec b) { return vceqq_f32(a, b); }
LANE vmask vec_is_nan(vec a) { return vmvnq_u32(vceqq_f32(a, a)); }
LANE vec vec_select(vmask m, vec yes, vec no) { return vbslq_f32(m, yes, no); }
/* Not vmaxq: it differs from a > b ? a : b for NaN and for zeros of both signs. */
LANE vec vec_max(vec a, vec b) { return vec_select(vec_gt(a, b), a, b); }
LANE vec vec_min(vec a, vec b) { return vec_select(vec_lt(a, b), a, b); }

LANE ivec vec_bits(vec a) { return vreinterpretq_s32_f32(a); }
LANE vec vec_of_bits(ivec a) { return vreinterpretq_f32_s32(a); }
LANE ivec ivec_set(int32_t a) { return vdupq_n_s32(a); }
LANE ivec ivec_add(ivec a, ivec b) { return vaddq_s32(a, b); }
LANE ivec ivec_sub(ivec a, ivec b) { return vsubq_s32(a, b); }
LANE ivec ivec_and(ivec a, ivec b) { return vandq_s32(a, b); }
LANE ivec ivec_or(ivec a, ivec b) { return vorrq_s32(a, b); }
LANE ivec ivec_left(ivec a, int n) { return vshlq_s32(a, vdupq_n_s32(n)); }
LANE ivec ivec_right(ivec a, int n) { return vshlq_s32(a, vdupq_n_s32(-n)); }
LANE vec ivec_to_vec(ivec a) { return vcvtq_f32_s32(a); }

LANE float vec_tree(vec a)
{
    float32x2_t c = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(c, 0) + vget_lane_f32(c, 1);
}

LANE void vec_tree4(float *out, vec a, vec b, vec c, vec d)
{
    vec ab = vcombine_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a)), vadd_f32(vget_low_f32(b), vget_high_f32(b)));
    vec cd = vcombine_f32(vadd_f32(vget_low_f32(c), vget_high_f32(c)), vadd_f32(vget_low_f32(d), vget_high_f32(d)));
    vst1q_f32(out, vpaddq_f32(ab, cd));
}

LANE float vec_highest(vec a)
{
    float b[4];
    vst1q_f32(b, a);
    float low = b[0] > b[2] ? b[0] : b[2], high = b[1] > b[3] ? b[1] : b[3];
    return low > high ? low : high;
}

#endif
