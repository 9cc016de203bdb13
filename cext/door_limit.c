#include "door.h"

#include <stdatomic.h>

#include "kernels.h"
#include "limit.h"

#define READ_PIECE ((size_t)1 << 20)

struct reading {
    const char *isa;
    const uint8_t *from;
    size_t nbytes, ahead;
    atomic_uint_least64_t sum;
};

static void read_pieces(void *arg, size_t begin, size_t end, void *scratch)
{
    (void)scratch;
    struct reading *r = arg;
    size_t last = end * READ_PIECE < r->nbytes ? end * READ_PIECE : r->nbytes;
    atomic_fetch_xor(&r->sum, limit_read(r->isa, r->from + begin * READ_PIECE, last - begin * READ_PIECE, r->ahead));
}

static PyObject *py_limit_read(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    static const struct door_spec specs[] = {{"bytes", 'B', 1, 0}};
    struct door_array a[1];
    (void)module;
    size_t ahead;
    if (door_count("limit_read", count, 2) != 0 || door_size(args[1], "ahead", 0, READ_PIECE, &ahead) != 0 ||
        door_open(args, specs, a, 1) != 0)
        return NULL;
    struct reading r = {.isa = kernels()->isa, .from = a[0].data, .nbytes = a[0].size, .ahead = ahead};
    atomic_init(&r.sum, 0);
    int rc = door_run((r.nbytes + READ_PIECE - 1) / READ_PIECE, 1, read_pieces, &r);
    door_close(a, 1);
    return rc == 0 ? PyLong_FromUnsignedLongLong(atomic_load(&r.sum)) : NULL;
}

struct multiplying {
    const char *isa;
    size_t steps;
    atomic_size_t flop;
};

static void multiply(void *arg, size_t begin, size_t end, void *scratch)
{
    (void)scratch;
    struct multiplying *m = arg;
    for (size_t i = begin; i < end; i++)
        atomic_fetch_add(&m->flop, limit_fma(m->isa, m->steps) * m->steps);
}

static PyObject *py_limit_fma(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    struct multiplying m = {.isa = kernels()->isa};
    size_t pieces;
    if (door_count("limit_fma", count, 2) != 0 || door_size(args[0], "pieces", 1, 1u << 20, &pieces) != 0 ||
        door_size(args[1], "steps", 1, 1u << 30, &m.steps) != 0)
        return NULL;
    atomic_init(&m.flop, 0);
    if (door_run(pieces, 1, multiply, &m) != 0)
        return NULL;
    return PyLong_FromSize_t(atomic_load(&m.flop));
}

PyMethodDef door_limit_methods[] = {
    {"limit_read", DOOR_FAST(py_limit_read),
     "limit_read(bytes u8[n], ahead): read them on all threads, prefetching that many bytes ahead."},
    {"limit_fma", DOOR_FAST(py_limit_fma),
     "limit_fma(pieces, steps) -> floating-point operations done: multiply-adds in registers on all threads."},
    {NULL, NULL, 0, NULL},
};
