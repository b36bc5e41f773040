#include "experts.h"

#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "ggml-cpu.h"
#include "head_routing.h"
#include "message.h"
#include "neuron_major.h"
#include "tensor.h"

/* ggml's MUL_MAT_ID keeps a table of (indices in the view) x (rows). Where it
 * would be larger than this the product is worked in rounds, whose gathered
 * rows stay within the same bound. */
#define WORK_BYTES ((size_t)8 << 20)
#define ROW_ENTRY_BYTES ((size_t)8)
#define LENT_NODES 8

struct ms_experts {
    ggml_backend_t cpu;
    int n_threads;
    ms_expert_lookup lookup, hook_lookup;
    struct ms_block *block;
    struct ms_prerouter *prerouter;
    struct ms_head_states *heads;
    /* where this context is in its evaluation */
    int last_step;          /* the one computed last; see step_of */
    int last_experts_layer; /* the layer whose experts were computed last */
    int64_t last_ns;        /* when the last graph of ours was done */
    uint32_t batch;         /* evaluations so far */
    int64_t batch_ns;       /* when this one came to us first */
    int64_t batch_wait_ns;
    int n_tokens;
    const struct ggml_tensor *state; /* before the attention that came last */
    /* scratch, grown as needed */
    int32_t *wanted, *indices, *index_of;
    int expert_capacity;
    int32_t *ids;
    size_t ids_capacity;
    float *rows;
    size_t rows_bytes;
    uint8_t *graph_memory;
    size_t graph_memory_bytes;
    struct ggml_tensor neuron_major; /* a node of our own operation, to copy that from */
};

/* ------------------------------------------------------------ life */

/* How ggml writes down an operation of ours is its own affair; so one is made for us. */
static bool make_neuron_major(struct ms_experts *experts) {
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() * 4, .no_alloc = true});
    if (!context) return false;
    struct ggml_tensor *argument = ggml_new_tensor_1d(context, GGML_TYPE_F32, 1);
    experts->neuron_major = *ggml_custom_4d(context, GGML_TYPE_F32, 1, 1, 1, 1, &argument, 1, ms_neuron_major_product, GGML_N_TASKS_MAX, NULL);
    ggml_free(context);
    return true;
}

struct ms_experts *ms_experts_new(ms_expert_lookup lookup, ms_expert_lookup hook_lookup) {
    struct ms_experts *experts = calloc(1, sizeof *experts);
    if (!experts) return NULL;
    experts->lookup = lookup;
    experts->hook_lookup = hook_lookup;
    experts->last_step = experts->last_experts_layer = INT_MAX;
    experts->prerouter = ms_prerouter_new();
    experts->heads = ms_head_states_new();
    experts->cpu = ggml_backend_cpu_init();
    experts->n_threads = GGML_DEFAULT_N_THREADS;
    experts->block = ms_block_new();
    experts->graph_memory_bytes = ggml_tensor_overhead() * 8 + ggml_graph_overhead_custom(16, false);
    experts->graph_memory = malloc(experts->graph_memory_bytes);
    if (experts->cpu && experts->block && experts->prerouter && experts->heads && experts->graph_memory && make_neuron_major(experts)) return experts;
    ms_experts_free(experts);
    return NULL;
}

void ms_experts_free(struct ms_experts *experts) {
    if (!experts) return;
    ms_block_free(experts->block);
    ms_prerouter_free(experts->prerouter);
    ms_head_states_free(experts->heads);
    if (experts->cpu) ggml_backend_free(experts->cpu);
    free(experts->wanted);
    free(experts->indices);
    free(experts->index_of);
    free(experts->ids);
    free(experts->rows);
    free(experts->graph_memory);
    free(experts);
}

void ms_experts_set_threads(struct ms_experts *experts, int n_threads) {
    experts->n_threads = n_threads;
    ggml_backend_cpu_set_n_threads(experts->cpu, n_threads);
}

void ms_experts_set_abort(struct ms_experts *experts, ggml_abort_callback callback, void *data) {
    ggml_backend_cpu_set_abort_callback(experts->cpu, callback, data);
}

static bool grow(void *buffer, size_t *capacity, size_t count, size_t each) {
    void **p = buffer;
    if (count <= *capacity) return true;
    void *larger = realloc(*p, count * each);
    if (!larger) return false;
    *p = larger;
    *capacity = count;
    return true;
}

static bool grow_for_layer(struct ms_experts *experts, int n_experts) {
    if (n_experts <= experts->expert_capacity) return true;
    size_t bytes = sizeof(int32_t) * (size_t)n_experts;
    int32_t *wanted = realloc(experts->wanted, bytes);
    if (wanted) experts->wanted = wanted;
    int32_t *indices = realloc(experts->indices, bytes);
    if (indices) experts->indices = indices;
    int32_t *index_of = realloc(experts->index_of, bytes);
    if (index_of) experts->index_of = index_of;
    if (!wanted || !indices || !index_of) return false;
    experts->expert_capacity = n_experts;
    return true;
}

