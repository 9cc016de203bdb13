#include "door.h"
#include "fpenv.h"

#include <string.h>

static const struct {
    char type;
    size_t size;
    const char *name, *codes;
} types[] = {
    {'f', 4, "float32", "f"},  {'H', 2, "uint16", "H"}, {'B', 1, "uint8", "B"},
    {'b', 1, "int8", "b"},     {'i', 4, "int32", "il"}, {'q', 8, "int64", "lq"},
    {'I', 4, "uint32", "IL"},
};

static size_t type_index(char type)
{
    size_t i = 0;
    while (types[i].type != type)
        i++;
    return i;
}

/* Whether a buffer's format is one of the codes, in this machine's byte order. */
static int format_is(const char *format, const char *codes)
{
    if (!format)
        format = "B";
    if (strchr("@=^", *format) && *format)
        format++;
    else if (*format == (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? '<' : '>'))
        format++;
    return *format && !format[1] && strchr(codes, *format);
}

static int refuse(PyObject *kind, const struct door_spec *spec, const char *what)
{
    PyErr_Format(kind, "%s %s", spec->name, what);
    return -1;
}

static int open_one(PyObject *arg, const struct door_spec *spec, struct door_array *a)
{
    memset(a, 0, sizeof *a);
    a->spec = spec;
    if (arg == Py_None && spec->flags & DOOR_OPTIONAL)
        return 0;
    if (!PyObject_CheckBuffer(arg)) {
        PyErr_Format(PyExc_TypeError, "%s must be an array, not %.100s", spec->name, Py_TYPE(arg)->tp_name);
        return -1;
    }
    if (PyObject_GetBuffer(arg, &a->view, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
        PyErr_Clear();
        a->view.obj = NULL;
        return refuse(PyExc_ValueError, spec, "cannot be read as an array");
    }
    const Py_buffer *v = &a->view;
    size_t type = type_index(spec->type);
    if (!format_is(v->format, types[type].codes) || (size_t)v->itemsize != types[type].size) {
        PyErr_Format(PyExc_TypeError, "%s must be %s, not of format '%.20s'", spec->name, types[type].name,
                     v->format ? v->format : "B");
        return -1;
    }
    if (spec->ndim >= 0 ? v->ndim != spec->ndim : v->ndim > DOOR_MOST_DIMS) {
        int wanted = spec->ndim >= 0 ? spec->ndim : DOOR_MOST_DIMS;
        PyErr_Format(PyExc_ValueError, "%s must have %s%d dimensions, not %d", spec->name,
                     spec->ndim >= 0 ? "" : "at most ", wanted, v->ndim);
        return -1;
    }
    if (!PyBuffer_IsContiguous(v, 'C'))
        return refuse(PyExc_ValueError, spec, "must be C-contiguous");
    if (spec->flags & DOOR_OUT && v->readonly)
        return refuse(PyExc_ValueError, spec, "is read-only, and the result goes there");
    if (!(spec->flags & DOOR_ANYWHERE) && (uintptr_t)v->buf % types[type].size != 0)
        return refuse(PyExc_ValueError, spec, "is not aligned to its elements");
    a->data = v->buf;
    a->ndim = v->ndim;
    a->size = (size_t)v->len / types[type].size;
    for (int i = 0; i < DOOR_MOST_DIMS; i++)
        a->shape[i] = i < v->ndim ? (size_t)v->shape[i] : 1;
    return 0;
}

int door_overlap(const struct door_array *a, const struct door_array *b)
{
    uintptr_t a0 = (uintptr_t)a->data, b0 = (uintptr_t)b->data;
    return a->size && b->size && a0 < b0 + (size_t)b->view.len && b0 < a0 + (size_t)a->view.len;
}

/* An input that may be the output itself may be just that. */
static int clash(const struct door_array *a, const struct door_array *b)
{
    int in_place = (a->spec->flags | b->spec->flags) & DOOR_IN_PLACE;
    return door_overlap(a, b) && !(in_place && a->data == b->data && a->view.len == b->view.len);
}

int door_open(PyObject *const *args, const struct door_spec *specs, struct door_array *arrays, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (open_one(args[i], &specs[i], &arrays[i]) != 0) {
            door_close(arrays, i + 1);
            return -1;
        }
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < count; j++)
            if (specs[i].flags & DOOR_OUT && i != j && clash(&arrays[i], &arrays[j])) {
                PyErr_Format(PyExc_ValueError, "%s shares memory with %s", specs[i].name, specs[j].name);
                door_close(arrays, count);
                return -1;
            }
    return 0;
}

void door_close(struct door_array *arrays, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (arrays[i].view.obj)
            PyBuffer_Release(&arrays[i].view);
}

int door_count(const char *function, Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", function, wanted, given);
    return -1;
}

int door_count_either(const char *function, Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted || given == wanted + 1)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd or %zd arguments, not %zd", function, wanted, wanted + 1, given);
    return -1;
}

int door_dim(const struct door_array *a, int dim, size_t wanted)
{
    if (a->shape[dim] == wanted)
        return 0;
    PyErr_Format(PyExc_ValueError, "dimension %d of %s must be %zu, not %zu", dim, a->spec->name, wanted, a->shape[dim]);
    return -1;
}

int door_size(PyObject *arg, const char *name, size_t least, size_t most, size_t *out)
{
    if (!PyLong_Check(arg)) {
        PyErr_Format(PyExc_TypeError, "%s must be an int, not %.100s", name, Py_TYPE(arg)->tp_name);
        return -1;
    }
    size_t n = PyLong_AsSize_t(arg);
    int failed = n == (size_t)-1 && PyErr_Occurred();
    PyErr_Clear();
    if (failed || n < least || n > most) {
        PyErr_Format(PyExc_ValueError, "%s must be from %zu to %zu, not %S", name, least, most, arg);
        return -1;
    }
    *out = n;
    return 0;
}

int door_float(PyObject *arg, const char *name, float *out)
{
    double value = PyFloat_AsDouble(arg);
    if (value == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s must be a number, not %.100s", name, Py_TYPE(arg)->tp_name);
        return -1;
    }
    if (value != value) {
        PyErr_Format(PyExc_ValueError, "%s is not a number", name);
        return -1;
    }
    fpenv found = fpenv_enter(); /* a caller in another rounding mode gets the same constant */
    *out = (float)value;
    fpenv_leave(found);
    return 0;
}

int door_run(size_t count, size_t piece, pool_work *work, void *arg)
{
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = pool_run(count, piece, work, arg);
    Py_END_ALLOW_THREADS
    if (rc != 0)
        PyErr_SetString(PyExc_MemoryError, "no memory for the thread pool");
    return rc;
}
