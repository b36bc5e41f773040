#include "routers.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-cpu.h"

#define DEEPEST 24 /* nodes between a choice and its router */
#define AS_GOOD 1e-5f /* share of a score: our exponential is not ggml's */

enum gate { GATE_NONE, GATE_SOFTMAX, GATE_SIGMOID, GATE_SOFTPLUS_ROOT };

struct router {
    bool rule_known;                   /* how it chooses by logits; atomic: set after all that it needs */
    int n_experts;
    bool known;                        /* all; atomic: set last */
    enum ms_router_input input;
    const struct ggml_tensor *weight;  /* {columns, experts}; of the model, and there as long as it */
    const struct ggml_tensor *norm;    /* {columns}, or NULL */
    const struct ggml_tensor *logit_bias, *selection_bias; /* {experts}, or NULL */
    bool centred;                      /* LayerNorm */
    float epsilon;
    enum gate gate;
    int n_groups, n_groups_used;
    enum ggml_type folded_type;
    uint8_t *folded; /* weight times norm; made when first asked for; atomic */
};

struct ms_routers {
    int n_layers;
    pthread_mutex_t mutex; /* for who writes */
    struct router *routers;
};

struct ms_routers *ms_routers_new(int n_layers) {
    struct ms_routers *routers = calloc(1, sizeof *routers);
    if (!routers) return NULL;
    routers->n_layers = n_layers;
    routers->routers = calloc((size_t)n_layers, sizeof *routers->routers);
    if (!routers->routers) {
        free(routers);
        return NULL;
    }
    pthread_mutex_init(&routers->mutex, NULL);
    return routers;
}

void ms_routers_free(struct ms_routers *routers) {
    if (!routers) return;
    for (int l = 0; l < routers->n_layers; l++) free(routers->routers[l].folded);
    pthread_mutex_destroy(&routers->mutex);
    free(routers->routers);
    free(routers);
}

/* ------------------------------------------------------------ reading it off the graph */

static bool is_weight(const struct ggml_tensor *tensor) { return tensor && tensor->op == GGML_OP_NONE && tensor->type == GGML_TYPE_F32 && tensor->data; }

static const struct ggml_tensor *behind_views(const struct ggml_tensor *tensor) {
    while (tensor && (tensor->op == GGML_OP_VIEW || tensor->op == GGML_OP_RESHAPE || tensor->op == GGML_OP_CONT)) tensor = tensor->src[0];
    return tensor;
}

/* Groups of experts of which some are chosen first: the rest of the scores is put to -infinity. Returns the scores before. */
static const struct ggml_tensor *read_groups(struct router *router, const struct ggml_tensor *masked) {
    const struct ggml_tensor *scores = NULL;
    for (int s = 0; s < GGML_MAX_SRC && masked->src[s]; s++) {
        const struct ggml_tensor *source = masked->src[s];
        if (source->op == GGML_OP_FILL) {
            const struct ggml_tensor *groups = source->src[0];
            router->n_groups = (int)groups->ne[1];
            scores = behind_views(groups);
        }
        if (source->type == GGML_TYPE_I32) router->n_groups_used = (int)source->ne[0];
    }
    return router->n_groups_used > 0 ? scores : NULL;
}

/* Goes back from scores to the product with the router's weight; NULL: something in between is not understood. */
static const struct ggml_tensor *read_scores(struct router *router, const struct ggml_tensor *scores) {
    for (int i = 0; i < DEEPEST && (scores = behind_views(scores)); i++) {
        switch (scores->op) {
            case GGML_OP_MUL_MAT: return scores;
            case GGML_OP_SET_ROWS:
                scores = read_groups(router, scores);
                continue;
            case GGML_OP_ADD:
                if (!is_weight(scores->src[1])) return NULL;
                if (router->gate == GATE_NONE && !router->selection_bias) router->selection_bias = scores->src[1];
                else if (!router->logit_bias) router->logit_bias = scores->src[1];
                else return NULL;
                break;
            case GGML_OP_SOFT_MAX:
                if (router->gate != GATE_NONE || scores->src[1]) return NULL;
                router->gate = GATE_SOFTMAX;
                break;
            case GGML_OP_SQRT: break;
            case GGML_OP_UNARY:
                if (router->gate != GATE_NONE) return NULL;
                if (ggml_get_unary_op(scores) == GGML_UNARY_OP_SIGMOID) router->gate = GATE_SIGMOID;
                else if (ggml_get_unary_op(scores) == GGML_UNARY_OP_SOFTPLUS) router->gate = GATE_SOFTPLUS_ROOT;
                else return NULL;
                break;
            case GGML_OP_GET_ROWS: break; /* some tokens of all */
            default: return NULL;
        }
        scores = scores->src[0];
    }
    return NULL;
}

