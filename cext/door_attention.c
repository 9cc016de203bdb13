/* The Python side of KDA and MLA. Methods are described in door_vector.c. */
#include "door_vector.h"
#include "fpenv.h"

#include <math.h>
#include <string.h>

static size_t least(size_t a, size_t b) { return a < b ? a : b; }
static size_t parts(size_t n, size_t of) { return (n + of - 1) / of; }

/* KDA */

#define MOST_TAPS 64
#define CONV_ROWS 64 /* of a head in one piece: the transposed taps serve them all */

struct prepare {
    const struct vector_kernels *k;
    struct kda_conv conv[3]; /* q, k, v */
    size_t rows, heads, block_rows, blocks;
};

static void prepare_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct prepare *a = arg;
    for (size_t i = begin; i < end; i++) {
        size_t row = i % a->blocks * a->block_rows, head = i / a->blocks;
        a->k->kda_conv(&a->conv[head / a->heads], head % a->heads, row, least(row + a->block_rows, a->rows), scratch);
    }
}

static int prepare_check(const struct door_array *a, size_t heads)
{
    for (int i = 1; i < 6; i++)
        if (door_same_shape(&a[i], &a[0]) != 0)
            return -1;
    size_t width = a[0].shape[1], taps = a[6].shape[0] + 1;
    if (width == 0 || width % heads != 0 || width / heads > MOST_HEAD_DIM) {
        PyErr_Format(PyExc_ValueError, "q is %zu wide, which is not %zu heads of 1 to %zu", width, heads, MOST_HEAD_DIM);
        return -1;
    }
    if (door_at_most(&a[6], 0, MOST_TAPS - 1) != 0 || door_dim(&a[6], 1, 3 * width) != 0)
        return -1;
    for (int i = 7; i < 10; i++)
        if (a[i].ndim < 2 || a[i].shape[0] != width || a[i].size != width * taps || a[i].shape[a[i].ndim - 1] != taps) {
            PyErr_Format(PyExc_ValueError, "%s must be [%zu, %zu] or [%zu, 1, %zu]", a[i].spec->name, width, taps, width, taps);
            return -1;
        }
    return 0;
}

/* 1 / sqrt(n), computed in double and rounded, whatever the caller's rounding mode. */
static float inverse_root(size_t n)
{
    fpenv found = fpenv_enter();
    float scale = (float)(1.0 / sqrt((double)n));
    fpenv_leave(found);
    return scale;
}

PyObject *door_kda_prepare(FAST_ARGS)
{
    static const struct door_spec specs[] = {
        {"q", 'f', 2, DOOR_OUT}, {"k", 'f', 2, DOOR_OUT}, {"v", 'f', 2, DOOR_OUT}, {"q_in", 'f', 2, 0},
        {"k_in", 'f', 2, 0},     {"v_in", 'f', 2, 0},     {"history", 'f', 2, 0},  {"q_conv", 'f', -1, DOOR_ANYWHERE},
        {"k_conv", 'f', -1, DOOR_ANYWHERE}, {"v_conv", 'f', -1, DOOR_ANYWHERE}};
    struct door_array a[10];
    size_t heads;
    (void)module;
    if (door_count("kda_prepare", count, 11) != 0 || door_size(args[10], "heads", 1, MOST_WIDTH, &heads) != 0 ||
        door_open(args, specs, a, 10) != 0)
        return NULL;
    int rc = prepare_check(a, heads);
    if (rc == 0 && a[0].size) {
        size_t width = a[0].shape[1], dim = width / heads, grain = pool_grain();
        struct prepare job = {.k = kernels()->vector, .rows = a[0].shape[0], .heads = heads};
        for (int i = 0; i < 3; i++)
            job.conv[i] = (struct kda_conv){
                .out = a[i].data,
                .in = a[3 + i].data,
                .history = (const float *)a[6].data + (size_t)i * width,
                .taps = a[7 + i].data,
                .width = width,
                .tap_count = a[6].shape[0] + 1,
                .dim = dim,
                .unit = i < 2,
                .scale = i == 0 ? inverse_root(dim) : 1.0f,
            };
        job.block_rows = grain && grain / dim < CONV_ROWS ? grain / dim + 1 : CONV_ROWS;
        job.blocks = parts(job.rows, job.block_rows);
        rc = door_run(3 * heads * job.blocks, door_piece(dim * least(job.block_rows, job.rows)), prepare_work, &job);
    }
    return door_done(a, 10, rc);
}

