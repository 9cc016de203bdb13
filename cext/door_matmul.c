#include "door.h"

#include <stdatomic.h>
#include <string.h>

#include "kernels.h"

/* One product, cut into a grid of blocks of outputs by blocks of rows. */
struct product {
    dots_kernel *kernel;
    struct dots all;
    size_t block_n, block_rows, row_blocks, blocks;
    size_t first_block; /* of the job's */
    const uint8_t *checked_scale; /* MXFP4's, to be searched for 255; or NULL */
    size_t exceptions;            /* bf12's, of the whole matrix; all.starts and all.columns are to be checked */
    atomic_size_t bad;            /* index of the first 255 seen in the scales, or of the first bad row; or SIZE_MAX */
};

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

static void note_bad(struct product *p, size_t index)
{
    size_t first = atomic_load(&p->bad);
    while (index < first && !atomic_compare_exchange_weak(&p->bad, &first, index))
        ;
}

/* Whether columns[0 .. count) ascend and are below k. */
static int ascend(const uint8_t *columns, size_t count, size_t k)
{
    size_t least = 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t column;
        memcpy(&column, columns + i * sizeof column, sizeof column);
        if (column < least)
            return 0;
        least = (size_t)column + 1;
    }
    return least <= k;
}

/* How many rows of a bf12 matrix there are before the first whose exceptions would lead a kernel astray. */
static size_t sound_rows(const struct dots *d, size_t exceptions)
{
    for (size_t j = 0; j < d->n; j++) {
        uint32_t starts[2];
        memcpy(starts, (const uint8_t *)d->starts + j * sizeof *starts, sizeof starts);
        if (starts[0] > starts[1] || starts[1] > exceptions)
            return j;
        if (!ascend((const uint8_t *)d->columns + starts[0] * sizeof(uint16_t), starts[1] - starts[0], d->k))
            return j;
    }
    return d->n;
}

/* Whether the kernels may read a block that begins at output j; if not, that is noted. */
static int block_is_sound(struct product *p, const struct dots *d, size_t j)
{
    if (p->checked_scale) {
        const uint8_t *found = memchr(d->scale, 255, d->n * d->scale_stride);
        if (found)
            note_bad(p, (size_t)(found - p->checked_scale));
        return !found;
    }
    if (d->starts) {
        const size_t rows = sound_rows(d, p->exceptions);
        if (rows < d->n)
            note_bad(p, j + rows);
        return rows == d->n;
    }
    return 1;
}

static void multiply_block(struct product *p, size_t block, void *scratch)
{
    const struct dots *all = &p->all;
    size_t row = block % p->row_blocks * p->block_rows;
    size_t j = block / p->row_blocks * p->block_n;
    struct dots d = *all;
    d.rows = min_size(p->block_rows, all->rows - row);
    d.n = min_size(p->block_n, all->n - j);
    d.out += row * all->out_stride + j;
    d.x += row * all->x_stride;
    d.w = (const uint8_t *)all->w + j * all->w_stride;
    d.scale = all->scale ? (const uint8_t *)all->scale + j * all->scale_stride : NULL;
    d.starts = all->starts ? (const uint8_t *)all->starts + j * sizeof(uint32_t) : NULL;
    if (block_is_sound(p, &d, j))
        p->kernel(&d, scratch);
}

/* Several products in one job: the threads are woken once, and none waits for the end of a small one. */
struct products {
    struct product *each;
    size_t count;
};

static void multiply_blocks(void *arg, size_t begin, size_t end, void *scratch)
{
    const struct products *all = arg;
    struct product *p = all->each;
    for (size_t block = begin; block < end; block++) {
        while (block - p->first_block >= p->blocks)
            p++;
        multiply_block(p, block - p->first_block, scratch);
    }
}

#define MOST_ROWS 64 /* in a block: their lanes and a stretch of their x stay in the cache, and their pages in the TLB */
#define BLOCK_BYTES (192u << 10) /* of weights, for few rows: tens of microseconds */
#define MOST_N 96

/* How the outputs are cut changes no bit, only how evenly the threads are busy. */
static void cut(struct product *p)
{
    p->blocks = 0;
    if (p->all.rows == 0 || p->all.n == 0)
        return;
    size_t rows = p->all.rows, n = p->all.n, grain = pool_grain();
    if (grain) {
        p->block_rows = 1;
        while (p->block_rows < rows && p->block_rows * p->block_rows < grain)
            p->block_rows++;
        p->block_n = grain / p->block_rows ? grain / p->block_rows : 1;
    } else {
        size_t threads = pool_threads();
        p->block_rows = min_size(rows, MOST_ROWS);
        size_t most = rows < 4 ? BLOCK_BYTES / (p->all.w_stride + 1) : MOST_N;
        size_t even = n / (threads * 4);
        p->block_n = threads == 1 ? n : min_size(most, even) / 24 * 24;
        if (p->block_n < 24)
            p->block_n = 24;
    }
    p->block_n = min_size(p->block_n, n);
    p->row_blocks = (rows + p->block_rows - 1) / p->block_rows;
    p->blocks = p->row_blocks * ((n + p->block_n - 1) / p->block_n);
}

