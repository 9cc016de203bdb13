#include "limit.h"

#include <string.h>

#define BLOCK 256  /* bytes of one round of reading */
#define CHAINS 16  /* independent multiply-adds: more than latency times width of any core */

/* Eight-byte words of what a vector loop left over. */
static uint64_t read_rest(const uint8_t *from, size_t nbytes)
{
    uint64_t sum = 0, word;
    for (size_t at = 0; at + 8 <= nbytes; at += 8) {
        memcpy(&word, from + at, 8);
        sum ^= word;
    }
    return sum;
}

/* Reading and multiplying with vectors of some type; each instruction set compiles the two for its own. GCC's vector
 * extension keeps them short: the loops are the same everywhere. */
#define LIMIT(name, target_, width) \
    typedef uint64_t name##_words __attribute__((vector_size(width), aligned(1), may_alias)); \
    typedef float name##_floats __attribute__((vector_size(width))); \
    target_ static uint64_t name##_read(const uint8_t *from, size_t nbytes, size_t ahead) \
    { \
        name##_words sum[BLOCK / width] = {0}; \
        size_t at = 0; \
        for (; at + BLOCK <= nbytes; at += BLOCK) { \
            if (ahead) \
                for (size_t i = 0; i < BLOCK; i += 64) \
                    __builtin_prefetch(from + at + ahead + i); \
            _Pragma("GCC unroll 16") for (size_t i = 0; i < BLOCK / width; i++) \
                sum[i] ^= *(const name##_words *)(from + at + i * width); \
        } \
        for (size_t i = 1; i < BLOCK / width; i++) \
            sum[0] ^= sum[i]; \
        uint64_t words[width / 8]; \
        memcpy(words, &sum[0], width); \
        return read_rest((const uint8_t *)words, width) ^ read_rest(from + at, nbytes - at); \
    }

#define FMA(name, target_, width, type, set1, fmadd, chains) \
    target_ static size_t name##_fma(size_t steps) \
    { \
        type lane[chains], factor = set1(0.5f), term = set1(1.0f); \
        _Pragma("GCC unroll 32") for (int i = 0; i < chains; i++) lane[i] = set1((float)i); \
        for (size_t step = 0; step < steps; step++) { \
            _Pragma("GCC unroll 32") for (int i = 0; i < chains; i++) \
            { \
                lane[i] = fmadd(lane[i], factor, term); \
                KEEP(lane[i]); \
            } \
        } \
        return (size_t)2 * chains * (width) / 4; \
    }

#if defined(__x86_64__)
#include <immintrin.h>
#define KEEP(v) __asm__ volatile("" : "+x"(v))
#define KEEP512(v) __asm__ volatile("" : "+v"(v))
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx2,fma,avx512f")))
LIMIT(avx2, AVX2, 32)
LIMIT(avx512, AVX512, 64)
FMA(avx2, AVX2, 32, __m256, _mm256_set1_ps, _mm256_fmadd_ps, 12)
#undef KEEP
#define KEEP(v) KEEP512(v)
FMA(avx512, AVX512, 64, __m512, _mm512_set1_ps, _mm512_fmadd_ps, CHAINS)
#else
#include <arm_neon.h>
#define KEEP(v) __asm__ volatile("" : "+w"(v))
#define NEON_FMADD(a, b, c) vfmaq_f32(c, a, b)
LIMIT(neon, , 16)
FMA(neon, , 16, float32x4_t, vdupq_n_f32, NEON_FMADD, CHAINS)
#endif

static float same(float value) { return value; }

static size_t scalar_fma(size_t steps)
{
    float lane[8], factor = same(0.5f);
    for (int i = 0; i < 8; i++)
        lane[i] = (float)i;
    for (size_t step = 0; step < steps; step++)
        for (int i = 0; i < 8; i++) {
            lane[i] = __builtin_fmaf(lane[i], factor, 1.0f);
            __asm__ volatile("" : "+m"(lane[i]));
        }
    return 2 * 8;
}

uint64_t limit_read(const char *isa, const uint8_t *from, size_t nbytes, size_t ahead)
{
#if defined(__x86_64__)
    if (strcmp(isa, "avx512") == 0)
        return avx512_read(from, nbytes, ahead);
    if (strcmp(isa, "avx2") == 0)
        return avx2_read(from, nbytes, ahead);
#else
    if (strcmp(isa, "neon") == 0)
        return neon_read(from, nbytes, ahead);
#endif
    return read_rest(from, nbytes);
}

size_t limit_fma(const char *isa, size_t steps)
{
#if defined(__x86_64__)
    if (strcmp(isa, "avx512") == 0)
        return avx512_fma(steps);
    if (strcmp(isa, "avx2") == 0)
        return avx2_fma(steps);
#else
    if (strcmp(isa, "neon") == 0)
        return neon_fma(steps);
#endif
    return scalar_fma(steps);
}
