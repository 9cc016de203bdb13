#if defined(__aarch64__)
#include "lanes_neon.h"

#define VECTOR_TABLE vector_neon
#include "vector_body.h"
#endif
