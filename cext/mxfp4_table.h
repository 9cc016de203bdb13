/* What MXFP4 codes mean under each of the 256 scales: code * 2^(scale - 127) rounded to binary32, which bf16 holds exactly.
 * Row 255 is never used. */
#ifndef DELTAFIN_MXFP4_TABLE_H
#define DELTAFIN_MXFP4_TABLE_H

#include <stdint.h>

extern const uint8_t mxfp4_bf16[256][2][16]; /* low bytes, then high bytes, of the 16 codes */
extern const uint32_t mxfp4_f32[256][16];    /* the bits of the 16 codes */

#endif
