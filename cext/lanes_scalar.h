/* A vector of one float: with it, the kernels read as plain C and are the specification of all others. */
#ifndef DELTAFIN_LANES_H
#define DELTAFIN_LANES_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANE static inline __attribute__((always_inline))
#define VEC 1 /* floats in a vec */

typedef float vec;
typedef int32_t ivec; /* as many 32-bit integers; they wrap */
typedef int vmask;    /* as many truths */

/* load_some and store_some touch the first n elements, 0 < n <= VEC; the rest are loaded as +0. */
LANE vec vec_load(const float *p) /* at any address, as all loads: weights lie as the file has them */
{
    vec a;
    memcpy(&a, (const void *)p, sizeof a);
    return a;
}
LANE void vec_store(float *p, vec a) { *p = a; }
LANE vec vec_load_some(const float *p, size_t n) { (void)n; return vec_load(p); }
LANE void vec_store_some(float *p, vec a, size_t n) { (void)n; *p = a; }
LANE vec vec_set(float a) { return a; }

LANE vec vec_widen(const uint16_t *p)
{
    uint16_t half;
    memcpy(&half, (const void *)p, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    vec a;
    memcpy(&a, &bits, sizeof a);
    return a;
}
LANE vec vec_widen_some(const uint16_t *p, size_t n) { (void)n; return vec_widen(p); }

LANE vec vec_add(vec a, vec b) { return a + b; }
LANE vec vec_sub(vec a, vec b) { return a - b; }
LANE vec vec_mul(vec a, vec b) { return a * b; }
LANE vec vec_div(vec a, vec b) { return a / b; }
LANE vec vec_sqrt(vec a) { return sqrtf(a); }
LANE vec vec_fma(vec a, vec b, vec c) { return fmaf(a, b, c); }  /* a * b + c */
LANE vec vec_fnma(vec a, vec b, vec c) { return fmaf(-a, b, c); } /* c - a * b */
LANE vec vec_max(vec a, vec b) { return a > b ? a : b; }
LANE vec vec_min(vec a, vec b) { return a < b ? a : b; }

LANE vmask vec_gt(vec a, vec b) { return a > b; }
LANE vmask vec_lt(vec a, vec b) { return a < b; }
LANE vmask vec_eq(vec a, vec b) { return a == b; }
LANE vmask vec_is_nan(vec a) { return a != a; }
LANE vmask vec_first(size_t n) { return n > 0; } /* true in the first n */
LANE vec vec_select(vmask m, vec yes, vec no) { return m ? yes : no; }

LANE ivec vec_bits(vec a)
{
    ivec bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}
LANE vec vec_of_bits(ivec bits)
{
    vec a;
    memcpy(&a, &bits, sizeof a);
    return a;
}
LANE ivec ivec_set(int32_t a) { return a; }
LANE ivec ivec_add(ivec a, ivec b) { return (ivec)((uint32_t)a + (uint32_t)b); }
LANE ivec ivec_sub(ivec a, ivec b) { return (ivec)((uint32_t)a - (uint32_t)b); }
LANE ivec ivec_and(ivec a, ivec b) { return a & b; }
LANE ivec ivec_or(ivec a, ivec b) { return a | b; }
LANE ivec ivec_left(ivec a, int n) { return (ivec)((uint32_t)a << n); }
LANE ivec ivec_right(ivec a, int n) { return a >> n; } /* keeps the sign */
LANE vec ivec_to_vec(ivec a) { return (float)a; }      /* exact below 2^24 */

/* The halving tree over the elements of a vec, and of four at once into out[4]. */
LANE float vec_tree(vec a) { return a; }
LANE void vec_tree4(float *out, vec a, vec b, vec c, vec d)
{
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
}
LANE float vec_highest(vec a) { return a; }

#endif
