/* Kimi Delta Attention between its projections. */

/* One row of one head: y = chain over the taps, then y * sigmoid(y). taps are [tap_count][dim] here. */
static void conv_row(const struct kda_conv *c, float *out, const float *taps, size_t channel, size_t row)
{
    for (size_t i = 0; i < c->dim; i += VEC) {
        size_t some = least(c->dim - i, VEC);
        vec y = vec_set(0.0f);
        for (size_t j = 0; j < c->tap_count; j++) {
            size_t from = row + j; /* counted from the oldest row of the history */
            const float *x = from + 1 < c->tap_count ? c->history + from * 3 * c->width
                                                     : c->in + (from + 1 - c->tap_count) * c->width;
            y = vec_fma(load(taps + j * c->dim + i, some), load(x + channel + i, some), y);
        }
        store(out + i, gated(y, y), some);
    }
}

LANE void unit_step(float *out, vec r, vec scale, size_t i, size_t some)
{
    store(out + i, vec_mul(vec_mul(load(out + i, some), r), scale), some);
}

static void kda_conv(const struct kda_conv *c, size_t head, size_t begin, size_t end, float *scratch)
{
    size_t channel = head * c->dim;
    for (size_t i = 0; i < c->dim; i++)
        for (size_t j = 0; j < c->tap_count; j++)
            memcpy(scratch + j * c->dim + i, (const void *)(c->taps + (channel + i) * c->tap_count + j), sizeof *scratch);
    for (size_t row = begin; row < end; row++) {
        float *out = c->out + row * c->width + channel;
        conv_row(c, out, scratch, channel, row);
        if (c->unit) {
            vec r = vec_set(1.0f / sqrtf(sumsq(out, c->dim) + 1e-6f)), scale = vec_set(c->scale);
            EACH(c->dim, unit_step, out, r, scale);
        }
    }
}

LANE void decay_step(float *alpha, const float *z, const float *bias, vec rate, vec lower_bound, size_t i, size_t some)
{
    vec gate = vec_sigmoid(vec_mul(rate, vec_add(load(z + i, some), load(bias + i, some))));
    store(alpha + i, vec_exp(vec_mul(lower_bound, gate)), some);
}

static void kda_decay(float *alpha, const float *z, const float *bias, const float *rate, float lower_bound, size_t heads,
                      size_t dim)
{
    for (size_t h = 0; h < heads; h++)
        EACH(dim, decay_step, alpha + h * dim, z + h * dim, bias + h * dim, vec_set(rate[h]), vec_set(lower_bound));
}

/* Vecs of a state's row that are worked on together; their sums and changes stay in registers. */
#if VEC == 16
#define STATE_GROUP 2
#else
#define STATE_GROUP 4
#endif
#define STATE_WIDTH (STATE_GROUP * VEC)
_Static_assert(KDA_COLUMNS % STATE_WIDTH == 0, "a call does whole groups");

/* The rows of q, k and alpha of one token and head. */
struct kda_token {
    const float *q, *k, *alpha;
};

/* S' = alpha * S from `from` to `to`; u = chain of k * S'. Here and below S is STATE_GROUP vecs wide. */
LANE void recall(float *to, size_t to_stride, const float *from, size_t from_stride, struct kda_token next, size_t dim, vec *u)
{
    vec sum[STATE_GROUP];
    for (size_t n = 0; n < STATE_GROUP; n++)
        sum[n] = vec_set(0.0f);
    for (size_t i = 0; i < dim; i++) {
        vec alpha = vec_set(next.alpha[i]), k = vec_set(next.k[i]);
        for (size_t n = 0; n < STATE_GROUP; n++) {
            vec s = vec_mul(alpha, vec_load(from + i * from_stride + n * VEC));
            sum[n] = vec_fma(k, s, sum[n]);
            vec_store(to + i * to_stride + n * VEC, s);
        }
    }
    for (size_t n = 0; n < STATE_GROUP; n++)
        u[n] = sum[n];
}

/* S = S' + k c; o = chain of q * S. */
LANE void renew(float *to, size_t to_stride, const float *from, size_t from_stride, struct kda_token now, size_t dim,
                const vec *c, vec *o)
{
    vec sum[STATE_GROUP], change[STATE_GROUP];
    for (size_t n = 0; n < STATE_GROUP; n++)
        sum[n] = vec_set(0.0f), change[n] = c[n];
    for (size_t i = 0; i < dim; i++) {
        vec k = vec_set(now.k[i]), q = vec_set(now.q[i]);
        for (size_t n = 0; n < STATE_GROUP; n++) {
            vec s = vec_fma(k, change[n], vec_load(from + i * from_stride + n * VEC));
            sum[n] = vec_fma(q, s, sum[n]);
            vec_store(to + i * to_stride + n * VEC, s);
        }
    }
    for (size_t n = 0; n < STATE_GROUP; n++)
        o[n] = sum[n];
}