/* ------------------------------------------------------------ where in an evaluation */

/* What of a layer comes to us, in this order. */
enum step_kind { STEP_NORM, STEP_ROUTER, STEP_EXPERTS, STEP_NONE };

struct step {
    enum step_kind kind;
    int layer;
};

/* What a node is of which layer: the norm before attention, the router, or a product with experts. */
static struct step step_of(const struct ms_experts *experts, const struct ggml_tensor *node) {
    const struct ms_expert_tensor *tensor = node->op == GGML_OP_MUL_MAT_ID ? experts->lookup(node->src[0])
                                            : node->op == GGML_OP_MUL     ? experts->hook_lookup(node->src[1])
                                            : node->op == GGML_OP_MUL_MAT ? experts->hook_lookup(node->src[0])
                                                                          : NULL;
    if (!tensor) return (struct step){STEP_NONE, 0};
    return (struct step){tensor->matrix == MS_WEIGHT_NORM ? STEP_NORM : tensor->matrix == MS_WEIGHT_ROUTER ? STEP_ROUTER : STEP_EXPERTS, tensor->layer};
}

static int number_of(struct step step) { return step.layer * STEP_NONE + (int)step.kind; }

/* Steps only ever come later in an evaluation, but for a router whose product and choice may be two graphs. */
static bool begins_batch(const struct ms_experts *experts, struct step step) {
    return number_of(step) < experts->last_step || (number_of(step) == experts->last_step && step.kind != STEP_ROUTER);
}

static void record(const struct ms_experts *experts, const struct ms_experts_model *model, enum ms_event_kind kind, int layer, int64_t begin, int64_t end) {
    if (!model->timeline) return;
    ms_event event = {.begin_ns = begin, .end_ns = end, .batch = experts->batch, .block = layer < 0 ? -1 : model->source->layers[layer].block, .expert = -1,
                      .tokens = (uint16_t)(experts->n_tokens < UINT16_MAX ? experts->n_tokens : UINT16_MAX), .kind = (uint8_t)kind};
    ms_timeline_add(model->timeline, &event);
}

static void arrive(struct ms_experts *experts, const struct ms_experts_model *model, struct step step, int n_tokens) {
    bool new_batch = begins_batch(experts, step);
    if (new_batch) {
        experts->batch++;
        experts->batch_ns = ms_now_ns();
        experts->batch_wait_ns = 0;
        experts->state = NULL;
        ms_head_routing_enter(experts->heads, model->heads, experts->prerouter, model->prerouter, n_tokens);
    }
    experts->n_tokens = n_tokens;
    experts->last_step = number_of(step);
    ms_routing_enter(model->routing, new_batch, n_tokens);
    if (step.kind != STEP_EXPERTS) return;
    model->store->enter(model->store, step.layer, step.layer <= experts->last_experts_layer);
    experts->last_experts_layer = step.layer;
}

/* ------------------------------------------------------------ which experts */

/* The expert tensor that a node multiplies by, or NULL if it is no such product. */
static const struct ms_expert_tensor *expert_product(const struct ms_experts *experts, const struct ggml_tensor *node) {
    return node->op == GGML_OP_MUL_MAT_ID ? experts->lookup(node->src[0]) : NULL;
}

/* Lists the distinct experts of `ids` in experts->wanted. -1: one is out of range. */
static int distinct_experts(struct ms_experts *experts, const struct ggml_tensor *ids, int n_experts) {
    int n = 0;
    for (int e = 0; e < n_experts; e++) experts->index_of[e] = -1;
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            int32_t e = ms_choice(ids, k, t);
            if (e < 0 || e >= n_experts) return -1;
            if (experts->index_of[e] >= 0) continue;
            experts->index_of[e] = n;
            experts->wanted[n++] = e;
        }
    return n;
}

/* ------------------------------------------------------------ lending */

/* The part of a view that spans the given indices: the shorter, the less ggml
 * has to look through. */
struct span {
    int32_t low, n;
};

static struct span span_of(const int32_t *indices, int n) {
    int32_t low = indices[0], high = indices[0];
    for (int i = 1; i < n; i++) {
        if (indices[i] < low) low = indices[i];
        if (indices[i] > high) high = indices[i];
    }
    return (struct span){low, high - low + 1};
}

