/* Latent attention between its projections: a few tiles of sums held in registers. */

/* Rows of one side by keys or vecs of columns of the other: as many sums as registers hold beside their operands. */
#if VEC == 16
#define TILE_ROWS 6
#define TILE_KEYS 4
#define TILE_VECS 4
#elif VEC == 8
#define TILE_ROWS 6
#define TILE_KEYS 2
#define TILE_VECS 2
#elif VEC == 4
#define TILE_ROWS 6
#define TILE_KEYS 4
#define TILE_VECS 4
#else
#define TILE_ROWS 2
#define TILE_KEYS 4
#define TILE_VECS 4
#endif
#define MOST_KEYS 4 /* in a tile of one row */
#define MOST_SUMS 24

/* One part of the lanes of rows * keys dot products over n elements. */
LANE void dot_part(vec *sums, const float *const *a, size_t rows, const float *const *b, size_t keys, size_t n, size_t part)
{
    vec sum[MOST_SUMS];
    for (size_t i = 0; i < rows * keys; i++)
        sum[i] = vec_set(0.0f);
    size_t at = part * VEC;
    for (; at + VEC <= n; at += 16) {
        vec y[MOST_KEYS];
        for (size_t j = 0; j < keys; j++)
            y[j] = vec_load(b[j] + at);
        for (size_t i = 0; i < rows; i++) {
            vec x = vec_load(a[i] + at);
            for (size_t j = 0; j < keys; j++)
                sum[i * keys + j] = vec_fma(x, y[j], sum[i * keys + j]);
        }
    }
    if (at < n) {
        size_t some = n - at;
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < keys; j++) {
                vec more = vec_fma(load(a[i] + at, some), load(b[j] + at, some), sum[i * keys + j]);
                sum[i * keys + j] = vec_select(vec_first(some), more, sum[i * keys + j]);
            }
    }
    for (size_t i = 0; i < rows * keys; i++)
        sums[i] = sum[i];
}

/* out[i * keys + j] = dot(a[i], b[j]); rows * keys is a multiple of 4. */
LANE void dot_tile(float *out, const float *const *a, size_t rows, const float *const *b, size_t keys, size_t n)
{
    vec sums[PARTS][MOST_SUMS];
    for (size_t p = 0; p < PARTS; p++)
        dot_part(sums[p], a, rows, b, keys, n, p);
    for (size_t half = PARTS / 2; half; half /= 2)
        for (size_t p = 0; p < half; p++)
            for (size_t i = 0; i < rows * keys; i++)
                sums[p][i] = vec_add(sums[p][i], sums[p + half][i]);
    for (size_t i = 0; i < rows * keys; i += 4)
        vec_tree4(out + i, sums[0][i], sums[0][i + 1], sums[0][i + 2], sums[0][i + 3]);
}

/* Every row of a with every row of b: out[i][j] = dot(a[i], b[j]) over n elements. */
struct dot_grid {
    float *out;
    const float *a, *b;
    size_t out_stride, a_stride, b_stride;
    size_t n;
};

/* Rows row .. row + rows of a with rows first .. first + count of b, `keys` of them at a time. */
LANE void dot_strip(const struct dot_grid *g, size_t row, size_t rows, size_t first, size_t count, size_t keys)
{
    const float *x[TILE_ROWS], *y[MOST_KEYS];
    float tile[MOST_SUMS];
    for (size_t i = 0; i < rows; i++)
        x[i] = g->a + (row + i) * g->a_stride;
    for (size_t j = 0; j < count; j += keys) {
        size_t here = least(count - j, keys);
        for (size_t k = 0; k < keys; k++) /* the last one stands in for those that are not there */
            y[k] = g->b + (first + j + least(k, here - 1)) * g->b_stride;
        dot_tile(tile, x, rows, y, keys, g->n);
        float *out = g->out + row * g->out_stride + first + j;
        for (size_t i = 0; i < rows; i++)
            for (size_t k = 0; k < here; k++)
                out[i * g->out_stride + k] = tile[i * keys + k];
    }
}

