#include "prerouter.h"

#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "tensor.h"

#define MOST_TOKENS 8    /* of a batch whose experts are worth guessing */
#define MOST_RANKS 48    /* experts predicted for a layer */
/* Of an expert that is worth reading: more, the more of the time the disk is wanted for what is not guessed. */
#define LEAST_CONFIDENCE 0.25f
#define CONFIDENCE_OF_USE 0.35f
#define FIRST_CONFIDENCE 0.5f /* of a rank that was never tried */
#define LEARNING 0.02f   /* weight of one observation */
#define NEARBY_TOKENS 8
#define LEAST_MISSES 0.5 /* a token: with fewer there is less to win than predicting costs */
#define MISSES_WEIGHT 0.2
#define MADE_UP_SEED 0x9E3779B97F4A7C15ull

struct prediction {
    int n; /* 0: none */
    int32_t experts[MOST_RANKS];
    bool held[MOST_RANKS]; /* in memory when it was said */
};

struct layer {
    struct prediction known, ahead[MS_PREDICTIONS]; /* of the token under way; by heads, of the next once this one has chosen */
    int n_last;
    int32_t last[MOST_RANKS]; /* chosen by the token before */
};

struct ms_prerouter {
    struct layer *layers; /* of the model's; NULL before the first */
    /* How often an expert of that rank was chosen; those that were in memory apart, for what is there was used before
     * and is chosen more often than what is not, whoever names it. */
    float confidence[2][MS_PREDICTIONS][MOST_RANKS];
    const struct ms_heads *settled; /* by these; or NULL */
    bool *held; /* scratch: one an expert */
    int n_held;
    float *state; /* scratch of ms_router_state */
    struct ms_router_scratch scratch;
    struct ms_trial trial;
    uint64_t random;
    /* of the tokens so far */
    struct ms_store_counters seen;
    int depth;
    double misses; /* a token, lately */
    double expert_ns; /* to read one */
    float threshold;
};

struct ms_prerouter *ms_prerouter_new(void) {
    struct ms_prerouter *prerouter = calloc(1, sizeof *prerouter);
    if (!prerouter) return NULL;
    ms_trial_begin(&prerouter->trial);
    prerouter->random = MADE_UP_SEED;
    prerouter->depth = 1;
    prerouter->misses = 2 * LEAST_MISSES;
    prerouter->threshold = LEAST_CONFIDENCE + CONFIDENCE_OF_USE;
    for (int held = 0; held < 2; held++)
        for (int d = 0; d < MS_PREDICTIONS; d++)
            for (int r = 0; r < MOST_RANKS; r++) prerouter->confidence[held][d][r] = FIRST_CONFIDENCE;
    return prerouter;
}

void ms_prerouter_free(struct ms_prerouter *prerouter) {
    if (!prerouter) return;
    ms_router_scratch_free(&prerouter->scratch);
    free(prerouter->layers);
    free(prerouter->held);
    free(prerouter->state);
    free(prerouter);
}

static struct layer *layer_of(struct ms_prerouter *prerouter, const struct ms_prerouter_model *model, int layer) {
    if (!prerouter->layers) prerouter->layers = calloc((size_t)model->source->n_layers, sizeof *prerouter->layers);
    return prerouter->layers ? &prerouter->layers[layer] : NULL;
}

/* ------------------------------------------------------------ what was said against what came */

