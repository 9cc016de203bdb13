/* Element by element. Each `.._step` does the `some` <= VEC elements from i on. */

/* Calls step(.., i, some) over n elements: whole vecs, then the rest. No argument may be called `each`. */
#define EACH(n, step, ...)                        \
    do {                                          \
        size_t each = 0;                          \
        for (; each + VEC <= (n); each += VEC)    \
            step(__VA_ARGS__, each, (size_t)VEC); \
        if (each < (n))                           \
            step(__VA_ARGS__, each, (n) - each);  \
    } while (0)

#define MAP1(name, f)                                                                      \
    LANE void name##_step(float *out, const float *x, size_t i, size_t some)               \
    {                                                                                      \
        store(out + i, f(load(x + i, some)), some);                                        \
    }                                                                                      \
    static void name(float *out, const float *x, size_t n) { EACH(n, name##_step, out, x); }

#define MAP2(name, f)                                                                                      \
    LANE void name##_step(float *out, const float *a, const float *b, size_t i, size_t some)               \
    {                                                                                                      \
        store(out + i, f(load(a + i, some), load(b + i, some)), some);                                     \
    }                                                                                                      \
    static void name(float *out, const float *a, const float *b, size_t n) { EACH(n, name##_step, out, a, b); }

LANE vec gated(vec a, vec gate) { return vec_mul(a, vec_sigmoid(gate)); }

MAP1(map_exp, vec_exp)
MAP1(map_log, vec_log)
MAP1(map_tanh, vec_tanh)
MAP1(map_sigmoid, vec_sigmoid)
MAP2(map_add, vec_add)
MAP2(map_multiply, vec_mul)
MAP2(map_sigmoid_gate, gated)

LANE void widen_step(float *out, const uint16_t *bits, size_t i, size_t some) { store(out + i, widen(bits + i, some), some); }

static void map_widen(float *out, const uint16_t *bits, size_t n) { EACH(n, widen_step, out, bits); }

LANE void situ_step(float *out, const float *gate, const float *up, vec beta, vec linear_beta, size_t i, size_t some)
{
    vec g = load(gate + i, some), u = load(up + i, some);
    vec left = vec_mul(vec_mul(beta, vec_tanh(vec_div(g, beta))), vec_sigmoid(g));
    vec right = vec_mul(linear_beta, vec_tanh(vec_div(u, linear_beta)));
    store(out + i, vec_mul(left, right), some);
}

static void map_situ(float *out, const float *gate, const float *up, float beta, float linear_beta, size_t n)
{
    EACH(n, situ_step, out, gate, up, vec_set(beta), vec_set(linear_beta));
}