/* Sets the exception for what the blocks found bad in one of `count` products. */
static void refuse_product(struct product *p, size_t number, size_t count)
{
    const size_t bad = atomic_load(&p->bad), groups = p->all.scale_stride;
    if (p->all.starts)
        PyErr_Format(PyExc_ValueError, "exceptions of row %zu: starts may not fall or pass %zu, columns must ascend below %zu",
                     bad, p->exceptions, p->all.k);
    else if (count == 1)
        PyErr_Format(PyExc_ValueError, "scale of row %zu, group %zu is 255, which is not a number", bad / groups, bad % groups);
    else
        PyErr_Format(PyExc_ValueError, "product %zu: scale of row %zu, group %zu is 255, which is not a number", number,
                     bad / groups, bad % groups);
}

/* 0, or -1 with an exception set. */
static int multiply(struct product *each, size_t count)
{
    struct products all = {each, count};
    size_t blocks = 0;
    for (size_t i = 0; i < count; i++) {
        atomic_init(&each[i].bad, SIZE_MAX);
        cut(&each[i]);
        each[i].first_block = blocks;
        blocks += each[i].blocks;
    }
    if (door_run(blocks, 1, multiply_blocks, &all) != 0)
        return -1;
    for (size_t i = 0; i < count; i++)
        if (atomic_load(&each[i].bad) != SIZE_MAX) {
            refuse_product(&each[i], i, count);
            return -1;
        }
    return 0;
}

/* Checks the shapes, and reads the column of `out` into which the first output goes: the last argument, or NULL where the
 * caller left it out, and the outputs are all columns. 0, or -1 with an exception set. */
static int check_product(const struct door_array *out, const struct door_array *x, const struct door_array *w,
                         PyObject *first_arg, size_t *first)
{
    *first = 0;
    if (door_dim(out, 0, x->shape[0]) != 0)
        return -1;
    if (!first_arg)
        return door_dim(out, 1, w->shape[0]);
    const size_t columns = out->shape[1], n = w->shape[0];
    if (n > columns) {
        PyErr_Format(PyExc_ValueError, "dimension 1 of out must be at least %zu, not %zu", n, columns);
        return -1;
    }
    return door_size(first_arg, "first", 0, columns - n, first);
}

static struct dots dots_of(const struct door_array *out, const struct door_array *x, const struct door_array *w,
                           size_t element, size_t first)
{
    return (struct dots){
        .out = (float *)out->data + first,
        .x = x->data,
        .w = w->data,
        .out_stride = out->shape[1],
        .x_stride = x->shape[1],
        .w_stride = w->shape[1] * element,
        .rows = x->shape[0],
        .n = w->shape[0],
        .k = x->shape[1],
    };
}

static int check_groups(const struct door_array *x)
{
    if (x->shape[1] % 32 == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "dimension 1 of x must be a multiple of 32, not %zu", x->shape[1]);
    return -1;
}

static const struct door_spec mxfp4_specs[] = {
    {"out", 'f', 2, DOOR_OUT}, {"x", 'f', 2, 0}, {"packed", 'B', 2, 0}, {"scale", 'B', 2, 0}};

/* Fills in a product from its four open arrays. 0, or -1 with an exception set. */
static int mxfp4_product(const struct door_array *a, struct product *p)
{
    size_t k = a[1].shape[1], first;
    if (check_groups(&a[1]) != 0 || check_product(&a[0], &a[1], &a[2], NULL, &first) != 0 || door_dim(&a[2], 1, k / 2) != 0 ||
        door_dim(&a[3], 0, a[2].shape[0]) != 0 || door_dim(&a[3], 1, k / 32) != 0)
        return -1;
    *p = (struct product){.kernel = kernels()->matmul->mxfp4, .all = dots_of(&a[0], &a[1], &a[2], 1, first)};
    p->all.scale = p->checked_scale = a[3].data;
    p->all.scale_stride = k / 32;
    return 0;
}

static PyObject *matmul_mxfp4(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    struct door_array a[4];
    (void)module;
    if (door_count("matmul_mxfp4", count, 4) != 0 || door_open(args, mxfp4_specs, a, 4) != 0)
        return NULL;
    struct product p;
    int rc = mxfp4_product(a, &p) == 0 ? multiply(&p, 1) : -1;
    door_close(a, 4);
    return rc == 0 ? Py_NewRef(Py_None) : NULL;
}

