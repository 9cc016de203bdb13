/* Reading spans of files into slots, past the page cache where the file system lets us. */
#ifndef DELTAFIN_IO_READ_H
#define DELTAFIN_IO_READ_H

#include <stddef.h>
#include <stdint.h>

/* Direct reads start and end at multiples of this, in the file and in memory. No drive has larger sectors. */
#define IO_PAGE ((size_t)4096)

/* Largest offset + nbytes: what is left leaves room for rounding up to a page. */
#define IO_MOST_END ((uint64_t)INT64_MAX - IO_PAGE)

/* Opens a file for reading. *direct asks for reads past the page cache and says whether they were granted: a file
 * system that refuses them is read through the cache. The descriptor, or -1 with errno set. */
int io_open(const char *path, int *direct);

/* Bytes offset .. offset + nbytes of the file to slot[start ..], start = offset mod IO_PAGE. The slot begins on a page
 * and is long enough for start + nbytes rounded up to pages; a direct read writes whole pages of it, another only the
 * bytes asked for. 0, or -1 with errno set; if the file is too short, errno is 0 and *end says at which byte it ends. */
int io_read(int fd, uint64_t offset, size_t nbytes, unsigned char *slot, int direct, uint64_t *end);

#endif
