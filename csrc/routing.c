#include "routing.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "message.h"
#include "tensor.h"

#define MOST_TOKENS 8 /* of a batch for which the cache is asked: a prompt wants nearly all experts of a layer */

struct ms_routing {
    int n_layers;
    float margin;
    uint64_t replaced; /* atomic */
    /* replay */
    int32_t *table;
    int n_tokens, n_choices;
    int position, batch_tokens;
};

struct ms_routing *ms_routing_new(int n_layers, float margin) {
    struct ms_routing *routing = calloc(1, sizeof *routing);
    if (routing) *routing = (struct ms_routing){.n_layers = n_layers, .margin = margin};
    return routing;
}

void ms_routing_free(struct ms_routing *routing) {
    if (!routing) return;
    free(routing->table);
    free(routing);
}

uint64_t ms_routing_replaced(const struct ms_routing *routing) { return __atomic_load_n(&routing->replaced, __ATOMIC_RELAXED); }

/* ------------------------------------------------------------ replay */

int ms_routing_replay(struct ms_routing *routing, const int32_t *experts, int n_tokens, int n_layers, int n_choices, char *err, size_t errlen) {
    if (n_layers != routing->n_layers)
        return ms_fail(-EINVAL, err, errlen, "a routing of %d layers cannot be replayed by a model with experts in %d; synthesise one of its shape", n_layers, routing->n_layers);
    size_t bytes = (size_t)n_tokens * (size_t)n_layers * (size_t)n_choices * sizeof(int32_t);
    int32_t *table = malloc(bytes);
    if (!table) return ms_fail(-ENOMEM, err, errlen, "out of memory for a routing of %d tokens", n_tokens);
    memcpy(table, experts, bytes);
    free(routing->table);
    routing->table = table;
    routing->n_tokens = n_tokens;
    routing->n_choices = n_choices;
    routing->position = routing->batch_tokens = 0;
    return 0;
}

bool ms_routing_replays(const struct ms_routing *routing) { return routing->table != NULL; }

bool ms_routing_edits(const struct ms_routing *routing) { return routing->table || routing->margin > 0; }

void ms_routing_enter(struct ms_routing *routing, bool new_batch, int n_tokens) {
    if (!routing->table) return;
    if (new_batch) {
        routing->position = (routing->position + routing->batch_tokens) % routing->n_tokens;
        routing->batch_tokens = 0;
    }
    if (n_tokens > routing->batch_tokens) routing->batch_tokens = n_tokens; /* the last layer of a prompt computes fewer */
}

const int32_t *ms_routing_row(const struct ms_routing *routing, int layer, int t, int *n_choices) {
    *n_choices = routing->n_choices;
    int at = (routing->position + t) % routing->n_tokens;
    size_t token = (size_t)(at < 0 ? at + routing->n_tokens : at);
    return routing->table + (token * (size_t)routing->n_layers + (size_t)layer) * (size_t)routing->n_choices;
}

/* ------------------------------------------------------------ cache-aware */

static int32_t *order_row(struct ggml_tensor *order, int64_t t) { return (int32_t *)((char *)order->data + t * (int64_t)order->nb[1]); }

/* The best expert not in `taken` with a score within [low, high] that is held, or any; -1: there is none. */
static int32_t best(const float *scores, int n_experts, const bool *held, bool must_be_held, float low, float high, const int32_t *taken, int n_taken) {
    int32_t found = -1;
    for (int32_t e = 0; e < n_experts; e++)
        if (scores[e] >= low && scores[e] <= high && (held[e] || !must_be_held) && (found < 0 || scores[e] > scores[found]) && !ms_contains(taken, n_taken, e)) found = e;
    return found;
}

static int by_falling_score(const float *scores, int32_t a, int32_t b) { return scores[a] != scores[b] ? (scores[a] < scores[b] ? 1 : -1) : (a > b) - (a < b); }

/* To where odds are compared by subtraction. */
static void take_logarithms(float *scores, int n, enum ms_scores kind) {
    for (int e = 0; e < n && kind != MS_SCORES_LOGITS; e++) {
        float share = scores[e] < FLT_MIN ? FLT_MIN : scores[e]; /* what is no number stays none */
        scores[e] = logf(share) - (kind == MS_SCORES_SIGMOIDS ? logf(fmaxf(1 - share, FLT_EPSILON)) : 0);
    }
}

static void sort_by_score(const float *scores, int32_t *chosen, int n) {
    for (int i = 1; i < n; i++)
        for (int j = i; j > 0 && by_falling_score(scores, chosen[j - 1], chosen[j]) > 0; j--) {
            int32_t t = chosen[j];
            chosen[j] = chosen[j - 1];
            chosen[j - 1] = t;
        }
}

/* Changes `chosen`, in any order, and returns how many were replaced; nothing where none is. */
static uint64_t prefer_held(const float *scores, int n_experts, const bool *held, float margin, int32_t *chosen, int n) {
    int32_t taken[n];
    memcpy(taken, chosen, (size_t)n * sizeof *taken);
    sort_by_score(scores, taken, n);
    float last = scores[taken[n - 1]], margin_odds = -log1pf(-margin);
    int n_taken = 0;
    for (int i = 0; i < n; i++)
        if (isnan(scores[chosen[i]])) return 0;
    while (n_taken < n && scores[taken[n_taken]] > last + margin_odds) n_taken++; /* sorted: the sure ones are first */
    for (int pass = 0; pass < 2; pass++)
        while (n_taken < n) {
            int32_t e = best(scores, n_experts, held, pass == 0, last - margin_odds, last + margin_odds, taken, n_taken);
            if (e < 0) break;
            taken[n_taken++] = e;
        }
    if (n_taken < n) return 0;
    uint64_t replaced = 0;
    for (int i = 0; i < n; i++) replaced += !ms_contains(chosen, n, taken[i]);
    if (replaced) {
        sort_by_score(scores, taken, n);
        memcpy(chosen, taken, (size_t)n * sizeof *taken);
    }
    return replaced;
}

void ms_routing_edit(struct ms_routing *routing, struct ms_store *store, int layer, const struct ggml_tensor *scores, enum ms_scores kind, struct ggml_tensor *order, int n) {
    int64_t tokens = order->ne[1];
    int n_experts = (int)scores->ne[0];
    if (routing->table) {
        for (int64_t t = 0; t < tokens; t++) {
            int n_choices;
            const int32_t *row = ms_routing_row(routing, layer, routing->batch_tokens - (int)tokens + (int)t, &n_choices);
            memcpy(order_row(order, t), row, (size_t)(n < n_choices ? n : n_choices) * sizeof *row);
        }
        return;
    }
    if (routing->margin <= 0 || tokens > MOST_TOKENS || n >= n_experts) return;
    bool held[n_experts];
    float row[n_experts];
    store->holds(store, layer, n_experts, held);
    for (int64_t t = 0; t < tokens; t++) {
        memcpy(row, (const char *)scores->data + t * (int64_t)scores->nb[1], (size_t)n_experts * sizeof *row);
        take_logarithms(row, n_experts, kind);
        __atomic_fetch_add(&routing->replaced, prefer_held(row, n_experts, held, routing->margin, order_row(order, t), n), __ATOMIC_RELAXED);
    }
}