static void count(struct ms_prediction_counters *counters, const struct prediction *prediction, const int32_t *chosen, int n) {
    if (prediction->n == 0) return;
    int recalled = 0, said = prediction->n < n ? prediction->n : n;
    for (int r = 0; r < said; r++) recalled += ms_contains(chosen, n, prediction->experts[r]);
    __atomic_fetch_add(&counters->layers, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&counters->experts, (uint64_t)n, __ATOMIC_RELAXED);
    __atomic_fetch_add(&counters->recalled, (uint64_t)recalled, __ATOMIC_RELAXED);
    for (int r = 0; r < prediction->n; r++) {
        int rank = r < MS_RANKS ? r : MS_RANKS - 1;
        if (prediction->held[r]) continue;
        __atomic_fetch_add(&counters->absent[rank], 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(&counters->absent_right[rank], (uint64_t)ms_contains(chosen, n, prediction->experts[r]), __ATOMIC_RELAXED);
    }
    __atomic_fetch_add(&counters->exact, (uint64_t)(recalled == n), __ATOMIC_RELAXED);
}

static void learn(struct ms_prerouter *prerouter, const struct prediction *prediction, int depth, const int32_t *chosen, int n) {
    for (int r = 0; r < prediction->n; r++) {
        float *confidence = &prerouter->confidence[prediction->held[r]][depth][r];
        *confidence += LEARNING * ((ms_contains(chosen, n, prediction->experts[r]) ? 1.0f : 0.0f) - *confidence);
    }
}

/* ------------------------------------------------------------ saying it */

static bool find_held(struct ms_prerouter *prerouter, const struct ms_prerouter_model *model, int l) {
    int n = model->source->layers[l].n_experts;
    if (n > prerouter->n_held) {
        bool *held = realloc(prerouter->held, (size_t)n * sizeof *held);
        if (!held) return false;
        prerouter->held = held;
        prerouter->n_held = n;
    }
    model->store->holds(model->store, l, n, prerouter->held);
    return true;
}

/* What is known goes to the store whole, of what is guessed only what is probable enough. */
static void tell_known(struct ms_prerouter_model *model, int layer, const struct prediction *prediction) {
    float confidences[MOST_RANKS];
    for (int r = 0; r < prediction->n; r++) confidences[r] = 1;
    model->store->expect(model->store, layer, prediction->experts, confidences, prediction->n);
}

static void tell_guess(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int l, int depth) {
    struct prediction *prediction = &prerouter->layers[l].ahead[depth];
    int32_t experts[MOST_RANKS];
    float confidences[MOST_RANKS];
    int n = 0;
    if (!find_held(prerouter, model, l)) return;
    for (int r = 0; r < prediction->n; r++) {
        prediction->held[r] = prerouter->held[prediction->experts[r]];
        float confidence = prerouter->confidence[prediction->held[r]][depth][r];
        if (confidence < prerouter->threshold) continue;
        experts[n] = prediction->experts[r];
        confidences[n++] = confidence < 1 ? confidence : 0.999f;
    }
    model->store->expect(model->store, l, experts, confidences, n);
}

static bool guesses(const struct ms_prerouter *prerouter, const struct ms_prerouter_model *model) { return !model->automatic || prerouter->trial.on; }

/* Is enough missed that predicting can pay? Asked for measuring, it is done in any case. */
static bool predicts(const struct ms_prerouter *prerouter, const struct ms_prerouter_model *model) {
    return model->predictors && (!model->automatic || prerouter->misses >= LEAST_MISSES);
}

/* Some more than will be chosen: the first that is not may be nearly as probable as the last that is. */
static int n_candidates(const struct ms_prerouter_model *model, int layer) {
    int n = ms_experts_used(model->source, layer) * 3 / 2, most = model->source->layers[layer].n_experts;
    if (n > most) n = most;
    return n < MOST_RANKS ? n : MOST_RANKS;
}

/* ------------------------------------------------------------ predictors */

static const float *state_of(const struct ggml_tensor *state, int64_t t) { return (const float *)((const char *)state->data + t * (int64_t)state->nb[1]); }

/* The choice itself, of all tokens of a small batch. */
static void know(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int l, const struct ggml_tensor *state, struct prediction *known) {
    int k = ms_experts_used(model->source, l);
    known->n = 0;
    for (int64_t t = 0; t < state->ne[1]; t++) {
        int32_t chosen[MOST_RANKS];
        int n = k <= MOST_RANKS ? ms_routers_choose(model->routers, l, state_of(state, t), true, k, chosen, &prerouter->scratch) : 0;
        const int32_t *replayed = chosen;
        if (n && ms_routing_replays(model->routing)) replayed = ms_routing_row(model->routing, l, (int)t, &n);
        for (int i = 0; i < n && known->n < MOST_RANKS; i++)
            if (!ms_contains(known->experts, known->n, replayed[i])) known->experts[known->n++] = replayed[i];
    }
    if (known->n == 0 || !find_held(prerouter, model, l)) return;
    for (int r = 0; r < known->n; r++) known->held[r] = prerouter->held[known->experts[r]];
    tell_known(model, l, known);
}

static uint64_t next_random(struct ms_prerouter *prerouter) {
    uint64_t x = prerouter->random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return prerouter->random = x;
}

/* Every expert of the replayed choice with the probability that a lookahead of that depth has to find it, the first more
 * surely than the last; else one that a token nearby chooses: what a router nearly chooses is as a rule what it has
 * chosen or will. */
static void make_up(struct ms_prerouter *prerouter, const struct ms_prerouter_model *model, int l, int depth, struct prediction *prediction) {
    int n_row, n, n_experts = model->source->layers[l].n_experts;
    const int32_t *row = ms_routing_row(model->routing, l, 0, &n_row);
    prediction->n = 0;
    for (int i = 0; i < n_row && i < MOST_RANKS; i++) {
        bool found = (double)(next_random(prerouter) >> 11) / (double)(1ull << 53) < 1 - (1 - model->recall[depth]) * (2 * i + 1) / n_row;
        int32_t expert = row[i];
        for (int tries = 0; tries < 64 && (!found || ms_contains(prediction->experts, prediction->n, expert)); tries++) {
            const int32_t *nearby = ms_routing_row(model->routing, l, (int)(next_random(prerouter) % (2 * NEARBY_TOKENS + 1)) - NEARBY_TOKENS, &n);
            expert = tries < 32 ? nearby[next_random(prerouter) % (uint64_t)n] : (int32_t)(next_random(prerouter) % (uint64_t)n_experts);
            found = !ms_contains(row, n_row, expert);
        }
        prediction->experts[prediction->n++] = expert;
    }
}

static void look_ahead(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int l, int depth, const float *state) {
    struct prediction *prediction = &layer_of(prerouter, model, l)->ahead[depth];
    prediction->n = ms_routers_choose(model->routers, l, state, false, n_candidates(model, l), prediction->experts, &prerouter->scratch);
    if (prediction->n && ms_routing_replays(model->routing)) make_up(prerouter, model, l, depth, prediction);
    if (prediction->n) tell_guess(prerouter, model, l, depth);
}

static void repeat(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int l, int depth) {
    struct layer *layer = layer_of(prerouter, model, l);
    struct prediction *prediction = &layer->ahead[depth];
    prediction->n = layer->n_last;
    memcpy(prediction->experts, layer->last, sizeof layer->last);
    if (prediction->n) tell_guess(prerouter, model, l, depth);
}

static void guess_randomly(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int l, int depth) {
    struct prediction *prediction = &layer_of(prerouter, model, l)->ahead[depth];
    float confidences[MOST_RANKS];
    prediction->n = 0;
    for (int i = 0, k = ms_experts_used(model->source, l); i < k && i < MOST_RANKS; i++) {
        int32_t expert = (int32_t)(next_random(prerouter) % (uint64_t)model->source->layers[l].n_experts);
        if (ms_contains(prediction->experts, prediction->n, expert)) continue;
        confidences[prediction->n] = FIRST_CONFIDENCE;
        prediction->experts[prediction->n++] = expert;
    }
    model->store->expect(model->store, l, prediction->experts, confidences, prediction->n);
}

/* What the next token will choose here. */
static void foresee(struct ms_prerouter_model *model, int l) {
    struct prediction next = {0};
    int n;
    const int32_t *row = ms_routing_row(model->routing, l, 1, &n);
    for (int i = 0; i < n && i < MOST_RANKS; i++) next.experts[next.n++] = row[i];
    tell_known(model, l, &next);
}

/* ------------------------------------------------------------ when */

static int following(const struct ms_prerouter_model *model, int layer) {
    int next = layer + 1;
    while (next < model->source->n_layers && !model->wanted[next]) next++;
    return next;
}

static bool is_settled(const struct ms_prerouter *prerouter, int layer) { return ms_heads_predicting(prerouter->settled, layer) >= 0; }

/* What is guessed of the layers after `layer`: of the next, and of the furthest, which was not guessed before; those
 * between were when they were the furthest. state: of one token, or NULL. */
static void guess_following(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int layer, const float *state, enum ms_router_input reads) {
    for (int depth = 1, l = following(model, layer); depth <= prerouter->depth && l < model->source->n_layers; depth++, l = following(model, l)) {
        if (depth > 1 && depth < prerouter->depth && prerouter->layers[l].ahead[depth + 1].n) continue;
        if (is_settled(prerouter, l)) continue;
        if (model->predictors & MS_PREDICT_RANDOM) guess_randomly(prerouter, model, l, depth);
        if (model->predictors & MS_PREDICT_REPEAT) repeat(prerouter, model, l, depth);
        if ((model->predictors & MS_PREDICT_LOOKAHEAD) && state && ms_routers_input(model->routers, l) == reads) look_ahead(prerouter, model, l, depth, state);
    }
}

/* What was said from further away is as good: a layer's experts add little to the state. */
static bool was_predicted(const struct layer *layer) {
    bool predicted = false;
    for (int d = 1; d < MS_DEPTHS; d++) predicted = predicted || layer->ahead[d].n > 0;
    return predicted;
}

void ms_prerouter_settle(struct ms_prerouter *prerouter, const struct ms_heads *heads) { prerouter->settled = heads; }

void ms_prerouter_before_attention(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int layer, const struct ggml_tensor *state) {
    if (!predicts(prerouter, model) || state->ne[1] > MOST_TOKENS || state->type != GGML_TYPE_F32) return;
    struct layer *of = layer_of(prerouter, model, layer);
    if (!of) return;
    bool settled = is_settled(prerouter, layer);
    int64_t begin = ms_now_ns();
    bool alone = state->ne[1] == 1 && guesses(prerouter, model);
    if (ms_routers_input(model->routers, layer) == MS_ROUTER_READS_STATE) {
        if ((model->predictors & MS_PREDICT_ROUTER) && !settled) know(prerouter, model, layer, state, &of->known);
        if (alone && (model->predictors & MS_PREDICT_LOOKAHEAD)) guess_following(prerouter, model, layer, state_of(state, 0), MS_ROUTER_READS_STATE);
    } else if (alone && (model->predictors & MS_PREDICT_LOOKAHEAD) && !was_predicted(of) && !settled) {
        look_ahead(prerouter, model, layer, 0, state_of(state, 0));
    }
    __atomic_fetch_add(&model->predict_ns, ms_now_ns() - begin, __ATOMIC_RELAXED);
}

static void remember(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int l, const struct ggml_tensor *ids) {
    struct layer *layer = layer_of(prerouter, model, l);
    int32_t chosen[MOST_RANKS];
    int n = 0;
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t k = 0; k < ids->ne[0] && n < MOST_RANKS; k++)
            if (!ms_contains(chosen, n, ms_choice(ids, k, t))) chosen[n++] = ms_choice(ids, k, t);
    count(&model->known, &layer->known, chosen, n);
    layer->known.n = 0;
    for (int d = 0; d < MS_PREDICTIONS; d++) {
        count(&model->ahead[d], &layer->ahead[d], chosen, n);
        learn(prerouter, &layer->ahead[d], d, chosen, n);
        layer->ahead[d].n = 0;
    }
    layer->n_last = n;
    memcpy(layer->last, chosen, sizeof chosen);
}

