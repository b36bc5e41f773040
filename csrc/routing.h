/* routing.h - what changes which experts are chosen: cache-aware routing, and the replay of a recorded routing.
 *
 * Both change what the model computes, are off unless asked for, and count
 * what they did. They act on the order that the graph puts experts into, just
 * before weights are taken by it; so the model weights what it computes.
 *
 * Cache-aware: of the experts whose score is within a margin of that of the
 * last one chosen, those in memory go first. Experts better than the margin
 * are taken wherever they are, worse ones never. Scores are compared as odds,
 * so that a margin means the same behind a softmax and behind sigmoids.
 *
 * Replay: the choices are those of a table, for measuring big models with
 * random weights, whose own routing is that of no model.
 */
#ifndef MS_ROUTING_H
#define MS_ROUTING_H

#include <stdbool.h>
#include <stdint.h>

#include "ggml.h"
#include "routers.h"
#include "store.h"

struct ms_routing;

/* margin: share of the odds of the last chosen, 0 (off) to below 1. NULL: out of memory. */
struct ms_routing *ms_routing_new(int n_layers, float margin);
void ms_routing_free(struct ms_routing *routing);

/* Takes the table [tokens][layers][choices] from now on, from its first token; after the last comes the first again.
 * -EINVAL: not of that many layers; -ENOMEM. */
int ms_routing_replay(struct ms_routing *routing, const int32_t *experts, int n_tokens, int n_layers, int n_choices, char *err, size_t errlen);
bool ms_routing_replays(const struct ms_routing *routing);
/* Is there anything to change? */
bool ms_routing_edits(const struct ms_routing *routing);

/* Told of every layer before it is edited, in order: which tokens of the table are computed. */
void ms_routing_enter(struct ms_routing *routing, bool new_batch, int n_tokens);
/* Row of the table for token `t` of the batch, or of one before or after it; n_choices of them. */
const int32_t *ms_routing_row(const struct ms_routing *routing, int layer, int t, int *n_choices);

/* Changes the first n of each row of `order` (I32 {n or more, tokens}), sorted by `scores` (F32 {experts, tokens}), which are of that kind. */
void ms_routing_edit(struct ms_routing *routing, struct ms_store *store, int layer, const struct ggml_tensor *scores, enum ms_scores kind, struct ggml_tensor *order, int n);

/* Choices that another expert was taken for, because it was in memory. */
uint64_t ms_routing_replaced(const struct ms_routing *routing);

#endif