static struct ggml_tensor view_as_weight(const struct ggml_tensor *weight, struct ms_view view, struct span span) {
    struct ggml_tensor lent = *weight;
    lent.data = view.data + (size_t)span.low * view.stride_bytes;
    lent.ne[2] = span.n;
    lent.nb[2] = view.stride_bytes;
    lent.nb[3] = view.stride_bytes * (size_t)span.n;
    lent.buffer = view.prototype ? view.prototype->buffer : NULL;
    lent.extra = view.prototype ? view.prototype->extra : NULL;
    if (view.neuron_major_type >= 0) { /* what llama.cpp was shown is the other way round, and of another type */
        lent.type = (enum ggml_type)view.neuron_major_type;
        lent.ne[0] = weight->ne[1];
        lent.ne[1] = weight->ne[0];
        lent.nb[0] = ggml_type_size(lent.type);
        lent.nb[1] = ggml_row_size(lent.type, lent.ne[0]);
    }
    return lent;
}

/* What a product is computed by: ggml's own operation, or ours. */
struct operation {
    enum ggml_op op;
    int32_t params[sizeof(((struct ggml_tensor *)0)->op_params) / sizeof(int32_t)];
};

static struct operation operation_of(const struct ggml_tensor *node) {
    struct operation operation = {.op = node->op};
    memcpy(operation.params, node->op_params, sizeof operation.params);
    return operation;
}

static void set_operation(struct ggml_tensor *node, const struct operation *operation) {
    node->op = operation->op;
    memcpy(node->op_params, operation->params, sizeof operation->params);
}

static struct operation product_operation(const struct ms_experts *experts, const struct ggml_tensor *node, struct ms_view view) {
    return operation_of(view.neuron_major_type >= 0 ? &experts->neuron_major : node);
}

/* Computes nodes [begin, end) as one graph on the private backend. */
static enum ggml_status compute_nodes(struct ms_experts *experts, struct ggml_cgraph *graph, int begin, int end, int64_t *compute_ns) {
    int64_t start = ms_now_ns();
    enum ggml_status status;
    if (begin == 0 && end == ggml_graph_n_nodes(graph)) {
        status = ggml_backend_graph_compute(experts->cpu, graph);
    } else {
        size_t n = (size_t)(end - begin);
        struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false), .no_alloc = true});
        if (!context) return GGML_STATUS_ALLOC_FAILED;
        struct ggml_cgraph *part = ggml_new_graph_custom(context, n, false);
        for (int i = begin; i < end; i++) ggml_graph_add_node(part, ggml_graph_node(graph, i));
        status = ggml_backend_graph_compute(experts->cpu, part);
        ggml_free(context);
    }
    *compute_ns += ms_now_ns() - start;
    return status;
}

/* ------------------------------------------------------------ nodes that are not products */

/* The order of experts that weights will be taken by, if the node is one and its layer is known. */
static int layer_of_order(const struct ms_experts *experts, const struct ggml_tensor *node, enum ms_scores *scores) {
    const struct ggml_tensor *weight = ms_router_of_order(node, scores);
    const struct ms_expert_tensor *tensor = weight ? experts->hook_lookup(weight) : NULL;
    return tensor ? tensor->layer : -1;
}

static void edit_choice(struct ms_experts *experts, const struct ms_experts_model *model, int layer, enum ms_scores scores, struct ggml_tensor *order) {
    int n = ms_experts_used(model->source, layer);
    arrive(experts, model, (struct step){STEP_ROUTER, layer}, (int)order->ne[1]);
    ms_routing_edit(model->routing, model->store, layer, order->src[0], scores, order, n < order->ne[0] ? n : (int)order->ne[0]); /* TOP_K has no more than it chose */
}

/* Tells who guesses of the state before attention, where the node is the norm of it. */
static void tell_state(struct ms_experts *experts, const struct ms_experts_model *model, const struct ggml_tensor *node) {
    struct step step = step_of(experts, node);
    const struct ggml_tensor *norm = step.kind == STEP_NORM ? node->src[0] : NULL;
    if (!norm || (norm->op != GGML_OP_RMS_NORM && norm->op != GGML_OP_NORM)) return;
    arrive(experts, model, step, (int)node->ne[1]);
    experts->state = norm->src[0];
    int64_t begin = ms_now_ns();
    ms_prerouter_before_attention(experts->prerouter, model->prerouter, step.layer, norm->src[0]);
    if (model->prerouter->predictors) record(experts, model, MS_EVENT_PREDICT, step.layer, begin, ms_now_ns());
}

/* The router's product of a layer that heads predicted: nodes [begin, i) before it, and what was said in its place. It
 * is computed itself only if there are rows of which nothing was said. */
static enum ggml_status compute_predicted(struct ms_experts *experts, const struct ms_experts_model *model, struct ggml_cgraph *graph, int begin, int i, int layer, bool all,
                                          int64_t *spent) {
    struct ggml_tensor *logits = ggml_graph_node(graph, i);
    int end = all ? i : i + 1;
    enum ggml_status status = end > begin ? compute_nodes(experts, graph, begin, end, spent) : GGML_STATUS_SUCCESS;
    if (status == GGML_STATUS_SUCCESS) ms_head_states_write(experts->heads, model->heads, layer, logits);
    return status;
}

