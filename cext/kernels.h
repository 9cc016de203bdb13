/* The table of kernels: for each instruction set one struct of function pointers, of which one is in use.
 *
 * Kernels compute on the calling thread, allocate nothing, and expect our floating-point state (fpenv.h): call them from
 * inside a pool job. All instruction sets give the same bytes; the scalar ones are the specification in code. */
#ifndef DELTAFIN_KERNELS_H
#define DELTAFIN_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Many dot products at once: out[r][j] = dot(w[j], x[r]) over k elements, in the order of docs/arithmetic.md.
 * No pointer needs any alignment beyond its element's; out overlaps no input. */
struct dots {
    float *out;             /* [rows][n], rows out_stride floats apart */
    const float *x;         /* [rows][k], rows x_stride floats apart */
    const void *w;          /* [n][k] in the format, rows w_stride bytes apart; MXFP4: [n][k/2] bytes; bf12: [n][k/32][48] */
    const void *scale;      /* MXFP4: [n][k/32] bytes, none 255, rows scale_stride bytes apart; int8: [n] floats; bf12: the
                               rows' bases, [n] bytes */
    const void *starts;     /* bf12: u32[n + 1]; row j's exceptions are those from starts[j] up to starts[j + 1] */
    const void *columns;    /* bf12: u16 for each exception of the whole matrix, below k, ascending in a row */
    const void *values;     /* bf12: u16 for each, its bf16; starts, columns and values may lie at any address */
    size_t out_stride, x_stride, w_stride, scale_stride;
    size_t rows, n, k;      /* MXFP4, bf12: k is a multiple of 32 */
};

/* scratch: DOTS_SCRATCH bytes aligned to 64, of the caller's own; a pool job uses the front of its scratch. */
#define DOTS_SCRATCH ((size_t)768 << 10)
typedef void dots_kernel(const struct dots *d, void *scratch);

struct matmul_kernels {
    dots_kernel *mxfp4, *bf16, *f32, *int8, *bf12;
};

/* Defined in vector.h. */
struct vector_kernels;

struct kernels {
    const char *isa;
    const struct matmul_kernels *matmul;
    const struct vector_kernels *vector;
};

/* The table in use. Read it once at the start of an operation, before the pool runs, and pass it on. */
const struct kernels *kernels(void);

/* Chooses by what the processor has, or by DELTAFIN_ISA. 0, or -1 with one line in `why`. */
int kernels_choose(char *why, size_t why_size);

/* Switches the table. 0, or -1 if there is no such instruction set on this processor. */
int kernels_set(const char *isa);

/* Names of what this processor can run, best first, then NULL. */
const char *const *kernels_usable(void);

#endif
