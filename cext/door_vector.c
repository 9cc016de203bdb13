/* The Python side of the vector kernels: elements, norms, router and head. Attention is in door_attention.c. */
#include "door_vector.h"

#include <stdatomic.h>
#include <string.h>

#include "fpenv.h"

int door_at_most(const struct door_array *a, int dim, size_t most)
{
    if (a->shape[dim] <= most)
        return 0;
    PyErr_Format(PyExc_ValueError, "dimension %d of %s must be at most %zu, not %zu", dim, a->spec->name, most, a->shape[dim]);
    return -1;
}

int door_same_shape(const struct door_array *a, const struct door_array *like)
{
    if (a->ndim != like->ndim) {
        PyErr_Format(PyExc_ValueError, "%s must have as many dimensions as %s", a->spec->name, like->spec->name);
        return -1;
    }
    for (int i = 0; i < a->ndim; i++)
        if (door_dim(a, i, like->shape[i]) != 0)
            return -1;
    return 0;
}

PyObject *door_done(struct door_array *arrays, size_t count, int rc)
{
    door_close(arrays, count);
    return rc == 0 ? Py_NewRef(Py_None) : NULL;
}

size_t door_piece(size_t outputs)
{
    const size_t enough = 16384;
    return pool_piece(outputs ? outputs : 1, outputs < enough ? enough / (outputs ? outputs : 1) : 1);
}

const float *door_widened(const struct vector_kernels *k, const struct door_array *w, size_t n, float *scratch)
{
    if (w->spec->type == 'f')
        return w->data;
    k->widen(scratch, w->data, n);
    return scratch;
}

int door_is_uint16(PyObject *arg)
{
    Py_buffer view;
    if (!PyObject_CheckBuffer(arg) || PyObject_GetBuffer(arg, &view, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
        PyErr_Clear();
        return 0;
    }
    int two = view.itemsize == 2;
    PyBuffer_Release(&view);
    return two;
}

struct door_many *door_many_open(PyObject *const *args, const struct door_spec *specs, size_t fixed, PyObject *tuple,
                                 const struct door_spec *each, size_t least, size_t most)
{
    if (!PyTuple_Check(tuple)) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of arrays, not %.100s", each->name, Py_TYPE(tuple)->tp_name);
        return NULL;
    }
    size_t more = (size_t)PyTuple_GET_SIZE(tuple), count = fixed + more;
    if (more < least || more > most) {
        PyErr_Format(PyExc_ValueError, "%s must be from %zu to %zu arrays, not %zu", each->name, least, most, more);
        return NULL;
    }
    struct door_many *many = PyMem_Malloc(sizeof *many + count * (sizeof *many->arrays + sizeof *many->args + sizeof *many->specs));
    if (!many) {
        PyErr_NoMemory();
        return NULL;
    }
    many->count = count;
    many->args = (PyObject **)(many->arrays + count);
    many->specs = (struct door_spec *)(many->args + count);
    for (size_t i = 0; i < count; i++) {
        many->args[i] = i < fixed ? args[i] : PyTuple_GET_ITEM(tuple, (Py_ssize_t)(i - fixed));
        many->specs[i] = i < fixed ? specs[i] : *each;
    }
    if (door_open(many->args, many->specs, many->arrays, count) == 0)
        return many;
    PyMem_Free(many);
    return NULL;
}

PyObject *door_many_done(struct door_many *many, int rc)
{
    door_close(many->arrays, many->count);
    PyMem_Free(many);
    return rc == 0 ? Py_NewRef(Py_None) : NULL;
}

/* Element by element: some of these pointers, and the kernel that goes with them. */

struct map {
    void (*one)(float *out, const float *x, size_t n);
    void (*two)(float *out, const float *a, const float *b, size_t n);
    void (*widen)(float *out, const uint16_t *bits, size_t n);
    void (*situ)(float *out, const float *gate, const float *up, float beta, float linear_beta, size_t n);
    float *out;
    const float *a, *b;
    const uint16_t *bits;
    float beta, linear_beta;
};

