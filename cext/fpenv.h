/* The floating-point state that the arithmetic is defined in: round to nearest even, no flush to zero, no denormals as
 * zero, no traps. Everything that computes runs between an enter and a leave, on every thread; pool_run does it for
 * its jobs. */
#ifndef DELTAFIN_FPENV_H
#define DELTAFIN_FPENV_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

typedef uint32_t fpenv; /* MXCSR */

static inline fpenv fpenv_get(void) { return _mm_getcsr(); }
static inline void fpenv_set(fpenv state) { _mm_setcsr(state); }

#define FPENV_OURS 0x1f80u /* all exceptions masked, nearest, FTZ and DAZ off */
#define FPENV_FLUSH (FPENV_OURS | 0x8040u) /* FTZ and DAZ on: for tests */

#elif defined(__aarch64__)

typedef uint64_t fpenv; /* FPCR */

static inline fpenv fpenv_get(void)
{
    fpenv state;
    __asm__ volatile("mrs %0, fpcr" : "=r"(state)::"memory");
    return state;
}

static inline void fpenv_set(fpenv state) { __asm__ volatile("msr fpcr, %0" ::"r"(state) : "memory"); }

#define FPENV_OURS UINT64_C(0)
#define FPENV_FLUSH (UINT64_C(1) << 24) /* FZ: for tests */

#else
#error "deltafin's arithmetic runs on x86-64 and aarch64"
#endif

/* Sets our state; returns what was found, for fpenv_leave. */
static inline fpenv fpenv_enter(void)
{
    fpenv found = fpenv_get();
    fpenv_set(FPENV_OURS);
    return found;
}

static inline void fpenv_leave(fpenv found) { fpenv_set(found); }

#endif