/* Opens the arrays of one tuple. 0, or -1 with an exception set and nothing left open. */
static int open_product(PyObject *tuple, struct door_array a[4], struct product *p)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 4) {
        PyErr_SetString(PyExc_TypeError, "each of products must be a tuple (out, x, packed, scale)");
        return -1;
    }
    PyObject *const args[4] = {PyTuple_GET_ITEM(tuple, 0), PyTuple_GET_ITEM(tuple, 1), PyTuple_GET_ITEM(tuple, 2),
                               PyTuple_GET_ITEM(tuple, 3)};
    if (door_open(args, mxfp4_specs, a, 4) != 0)
        return -1;
    if (mxfp4_product(a, p) == 0)
        return 0;
    door_close(a, 4);
    return -1;
}

/* A result may not lie in an array of another product. */
static int check_apart(const struct door_array *arrays, size_t count)
{
    for (size_t i = 0; i < count; i += 4)
        for (size_t j = 0; j < count; j++)
            if (i / 4 != j / 4 && door_overlap(&arrays[i], &arrays[j])) {
                PyErr_Format(PyExc_ValueError, "out of product %zu shares memory with %s of product %zu", i / 4,
                             arrays[j].spec->name, j / 4);
                return -1;
            }
    return 0;
}

static PyObject *matmul_mxfp4_each(PyObject *module, PyObject *products)
{
    (void)module;
    PyObject *tuple = PySequence_Tuple(products);
    if (!tuple)
        return NULL;
    const size_t count = (size_t)PyTuple_GET_SIZE(tuple);
    struct product *each = PyMem_Calloc(count + 1, sizeof *each);
    struct door_array *arrays = PyMem_Calloc(4 * count + 1, sizeof *arrays);
    size_t opened = 0;
    int rc = each && arrays ? 0 : -1;
    if (rc != 0)
        PyErr_NoMemory();
    while (rc == 0 && opened < count) {
        rc = open_product(PyTuple_GET_ITEM(tuple, (Py_ssize_t)opened), arrays + 4 * opened, &each[opened]);
        opened += rc == 0;
    }
    if (rc == 0)
        rc = check_apart(arrays, 4 * count);
    if (rc == 0)
        rc = multiply(each, count);
    if (arrays)
        door_close(arrays, 4 * opened);
    PyMem_Free(arrays);
    PyMem_Free(each);
    Py_DECREF(tuple);
    return rc == 0 ? Py_NewRef(Py_None) : NULL;
}