static void map_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct map *m = arg;
    size_t n = end - begin;
    (void)scratch;
    if (m->one)
        m->one(m->out + begin, m->a + begin, n);
    else if (m->two)
        m->two(m->out + begin, m->a + begin, m->b + begin, n);
    else if (m->widen)
        m->widen(m->out + begin, m->bits + begin, n);
    else
        m->situ(m->out + begin, m->a + begin, m->b + begin, m->beta, m->linear_beta, n);
}

static int map_run(struct map *m, size_t n) { return n ? door_run(n, door_piece(1), map_work, m) : 0; }

static PyObject *map_one(const char *name, PyObject *const *args, Py_ssize_t count, void (*kernel)(float *, const float *, size_t))
{
    static const struct door_spec specs[] = {{"out", 'f', -1, DOOR_OUT}, {"x", 'f', -1, DOOR_IN_PLACE}};
    struct door_array a[2];
    if (door_count(name, count, 2) != 0 || door_open(args, specs, a, 2) != 0)
        return NULL;
    struct map m = {.one = kernel, .out = a[0].data, .a = a[1].data};
    return door_done(a, 2, door_same_shape(&a[0], &a[1]) == 0 ? map_run(&m, a[0].size) : -1);
}

static PyObject *map_two(const char *name, const struct door_spec *specs, PyObject *const *args, Py_ssize_t count,
                         void (*kernel)(float *, const float *, const float *, size_t))
{
    struct door_array a[3];
    if (door_count(name, count, 3) != 0 || door_open(args, specs, a, 3) != 0)
        return NULL;
    struct map m = {.two = kernel, .out = a[0].data, .a = a[1].data, .b = a[2].data};
    int rc = door_same_shape(&a[0], &a[1]) == 0 && door_same_shape(&a[0], &a[2]) == 0 ? map_run(&m, a[0].size) : -1;
    return door_done(a, 3, rc);
}

#define MAP_ONE(name, kernel)                                        \
    static PyObject *name(FAST_ARGS)                                 \
    {                                                                \
        (void)module;                                                \
        return map_one(#kernel, args, count, kernels()->vector->kernel); \
    }

MAP_ONE(door_exp, exp)
MAP_ONE(door_log, log)
MAP_ONE(door_tanh, tanh)
MAP_ONE(door_sigmoid, sigmoid)

static PyObject *door_add(FAST_ARGS)
{
    static const struct door_spec specs[] = {
        {"out", 'f', -1, DOOR_OUT}, {"a", 'f', -1, DOOR_IN_PLACE}, {"b", 'f', -1, DOOR_IN_PLACE}};
    (void)module;
    return map_two("add", specs, args, count, kernels()->vector->add);
}

static PyObject *door_sigmoid_gate(FAST_ARGS)
{
    static const struct door_spec specs[] = {
        {"out", 'f', -1, DOOR_OUT}, {"a", 'f', -1, DOOR_IN_PLACE}, {"gate", 'f', -1, DOOR_IN_PLACE}};
    (void)module;
    return map_two("sigmoid_gate", specs, args, count, kernels()->vector->sigmoid_gate);
}

static PyObject *door_widen_bf16(FAST_ARGS)
{
    static const struct door_spec specs[] = {{"out", 'f', -1, DOOR_OUT}, {"bits", 'H', -1, DOOR_ANYWHERE}};
    struct door_array a[2];
    (void)module;
    if (door_count("widen_bf16", count, 2) != 0 || door_open(args, specs, a, 2) != 0)
        return NULL;
    struct map m = {.widen = kernels()->vector->widen, .out = a[0].data, .bits = a[1].data};
    return door_done(a, 2, door_same_shape(&a[0], &a[1]) == 0 ? map_run(&m, a[0].size) : -1);
}

static PyObject *door_situ(FAST_ARGS)
{
    static const struct door_spec specs[] = {
        {"out", 'f', -1, DOOR_OUT}, {"gate", 'f', -1, DOOR_IN_PLACE}, {"up", 'f', -1, DOOR_IN_PLACE}};
    struct door_array a[3];
    struct map m = {.situ = kernels()->vector->situ};
    (void)module;
    if (door_count("situ", count, 5) != 0 || door_float(args[3], "beta", &m.beta) != 0 ||
        door_float(args[4], "linear_beta", &m.linear_beta) != 0 || door_open(args, specs, a, 3) != 0)
        return NULL;
    m.out = a[0].data, m.a = a[1].data, m.b = a[2].data;
    int rc = door_same_shape(&a[0], &a[1]) == 0 && door_same_shape(&a[0], &a[2]) == 0 ? map_run(&m, a[0].size) : -1;
    return door_done(a, 3, rc);
}

/* Row by row. */

struct norm {
    const struct vector_kernels *k;
    float *out;
    const float *x;
    const struct door_array *w;
    float eps;
    size_t n;
};

static void norm_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct norm *a = arg;
    const float *w = door_widened(a->k, a->w, a->n, scratch);
    for (size_t r = begin; r < end; r++)
        a->k->rms_norm(a->out + r * a->n, a->x + r * a->n, w, a->eps, a->n);
}