PyObject *door_kda_history(FAST_ARGS)
{
    static const struct door_spec specs[] = {
        {"new_history", 'f', 2, DOOR_OUT}, {"history", 'f', 2, 0}, {"q_in", 'f', 2, 0}, {"k_in", 'f', 2, 0}, {"v_in", 'f', 2, 0}};
    struct door_array a[5];
    (void)module;
    if (door_count("kda_history", count, 5) != 0 || door_open(args, specs, a, 5) != 0)
        return NULL;
    size_t kept = a[0].shape[0], width = a[2].shape[1], rows = a[2].shape[0];
    int rc = -1;
    if (door_same_shape(&a[1], &a[0]) == 0 && door_dim(&a[0], 1, 3 * width) == 0 && door_same_shape(&a[3], &a[2]) == 0 &&
        door_same_shape(&a[4], &a[2]) == 0)
        rc = 0;
    for (size_t r = 0; rc == 0 && r < kept; r++) { /* the last `kept` rows of history and input together */
        float *out = (float *)a[0].data + r * 3 * width;
        size_t from = r + rows;
        if (from < kept)
            memcpy(out, (const float *)a[1].data + from * 3 * width, 3 * width * sizeof *out);
        else
            for (size_t i = 0; i < 3; i++)
                memcpy(out + i * width, (const float *)a[2 + i].data + (from - kept) * width, width * sizeof *out);
    }
    return door_done(a, 5, rc);
}

struct gates {
    const struct vector_kernels *k;
    float *alpha, *beta;
    const float *z, *b, *a_log, *bias;
    float lower_bound;
    size_t heads, dim;
};

static void gates_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct gates *a = arg;
    float *rate = scratch;
    size_t width = a->heads * a->dim;
    a->k->exp(rate, a->a_log, a->heads);
    for (size_t r = begin; r < end; r++)
        a->k->kda_decay(a->alpha + r * width, a->z + r * width, a->bias, rate, a->lower_bound, a->heads, a->dim);
    a->k->sigmoid(a->beta + begin * a->heads, a->b + begin * a->heads, (end - begin) * a->heads);
}

PyObject *door_kda_gates(FAST_ARGS)
{
    static const struct door_spec specs[] = {
        {"alpha", 'f', 2, DOOR_OUT}, {"beta", 'f', 2, DOOR_OUT},      {"z", 'f', 2, DOOR_IN_PLACE}, {"b", 'f', 2, DOOR_IN_PLACE},
        {"a_log", 'f', 1, DOOR_ANYWHERE}, {"dt_bias", 'f', 1, DOOR_ANYWHERE}};
    struct door_array a[6];
    struct gates job = {.k = kernels()->vector};
    (void)module;
    if (door_count("kda_gates", count, 7) != 0 || door_float(args[6], "lower_bound", &job.lower_bound) != 0 ||
        door_open(args, specs, a, 6) != 0)
        return NULL;
    job.alpha = a[0].data, job.beta = a[1].data, job.z = a[2].data, job.b = a[3].data;
    job.a_log = a[4].data, job.bias = a[5].data;
    size_t width = a[2].shape[1];
    job.heads = a[3].shape[1];
    int rc = -1;
    if (job.heads == 0 || width == 0 || width % job.heads != 0)
        PyErr_Format(PyExc_ValueError, "z is %zu wide, which is not %zu heads", width, job.heads);
    else if (a[4].shape[0] < job.heads)
        PyErr_Format(PyExc_ValueError, "a_log must hold at least %zu values, not %zu", job.heads, a[4].shape[0]);
    else if (door_overlap(&a[0], &a[3]))
        PyErr_SetString(PyExc_ValueError, "alpha and b share memory");
    else if (door_same_shape(&a[0], &a[2]) == 0 && door_same_shape(&a[1], &a[3]) == 0 &&
             door_dim(&a[3], 0, a[2].shape[0]) == 0 && door_dim(&a[5], 0, width) == 0 && door_at_most(&a[3], 1, MOST_WIDTH) == 0) {
        job.dim = width / job.heads;
        rc = a[0].size ? door_run(a[0].shape[0], door_piece(width), gates_work, &job) : 0;
    }
    return door_done(a, 6, rc);
}