static const struct ggml_tensor *order_of(const struct ggml_tensor *ids) {
    const struct ggml_tensor *order = behind_views(ids);
    return order && (order->op == GGML_OP_ARGSORT || order->op == GGML_OP_TOP_K) ? order : NULL;
}

static bool read_input(struct router *router, const struct ggml_tensor *input, const struct ggml_tensor *state) {
    input = behind_views(input);
    if (!input) return false;
    if (input == state) {
        router->input = MS_ROUTER_READS_STATE;
        return true;
    }
    const struct ggml_tensor *norm = input->op == GGML_OP_MUL ? input->src[0] : NULL;
    if (!norm || (norm->op != GGML_OP_RMS_NORM && norm->op != GGML_OP_NORM) || !is_weight(input->src[1]) || input->src[1]->ne[0] != router->weight->ne[0]) return false;
    router->input = MS_ROUTER_READS_NORM;
    router->norm = input->src[1];
    router->centred = norm->op == GGML_OP_NORM;
    memcpy(&router->epsilon, norm->op_params, sizeof router->epsilon);
    return true;
}

/* Returns the product with the router's weight; NULL: the router is not understood. */
static const struct ggml_tensor *read_router(struct router *router, const struct ggml_tensor *ids, const struct ggml_tensor *state) {
    const struct ggml_tensor *order = order_of(ids), *product = order ? read_scores(router, order->src[0]) : NULL;
    if (!product || order->src[0]->ne[0] != product->src[0]->ne[1]) return NULL; /* an order of groups */
    router->n_experts = (int)order->src[0]->ne[0];
    if (product->src[0]->op != GGML_OP_NONE || !product->src[0]->data) return NULL;
    if (ggml_is_quantized(product->src[0]->type)) return NULL; /* llama.cpp may have interleaved its rows */
    router->weight = product->src[0];
    return read_input(router, product->src[1], state) ? product : NULL;
}

void ms_routers_learn(struct ms_routers *routers, int layer, const struct ggml_tensor *ids, const struct ggml_tensor *state) {
    struct router *router = &routers->routers[layer];
    if (__atomic_load_n(&router->known, __ATOMIC_ACQUIRE)) return;
    struct router found = {0};
    bool whole = read_router(&found, ids, state) != NULL;
    if (found.n_experts == 0) return;
    pthread_mutex_lock(&routers->mutex);
    if (!router->rule_known) {
        *router = found;
        __atomic_store_n(&router->rule_known, true, __ATOMIC_RELEASE);
    }
    if (whole && !router->known) {
        router->input = found.input;
        router->weight = found.weight;
        router->norm = found.norm;
        router->centred = found.centred;
        router->epsilon = found.epsilon;
        __atomic_store_n(&router->known, true, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&routers->mutex);
}

bool ms_routers_rule_is_known(const struct ms_routers *routers, int layer) { return __atomic_load_n(&routers->routers[layer].rule_known, __ATOMIC_ACQUIRE); }

enum ms_router_input ms_routers_input(const struct ms_routers *routers, int layer) {
    const struct router *router = &routers->routers[layer];
    return __atomic_load_n(&router->known, __ATOMIC_ACQUIRE) ? router->input : MS_ROUTER_UNKNOWN;
}

const struct ggml_tensor *ms_router_of_order(const struct ggml_tensor *order, enum ms_scores *scores) {
    struct router router = {0};
    if (order->op != GGML_OP_ARGSORT && order->op != GGML_OP_TOP_K) return NULL;
    const struct ggml_tensor *product = read_scores(&router, order->src[0]);
    bool plain = !router.selection_bias && !router.n_groups;
    *scores = router.gate == GATE_NONE ? MS_SCORES_LOGITS : router.gate == GATE_SIGMOID && plain ? MS_SCORES_SIGMOIDS : MS_SCORES_SHARES;
    return product && order->src[0]->ne[0] == product->src[0]->ne[1] ? product->src[0] : NULL;
}

const float *ms_router_state(const struct ggml_tensor *ids, float **copy) {
    struct router router = {0};
    const struct ggml_tensor *product = read_router(&router, ids, NULL);
    if (!product) return NULL;
    const struct ggml_tensor *weighted = behind_views(product->src[1]), *state = weighted->src[0]->src[0];
    if (state->type != GGML_TYPE_F32) return NULL;
    if (state->data != weighted->data) return state->data;
    int64_t columns = router.norm->ne[0];
    float *out = realloc(*copy, (size_t)columns * sizeof(float));
    if (!out) return NULL;
    *copy = out;
    const float *in = weighted->data, *weights = router.norm->data;
    for (int64_t c = 0; c < columns; c++) out[c] = weights[c] != 0 ? in[c] / weights[c] : 0;
    return out;
}

/* ------------------------------------------------------------ asking it */

bool ms_router_scratch_make(struct ms_router_scratch *scratch, int64_t columns, int n_experts) {
    if (columns <= scratch->columns && n_experts <= scratch->n_experts) return true;
    ms_router_scratch_free(scratch);
    scratch->normed = malloc((size_t)columns * sizeof(float));
    scratch->quantised = malloc((size_t)columns * sizeof(float) + 256);
    scratch->scores = malloc((size_t)n_experts * sizeof(float));
    scratch->groups = malloc((size_t)n_experts * sizeof(float));
    if (!scratch->normed || !scratch->quantised || !scratch->scores || !scratch->groups) {
        ms_router_scratch_free(scratch);
        return false;
    }
    scratch->columns = columns;
    scratch->n_experts = n_experts;
    return true;
}

void ms_router_scratch_free(struct ms_router_scratch *scratch) {
    free(scratch->normed);
    free(scratch->quantised);
    free(scratch->scores);
    free(scratch->groups);
    *scratch = (struct ms_router_scratch){0};
}

static void normalise(const struct router *router, const float *state, int64_t n, float *out) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += state[i];
        squares += (double)state[i] * state[i];
    }
    double mean = router->centred ? sum / (double)n : 0;
    float scale = (float)(1 / sqrt(squares / (double)n - mean * mean + router->epsilon));
    for (int64_t i = 0; i < n; i++) out[i] = (state[i] - (float)mean) * scale;
}