static PyObject *door_rms_norm(FAST_ARGS)
{
    (void)module;
    if (door_count("rms_norm", count, 4) != 0)
        return NULL;
    const struct door_spec specs[] = {
        {"out", 'f', 2, DOOR_OUT}, {"x", 'f', 2, DOOR_IN_PLACE}, {"w", door_is_uint16(args[2]) ? 'H' : 'f', 1, DOOR_ANYWHERE}};
    struct door_array a[3];
    struct norm job = {.k = kernels()->vector};
    if (door_float(args[3], "eps", &job.eps) != 0 || door_open(args, specs, a, 3) != 0)
        return NULL;
    job.out = a[0].data, job.x = a[1].data, job.w = &a[2], job.n = a[1].shape[1];
    int rc = -1;
    if (door_same_shape(&a[0], &a[1]) == 0 && door_dim(&a[2], 0, job.n) == 0 && door_at_most(&a[1], 1, MOST_WIDTH) == 0)
        rc = a[0].size ? door_run(a[0].shape[0], door_piece(job.n), norm_work, &job) : 0;
    return door_done(a, 3, rc);
}

struct mix {
    const struct vector_kernels *k;
    float *out;
    const struct door_array *norm, *proj, *sources;
    size_t count, n;
    float eps;
};

static void mix_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct mix *a = arg;
    float *u = scratch, *proj = u + a->n;
    const float *rows[MIX_MOST];
    if (a->count > 1)
        a->k->multiply(u, door_widened(a->k, a->norm, a->n, u), door_widened(a->k, a->proj, a->n, proj), a->n);
    for (size_t r = begin; r < end; r++) {
        for (size_t j = 0; j < a->count; j++)
            rows[j] = (const float *)a->sources[j].data + r * a->n;
        a->k->mix(a->out + r * a->n, rows, a->count, u, a->eps, a->n);
    }
}

static PyObject *door_mix(FAST_ARGS)
{
    static const struct door_spec specs[] = {
        {"out", 'f', 2, DOOR_OUT}, {"norm", 'H', 1, DOOR_ANYWHERE}, {"proj", 'H', -1, DOOR_ANYWHERE}};
    static const struct door_spec source = {"sources", 'f', 2, 0};
    struct mix job = {.k = kernels()->vector};
    (void)module;
    if (door_count("mix", count, 5) != 0 || door_float(args[4], "eps", &job.eps) != 0)
        return NULL;
    PyObject *const fixed[] = {args[0], args[2], args[3]};
    struct door_many *many = door_many_open(fixed, specs, 3, args[1], &source, 1, MIX_MOST);
    if (!many)
        return NULL;
    const struct door_array *a = many->arrays;
    job.out = a[0].data, job.norm = &a[1], job.proj = &a[2], job.sources = a + 3;
    job.count = many->count - 3, job.n = a[0].shape[1];
    int rc = door_dim(&a[1], 0, job.n) != 0 || door_at_most(&a[0], 1, MOST_WIDTH) != 0 ? -1 : 0;
    if (rc == 0 && (a[2].size != job.n || a[2].shape[a[2].ndim ? a[2].ndim - 1 : 0] != job.n)) {
        PyErr_Format(PyExc_ValueError, "proj must be [%zu] or [1, %zu]", job.n, job.n);
        rc = -1;
    }
    for (size_t j = 0; rc == 0 && j < job.count; j++)
        rc = door_same_shape(&job.sources[j], &a[0]);
    if (rc == 0 && a[0].size)
        rc = door_run(a[0].shape[0], door_piece(job.n), mix_work, &job);
    return door_many_done(many, rc);
}