struct recur {
    const struct vector_kernels *k;
    struct kda_recur all;
    size_t blocks; /* of columns in a head */
};

static void recur_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct recur *a = arg;
    for (size_t i = begin; i < end; i++)
        a->k->kda_recur(&a->all, i / a->blocks, i % a->blocks * KDA_COLUMNS, scratch);
}

/* a: out, state, q, k, v, alpha, beta; new_state may be NULL. */
static int recur(const struct door_array *a, const struct door_array *new_state)
{
    size_t heads = a[1].shape[0], dim = a[1].shape[1], rows = a[0].shape[0];
    int rc = door_dim(&a[1], 2, dim) != 0 || door_at_most(&a[1], 1, MOST_HEAD_DIM) != 0 ||
             door_dim(&a[0], 1, heads * dim) != 0 || (new_state && door_same_shape(new_state, &a[1]) != 0);
    for (int i = 2; rc == 0 && i < 6; i++)
        rc = door_same_shape(&a[i], &a[0]);
    if (rc == 0)
        rc = door_dim(&a[6], 0, rows) != 0 || door_dim(&a[6], 1, heads) != 0;
    if (rc != 0 || a[1].size == 0)
        return rc;
    struct recur job = {
        .k = kernels()->vector,
        .all = {.out = a[0].data,
                .new_state = new_state ? new_state->data : NULL,
                .state = a[1].data,
                .q = a[2].data,
                .k = a[3].data,
                .v = a[4].data,
                .alpha = a[5].data,
                .beta = a[6].data,
                .rows = rows,
                .heads = heads,
                .dim = dim,
                .width = heads * dim},
        .blocks = parts(dim, KDA_COLUMNS),
    };
    return door_run(heads * job.blocks, pool_piece(KDA_COLUMNS * (rows + 1), rows < 8 ? 4 : 1), recur_work, &job);
}

#define RECUR_INPUTS                                                                                                              \
    {"state", 'f', 3, 0}, {"q", 'f', 2, 0}, {"k", 'f', 2, 0}, {"v", 'f', 2, 0}, {"alpha", 'f', 2, 0}, {"beta", 'f', 2, 0}

PyObject *door_kda_read(FAST_ARGS)
{
    static const struct door_spec specs[] = {{"out", 'f', 2, DOOR_OUT}, RECUR_INPUTS};
    struct door_array a[7];
    (void)module;
    if (door_count("kda_read", count, 7) != 0 || door_open(args, specs, a, 7) != 0)
        return NULL;
    return door_done(a, 7, recur(a, NULL));
}

PyObject *door_kda_recur(FAST_ARGS)
{
    static const struct door_spec specs[] = {{"out", 'f', 2, DOOR_OUT}, RECUR_INPUTS, {"new_state", 'f', 3, DOOR_OUT}};
    struct door_array a[8];
    (void)module;
    if (door_count("kda_recur", count, 8) != 0)
        return NULL;
    /* new_state second is how one reads it; last is where what both share leaves it. */
    PyObject *const order[] = {args[0], args[2], args[3], args[4], args[5], args[6], args[7], args[1]};
    if (door_open(order, specs, a, 8) != 0)
        return NULL;
    return door_done(a, 8, recur(a, &a[7]));
}

struct output {
    const struct vector_kernels *k;
    float *out;
    const float *o, *gate;
    const struct door_array *norm;
    float eps;
    size_t heads, dim;
};

