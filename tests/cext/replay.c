/* Multiplies dumped matrices with the kernels of one instruction set, without Python, so that other processors and
 * compilers can be compared byte for byte:
 *
 *     cc -std=c11 -ffp-contract=off -Icext tests/cext/replay.c cext/matmul_*.c cext/mxfp4_table.c -lm -o replay
 *     ./replay scalar < cases > results
 *
 * A case is eight 64-bit numbers (format: 0 mxfp4, 1 bf16, 2 f32, 3 int8, 4 bf12; rows, n, k; floats from row to row of x
 * and of the result; bytes of weights; exceptions, of bf12 only), then x, the weights, what scales the format has (bf12: the
 * bases), and bf12's starts, columns and values. A result is rows times n floats. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fpenv.h"
#include "kernels.h"

extern const struct matmul_kernels matmul_scalar, matmul_avx2, matmul_avx512, matmul_neon;

static const struct {
    const char *isa;
    const struct matmul_kernels *kernels;
} all[] = {
    {"scalar", &matmul_scalar},
#if defined(__x86_64__)
    {"avx2", &matmul_avx2},
    {"avx512", &matmul_avx512},
#else
    {"neon", &matmul_neon},
#endif
};

struct header {
    uint64_t format, rows, n, k, x_stride, out_stride, w_nbytes, exceptions;
};

static void *read_all(size_t nbytes)
{
    void *to = malloc(nbytes ? nbytes : 1);
    if (!to || fread(to, 1, nbytes, stdin) != nbytes) {
        fputs("replay: the cases end early\n", stderr);
        exit(1);
    }
    return to;
}

static void replay(const struct matmul_kernels *kernels, const struct header *h, void *scratch)
{
    dots_kernel *const formats[] = {kernels->mxfp4, kernels->bf16, kernels->f32, kernels->int8, kernels->bf12};
    const size_t scale_strides[] = {h->k / 32, 0, 0, sizeof(float), 1}, scale_stride = scale_strides[h->format];
    const int bf12 = h->format == 4;
    float *x = read_all(h->rows * h->x_stride * sizeof(float));
    void *w = read_all(h->w_nbytes), *scale = read_all(h->n * scale_stride);
    void *starts = read_all(bf12 ? (h->n + 1) * sizeof(uint32_t) : 0);
    void *columns = read_all(bf12 ? h->exceptions * sizeof(uint16_t) : 0);
    void *values = read_all(bf12 ? h->exceptions * sizeof(uint16_t) : 0);
    float *out = calloc(h->rows * h->out_stride + 1, sizeof(float));
    struct dots d = {
        .out = out, .x = x, .w = w, .scale = scale_stride ? scale : NULL,
        .starts = starts, .columns = columns, .values = values,
        .out_stride = h->out_stride, .x_stride = h->x_stride, .w_stride = h->w_nbytes / h->n, .scale_stride = scale_stride,
        .rows = h->rows, .n = h->n, .k = h->k,
    };
    fpenv found = fpenv_enter();
    formats[h->format](&d, scratch);
    fpenv_leave(found);
    for (size_t r = 0; r < h->rows; r++)
        fwrite(out + r * h->out_stride, sizeof(float), h->n, stdout);
    free(x);
    free(w);
    free(scale);
    free(starts);
    free(columns);
    free(values);
    free(out);
}

int main(int count, char **words)
{
    const struct matmul_kernels *kernels = NULL;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (count == 2 && strcmp(words[1], all[i].isa) == 0)
            kernels = all[i].kernels;
    void *scratch = aligned_alloc(64, DOTS_SCRATCH);
    if (!kernels || !scratch) {
        fputs("usage: replay scalar|avx2|avx512|neon < cases > results\n", stderr);
        return 2;
    }
    memset(scratch, 0xff, DOTS_SCRATCH); /* whatever a kernel finds there is not a number */
    struct header h;
    while (fread(&h, sizeof h, 1, stdin) == 1)
        replay(kernels, &h, scratch);
    free(scratch);
    return 0;
}