/* Nodes without an expert product: a router and what it chooses, the sum at the end of a layer, the norm before the next. */
static enum ggml_status compute_others(struct ms_experts *experts, const struct ms_experts_model *model, struct ggml_cgraph *graph, int begin, int end,
                                       struct ms_experts_counters *counters) {
    bool edits = ms_routing_edits(model->routing);
    struct step router = {STEP_NONE, 0};
    int router_tokens = 0;
    int64_t begin_ns = ms_now_ns(), spent = 0;
    int first = begin;
    for (int i = begin; i < end; i++) {
        struct step step = step_of(experts, ggml_graph_node(graph, i));
        if (step.kind == STEP_ROUTER) {
            router = step;
            router_tokens = (int)ggml_graph_node(graph, i)->ne[1];
        }
        int predicted = step.kind == STEP_ROUTER ? ms_head_routing_predicted(experts->heads, model->heads, step.layer, router_tokens) : 0;
        if (predicted > 0) {
            enum ggml_status status = compute_predicted(experts, model, graph, first, i, step.layer, predicted == router_tokens, &spent);
            if (status != GGML_STATUS_SUCCESS) return status;
            first = i + 1;
            continue;
        }
        enum ms_scores scores;
        int layer = edits ? layer_of_order(experts, ggml_graph_node(graph, i), &scores) : -1;
        if (layer < 0 && step.kind != STEP_NORM && i + 1 < end) continue;
        enum ggml_status status = compute_nodes(experts, graph, first, i + 1, &spent);
        if (status != GGML_STATUS_SUCCESS) return status;
        first = i + 1;
        if (layer >= 0) edit_choice(experts, model, layer, scores, ggml_graph_node(graph, i));
        if (step.kind == STEP_NORM) tell_state(experts, model, ggml_graph_node(graph, i));
    }
    if (router.kind == STEP_NONE) {
        counters->compute_ns += spent;
        return GGML_STATUS_SUCCESS;
    }
    counters->router_ns += spent;
    if (begins_batch(experts, router)) arrive(experts, model, router, router_tokens); /* the norm before was not told of */
    record(experts, model, MS_EVENT_ROUTER, router.layer, begin_ns, ms_now_ns());
    return GGML_STATUS_SUCCESS;
}

struct loan {
    struct ggml_tensor *node, *weight, *ids;
    struct operation operation;
    struct ggml_tensor lent;
};

/* Computes nodes [begin, end) with every product on `layer` lent its view. */
static enum ggml_status compute_lent(struct ms_experts *experts, struct ms_store *store, struct ggml_cgraph *graph, int begin, int end, int layer,
                                     struct span span, struct ggml_tensor *ids, int64_t *compute_ns) {
    struct loan loans[LENT_NODES];
    int n = 0;
    for (int i = begin; i < end; i++) {
        struct ggml_tensor *node = ggml_graph_node(graph, i);
        const struct ms_expert_tensor *tensor = expert_product(experts, node);
        if (!tensor) continue;
        struct loan *loan = &loans[n++];
        loan->node = node;
        loan->weight = node->src[0];
        loan->ids = node->src[2];
        loan->operation = operation_of(node);
        struct ms_view view = store->view(store, layer, tensor->matrix);
        struct operation lent_operation = product_operation(experts, node, view);
        loan->lent = view_as_weight(loan->weight, view, span);
        node->src[0] = &loan->lent;
        node->src[2] = ids;
        set_operation(node, &lent_operation);
    }
    enum ggml_status status = compute_nodes(experts, graph, begin, end, compute_ns);
    while (n--) {
        loans[n].node->src[0] = loans[n].weight;
        loans[n].node->src[2] = loans[n].ids;
        set_operation(loans[n].node, &loans[n].operation);
    }
    return status;
}

/* Size of ggml's largest table for a layer: the plain kernels reserve a row for
 * every choice of every token, the interleaved ones a row for every token. */
static size_t table_bytes(struct ms_store *store, int layer, int n_matrices, size_t n_indices, const struct ggml_tensor *ids) {
    bool any_plain = false;
    for (int m = 0; m < n_matrices; m++) any_plain = any_plain || !store->view(store, layer, m).prototype;
    size_t rows = (size_t)ids->ne[1] * (any_plain ? (size_t)ids->ne[0] : 1);
    return n_indices * (rows + 1) * ROW_ENTRY_BYTES;
}

/* ------------------------------------------------------------ all at once */

