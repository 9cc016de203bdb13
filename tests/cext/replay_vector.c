/* Runs every vector kernel of one instruction set over fixed inputs and prints a digest of each one's results, so that
 * other processors and compilers can be compared without Python:
 *
 *     cc -std=c11 -ffp-contract=off -Icext tests/cext/replay_vector.c cext/vector_*.c -lm -o replay && ./replay scalar
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vector.h"

#define MOST 40000

static float in[8][MOST], out[3][MOST], scratch[1 << 18];
static uint16_t bits[MOST];
static uint64_t seed;

static uint32_t next(void)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 32);
}

static float fresh[8][MOST]; /* what every case starts from: made once, copied for each */
static uint16_t fresh_bits[MOST];

/* Wild: one in sixteen is of any finite size, subnormals among them. */
static void make(int wild)
{
    seed = 1;
    for (int a = 0; a < 8; a++)
        for (int i = 0; i < MOST; i++) {
            uint32_t any = next(), ordinary = (any & 0x807fffffu) | (120 + next() % 10) << 23;
            uint32_t value = wild && next() % 16 == 0 ? any & ~(next() % 4 ? 0x00800000u : 0x7f800000u) : ordinary;
            memcpy(&fresh[a][i], &value, sizeof value);
        }
    for (int i = 0; i < MOST; i++)
        fresh_bits[i] = (uint16_t)((next() & 0x807f) | (118 + next() % 10) << 7);
}

static void fill(void)
{
    memcpy(in, fresh, sizeof in);
    memcpy(bits, fresh_bits, sizeof bits);
    memset(out, 0xff, sizeof out);
    memset(scratch, 0xff, sizeof scratch);
}

static void digest(const char *name, size_t n)
{
    uint64_t hash = UINT64_C(14695981039346656037);
    for (int a = 0; a < 3; a++)
        for (int i = 0; i < MOST; i++) {
            uint32_t value;
            memcpy(&value, &out[a][i], sizeof value);
            hash = (hash ^ value) * UINT64_C(1099511628211);
        }
    printf("%s %zu %016llx\n", name, n, (unsigned long long)hash);
}

#define CASE(name, call) (fill(), (call), digest(name, n))

static void elements(const struct vector_kernels *k, size_t n)
{
    CASE("exp", k->exp(out[0], in[0], n));
    CASE("log", k->log(out[0], in[0], n));
    CASE("tanh", k->tanh(out[0], in[0], n));
    CASE("sigmoid", k->sigmoid(out[0], in[0], n));
    CASE("widen", k->widen(out[0], bits, n));
    CASE("add", k->add(out[0], in[0], in[1], n));
    CASE("multiply", k->multiply(out[0], in[0], in[1], n));
    CASE("sigmoid_gate", k->sigmoid_gate(out[0], in[0], in[1], n));
    CASE("situ", k->situ(out[0], in[0], in[1], 4.0f, 25.0f, n));
}

static void rows(const struct vector_kernels *k, size_t n)
{
    const float *sources[] = {in[0], in[1], in[2], in[3], in[4]};
    CASE("rms_norm", k->rms_norm(out[0], in[0], in[1], 1e-5f, n));
    CASE("mix", k->mix(out[0], sources, 5, in[5], 1e-5f, n));
    CASE("combine", k->combine(out[0], in[0], in[1], 7, n));
    CASE("finite", out[0][0] = (float)k->finite(in[0], n));
    CASE("argmax", out[0][0] = (float)k->argmax(in[0], n));
    fill();
    out[0][0] = -1e30f, out[0][1] = 0.0f;
    k->log_prob_tile(&out[0][0], &out[0][1], in[0], n);
    k->log_prob_tile(&out[0][0], &out[0][1], in[1], n);
    digest("log_prob_tile", n);
    fill();
    k->route((int32_t *)(void *)out[0], out[1], in[0], in[1], 2.5f, n, n < 16 ? n : 16, scratch);
    digest("route", n);
}

static void kda(const struct vector_kernels *k, size_t n)
{
    const size_t dim = n;
    enum { ROWS = 4, HEADS = 2, TAPS = 4 };
    size_t width = HEADS * dim;
    struct kda_conv conv = {out[0], in[0], in[1], in[2], width, TAPS, dim, 1, 0.125f};
    fill();
    for (size_t h = 0; h < HEADS; h++)
        k->kda_conv(&conv, h, 0, ROWS, scratch);
    digest("kda_conv", dim);
    CASE("kda_decay", k->kda_decay(out[0], in[0], in[1], in[2], -5.0f, HEADS, dim));
    CASE("kda_output", k->kda_output(out[0], in[0], in[1], in[2], 1e-5f, HEADS, dim));
    struct kda_recur recur = {out[0], out[1], in[0], in[1], in[2], in[3], in[4], in[5], ROWS, HEADS, dim, width};
    fill();
    for (size_t i = 0; i < ROWS * width; i++)
        in[2][i] *= 0x1p-5f, in[4][i] *= 0x1p-4f;
    for (size_t h = 0; h < HEADS; h++)
        for (size_t column = 0; column < dim; column += KDA_COLUMNS)
            k->kda_recur(&recur, h, column, scratch);
    digest("kda_recur", dim);
}

static void mla(const struct vector_kernels *k, size_t rank)
{
    enum { ROWS = 7, HEADS = 3, NOPE = 5, ROPE = 6, V = 9 };
    size_t width = rank + ROPE;
    fill();
    struct mla_absorb absorb = {out[0], in[0], bits, ROWS, HEADS, NOPE, ROPE, V, rank, 0.25f};
    for (size_t h = 0; h < HEADS; h++)
        for (size_t column = 0; column < rank; column += MLA_COLUMNS)
            k->mla_absorb(&absorb, h, column, scratch);
    digest("mla_absorb", rank);
    fill();
    const float *blocks[] = {in[0], in[1]};
    struct mla_attend attend = {out[0], in[2], blocks, HEADS, rank, width, 270};
    for (size_t r = 0; r < ROWS; r++)
        k->mla_attend(&attend, r, 0, HEADS, scratch);
    digest("mla_attend", rank);
    fill();
    struct mla_values values = {out[0], in[0], bits, ROWS, HEADS, NOPE, V, rank};
    for (size_t h = 0; h < HEADS; h++)
        for (size_t v = 0; v < V; v += 4)
            k->mla_values(&values, h, v, scratch);
    digest("mla_values", rank);
}

int main(int argc, char **argv)
{
    const char *isa = argc > 1 ? argv[1] : "scalar";
    const struct vector_kernels *k = NULL;
    if (strcmp(isa, "scalar") == 0)
        k = &vector_scalar;
#if defined(__x86_64__)
    else if (strcmp(isa, "avx2") == 0)
        k = &vector_avx2;
    else if (strcmp(isa, "avx512") == 0)
        k = &vector_avx512;
#elif defined(__aarch64__)
    else if (strcmp(isa, "neon") == 0)
        k = &vector_neon;
#endif
    if (!k) {
        fprintf(stderr, "no %s here\n", isa);
        return 1;
    }
    make(1);
    for (size_t n = 1; n <= 40; n++)
        elements(k, n);
    elements(k, MOST);
    make(0);
    elements(k, 5000);
    for (size_t n = 1; n <= 40; n++)
        rows(k, n);
    rows(k, 128), rows(k, 517), rows(k, 5000);
    for (size_t n = 1; n <= 40; n += 3)
        kda(k, n), mla(k, n);
    kda(k, 64), kda(k, 128), mla(k, 70), mla(k, 137);
    return 0;
}
