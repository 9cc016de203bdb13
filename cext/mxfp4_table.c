#include "mxfp4_table.h"

/* Magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 are (2 + HALF(c)) / 2 * 2^POWER(c), but for 0. */
#define POWER(c) ((c) / 2 - 1 + ((c) == 0))
#define HALF(c) ((c) > 1 ? (c) & 1 : 0)
/* The exponent field that the value asks for: from 255 it is infinity, below 1 it is subnormal. */
#define FIELD(s, c) ((s) + POWER(c))
#define SUBNORMAL(s, c) ((2 + HALF(c)) << (FIELD(s, c) < 1 ? FIELD(s, c) + 5 : 0))
#define NORMAL(s, c) (FIELD(s, c) > 254 ? 0x7f80 : FIELD(s, c) * 128 + HALF(c) * 64)
#define MAGNITUDE(s, c) ((c) == 0 ? 0 : FIELD(s, c) < 1 ? SUBNORMAL(s, c) : NORMAL(s, c))
#define WORD(s, c) ((c) < 8 ? MAGNITUDE(s, c) : 0x8000 | MAGNITUDE(s, (c)-8))

#define LOW(s, c) (uint8_t)(WORD(s, c) & 255)
#define HIGH(s, c) (uint8_t)(WORD(s, c) >> 8)
#define BITS(s, c) ((uint32_t)WORD(s, c) << 16)

#define CODES(what, s) \
    { \
        what(s, 0), what(s, 1), what(s, 2), what(s, 3), what(s, 4), what(s, 5), what(s, 6), what(s, 7), what(s, 8), \
            what(s, 9), what(s, 10), what(s, 11), what(s, 12), what(s, 13), what(s, 14), what(s, 15) \
    }
#define PLANES(s) {CODES(LOW, s), CODES(HIGH, s)}
#define FLOATS(s) CODES(BITS, s)

#define FOUR(row, s) row(s), row((s) + 1), row((s) + 2), row((s) + 3)
#define SIXTEEN(row, s) FOUR(row, s), FOUR(row, (s) + 4), FOUR(row, (s) + 8), FOUR(row, (s) + 12)
#define SIXTY_FOUR(row, s) SIXTEEN(row, s), SIXTEEN(row, (s) + 16), SIXTEEN(row, (s) + 32), SIXTEEN(row, (s) + 48)
#define ALL(row) SIXTY_FOUR(row, 0), SIXTY_FOUR(row, 64), SIXTY_FOUR(row, 128), SIXTY_FOUR(row, 192)

_Alignas(64) const uint8_t mxfp4_bf16[256][2][16] = {ALL(PLANES)};
_Alignas(64) const uint32_t mxfp4_f32[256][16] = {ALL(FLOATS)};
