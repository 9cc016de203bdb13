#define _GNU_SOURCE /* O_DIRECT */
#include "io_read.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_AT_ONCE ((size_t)1 << 30) /* Linux reads at most 2 GiB - 4 KiB in one call, macOS refuses more than 2 GiB - 1 */

static int open_plainly(const char *path, int flags)
{
    int fd;
    do
        fd = open(path, O_RDONLY | O_CLOEXEC | flags);
    while (fd < 0 && errno == EINTR);
    return fd;
}

int io_open(const char *path, int *direct)
{
#if defined(O_DIRECT)
    if (*direct) {
        int fd = open_plainly(path, O_DIRECT);
        if (fd >= 0 || (errno != EINVAL && errno != ENOTSUP && errno != EOPNOTSUPP && errno != ENOSYS))
            return fd;
        *direct = 0;
    }
    return open_plainly(path, 0);
#else
    int fd = open_plainly(path, 0);
#if defined(F_NOCACHE)
    if (fd >= 0 && *direct && fcntl(fd, F_NOCACHE, 1) == 0)
        return fd;
#endif
    *direct = 0;
    return fd;
#endif
}

/* Bytes read to p, at most n; 0 at the end of the file; -1 with errno. */
static ssize_t read_some(int fd, unsigned char *p, size_t n, uint64_t offset)
{
    ssize_t got;
    do
        got = pread(fd, p, n < MOST_AT_ONCE ? n : MOST_AT_ONCE, (off_t)offset);
    while (got < 0 && errno == EINTR);
    return got;
}

/* Where the file ends, which is at `at` or before. */
static int too_short(int fd, uint64_t at, uint64_t *end)
{
    struct stat s;
    *end = fstat(fd, &s) == 0 && (uint64_t)s.st_size < at ? (uint64_t)s.st_size : at;
    errno = 0;
    return -1;
}

static int read_through_cache(int fd, uint64_t offset, size_t nbytes, unsigned char *p, uint64_t *end)
{
    for (size_t at = 0; at < nbytes;) {
        ssize_t got = read_some(fd, p + at, nbytes - at, offset + at);
        if (got < 0)
            return -1;
        if (got == 0)
            return too_short(fd, offset + at, end);
        at += (size_t)got;
    }
    return 0;
}

int io_read(int fd, uint64_t offset, size_t nbytes, unsigned char *slot, int direct, uint64_t *end)
{
    size_t start = offset % IO_PAGE, wanted = start + nbytes;
    if (!direct)
        return read_through_cache(fd, offset, nbytes, slot + start, end);
    if (nbytes == 0)
        return 0;
    uint64_t first = offset - start;
    size_t whole = (wanted + IO_PAGE - 1) / IO_PAGE * IO_PAGE;
    /* A read that stops within a page has met the end of the file, or was cut short; only asking for that page again
     * tells which, because a direct read cannot go on from there. */
    for (size_t have = 0; have < wanted;) {
        size_t from = have / IO_PAGE * IO_PAGE;
        ssize_t got = read_some(fd, slot + from, whole - from, first + from);
        if (got < 0)
            return -1;
        if (from + (size_t)got <= have)
            return too_short(fd, first + have, end);
        have = from + (size_t)got;
    }
    return 0;
}