static enum ggml_status compute_at_once(struct ms_experts *experts, struct ms_store *store, struct ggml_cgraph *graph, int begin, int end, int layer,
                                        const struct ggml_tensor *ids, struct span span, int64_t *compute_ns, char *err, size_t errlen) {
    size_t n = (size_t)(ids->ne[0] * ids->ne[1]);
    if (!grow(&experts->ids, &experts->ids_capacity, n, sizeof(int32_t))) {
        ms_fail(0, err, errlen, "out of memory for %zu expert indices", n);
        return GGML_STATUS_ALLOC_FAILED;
    }
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t k = 0; k < ids->ne[0]; k++)
            experts->ids[t * ids->ne[0] + k] = experts->indices[experts->index_of[ms_choice(ids, k, t)]] - span.low;
    struct ggml_tensor lent_ids = ms_tensor(GGML_TYPE_I32, experts->ids, ids->ne[0], ids->ne[1], 1);
    return compute_lent(experts, store, graph, begin, end, layer, span, &lent_ids, compute_ns);
}

/* ------------------------------------------------------------ in rounds */

/* One product for the experts in wanted[first, first+n): acquire, gather their
 * rows, multiply, scatter. */
static enum ggml_status compute_round(struct ms_experts *experts, struct ms_store *store, struct ggml_tensor *node, const struct ms_expert_tensor *tensor,
                                      int first, int n, int64_t *compute_ns, char *err, size_t errlen) {
    const struct ggml_tensor *x = node->src[1], *ids = node->src[2];
    int32_t *indices = experts->indices + first;
    if (store->acquire(store, tensor->layer, experts->wanted + first, n, indices, err, errlen) < 0) return GGML_STATUS_FAILED;
    struct span span = span_of(indices, n);
    enum ggml_status status = GGML_STATUS_ALLOC_FAILED;
    size_t n_rows = 0;
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            int32_t i = experts->index_of[ms_choice(ids, k, t)];
            n_rows += i >= first && i < first + n;
        }
    size_t columns = (size_t)x->ne[0], outputs = (size_t)node->ne[0];
    if (!grow(&experts->ids, &experts->ids_capacity, n_rows, sizeof(int32_t)) ||
        !grow(&experts->rows, &experts->rows_bytes, n_rows * (columns + outputs) * sizeof(float), 1)) {
        ms_fail(0, err, errlen, "out of memory for %zu rows of %zu floats", n_rows, columns + outputs);
        goto end;
    }
    float *gathered = experts->rows, *products = experts->rows + n_rows * columns;
    size_t row = 0;
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            int32_t i = experts->index_of[ms_choice(ids, k, t)];
            if (i < first || i >= first + n) continue;
            memcpy(gathered + row * columns, ms_row(x, k, t), columns * sizeof(float));
            experts->ids[row++] = experts->indices[i] - span.low;
        }
    struct ms_view view = store->view(store, tensor->layer, tensor->matrix);
    struct operation operation = product_operation(experts, node, view);
    struct ggml_tensor weight = view_as_weight(node->src[0], view, span);
    struct ggml_tensor input = ms_tensor(GGML_TYPE_F32, gathered, (int64_t)columns, 1, (int64_t)n_rows);
    struct ggml_tensor row_ids = ms_tensor(GGML_TYPE_I32, experts->ids, 1, (int64_t)n_rows, 1);
    struct ggml_tensor product = *node;
    set_operation(&product, &operation);
    for (int i = 0; i < 4; i++) {
        struct ggml_tensor shape = ms_tensor(GGML_TYPE_F32, products, (int64_t)outputs, 1, (int64_t)n_rows);
        product.ne[i] = shape.ne[i];
        product.nb[i] = shape.nb[i];
    }
    product.data = products;
    product.src[0] = &weight;
    product.src[1] = &input;
    product.src[2] = &row_ids;
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = experts->graph_memory_bytes, .mem_buffer = experts->graph_memory, .no_alloc = true});
    struct ggml_cgraph *graph = ggml_new_graph_custom(context, 1, false);
    ggml_graph_add_node(graph, &product);
    status = compute_nodes(experts, graph, 0, 1, compute_ns);
    ggml_free(context);
    row = 0;
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            int32_t i = experts->index_of[ms_choice(ids, k, t)];
            if (i < first || i >= first + n) continue;
            memcpy(ms_row(node, k, t), products + row++ * outputs, outputs * sizeof(float));
        }
end:
    store->release(store, tensor->layer, indices, n);
    return status;
}

static int32_t rows_of(const struct ms_experts *experts, const struct ggml_tensor *ids, int i) {
    int32_t rows = 0;
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t k = 0; k < ids->ne[0]; k++) rows += experts->index_of[ms_choice(ids, k, t)] == i;
    return rows;
}

/* Works one product in rounds of as many experts as the store holds and the
 * work table allows. */
