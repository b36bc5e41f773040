#ifndef MS_ROWS_H
#define MS_ROWS_H
#include <stdint.h>
#include <stddef.h>
#include "ggml.h"
void ms_rows_dot(enum ggml_type type, int64_t columns, const uint8_t *matrix, const int32_t *rows, int first, int n_rows,
                 const uint8_t *activations, size_t activation_bytes, int n_activations, float *out, size_t out_stride);
void ms_rows_add(enum ggml_type type, const uint8_t *matrix, int64_t columns, const int32_t *rows, const float *x, int n, int64_t begin, int64_t end, float *y);
#endif
