/* head_routing.h - what computing a layer has to do for heads: to be routed by what they said, and to have them say more.
 *
 * In this order, for an evaluation and each of its layers:
 *
 *     enter      an evaluation begins
 *     predicted  is the layer's router to be replaced?
 *     begin      the layer has chosen, and its own head is about to be asked
 *     tell       meanwhile what the layer takes at the next token is read
 *     end        its head has spoken
 *
 * The memory between two evaluations is head_states.h. Without heads (NULL) nothing is done. All is for the context's thread.
 */
#ifndef MS_HEAD_ROUTING_H
#define MS_HEAD_ROUTING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml.h"
#include "head_states.h"
#include "heads.h"
#include "prerouter.h"

/* An evaluation of n_tokens begins: whose it is, and so what is known of it. Out of memory is as if nothing were. */
void ms_head_routing_enter(struct ms_head_states *states, struct ms_heads *heads, struct ms_prerouter *prerouter, const struct ms_prerouter_model *model, int n_tokens);

/* As ms_head_states_predicted; 0 where heads do not route. */
int ms_head_routing_predicted(const struct ms_head_states *states, const struct ms_heads *heads, int layer, int n_tokens);

/* A layer's first products, of `input` and the experts `ids`, are about to be computed: was it routed as it should be? What its own
 * head needs is taken down. state: before attention, or NULL, as ms_routers_learn takes it. false leaves the sentence in err. */
bool ms_head_routing_begin(struct ms_head_states *states, const struct ms_heads *heads, const struct ms_prerouter_model *model, int layer, const struct ggml_tensor *input,
                           const struct ggml_tensor *ids, const struct ggml_tensor *state, char *err, size_t errlen);

/* The layer has chosen, and takes no more: its next choice is asked for. Returns how many experts ought to be in this one and are not. */
int ms_head_routing_tell(struct ms_head_states *states, const struct ms_heads *heads, struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int layer, const struct ggml_tensor *ids);

/* The head of the layer is computed by all n_threads that share in it; what that cost is added. What is no number cannot choose
 * experts: false, and the sentence is in err. As advice it is worth nothing, and does no harm. */
bool ms_head_routing_end(struct ms_head_states *states, const struct ms_heads *heads, const struct ms_prerouter_model *model, int layer, int n_threads, int64_t *heads_ns, uint64_t *heads_bytes,
                         char *err, size_t errlen);

#endif
