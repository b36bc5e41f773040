#include "neuron_major.h"

#include <stdint.h>
#include <string.h>

#include "ggml.h"

#define CHUNK 256 /* outputs dequantised at a time: a multiple of every type's block */

/* y += x * row, for `n` outputs. */
static void add_row(float *y, float x, const void *row, enum ggml_type type, int64_t n) {
    float values[CHUNK];
    const struct ggml_type_traits *traits = ggml_get_type_traits(type);
    const float *w = values;
    if (type == GGML_TYPE_F32) w = row;
    else traits->to_float(row, values, n);
    for (int64_t i = 0; i < n; i++) y[i] += x * w[i];
}

void ms_neuron_major_product(struct ggml_tensor *dst, int ith, int nth, void *unused) {
    (void)unused;
    const struct ggml_tensor *experts = dst->src[0], *input = dst->src[1], *ids = dst->src[2];
    int64_t outputs = experts->ne[0], neurons = experts->ne[1], n_chunks = (outputs + CHUNK - 1) / CHUNK;
    int64_t begin = n_chunks * ith / nth, end = n_chunks * (ith + 1) / nth;
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            int32_t expert = *(const int32_t *)((const char *)ids->data + t * (int64_t)ids->nb[1] + k * (int64_t)ids->nb[0]);
            const char *weights = (const char *)experts->data + expert * (int64_t)experts->nb[2];
            const float *x = (const float *)((const char *)input->data + (k % input->ne[1]) * (int64_t)input->nb[1] + t * (int64_t)input->nb[2]);
            float *y = (float *)((char *)dst->data + k * (int64_t)dst->nb[1] + t * (int64_t)dst->nb[2]);
            for (int64_t c = begin; c < end; c++) {
                int64_t at = c * CHUNK, n = outputs - at < CHUNK ? outputs - at : CHUNK;
                const char *column = weights + ggml_row_size(experts->type, at);
                memset(y + at, 0, (size_t)n * sizeof(float));
                for (int64_t i = 0; i < neurons; i++)
                    if (x[i] != 0) add_row(y + at, x[i], column + i * (int64_t)experts->nb[1], experts->type, n);
            }
        }
}
