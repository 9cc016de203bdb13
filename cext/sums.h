/* The sums of docs/arithmetic.md over 16 lanes, whatever the width of a vec. Include a lanes_*.h first. */
#ifndef DELTAFIN_SUMS_H
#define DELTAFIN_SUMS_H

#define PARTS (16 / VEC) /* vecs that hold the 16 lanes: lane i in element i % VEC of part i / VEC */

typedef struct {
    vec part[PARTS];
} lanes;

/* The first n elements, 0 < n <= VEC; where n is known to be VEC this is a plain load or store. */
LANE vec load(const float *p, size_t n) { return n == VEC ? vec_load(p) : vec_load_some(p, n); }
LANE vec widen(const uint16_t *p, size_t n) { return n == VEC ? vec_widen(p) : vec_widen_some(p, n); }
LANE void store(float *p, vec a, size_t n)
{
    if (n == VEC)
        vec_store(p, a);
    else
        vec_store_some(p, a, n);
}

LANE size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* How many of the n elements of a 16-step fall into part p. */
LANE size_t in_part(size_t n, size_t p) { return n <= p * VEC ? 0 : least(n - p * VEC, VEC); }

LANE lanes lanes_zero(void)
{
    lanes a;
    for (size_t p = 0; p < PARTS; p++)
        a.part[p] = vec_set(0.0f);
    return a;
}

LANE float lanes_tree(lanes a)
{
    for (size_t half = PARTS / 2; half; half /= 2)
        for (size_t p = 0; p < half; p++)
            a.part[p] = vec_add(a.part[p], a.part[p + half]);
    return vec_tree(a.part[0]);
}

/* Lanes that have no element at the end stay untouched: even adding zero could change the sign of a zero. */
LANE lanes lanes_fma(lanes sum, const float *a, const float *b, size_t n)
{
    for (size_t p = 0; p < PARTS; p++) {
        size_t here = in_part(n, p);
        if (!here)
            break;
        vec more = vec_fma(load(a + p * VEC, here), load(b + p * VEC, here), sum.part[p]);
        sum.part[p] = here == VEC ? more : vec_select(vec_first(here), more, sum.part[p]);
    }
    return sum;
}

LANE float dot(const float *a, const float *b, size_t n)
{
    lanes sum = lanes_zero();
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        sum = lanes_fma(sum, a + i, b + i, 16);
    if (i < n)
        sum = lanes_fma(sum, a + i, b + i, n - i);
    return lanes_tree(sum);
}

LANE float sumsq(const float *a, size_t n) { return dot(a, a, n); }

LANE float highest(const float *a, size_t n)
{
    vec high = vec_set(-INFINITY);
    size_t i = 0;
    for (; i + VEC <= n; i += VEC)
        high = vec_max(high, vec_load(a + i));
    if (i < n)
        high = vec_max(high, vec_select(vec_first(n - i), vec_load_some(a + i, n - i), high));
    return vec_highest(high);
}

#endif
