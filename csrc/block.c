/* block.c - see block.h.
 *
 * What stays in memory after a prompt: a prompt wants nearly all experts of
 * every layer, one layer after the other, so that a plain LRU would end with
 * all experts of the last layers and none of the first. Instead each layer
 * keeps, of its experts, the ones that most tokens chose, as many as its fair
 * share of the memory; the others are given up first, and theirs is the room
 * into which the next layer is read ahead.
 *
 * Threads: pieces are taken by atomic counters, so a thread that the system
 * takes away holds up no more than its piece. A thread with nothing to do
 * sleeps in the store until bytes arrive; it spins only for a piece of work
 * that another thread is about to finish, and then lets others run.
 */
#include "block.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "experts.h"
#include "ggml-cpu.h"
#include "message.h"
#include "rows.h"
#include "tensor.h"
#include "timeline.h"

#define TILE_ROWS 64        /* tokens that go through an expert together: between this and twice as many */
#define TILES_A_THREAD 8    /* of which there must be so many for tokens to be divided, rather than rows */
#define LEAST_PART_ROWS 64  /* of a matrix, where rows are divided */
#define MULTIPLY_ROWS 128   /* rows of a matrix that stay in the cache while all activations of a tile pass */
#define ROW_ALIGNMENT 16    /* of parts: a multiple of every kernel's group */
/* Rows in a list are read at half the speed of rows one behind the other, and several activations share only the latter
 * (tools/measure/kernels.py). */
#define MOST_OPEN 0.45
#define SPINS 1000
#define CACHE_LINE 64
#define USAGE_TOKENS 32     /* a prompt of fewer tells little about which experts the next needs */
#define MOST_WASTE 0.01     /* of the reads ahead, as a share of the experts that a layer used */

/* ------------------------------------------------------------ memory */

struct arena {
    uint8_t *base;
    size_t capacity, used;
};