/* The router's weights, times those of the norm if there is one, in 8 bits: the products of a guess are a quarter of the memory to read. */
static const uint8_t *folded(struct ms_routers *routers, struct router *router) {
    uint8_t *made = __atomic_load_n(&router->folded, __ATOMIC_ACQUIRE);
    if (made) return made;
    int64_t columns = router->weight->ne[0], rows = router->weight->ne[1];
    const struct ggml_type_traits *traits = ggml_get_type_traits(router->weight->type);
    enum ggml_type type = columns % ggml_blck_size(GGML_TYPE_Q8_0) ? GGML_TYPE_F32 : GGML_TYPE_Q8_0;
    size_t row_bytes = ggml_row_size(type, columns);
    float *row = malloc((size_t)columns * sizeof(float));
    uint8_t *out = malloc((size_t)rows * row_bytes);
    if (row && out) {
        for (int64_t r = 0; r < rows; r++) {
            const char *stored = (const char *)router->weight->data + (size_t)r * router->weight->nb[1];
            if (router->weight->type == GGML_TYPE_F32) memcpy(row, stored, (size_t)columns * sizeof(float));
            else traits->to_float(stored, row, columns);
            for (int64_t c = 0; c < columns && router->norm; c++) row[c] *= ((const float *)router->norm->data)[c];
            if (type == GGML_TYPE_F32) memcpy(out + (size_t)r * row_bytes, row, row_bytes);
            else ggml_quantize_chunk(type, row, out + (size_t)r * row_bytes, 0, 1, columns, NULL);
        }
        pthread_mutex_lock(&routers->mutex);
        if (!router->folded) {
            router->folded_type = type;
            __atomic_store_n(&router->folded, out, __ATOMIC_RELEASE);
            out = NULL;
        }
        pthread_mutex_unlock(&routers->mutex);
    }
    free(row);
    free(out);
    return __atomic_load_n(&router->folded, __ATOMIC_ACQUIRE);
}

/* Rows of `type` times the state, with the kernel that ggml would take. */
static void multiply(enum ggml_type type, const uint8_t *rows, size_t row_bytes, int64_t columns, int n_rows, const float *state, struct ms_router_scratch *scratch) {
    const struct ggml_type_traits_cpu *traits = ggml_get_type_traits_cpu(type);
    const void *input = state;
    if (traits->vec_dot_type != GGML_TYPE_F32) {
        ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float(state, scratch->quantised, columns);
        input = scratch->quantised;
    }
    for (int r = 0; r < n_rows; r++) traits->vec_dot((int)columns, &scratch->scores[r], 0, rows + (size_t)r * row_bytes, 0, input, 0, 1);
}

static float bias(const struct ggml_tensor *tensor, int expert) { return tensor ? ((const float *)tensor->data)[expert] : 0; }

