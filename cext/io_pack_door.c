#include "io_door.h"
#include "io_pack.h"

/* What a matrix in bf12 needs: codes or bits [n, k], the other arrays as long as they must be. 0, or -1. */
static int check_bf12(const struct door_array *bits, const struct door_array *codes, const struct door_array *base,
                      const struct door_array *starts)
{
    const size_t n = bits->shape[0], k = bits->shape[1];
    if (k == 0 || k % BF12_COLUMNS != 0 || k > BF12_MOST_COLUMNS) {
        PyErr_Format(PyExc_ValueError, "bits must have a multiple of %d columns, at most %d, not %zu", BF12_COLUMNS,
                     BF12_MOST_COLUMNS, k);
        return -1;
    }
    if (n > UINT32_MAX / k) {
        PyErr_Format(PyExc_ValueError, "bits has %zu rows; with %zu columns at most %zu can be counted", n, k,
                     (size_t)UINT32_MAX / k);
        return -1;
    }
    if (codes && (door_dim(codes, 0, n) != 0 || door_dim(codes, 1, k / BF12_COLUMNS * BF12_GROUP_NBYTES) != 0))
        return -1;
    return door_dim(base, 0, n) != 0 || door_dim(starts, 0, n + 1) != 0 ? -1 : 0;
}

static PyObject *measure(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    static const struct door_spec specs[] = {{"base", 'B', 1, DOOR_OUT}, {"starts", 'I', 1, DOOR_OUT}, {"bits", 'H', 2, 0}};
    struct door_array a[3];
    (void)module;
    if (door_count("bf12_measure", count, 3) != 0 || door_open(args, specs, a, 3) != 0)
        return NULL;
    PyObject *result = NULL;
    if (check_bf12(&a[2], NULL, &a[0], &a[1]) == 0) {
        const struct bf12 to = {.n = a[2].shape[0], .k = a[2].shape[1], .base = a[0].data, .starts = a[1].data};
        Py_BEGIN_ALLOW_THREADS
        bf12_measure(&to, a[2].data);
        Py_END_ALLOW_THREADS
        result = PyLong_FromUnsignedLong(to.starts[to.n]);
    }
    door_close(a, 3);
    return result;
}

static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    static const struct door_spec specs[] = {
        {"codes", 'B', 2, DOOR_OUT}, {"columns", 'H', 1, DOOR_OUT}, {"values", 'H', 1, DOOR_OUT},
        {"bits", 'H', 2, 0},         {"base", 'B', 1, 0},           {"starts", 'I', 1, 0},
    };
    struct door_array a[6];
    (void)module;
    if (door_count("bf12_pack", count, 6) != 0 || door_open(args, specs, a, 6) != 0)
        return NULL;
    size_t done = 0;
    const size_t n = a[3].shape[0];
    int ok = check_bf12(&a[3], &a[0], &a[4], &a[5]) == 0 && door_dim(&a[2], 0, a[1].size) == 0;
    if (ok) {
        const struct bf12 to = {
            .n = n,
            .k = a[3].shape[1],
            .codes = a[0].data,
            .columns = a[1].data,
            .values = a[2].data,
            .base = a[4].data,
            .starts = a[5].data,
        };
        if (to.starts[n] == a[1].size) {
            Py_BEGIN_ALLOW_THREADS
            done = bf12_pack(&to, a[3].data);
            Py_END_ALLOW_THREADS
        }
        ok = done == n && to.starts[n] == a[1].size;
        if (!ok)
            PyErr_Format(PyExc_ValueError, "base, starts and columns are not those of row %zu of bits", done);
    }
    door_close(a, 6);
    return ok ? Py_NewRef(Py_None) : NULL;
}

static PyObject *unpack(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    static const struct door_spec specs[] = {
        {"bits", 'H', 2, DOOR_OUT}, {"codes", 'B', 2, 0},   {"base", 'B', 1, 0},
        {"starts", 'I', 1, 0},      {"columns", 'H', 1, 0}, {"values", 'H', 1, 0},
    };
    struct door_array a[6];
    (void)module;
    if (door_count("bf12_unpack", count, 6) != 0 || door_open(args, specs, a, 6) != 0)
        return NULL;
    int ok = check_bf12(&a[0], &a[1], &a[2], &a[3]) == 0 && door_dim(&a[5], 0, a[4].size) == 0;
    if (ok) {
        const struct bf12 from = {
            .n = a[0].shape[0],
            .k = a[0].shape[1],
            .codes = a[1].data,
            .base = a[2].data,
            .starts = a[3].data,
            .columns = a[4].data,
            .values = a[5].data,
        };
        size_t done;
        Py_BEGIN_ALLOW_THREADS
        done = bf12_unpack(a[0].data, &from, a[4].size);
        Py_END_ALLOW_THREADS
        ok = done == from.n;
        if (!ok)
            PyErr_Format(PyExc_ValueError, "starts or columns of row %zu are malformed", done);
    }
    door_close(a, 6);
    return ok ? Py_NewRef(Py_None) : NULL;
}

static PyObject *round_rows(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    static const struct door_spec specs[] = {{"q", 'b', 2, DOOR_OUT}, {"scale", 'f', 1, DOOR_OUT}, {"bits", 'H', 2, 0}};
    struct door_array a[3];
    (void)module;
    if (door_count("int8_pack", count, 3) != 0 || door_open(args, specs, a, 3) != 0)
        return NULL;
    PyObject *result = NULL;
    const size_t n = a[2].shape[0], k = a[2].shape[1];
    if (door_dim(&a[0], 0, n) == 0 && door_dim(&a[0], 1, k) == 0 && door_dim(&a[1], 0, n) == 0) {
        size_t done;
        Py_BEGIN_ALLOW_THREADS
        done = int8_pack(a[0].data, a[1].data, a[2].data, n, k);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSize_t(done);
    }
    door_close(a, 3);
    return result;
}

PyMethodDef io_pack_methods[] = {
    {"bf12_measure", DOOR_FAST(measure),
     "bf12_measure(base u8[n], starts u32[n+1], bits u16[n, k] holding bf16) -> exceptions: fills in base and starts."},
    {"bf12_pack", DOOR_FAST(pack),
     "bf12_pack(codes u8[n, k/32*48], columns u16[m], values u16[m], bits u16[n, k], base u8[n], starts u32[n+1]): base "
     "and starts as bf12_measure filled them in, m what it returned. ValueError if they are not those of bits."},
    {"bf12_unpack", DOOR_FAST(unpack),
     "bf12_unpack(bits u16[n, k], codes u8[n, k/32*48], base u8[n], starts u32[n+1], columns u16[m], values u16[m]): the "
     "bits that were packed. ValueError if starts or columns are malformed."},
    {"int8_pack", DOOR_FAST(round_rows),
     "int8_pack(q i8[n, k], scale f32[n], bits u16[n, k] holding bf16) -> rows done: n, or the first row with an infinity "
     "or NaN."},
    {NULL, NULL, 0, NULL},
};