static bool arena_reset(struct arena *arena, size_t bytes) {
    arena->used = 0;
    if (bytes <= arena->capacity) return true;
    free(arena->base);
    arena->capacity = 0;
    arena->base = aligned_alloc(CACHE_LINE, (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (arena->base) arena->capacity = bytes;
    return arena->base != NULL;
}

static size_t padded(size_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

static void *take(struct arena *arena, size_t bytes) {
    void *memory = arena->base + arena->used;
    arena->used += padded(bytes);
    return memory;
}

/* ------------------------------------------------------------ a run */

struct row {
    int32_t choice, token;
};

/* An expert of this layer and the rows that chose it. */
struct entry {
    int32_t index; /* in the store, or -1 */
    int32_t expert;
    int n_rows, first_row; /* in run.rows */
    bool keep;
    /* tokens divided; under the run's mutex */
    int n_tiles, next_tile, done_tiles;
    /* rows divided; atomic */
    int next_first, done_first, activated, next_down;
    const void *quantised[2]; /* inputs for each first product */
};

/* What one thread has to itself. */
struct worker {
    struct ggml_threadpool *alone; /* of one thread: for ggml's operations on a few rows */
    struct arena scratch;
    uint8_t *graph_memory, *plan_memory;
    size_t plan_bytes;
    int64_t wait_ns;
    uint64_t zeros;
    bool is_first;
    /* in scratch */
    float *quantise_scratch, *multiply_scratch, *first[2], *rowwise[MS_BLOCK_ROW_NODES], *gathered, *product;
    void *quantised[2], *quantised_hidden;
    const float **activations;
    float **outputs;
    int32_t *ids, *active;
    float *active_values;
};

struct run {
    const struct ms_source *source;
    struct ms_store *store;
    const struct ms_products *products;
    const struct ms_block_nodes *nodes;
    const struct ms_block_meanwhile *meanwhile;
    const struct ms_product *first[2], *down;
    struct ms_view first_view[2], down_view;
    struct ggml_tensor input; /* nodes->input, or a copy where down would be written over it */
    int n_entries, n_rows;
    struct entry *entries;
    struct row *rows;
    float *weights; /* a copy of nodes->weights, [tokens][choices] */
    int32_t *asked, *given; /* for calls of the store: experts and their indices */
    bool by_rows;
    int first_parts, down_parts;
    float *first_out[2]; /* rows divided: [n_rows][rows of the product] */
    uint8_t *hidden_quantised;
    int32_t *active; /* neuron-major: [n_rows][neurons], and how many */
    float *active_values;
    int *n_active;
    pthread_mutex_t mutex;
    int32_t *ahead; /* experts of the next layer, the likeliest first */
    int n_ahead, next_ahead;
    int failed_entry; /* -1: none; atomic */
    bool failed;
    char *err;
    size_t errlen;
};

struct ms_block {
    struct run run;
    struct arena table, shared, ahead;
    int n_workers;
    struct worker *workers;
    int n_layers;
    int32_t **usage; /* per layer: how many tokens of the last prompt chose each expert; NULL before the first */
    struct ggml_context *context;
    struct ggml_cgraph *work, *work_and_sum;
    float dummy[2]; /* what the two operations give as their result */
};

/* ------------------------------------------------------------ recognising */

static bool is_view(const struct ggml_tensor *node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_NONE || node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

static const struct ggml_tensor *value(const struct ms_block_nodes *nodes, int i) { return i < nodes->n_first ? nodes->first[i] : nodes->rowwise[i - nodes->n_first]; }

/* Which of the values of a row (first products, then what comes of them) a tensor is or lies in; -1 if in none.
 * *offset: of it in a row of that value, in bytes. */
static int value_of(const struct ms_block_nodes *nodes, const struct ggml_tensor *tensor, size_t *offset) {
    for (int i = nodes->n_first + nodes->n_rowwise - 1; i >= 0; i--) {
        const struct ggml_tensor *v = value(nodes, i);
        *offset = 0;
        if (tensor == v) return i;
        if (!is_view(tensor) || tensor->view_src != v) continue;
        *offset = tensor->view_offs;
        bool within_rows = tensor->type == GGML_TYPE_F32 && tensor->nb[0] == sizeof(float) && tensor->nb[1] == v->nb[1] && tensor->nb[2] == v->nb[2] &&
                           tensor->ne[1] == v->ne[1] && tensor->ne[2] == v->ne[2] && tensor->ne[3] == 1 &&
                           tensor->view_offs + (size_t)tensor->ne[0] * sizeof(float) <= v->nb[1];
        return within_rows ? i : -1;
    }
    return -1;
}

/* Does the node compute each row from the same row of values, and from nothing else but the row's expert? */
static bool is_rowwise(const struct ms_block_nodes *nodes, const struct ggml_tensor *node) {
    size_t offset;
    if (node->type != GGML_TYPE_F32 || node->ne[1] != nodes->ids->ne[0] || node->ne[2] != nodes->ids->ne[1] || node->ne[3] != 1 || (node->flags & GGML_TENSOR_FLAG_OUTPUT)) return false;
    switch (node->op) {
        case GGML_OP_UNARY:
        case GGML_OP_CLAMP:
        case GGML_OP_SQR:
        case GGML_OP_SCALE: return value_of(nodes, node->src[0], &offset) >= 0;
        case GGML_OP_MUL: return value_of(nodes, node->src[0], &offset) >= 0 && value_of(nodes, node->src[1], &offset) >= 0 && ggml_are_same_shape(node->src[0], node->src[1]);
        case GGML_OP_GLU: return value_of(nodes, node->src[0], &offset) >= 0 && (!node->src[1] || value_of(nodes, node->src[1], &offset) >= 0);
        case GGML_OP_ADD_ID: return value_of(nodes, node->src[0], &offset) >= 0 && node->src[2] == nodes->ids && node->src[1]->type == GGML_TYPE_F32;
        default: return false;
    }
}

static bool gives_zeros(const struct ggml_tensor *node) {
    return (node->op == GGML_OP_GLU && ggml_get_glu_op(node) == GGML_GLU_OP_REGLU) || (node->op == GGML_OP_UNARY && ggml_get_unary_op(node) == GGML_UNARY_OP_RELU);
}

static bool is_product(const struct ms_block_nodes *nodes, const struct ggml_tensor *node) {
    return node->type == GGML_TYPE_F32 && node->src[2] == nodes->ids && node->nb[0] == sizeof(float) && node->src[1]->type == GGML_TYPE_F32 && node->src[1]->nb[0] == sizeof(float) &&
           !(node->flags & GGML_TENSOR_FLAG_OUTPUT);
}

static bool overlap(const struct ggml_tensor *a, const struct ggml_tensor *b) {
    const char *ab = a->data, *bb = b->data;
    return ab < bb + ggml_nbytes(b) && bb < ab + ggml_nbytes(a);
}

static int next_node(struct ggml_cgraph *graph, int i, int end) {
    while (i < end && is_view(ggml_graph_node(graph, i))) i++;
    return i;
}

/* The weighted sum that follows down: times the weights, then one choice added after the other. */
static void recognise_sum(struct ggml_cgraph *graph, int after_down, int end, struct ms_block_nodes *nodes) {
    const struct ggml_tensor *down = nodes->down;
    int64_t choices = nodes->ids->ne[0], tokens = nodes->ids->ne[1];
    int i = next_node(graph, after_down, end);
    struct ggml_tensor *weighted = i < end ? ggml_graph_node(graph, i) : NULL, *sum = NULL;
    if (!weighted || weighted->op != GGML_OP_MUL || weighted->src[0] != down || (weighted->flags & GGML_TENSOR_FLAG_OUTPUT)) return;
    struct ggml_tensor *weights = weighted->src[1];
    if (weights->type != GGML_TYPE_F32 || weights->ne[0] != 1 || weights->ne[1] != choices || weights->ne[2] != tokens || weights->ne[3] != 1) return;
    for (int64_t c = 1; c < choices; c++) {
        i = next_node(graph, i + 1, end);
        struct ggml_tensor *node = i < end ? ggml_graph_node(graph, i) : NULL;
        if (!node || node->op != GGML_OP_ADD || node->type != GGML_TYPE_F32) return;
        for (int s = 0; s < 2; s++) {
            if (c > 1 && s == 0) {
                if (node->src[0] != sum) return;
                continue;
            }
            const struct ggml_tensor *view = node->src[s];
            if (!is_view(view) || view->view_src != weighted || view->view_offs != (size_t)(c > 1 || s ? c : 0) * weighted->nb[1] || view->ne[0] != down->ne[0] ||
                view->ne[1] != tokens || view->ne[2] != 1 || view->nb[1] != weighted->nb[2])
                return;
        }
        if (c + 1 < choices && (node->flags & GGML_TENSOR_FLAG_OUTPUT)) return;
        sum = node;
    }
    if (!sum || sum->nb[0] != sizeof(float) || overlap(sum, down)) return;
    nodes->weights = weights;
    nodes->sum = sum;
    nodes->end = i + 1;
}

/* Does a node after down look at what is not kept (a LoRA of down does)? */
static bool is_used_again(struct ggml_cgraph *graph, int after_down, const struct ms_block_nodes *nodes) {
    for (int i = after_down; i < ggml_graph_n_nodes(graph); i++)
        for (int s = 0; s < GGML_MAX_SRC; s++) {
            const struct ggml_tensor *source = ggml_graph_node(graph, i)->src[s];
            for (int v = 0; source && v < nodes->n_first + nodes->n_rowwise; v++)
                if (source == value(nodes, v) || source->view_src == value(nodes, v)) return true;
        }
    return false;
}

bool ms_block_recognise(struct ggml_cgraph *graph, int begin, int end, ms_expert_lookup lookup, struct ms_block_nodes *nodes) {
    struct ggml_tensor *start = ggml_graph_node(graph, begin);
    *nodes = (struct ms_block_nodes){.layer = lookup(start->src[0])->layer, .ids = start->src[2], .input = start->src[1], .gate = -1};
    for (int i = begin; i < end; i++) {
        struct ggml_tensor *node = ggml_graph_node(graph, i);
        if (is_view(node)) continue;
        if (node->op != GGML_OP_MUL_MAT_ID) {
            if (nodes->n_rowwise == MS_BLOCK_ROW_NODES || !is_rowwise(nodes, node)) return false;
            nodes->zeros = nodes->zeros || gives_zeros(node);
            nodes->rowwise[nodes->n_rowwise++] = node;
            continue;
        }
        const struct ms_expert_tensor *tensor = lookup(node->src[0]);
        if (!tensor || !is_product(nodes, node)) return false;
        if (node->src[1] == nodes->input) {
            if (nodes->n_first == 2) return false;
            nodes->first_matrix[nodes->n_first] = tensor->matrix;
            nodes->first[nodes->n_first++] = node;
            continue;
        }
        size_t offset;
        int hidden = value_of(nodes, node->src[1], &offset);
        if (nodes->n_rowwise == 0 || hidden != nodes->n_first + nodes->n_rowwise - 1 || node->src[1] != nodes->rowwise[nodes->n_rowwise - 1]) return false;
        nodes->down = node;
        nodes->down_matrix = tensor->matrix;
        nodes->end = i + 1;
        if (i + 1 == ggml_graph_n_nodes(graph)) return false; /* cut off here by who looks at down; perhaps also at what it is made of */
        if (is_used_again(graph, i + 1, nodes)) return false;
        const struct ggml_tensor *glu = nodes->rowwise[0];
        if (nodes->n_rowwise == 1 && nodes->n_first == 2 && glu->op == GGML_OP_GLU && gives_zeros(glu) && glu->src[1])
            nodes->gate = glu->src[0] == nodes->first[0] && glu->src[1] == nodes->first[1] ? 0 : glu->src[0] == nodes->first[1] && glu->src[1] == nodes->first[0] ? 1 : -1;
        recognise_sum(graph, i + 1, end, nodes);
        return true;
    }
    return false;
}

/* ------------------------------------------------------------ ggml on a few rows, on this thread */

/* n rows as graph nodes have them, of one choice. */
static struct ggml_tensor tensor_of_rows(float *data, int64_t columns, int n) { return ms_tensor(GGML_TYPE_F32, data, columns, 1, n); }

/* Some columns of these rows. */
static struct ggml_tensor view_of_rows(const struct ggml_tensor *rows, size_t offset, int64_t columns) {
    struct ggml_tensor view = *rows;
    view.op = GGML_OP_NONE;
    view.data = (char *)rows->data + offset;
    view.ne[0] = columns;
    return view;
}

static bool compute_alone(struct worker *worker, struct ggml_tensor *nodes, int n) {
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() + ggml_graph_overhead_custom(MS_BLOCK_ROW_NODES, false),
                                                                      .mem_buffer = worker->graph_memory, .no_alloc = true});
    if (!context) return false;
    struct ggml_cgraph *graph = ggml_new_graph_custom(context, MS_BLOCK_ROW_NODES, false);
    for (int i = 0; i < n; i++) {
        nodes[i].flags |= GGML_TENSOR_FLAG_COMPUTE;
        ggml_graph_add_node(graph, &nodes[i]);
    }
    struct ggml_cplan plan = ggml_graph_plan(graph, 1, worker->alone);
    if (plan.work_size > worker->plan_bytes) {
        free(worker->plan_memory);
        worker->plan_memory = malloc(plan.work_size);
        worker->plan_bytes = worker->plan_memory ? plan.work_size : 0;
    }
    plan.work_data = worker->plan_memory;
    bool done = worker->plan_bytes >= plan.work_size && ggml_graph_compute(graph, &plan) == GGML_STATUS_SUCCESS;
    ggml_free(context);
    return done;
}

static uint64_t count_zeros(const float *values, size_t n) {
    uint64_t zeros = 0;
    for (size_t i = 0; i < n; i++) zeros += values[i] == 0.0f;
    return zeros;
}

/* ReGLU as ggml has it: not worth a graph of its own for rows that are mostly zero. */
static void open_gates(const struct run *run, int n, float *const *first, float *hidden) {
    const float *gate = first[run->nodes->gate], *up = first[1 - run->nodes->gate];
    for (size_t i = 0; i < (size_t)n * (size_t)run->down->columns; i++) hidden[i] = gate[i] > 0.0f ? gate[i] * up[i] : 0.0f;
}

/* The same for any nodes: by ggml. */
static bool compute_rowwise(const struct ms_block_nodes *nodes, struct worker *worker, int32_t expert, int n, float *const *first) {
    struct ggml_tensor values[2 + MS_BLOCK_ROW_NODES], views[3 * MS_BLOCK_ROW_NODES];
    struct ggml_tensor ids = ms_tensor(GGML_TYPE_I32, worker->ids, 1, n, 1);
    int n_views = 0;
    for (int i = 0; i < n; i++) worker->ids[i] = expert;
    for (int i = 0; i < nodes->n_first; i++) values[i] = tensor_of_rows(first[i], nodes->first[i]->ne[0], n);
    for (int i = 0; i < nodes->n_rowwise; i++) {
        const struct ggml_tensor *node = nodes->rowwise[i];
        struct ggml_tensor *copy = &values[nodes->n_first + i];
        *copy = tensor_of_rows(worker->rowwise[i], node->ne[0], n);
        copy->op = node->op;
        memcpy(copy->op_params, node->op_params, sizeof copy->op_params);
        for (int s = 0; s < GGML_MAX_SRC && node->src[s]; s++) {
            if (node->op == GGML_OP_ADD_ID && s > 0) {
                copy->src[s] = s == 1 ? node->src[1] : &ids;
                continue;
            }
            size_t offset;
            int v = value_of(nodes, node->src[s], &offset);
            if (v < 0) continue; /* recognised, so not of a row: there are none */
            copy->src[s] = &values[v];
            if (node->src[s] == value(nodes, v)) continue;
            views[n_views] = view_of_rows(&values[v], offset, node->src[s]->ne[0]);
            copy->src[s] = &views[n_views++];
        }
    }
    return compute_alone(worker, values + nodes->n_first, nodes->n_rowwise);
}

/* What lies between the first products and down, for n rows of one expert. first[i]: [n][rows of that product].
 * Returns [n][columns of down], in the worker's scratch; NULL: out of memory. */
static const float *activate(const struct run *run, struct worker *worker, int32_t expert, int n, float *const *first) {
    const struct ms_block_nodes *nodes = run->nodes;
    float *hidden = worker->rowwise[nodes->n_rowwise - 1];
    if (nodes->gate >= 0) open_gates(run, n, first, hidden);
    else if (!compute_rowwise(nodes, worker, expert, n, first)) return NULL;
    if (nodes->zeros) worker->zeros += count_zeros(hidden, (size_t)n * (size_t)run->down->columns);
    return hidden;
}

/* A product that no row kernel reproduces, by ggml's own MUL_MAT_ID of one expert. */
static bool multiply_by_ggml(struct worker *worker, const struct ms_product *product, const struct ggml_tensor *node, uint8_t *matrix, const float *const *activations, int n, float *const *outputs) {
    size_t columns = (size_t)product->columns, rows = (size_t)product->rows;
    struct ggml_tensor weight = ms_tensor(product->type, matrix, product->columns, product->rows, 1);
    weight.buffer = product->prototype ? product->prototype->buffer : NULL;
    weight.extra = product->prototype ? product->prototype->extra : NULL;
    for (int i = 0; i < n; i++) memcpy(worker->gathered + (size_t)i * columns, activations[i], columns * sizeof(float));
    struct ggml_tensor input = tensor_of_rows(worker->gathered, product->columns, n);
    struct ggml_tensor ids = ms_tensor(GGML_TYPE_I32, worker->ids, 1, n, 1);
    memset(worker->ids, 0, (size_t)n * sizeof(int32_t));
    struct ggml_tensor result = tensor_of_rows(worker->product, product->rows, n);
    result.op = GGML_OP_MUL_MAT_ID;
    memcpy(result.op_params, node->op_params, sizeof result.op_params);
    result.src[0] = &weight;
    result.src[1] = &input;
    result.src[2] = &ids;
    if (!compute_alone(worker, &result, 1)) return false;
    for (int i = 0; i < n; i++) memcpy(outputs[i], worker->product + (size_t)i * rows, rows * sizeof(float));
    return true;
}

/* ------------------------------------------------------------ pieces of both ways */

static uint8_t *bytes_of(struct ms_view view, int32_t index) { return view.data + (size_t)index * view.stride_bytes; }

static const float *input_row(const struct run *run, struct row row) { return ms_row(&run->input, row.choice, row.token); }

static float *output_row(const struct run *run, struct row row) { return ms_row(run->nodes->down, row.choice, row.token); }

static int list_active(const float *values, int64_t n, int32_t *active, float *active_values) {
    int n_active = 0;
    for (int64_t i = 0; i < n; i++) {
        active[n_active] = (int32_t)i;
        active_values[n_active] = values[i];
        n_active += values[i] != 0.0f;
    }
    return n_active;
}

/* The rows of gate, and of up only those whose gate opens: behind ReGLU the others are nothing. */
static void multiply_gated(const struct run *run, struct worker *worker, const struct entry *entry, const void *const *quantised, int64_t first, int64_t n_rows, int n,
                           float *const *gate_out, float *const *up_out) {
    int g = run->nodes->gate, u = 1 - g;
    const struct ms_product *gate = run->first[g], *up = run->first[u];
    ms_product_multiply(gate, bytes_of(run->first_view[g], entry->index), first, n_rows, quantised[g], n, gate_out, worker->multiply_scratch);
    int64_t all_open = 0;
    for (int a = 0; a < n; a++)
        for (int64_t i = 0; i < n_rows; i++) all_open += gate_out[a][i] > 0.0f;
    if (all_open > MOST_OPEN * (double)(n * n_rows)) {
        ms_product_multiply(up, bytes_of(run->first_view[u], entry->index), first, n_rows, quantised[u], n, up_out, worker->multiply_scratch);
        return;
    }
    for (int a = 0; a < n; a++) {
        int open = 0;
        for (int64_t i = 0; i < n_rows; i++) {
            worker->active[open] = (int32_t)(first + i);
            open += gate_out[a][i] > 0.0f;
        }
        ms_rows_dot(up->type, up->columns, bytes_of(run->first_view[u], entry->index), worker->active, 0, open, (const uint8_t *)quantised[u] + (size_t)a * up->activation_bytes,
                    up->activation_bytes, 1, worker->active_values, 0);
        memset(up_out[a], 0, (size_t)n_rows * sizeof(float));
        for (int i = 0; i < open; i++) up_out[a][worker->active[i] - first] = worker->active_values[i];
    }
}

static bool may_skip_rows(const struct run *run, int n) {
    int g = run->nodes->gate;
    if (g < 0 || (n > 1 && (run->first[0]->by_ggml || run->first[1]->by_ggml))) return false;
    return !run->first[1 - g]->prototype;
}

static void fail(struct run *run, int entry) {
    if (entry >= 0) __atomic_store_n(&run->failed_entry, entry, __ATOMIC_RELAXED);
    __atomic_store_n(&run->failed, true, __ATOMIC_RELEASE);
    run->store->release(run->store, run->nodes->layer, NULL, 0); /* wakes who sleeps */
}

static bool has_failed(const struct run *run) { return __atomic_load_n(&run->failed, __ATOMIC_ACQUIRE); }

static void sleep_for_event(const struct run *run, struct worker *worker, uint64_t seen) {
    int64_t begin = ms_now_ns();
    run->store->wait(run->store, seen);
    int64_t end = ms_now_ns();
    worker->wait_ns += end - begin;
    if (!worker->is_first || !run->meanwhile->timeline) return;
    ms_event event = {.begin_ns = begin, .end_ns = end, .batch = run->meanwhile->batch, .block = run->source->layers[run->nodes->layer].block, .expert = -1,
                      .tokens = (uint16_t)run->nodes->ids->ne[1], .kind = MS_EVENT_WAIT};
    ms_timeline_add(run->meanwhile->timeline, &event);
}

static void spin(int *spins) {
    if (++*spins > SPINS) {
        sched_yield();
        return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ------------------------------------------------------------ rows divided */

static int64_t part_begin(int64_t rows, int part, int n_parts, int64_t alignment) { return part == n_parts ? rows : rows * part / n_parts / alignment * alignment; }

static void first_part(const struct run *run, struct worker *worker, const struct entry *entry, int part) {
    bool gated = may_skip_rows(run, entry->n_rows);
    float **outputs[2] = {worker->outputs, worker->outputs + entry->n_rows};
    int64_t begin = 0, end = 0;
    for (int i = 0; i < run->nodes->n_first; i++) {
        int64_t rows = run->first[i]->rows;
        begin = part_begin(rows, part, run->first_parts, ROW_ALIGNMENT);
        end = part_begin(rows, part + 1, run->first_parts, ROW_ALIGNMENT);
        for (int r = 0; r < entry->n_rows; r++) outputs[i][r] = run->first_out[i] + (size_t)(entry->first_row + r) * (size_t)rows + begin;
        if (!gated && end > begin)
            ms_product_multiply(run->first[i], bytes_of(run->first_view[i], entry->index), begin, end - begin, entry->quantised[i], entry->n_rows, outputs[i], worker->multiply_scratch);
    }
    if (gated && end > begin) multiply_gated(run, worker, entry, entry->quantised, begin, end - begin, entry->n_rows, outputs[run->nodes->gate], outputs[1 - run->nodes->gate]);
}

/* Gate and up of an expert are done: what they make of its rows, ready for down. */
static bool activate_entry(struct run *run, struct worker *worker, struct entry *entry) {
    float *first[2];
    for (int i = 0; i < run->nodes->n_first; i++) first[i] = run->first_out[i] + (size_t)entry->first_row * (size_t)run->first[i]->rows;
    const float *hidden = activate(run, worker, entry->expert, entry->n_rows, first);
    if (!hidden) return false;
    size_t neurons = (size_t)run->down->columns;
    if (run->down->neuron_major) {
        for (int r = 0; r < entry->n_rows; r++) {
            size_t at = (size_t)(entry->first_row + r);
            run->n_active[at] = list_active(hidden + (size_t)r * neurons, (int64_t)neurons, run->active + at * neurons, run->active_values + at * neurons);
        }
    } else {
        for (int r = 0; r < entry->n_rows; r++) worker->activations[r] = hidden + (size_t)r * neurons;
        ms_product_quantise(run->down, worker->activations, entry->n_rows, run->hidden_quantised + (size_t)entry->first_row * run->down->activation_bytes, worker->quantise_scratch);
    }
    __atomic_store_n(&entry->activated, 1, __ATOMIC_RELEASE);
    return true;
}

static void down_part(const struct run *run, struct worker *worker, const struct entry *entry, int part) {
    const struct ms_product *down = run->down;
    int64_t alignment = down->neuron_major ? ggml_blck_size(down->type) > ROW_ALIGNMENT ? ggml_blck_size(down->type) : ROW_ALIGNMENT : ROW_ALIGNMENT;
    int64_t begin = part_begin(down->rows, part, run->down_parts, alignment), end = part_begin(down->rows, part + 1, run->down_parts, alignment);
    if (end <= begin) return;
    uint8_t *matrix = bytes_of(run->down_view, entry->index);
    for (int r = 0; r < entry->n_rows; r++) {
        size_t at = (size_t)(entry->first_row + r);
        float *out = output_row(run, run->rows[at]);
        worker->outputs[r] = out + begin;
        if (!down->neuron_major) continue;
        memset(out + begin, 0, (size_t)(end - begin) * sizeof(float));
        ms_rows_add(down->type, matrix, down->rows, run->active + at * (size_t)down->columns, run->active_values + at * (size_t)down->columns, run->n_active[at], begin, end, out);
    }
    if (!down->neuron_major)
        ms_product_multiply(down, matrix, begin, end - begin, run->hidden_quantised + (size_t)entry->first_row * down->activation_bytes, entry->n_rows, worker->outputs, worker->multiply_scratch);
}

static int take_part(int *next, int n) {
    if (__atomic_load_n(next, __ATOMIC_RELAXED) >= n) return n;
    return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
}

static void work_by_rows(struct run *run, struct worker *worker) {
    struct ms_store *store = run->store;
    for (int spins = 0;;) {
        uint64_t seen = store->events(store);
        bool worked = false, missing = false, unfinished = false;
        for (int e = 0; e < run->n_entries && !has_failed(run); e++) {
            struct entry *entry = &run->entries[e];
            if (__atomic_load_n(&entry->next_first, __ATOMIC_RELAXED) >= run->first_parts) continue;
            int presence = store->presence(store, run->nodes->layer, entry->index);
            if (presence < 0) fail(run, e);
            missing = missing || presence == 0;
            for (int part; presence > 0 && (part = take_part(&entry->next_first, run->first_parts)) < run->first_parts;) {
                first_part(run, worker, entry, part);
                worked = true;
                if (__atomic_add_fetch(&entry->done_first, 1, __ATOMIC_ACQ_REL) == run->first_parts && !activate_entry(run, worker, entry)) fail(run, -1);
            }
        }
        for (int e = 0; e < run->n_entries && !has_failed(run); e++) {
            struct entry *entry = &run->entries[e];
            if (__atomic_load_n(&entry->next_down, __ATOMIC_RELAXED) >= run->down_parts) continue;
            if (!__atomic_load_n(&entry->activated, __ATOMIC_ACQUIRE)) {
                unfinished = unfinished || __atomic_load_n(&entry->next_first, __ATOMIC_RELAXED) >= run->first_parts;
                continue;
            }
            for (int part; (part = take_part(&entry->next_down, run->down_parts)) < run->down_parts;) {
                down_part(run, worker, entry, part);
                worked = true;
            }
        }
        if (has_failed(run)) return;
        if (worked) spins = 0;
        else if (unfinished) spin(&spins);
        else if (missing) sleep_for_event(run, worker, seen);
        else return;
    }
}

/* ------------------------------------------------------------ the next layer of a prompt */

static int by_falling_use(const void *a, const void *b) {
    const int32_t *x = a, *y = b;
    return x[1] != y[1] ? (x[1] < y[1] ? 1 : -1) : (x[0] > y[0]) - (x[0] < y[0]);
}

/* A prompt needs nearly all experts of the next layer too. So many are asked for that, at the share that this layer
 * used, few are read in vain; the ones that the last prompt used most come first. */
static void list_ahead(struct ms_block *block) {
    struct run *run = &block->run;
    int next = run->nodes->layer + 1;
    if (next >= run->source->n_layers || run->n_entries < 2) return;
    if (!ms_product_of(run->products, next, 0)) return; /* in the file, but llama.cpp did not load it */
    int n_experts = run->source->layers[next].n_experts, of = run->source->layers[run->nodes->layer].n_experts, n = 0;
    double unused = 1.0 - (double)run->n_entries / of;
    int most = run->store->capacity(run->store, next) / 2;
    if (unused > 0 && most > (int)(MOST_WASTE * run->n_entries / unused)) most = (int)(MOST_WASTE * run->n_entries / unused);
    if (most < 1 || !arena_reset(&block->ahead, (size_t)n_experts * 3 * sizeof(int32_t) + 2 * CACHE_LINE)) return;
    int32_t(*candidates)[2] = take(&block->ahead, (size_t)n_experts * sizeof *candidates);
    run->ahead = take(&block->ahead, (size_t)n_experts * sizeof *run->ahead);
    const int32_t *usage = block->usage[next];
    for (int e = 0; e < n_experts; e++)
        if (!usage || usage[e]) {
            candidates[n][0] = e;
            candidates[n++][1] = usage ? usage[e] : 1;
        }
    qsort(candidates, (size_t)n, sizeof *candidates, by_falling_use);
    run->n_ahead = n < most ? n : most;
    for (int i = 0; i < run->n_ahead; i++) run->ahead[i] = candidates[i][0];
}

/* Asks for as many as this layer's finished experts leave room for. Mutex held. */
static void read_ahead(struct ms_block *block) {
    struct run *run = &block->run;
    if (run->next_ahead == run->n_ahead) return;
    run->next_ahead += run->store->prefetch(run->store, run->nodes->layer + 1, run->ahead + run->next_ahead, run->n_ahead - run->next_ahead);
}

static void remember_usage(struct ms_block *block) {
    const struct run *run = &block->run;
    if (run->nodes->ids->ne[1] < USAGE_TOKENS) return;
    int32_t **usage = &block->usage[run->nodes->layer];
    if (!*usage) *usage = malloc(sizeof(int32_t) * (size_t)run->source->layers[run->nodes->layer].n_experts);
    if (!*usage) return;
    memset(*usage, 0, sizeof(int32_t) * (size_t)run->source->layers[run->nodes->layer].n_experts);
    for (int e = 0; e < run->n_entries; e++) (*usage)[run->entries[e].expert] = run->entries[e].n_rows;
}

/* ------------------------------------------------------------ tokens divided */

static bool multiply_tile(struct worker *worker, const struct ms_product *product, const struct ggml_tensor *node, uint8_t *matrix, const void *quantised,
                          const float *const *activations, int n, float *const *outputs) {
    if (product->by_ggml && n > 1) return multiply_by_ggml(worker, product, node, matrix, activations, n, outputs);
    float *parts[2 * TILE_ROWS];
    for (int64_t first = 0; first < product->rows; first += MULTIPLY_ROWS) {
        int64_t rows = first + MULTIPLY_ROWS < product->rows ? MULTIPLY_ROWS : product->rows - first;
        for (int i = 0; i < n; i++) parts[i] = outputs[i] + first;
        ms_product_multiply(product, matrix, first, rows, quantised, n, parts, worker->multiply_scratch);
    }
    return true;
}

static void multiply_gated_tile(const struct run *run, struct worker *worker, const struct entry *entry, const void *const *quantised, int n, float **const *outputs) {
    int g = run->nodes->gate;
    float *gate[2 * TILE_ROWS], *up[2 * TILE_ROWS];
    for (int64_t first = 0; first < run->first[g]->rows; first += MULTIPLY_ROWS) {
        int64_t rows = first + MULTIPLY_ROWS < run->first[g]->rows ? MULTIPLY_ROWS : run->first[g]->rows - first;
        for (int i = 0; i < n; i++) {
            gate[i] = outputs[g][i] + first;
            up[i] = outputs[1 - g][i] + first;
        }
        multiply_gated(run, worker, entry, quantised, first, rows, n, gate, up);
    }
}

static void add_neurons(const struct run *run, struct worker *worker, const struct entry *entry, const struct row *rows, int n, const float *hidden) {
    const struct ms_product *down = run->down;
    size_t width = (size_t)down->rows;
    memset(worker->product, 0, (size_t)n * width * sizeof(float));
    ms_rows_add_tokens(down->type, bytes_of(run->down_view, entry->index), down->rows, (int)down->columns, hidden, (size_t)down->columns, n, 0, down->rows, worker->product, width);
    for (int r = 0; r < n; r++) memcpy(output_row(run, rows[r]), worker->product + (size_t)r * width, width * sizeof(float));
}

/* Some tokens of one expert, from its input to its output. */
static bool compute_tile(const struct run *run, struct worker *worker, const struct entry *entry, int tile) {
    const struct ms_block_nodes *nodes = run->nodes;
    int begin = entry->n_rows * tile / entry->n_tiles, n = entry->n_rows * (tile + 1) / entry->n_tiles - begin;
    const struct row *rows = run->rows + entry->first_row + begin;
    const void *quantised[2];
    float **outputs[2] = {worker->outputs, worker->outputs + n};
    for (int r = 0; r < n; r++) worker->activations[r] = input_row(run, rows[r]);
    for (int i = 0; i < nodes->n_first; i++) {
        const struct ms_product *product = run->first[i];
        quantised[i] = worker->quantised[i];
        if (i > 0 && ms_product_same_activations(product, run->first[0])) quantised[i] = quantised[0];
        else ms_product_quantise(product, worker->activations, n, worker->quantised[i], worker->quantise_scratch);
        for (int r = 0; r < n; r++) outputs[i][r] = worker->first[i] + (size_t)r * (size_t)product->rows;
    }
    if (may_skip_rows(run, n)) multiply_gated_tile(run, worker, entry, quantised, n, outputs);
    else
        for (int i = 0; i < nodes->n_first; i++)
            if (!multiply_tile(worker, run->first[i], nodes->first[i], bytes_of(run->first_view[i], entry->index), quantised[i], worker->activations, n, outputs[i])) return false;
    const float *hidden = activate(run, worker, entry->expert, n, worker->first);
    if (!hidden) return false;
    if (run->down->neuron_major) {
        add_neurons(run, worker, entry, rows, n, hidden);
        return true;
    }
    for (int r = 0; r < n; r++) {
        worker->activations[r] = hidden + (size_t)r * (size_t)run->down->columns;
        worker->outputs[r] = output_row(run, rows[r]);
    }
    ms_product_quantise(run->down, worker->activations, n, worker->quantised_hidden, worker->quantise_scratch);
    return multiply_tile(worker, run->down, nodes->down, bytes_of(run->down_view, entry->index), worker->quantised_hidden, worker->activations, n, worker->outputs);
}

static void release_entry(const struct run *run, struct entry *entry) {
    if (!entry->keep) run->store->cool(run->store, run->nodes->layer, &entry->index, 1);
    run->store->release(run->store, run->nodes->layer, &entry->index, 1);
}

/* Pins what there is room for, or all. While some are held the others wait for room that these leave: what other layers
 * keep is given up only where nothing could be computed otherwise. Mutex held. */
static int begin_more(struct run *run, bool all) {
    int n = 0, held = 0;
    for (int e = 0; e < run->n_entries; e++)
        if (run->entries[e].index < 0) {
            run->asked[n] = run->entries[e].expert;
            run->given[n++] = -1;
        } else {
            held += run->entries[e].done_tiles < run->entries[e].n_tiles;
        }
    enum ms_room room = all ? MS_ROOM_ALL : held ? MS_ROOM_SPARE : MS_ROOM_ANY;
    int pinned = run->store->begin(run->store, run->nodes->layer, run->asked, n, room, run->given, run->err, run->errlen);
    if (pinned < 0) fail(run, -1);
    for (int e = 0, i = 0; e < run->n_entries && i < n; e++)
        if (run->entries[e].index < 0) run->entries[e].index = run->given[i++];
    return pinned;
}

/* An entry that is there and has a tile nobody has taken; NULL if there is none. Mutex held. */
static struct entry *next_entry(struct run *run, bool *all_taken, bool *all_begun) {
    struct entry *found = NULL;
    *all_taken = *all_begun = true;
    for (int e = 0; e < run->n_entries && !found; e++) {
        struct entry *entry = &run->entries[e];
        if (entry->next_tile == entry->n_tiles) continue;
        *all_taken = false;
        if (entry->index < 0) {
            *all_begun = false;
            continue;
        }
        int presence = run->store->presence(run->store, run->nodes->layer, entry->index);
        if (presence < 0) fail(run, e);
        if (presence > 0) found = entry;
    }
    for (int e = 0; e < run->n_entries && *all_begun; e++) *all_begun = run->entries[e].index >= 0;
    return found;
}

static void work_by_tokens(struct ms_block *block, struct worker *worker) {
    struct run *run = &block->run;
    pthread_mutex_lock(&run->mutex);
    for (;;) {
        uint64_t seen = run->store->events(run->store);
        bool all_taken, all_begun;
        struct entry *entry = next_entry(run, &all_taken, &all_begun);
        if (has_failed(run) || all_taken) break;
        if (!all_begun && begin_more(run, false) != 0) continue;
        if (all_begun) read_ahead(block);
        if (!entry) {
            pthread_mutex_unlock(&run->mutex);
            sleep_for_event(run, worker, seen);
            pthread_mutex_lock(&run->mutex);
            continue;
        }
        int tile = entry->next_tile++;
        pthread_mutex_unlock(&run->mutex);
        bool done = compute_tile(run, worker, entry, tile);
        pthread_mutex_lock(&run->mutex);
        if (!done) fail(run, -1);
        if (++entry->done_tiles == entry->n_tiles) release_entry(run, entry);
    }
    pthread_mutex_unlock(&run->mutex);
}

/* ------------------------------------------------------------ the two operations */

static void work(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
    (void)nth;
    struct ms_block *block = userdata;
    const struct ms_block_meanwhile *meanwhile = block->run.meanwhile;
    if (block->run.by_rows && ith == 0) meanwhile->function(meanwhile->context); /* while the others begin to compute */
    if (meanwhile->share) meanwhile->share(meanwhile->context);
    if (block->run.by_rows) work_by_rows(&block->run, &block->workers[ith]);
    else work_by_tokens(block, &block->workers[ith]);
}

/* In ggml's order and roundings: each choice times its weight, then added. Tokens are divided, or columns where there are few. */
static void sum_choices(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
    const struct run *run = &((struct ms_block *)userdata)->run;
    if (has_failed(run)) return;
    struct ggml_tensor *sum = run->nodes->sum;
    int64_t tokens = run->nodes->ids->ne[1], choices = run->nodes->ids->ne[0], columns = sum->ne[0];
    bool divide_tokens = tokens >= nth;
    int64_t t0 = divide_tokens ? tokens * ith / nth : 0, t1 = divide_tokens ? tokens * (ith + 1) / nth : tokens;
    int64_t c0 = divide_tokens ? 0 : part_begin(columns, ith, nth, ROW_ALIGNMENT), c1 = divide_tokens ? columns : part_begin(columns, ith + 1, nth, ROW_ALIGNMENT);
    for (int64_t t = t0; t < t1; t++) {
        float *restrict out = (float *)((char *)sum->data + t * (int64_t)sum->nb[1]);
        for (int64_t k = 0; k < choices; k++) {
            const float *restrict in = output_row(run, (struct row){(int32_t)k, (int32_t)t});
            float w = run->weights[t * choices + k];
            if (k == 0)
                for (int64_t c = c0; c < c1; c++) out[c] = in[c] * w;
            else
                for (int64_t c = c0; c < c1; c++) out[c] = out[c] + in[c] * w;
        }
    }
}

/* ------------------------------------------------------------ preparing a run */

static int compare_ints(const void *a, const void *b) {
    int x = *(const int *)a, y = *(const int *)b;
    return (x < y) - (x > y);
}

/* Marks the entries that the layer's fair share has room for, the most used first. */
static void choose_kept(struct run *run, int *counts) {
    int share = run->store->fair_share(run->store, run->nodes->layer);
    int least = 0, ties = 0;
    if (run->n_entries > share && share > 0) {
        for (int e = 0; e < run->n_entries; e++) counts[e] = run->entries[e].n_rows;
        qsort(counts, (size_t)run->n_entries, sizeof *counts, compare_ints);
        least = counts[share - 1];
        for (int i = 0; i < share; i++) ties += counts[i] == least;
    }
    for (int e = 0; e < run->n_entries; e++) {
        struct entry *entry = &run->entries[e];
        entry->keep = run->n_entries <= share || (share > 0 && (entry->n_rows > least || (entry->n_rows == least && ties-- > 0)));
    }
}

/* Rows by expert, in the order of tokens. */
static void group_rows(struct run *run, const int32_t *wanted, int32_t *entry_of) {
    const struct ggml_tensor *ids = run->nodes->ids;
    for (int e = 0; e < run->n_entries; e++) {
        run->entries[e] = (struct entry){.index = -1, .expert = wanted[e]};
        entry_of[wanted[e]] = e;
    }
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t k = 0; k < ids->ne[0]; k++) run->entries[entry_of[ms_choice(ids, k, t)]].n_rows++;
    for (int e = 1; e < run->n_entries; e++) run->entries[e].first_row = run->entries[e - 1].first_row + run->entries[e - 1].n_rows;
    for (int e = 0; e < run->n_entries; e++) run->entries[e].n_rows = 0;
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            struct entry *entry = &run->entries[entry_of[ms_choice(ids, k, t)]];
            run->rows[entry->first_row + entry->n_rows++] = (struct row){(int32_t)k, (int32_t)t};
        }
}

static size_t most(size_t a, size_t b) { return a > b ? a : b; }

/* Scratch of one thread that takes up to n rows of an expert at once. */
static bool prepare_worker(const struct run *run, struct worker *worker, int n) {
    const struct ms_block_nodes *nodes = run->nodes;
    size_t r = (size_t)n, x = (size_t)run->first[0]->columns, y = (size_t)run->down->rows, neurons = (size_t)run->down->columns, bytes = 0, widest = y;
    bool by_ggml = run->down->by_ggml;
    for (int i = 0; i < nodes->n_first; i++) {
        by_ggml = by_ggml || run->first[i]->by_ggml;
        widest = most(widest, (size_t)run->first[i]->rows);
        bytes += padded(r * (size_t)run->first[i]->rows * sizeof(float)) + padded(r * run->first[i]->activation_bytes);
    }
    for (int i = 0; i < nodes->n_rowwise; i++) bytes += padded(r * (size_t)nodes->rowwise[i]->ne[0] * sizeof(float));
    size_t gathered = by_ggml ? r * most(x, neurons) * sizeof(float) : 0, product = by_ggml || run->down->neuron_major ? r * widest * sizeof(float) : 0;
    size_t part = run->by_rows ? widest : MULTIPLY_ROWS;
    bytes += padded(4 * most(x, neurons) * sizeof(float)) + padded(r * part * sizeof(float)) + padded(r * run->down->activation_bytes) + padded(r * sizeof(float *)) +
             padded(2 * r * sizeof(float *)) + padded(r * sizeof(int32_t)) + padded(most(neurons, widest) * sizeof(int32_t)) + padded(most(neurons, widest) * sizeof(float)) + padded(gathered) + padded(product);
    if (!arena_reset(&worker->scratch, bytes)) return false;
    struct arena *a = &worker->scratch;
    for (int i = 0; i < nodes->n_first; i++) {
        worker->first[i] = take(a, r * (size_t)run->first[i]->rows * sizeof(float));
        worker->quantised[i] = take(a, r * run->first[i]->activation_bytes);
    }
    for (int i = 0; i < nodes->n_rowwise; i++) worker->rowwise[i] = take(a, r * (size_t)nodes->rowwise[i]->ne[0] * sizeof(float));
    worker->quantise_scratch = take(a, 4 * most(x, neurons) * sizeof(float));
    worker->multiply_scratch = take(a, r * part * sizeof(float));
    worker->quantised_hidden = take(a, r * run->down->activation_bytes);
    worker->activations = take(a, r * sizeof(float *));
    worker->outputs = take(a, 2 * r * sizeof(float *));
    worker->ids = take(a, r * sizeof(int32_t));
    worker->active = take(a, most(neurons, widest) * sizeof(int32_t));
    worker->active_values = take(a, most(neurons, widest) * sizeof(float));
    worker->gathered = take(a, gathered);
    worker->product = take(a, product);
    worker->wait_ns = 0;
    worker->zeros = 0;
    return true;
}

static bool prepare_workers(struct ms_block *block, int n_threads, int n_rows) {
    if (n_threads > block->n_workers) {
        struct worker *workers = realloc(block->workers, sizeof *workers * (size_t)n_threads);
        if (!workers) return false;
        block->workers = workers;
        for (; block->n_workers < n_threads; block->n_workers++) {
            struct worker *worker = &block->workers[block->n_workers];
            struct ggml_threadpool_params params = ggml_threadpool_params_default(1);
            *worker = (struct worker){.is_first = block->n_workers == 0, .alone = ggml_threadpool_new(&params), .graph_memory = malloc(ggml_tensor_overhead() + ggml_graph_overhead_custom(MS_BLOCK_ROW_NODES, false))};
            if (worker->alone && worker->graph_memory) continue;
            if (worker->alone) ggml_threadpool_free(worker->alone);
            free(worker->graph_memory);
            return false;
        }
    }
    for (int i = 0; i < n_threads; i++)
        if (!prepare_worker(&block->run, &block->workers[i], n_rows)) return false;
    return true;
}

/* Inputs quantised before anything else, which for few rows costs less than the threads' meeting for it. One token has
 * one input for all its experts, each of which it chose once. */
static void quantise_inputs(struct run *run, struct worker *worker, struct arena *shared) {
    const struct ggml_tensor *input = run->nodes->input;
    bool one_for_all = input->ne[1] == 1 && input->ne[2] == 1;
    for (int e = 0; e < run->n_entries; e++) {
        struct entry *entry = &run->entries[e];
        for (int r = 0; r < entry->n_rows; r++) worker->activations[r] = input_row(run, run->rows[entry->first_row + r]);
        for (int i = 0; i < run->nodes->n_first; i++) {
            if (one_for_all && e > 0) entry->quantised[i] = run->entries[0].quantised[i];
            else if (i > 0 && ms_product_same_activations(run->first[i], run->first[0])) entry->quantised[i] = entry->quantised[0];
            else {
                void *out = take(shared, (size_t)entry->n_rows * run->first[i]->activation_bytes);
                ms_product_quantise(run->first[i], worker->activations, entry->n_rows, out, worker->quantise_scratch);
                entry->quantised[i] = out;
            }
        }
    }
}

/* One a thread: memory is read fastest in long runs, and other experts fill the gaps. */
static int parts_of(int64_t rows, int n_threads) {
    int64_t most_parts = rows / LEAST_PART_ROWS;
    return most_parts < 1 ? 1 : most_parts < n_threads ? (int)most_parts : n_threads;
}

/* How work is divided, and how many rows a thread takes at once. */
static int divide(struct run *run, int n_threads) {
    int n_tiles = 0, longest = 0, tallest = 0;
    bool by_ggml = run->down->by_ggml;
    for (int i = 0; i < run->nodes->n_first; i++) by_ggml = by_ggml || run->first[i]->by_ggml;
    for (int e = 0; e < run->n_entries; e++) {
        struct entry *entry = &run->entries[e];
        entry->n_tiles = entry->n_rows > TILE_ROWS ? entry->n_rows / TILE_ROWS : 1;
        n_tiles += entry->n_tiles;
        int rows = (entry->n_rows + entry->n_tiles - 1) / entry->n_tiles;
        if (rows > longest) longest = rows;
        if (entry->n_rows > tallest) tallest = entry->n_rows;
    }
    bool all_fit = run->n_entries <= run->store->capacity(run->store, run->nodes->layer);
    run->by_rows = all_fit && tallest <= TILE_ROWS && n_tiles < TILES_A_THREAD * n_threads && !(by_ggml && tallest > 1);
    run->first_parts = parts_of(run->first[0]->rows, n_threads);
    bool whole = run->down->neuron_major && run->n_entries >= 2 * n_threads; /* its rows are short enough as they are */
    run->down_parts = whole ? 1 : parts_of(run->down->rows, n_threads);
    return run->by_rows ? tallest : longest;
}

static bool prepare_table(struct ms_block *block, const int32_t *wanted) {
    struct run *run = &block->run;
    const struct ms_block_nodes *nodes = run->nodes;
    size_t entries = (size_t)run->n_entries, rows = (size_t)run->n_rows, n_experts = (size_t)run->source->layers[nodes->layer].n_experts;
    size_t copied = overlap(nodes->input, nodes->down) ? ggml_nbytes(nodes->input) : 0;
    struct arena *table = &block->table;
    if (!arena_reset(table, padded(entries * sizeof(struct entry)) + padded(rows * sizeof(struct row)) + padded(rows * sizeof(float)) + 2 * padded(entries * sizeof(int32_t)) +
                                padded(n_experts * sizeof(int32_t)) + padded(copied)))
        return false;
    run->entries = take(table, entries * sizeof(struct entry));
    run->rows = take(table, rows * sizeof(struct row));
    run->weights = take(table, rows * sizeof(float));
    run->asked = take(table, entries * sizeof(int32_t));
    run->given = take(table, entries * sizeof(int32_t));
    int32_t *scratch = take(table, n_experts * sizeof(int32_t));
    group_rows(run, wanted, scratch);
    choose_kept(run, scratch);
    run->input = *nodes->input;
    if (copied) run->input.data = memcpy(take(table, copied), nodes->input->data, copied);
    for (int64_t t = 0; nodes->sum && t < nodes->ids->ne[1]; t++)
        for (int64_t k = 0; k < nodes->ids->ne[0]; k++)
            run->weights[t * nodes->ids->ne[0] + k] = *ms_row(nodes->weights, k, t);
    return true;
}

/* What threads hand to each other where rows are divided. */
static bool prepare_shared(struct ms_block *block) {
    struct run *run = &block->run;
    size_t rows = (size_t)run->n_rows, neurons = (size_t)run->down->columns, lists = run->down->neuron_major ? rows * neurons : 0;
    size_t bytes = padded(rows * run->down->activation_bytes) + padded(lists * sizeof(int32_t)) + padded(lists * sizeof(float)) + padded(rows * sizeof(int));
    for (int i = 0; i < run->nodes->n_first; i++)
        bytes += padded(rows * (size_t)run->first[i]->rows * sizeof(float)) + rows * run->first[i]->activation_bytes + (size_t)run->n_entries * CACHE_LINE;
    if (!arena_reset(&block->shared, bytes)) return false;
    for (int i = 0; i < run->nodes->n_first; i++) run->first_out[i] = take(&block->shared, rows * (size_t)run->first[i]->rows * sizeof(float));
    run->hidden_quantised = take(&block->shared, rows * run->down->activation_bytes);
    run->active = take(&block->shared, lists * sizeof(int32_t));
    run->active_values = take(&block->shared, lists * sizeof(float));
    run->n_active = take(&block->shared, rows * sizeof(int));
    quantise_inputs(run, &block->workers[0], &block->shared);
    return true;
}

static bool prepare(struct ms_block *block, int n_threads, const int32_t *wanted) {
    struct run *run = &block->run;
    return prepare_table(block, wanted) && prepare_workers(block, n_threads, divide(run, n_threads)) && (!run->by_rows || prepare_shared(block));
}

/* ------------------------------------------------------------ computing */

/* Choices whose expert was not computed to its end. */
static uint64_t count_dropped(const struct run *run) {
    uint64_t dropped = 0;
    for (int e = 0; e < run->n_entries; e++) {
        const struct entry *entry = &run->entries[e];
        bool whole = run->by_rows ? entry->done_first == run->first_parts && entry->activated && entry->next_down >= run->down_parts : entry->done_tiles == entry->n_tiles;
        if (!whole) dropped += (uint64_t)entry->n_rows;
    }
    return dropped;
}

/* With rows divided experts are released together, with tokens divided each for itself. */
static void release_rest(struct run *run) {
    for (int e = 0; e < run->n_entries; e++)
        if (run->entries[e].index >= 0 && (run->by_rows || run->entries[e].done_tiles < run->entries[e].n_tiles)) release_entry(run, &run->entries[e]);
}

static bool known_layers(struct ms_block *block, int n_layers) {
    if (n_layers <= block->n_layers) return true;
    int32_t **usage = realloc(block->usage, sizeof *usage * (size_t)n_layers);
    if (!usage) return false;
    block->usage = usage;
    while (block->n_layers < n_layers) usage[block->n_layers++] = NULL;
    return true;
}

enum ggml_status ms_block_compute(struct ms_block *block, ggml_backend_t cpu, int n_threads, const struct ms_source *source, struct ms_store *store,
                                  const struct ms_products *products, const struct ms_block_nodes *nodes, const int32_t *wanted, int n,
                                  const struct ms_block_meanwhile *meanwhile, struct ms_block_result *result, char *err, size_t errlen) {
    struct run *run = &block->run;
    if (!known_layers(block, source->n_layers)) {
        ms_fail(0, err, errlen, "out of memory for %d layers", source->n_layers);
        return GGML_STATUS_ALLOC_FAILED;
    }
    *run = (struct run){.source = source, .store = store, .products = products, .nodes = nodes, .n_entries = n, .n_rows = (int)(nodes->ids->ne[0] * nodes->ids->ne[1]), .meanwhile = meanwhile, .failed_entry = -1, .err = err, .errlen = errlen};
    for (int i = 0; i < nodes->n_first; i++) {
        run->first[i] = ms_product_of(products, nodes->layer, nodes->first_matrix[i]);
        run->first_view[i] = store->view(store, nodes->layer, nodes->first_matrix[i]);
    }
    run->down = ms_product_of(products, nodes->layer, nodes->down_matrix);
    run->down_view = store->view(store, nodes->layer, nodes->down_matrix);
    if (!prepare(block, n_threads, wanted)) {
        ms_fail(0, err, errlen, "out of memory for the scratch of a batch of %d tokens; use a smaller n_ubatch", (int)nodes->ids->ne[1]);
        return GGML_STATUS_ALLOC_FAILED;
    }
    if (run->by_rows && begin_more(run, true) < 0) return GGML_STATUS_FAILED;
    if (!run->by_rows) {
        list_ahead(block);
        meanwhile->function(meanwhile->context);
    }
    pthread_mutex_init(&run->mutex, NULL);
    enum ggml_status status = ggml_backend_graph_compute(cpu, nodes->sum ? block->work_and_sum : block->work);
    pthread_mutex_destroy(&run->mutex);
    if (run->failed_entry >= 0) store->failure(store, nodes->layer, run->entries[run->failed_entry].index, err, errlen);
    if (run->failed && !err[0]) ms_fail(0, err, errlen, "block %d: the expert kernels failed (out of memory?)", source->layers[nodes->layer].block);
    release_rest(run);
    if (run->failed) store->settle(store);
    remember_usage(block);
    *result = (struct ms_block_result){.dropped = run->failed ? 0 : count_dropped(run)};
    for (int i = 0; i < n_threads; i++) {
        result->wait_ns += block->workers[i].wait_ns / n_threads;
        result->zeros += block->workers[i].zeros;
    }
    if (nodes->zeros) result->activations = (uint64_t)run->n_rows * (uint64_t)run->down->columns;
    return run->failed ? GGML_STATUS_FAILED : status;
}

/* ------------------------------------------------------------ life */

static struct ggml_tensor *operation(struct ms_block *block, ggml_custom_op_t function, float *result) {
    struct ggml_tensor *node = ggml_custom_4d(block->context, GGML_TYPE_F32, 1, 1, 1, 1, NULL, 0, function, GGML_N_TASKS_MAX, block);
    node->data = result;
    node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    return node;
}

struct ms_block *ms_block_new(void) {
    struct ms_block *block = calloc(1, sizeof *block);
    if (!block) return NULL;
    block->context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() * 4 + 2 * ggml_graph_overhead_custom(2, false), .no_alloc = true});
    if (!block->context) {
        free(block);
        return NULL;
    }
    struct ggml_tensor *working = operation(block, work, &block->dummy[0]), *summing = operation(block, sum_choices, &block->dummy[1]);
    block->work = ggml_new_graph_custom(block->context, 2, false);
    block->work_and_sum = ggml_new_graph_custom(block->context, 2, false);
    ggml_graph_add_node(block->work, working);
    ggml_graph_add_node(block->work_and_sum, working);
    ggml_graph_add_node(block->work_and_sum, summing);
    return block;
}

void ms_block_free(struct ms_block *block) {
    if (!block) return;
    for (int i = 0; i < block->n_workers; i++) {
        ggml_threadpool_free(block->workers[i].alone);
        free(block->workers[i].scratch.base);
        free(block->workers[i].graph_memory);
        free(block->workers[i].plan_memory);
    }
    for (int l = 0; l < block->n_layers; l++) free(block->usage[l]);
    ggml_free(block->context);
    free(block->usage);
    free(block->workers);
    free(block->table.base);
    free(block->shared.base);
    free(block->ahead.base);
    free(block);
}
