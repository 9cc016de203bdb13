/* What the door's files for the vector kernels share. */
#ifndef DELTAFIN_DOOR_VECTOR_H
#define DELTAFIN_DOOR_VECTOR_H

#include "door.h"
#include "kernels.h"
#include "vector.h"

#define FAST_ARGS PyObject *module, PyObject *const *args, Py_ssize_t count

/* Attention, in door_attention.c; the methods are listed in door_vector.c. */
PyObject *door_kda_prepare(FAST_ARGS);
PyObject *door_kda_history(FAST_ARGS);
PyObject *door_kda_gates(FAST_ARGS);
PyObject *door_kda_read(FAST_ARGS);
PyObject *door_kda_recur(FAST_ARGS);
PyObject *door_kda_output(FAST_ARGS);
PyObject *door_mla_latents(FAST_ARGS);
PyObject *door_mla_absorb(FAST_ARGS);
PyObject *door_mla_attend(FAST_ARGS);
PyObject *door_mla_values(FAST_ARGS);

/* Widths that every kernel's part of the pool's scratch is enough for. */
#define MOST_WIDTH ((size_t)1 << 17)
#define MOST_HEAD_DIM ((size_t)1 << 10)
_Static_assert(POOL_SCRATCH >= 2 * MOST_WIDTH * sizeof(float), "mix keeps two rows");
_Static_assert(POOL_SCRATCH >= MOST_HEAD_DIM * KDA_COLUMNS * sizeof(float), "kda_recur keeps columns of a state");
_Static_assert(POOL_SCRATCH >= MOST_HEAD_DIM * MLA_COLUMNS * sizeof(float), "mla_absorb keeps widened weights");

/* All: 0, or -1 with an exception set that names the argument. */
int door_at_most(const struct door_array *a, int dim, size_t most);
int door_same_shape(const struct door_array *a, const struct door_array *like);

/* Closes the arrays; None, or NULL if rc is not 0. */
PyObject *door_done(struct door_array *arrays, size_t count, int rc);

/* Items to a piece where one makes `outputs` of them: about ten microseconds of work. */
size_t door_piece(size_t outputs);

/* An array of file bytes, float32 or bfloat16: n of them as float32 in scratch, or where they are. */
const float *door_widened(const struct vector_kernels *k, const struct door_array *w, size_t n, float *scratch);

/* Whether arg looks like an array of uint16, so that a weight may be bfloat16 or float32. */
int door_is_uint16(PyObject *arg);

/* `fixed` arrays from args and `more` from a tuple, opened together. NULL with an exception set, or what door_many_close
 * takes back. Specs of the tuple's arrays are `each`. */
struct door_many {
    size_t count;
    struct door_spec *specs;
    PyObject **args;
    struct door_array arrays[];
};
struct door_many *door_many_open(PyObject *const *args, const struct door_spec *specs, size_t fixed, PyObject *tuple,
                                 const struct door_spec *each, size_t least, size_t most);
PyObject *door_many_done(struct door_many *many, int rc);

#endif