static void output_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct output *a = arg;
    const float *norm = door_widened(a->k, a->norm, a->dim, scratch);
    size_t width = a->heads * a->dim;
    for (size_t r = begin; r < end; r++)
        a->k->kda_output(a->out + r * width, a->o + r * width, a->gate + r * width, norm, a->eps, a->heads, a->dim);
}

PyObject *door_kda_output(FAST_ARGS)
{
    (void)module;
    if (door_count("kda_output", count, 5) != 0)
        return NULL;
    const struct door_spec specs[] = {{"out", 'f', 2, DOOR_OUT},
                                      {"o", 'f', 2, DOOR_IN_PLACE},
                                      {"gate", 'f', 2, DOOR_IN_PLACE},
                                      {"norm", door_is_uint16(args[3]) ? 'H' : 'f', 1, DOOR_ANYWHERE}};
    struct door_array a[4];
    struct output job = {.k = kernels()->vector};
    if (door_float(args[4], "eps", &job.eps) != 0 || door_open(args, specs, a, 4) != 0)
        return NULL;
    job.out = a[0].data, job.o = a[1].data, job.gate = a[2].data, job.norm = &a[3];
    size_t width = a[0].shape[1];
    job.dim = a[3].shape[0];
    int rc = -1;
    if (job.dim == 0 || job.dim > MOST_WIDTH || width % job.dim != 0)
        PyErr_Format(PyExc_ValueError, "out is %zu wide, which is not whole heads of norm's %zu", width, job.dim);
    else if (door_same_shape(&a[1], &a[0]) == 0 && door_same_shape(&a[2], &a[0]) == 0) {
        job.heads = width / job.dim;
        rc = a[0].size ? door_run(a[0].shape[0], door_piece(width), output_work, &job) : 0;
    }
    return door_done(a, 4, rc);
}

/* MLA */

struct latents {
    const struct vector_kernels *k;
    float *out;
    const float *kv;
    const struct door_array *norm;
    float eps;
    size_t rank, width;
};

static void latents_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct latents *a = arg;
    const float *norm = door_widened(a->k, a->norm, a->rank, scratch);
    for (size_t r = begin; r < end; r++) {
        float *out = a->out + r * a->width;
        const float *kv = a->kv + r * a->width;
        a->k->rms_norm(out, kv, norm, a->eps, a->rank);
        memmove(out + a->rank, kv + a->rank, (a->width - a->rank) * sizeof *out);
    }
}

PyObject *door_mla_latents(FAST_ARGS)
{
    (void)module;
    if (door_count("mla_latents", count, 4) != 0)
        return NULL;
    const struct door_spec specs[] = {{"out", 'f', 2, DOOR_OUT},
                                      {"kv", 'f', 2, DOOR_IN_PLACE},
                                      {"norm", door_is_uint16(args[2]) ? 'H' : 'f', 1, DOOR_ANYWHERE}};
    struct door_array a[3];
    struct latents job = {.k = kernels()->vector};
    if (door_float(args[3], "eps", &job.eps) != 0 || door_open(args, specs, a, 3) != 0)
        return NULL;
    job.out = a[0].data, job.kv = a[1].data, job.norm = &a[2], job.rank = a[2].shape[0], job.width = a[1].shape[1];
    int rc = -1;
    if (job.rank == 0 || job.rank > MOST_WIDTH || job.rank > job.width)
        PyErr_Format(PyExc_ValueError, "norm of %zu does not fit kv, which is %zu wide", job.rank, job.width);
    else if (door_same_shape(&a[0], &a[1]) == 0)
        rc = a[0].size ? door_run(a[0].shape[0], door_piece(job.width), latents_work, &job) : 0;
    return door_done(a, 3, rc);
}

