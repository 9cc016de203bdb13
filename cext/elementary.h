/* exp, log, tanh and sigmoid as docs/arithmetic.md defines them. Include a lanes_*.h first.
 *
 * NaN in gives the one NaN 0x7fc00000 out: which NaN an operation passes on differs between processors. */
#ifndef DELTAFIN_ELEMENTARY_H
#define DELTAFIN_ELEMENTARY_H

#define LOG2_E 0x1.715476p+0f
#define ROUNDER 0x1.8p+23f /* added to |a| < 2^22 it leaves a's nearest integer in the low bits */

LANE vec canonical(vec result, vec x) { return vec_select(vec_is_nan(x), vec_of_bits(ivec_set(0x7fc00000)), result); }

LANE vec magnitude(vec x) { return vec_of_bits(ivec_and(vec_bits(x), ivec_set(0x7fffffff))); }
LANE vec with_sign_of(vec size, vec x)
{
    return vec_of_bits(ivec_or(vec_bits(size), ivec_and(vec_bits(x), ivec_set(INT32_MIN))));
}

/* 2^n for -126 <= n <= 127 */
LANE vec power_of_two(ivec n) { return vec_of_bits(ivec_left(ivec_add(n, ivec_set(127)), 23)); }

/* x = n ln 2 + r with |r| <= 0.35; returns e^r - 1, n in *n. |x| <= 104. */
LANE vec exp_reduced(vec x, ivec *n)
{
    vec rounded = vec_fma(x, vec_set(LOG2_E), vec_set(ROUNDER));
    *n = ivec_sub(vec_bits(rounded), vec_bits(vec_set(ROUNDER)));
    vec whole = vec_sub(rounded, vec_set(ROUNDER));
    vec r = vec_fnma(whole, vec_set(0x1.62e430p-1f), x);
    r = vec_fnma(whole, vec_set(-0x1.05c610p-29f), r);
    vec q = vec_fma(vec_set(0x1.6a4002p-10f), r, vec_set(0x1.1239ecp-7f));
    q = vec_fma(q, r, vec_set(0x1.5558bep-5f));
    q = vec_fma(q, r, vec_set(0x1.555492p-3f));
    q = vec_fma(q, r, vec_set(0x1.fffffcp-2f));
    return vec_fma(vec_mul(r, r), q, r);
}

LANE vec vec_exp(vec x)
{
    vec clamped = vec_max(vec_min(x, vec_set(89.0f)), vec_set(-104.0f)); /* where it is infinity and 0 */
    ivec n;
    vec p = vec_add(exp_reduced(clamped, &n), vec_set(1.0f));
    ivec half = ivec_right(n, 1); /* 2^n itself may be no float; the first product is exact */
    p = vec_mul(vec_mul(p, power_of_two(half)), power_of_two(ivec_sub(n, half)));
    return canonical(p, x);
}

LANE vec vec_log(vec x)
{
    vmask small = vec_lt(x, vec_set(0x1p-126f));
    vec scaled = vec_select(small, vec_mul(x, vec_set(0x1p+25f)), x);
    vec shift = vec_select(small, vec_set(-25.0f), vec_set(0.0f));
    const ivec root_half = ivec_set(0x3f3504f3); /* so that the mantissa m is in [sqrt(1/2), sqrt(2)) */
    ivec bits = ivec_add(vec_bits(scaled), ivec_sub(ivec_set(0x3f800000), root_half));
    vec e = vec_add(ivec_to_vec(ivec_sub(ivec_right(bits, 23), ivec_set(127))), shift);
    vec m = vec_of_bits(ivec_add(ivec_and(bits, ivec_set(0x7fffff)), root_half));

    vec f = vec_sub(m, vec_set(1.0f));
    vec s = vec_div(f, vec_add(f, vec_set(2.0f)));
    vec z = vec_mul(s, s);
    vec q = vec_fma(vec_set(0x1.f1355cp-3f), z, vec_set(0x1.23d3f0p-2f));
    q = vec_fma(q, z, vec_set(0x1.999c26p-2f));
    q = vec_fma(q, z, vec_set(0x1.555554p-1f));
    vec half_square = vec_mul(vec_mul(vec_set(0.5f), f), f);
    vec tail = vec_fma(s, vec_fma(z, q, half_square), vec_mul(e, vec_set(0x1.7f7d1cp-20f)));
    vec y = vec_sub(f, vec_sub(half_square, tail));
    y = vec_fma(e, vec_set(0x1.62e4p-1f), y);

    y = vec_select(vec_eq(x, vec_set(INFINITY)), x, y);
    y = vec_select(vec_eq(x, vec_set(0.0f)), vec_set(-INFINITY), y);
    y = vec_select(vec_lt(x, vec_set(0.0f)), vec_of_bits(ivec_set(0x7fc00000)), y);
    return canonical(y, x);
}

/* t / (t + 2) for t = e^(2|x|) - 1 */
LANE vec vec_tanh(vec x)
{
    vec a = vec_min(magnitude(x), vec_set(10.0f)); /* from there on it is 1 */
    ivec n;
    vec t = exp_reduced(vec_add(a, a), &n);
    vec scale = power_of_two(n);
    t = vec_fma(scale, t, vec_sub(scale, vec_set(1.0f)));
    vec y = vec_div(t, vec_add(t, vec_set(2.0f)));
    return canonical(with_sign_of(y, x), x);
}

/* Never through e^x with x > 0, which overflows. */
LANE vec vec_sigmoid(vec x)
{
    vec e = vec_exp(with_sign_of(magnitude(x), vec_set(-0.0f))); /* e^-|x| */
    vec top = vec_select(vec_lt(x, vec_set(0.0f)), e, vec_set(1.0f));
    return canonical(vec_div(top, vec_add(vec_set(1.0f), e)), x);
}

#endif