static enum ggml_status compute_in_rounds(struct ms_experts *experts, struct ms_store *store, struct ggml_tensor *node, const struct ms_expert_tensor *tensor,
                                          int n_wanted, int64_t *compute_ns, char *err, size_t errlen) {
    int capacity = store->capacity(store, tensor->layer);
    size_t table_rows = WORK_BYTES / ROW_ENTRY_BYTES / (size_t)store->view(store, tensor->layer, tensor->matrix).n;
    size_t gathered_rows = WORK_BYTES / sizeof(float) / (size_t)(node->src[1]->ne[0] + node->ne[0]);
    size_t most_rows = table_rows < gathered_rows ? table_rows : gathered_rows;
    for (int first = 0; first < n_wanted;) {
        int n = 0;
        size_t rows = 0;
        while (first + n < n_wanted && n < capacity) {
            rows += (size_t)rows_of(experts, node->src[2], first + n);
            if (n && rows > most_rows) break;
            n++;
        }
        enum ggml_status status = compute_round(experts, store, node, tensor, first, n, compute_ns, err, errlen);
        if (status != GGML_STATUS_SUCCESS) return status;
        first += n;
    }
    return GGML_STATUS_SUCCESS;
}

/* ------------------------------------------------------------ a layer's run of nodes */

/* The nodes from begin on that belong to one layer and one choice of experts. */
static int run_end(const struct ms_experts *experts, struct ggml_cgraph *graph, int begin, const struct ms_expert_tensor *first) {
    const struct ggml_tensor *ids = ggml_graph_node(graph, begin)->src[2];
    int end = begin, n_products = 0;
    for (; end < ggml_graph_n_nodes(graph); end++) {
        struct ggml_tensor *node = ggml_graph_node(graph, end);
        const struct ms_expert_tensor *tensor = expert_product(experts, node);
        if (!tensor) continue;
        if (tensor->layer != first->layer || node->src[2] != ids || n_products == LENT_NODES) break;
        n_products++;
    }
    return end;
}

static bool uses_matrix(const struct ms_experts *experts, struct ggml_cgraph *graph, int begin, int end, int matrix) {
    for (int i = begin; i < end; i++) {
        struct ggml_tensor *node = ggml_graph_node(graph, i);
        const struct ms_expert_tensor *tensor = expert_product(experts, node);
        if (tensor && tensor->matrix == matrix) return true;
    }
    return false;
}

/* The nodes of a run one by one or a few together, with the products lent their experts. */
static enum ggml_status compute_run_lent(struct ms_experts *experts, const struct ms_experts_model *model, struct ggml_cgraph *graph, int begin, int end, int l, int n,
                                         struct ms_experts_counters *counters, char *err, size_t errlen) {
    const struct ms_layer *layer = &model->source->layers[l];
    const struct ggml_tensor *ids = ggml_graph_node(graph, begin)->src[2];
    struct ms_store *store = model->store;
    int64_t *compute_ns = &counters->compute_ns;
    if (n <= store->capacity(store, l)) {
        int64_t asked_ns = ms_now_ns();
        if (store->acquire(store, l, experts->wanted, n, experts->indices, err, errlen) < 0) return GGML_STATUS_FAILED;
        experts->batch_wait_ns += ms_now_ns() - asked_ns;
        struct span span = span_of(experts->indices, n);
        enum ggml_status status = GGML_STATUS_SUCCESS;
        bool fits = span.n <= layer->n_experts || table_bytes(store, l, layer->n_matrices, (size_t)span.n, ids) <= WORK_BYTES;
        if (fits) status = compute_at_once(experts, store, graph, begin, end, l, ids, span, compute_ns, err, errlen);
        store->release(store, l, experts->indices, n);
        if (fits) return status;
    }
    for (int i = begin; i < end; i++) {
        struct ggml_tensor *node = ggml_graph_node(graph, i);
        const struct ms_expert_tensor *product = expert_product(experts, node);
        enum ggml_status status = product ? compute_in_rounds(experts, store, node, product, n, compute_ns, err, errlen)
                                          : compute_nodes(experts, graph, i, i + 1, compute_ns);
        if (status != GGML_STATUS_SUCCESS) return status;
    }
    return GGML_STATUS_SUCCESS;
}

/* Is the run a block with a row kernel for every matrix? */
static bool is_block(const struct ms_experts *experts, const struct ms_experts_model *model, struct ggml_cgraph *graph, int begin, int end, struct ms_block_nodes *nodes) {
    if (!model->products || !ms_block_recognise(graph, begin, end, experts->lookup, nodes)) return false;
    for (int i = 0; i < nodes->n_first; i++)
        if (!ms_product_of(model->products, nodes->layer, nodes->first_matrix[i])) return false;
    return ms_product_of(model->products, nodes->layer, nodes->down_matrix) != NULL;
}