/* rank, and what a head has of kv_b's rows. */
static int kv_b_check(const struct door_array *kv_b, size_t heads, size_t *rank, size_t *head_rows)
{
    *rank = kv_b->ndim ? kv_b->shape[kv_b->ndim - 1] : 0;
    size_t rows = *rank ? kv_b->size / *rank : 0;
    if (heads == 0 || rows == 0 || rows % heads != 0 || (kv_b->ndim != 2 && kv_b->ndim != 3) ||
        (kv_b->ndim == 3 && kv_b->shape[0] != heads)) {
        PyErr_Format(PyExc_ValueError, "kv_b of %zu rows does not fit %zu heads", rows, heads);
        return -1;
    }
    *head_rows = rows / heads;
    if (*rank <= MOST_WIDTH / 4)
        return 0;
    PyErr_Format(PyExc_ValueError, "kv_b's rank must be at most %zu, not %zu", MOST_WIDTH / 4, *rank);
    return -1;
}

struct absorb {
    const struct vector_kernels *k;
    struct mla_absorb all;
    size_t blocks; /* of columns in a head */
};

static void absorb_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct absorb *a = arg;
    for (size_t i = begin; i < end; i++)
        a->k->mla_absorb(&a->all, i / a->blocks, i % a->blocks * MLA_COLUMNS, scratch);
}

PyObject *door_mla_absorb(FAST_ARGS)
{
    static const struct door_spec specs[] = {{"query", 'f', 3, DOOR_OUT}, {"q", 'f', 3, 0}, {"kv_b", 'H', -1, DOOR_ANYWHERE}};
    struct door_array a[3];
    (void)module;
    if (door_count("mla_absorb", count, 3) != 0 || door_open(args, specs, a, 3) != 0)
        return NULL;
    size_t rows = a[1].shape[0], heads = a[1].shape[1], width = a[0].shape[2], q_width = a[1].shape[2], rank, head_rows;
    int rc = kv_b_check(&a[2], heads, &rank, &head_rows);
    if (rc == 0)
        rc = door_dim(&a[0], 0, rows) != 0 || door_dim(&a[0], 1, heads) != 0;
    if (rc == 0 && (width < rank || q_width <= width - rank || q_width - (width - rank) >= head_rows)) {
        PyErr_Format(PyExc_ValueError, "query of %zu, q of %zu and kv_b of [%zu, %zu] a head do not fit together", width, q_width,
                     head_rows, rank);
        rc = -1;
    }
    if (rc == 0) {
        size_t rope = width - rank, nope = q_width - rope;
        struct absorb job = {
            .k = kernels()->vector,
            .all = {.query = a[0].data,
                    .q = a[1].data,
                    .kv_b = a[2].data,
                    .rows = rows,
                    .heads = heads,
                    .nope = nope,
                    .rope = rope,
                    .v = head_rows - nope,
                    .rank = rank,
                    .scale = inverse_root(q_width)},
            .blocks = parts(rank, MLA_COLUMNS),
        };
        if (nope > MOST_HEAD_DIM) {
            PyErr_Format(PyExc_ValueError, "q has %zu absorbed dimensions; at most %zu", nope, MOST_HEAD_DIM);
            rc = -1;
        } else if (rows) {
            rc = door_run(heads * job.blocks, door_piece(MLA_COLUMNS * rows), absorb_work, &job);
        }
    }
    return door_done(a, 3, rc);
}

struct attend {
    const struct vector_kernels *k;
    struct mla_attend all;
    size_t group, groups; /* of heads */
};

static void attend_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct attend *a = arg;
    for (size_t i = begin; i < end; i++) {
        size_t head = i % a->groups * a->group;
        a->k->mla_attend(&a->all, i / a->groups, head, least(a->group, a->all.heads - head), scratch);
    }
}

/* Heads in a piece: many, because they share each key that is read, but some pieces for every thread. */
static size_t head_group(size_t rows, size_t heads, size_t rank)
{
    size_t grain = pool_grain(), group = 48;
    if (grain)
        return grain < rank ? 1 : least(grain / rank, MLA_HEADS);
    while (group > 6 && rows * parts(heads, group) < 2 * pool_threads())
        group -= 6;
    return group;
}

