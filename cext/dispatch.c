#include "kernels.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#define X86 1
#define NEON 0
#else
#define X86 0
#define NEON 1
#endif

extern const struct matmul_kernels matmul_scalar, matmul_avx2, matmul_avx512, matmul_neon;
extern const struct vector_kernels vector_scalar, vector_avx2, vector_avx512, vector_neon;

static const struct kernels scalar = {"scalar", &matmul_scalar, &vector_scalar};
#if X86
static const struct kernels avx2 = {"avx2", &matmul_avx2, &vector_avx2};
static const struct kernels avx512 = {"avx512", &matmul_avx512, &vector_avx512};
#endif
#if NEON
static const struct kernels neon = {"neon", &matmul_neon, &vector_neon};
#endif

static const char *const known[] = {"avx512", "avx2", "neon", "scalar", NULL};

static _Atomic(const struct kernels *) in_use = &scalar;

const struct kernels *kernels(void) { return atomic_load(&in_use); }

/* The named table, if this processor can run it. __builtin_cpu_supports asks the operating system's part too. */
static const struct kernels *usable(const char *isa)
{
    if (strcmp(isa, "scalar") == 0)
        return &scalar;
#if X86
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (strcmp(isa, "avx2") == 0 && has_avx2)
        return &avx2;
    if (strcmp(isa, "avx512") == 0 && has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &avx512;
#endif
#if NEON
    if (strcmp(isa, "neon") == 0)
        return &neon;
#endif
    return NULL;
}

const char *const *kernels_usable(void)
{
    static const char *names[sizeof known / sizeof *known];
    size_t count = 0;
    for (size_t i = 0; known[i]; i++)
        if (usable(known[i]))
            names[count++] = known[i];
    names[count] = NULL;
    return names;
}

int kernels_set(const char *isa)
{
    const struct kernels *found = usable(isa);
    if (!found)
        return -1;
    atomic_store(&in_use, found);
    return 0;
}

int kernels_choose(char *why, size_t why_size)
{
    const char *forced = getenv("DELTAFIN_ISA");
    if (!forced || !*forced)
        return kernels_set(kernels_usable()[0]);
    if (kernels_set(forced) == 0)
        return 0;
    for (size_t i = 0; known[i]; i++)
        if (strcmp(forced, known[i]) == 0) {
            snprintf(why, why_size, "DELTAFIN_ISA=%s: this processor cannot run it", forced);
            return -1;
        }
    snprintf(why, why_size, "DELTAFIN_ISA=%.32s is unknown: use scalar, avx2, avx512 or neon, or leave it out", forced);
    return -1;
}