struct combine {
    const struct vector_kernels *k;
    float *out;
    const float *outputs, *weights;
    size_t count, n;
};

static void combine_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct combine *a = arg;
    (void)scratch;
    for (size_t r = begin; r < end; r++)
        a->k->combine(a->out + r * a->n, a->outputs + r * a->count * a->n, a->weights + r * a->count, a->count, a->n);
}

static PyObject *door_combine(FAST_ARGS)
{
    static const struct door_spec specs[] = {{"out", 'f', 2, DOOR_OUT}, {"outputs", 'f', 3, 0}, {"weights", 'f', 2, 0}};
    struct door_array a[3];
    (void)module;
    if (door_count("combine", count, 3) != 0 || door_open(args, specs, a, 3) != 0)
        return NULL;
    struct combine job = {kernels()->vector, a[0].data, a[1].data, a[2].data, a[1].shape[1], a[1].shape[2]};
    int rc = -1;
    if (door_dim(&a[0], 0, a[1].shape[0]) == 0 && door_dim(&a[0], 1, job.n) == 0 && door_dim(&a[2], 0, a[1].shape[0]) == 0 &&
        door_dim(&a[2], 1, job.count) == 0)
        rc = a[0].size ? door_run(a[0].shape[0], door_piece(job.n), combine_work, &job) : 0;
    return door_done(a, 3, rc);
}

/* The lowest row for which something is wrong, or SIZE_MAX. */
static void note_row(atomic_size_t *first, size_t row)
{
    size_t seen = atomic_load(first);
    while (row < seen && !atomic_compare_exchange_weak(first, &seen, row))
        ;
}

static PyObject *row_or_none_found(size_t row) { return row == SIZE_MAX ? PyLong_FromLong(-1) : PyLong_FromSize_t(row); }

struct finite {
    const struct vector_kernels *k;
    const float *x;
    size_t n;
    atomic_size_t bad;
};

static void finite_work(void *arg, size_t begin, size_t end, void *scratch)
{
    struct finite *a = arg;
    (void)scratch;
    for (size_t r = begin; r < end; r++)
        if (!a->k->finite(a->x + r * a->n, a->n)) {
            note_row(&a->bad, r);
            return;
        }
}

static PyObject *door_all_finite(FAST_ARGS)
{
    static const struct door_spec specs[] = {{"x", 'f', 2, 0}};
    struct door_array a[1];
    (void)module;
    if (door_count("all_finite", count, 1) != 0 || door_open(args, specs, a, 1) != 0)
        return NULL;
    struct finite job = {.k = kernels()->vector, .x = a[0].data, .n = a[0].shape[1]};
    atomic_init(&job.bad, SIZE_MAX);
    int rc = a[0].size ? door_run(a[0].shape[0], door_piece(job.n), finite_work, &job) : 0;
    door_close(a, 1);
    return rc == 0 ? row_or_none_found(atomic_load(&job.bad)) : NULL;
}

struct route {
    const struct vector_kernels *k;
    int32_t *ids;
    float *weights;
    const float *scores, *bias;
    float scaling;
    size_t n, chosen;
    atomic_size_t bad;
};

