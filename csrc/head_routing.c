#include "head_routing.h"

#include "message.h"
#include "tensor.h"

#define MOST_ADVISED 48

static int block_of(const struct ms_prerouter_model *model, int layer) { return model->source->layers[layer].block; }

void ms_head_routing_enter(struct ms_head_states *states, struct ms_heads *heads, struct ms_prerouter *prerouter, const struct ms_prerouter_model *model, int n_tokens) {
    if (!heads) return;
    if (!ms_head_states_enter(states, heads, n_tokens)) ms_head_states_enter(states, heads, -1);
    bool known = ms_head_states_know_all(states);
    ms_prerouter_settle(prerouter, ms_heads_route(heads) && known ? heads : NULL);
    if (!known) ms_prerouter_withdraw_advice(prerouter, model);
}

int ms_head_routing_predicted(const struct ms_head_states *states, const struct ms_heads *heads, int layer, int n_tokens) {
    return ms_heads_route(heads) ? ms_head_states_predicted(states, heads, layer, n_tokens) : 0;
}

bool ms_head_routing_begin(struct ms_head_states *states, const struct ms_heads *heads, const struct ms_prerouter_model *model, int layer, const struct ggml_tensor *input,
                           const struct ggml_tensor *ids, const struct ggml_tensor *state, char *err, size_t errlen) {
    if (!heads) return true;
    int predicted = ms_head_routing_predicted(states, heads, layer, (int)ids->ne[1]);
    if (predicted) ms_routers_learn(model->routers, layer, ids, state); /* the first evaluation of a model may be a restored sequence's */
    if (predicted && !(ms_head_states_written(states, layer) && ms_routers_rule_is_known(model->routers, layer))) {
        ms_fail(0, err, errlen, "block %d: this model does not choose in a way that heads could replace; load it with prerouter=\"advise\" or \"off\"", block_of(model, layer));
        return false;
    }
    return ms_head_states_begin(states, heads, block_of(model, layer), layer, input, ids, err, errlen);
}

/* For measuring: of n_tokens in a batch, the table's next as many stand for what heads say. */
static int replayed_next(const struct ms_prerouter_model *model, int layer, int n_tokens, int n_each, int32_t *next, int most) {
    int n_choices, n = 0;
    for (int t = 0; t < n_tokens; t++) {
        const int32_t *row = ms_routing_row(model->routing, layer, n_tokens + t, &n_choices);
        for (int i = 0; i < n_each && i < n_choices; i++)
            if (n < most && !ms_contains(next, n, row[i])) next[n++] = row[i];
    }
    return n;
}

/* Some more than will be chosen, as other guesses are. */
static void advise(struct ms_head_states *states, const struct ms_heads *heads, struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int layer) {
    int32_t likely[MOST_ADVISED];
    int n = ms_experts_used(model->source, layer) * 3 / 2, most = model->source->layers[layer].n_experts;
    if (most > MOST_ADVISED) most = MOST_ADVISED;
    n = ms_head_states_next(states, heads, model->routers, layer, n < most ? n : most, likely, most);
    ms_prerouter_advise(prerouter, model, layer, likely, n);
}

/* What will be routed is known, and not guessed. */
static void expect(struct ms_head_states *states, const struct ms_heads *heads, const struct ms_prerouter_model *model, int layer, int n_tokens) {
    int used = ms_experts_used(model->source, layer), n_experts = model->source->layers[layer].n_experts;
    int32_t next[n_experts];
    float confidences[n_experts];
    int n = ms_routing_replays(model->routing) ? replayed_next(model, layer, n_tokens, used, next, n_experts) : ms_head_states_next(states, heads, model->routers, layer, used, next, n_experts);
    for (int i = 0; i < n; i++) confidences[i] = 1;
    if (n) model->store->expect(model->store, layer, next, confidences, n);
}

int ms_head_routing_tell(struct ms_head_states *states, const struct ms_heads *heads, struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int layer, const struct ggml_tensor *ids) {
    if (!heads) return 0;
    bool routes = ms_heads_route(heads);
    int missing = routes && !ms_routing_replays(model->routing) ? ms_head_states_missing(states, heads, model->routers, layer, ids) : 0;
    if (!model->predictors || ms_heads_predicting(heads, layer) < 0) return missing;
    if (routes) expect(states, heads, model, layer, (int)ids->ne[1]);
    else if (ids->ne[1] == 1) advise(states, heads, prerouter, model, layer);
    return missing;
}

bool ms_head_routing_end(struct ms_head_states *states, const struct ms_heads *heads, const struct ms_prerouter_model *model, int layer, int n_threads, int64_t *heads_ns, uint64_t *heads_bytes,
                         char *err, size_t errlen) {
    if (ms_head_states_end(states, n_threads, heads_ns, heads_bytes) || !ms_heads_route(heads)) return true;
    ms_fail(0, err, errlen, "block %d: what its head says of the next layer is no number (NaN or infinite); train the heads anew, or load the model with prerouter=\"off\"", block_of(model, layer));
    return false;
}