/* A product in these nodes that reads the state which enters a layer's experts; NULL: there is none. */
static const struct ggml_tensor *product_of_state(const struct ms_experts *experts, const struct ms_experts_model *model, struct ggml_cgraph *graph, int begin, int end) {
    for (int i = begin; i < end; i++) {
        const struct ms_expert_tensor *tensor = expert_product(experts, ggml_graph_node(graph, i));
        if (tensor && !strstr(model->source->layers[tensor->layer].matrices[tensor->matrix].name, "ffn_down_exps")) return ggml_graph_node(graph, i);
    }
    return NULL;
}

/* ------------------------------------------------------------ a whole layer */

/* What a layer chose, while it is computed. */
struct choice {
    struct ms_experts *experts;
    const struct ms_experts_model *model;
    int layer;
    const struct ggml_tensor *ids;
    int missing; /* experts that it should have been by what heads said */
};

/* Says what a layer chose to who guesses, as soon as its experts are on their way. */
static void tell_choice(void *context) {
    struct choice *choice = context;
    struct ms_experts *experts = choice->experts;
    const struct ms_experts_model *model = choice->model;
    int64_t begin = ms_now_ns();
    ms_routers_learn(model->prerouter->routers, choice->layer, choice->ids, experts->state);
    ms_prerouter_chosen(experts->prerouter, model->prerouter, choice->layer, choice->ids);
    choice->missing = ms_head_routing_tell(experts->heads, model->heads, experts->prerouter, model->prerouter, choice->layer, choice->ids);
    if (model->prerouter->predictors) record(experts, model, MS_EVENT_PREDICT, choice->layer, begin, ms_now_ns());
}

static bool begin_heads(struct ms_experts *experts, const struct ms_experts_model *model, struct ggml_cgraph *graph, int begin, int end, int layer, char *err, size_t errlen) {
    const struct ggml_tensor *product = model->heads ? product_of_state(experts, model, graph, begin, end) : NULL;
    return !product || ms_head_routing_begin(experts->heads, model->heads, model->prerouter, layer, product->src[1], product->src[2], experts->state, err, errlen);
}

static void share_heads(void *context) { ms_head_states_share(((const struct choice *)context)->experts->heads); }

static bool end_heads(const struct choice *choice, int n_threads, struct ms_experts_counters *counters, char *err, size_t errlen) {
    const struct ms_experts_model *model = choice->model;
    counters->dropped += (uint64_t)choice->missing;
    return ms_head_routing_end(choice->experts->heads, model->heads, model->prerouter, choice->layer, n_threads, &counters->heads_ns, &counters->heads_bytes, err, errlen);
}

static enum ggml_status compute_block(struct ms_experts *experts, const struct ms_experts_model *model, struct ggml_cgraph *graph, int end, const struct ms_block_nodes *nodes, int n,
                                      struct ms_experts_counters *counters, struct ms_experts_zeros *zeros, char *err, size_t errlen) {
    struct ms_block_result result;
    struct choice choice = {.experts = experts, .model = model, .layer = nodes->layer, .ids = nodes->ids};
    struct ms_block_meanwhile meanwhile = {.function = tell_choice, .share = model->heads ? share_heads : NULL, .context = &choice, .timeline = model->timeline, .batch = experts->batch};
    int64_t begin = ms_now_ns();
    enum ggml_status status =
        ms_block_compute(experts->block, experts->cpu, experts->n_threads, model->source, model->store, model->products, nodes, experts->wanted, n, &meanwhile, &result, err, errlen);
    if (status != GGML_STATUS_SUCCESS) return status;
    int64_t end_ns = ms_now_ns(), heads_ns = counters->heads_ns;
    if (!end_heads(&choice, experts->n_threads, counters, err, errlen)) return GGML_STATUS_FAILED;
    counters->dropped += result.dropped;
    counters->compute_ns += end_ns - begin - result.wait_ns - (counters->heads_ns - heads_ns);
    counters->wait_ns += result.wait_ns;
    experts->batch_wait_ns += result.wait_ns;
    record(experts, model, MS_EVENT_EXPERTS, nodes->layer, begin, end_ns);
    __atomic_fetch_add(&zeros[nodes->layer].zeros, result.zeros, __ATOMIC_RELAXED);
    __atomic_fetch_add(&zeros[nodes->layer].of, result.activations, __ATOMIC_RELAXED);
    return nodes->end < end ? compute_others(experts, model, graph, nodes->end, end, counters) : status;
}

