/* heads.h - trained heads: from what a layer saw and ran at a token, the router logits of the next layer at the next token.
 *
 * The head that layer N owns computes, of x = [h, a, b],
 *
 *     z = L x + W2 gelu(W1 x),     gelu(v) = v/2 (1 + erf(v / sqrt 2)), no biases
 *
 * h being what enters the experts of N, a and b one-hot sums of the experts
 * that N ran at this token and at the one before. What multiplies a and b is
 * stored by expert, so that it is gathered and added instead of multiplied.
 * Rows are dotted as ggml does it: h is rounded to the type that goes with the
 * weights. Every row is computed by one thread and sums have one order, so
 * the bits do not depend on how many threads there are or which tokens are
 * computed together.
 *
 * The weights are one engine's, and never change. Who is predicted by them is
 * head_states.h.
 */
#ifndef MS_HEADS_H
#define MS_HEADS_H

#include <stdbool.h>
#include <stdint.h>

#include "moestream.h"
#include "source.h"

struct ms_heads;

/* Copies the heads and checks them, see ms_engine_heads. */
int ms_heads_open(const struct ms_source *source, const ms_head *heads, int n, int mode, ms_head_shape shape, struct ms_heads **out, char *err, size_t errlen);
void ms_heads_close(struct ms_heads *heads);
/* Is every layer that owns a head or is predicted part of the loaded model? -EINVAL if not. */
int ms_heads_require_loaded(const struct ms_heads *heads, const bool *wanted, char *err, size_t errlen);

int ms_heads_count(const struct ms_heads *heads);
int ms_heads_experts(const struct ms_heads *heads);
/* Does a head's word replace the router's? heads may be NULL: no. */
bool ms_heads_route(const struct ms_heads *heads);
/* The head that a layer of the source owns, and the one that predicts it: numbers from 0, or -1. heads may be NULL. */
int ms_heads_owned_by(const struct ms_heads *heads, int layer);
int ms_heads_predicting(const struct ms_heads *heads, int layer);

/* ---------------------------------------------------------------- computing */

/* One token's. */
struct ms_head_input {
    const float *state;          /* h */
    const int32_t *now, *before; /* experts run at this token and at the one before */
    int n_now, n_before;
    float *logits; /* out */
};

/* A head on some tokens at once, by any number of threads. */
struct ms_head_work;
struct ms_head_work *ms_head_work_new(void); /* NULL: out of memory */
void ms_head_work_free(struct ms_head_work *work);
/* `inputs` must stay until the work is done, but not what `state` points to. Not while threads share the work before.
 * false: out of memory. */
bool ms_head_work_begin(struct ms_head_work *work, const struct ms_heads *heads, int head, const struct ms_head_input *inputs, int n);
/* Takes parts of the work until none are left. Once every thread that shares has returned the logits are there. */
void ms_head_work_share(struct ms_head_work *work);
/* Of the work begun last: time that threads spent on it, and bytes of weights that it read. */
void ms_head_work_cost(const struct ms_head_work *work, int64_t *spent_ns, uint64_t *bytes);
/* Likewise: are all logits numbers, and finite? Not where the state is not, or is too large for the type of the weights. */
bool ms_head_work_is_finite(const struct ms_head_work *work);

/* ---------------------------------------------------------------- announcing */

/* What is known of the batch that this thread decodes next, by the heads' engine; see ms_engine_decode_rows. -ENOMEM. */
int ms_heads_announce(struct ms_heads *heads, int n_rows, struct ms_head_memory *const *memories, const int32_t *positions, const uint8_t *flags);
/* The same, once: how many rows, at most `capacity` of which are copied. 0: nothing was announced by this thread. */
struct ms_announced_row {
    struct ms_head_memory *memory;
    int32_t position;
    uint8_t flags; /* enum ms_row_flags */
};
int ms_heads_take_announced(struct ms_heads *heads, struct ms_announced_row **rows, int *capacity);

#endif
