/* Kernels for everything between the matrix products. Each does one row, one head or a part of one, on the calling thread;
 * door_vector.c hands them out. In comments rows, heads, .. are this struct's members. Inputs hold float32 unless a type
 * says otherwise; those that come from files (norms, convolutions, kv_b, ..) may lie at any address. */
#ifndef DELTAFIN_VECTOR_H
#define DELTAFIN_VECTOR_H

#include <stddef.h>
#include <stdint.h>

/* The convolution, silu and normalisation of q, k or v. */
struct kda_conv {
    float *out;           /* [rows][width] */
    const float *in;      /* [rows][width], before the convolution */
    const float *history; /* [taps - 1] rows of width, 3 * width apart: what came before, oldest first */
    const float *taps;    /* [width][taps] */
    size_t width, tap_count, dim; /* dim channels to a head */
    int unit;             /* whether each head is divided by its length and multiplied by scale */
    float scale;
};

struct kda_recur {
    float *out;                    /* [rows][width] */
    float *new_state;              /* [heads][dim key][dim value], apart from state; or NULL */
    const float *state;
    const float *q, *k, *v, *alpha; /* [rows][width] */
    const float *beta;             /* [rows][heads] */
    size_t rows, heads, dim, width;
};
#define KDA_COLUMNS 32 /* of a state that one call does; with 128 keys 16 KB, half of a usual L1 */

#define MLA_BLOCK 256 /* keys in a block of the cache */
#define MLA_HEADS 64  /* most heads in one call of mla_attend */

/* kv_b is [heads][nope + v][rank] bfloat16: nope rows take a query to the latents, v rows take latents to the output. */
struct mla_absorb {
    float *query;   /* [rows][heads][rank + rope] */
    const float *q; /* [rows][heads][nope + rope] */
    const uint16_t *kv_b;
    size_t rows, heads, nope, rope, v, rank;
    float scale;
};
#define MLA_COLUMNS 64 /* of rank that one call of mla_absorb does */

struct mla_attend {
    float *out;                 /* [rows][heads][rank] */
    const float *query;         /* [rows][heads][width] */
    const float *const *blocks; /* each [MLA_BLOCK][width], the first rank columns of a row being its latent */
    size_t heads, rank, width;
    size_t position; /* of row 0; row r sees keys 0 .. position + r */
};

struct mla_values {
    float *out;            /* [rows][heads][v] */
    const float *attended; /* [rows][heads][rank] */
    const uint16_t *kv_b;
    size_t rows, heads, nope, v, rank;
};

#define MIX_MOST 64         /* sources */
#define LOG_PROB_TILE 1024  /* logits */

/* Scratch is the pool's. */
struct vector_kernels {
    /* n elements; out may be exactly an input */
    void (*exp)(float *out, const float *x, size_t n);
    void (*log)(float *out, const float *x, size_t n);
    void (*tanh)(float *out, const float *x, size_t n);
    void (*sigmoid)(float *out, const float *x, size_t n);
    void (*widen)(float *out, const uint16_t *bits, size_t n);
    void (*add)(float *out, const float *a, const float *b, size_t n);
    void (*multiply)(float *out, const float *a, const float *b, size_t n);
    void (*sigmoid_gate)(float *out, const float *a, const float *gate, size_t n);
    void (*situ)(float *out, const float *gate, const float *up, float beta, float linear_beta, size_t n);

    /* one row of n elements */
    void (*rms_norm)(float *out, const float *x, const float *w, float eps, size_t n); /* out may be exactly x */
    void (*mix)(float *out, const float *const *sources, size_t count, const float *u, float eps, size_t n);
    void (*combine)(float *out, const float *outputs, const float *weights, size_t count, size_t n); /* outputs [count][n] */
    int (*finite)(const float *x, size_t n);
    size_t (*argmax)(const float *x, size_t n); /* n > 0 */
    void (*log_prob_tile)(float *top, float *total, const float *logits, size_t n);
    /* One row's k of n experts; 0, or -1 if a key is NaN. scratch: n floats. */
    int (*route)(int32_t *ids, float *weights, const float *scores, const float *bias, float scaling, size_t n, size_t k,
                 float *scratch);

    /* head `head` of rows begin .. end; scratch: tap_count * dim floats */
    void (*kda_conv)(const struct kda_conv *c, size_t head, size_t begin, size_t end, float *scratch);
    /* one row; rate [heads], the rest [heads][dim] */
    void (*kda_decay)(float *alpha, const float *z, const float *bias, const float *rate, float lower_bound, size_t heads,
                      size_t dim);
    /* columns column .. column + KDA_COLUMNS of a head; column is a multiple of it; scratch: dim * KDA_COLUMNS floats */
    void (*kda_recur)(const struct kda_recur *a, size_t head, size_t column, float *scratch);
    /* one row of heads * dim; norm [dim]; out may be exactly o or gate */
    void (*kda_output)(float *out, const float *o, const float *gate, const float *norm, float eps, size_t heads, size_t dim);

    /* columns column .. column + MLA_COLUMNS of a head for all rows, and its rope part with column 0;
     * scratch: nope * MLA_COLUMNS floats */
    void (*mla_absorb)(const struct mla_absorb *a, size_t head, size_t column, float *scratch);
    /* heads head .. head + count of a row, count <= MLA_HEADS; scratch: (MLA_BLOCK + 3) * count floats */
    void (*mla_attend)(const struct mla_attend *a, size_t row, size_t head, size_t count, float *scratch);
    /* values value .. value + 4 of a head for all rows; scratch: 4 * rank floats */
    void (*mla_values)(const struct mla_values *a, size_t head, size_t value, float *scratch);
};

extern const struct vector_kernels vector_scalar, vector_avx2, vector_avx512, vector_neon;

#endif
