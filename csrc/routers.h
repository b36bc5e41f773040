/* routers.h - how each layer of a model chooses its experts, so that it can be done ahead of the graph.
 *
 * Nothing here knows an architecture: a router is read off the graph that
 * llama.cpp computes, going back from the choice of experts to the weights
 * that the choice is made with. What is found once holds for the model; a
 * graph that is not understood leaves that layer without a prediction.
 *
 * Learning and asking may be done by any threads at once.
 */
#ifndef MS_ROUTERS_H
#define MS_ROUTERS_H

#include <stdbool.h>
#include <stdint.h>

#include "ggml.h"

enum ms_router_input {
    MS_ROUTER_UNKNOWN,
    MS_ROUTER_READS_STATE, /* the state before the layer's attention, as it is */
    MS_ROUTER_READS_NORM,  /* the state after attention, normalised and weighted */
};

struct ms_routers;
struct ms_routers *ms_routers_new(int n_layers); /* NULL: out of memory */
void ms_routers_free(struct ms_routers *routers);

/* Looks back from `ids`, the choice of a layer in a graph under way. `state`: the tensor that was the state before this
 * layer's attention, or NULL. Cheap once the layer is known. */
void ms_routers_learn(struct ms_routers *routers, int layer, const struct ggml_tensor *ids, const struct ggml_tensor *state);
enum ms_router_input ms_routers_input(const struct ms_routers *routers, int layer);

/* What a thread needs to ask; for layers of up to n_experts experts and width columns. */
struct ms_router_scratch {
    int64_t columns;
    int n_experts;
    float *normed, *scores, *groups;
    void *quantised;
};
bool ms_router_scratch_make(struct ms_router_scratch *scratch, int64_t columns, int n_experts);
void ms_router_scratch_free(struct ms_router_scratch *scratch);

/* The n experts that the layer would choose first for this state [columns], the surest first, by its own rule (bias,
 * groups, softmax or sigmoid). A state that is read after a norm is normalised and weighted as the layer would after its
 * attention. exact: with the graph's own weights and kernel, so that of the very state that a router reads before
 * attention the choice itself comes out; else with weights of 8 bits. Returns how many, less than n if there are no more;
 * 0: the layer is not known. */
int ms_routers_choose(struct ms_routers *routers, int layer, const float *state, bool exact, int n, int32_t *experts, struct ms_router_scratch *scratch);

/* The same from logits [experts] that did not come of the router, which are overwritten with the scores that they give. Only the
 * layer's rule must be known, which may be so where its input is not understood. */
int ms_routers_choose_by(struct ms_routers *routers, int layer, float *logits, int n, int32_t *experts, struct ms_router_scratch *scratch);
/* By the same rule, how many of the n chosen are not among the first n, in whose place others should have been; what is as good to
 * some 1e-5 does not come before. 0 where the rule is not known. */
int ms_routers_missing(struct ms_routers *routers, int layer, float *logits, const int32_t *chosen, int n);
bool ms_routers_rule_is_known(const struct ms_routers *routers, int layer);

/* What experts are put in order by. */
enum ms_scores {
    MS_SCORES_LOGITS,
    MS_SCORES_SHARES,  /* of a softmax, or what a bias or groups made of any */
    MS_SCORES_SIGMOIDS,
};

/* The router's weight that an order of experts (a node ARGSORT or TOP_K) comes from; NULL if it is no such node. */
const struct ggml_tensor *ms_router_of_order(const struct ggml_tensor *order, enum ms_scores *scores);
/* The state that a choice was made from, of its first token, before it was normalised; NULL: not understood, the router
 * reads no norm, or out of memory. Where the graph has written the normalised and weighted state over it, the weights are
 * divided out into *copy (NULL or from malloc; the caller frees it): that is the state but for its scale, which no norm sees. */
const float *ms_router_state(const struct ggml_tensor *ids, float **copy);

#endif
