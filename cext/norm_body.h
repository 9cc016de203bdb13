/* Norms, the mix of residual sources, and the sum of a row's experts. */

static float inverse_rms(const float *v, float eps, size_t n) { return 1.0f / sqrtf(sumsq(v, n) / (float)n + eps); }

LANE void norm_step(float *out, const float *x, const float *w, vec r, size_t i, size_t some)
{
    store(out + i, vec_mul(vec_mul(load(x + i, some), r), load(w + i, some)), some);
}

static void rms_norm(float *out, const float *x, const float *w, float eps, size_t n)
{
    vec r = vec_set(inverse_rms(x, eps, n));
    EACH(n, norm_step, out, x, w, r);
}

LANE void mix_step(float *out, const float *const *sources, const float *a, size_t count, size_t i, size_t some)
{
    vec sum = vec_mul(vec_set(a[0]), load(sources[0] + i, some));
    for (size_t j = 1; j < count; j++)
        sum = vec_fma(vec_set(a[j]), load(sources[j] + i, some), sum);
    store(out + i, sum, some);
}

static void mix(float *out, const float *const *sources, size_t count, const float *u, float eps, size_t n)
{
    if (count == 1) {
        memcpy(out, sources[0], n * sizeof *out);
        return;
    }
    float a[MIX_MOST] = {0};
    for (size_t j = 0; j < count; j++)
        a[j] = inverse_rms(sources[j], eps, n) * dot(u, sources[j], n);
    float top = highest(a, count);
    for (size_t j = 0; j < count; j++)
        a[j] -= top;
    map_exp(a, a, count);
    float total = a[0];
    for (size_t j = 1; j < count; j++)
        total += a[j];
    for (size_t j = 0; j < count; j++)
        a[j] /= total;
    EACH(n, mix_step, out, sources, a, count);
}

LANE void combine_step(float *out, const float *outputs, const float *weights, size_t count, size_t n, size_t i, size_t some)
{
    vec sum = vec_set(0.0f);
    for (size_t j = 0; j < count; j++)
        sum = vec_fma(vec_set(weights[j]), load(outputs + j * n + i, some), sum);
    store(out + i, sum, some);
}

static void combine(float *out, const float *outputs, const float *weights, size_t count, size_t n)
{
    EACH(n, combine_step, out, outputs, weights, count, n);
}

/* x - x is 0 for a finite x and NaN for every other, and NaN stays in a sum. */
LANE void finite_step(const float *x, vec *sum, size_t i, size_t some)
{
    vec v = load(x + i, some);
    *sum = vec_add(*sum, vec_sub(v, v));
}

static int finite_row(const float *x, size_t n)
{
    vec sum = vec_set(0.0f);
    EACH(n, finite_step, x, &sum);
    return vec_tree(sum) == 0.0f;
}
