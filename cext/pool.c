#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fpenv.h"

#define SCRATCH_ALIGNMENT 4096

struct job {
    pool_work *work;
    void *arg;
    size_t count, piece;
    atomic_size_t next; /* first item nobody has taken */
};

struct worker {
    pthread_t thread;
    void *scratch; /* POOL_SCRATCH bytes */
};

/* Whoever holds `turn` owns the job being run, the workers and caller_scratch; `lock` guards the rest. */
static struct {
    pthread_mutex_t turn;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* a job has seats, or the workers are to stop */
    pthread_cond_t done; /* the last worker has left the job */
    struct job *job;     /* NULL between jobs, and once all its pieces are taken */
    size_t seats;        /* workers that may still join the job */
    size_t active;       /* workers inside the job */
    int stop;
    struct worker *workers;
    size_t started;   /* running threads in workers */
    size_t attempted; /* how many were asked for: equal to started unless the system refused */
    void *caller_scratch;
    int watches_forks;
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static atomic_size_t wanted_threads; /* 0: not yet counted */
static atomic_size_t test_grain;

static void take_pieces(struct job *job, void *scratch)
{
    fpenv found = fpenv_enter();
    for (;;) {
        size_t begin = atomic_fetch_add_explicit(&job->next, job->piece, memory_order_relaxed);
        if (begin >= job->count)
            break;
        size_t left = job->count - begin;
        job->work(job->arg, begin, begin + (left < job->piece ? left : job->piece), scratch);
    }
    fpenv_leave(found);
}

static void *worker_main(void *arg)
{
    struct worker *self = arg;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.stop && !(pool.job && pool.seats))
            pthread_cond_wait(&pool.wake, &pool.lock);
        if (pool.stop)
            break;
        struct job *job = pool.job;
        pool.seats--;
        pool.active++;
        pthread_mutex_unlock(&pool.lock);
        take_pieces(job, self->scratch);
        pthread_mutex_lock(&pool.lock);
        pool.job = NULL; /* all pieces are taken: nobody else need join */
        if (--pool.active == 0)
            pthread_cond_signal(&pool.done);
    }
    pthread_mutex_unlock(&pool.lock);
    return NULL;
}

/* Only the thread that forked lives in the child, and the locks are in whatever state the others left them. The scratch
 * memory of the lost workers is given up. */
