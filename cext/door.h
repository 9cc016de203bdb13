/* Helpers of the Python side: every argument is checked here before a kernel sees a pointer. */
#ifndef DELTAFIN_DOOR_H
#define DELTAFIN_DOOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

#include "pool.h"

/* One file of the door for each group of kernels; math_door.c joins their methods. Each ends with {NULL}. */
extern PyMethodDef door_matmul_methods[];
extern PyMethodDef door_limit_methods[];
extern PyMethodDef door_vector_methods[];

/* The two middle entries of a PyMethodDef for `PyObject *f(PyObject *module, PyObject *const *args, Py_ssize_t count)`. */
#define DOOR_FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

#define DOOR_MOST_DIMS 4

/* What an array argument must be. */
struct door_spec {
    const char *name; /* for messages */
    char type;        /* f float32, H uint16, B uint8, b int8, i int32, I uint32, q int64 */
    int ndim;         /* number of dimensions; -1 is any up to DOOR_MOST_DIMS */
    int flags;        /* of the following */
};

#define DOOR_OUT 1      /* must be writable, and may share no byte with another array, but see DOOR_IN_PLACE */
#define DOOR_OPTIONAL 2 /* may be None: then data is NULL, size and all dimensions are 0 */
#define DOOR_ANYWHERE 4 /* need not be aligned to its element (bytes of a file) */
#define DOOR_IN_PLACE 8 /* an input that may be exactly an output: same address, same length */

struct door_array {
    void *data;
    size_t shape[DOOR_MOST_DIMS]; /* dimensions past ndim are 1 */
    size_t size;                  /* elements */
    int ndim;
    const struct door_spec *spec;
    Py_buffer view;               /* view.obj is NULL when not open */
};

/* Opens count arrays from args[0 .. count) as the specs say: C-contiguous, aligned, of that type and
 * number of dimensions, outputs writable and disjoint from everything else. 0, or -1 with an exception set and nothing
 * left open. */
int door_open(PyObject *const *args, const struct door_spec *specs, struct door_array *arrays, size_t count);
void door_close(struct door_array *arrays, size_t count);

/* Whether two open arrays share a byte. */
int door_overlap(const struct door_array *a, const struct door_array *b);

/* Each: 0, or -1 with a ValueError or TypeError that names the argument. */
int door_count(const char *function, Py_ssize_t given, Py_ssize_t wanted);
int door_count_either(const char *function, Py_ssize_t given, Py_ssize_t wanted); /* or one more */
int door_dim(const struct door_array *a, int dim, size_t wanted); /* a.shape[dim] == wanted */
int door_size(PyObject *arg, const char *name, size_t least, size_t most, size_t *out); /* an int in least .. most */
int door_float(PyObject *arg, const char *name, float *out); /* rounded to float32; not NaN */

/* Runs a pool job with Python's lock released. 0, or -1 with MemoryError. See pool_run. */
int door_run(size_t count, size_t piece, pool_work *work, void *arg);

#endif