void ms_prerouter_chosen(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int layer, const struct ggml_tensor *ids) {
    if (!predicts(prerouter, model) || ids->ne[1] > MOST_TOKENS || !layer_of(prerouter, model, layer)) return;
    int64_t begin = ms_now_ns();
    remember(prerouter, model, layer, ids);
    if (model->predictors & MS_PREDICT_ORACLE) foresee(model, layer);
    bool by_norm = ms_routers_input(model->routers, layer) == MS_ROUTER_READS_NORM;
    if (ids->ne[1] == 1 && guesses(prerouter, model) && (by_norm || (model->predictors & (MS_PREDICT_REPEAT | MS_PREDICT_RANDOM))))
        guess_following(prerouter, model, layer, by_norm ? ms_router_state(ids, &prerouter->state) : NULL, MS_ROUTER_READS_NORM);
    __atomic_fetch_add(&model->predict_ns, ms_now_ns() - begin, __ATOMIC_RELAXED);
}

void ms_prerouter_advise(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int layer, const int32_t *experts, int n) {
    if (!predicts(prerouter, model) || !layer_of(prerouter, model, layer)) return;
    struct prediction *prediction = &prerouter->layers[layer].ahead[MS_BY_HEADS];
    prediction->n = n < MOST_RANKS ? n : MOST_RANKS;
    memcpy(prediction->experts, experts, (size_t)prediction->n * sizeof *experts);
    if (prediction->n) tell_guess(prerouter, model, layer, MS_BY_HEADS);
}

