/* rows.h - products with quantised rows of one matrix: dots of rows, and weighted sums of rows.
 *
 * The dots have exactly the bits of ggml's own vec_dot: each row keeps ggml's
 * order of operations, but several rows and several activations go at a time,
 * so that one core reads as fast as memory gives. That the bits are the same
 * is not assumed: when first used, our kernels are compared with ggml's on
 * pseudo-random rows, and one that differs is not used. Where there is none,
 * ggml's vec_dot does it, row by row.
 *
 * The weighted sums are defined as y[c] = fma(x, w[c], y[c]) for one row after
 * the other in the order given, w the values of ggml's to_float. All
 * instruction sets, and one token or many, give the same bits.
 *
 * Kernels are own ones for Q4_0 and Q8_0; every other type works too. All
 * functions may be called by any thread.
 */
#ifndef MS_ROWS_H
#define MS_ROWS_H

#include <stddef.h>
#include <stdint.h>

#include "ggml.h"

/* out[a * out_stride + i] = row rows[i] (or first + i where rows is NULL) times activation a, for i < n_rows, a < n_activations.
 * `matrix`: plain rows of `columns` values, any type that has a vec_dot; `activations`: `activation_bytes` apart, already of that
 * vec_dot's type. */
void ms_rows_dot(enum ggml_type type, int64_t columns, const uint8_t *matrix, const int32_t *rows, int first, int n_rows,
                 const uint8_t *activations, size_t activation_bytes, int n_activations, float *out, size_t out_stride);

/* y[c] += sum of x[i] * row rows[i] for i < n, for the columns begin <= c < end, which are multiples of the type's block.
 * Every row is added, also where x[i] is 0. */
void ms_rows_add(enum ggml_type type, const uint8_t *matrix, int64_t columns, const int32_t *rows, const float *x, int n, int64_t begin,
                 int64_t end, float *y);

/* The same for several tokens: y[t * y_stride + c] += sum of x[t * x_stride + i] * row i for i < n_rows. Rows where x is 0 are
 * skipped; of many tokens, a row is decoded once for all, and not at all if all skip it. */
void ms_rows_add_tokens(enum ggml_type type, const uint8_t *matrix, int64_t columns, int n_rows, const float *x, size_t x_stride,
                        int n_tokens, int64_t begin, int64_t end, float *y, size_t y_stride);

/* What is used, in words: "avx512vnni: q4_0, q8_0", the types being those whose dots are ours. */
const char *ms_rows_kernels(void);

/* The instruction sets that this machine has kernels for, best first, with a space between: "avx512vnni avx2 portable". */
const char *ms_rows_available(void);

/* Takes one of these from now on; not while others compute. -ENOTSUP: not one of them. */
int ms_rows_use(const char *name);

#endif