static void after_fork_in_child(void)
{
    pthread_mutex_init(&pool.turn, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.job = NULL;
    pool.seats = pool.active = 0;
    pool.stop = 0;
    pool.workers = NULL;
    pool.started = pool.attempted = 0;
}

/* The caller holds turn. */
static void stop_workers(void)
{
    pthread_mutex_lock(&pool.lock);
    pool.stop = 1;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    for (size_t i = 0; i < pool.started; i++) {
        pthread_join(pool.workers[i].thread, NULL);
        free(pool.workers[i].scratch);
    }
    free(pool.workers);
    pool.workers = NULL;
    pool.started = pool.attempted = 0;
    pool.stop = 0;
}

/* The caller holds turn. Signals stay with the threads of the program. */
static void start_workers(size_t count)
{
    if (pool.attempted == count)
        return;
    stop_workers();
    pool.attempted = count;
    pool.workers = calloc(count ? count : 1, sizeof *pool.workers);
    if (!pool.workers)
        return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool.started < count; pool.started++) {
        struct worker *w = &pool.workers[pool.started];
        w->scratch = aligned_alloc(SCRATCH_ALIGNMENT, POOL_SCRATCH);
        if (!w->scratch)
            break;
        if (pthread_create(&w->thread, NULL, worker_main, w) != 0) {
            free(w->scratch);
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static int ready_for_callers(void)
{
    if (!pool.watches_forks) {
        if (pthread_atfork(NULL, NULL, after_fork_in_child) != 0)
            return -1;
        pool.watches_forks = 1;
    }
    if (!pool.caller_scratch)
        pool.caller_scratch = aligned_alloc(SCRATCH_ALIGNMENT, POOL_SCRATCH);
    return pool.caller_scratch ? 0 : -1;
}

int pool_run(size_t count, size_t piece, pool_work *work, void *arg)
{
    if (count == 0)
        return 0;
    struct job job = {.work = work, .arg = arg, .count = count, .piece = piece ? piece : 1};
    atomic_init(&job.next, 0);
    size_t helpers = (count - 1) / job.piece; /* one piece is the caller's own */

    pthread_mutex_lock(&pool.turn);
    if (ready_for_callers() != 0) {
        pthread_mutex_unlock(&pool.turn);
        return -1;
    }
    size_t threads = pool_threads();
    if (helpers && threads > 1) {
        start_workers(threads - 1);
        if (helpers > pool.started)
            helpers = pool.started;
    } else {
        helpers = 0;
    }
    if (helpers) {
        pthread_mutex_lock(&pool.lock);
        pool.job = &job;
        pool.seats = helpers;
        pthread_mutex_unlock(&pool.lock);
        if (helpers == pool.started)
            pthread_cond_broadcast(&pool.wake); /* one system call */
        else
            for (size_t i = 0; i < helpers; i++)
                pthread_cond_signal(&pool.wake);
    }
    take_pieces(&job, pool.caller_scratch);
    if (helpers) {
        pthread_mutex_lock(&pool.lock);
        pool.job = NULL; /* workers that are still waking up find nothing */
        while (pool.active)
            pthread_cond_wait(&pool.done, &pool.lock);
        pthread_mutex_unlock(&pool.lock);
    }
    pthread_mutex_unlock(&pool.turn);
    return 0;
}

size_t pool_piece(size_t outputs_per_item, size_t preferred)
{
    size_t grain = pool_grain();
    if (!grain)
        return preferred ? preferred : 1;
    size_t items = grain / (outputs_per_item ? outputs_per_item : 1);
    return items ? items : 1;
}

size_t pool_grain(void) { return atomic_load_explicit(&test_grain, memory_order_relaxed); }
void pool_set_grain(size_t grain) { atomic_store_explicit(&test_grain, grain, memory_order_relaxed); }

/* ---- how many threads ---- */

static size_t cores_by_affinity(void)
{
    for (size_t cpus = 1024; cpus <= (1u << 20); cpus *= 4) { /* the kernel refuses a mask smaller than its own */
        cpu_set_t *set = CPU_ALLOC(cpus);
        if (!set)
            break;
        size_t size = CPU_ALLOC_SIZE(cpus);
        int found = sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (found > 0)
            return (size_t)found;
    }
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (size_t)online : 1;
}

/* The first line of a file of at most two words; NULL if there is none. */
static const char *read_line(const char *path, char *line, size_t size)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return NULL;
    char *got = fgets(line, (int)size, f);
    fclose(f);
    return got;
}

/* Cores that quota / period microseconds amount to, rounded up; 0 is no limit. */
static size_t cores_of_quota(long long quota, long long period)
{
    return quota > 0 && period > 0 ? (size_t)((quota + period - 1) / period) : 0;
}

static size_t least(size_t limit, size_t found) { return found && (!limit || found < limit) ? found : limit; }

/* The tightest limit of a version 2 group (its cpu.max) or version 1 group (its cfs files) and of all groups above it.
 * `path` is the group's, as /proc/self/cgroup says it; it is cut up on the way. */
static size_t cores_of_group(const char *mount, char *path, int version)
{
    size_t limit = 0;
    for (;;) {
        char name[4352], line[128];
        long long quota = -1, period = 0;
        if (version == 2) {
            snprintf(name, sizeof name, "%s%s/cpu.max", mount, path);
            if (read_line(name, line, sizeof line) && sscanf(line, "%lld %lld", &quota, &period) == 2)
                limit = least(limit, cores_of_quota(quota, period)); /* "max 100000" is no limit */
        } else {
            snprintf(name, sizeof name, "%s%s/cpu.cfs_quota_us", mount, path);
            if (read_line(name, line, sizeof line) && sscanf(line, "%lld", &quota) == 1) {
                snprintf(name, sizeof name, "%s%s/cpu.cfs_period_us", mount, path);
                if (read_line(name, line, sizeof line) && sscanf(line, "%lld", &period) == 1)
                    limit = least(limit, cores_of_quota(quota, period));
            }
        }
        char *slash = strrchr(path, '/');
        if (!slash)
            return limit;
        *slash = '\0'; /* "/a/b" -> "/a" -> "": the mount itself, which in a container is the group */
    }
}

static int lists_cpu(const char *controllers)
{
    const char *at = controllers;
    while (*at) {
        size_t length = strcspn(at, ",");
        if (length == 3 && strncmp(at, "cpu", 3) == 0)
            return 1;
        at += length + (at[length] == ',');
    }
    return 0;
}

static size_t cores_by_cgroup(void)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f)
        return 0;
    size_t limit = 0;
    char line[4200];
    while (fgets(line, sizeof line, f)) { /* id:controllers:/path */
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = '\0';
        controllers++;
        path[strcspn(path, "\n")] = '\0';
        if (strcmp(path, "/") == 0)
            path[0] = '\0';
        if (controllers[0] == '\0')
            limit = least(limit, cores_of_group("/sys/fs/cgroup", path, 2));
        else if (lists_cpu(controllers))
            limit = least(limit, cores_of_group("/sys/fs/cgroup/cpu", path, 1));
    }
    fclose(f);
    return limit;
}

size_t pool_threads(void)
{
    size_t n = atomic_load(&wanted_threads);
    if (n)
        return n;
    n = least(cores_by_affinity(), cores_by_cgroup());
    if (n > POOL_MOST_THREADS)
        n = POOL_MOST_THREADS;
    atomic_store(&wanted_threads, n);
    return n;
}

int pool_set_threads(size_t n)
{
    if (n < 1 || n > POOL_MOST_THREADS)
        return -1;
    pthread_mutex_lock(&pool.turn);
    atomic_store(&wanted_threads, n);
    stop_workers();
    pthread_mutex_unlock(&pool.turn);
    return 0;
}