#define STRIP_KEYS 4 /* rows of b that stay in L1 while the rows of a pass; 8 and 16 were slower, at 576 elements */

static void dot_grid(const struct dot_grid *g, size_t rows, size_t count)
{
    for (size_t first = 0; first < count; first += STRIP_KEYS) {
        size_t here = least(count - first, STRIP_KEYS), i = 0, ahead = first + STRIP_KEYS;
        for (; i + TILE_ROWS <= rows; i += TILE_ROWS, ahead++) {
            if (ahead < least(count, first + 2 * STRIP_KEYS))
                for (size_t k = 0; k < g->n; k += 16) /* the next strip, a row at a time, and only into L2 */
                    __builtin_prefetch(g->b + ahead * g->b_stride + k, 0, 2);
            dot_strip(g, i, TILE_ROWS, first, here, TILE_KEYS);
        }
        for (; i < rows; i++)
            dot_strip(g, i, 1, first, here, MOST_KEYS);
    }
}

/* Chains: out[i][c] = fma(a[i][k], b[k][c], out[i][c]) for k ascending. */
struct chains {
    float *out;
    const float *a, *b;
    size_t out_stride, a_stride, b_stride;
    size_t count; /* of k */
    enum { FROM_ZERO, FADED, GOING_ON } start; /* out begins at +0, as out[i][c] * fade[i], or as it is */
    const float *fade;
};

/* `rows` rows by `vecs` vecs of columns, each of `some` elements. */
LANE void chain_tile(const struct chains *c, size_t row, size_t column, size_t rows, size_t vecs, size_t some)
{
    vec sum[MOST_SUMS];
    float *out = c->out + row * c->out_stride + column;
    for (size_t i = 0; i < rows; i++)
        for (size_t n = 0; n < vecs; n++) {
            sum[i * vecs + n] = vec_set(0.0f);
            if (c->start != FROM_ZERO)
                sum[i * vecs + n] = load(out + i * c->out_stride + n * VEC, some);
            if (c->start == FADED)
                sum[i * vecs + n] = vec_mul(sum[i * vecs + n], vec_set(c->fade[row + i]));
        }
    const float *a = c->a + row * c->a_stride, *b = c->b + column;
    size_t a_stride = c->a_stride, b_stride = c->b_stride, count = c->count;
    for (size_t k = 0; k < count; k++, b += b_stride) {
        vec x[TILE_VECS];
        for (size_t n = 0; n < vecs; n++)
            x[n] = load(b + n * VEC, some);
        for (size_t i = 0; i < rows; i++) {
            vec w = vec_set(a[i * a_stride + k]);
            for (size_t n = 0; n < vecs; n++)
                sum[i * vecs + n] = vec_fma(w, x[n], sum[i * vecs + n]);
        }
    }
    for (size_t i = 0; i < rows; i++)
        for (size_t n = 0; n < vecs; n++)
            store(out + i * c->out_stride + n * VEC, sum[i * vecs + n], some);
}

LANE void chain_strip(const struct chains *c, size_t rows, size_t column, size_t vecs, size_t some)
{
    size_t i = 0;
    for (; i + TILE_ROWS <= rows; i += TILE_ROWS)
        chain_tile(c, i, column, TILE_ROWS, vecs, some);
    for (; i < rows; i++)
        chain_tile(c, i, column, 1, vecs, some);
}

static void chains(const struct chains *c, size_t rows, size_t columns)
{
    size_t column = 0;
    for (; column + TILE_VECS * VEC <= columns; column += TILE_VECS * VEC)
        chain_strip(c, rows, column, TILE_VECS, VEC);
    for (; column + VEC <= columns; column += VEC)
        chain_strip(c, rows, column, 1, VEC);
    if (column < columns)
        chain_strip(c, rows, column, 1, columns - column);
}

LANE void scale_step(float *out, const float *x, vec scale, size_t i, size_t some)
{
    store(out + i, vec_mul(load(x + i, some), scale), some);
}

