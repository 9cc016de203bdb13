#include "door.h"
#include "fpenv.h"
#include "kernels.h"
#include "pool.h"

static PyObject *isa(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    return PyUnicode_FromString(kernels()->isa);
}

static PyObject *isas(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    const char *const *names = kernels_usable();
    Py_ssize_t count = 0;
    while (names[count])
        count++;
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (!name) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, name);
    }
    return tuple;
}

static PyObject *set_isa(PyObject *module, PyObject *arg)
{
    (void)module;
    const char *name = PyUnicode_Check(arg) ? PyUnicode_AsUTF8(arg) : NULL;
    if (!name) {
        PyErr_SetString(PyExc_TypeError, "isa must be a string");
        return NULL;
    }
    if (kernels_set(name) != 0)
        return PyErr_Format(PyExc_ValueError, "isa %.32s cannot run on this processor", name);
    Py_RETURN_NONE;
}

static PyObject *threads(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    return PyLong_FromSize_t(pool_threads());
}

static PyObject *set_threads(PyObject *module, PyObject *arg)
{
    (void)module;
    size_t n;
    if (door_size(arg, "threads", 1, POOL_MOST_THREADS, &n) != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pool_set_threads(n);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *grain(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    return PyLong_FromSize_t(pool_grain());
}

static PyObject *set_grain(PyObject *module, PyObject *arg)
{
    (void)module;
    size_t n;
    if (door_size(arg, "grain", 0, SIZE_MAX, &n) != 0)
        return NULL;
    pool_set_grain(n);
    Py_RETURN_NONE;
}

static PyObject *test_set_flush(PyObject *module, PyObject *arg)
{
    (void)module;
    int on = PyObject_IsTrue(arg);
    if (on < 0)
        return NULL;
    fpenv_set(on ? FPENV_FLUSH : FPENV_OURS);
    Py_RETURN_NONE;
}

static PyObject *test_fpenv(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    return PyLong_FromUnsignedLongLong(fpenv_get());
}

static PyMethodDef own_methods[] = {
    {"isa", isa, METH_NOARGS, "isa() -> the instruction set in use."},
    {"isas", isas, METH_NOARGS, "isas() -> the instruction sets that this processor can run, best first."},
    {"set_isa", set_isa, METH_O, "set_isa(name): use another instruction set. For tests and benchmarks."},
    {"threads", threads, METH_NOARGS, "threads() -> threads that compute, the caller among them."},
    {"set_threads", set_threads, METH_O, "set_threads(n): from 1 to 1024; more than cores is allowed."},
    {"grain", grain, METH_NOARGS, "grain() -> outputs in a piece of work; 0 is automatic."},
    {"set_grain", set_grain, METH_O, "set_grain(n): cut all work into pieces of about n outputs. For tests."},
    {"test_set_flush", test_set_flush, METH_O, "test_set_flush(on): flush to zero on this thread. For tests."},
    {"test_fpenv", test_fpenv, METH_NOARGS, "test_fpenv() -> the floating-point control register. For tests."},
    {NULL, NULL, 0, NULL},
};

static int forced_grain(void)
{
    const char *text = getenv("DELTAFIN_GRAIN");
    if (!text || !*text)
        return 0;
    char *end;
    unsigned long long n = strtoull(text, &end, 10);
    if (*end || *text == '-') {
        PyErr_Format(PyExc_ImportError, "DELTAFIN_GRAIN=%.32s is not a number of outputs", text);
        return -1;
    }
    pool_set_grain((size_t)n);
    return 0;
}

static int start(PyObject *module)
{
    (void)module;
    char why[160];
    if (kernels_choose(why, sizeof why) != 0) {
        PyErr_SetString(PyExc_ImportError, why);
        return -1;
    }
    return forced_grain();
}

#pragma GCC diagnostic ignored "-Wpedantic" /* the slot holds a function in a void pointer, as Python wants it */
static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "deltafin.cext._math",
    .m_doc = "The arithmetic of docs/arithmetic.md. Arrays are C-contiguous; results are written in place.",
    .m_slots = slots,
};

static PyMethodDef methods[96];

PyMODINIT_FUNC PyInit__math(void)
{
    PyMethodDef *const groups[] = {own_methods, door_matmul_methods, door_limit_methods, door_vector_methods};
    size_t count = 0;
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
        for (PyMethodDef *m = groups[g]; m && m->ml_name; m++) {
            if (count + 1 == sizeof methods / sizeof *methods) {
                PyErr_SetString(PyExc_ImportError, "_math has more methods than its table holds");
                return NULL;
            }
            methods[count++] = *m;
        }
    module.m_methods = methods;
    return PyModuleDef_Init(&module);
}
