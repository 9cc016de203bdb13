/* The thread pool: one job at a time, cut into pieces that sleeping workers and the caller take from a counter.
 *
 * Workers wait on a condition variable and never spin. They are started by the first job that has a use for them, and
 * again after a fork. Callers on several threads queue. */
#ifndef DELTAFIN_POOL_H
#define DELTAFIN_POOL_H

#include <stddef.h>

/* Bytes of memory of its own that each thread of a job is lent, aligned to 4,096; not cleared between pieces. */
#define POOL_SCRATCH ((size_t)1 << 20)

/* Does items begin <= i < end. Runs with our floating-point state set. Must not call pool_run. */
typedef void pool_work(void *arg, size_t begin, size_t end, void *scratch);

/* Runs work over the items 0 .. count, handed out in pieces of `piece` items (the last may be shorter), and returns when
 * all are done. 0, or -1 when there was no memory for the caller's scratch: then nothing ran. Without memory or threads
 * for more workers, fewer do the same work. Not to be called with Python's lock held. */
int pool_run(size_t count, size_t piece, pool_work *work, void *arg);

/* Items in a piece: `preferred`, but where a test grain is set, as many as make about that many outputs. */
size_t pool_piece(size_t outputs_per_item, size_t preferred);

/* Threads that a job may use, the caller among them. From the start: as many as affinity and cgroup limits allow. */
size_t pool_threads(void);

/* 0, or -1 if n is not in 1 .. POOL_MOST_THREADS. Waits for a running job. Any n gives the same bits. */
#define POOL_MOST_THREADS 1024
int pool_set_threads(size_t n);

/* The test grain: outputs in a piece; 0 (the default) leaves the cut to each operation. */
size_t pool_grain(void);
void pool_set_grain(size_t grain);

#endif