PyObject *door_mla_attend(FAST_ARGS)
{
    static const struct door_spec specs[] = {{"out", 'f', 3, DOOR_OUT}, {"query", 'f', 3, 0}};
    static const struct door_spec block = {"blocks", 'f', 2, 0};
    (void)module;
    size_t position;
    if (door_count("mla_attend", count, 4) != 0 || door_size(args[3], "position", 0, SIZE_MAX / 4, &position) != 0)
        return NULL;
    struct door_many *many = door_many_open(args, specs, 2, args[2], &block, 0, SIZE_MAX / 4);
    if (!many)
        return NULL;
    const struct door_array *a = many->arrays, *blocks = a + 2;
    size_t rows = a[1].shape[0], heads = a[1].shape[1], width = a[1].shape[2], rank = a[0].shape[2], block_count = many->count - 2;
    int rc = door_dim(&a[0], 0, rows) != 0 || door_dim(&a[0], 1, heads) != 0 || door_at_most(&a[0], 2, width) != 0;
    for (size_t i = 0; rc == 0 && i < block_count; i++)
        rc = door_dim(&blocks[i], 0, MLA_BLOCK) != 0 || door_dim(&blocks[i], 1, width) != 0;
    if (rc == 0 && rows && parts(position + rows, MLA_BLOCK) > block_count) {
        PyErr_Format(PyExc_ValueError, "blocks must hold %zu keys, not %zu", position + rows, block_count * MLA_BLOCK);
        rc = -1;
    }
    const float **keys = rc == 0 ? PyMem_Malloc(block_count * sizeof *keys + 1) : NULL;
    if (rc == 0 && !keys) {
        PyErr_NoMemory();
        rc = -1;
    }
    if (rc == 0 && a[0].size) {
        for (size_t i = 0; i < block_count; i++)
            keys[i] = blocks[i].data;
        struct attend job = {
            .k = kernels()->vector,
            .all = {.out = a[0].data,
                    .query = a[1].data,
                    .blocks = keys,
                    .heads = heads,
                    .rank = rank,
                    .width = width,
                    .position = position},
            .group = head_group(rows, heads, rank),
        };
        job.groups = parts(heads, job.group);
        rc = door_run(rows * job.groups, 1, attend_work, &job);
    }
    PyMem_Free(keys);
    return door_many_done(many, rc);
}

struct values {
    const struct vector_kernels *k;
    struct mla_values all;
    size_t blocks; /* of four values in a head */
};

static void values_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct values *a = arg;
    for (size_t i = begin; i < end; i++)
        a->k->mla_values(&a->all, i / a->blocks, i % a->blocks * 4, scratch);
}

PyObject *door_mla_values(FAST_ARGS)
{
    static const struct door_spec specs[] = {{"out", 'f', -1, DOOR_OUT}, {"attended", 'f', 3, 0}, {"kv_b", 'H', -1, DOOR_ANYWHERE}};
    struct door_array a[3];
    (void)module;
    if (door_count("mla_values", count, 3) != 0 || door_open(args, specs, a, 3) != 0)
        return NULL;
    size_t rows = a[1].shape[0], heads = a[1].shape[1], rank, head_rows;
    int rc = kv_b_check(&a[2], heads, &rank, &head_rows);
    size_t v = a[0].ndim == 3 ? a[0].shape[2] : a[0].ndim == 2 && heads ? a[0].shape[1] / heads : 0;
    if (rc == 0)
        rc = door_dim(&a[1], 2, rank) != 0 || door_dim(&a[0], 0, rows) != 0;
    if (rc == 0 && (v == 0 || v >= head_rows || (a[0].ndim == 3 ? a[0].shape[1] != heads : a[0].shape[1] != heads * v))) {
        PyErr_Format(PyExc_ValueError, "out does not fit %zu heads with %zu rows of kv_b each", heads, head_rows);
        rc = -1;
    }
    if (rc == 0 && rows) {
        struct values job = {
            .k = kernels()->vector,
            .all = {.out = a[0].data,
                    .attended = a[1].data,
                    .kv_b = a[2].data,
                    .rows = rows,
                    .heads = heads,
                    .nope = head_rows - v,
                    .v = v,
                    .rank = rank},
            .blocks = parts(v, 4),
        };
        rc = door_run(heads * job.blocks, door_piece(4 * rows + rank / 4), values_work, &job);
    }
    return door_done(a, 3, rc);
}
