#include "heads.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "message.h"
#include "rows.h"

#define PART_ROWS 64 /* of L and W1, that a thread takes at once */
#define CACHE_LINE 64

enum { LINEAR, LINEAR_ONEHOT, FC1, FC1_ONEHOT, FC2, N_MATRICES };
static const char *const names[N_MATRICES] = {"linear.h", "linear.onehot", "fc1.h", "fc1.onehot", "fc2"};

struct matrix {
    enum ggml_type type;
    int64_t columns, rows;
    size_t row_bytes;
    uint8_t *data;
};

struct head {
    int block;            /* that owns it */
    int owner, predicted; /* layers of the source */
    struct matrix matrices[N_MATRICES];
};

/* What a thread said of the batch that it decodes next. */
struct announcement {
    pthread_t thread;
    int n_rows, capacity; /* 0 rows: free */
    struct ms_announced_row *rows;
};

struct ms_heads {
    int n, mode;
    ms_head_shape shape;
    struct head *heads;
    int *owned, *predicting; /* per layer */
    pthread_mutex_t mutex;   /* of what follows */
    int n_announcements;
    struct announcement *announcements;
};

/* ------------------------------------------------------------ life */

static int layer_of_block(const struct ms_source *source, int block) {
    for (int l = 0; l < source->n_layers; l++)
        if (source->layers[l].block == block) return l;
    return -1;
}

/* Of the state that a layer's experts read; 0: there is no such matrix. */
static int64_t columns_of(const struct ms_layer *layer) {
    for (int m = 0; m < layer->n_matrices; m++)
        if (!strstr(layer->matrices[m].name, "ffn_down_exps")) return layer->matrices[m].columns;
    return 0;
}