/* The formats whose weights are one array [n, k]. */
static PyObject *matmul_plain(const char *name, PyObject *const *args, Py_ssize_t count, char type, size_t element,
                              dots_kernel *kernel)
{
    const struct door_spec specs[] = {{"out", 'f', 2, DOOR_OUT}, {"x", 'f', 2, 0}, {"w", type, 2, DOOR_ANYWHERE}};
    struct door_array a[3];
    if (door_count_either(name, count, 3) != 0 || door_open(args, specs, a, 3) != 0)
        return NULL;
    int rc = -1;
    size_t first;
    if (check_product(&a[0], &a[1], &a[2], count > 3 ? args[3] : NULL, &first) == 0 &&
        door_dim(&a[2], 1, a[1].shape[1]) == 0) {
        struct product p = {.kernel = kernel, .all = dots_of(&a[0], &a[1], &a[2], element, first)};
        rc = multiply(&p, 1);
    }
    door_close(a, 3);
    return rc == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *matmul_bf16(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    return matmul_plain("matmul_bf16", args, count, 'H', 2, kernels()->matmul->bf16);
}

static PyObject *matmul_f32(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    return matmul_plain("matmul_f32", args, count, 'f', 4, kernels()->matmul->f32);
}

static PyObject *matmul_int8(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    static const struct door_spec specs[] = {
        {"out", 'f', 2, DOOR_OUT}, {"x", 'f', 2, 0}, {"w", 'b', 2, 0}, {"row_scale", 'f', 1, DOOR_ANYWHERE}};
    struct door_array a[4];
    (void)module;
    if (door_count_either("matmul_int8", count, 4) != 0 || door_open(args, specs, a, 4) != 0)
        return NULL;
    int rc = -1;
    size_t first;
    if (check_product(&a[0], &a[1], &a[2], count > 4 ? args[4] : NULL, &first) == 0 &&
        door_dim(&a[2], 1, a[1].shape[1]) == 0 && door_dim(&a[3], 0, a[2].shape[0]) == 0) {
        struct product p = {.kernel = kernels()->matmul->int8, .all = dots_of(&a[0], &a[1], &a[2], 1, first)};
        p.all.scale = a[3].data;
        p.all.scale_stride = sizeof(float);
        rc = multiply(&p, 1);
    }
    door_close(a, 4);
    return rc == 0 ? Py_NewRef(Py_None) : NULL;
}

/* The ends of the table of exceptions; its middle is checked by the blocks that use it. */
static int check_starts(const struct door_array *starts, size_t n, size_t exceptions)
{
    uint32_t ends[2];
    if (door_dim(starts, 0, n + 1) != 0)
        return -1;
    memcpy(&ends[0], starts->data, sizeof *ends);
    memcpy(&ends[1], (const uint8_t *)starts->data + n * sizeof *ends, sizeof *ends);
    if (ends[0] == 0 && ends[1] == exceptions)
        return 0;
    PyErr_Format(PyExc_ValueError, "starts must go from 0 to %zu, not from %u to %u", exceptions, (unsigned)ends[0],
                 (unsigned)ends[1]);
    return -1;
}

/* Fills in a product from its seven open arrays. 0, or -1 with an exception set. */
static int bf12_product(const struct door_array *a, PyObject *first_arg, struct product *p)
{
    const struct door_array *out = &a[0], *x = &a[1], *codes = &a[2], *base = &a[3];
    const struct door_array *starts = &a[4], *columns = &a[5], *values = &a[6];
    const size_t n = codes->shape[0];
    size_t first;
    if (check_groups(x) != 0 || check_product(out, x, codes, first_arg, &first) != 0 ||
        door_dim(codes, 1, x->shape[1] / 32 * 48) != 0 || door_dim(base, 0, n) != 0 ||
        check_starts(starts, n, columns->size) != 0 || door_dim(values, 0, columns->size) != 0)
        return -1;
    *p = (struct product){
        .kernel = kernels()->matmul->bf12,
        .all = dots_of(out, x, codes, 1, first),
        .exceptions = columns->size,
    };
    p->all.scale = base->data;
    p->all.scale_stride = 1;
    p->all.starts = starts->data;
    p->all.columns = columns->data;
    p->all.values = values->data;
    return 0;
}

static PyObject *matmul_bf12(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    static const struct door_spec specs[] = {
        {"out", 'f', 2, DOOR_OUT},
        {"x", 'f', 2, 0},
        {"codes", 'B', 2, 0},
        {"base", 'B', 1, 0},
        {"starts", 'I', 1, DOOR_ANYWHERE},
        {"columns", 'H', 1, DOOR_ANYWHERE},
        {"values", 'H', 1, DOOR_ANYWHERE},
    };
    struct door_array a[7];
    (void)module;
    if (door_count_either("matmul_bf12", count, 7) != 0 || door_open(args, specs, a, 7) != 0)
        return NULL;
    struct product p;
    int rc = bf12_product(a, count > 7 ? args[7] : NULL, &p) == 0 ? multiply(&p, 1) : -1;
    door_close(a, 7);
    return rc == 0 ? Py_NewRef(Py_None) : NULL;
}

#define FIRST " With `first`, out may be wider, and gets the result from that column on."

PyMethodDef door_matmul_methods[] = {
    {"matmul_mxfp4", DOOR_FAST(matmul_mxfp4),
     "matmul_mxfp4(out f32[rows, n], x f32[rows, k], packed u8[n, k/2], scale u8[n, k/32]): out = x times the rows of the "
     "matrix. ValueError if a scale is 255; out is then undefined."},
    {"matmul_mxfp4_each", matmul_mxfp4_each, METH_O,
     "matmul_mxfp4_each(products): matmul_mxfp4 of each tuple (out, x, packed, scale), as one job of the threads."},
    {"matmul_bf16", DOOR_FAST(matmul_bf16),
     "matmul_bf16(out f32[rows, n], x f32[rows, k], w u16[n, k] holding bf16[, first])." FIRST},
    {"matmul_f32", DOOR_FAST(matmul_f32), "matmul_f32(out f32[rows, n], x f32[rows, k], w f32[n, k][, first])." FIRST},
    {"matmul_int8", DOOR_FAST(matmul_int8),
     "matmul_int8(out f32[rows, n], x f32[rows, k], w i8[n, k], row_scale f32[n][, first])." FIRST},
    {"matmul_bf12", DOOR_FAST(matmul_bf12),
     "matmul_bf12(out f32[rows, n], x f32[rows, k], codes u8[n, k/32*48], base u8[n], starts u32[n+1], columns u16[m], "
     "values u16[m][, first]): cext/bf12.h describes the arrays. ValueError if starts or columns are malformed; out is then "
     "undefined." FIRST},
    {NULL, NULL, 0, NULL},
};
