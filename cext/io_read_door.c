#include "io_door.h"
#include "io_read.h"

#include <errno.h>

static PyObject *open_file(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    PyObject *path;
    if (door_count("open", count, 2) != 0 || !PyUnicode_FSConverter(args[0], &path))
        return NULL;
    int direct = PyObject_IsTrue(args[1]), fd = -1, failure = 0;
    if (direct >= 0) {
        const char *name = PyBytes_AS_STRING(path);
        Py_BEGIN_ALLOW_THREADS
        fd = io_open(name, &direct);
        failure = errno;
        Py_END_ALLOW_THREADS
        if (fd < 0) {
            errno = failure;
            PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, args[0]);
        }
    }
    Py_DECREF(path);
    return fd < 0 ? NULL : Py_BuildValue("iO", fd, direct ? Py_True : Py_False);
}

/* An OSError with EIO: the file holds less than it should. */
static void too_short(uint64_t end, uint64_t wanted)
{
    PyObject *text = PyUnicode_FromFormat("the file ends at byte %llu, %llu bytes too early", (unsigned long long)end,
                                          (unsigned long long)(wanted - end));
    PyObject *error = text ? PyObject_CallFunction(PyExc_OSError, "iO", EIO, text) : NULL;
    if (error)
        PyErr_SetObject(PyExc_OSError, error);
    Py_XDECREF(error);
    Py_XDECREF(text);
}

static PyObject *read_span(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    static const struct door_spec spec = {"slot", 'B', 1, DOOR_OUT};
    struct door_array slot;
    size_t fd, offset, nbytes;
    int direct;
    if (door_count("read", count, 5) != 0 || door_size(args[0], "fd", 0, INT_MAX, &fd) != 0 ||
        door_size(args[1], "offset", 0, (size_t)IO_MOST_END, &offset) != 0 ||
        door_size(args[2], "nbytes", 0, (size_t)IO_MOST_END - offset, &nbytes) != 0 ||
        (direct = PyObject_IsTrue(args[4])) < 0 || door_open(&args[3], &spec, &slot, 1) != 0)
        return NULL;
    size_t start = offset % IO_PAGE, least = (start + nbytes + IO_PAGE - 1) / IO_PAGE * IO_PAGE;
    PyObject *result = NULL;
    if ((uintptr_t)slot.data % IO_PAGE != 0) {
        PyErr_Format(PyExc_ValueError, "slot does not start on a page of %zu bytes", IO_PAGE);
    } else if (slot.size < least) {
        PyErr_Format(PyExc_ValueError, "slot has %zu bytes; %zu bytes at %zu need %zu", slot.size, nbytes, offset, least);
    } else {
        uint64_t end = 0;
        int rc, failure;
        Py_BEGIN_ALLOW_THREADS
        rc = io_read((int)fd, offset, nbytes, slot.data, direct, &end);
        failure = errno;
        Py_END_ALLOW_THREADS
        if (rc == 0) {
            result = PyLong_FromSize_t(start);
        } else if (failure == 0) {
            too_short(end, (uint64_t)offset + nbytes);
        } else {
            errno = failure;
            PyErr_SetFromErrno(PyExc_OSError);
        }
    }
    door_close(&slot, 1);
    return result;
}

PyMethodDef io_read_methods[] = {
    {"open", DOOR_FAST(open_file),
     "open(path, direct) -> (fd, direct): opens a file for reading, past the page cache if that is asked for and the "
     "file system allows it. The caller closes fd."},
    {"read", DOOR_FAST(read_span),
     "read(fd, offset, nbytes, slot, direct) -> start: fills slot[start : start + nbytes], start = offset % PAGE. The slot "
     "starts on a page and holds start + nbytes rounded up to pages. OSError: EINVAL where the file system refuses "
     "direct reads after all, EIO also where the file is too short."},
    {NULL, NULL, 0, NULL},
};