static int copy_matrix(struct matrix *matrix, int owner, const char *name, enum ggml_type type, const void *data, int64_t columns, int64_t rows, char *err, size_t errlen) {
    if (type != GGML_TYPE_F32 && type != GGML_TYPE_F16 && type != GGML_TYPE_Q8_0 && type != GGML_TYPE_Q4_0)
        return ms_fail(-EINVAL, err, errlen, "head.%d.%s is of a type that heads do not have; pack it as F32, F16, Q8_0 or Q4_0", owner, name);
    if (columns % ggml_blck_size(type)) return ms_fail(-EINVAL, err, errlen, "head.%d.%s has rows of %lld values, which %s does not divide; pack it as F16", owner, name, (long long)columns, ggml_type_name(type));
    size_t row_bytes = ggml_row_size(type, columns), bytes = row_bytes * (size_t)rows;
    if (!ggml_validate_row_data(type, data, bytes)) return ms_fail(-EINVAL, err, errlen, "head.%d.%s holds values that are no numbers (NaN or infinite); train it anew", owner, name);
    *matrix = (struct matrix){.type = type, .columns = columns, .rows = rows, .row_bytes = row_bytes, .data = aligned_alloc(CACHE_LINE, (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE)};
    if (!matrix->data) return ms_fail(-ENOMEM, err, errlen, "out of memory for the head of layer %d", owner);
    memcpy(matrix->data, data, bytes);
    return 0;
}

static int copy_head(struct head *head, const ms_head *given, ms_head_shape shape, char *err, size_t errlen) {
    const struct {
        int type;
        const void *data;
        int64_t columns, rows;
    } parts[N_MATRICES] = {
        [LINEAR] = {given->type_linear, given->linear_h, shape.columns, shape.experts},
        [LINEAR_ONEHOT] = {given->type_linear_onehot, given->linear_onehot, shape.experts, 2 * shape.experts},
        [FC1] = {given->type_fc1, given->fc1_h, shape.columns, shape.width},
        [FC1_ONEHOT] = {given->type_fc1_onehot, given->fc1_onehot, shape.width, 2 * shape.experts},
        [FC2] = {given->type_fc2, given->fc2, shape.width, shape.experts},
    };
    int rc = 0;
    for (int m = 0; m < N_MATRICES && rc == 0; m++)
        rc = copy_matrix(&head->matrices[m], given->owner, names[m], (enum ggml_type)parts[m].type, parts[m].data, parts[m].columns, parts[m].rows, err, errlen);
    return rc;
}

static void free_head(struct head *head) {
    for (int m = 0; m < N_MATRICES; m++) free(head->matrices[m].data);
}

/* Where in the model a head belongs. They come in the order in which they will speak. */
static int place(struct ms_heads *heads, const struct ms_source *source, struct head *head, int owner, char *err, size_t errlen) {
    head->block = owner;
    head->owner = layer_of_block(source, owner);
    head->predicted = layer_of_block(source, owner + 1);
    if (owner < 0 || owner >= source->n_blocks) return ms_fail(-EINVAL, err, errlen, "a head is owned by layer %d, and the model has layers 0 to %d", owner, source->n_blocks - 1);
    if (head->owner < 0) return ms_fail(-EINVAL, err, errlen, "a head is owned by layer %d, which has no experts in this model", owner);
    if (owner + 1 == source->n_blocks) return ms_fail(-EINVAL, err, errlen, "a head is owned by layer %d, the last, which no layer follows that it could predict", owner);
    if (head->predicted < 0) return ms_fail(-EINVAL, err, errlen, "the head of layer %d predicts layer %d, which has no experts in this model", owner, owner + 1);
    for (int i = 0; i < 2; i++) {
        const struct ms_layer *layer = &source->layers[i ? head->predicted : head->owner];
        if (layer->n_experts != heads->shape.experts)
            return ms_fail(-EINVAL, err, errlen, "the heads are for %d experts in a layer, and layer %d of this model has %d", heads->shape.experts, layer->block, layer->n_experts);
        if (columns_of(layer) != heads->shape.columns)
            return ms_fail(-EINVAL, err, errlen, "the heads read a state of %d values, and that of layer %d of this model has %lld", heads->shape.columns, layer->block, (long long)columns_of(layer));
    }
    if (head > heads->heads && head[-1].owner >= head->owner) return ms_fail(-EINVAL, err, errlen, "the head of layer %d does not come after that of a layer before", owner);
    heads->owned[head->owner] = heads->predicting[head->predicted] = (int)(head - heads->heads);
    return 0;
}

int ms_heads_open(const struct ms_source *source, const ms_head *heads, int n, int mode, ms_head_shape shape, struct ms_heads **out, char *err, size_t errlen) {
    if (n < 1 || shape.columns < 1 || shape.experts < 1 || shape.width < 1) return ms_fail(-EINVAL, err, errlen, "there are no heads, or they are of no size");
    struct ms_heads *made = calloc(1, sizeof *made);
    if (!made) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    *made = (struct ms_heads){.n = n, .mode = mode, .shape = shape};
    pthread_mutex_init(&made->mutex, NULL);
    made->heads = calloc((size_t)n, sizeof *made->heads);
    made->owned = malloc((size_t)source->n_layers * sizeof(int));
    made->predicting = malloc((size_t)source->n_layers * sizeof(int));
    int rc = made->heads && made->owned && made->predicting ? 0 : ms_fail(-ENOMEM, err, errlen, "out of memory for %d heads", n);
    for (int l = 0; l < source->n_layers && rc == 0; l++) made->owned[l] = made->predicting[l] = -1;
    for (int i = 0; i < n && rc == 0; i++) rc = place(made, source, &made->heads[i], heads[i].owner, err, errlen);
    for (int i = 0; i < n && rc == 0; i++) rc = copy_head(&made->heads[i], &heads[i], shape, err, errlen);
    if (rc < 0) {
        ms_heads_close(made);
        return rc;
    }
    *out = made;
    return 0;
}

void ms_heads_close(struct ms_heads *heads) {
    if (!heads) return;
    for (int i = 0; heads->heads && i < heads->n; i++) free_head(&heads->heads[i]);
    for (int i = 0; i < heads->n_announcements; i++) free(heads->announcements[i].rows);
    pthread_mutex_destroy(&heads->mutex);
    free(heads->announcements);
    free(heads->heads);
    free(heads->owned);
    free(heads->predicting);
    free(heads);
}

int ms_heads_require_loaded(const struct ms_heads *heads, const bool *wanted, char *err, size_t errlen) {
    for (int i = 0; i < heads->n; i++)
        if (!wanted[heads->heads[i].owner] || !wanted[heads->heads[i].predicted])
            return ms_fail(-EINVAL, err, errlen, "the head of layer %d predicts layer %d, and llama.cpp does not load both; leave that head out", heads->heads[i].block, heads->heads[i].block + 1);
    return 0;
}

int ms_heads_count(const struct ms_heads *heads) { return heads->n; }
int ms_heads_experts(const struct ms_heads *heads) { return heads->shape.experts; }
bool ms_heads_route(const struct ms_heads *heads) { return heads && heads->mode == MS_HEADS_ROUTE; }
int ms_heads_owned_by(const struct ms_heads *heads, int layer) { return heads ? heads->owned[layer] : -1; }
int ms_heads_predicting(const struct ms_heads *heads, int layer) { return heads ? heads->predicting[layer] : -1; }

/* ------------------------------------------------------------ computing */

struct ms_head_work {
    const struct head *head;
    const struct ms_head_input *inputs;
    int n;
    int n_linear, n_parts; /* parts of L, and of L and W1 */
    /* scratch */
    uint8_t *states[2]; /* h as L and W1 want it, [n] each */
    size_t state_bytes[2];
    float *products[2]; /* [n][rows of L], [n][rows of W1] */
    float *row;         /* a one-hot row */
    uint8_t *hidden;    /* as W2 wants it */
    void *memory;
    size_t memory_bytes;
    int next, done; /* parts; atomic */
    int64_t spent_ns; /* atomic */
    bool finite;      /* so far, all logits */
};

struct ms_head_work *ms_head_work_new(void) { return calloc(1, sizeof(struct ms_head_work)); }

void ms_head_work_free(struct ms_head_work *work) {
    if (!work) return;
    free(work->memory);
    free(work);
}

static size_t padded(size_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

static enum ggml_type activation_of(const struct matrix *matrix) { return ggml_get_type_traits_cpu(matrix->type)->vec_dot_type; }

static size_t activation_bytes(const struct matrix *matrix) { return padded(ggml_row_size(activation_of(matrix), matrix->columns)); }

static void round_activation(const struct matrix *matrix, const float *values, void *out) {
    enum ggml_type type = activation_of(matrix);
    if (type == GGML_TYPE_F32) memcpy(out, values, (size_t)matrix->columns * sizeof(float));
    else ggml_get_type_traits_cpu(type)->from_float(values, out, matrix->columns);
}

static bool reserve(struct ms_head_work *work, size_t bytes) {
    if (bytes <= work->memory_bytes) return true;
    free(work->memory);
    work->memory = aligned_alloc(CACHE_LINE, padded(bytes));
    work->memory_bytes = work->memory ? bytes : 0;
    return work->memory != NULL;
}

static void *take(uint8_t **memory, size_t bytes) {
    uint8_t *taken = *memory;
    *memory += padded(bytes);
    return taken;
}

static int parts_of(const struct matrix *matrix) { return (int)((matrix->rows + PART_ROWS - 1) / PART_ROWS); }

bool ms_head_work_begin(struct ms_head_work *work, const struct ms_heads *heads, int head, const struct ms_head_input *inputs, int n) {
    const struct head *found = &heads->heads[head];
    const struct matrix *const by_state[2] = {&found->matrices[LINEAR], &found->matrices[FC1]};
    const struct matrix *fc2 = &found->matrices[FC2];
    int64_t longest = by_state[0]->rows > by_state[1]->rows ? by_state[0]->rows : by_state[1]->rows;
    size_t bytes = padded((size_t)longest * sizeof(float)) + activation_bytes(fc2), rows = (size_t)n;
    for (int i = 0; i < 2; i++) bytes += rows * activation_bytes(by_state[i]) + padded(rows * (size_t)by_state[i]->rows * sizeof(float));
    if (!reserve(work, bytes)) return false;
    uint8_t *memory = work->memory;
    work->head = found;
    work->inputs = inputs;
    work->n = n;
    work->n_linear = parts_of(by_state[0]);
    work->n_parts = work->n_linear + parts_of(by_state[1]);
    work->row = take(&memory, (size_t)longest * sizeof(float));
    work->hidden = take(&memory, activation_bytes(fc2));
    for (int i = 0; i < 2; i++) {
        work->state_bytes[i] = activation_bytes(by_state[i]);
        work->states[i] = take(&memory, rows * work->state_bytes[i]);
        work->products[i] = take(&memory, rows * (size_t)by_state[i]->rows * sizeof(float));
        for (int t = 0; t < n; t++) round_activation(by_state[i], inputs[t].state, work->states[i] + (size_t)t * work->state_bytes[i]);
    }
    work->done = 0;
    work->spent_ns = 0;
    work->finite = true;
    __atomic_store_n(&work->next, 0, __ATOMIC_RELEASE);
    return true;
}

static void multiply_part(struct ms_head_work *work, int part) {
    int i = part >= work->n_linear;
    const struct matrix *matrix = &work->head->matrices[i ? FC1 : LINEAR];
    int first = (i ? part - work->n_linear : part) * PART_ROWS, n = (int)matrix->rows - first < PART_ROWS ? (int)matrix->rows - first : PART_ROWS;
    ms_rows_dot(matrix->type, matrix->columns, matrix->data, NULL, first, n, work->states[i], work->state_bytes[i], work->n, work->products[i] + first, (size_t)matrix->rows);
}

static void add_row(const struct matrix *matrix, int64_t row, float *scratch, float *out) {
    const uint8_t *stored = matrix->data + (size_t)row * matrix->row_bytes;
    const float *values = (const float *)stored;
    if (matrix->type != GGML_TYPE_F32) {
        ggml_get_type_traits(matrix->type)->to_float(stored, scratch, matrix->columns);
        values = scratch;
    }
    for (int64_t c = 0; c < matrix->columns; c++) out[c] += values[c];
}

static void add_onehots(const struct matrix *matrix, const struct ms_head_input *input, float *scratch, float *out) {
    for (int i = 0; i < input->n_now; i++) add_row(matrix, input->now[i], scratch, out);
    for (int i = 0; i < input->n_before; i++) add_row(matrix, matrix->rows / 2 + input->before[i], scratch, out);
}

static float gelu(float v) { return 0.5f * v * (1 + erff(v * 0.70710678118654752f)); }

/* All products with the states are there: the rest, of one token after the other. */
static void finish(struct ms_head_work *work) {
    const struct matrix *matrices = work->head->matrices, *fc2 = &matrices[FC2];
    for (int t = 0; t < work->n; t++) {
        const struct ms_head_input *input = &work->inputs[t];
        float *linear = work->products[0] + (size_t)t * (size_t)matrices[LINEAR].rows, *hidden = work->products[1] + (size_t)t * (size_t)matrices[FC1].rows;
        add_onehots(&matrices[LINEAR_ONEHOT], input, work->row, linear);
        add_onehots(&matrices[FC1_ONEHOT], input, work->row, hidden);
        for (int64_t i = 0; i < fc2->columns; i++) hidden[i] = gelu(hidden[i]);
        round_activation(fc2, hidden, work->hidden);
        ms_rows_dot(fc2->type, fc2->columns, fc2->data, NULL, 0, (int)fc2->rows, work->hidden, 0, 1, input->logits, 0);
        for (int64_t e = 0; e < fc2->rows; e++) {
            input->logits[e] += linear[e];
            work->finite = work->finite && isfinite(input->logits[e]);
        }
    }
}

void ms_head_work_share(struct ms_head_work *work) {
    if (__atomic_load_n(&work->next, __ATOMIC_ACQUIRE) >= work->n_parts) return;
    int64_t begin = ms_now_ns();
    for (int part; (part = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->n_parts;) {
        multiply_part(work, part);
        if (__atomic_add_fetch(&work->done, 1, __ATOMIC_ACQ_REL) == work->n_parts) finish(work);
    }
    __atomic_fetch_add(&work->spent_ns, ms_now_ns() - begin, __ATOMIC_RELAXED);
}

void ms_head_work_cost(const struct ms_head_work *work, int64_t *spent_ns, uint64_t *bytes) {
    const struct matrix *matrices = work->head->matrices;
    *spent_ns = __atomic_load_n(&work->spent_ns, __ATOMIC_RELAXED);
    *bytes = 0;
    for (int m = 0; m < N_MATRICES; m++) {
        if (m != LINEAR_ONEHOT && m != FC1_ONEHOT) *bytes += matrices[m].row_bytes * (size_t)matrices[m].rows;
        else
            for (int t = 0; t < work->n; t++) *bytes += matrices[m].row_bytes * (size_t)(work->inputs[t].n_now + work->inputs[t].n_before);
    }
}

bool ms_head_work_is_finite(const struct ms_head_work *work) { return work->finite; }

int ms_head_logits(const ms_head *head, ms_head_shape shape, const float *state, const int32_t *now, int n_now, const int32_t *before, int n_before, float *logits, char *err, size_t errlen) {
    struct head copy = {0};
    struct ms_heads alone = {.n = 1, .shape = shape, .heads = &copy};
    struct ms_head_input input = {.state = state, .now = now, .before = before, .n_now = n_now, .n_before = n_before, .logits = logits};
    struct ms_head_work *work = ms_head_work_new();
    for (int i = 0; i < n_now + n_before; i++) {
        int32_t expert = i < n_now ? now[i] : before[i - n_now];
        if (expert < 0 || expert >= shape.experts) {
            ms_head_work_free(work);
            return ms_fail(-EINVAL, err, errlen, "there is no expert %d of %d", expert, shape.experts);
        }
    }
    int rc = copy_head(&copy, head, shape, err, errlen);
    if (rc == 0 && !(work && ms_head_work_begin(work, &alone, 0, &input, 1))) rc = ms_fail(-ENOMEM, err, errlen, "out of memory for a head");
    if (rc == 0) ms_head_work_share(work);
    free_head(&copy);
    ms_head_work_free(work);
    return rc;
}

/* ------------------------------------------------------------ announcing */

/* This thread's, or NULL; with `make` one that is free or new. Mutex held. */
static struct announcement *announcement_of(struct ms_heads *heads, bool make) {
    struct announcement *unused = NULL;
    for (int i = 0; i < heads->n_announcements; i++) {
        struct announcement *found = &heads->announcements[i];
        if (found->n_rows && pthread_equal(found->thread, pthread_self())) return found;
        if (!found->n_rows) unused = found;
    }
    if (unused || !make) return make ? unused : NULL;
    struct announcement *more = realloc(heads->announcements, (size_t)(heads->n_announcements + 1) * sizeof *more);
    if (!more) return NULL;
    heads->announcements = more;
    more[heads->n_announcements] = (struct announcement){0};
    return &more[heads->n_announcements++];
}

int ms_heads_announce(struct ms_heads *heads, int n_rows, struct ms_head_memory *const *memories, const int32_t *positions, const uint8_t *flags) {
    int rc = 0;
    pthread_mutex_lock(&heads->mutex);
    struct announcement *announcement = announcement_of(heads, n_rows > 0);
    if (announcement && n_rows > announcement->capacity) {
        struct ms_announced_row *rows = realloc(announcement->rows, (size_t)n_rows * sizeof *rows);
        if (rows) {
            announcement->rows = rows;
            announcement->capacity = n_rows;
        } else {
            rc = -ENOMEM;
        }
    }
    if (!announcement && n_rows > 0) rc = -ENOMEM;
    if (announcement) {
        announcement->thread = pthread_self();
        announcement->n_rows = rc == 0 ? n_rows : 0;
        for (int i = 0; i < announcement->n_rows; i++) announcement->rows[i] = (struct ms_announced_row){.memory = memories[i], .position = positions[i], .flags = flags[i]};
    }
    pthread_mutex_unlock(&heads->mutex);
    return rc;
}

int ms_heads_take_announced(struct ms_heads *heads, struct ms_announced_row **rows, int *capacity) {
    int n = 0;
    pthread_mutex_lock(&heads->mutex);
    struct announcement *announcement = announcement_of(heads, false);
    if (announcement) { /* the lists change hands: neither is copied */
        struct ms_announced_row *theirs = *rows;
        int their_capacity = *capacity;
        n = announcement->n_rows;
        *rows = announcement->rows;
        *capacity = announcement->capacity;
        announcement->rows = theirs;
        announcement->capacity = their_capacity;
        announcement->n_rows = 0;
    }
    pthread_mutex_unlock(&heads->mutex);
    return n;
}
