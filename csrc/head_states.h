/* head_states.h - what heads said of the next token, by sequence, and one context's use of it.
 *
 * A step of decoding is one row of a sequence. While it is computed, the head
 * that each owner layer has tells the logits of the next layer for the next
 * step; that step, if it is the one right behind, is routed by them. Any other
 * row (of a prompt, or after the sequence was cut back) is chosen for by the
 * model's routers; of the first step after it nothing was said, so it is too,
 * and the heads know of no experts before it.
 *
 * What was said of a sequence is in a memory that belongs to whoever keeps the
 * sequence, comes with each announced step, and can be saved and restored with
 * the rest of the sequence's state.
 *
 * All functions belong to the context's thread but for ms_head_states_share.
 */
#ifndef MS_HEAD_STATES_H
#define MS_HEAD_STATES_H

#include <stdbool.h>
#include <stdint.h>

#include "ggml.h"
#include "heads.h"
#include "routers.h"

/* See ms_engine_head_memory. */
ms_head_memory *ms_head_memory_new(const struct ms_heads *heads);

struct ms_head_states;
struct ms_head_states *ms_head_states_new(void); /* NULL: out of memory */
void ms_head_states_free(struct ms_head_states *states);

/* An evaluation of n_tokens begins, of the rows that this thread announced. false: out of memory. */
bool ms_head_states_enter(struct ms_head_states *states, struct ms_heads *heads, int n_tokens);
/* Was something said of every row of this evaluation? */
bool ms_head_states_know_all(const struct ms_head_states *states);

/* ---------------------------------------------------------------- a layer that was predicted */

/* How many of the n rows that a layer computes were predicted. -1: which rows these are is not known, though some were. */
int ms_head_states_predicted(const struct ms_head_states *states, const struct ms_heads *heads, int layer, int n);
/* Writes what was said of these over the layer's logits, F32 {experts, rows}. */
void ms_head_states_write(struct ms_head_states *states, const struct ms_heads *heads, int layer, struct ggml_tensor *logits);
/* Was that done for this layer, in this evaluation? */
bool ms_head_states_written(const struct ms_head_states *states, int layer);
/* Of the layer's choice {choices, rows}: how many experts ought to be in it by what was said, and are not. */
int ms_head_states_missing(struct ms_head_states *states, const struct ms_heads *heads, struct ms_routers *routers, int layer, const struct ggml_tensor *ids);

/* ---------------------------------------------------------------- a layer that owns a head */

/* The layer has chosen `ids`, I32 {choices, tokens}, for `input`, F32 {columns, 1, tokens}: work for the steps among them.
 * Once in an evaluation; nothing afterwards. false leaves the sentence in err. */
bool ms_head_states_begin(struct ms_head_states *states, const struct ms_heads *heads, int block, int layer, const struct ggml_tensor *input, const struct ggml_tensor *ids, char *err, size_t errlen);
/* Any threads; nothing where nothing was begun. */
void ms_head_states_share(struct ms_head_states *states);
/* All threads have shared. What that cost is added. false: what the head says is no number, and so nothing was said. */
bool ms_head_states_end(struct ms_head_states *states, int n_threads, int64_t *heads_ns, uint64_t *heads_bytes);

/* ---------------------------------------------------------------- what the next token takes */

/* The experts of a layer that the next steps of this evaluation's sequences will take, distinct, at most `most`, each
 * sequence's surest first. n_each: how many for each. 0: nothing is known. */
int ms_head_states_next(struct ms_head_states *states, const struct ms_heads *heads, struct ms_routers *routers, int layer, int n_each, int32_t *experts, int most);

#endif
