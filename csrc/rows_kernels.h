/* rows_kernels.h - what an instruction set has to give to rows.c. */
#ifndef MS_ROWS_KERNELS_H
#define MS_ROWS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MS_ROWS_TILE 8        /* rows at a time */
#define MS_ACTIVATIONS_TILE 4 /* activations at a time */

enum { MS_ROWS_Q4_0, MS_ROWS_Q8_0, MS_ROWS_N_TYPES }; /* the types with own kernels; blocks of 32 columns */
#define MS_ROWS_BLOCK 32
#define MS_ROWS_WAYS 3 /* in which ggml may have been compiled, at most */

/* The types' blocks as ggml stores them; activations are ms_block_q8_0 for both. */
struct ms_block_q4_0 {
    uint16_t d;     /* half-precision scale */
    uint8_t qs[16]; /* value j < 16: low four bits of qs[j]; 16 + j: the high ones; less 8 */
};
struct ms_block_q8_0 {
    uint16_t d;
    int8_t qs[32];
};

/* Of every half-precision number, its value; filled before a kernel runs. */
extern float ms_half_values[1 << 16];

/* out[a][r]: rows[r] times activation a, of MS_ROWS_TILE rows and 1 to MS_ACTIVATIONS_TILE activations. next[r] is fetched ahead. */
typedef void ms_rows_dot_tile(int64_t n_blocks, const uint8_t *const rows[MS_ROWS_TILE], const uint8_t *const next[MS_ROWS_TILE],
                              const uint8_t *activations, size_t activation_bytes, int n_activations, float out[][MS_ROWS_TILE]);
/* y += x[r] * rows[r], of 1 to MS_ROWS_TILE rows. next[r], n_next of them, is fetched ahead. */
typedef void ms_rows_add_tile(int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows, const uint8_t *const *next,
                              int n_next, float *y);
/* What ggml's to_float does. */
typedef void ms_rows_decode(int64_t n_blocks, const uint8_t *row, float *out);
/* y[c] += x[i] * (values + which[i] * stride)[c], for i < n, c < columns. */
typedef void ms_rows_add_values(int64_t columns, const float *values, size_t stride, const int32_t *which, const float *x, int n, float *y);

struct ms_rows_set {
    const char *name;
    bool (*is_here)(void);
    ms_rows_dot_tile *dot[MS_ROWS_N_TYPES][MS_ROWS_WAYS]; /* the first with ggml's bits is taken; NULL: none */
    ms_rows_add_tile *add[MS_ROWS_N_TYPES];
    ms_rows_decode *decode[MS_ROWS_N_TYPES];
    ms_rows_add_values *add_values;
};

/* Best first, the last with a NULL name; none on other machines. Both lists are complete without the portable one. */
extern const struct ms_rows_set ms_rows_sets[];

#endif