/* renew for one token and recall for the next in one walk over the state. */
LANE void renew_and_recall(float *s, size_t stride, struct kda_token now, struct kda_token next, size_t dim, const vec *c,
                           vec *o, vec *u)
{
    vec read[STATE_GROUP], known[STATE_GROUP], change[STATE_GROUP];
    for (size_t n = 0; n < STATE_GROUP; n++)
        read[n] = known[n] = vec_set(0.0f), change[n] = c[n];
    for (size_t i = 0; i < dim; i++) {
        vec k = vec_set(now.k[i]), q = vec_set(now.q[i]), alpha = vec_set(next.alpha[i]), next_k = vec_set(next.k[i]);
        for (size_t n = 0; n < STATE_GROUP; n++) {
            float *at = s + i * stride + n * VEC;
            vec a = vec_fma(k, change[n], vec_load(at));
            read[n] = vec_fma(q, a, read[n]);
            a = vec_mul(alpha, a);
            known[n] = vec_fma(next_k, a, known[n]);
            vec_store(at, a);
        }
    }
    for (size_t n = 0; n < STATE_GROUP; n++)
        o[n] = read[n], u[n] = known[n];
}

LANE struct kda_token kda_token(const struct kda_recur *a, size_t head, size_t row)
{
    size_t at = row * a->width + head * a->dim;
    return (struct kda_token){a->q + at, a->k + at, a->alpha + at};
}

/* Successive tokens are too far apart for the processor to guess: 49 KB in K3. */
LANE void fetch_ahead(struct kda_token t, size_t dim)
{
    for (size_t i = 0; i < dim; i += 16) {
        __builtin_prefetch(t.q + i);
        __builtin_prefetch(t.k + i);
        __builtin_prefetch(t.alpha + i);
    }
}

/* Where `some` < STATE_WIDTH columns are left, the walk is over a copy padded with zeros. */
static void copy_columns(float *to, size_t to_stride, const float *from, size_t from_stride, size_t rows, size_t some)
{
    for (size_t i = 0; i < rows; i++)
        memcpy(to + i * to_stride, from + i * from_stride, some * sizeof *to);
}

/* All rows over the columns column .. column + some of a head's state. The walk between the first token and the last is
 * over a copy without gaps: in place, 128 rows of 128 bytes every 512 bytes would share a quarter of the L1's sets. */
static void recur_group(const struct kda_recur *a, size_t head, size_t column, size_t some, float *s)
{
    size_t dim = a->dim, at = head * dim * dim + column;
    const float *from = a->state + at;
    float *to = a->new_state ? a->new_state + at : s; /* nobody may want the state: then it ends in the copy */
    size_t from_stride = dim, to_stride = a->new_state ? dim : STATE_WIDTH;
    if (a->rows == 0) {
        if (a->new_state)
            copy_columns(to, dim, from, dim, dim, some);
        return;
    }
    if (some < STATE_WIDTH) {
        memset(s, 0, dim * STATE_WIDTH * sizeof *s);
        copy_columns(s, STATE_WIDTH, from, dim, dim, some);
        from = to = s;
        from_stride = to_stride = STATE_WIDTH;
    }

    vec u[STATE_GROUP], c[STATE_GROUP], o[STATE_GROUP];
    struct kda_token now = kda_token(a, head, 0);
    recall(s, STATE_WIDTH, from, from_stride, now, dim, u);
    for (size_t row = 0; row < a->rows; row++) {
        size_t mine = row * a->width + head * dim + column;
        vec beta = vec_set(a->beta[row * a->heads + head]);
        for (size_t n = 0; n < STATE_GROUP; n++) {
            size_t here = some <= n * VEC ? 0 : least(some - n * VEC, VEC);
            vec v = here ? load(a->v + mine + n * VEC, here) : vec_set(0.0f);
            c[n] = vec_mul(beta, vec_sub(v, u[n]));
        }
        if (row + 1 < a->rows) {
            struct kda_token next = kda_token(a, head, row + 1);
            if (row + 2 < a->rows)
                fetch_ahead(kda_token(a, head, row + 2), dim);
            renew_and_recall(s, STATE_WIDTH, now, next, dim, c, o, u);
            now = next;
        } else {
            renew(to, to_stride, s, STATE_WIDTH, now, dim, c, o);
        }
        for (size_t n = 0; n < STATE_GROUP && n * VEC < some; n++)
            store(a->out + mine + n * VEC, o[n], least(some - n * VEC, VEC));
    }
    if (some < STATE_WIDTH && a->new_state)
        copy_columns(a->new_state + at, dim, s, STATE_WIDTH, dim, some);
}

static void kda_recur(const struct kda_recur *a, size_t head, size_t column, float *scratch)
{
    size_t end = least(column + KDA_COLUMNS, a->dim);
    for (; column < end; column += STATE_WIDTH)
        recur_group(a, head, column, least(end - column, STATE_WIDTH), scratch);
}

LANE void gated_norm_step(float *out, const float *o, const float *gate, const float *norm, vec r, size_t i, size_t some)
{
    vec normed = vec_mul(vec_mul(load(o + i, some), r), load(norm + i, some));
    store(out + i, gated(normed, load(gate + i, some)), some);
}

static void kda_output(float *out, const float *o, const float *gate, const float *norm, float eps, size_t heads, size_t dim)
{
    for (size_t at = 0; at < heads * dim; at += dim) {
        vec r = vec_set(inverse_rms(o + at, eps, dim));
        EACH(dim, gated_norm_step, out + at, o + at, gate + at, norm, r);
    }
}
