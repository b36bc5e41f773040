/* tensor.h - tensors as llama.cpp's graph has them, read and made by hand. */
#ifndef MS_TENSOR_H
#define MS_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml.h"

/* Choice k of token t: which expert, or index of one. ids: I32 {choices, tokens}. */
static inline int32_t ms_choice(const struct ggml_tensor *ids, int64_t k, int64_t t) {
    return *(const int32_t *)((const char *)ids->data + t * (int64_t)ids->nb[1] + k * (int64_t)ids->nb[0]);
}

/* Is x among n choices? */
static inline bool ms_contains(const int32_t *choices, int n, int32_t x) {
    for (int i = 0; i < n; i++)
        if (choices[i] == x) return true;
    return false;
}

/* Row {k, t} of an F32 tensor {values, choices, tokens}; one that is the same for all choices has one of them. */
static inline float *ms_row(const struct ggml_tensor *tensor, int64_t k, int64_t t) {
    return (float *)((char *)tensor->data + (k % tensor->ne[1]) * (int64_t)tensor->nb[1] + t * (int64_t)tensor->nb[2]);
}

/* A tensor {ne0, ne1, ne2} over memory, its rows one behind the other. */
static inline struct ggml_tensor ms_tensor(enum ggml_type type, void *data, int64_t ne0, int64_t ne1, int64_t ne2) {
    struct ggml_tensor t = {.type = type, .op = GGML_OP_NONE, .ne = {ne0, ne1, ne2, 1}, .data = data};
    t.nb[0] = ggml_type_size(type);
    t.nb[1] = ggml_row_size(type, ne0);
    t.nb[2] = t.nb[1] * (size_t)ne1;
    t.nb[3] = t.nb[2] * (size_t)ne2;
    return t;
}

#endif
