#include "rows.h"
#include "ggml-cpu.h"
void ms_rows_dot(enum ggml_type type, int64_t columns, const uint8_t *matrix, const int32_t *rows, int first, int n_rows,
                 const uint8_t *activations, size_t activation_bytes, int n_activations, float *out, size_t out_stride) {
    size_t row_bytes = ggml_row_size(type, columns);
    ggml_vec_dot_t dot = ggml_get_type_traits_cpu(type)->vec_dot;
    for (int a = 0; a < n_activations; a++)
        for (int i = 0; i < n_rows; i++)
            dot((int)columns, out + (size_t)a * out_stride + i, 0, matrix + (size_t)(rows ? rows[i] : first + i) * row_bytes, 0, activations + (size_t)a * activation_bytes, 0, 1);
}
void ms_rows_add(enum ggml_type type, const uint8_t *matrix, int64_t columns, const int32_t *rows, const float *x, int n, int64_t begin, int64_t end, float *y) {
    float w[256];
    size_t row_bytes = ggml_row_size(type, columns);
    const struct ggml_type_traits *traits = ggml_get_type_traits(type);
    for (int64_t c = begin; c < end; c += 256) {
        int64_t k = end - c < 256 ? end - c : 256;
        for (int i = 0; i < n; i++) {
            const uint8_t *row = matrix + (size_t)rows[i] * row_bytes + ggml_row_size(type, c);
            const float *v = w;
            if (type == GGML_TYPE_F32) v = (const float *)row;
            else traits->to_float(row, w, k);
            for (int64_t j = 0; j < k; j++) y[c + j] += x[i] * v[j];
        }
    }
}
