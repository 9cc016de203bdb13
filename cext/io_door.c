#include "io_door.h"
#include "io_read.h"

static int start(PyObject *module)
{
    return PyModule_AddIntConstant(module, "PAGE", (long)IO_PAGE);
}

#pragma GCC diagnostic ignored "-Wpedantic" /* the slot holds a function in a void pointer, as Python wants it */
static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "deltafin.cext._io",
    .m_doc = "Spans of files into page-aligned slots, and the encodings of packs.",
    .m_slots = slots,
};

static PyMethodDef methods[32];

PyMODINIT_FUNC PyInit__io(void)
{
    PyMethodDef *const groups[] = {io_read_methods, io_pack_methods};
    size_t count = 0;
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
        for (PyMethodDef *m = groups[g]; m->ml_name; m++) {
            if (count + 1 == sizeof methods / sizeof *methods) {
                PyErr_SetString(PyExc_ImportError, "_io has more methods than its table holds");
                return NULL;
            }
            methods[count++] = *m;
        }
    module.m_methods = methods;
    return PyModuleDef_Init(&module);
}