/* Logits to what is chosen by. A softmax keeps the order, and is computed only where something is added to it. */
static void gate(const struct router *router, float *scores, int n) {
    for (int e = 0; e < n; e++) scores[e] += bias(router->logit_bias, e);
    if (router->gate == GATE_SOFTMAX && (router->selection_bias || router->n_groups)) {
        float largest = -FLT_MAX, sum = 0;
        for (int e = 0; e < n; e++) largest = fmaxf(largest, scores[e]);
        for (int e = 0; e < n; e++) sum += scores[e] = expf(scores[e] - largest);
        for (int e = 0; e < n; e++) scores[e] /= sum;
    }
    for (int e = 0; e < n && router->gate == GATE_SIGMOID; e++) scores[e] = 1 / (1 + expf(-scores[e]));
    for (int e = 0; e < n && router->gate == GATE_SOFTPLUS_ROOT; e++) scores[e] = sqrtf(scores[e] > 20 ? scores[e] : log1pf(expf(scores[e])));
    for (int e = 0; e < n; e++) scores[e] += bias(router->selection_bias, e);
}

/* A group is worth its two best experts; those of groups that are not chosen are out. */
static void mask_groups(const struct router *router, float *scores, int n, float *worth) {
    int each = n / router->n_groups;
    for (int g = 0; g < router->n_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * each; e < (g + 1) * each; e++) {
            if (scores[e] > first) {
                second = first;
                first = scores[e];
            } else if (scores[e] > second) {
                second = scores[e];
            }
        }
        worth[g] = each > 1 ? first + second : first;
    }
    for (int g = 0; g < router->n_groups; g++) {
        int better = 0;
        for (int other = 0; other < router->n_groups; other++) better += worth[other] > worth[g] || (worth[other] == worth[g] && other < g);
        for (int e = g * each; e < (g + 1) * each && better >= router->n_groups_used; e++) scores[e] = -INFINITY;
    }
}

static int largest(const float *scores, int n_scores, int n, int32_t *out) {
    int found = 0;
    for (int e = 0; e < n_scores; e++) {
        if (scores[e] == -INFINITY || (found == n && scores[e] <= scores[out[n - 1]])) continue;
        int at = found < n ? found++ : n - 1;
        for (; at > 0 && scores[out[at - 1]] < scores[e]; at--) out[at] = out[at - 1];
        out[at] = e;
    }
    return found;
}

static int choose_by(const struct router *router, float *scores, int n, int32_t *experts, struct ms_router_scratch *scratch) {
    gate(router, scores, router->n_experts);
    if (router->n_groups > 1) mask_groups(router, scores, router->n_experts, scratch->groups);
    return largest(scores, router->n_experts, n, experts);
}

int ms_routers_choose(struct ms_routers *routers, int layer, const float *state, bool exact, int n, int32_t *experts, struct ms_router_scratch *scratch) {
    struct router *router = &routers->routers[layer];
    if (!__atomic_load_n(&router->known, __ATOMIC_ACQUIRE)) return 0;
    const struct ggml_tensor *weight = router->weight;
    int n_experts = (int)weight->ne[1];
    if (!ms_router_scratch_make(scratch, weight->ne[0], n_experts)) return 0;
    if (exact && !router->norm) {
        multiply(weight->type, weight->data, weight->nb[1], weight->ne[0], n_experts, state, scratch);
    } else {
        const uint8_t *rows = folded(routers, router);
        if (!rows) return 0;
        if (router->norm) normalise(router, state, weight->ne[0], scratch->normed);
        multiply(router->folded_type, rows, ggml_row_size(router->folded_type, weight->ne[0]), weight->ne[0], n_experts, router->norm ? scratch->normed : state, scratch);
    }
    return choose_by(router, scratch->scores, n, experts, scratch);
}

int ms_routers_choose_by(struct ms_routers *routers, int layer, float *logits, int n, int32_t *experts, struct ms_router_scratch *scratch) {
    const struct router *router = &routers->routers[layer];
    if (!ms_routers_rule_is_known(routers, layer) || !ms_router_scratch_make(scratch, 1, router->n_experts)) return 0;
    return choose_by(router, logits, n, experts, scratch);
}

int ms_routers_missing(struct ms_routers *routers, int layer, float *logits, const int32_t *chosen, int n) {
    const struct router *router = &routers->routers[layer];
    if (!ms_routers_rule_is_known(routers, layer)) return 0;
    gate(router, logits, router->n_experts);
    int missing = 0, each = router->n_groups > 1 ? router->n_experts / router->n_groups : router->n_experts;
    int before[n]; /* each of the chosen */
    memset(before, 0, sizeof before);
    for (int e = 0; e < router->n_experts; e++) {
        bool in_use = false; /* its group: which groups are best is not judged */
        for (int i = 0; i < n; i++) in_use = in_use || chosen[i] / each == e / each;
        for (int i = 0; i < n; i++) before[i] += in_use && logits[e] > logits[chosen[i]] + AS_GOOD * fabsf(logits[chosen[i]]);
    }
    for (int i = 0; i < n; i++) missing += before[i] >= n;
    return missing;
}