static void route_work(void *arg, size_t begin, size_t end, void *scratch)
{
    struct route *a = arg;
    for (size_t r = begin; r < end; r++)
        if (a->k->route(a->ids + r * a->chosen, a->weights + r * a->chosen, a->scores + r * a->n, a->bias, a->scaling, a->n,
                        a->chosen, scratch) != 0) {
            note_row(&a->bad, r);
            return;
        }
}

static PyObject *door_route(FAST_ARGS)
{
    static const struct door_spec specs[] = {
        {"ids", 'i', 2, DOOR_OUT}, {"weights", 'f', 2, DOOR_OUT}, {"scores", 'f', 2, 0}, {"bias", 'f', 1, DOOR_ANYWHERE}};
    struct door_array a[4];
    struct route job = {.k = kernels()->vector};
    (void)module;
    if (door_count("route", count, 5) != 0 || door_float(args[4], "scaling", &job.scaling) != 0 ||
        door_open(args, specs, a, 4) != 0)
        return NULL;
    job.ids = a[0].data, job.weights = a[1].data, job.scores = a[2].data, job.bias = a[3].data;
    job.n = a[2].shape[1], job.chosen = a[0].shape[1];
    atomic_init(&job.bad, SIZE_MAX);
    int rc = -1;
    if (job.chosen == 0 || job.chosen > job.n)
        PyErr_Format(PyExc_ValueError, "ids chooses %zu of %zu experts", job.chosen, job.n);
    else if (door_dim(&a[0], 0, a[2].shape[0]) == 0 && door_same_shape(&a[1], &a[0]) == 0 && door_dim(&a[3], 0, job.n) == 0 &&
             door_at_most(&a[2], 1, MOST_WIDTH) == 0)
        rc = a[2].size ? door_run(a[2].shape[0], door_piece(job.n), route_work, &job) : 0;
    door_close(a, 4);
    return rc == 0 ? row_or_none_found(atomic_load(&job.bad)) : NULL;
}

/* The head. */

struct argmax {
    const struct vector_kernels *k;
    int64_t *out;
    const float *logits;
    size_t n;
};

static void argmax_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct argmax *a = arg;
    (void)scratch;
    for (size_t r = begin; r < end; r++)
        a->out[r] = (int64_t)a->k->argmax(a->logits + r * a->n, a->n);
}

static PyObject *door_argmax(FAST_ARGS)
{
    static const struct door_spec specs[] = {{"out", 'q', 1, DOOR_OUT}, {"logits", 'f', 2, 0}};
    struct door_array a[2];
    (void)module;
    if (door_count("argmax", count, 2) != 0 || door_open(args, specs, a, 2) != 0)
        return NULL;
    struct argmax job = {kernels()->vector, a[0].data, a[1].data, a[1].shape[1]};
    int rc = door_dim(&a[0], 0, a[1].shape[0]);
    if (rc == 0 && a[0].size && job.n == 0) {
        PyErr_SetString(PyExc_ValueError, "logits has no columns");
        rc = -1;
    }
    if (rc == 0 && a[0].size)
        rc = door_run(a[0].size, door_piece(job.n), argmax_work, &job);
    return door_done(a, 2, rc);
}

struct log_prob {
    const struct vector_kernels *k;
    float *top, *total;
    const float *logits;
    size_t n;
};

static void log_prob_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct log_prob *a = arg;
    (void)scratch;
    for (size_t r = begin; r < end; r++)
        for (size_t i = 0; i < a->n; i += LOG_PROB_TILE) {
            size_t n = a->n - i < LOG_PROB_TILE ? a->n - i : LOG_PROB_TILE;
            a->k->log_prob_tile(&a->top[r], &a->total[r], a->logits + r * a->n + i, n);
        }
}

