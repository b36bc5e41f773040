#include "neuron_major.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "ggml.h"
#include "rows.h"
#include "tensor.h"

#define SHARE 256 /* threads get multiples of so many outputs: every type's block divides it */

void ms_neuron_major_product(struct ggml_tensor *dst, int ith, int nth, void *unused) {
    (void)unused;
    const struct ggml_tensor *experts = dst->src[0], *input = dst->src[1], *ids = dst->src[2];
    int64_t outputs = experts->ne[0], neurons = experts->ne[1], n_shares = (outputs + SHARE - 1) / SHARE;
    int64_t choices = ids->ne[0], n_products = choices * ids->ne[1];
    /* A thread reads whole rows, which memory gives faster than their halves; unless too few products are to be shared out. */
    bool is_whole = n_products >= 2 * nth;
    int64_t begin = is_whole ? 0 : n_shares * ith / nth * SHARE, end = is_whole ? outputs : n_shares * (ith + 1) / nth * SHARE;
    if (end > outputs) end = outputs;
    if (begin >= end) return;
    for (int64_t i = is_whole ? n_products * ith / nth : 0; i < (is_whole ? n_products * (ith + 1) / nth : n_products); i++) {
        int64_t t = i / choices, k = i % choices;
        const uint8_t *weights = (const uint8_t *)experts->data + ms_choice(ids, k, t) * (int64_t)experts->nb[2];
        const float *x = ms_row(input, k, t);
        float *y = ms_row(dst, k, t);
        memset(y + begin, 0, (size_t)(end - begin) * sizeof(float));
        ms_rows_add_tokens(experts->type, weights, outputs, (int)neurons, x, 0, 1, begin, end, y, 0);
    }
}
