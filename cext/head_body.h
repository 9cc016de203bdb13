/* What is read from logits. */

static size_t argmax(const float *x, size_t n)
{
    size_t at = 0;
    float best = -INFINITY;
    for (size_t i = 0; i < n; i += LOG_PROB_TILE) {
        float top = highest(x + i, least(n - i, LOG_PROB_TILE));
        if (top > best) {
            best = top;
            at = i;
        }
    }
    for (size_t i = at; i < n; i++)
        if (x[i] == best)
            return i;
    return 0; /* NaN everywhere */
}

/* sum(exp(x - top)); the terms are also stored to `terms` unless that is NULL. terms may be exactly x. */
LANE float sum_of_exps(float *terms, const float *x, float top, size_t n)
{
    const vec m = vec_set(top);
    lanes sum = lanes_zero();
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (size_t p = 0; p < PARTS; p++) {
            vec e = vec_exp(vec_sub(vec_load(x + i + p * VEC), m));
            if (terms)
                vec_store(terms + i + p * VEC, e);
            sum.part[p] = vec_add(sum.part[p], e);
        }
    for (size_t p = 0; p < PARTS; p++) {
        size_t here = in_part(n - i, p), at = i + p * VEC;
        if (!here)
            break;
        vec e = vec_exp(vec_sub(vec_load_some(x + at, here), m));
        if (terms)
            vec_store_some(terms + at, e, here);
        sum.part[p] = vec_select(vec_first(here), vec_add(sum.part[p], e), sum.part[p]);
    }
    return lanes_tree(sum);
}

LANE float exp_of(float x)
{
    map_exp(&x, &x, 1);
    return x;
}

static void log_prob_tile(float *top, float *total, const float *logits, size_t n)
{
    float high = highest(logits, n);
    float m = *top > high ? *top : high;
    *total = fmaf(*total, exp_of(*top - m), sum_of_exps(NULL, logits, m, n));
    *top = m;
}