void ms_prerouter_withdraw_advice(struct ms_prerouter *prerouter, const struct ms_prerouter_model *model) {
    for (int l = 0; l < model->source->n_layers && prerouter->layers; l++) prerouter->layers[l].ahead[MS_BY_HEADS].n = 0;
}

/* From what the last token took: guesses are made so many layers ahead that an expert can be read in time. */
static void learn_times(struct ms_prerouter *prerouter, const struct ms_prerouter_model *model, const struct ms_store_counters *now, int64_t duration_ns, int64_t wait_ns) {
    const struct ms_store_counters *before = &prerouter->seen;
    double misses = (double)(now->misses - before->misses), read_bytes = (double)(now->bytes_read - before->bytes_read);
    prerouter->misses += MISSES_WEIGHT * (misses - prerouter->misses);
    if (read_bytes > 0) {
        double expert_ns = (double)(now->busy_ns - before->busy_ns) * (double)now->slot_bytes / read_bytes;
        prerouter->expert_ns += prerouter->expert_ns > 0 ? MISSES_WEIGHT * (expert_ns - prerouter->expert_ns) : expert_ns;
    }
    double layer_ns = (double)(duration_ns - wait_ns) / model->source->n_layers;
    int depth = layer_ns > 0 ? 1 + (int)(prerouter->expert_ns / layer_ns + 0.5) : 1;
    prerouter->depth = depth < MS_DEPTHS ? depth : MS_DEPTHS - 1;
    double use = duration_ns > 0 ? prerouter->misses * prerouter->expert_ns / (double)duration_ns : 1;
    prerouter->threshold = LEAST_CONFIDENCE + CONFIDENCE_OF_USE * (float)(use < 1 ? use : 1);
}

void ms_prerouter_token(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int64_t duration_ns, int64_t wait_ns) {
    if (!model->predictors) return;
    struct ms_store_counters now = model->store->counters(model->store);
    learn_times(prerouter, model, &now, duration_ns, wait_ns);
    prerouter->seen = now;
    __atomic_store_n(&model->depth, prerouter->depth, __ATOMIC_RELAXED);
    if (!model->automatic) return;
    int n_trials = prerouter->trial.n_trials;
    ms_trial_observe(&prerouter->trial, duration_ns, wait_ns);
    if (prerouter->trial.n_trials == n_trials) return;
    for (int way = 0; way < 2; way++) __atomic_store_n(&model->trial_ns[way], prerouter->trial.medians[way], __ATOMIC_RELAXED);
    __atomic_store_n(&model->verdict, prerouter->trial.verdict ? 1 : -1, __ATOMIC_RELEASE);
}
