/* The specification: the vector kernels with vectors of one float. */
#include "lanes_scalar.h"

#define VECTOR_TABLE vector_scalar
#include "vector_body.h"