static PyObject *door_log_prob_tiles(FAST_ARGS)
{
    static const struct door_spec specs[] = {{"top", 'f', 1, DOOR_OUT}, {"total", 'f', 1, DOOR_OUT}, {"logits", 'f', 2, 0}};
    struct door_array a[3];
    size_t first;
    (void)module;
    if (door_count("log_prob_tiles", count, 4) != 0 || door_size(args[3], "first_row", 0, SIZE_MAX, &first) != 0)
        return NULL;
    if (first % LOG_PROB_TILE != 0)
        return PyErr_Format(PyExc_ValueError, "first_row must be a multiple of %d, not %zu", LOG_PROB_TILE, first);
    if (door_open(args, specs, a, 3) != 0)
        return NULL;
    struct log_prob job = {kernels()->vector, a[0].data, a[1].data, a[2].data, a[2].shape[1]};
    int rc = -1;
    if (door_dim(&a[0], 0, a[2].shape[0]) == 0 && door_dim(&a[1], 0, a[2].shape[0]) == 0)
        rc = a[2].size ? door_run(a[0].size, door_piece(job.n), log_prob_work, &job) : 0;
    return door_done(a, 3, rc);
}

struct log_prob_end {
    const struct vector_kernels *k;
    float *out;
    const float *chosen, *top, *total;
};

static void log_prob_end_work(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct log_prob_end *a = arg;
    (void)scratch;
    for (size_t r = begin; r < end; r++) {
        float log_total;
        a->k->log(&log_total, &a->total[r], 1);
        a->out[r] = a->chosen[r] - a->top[r] - log_total;
    }
}

static PyObject *door_log_prob_finish(FAST_ARGS)
{
    static const struct door_spec specs[] = {
        {"out", 'f', 1, DOOR_OUT}, {"chosen", 'f', 1, DOOR_IN_PLACE}, {"top", 'f', 1, 0}, {"total", 'f', 1, 0}};
    struct door_array a[4];
    (void)module;
    if (door_count("log_prob_finish", count, 4) != 0 || door_open(args, specs, a, 4) != 0)
        return NULL;
    struct log_prob_end job = {kernels()->vector, a[0].data, a[1].data, a[2].data, a[3].data};
    int rc = -1;
    if (door_same_shape(&a[1], &a[0]) == 0 && door_same_shape(&a[2], &a[0]) == 0 && door_same_shape(&a[3], &a[0]) == 0)
        rc = a[0].size ? door_run(a[0].size, door_piece(1), log_prob_end_work, &job) : 0;
    return door_done(a, 4, rc);
}

#pragma GCC diagnostic ignored "-Wcast-function-type" /* METH_FASTCALL functions travel as PyCFunction */
#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

