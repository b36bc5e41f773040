/* product.h - one expert's matrix times some activations, by whatever gives ggml's bits fastest.
 *
 * A product is asked for in parts: some rows of the matrix, some activations,
 * on one thread. Which kernel computes it is decided once per type and shape,
 * by comparison: ggml's own MUL_MAT_ID is run on a small matrix and what else
 * there is (its row kernels, ours, its kernels for blocks of activations) is
 * used only where every bit is the same. A fast product lets that last rule go
 * for blocks of activations.
 *
 * What no row kernel reproduces for several activations at once (ggml has
 * kernels of its own for these) must be computed by ggml; see `by_ggml`.
 */
#ifndef MS_PRODUCT_H
#define MS_PRODUCT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml-cpu.h"
#include "ggml.h"
#include "store.h"

typedef void (*ms_gem)(int n, float *out, size_t out_stride, const void *rows, const void *activations, int n_activations, int n_rows);
typedef void (*ms_quantise_four)(const float *values, void *out, int64_t columns);

struct ms_product {
    enum ggml_type type;
    int64_t columns, rows;
    size_t row_bytes;
    bool neuron_major;
    const struct ggml_tensor *prototype; /* of interleaved rows, or NULL */
    bool usable; /* there is a kernel with ggml's bits, at least for one activation */
    bool by_ggml; /* more than one activation must be computed by ggml's MUL_MAT_ID; never with neuron-major */
    /* activations: quantised one by one, or four interleaved where there is a kernel for these */
    size_t activation_bytes;
    ggml_from_float_t quantise; /* NULL: as they are */
    ms_gem gemv, gemm;          /* of interleaved rows, else NULL; gemm may be NULL there too */
    ms_quantise_four quantise_four;
};

struct ms_products;

/* Decides for every matrix of the layers wanted. fast: see above. -ENOMEM. */
int ms_products_open(const struct ms_source *source, const bool *wanted, struct ms_store *store, bool fast, struct ms_products **out, char *err, size_t errlen);
void ms_products_close(struct ms_products *products);
/* NULL: there is no row kernel for this matrix; ggml must compute it. */
const struct ms_product *ms_product_of(const struct ms_products *products, int layer, int matrix);

/* Do two products take the same quantised activations? */
bool ms_product_same_activations(const struct ms_product *a, const struct ms_product *b);

/* Quantises n activations into `out`, n * activation_bytes. scratch: 4 * columns floats. */
void ms_product_quantise(const struct ms_product *product, const float *const *activations, int n, void *out, float *scratch);

/* outputs[a][row - first] = row `row` of `matrix` times activation a, for n_rows rows from `first` on; where rows are
 * interleaved, both multiples of as many as go together. `quantised`: from ms_product_quantise of the n activations. scratch: n * n_rows floats. Not for neuron-major. */
void ms_product_multiply(const struct ms_product *product, const uint8_t *matrix, int64_t first, int64_t n_rows, const void *quantised, int n,
                         float *const *outputs, float *scratch);

#endif