static void mla_absorb(const struct mla_absorb *a, size_t head, size_t column, float *scratch)
{
    size_t columns = least(a->rank - column, MLA_COLUMNS);
    const uint16_t *w = a->kv_b + head * (a->nope + a->v) * a->rank + column;
    for (size_t i = 0; i < a->nope; i++)
        map_widen(scratch + i * MLA_COLUMNS, w + i * a->rank, columns);
    size_t query_width = a->rank + a->rope, q_width = a->nope + a->rope;
    float *query = a->query + head * query_width + column;
    const float *q = a->q + head * q_width;
    struct chains c = {
        .out = query,
        .a = q,
        .b = scratch,
        .out_stride = a->heads * query_width,
        .a_stride = a->heads * q_width,
        .b_stride = MLA_COLUMNS,
        .count = a->nope,
        .start = FROM_ZERO,
    };
    chains(&c, a->rows, columns);
    const vec scale = vec_set(a->scale);
    for (size_t r = 0; r < a->rows; r++, query += c.out_stride, q += c.a_stride) {
        EACH(columns, scale_step, query, query, scale);
        if (column == 0)
            EACH(a->rope, scale_step, query + a->rank, q + a->nope, scale);
    }
}

#define VALUE_KEYS 64 /* whose part of a tile's columns stays in L1 while the heads pass */

static void mla_attend(const struct mla_attend *a, size_t row, size_t head, size_t count, float *scratch)
{
    float *scores = scratch, *top = scores + count * MLA_BLOCK, *total = top + count, *fade = total + count;
    const float *query = a->query + (row * a->heads + head) * a->width;
    float *out = a->out + (row * a->heads + head) * a->rank;
    size_t seen = a->position + row + 1;
    for (size_t h = 0; h < count; h++)
        top[h] = -INFINITY, total[h] = 0.0f;
    memset(out, 0, count * a->rank * sizeof *out);

    for (size_t first = 0; first < seen; first += MLA_BLOCK) {
        const float *keys = a->blocks[first / MLA_BLOCK];
        size_t n = least(seen - first, MLA_BLOCK);
        struct dot_grid dots = {scores, query, keys, MLA_BLOCK, a->width, a->width, a->width};
        dot_grid(&dots, count, n);
        for (size_t h = 0; h < count; h++) {
            float *s = scores + h * MLA_BLOCK;
            float high = highest(s, n);
            float m = top[h] > high ? top[h] : high;
            fade[h] = exp_of(top[h] - m);
            total[h] = fmaf(total[h], fade[h], sum_of_exps(s, s, m, n));
            top[h] = m;
        }
        for (size_t i = 0; i < n; i += VALUE_KEYS) {
            struct chains c = {
                .out = out,
                .a = scores + i,
                .b = keys + i * a->width,
                .out_stride = a->rank,
                .a_stride = MLA_BLOCK,
                .b_stride = a->width,
                .count = least(n - i, VALUE_KEYS),
                .start = i ? GOING_ON : FADED,
                .fade = fade,
            };
            chains(&c, count, a->rank);
        }
    }
    for (size_t h = 0; h < count; h++)
        for (size_t c = 0; c < a->rank; c += VEC) {
            size_t some = least(a->rank - c, VEC);
            float *l = out + h * a->rank + c;
            store(l, vec_div(load(l, some), vec_set(total[h])), some);
        }
}

static void mla_values(const struct mla_values *a, size_t head, size_t value, float *scratch)
{
    size_t some = least(a->v - value, 4);
    const uint16_t *w = a->kv_b + (head * (a->nope + a->v) + a->nope + value) * a->rank;
    map_widen(scratch, w, some * a->rank);
    struct dot_grid dots = {
        .out = a->out + head * a->v + value,
        .a = a->attended + head * a->rank,
        .b = scratch,
        .out_stride = a->heads * a->v,
        .a_stride = a->heads * a->rank,
        .b_stride = a->rank,
        .n = a->rank,
    };
    dot_grid(&dots, a->rows, some);
}