static enum ggml_status compute_run(struct ms_experts *experts, const struct ms_experts_model *model, struct ggml_cgraph *graph, int begin, int end, int l,
                                    struct ms_experts_counters *counters, struct ms_experts_zeros *zeros, char *err, size_t errlen) {
    const struct ms_layer *layer = &model->source->layers[l];
    if (!grow_for_layer(experts, layer->n_experts)) {
        ms_fail(0, err, errlen, "out of memory for %d experts", layer->n_experts);
        return GGML_STATUS_ALLOC_FAILED;
    }
    int n = distinct_experts(experts, ggml_graph_node(graph, begin)->src[2], layer->n_experts);
    if (n < 0) {
        ms_fail(0, err, errlen, "block %d: the router chose an expert that does not exist (of %d); the model's metadata and tensors disagree", layer->block, layer->n_experts);
        return GGML_STATUS_FAILED;
    }
    if (n == 0) return compute_nodes(experts, graph, begin, end, &counters->compute_ns);
    bool whole = uses_matrix(experts, graph, begin, end, 0);
    if (!begin_heads(experts, model, graph, begin, end, l, err, errlen)) return GGML_STATUS_FAILED;
    struct ms_block_nodes nodes;
    if (is_block(experts, model, graph, begin, end, &nodes)) {
        counters->fused_blocks++;
        return compute_block(experts, model, graph, end, &nodes, n, counters, zeros, err, errlen);
    }
    counters->ggml_blocks += whole;
    struct choice choice = {.experts = experts, .model = model, .layer = l, .ids = ggml_graph_node(graph, begin)->src[2]};
    if (whole) tell_choice(&choice);
    if (model->heads) {
        share_heads(&choice);
        if (!end_heads(&choice, 1, counters, err, errlen)) return GGML_STATUS_FAILED;
    }
    return compute_run_lent(experts, model, graph, begin, end, l, n, counters, err, errlen);
}

/* ------------------------------------------------------------ a graph */

/* The layer of the first node of ours, and what it is. */
static struct step first_step(const struct ms_experts *experts, struct ggml_cgraph *graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        struct step step = step_of(experts, ggml_graph_node(graph, i));
        if (step.kind != STEP_NONE) return step;
    }
    return (struct step){STEP_NONE, 0};
}

/* What llama.cpp computed itself since our last graph: before a router or experts it is attention, mostly; before the
 * norm of a layer it is what ends a token, or shared experts. */
static void note_gap(struct ms_experts *experts, const struct ms_experts_model *model, struct step next, int64_t now, struct ms_experts_counters *counters) {
    if (!experts->last_ns || next.kind == STEP_NONE) return;
    bool attention = next.kind != STEP_NORM && !begins_batch(experts, next);
    if (attention) counters->attention_ns += now - experts->last_ns;
    record(experts, model, attention ? MS_EVENT_ATTENTION : MS_EVENT_OTHER, attention ? next.layer : -1, experts->last_ns, now);
}

static void end_token(struct ms_experts *experts, const struct ms_experts_model *model, int layer) {
    if (layer != model->last_layer || experts->n_tokens != 1) return;
    ms_prerouter_token(experts->prerouter, model->prerouter, ms_now_ns() - experts->batch_ns, experts->batch_wait_ns);
}

enum ggml_status ms_experts_compute(struct ms_experts *experts, const struct ms_experts_model *model, struct ggml_cgraph *graph, struct ms_experts_counters *counters,
                                    struct ms_experts_zeros *zeros, char *err, size_t errlen) {
    int n_nodes = ggml_graph_n_nodes(graph);
    if (!model) return compute_nodes(experts, graph, 0, n_nodes, &counters->compute_ns);
    note_gap(experts, model, first_step(experts, graph), ms_now_ns(), counters);
    for (int begin = 0; begin < n_nodes;) {
        struct ggml_tensor *node = ggml_graph_node(graph, begin);
        const struct ms_expert_tensor *tensor = expert_product(experts, node);
        int end = begin + 1;
        enum ggml_status status;
        if (tensor) {
            end = run_end(experts, graph, begin, tensor);
            bool whole = uses_matrix(experts, graph, begin, end, 0); /* what lies between its products may cut a layer into several runs */
            if (whole) {
                arrive(experts, model, (struct step){STEP_EXPERTS, tensor->layer}, (int)node->src[2]->ne[1]);
                if (tensor->layer == model->first_layer) counters->tokens += (uint64_t)node->src[2]->ne[1];
            }
            status = compute_run(experts, model, graph, begin, end, tensor->layer, counters, zeros, err, errlen);
            if (status == GGML_STATUS_SUCCESS && whole) end_token(experts, model, tensor->layer);
        } else {
            while (end < n_nodes && !expert_product(experts, ggml_graph_node(graph, end))) end++;
            status = compute_others(experts, model, graph, begin, end, counters);
        }
        if (status != GGML_STATUS_SUCCESS) return status;
        begin = end;
    }
    experts->last_ns = ms_now_ns();
    return GGML_STATUS_SUCCESS;
}