PyMethodDef door_vector_methods[] = {
    {"exp", FAST(door_exp), "exp(out, x): element by element; out may be exactly x."},
    {"log", FAST(door_log), "log(out, x): element by element; out may be exactly x."},
    {"tanh", FAST(door_tanh), "tanh(out, x): element by element; out may be exactly x."},
    {"sigmoid", FAST(door_sigmoid), "sigmoid(out, x): element by element; out may be exactly x."},
    {"widen_bf16", FAST(door_widen_bf16), "widen_bf16(out, bits u16): bfloat16 bits as float32."},
    {"add", FAST(door_add), "add(out, a, b): a + b; out may be exactly a or b."},
    {"sigmoid_gate", FAST(door_sigmoid_gate), "sigmoid_gate(out, a, gate): a * sigmoid(gate); out may be exactly a or gate."},
    {"situ", FAST(door_situ), "situ(out, gate, up, beta, linear_beta): the gated activation; out may be exactly gate or up."},
    {"rms_norm", FAST(door_rms_norm), "rms_norm(out[rows, n], x[rows, n], w f32[n] or u16[n], eps); out may be exactly x."},
    {"mix", FAST(door_mix),
     "mix(out[rows, n], sources, norm u16[n], proj u16[n] or u16[1, n], eps): the softmax mixture of residual sources, a tuple of "
     "1 to 64 arrays [rows, n]. One source is copied."},
    {"combine", FAST(door_combine),
     "combine(out[rows, n], outputs[rows, k, n], weights[rows, k]): the weighted sum over k, ascending."},
    {"all_finite", FAST(door_all_finite), "all_finite(x[rows, n]) -> -1, or the first row that holds NaN or infinity."},
    {"route", FAST(door_route),
     "route(ids i32[rows, k], weights[rows, k], scores[rows, experts], bias[experts], scaling) -> -1, or the first row whose "
     "sigmoid(score) + bias holds NaN; ids and weights are then undefined. A row's ids ascend."},
    {"argmax", FAST(door_argmax), "argmax(out i64[rows], logits[rows, n]): the lowest index among equals."},
    {"log_prob_tiles", FAST(door_log_prob_tiles),
     "log_prob_tiles(top[rows], total[rows], logits[rows, n], first_row): takes vocabulary rows first_row .. first_row + n into "
     "the running maximum and sum, which begin at -inf and 0. Tiles come in order; first_row is a multiple of 1024, and n but "
     "for the last."},
    {"log_prob_finish", FAST(door_log_prob_finish),
     "log_prob_finish(out[rows], chosen[rows], top[rows], total[rows]): (chosen - top) - log(total); out may be exactly chosen."},
    {"kda_prepare", FAST(door_kda_prepare),
     "kda_prepare(q[t, w], k[t, w], v[t, w], q_in[t, w], k_in[t, w], v_in[t, w], history[taps - 1, 3 w], q_conv, k_conv, v_conv, "
     "heads): convolution, silu, and normalisation of q and k. Convolutions are f32[w, taps] or [w, 1, taps]; history's columns "
     "are q, k, v, its oldest row first."},
    {"kda_history", FAST(door_kda_history),
     "kda_history(new_history[taps - 1, 3 w], history[taps - 1, 3 w], q_in[t, w], k_in[t, w], v_in[t, w]): the history after "
     "these rows."},
    {"kda_gates", FAST(door_kda_gates),
     "kda_gates(alpha[t, w], beta[t, h], z[t, w], b[t, h], a_log[at least h], dt_bias[w], lower_bound): decay per key channel, "
     "and how far a token writes."},
    {"kda_recur", FAST(door_kda_recur),
     "kda_recur(out[t, w], new_state[h, d, d], state[h, d, d], q[t, w], k[t, w], v[t, w], alpha[t, w], beta[t, h]): t tokens in "
     "order. state stays as it was, so a prefix of the same rows can be replayed. No rows: new_state is a copy."},
    {"kda_read", FAST(door_kda_read),
     "kda_read(out[t, w], state[h, d, d], q[t, w], k[t, w], v[t, w], alpha[t, w], beta[t, h]): kda_recur where nobody wants "
     "the state after the last token: none is written."},
    {"kda_output", FAST(door_kda_output),
     "kda_output(out[t, w], o[t, w], gate[t, w], norm f32[d] or u16[d], eps): norm per head, times sigmoid(gate); out may be "
     "exactly o or gate."},
    {"mla_latents", FAST(door_mla_latents),
     "mla_latents(out[t, width], kv[t, width], norm u16[rank] or f32[rank], eps): cache rows: the first rank columns normalised, "
     "the rest as they are; out may be exactly kv."},
    {"mla_absorb", FAST(door_mla_absorb),
     "mla_absorb(query[t, h, rank + rope], q[t, h, nope + rope], kv_b u16[h * (nope + v), rank] or u16[h, nope + v, rank]): "
     "queries against cache rows, scaled."},
    {"mla_attend", FAST(door_mla_attend),
     "mla_attend(out[t, h, rank], query[t, h, width], blocks, position): the rows stand at position, position + 1, .. and see the "
     "keys up to themselves in blocks, a tuple of arrays [256, width] that begins with the sequence. What lies beyond is not "
     "read."},
    {"mla_values", FAST(door_mla_values),
     "mla_values(out[t, h * v] or [t, h, v], attended[t, h, rank], kv_b as in mla_absorb): attended latents to values."},
    {NULL, NULL, 0, NULL},
};
