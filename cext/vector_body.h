/* All vector kernels for one width of a vec, and their table VECTOR_TABLE. Include a lanes_*.h first. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "vector.h"

#include "sums.h"

#include "elementary.h"

#include "elementwise_body.h"

#include "norm_body.h"

#include "router_body.h"

#include "head_body.h"

#include "kda_body.h"

#include "mla_body.h"

const struct vector_kernels VECTOR_TABLE = {
    .exp = map_exp,
    .log = map_log,
    .tanh = map_tanh,
    .sigmoid = map_sigmoid,
    .widen = map_widen,
    .add = map_add,
    .multiply = map_multiply,
    .sigmoid_gate = map_sigmoid_gate,
    .situ = map_situ,
    .rms_norm = rms_norm,
    .mix = mix,
    .combine = combine,
    .finite = finite_row,
    .argmax = argmax,
    .log_prob_tile = log_prob_tile,
    .route = route,
    .kda_conv = kda_conv,
    .kda_decay = kda_decay,
    .kda_recur = kda_recur,
    .kda_output = kda_output,
    .mla_absorb = mla_absorb,
    .mla_attend = mla_attend,
    .mla_values = mla_values,
};
