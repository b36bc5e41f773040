#include "engine.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "head_states.h"
#include "virtual_gguf.h"

#ifndef MS_LLAMA_CPP_PYTHON
#error "MS_LLAMA_CPP_PYTHON must name the version of llama-cpp-python compiled against"
#endif

const char *ms_built_for(void) { return MS_LLAMA_CPP_PYTHON; }

const char *ms_expert_pattern(void) { return MS_EXPERT_TENSOR; }
const char *ms_router_pattern(void) { return MS_ROUTER_TENSOR; }

void ms_engine_note(struct ms_engine *engine, const char *format, ...) {
    size_t used = strlen(engine->notes);
    if (used && used + 1 < sizeof engine->notes) engine->notes[used++] = '\n';
    va_list args;
    va_start(args, format);
    vsnprintf(engine->notes + used, sizeof engine->notes - used, format, args);
    va_end(args);
}

/* ------------------------------------------------------------ description */

/* The most experts of its own that a token can get in every layer. With more, llama.cpp takes some from groups that it
 * has ruled out, or, where several share one more expert, aborts. */
static int choosable_experts(const struct ms_source *source) {
    int least = source->layers[0].n_experts;
    for (int l = 1; l < source->n_layers; l++)
        if (source->layers[l].n_experts < least) least = source->layers[l].n_experts;
    if (source->n_groups_used > 0 && source->n_groups_used < source->n_groups) least = least / source->n_groups * source->n_groups_used;
    return source->n_experts_sharing > 1 ? least / source->n_experts_sharing : least;
}

ms_description ms_describe(const ms_source *source) {
    return (ms_description){
        .architecture = source->architecture,
        .model_name = source->model_name,
        .n_files = source->n_files,
        .n_blocks = source->n_blocks,
        .n_layers = source->n_layers,
        .n_experts_used = source->n_experts_used,
        .n_experts_choosable = choosable_experts(source),
        .experts_used_by_layer = source->experts_used_by_layer,
        .laid = source->layout != NULL,
        .dense_bytes = source->dense_bytes,
        .expert_bytes = source->expert_bytes,
        .disk_bytes = ms_source_disk_bytes(source),
        .minimum_cache_bytes = ms_slots_minimum_bytes(source, NULL),
        .maximum_cache_bytes = ms_slots_maximum_bytes(source, NULL),
    };
}

ms_layer_description ms_describe_layer(const ms_source *source, int layer) {
    const struct ms_layer *l = &source->layers[layer];
    return (ms_layer_description){.block = l->block, .n_experts = l->n_experts, .n_matrices = l->n_matrices, .record_bytes = l->record_bytes};
}

static const char *form_name(const ms_source *source, const struct ms_matrix *matrix) {
    const struct ms_permutation *interleaving = ms_source_interleaving(source, matrix);
    return interleaving ? ms_permutation_describe(interleaving).name : matrix->form == MS_FORM_NEURON_MAJOR ? "neuron-major" : "plain";
}

ms_matrix_description ms_describe_matrix(const ms_source *source, int layer, int matrix) {
    const struct ms_matrix *m = &source->layers[layer].matrices[matrix];
    return (ms_matrix_description){.tensor_name = m->name,
                                   .type_name = ggml_type_name((enum ggml_type)m->type),
                                   .columns = m->columns,
                                   .rows = m->rows,
                                   .slice_bytes = m->slice_bytes,
                                   .file = m->file,
                                   .offset = m->offset,
                                   .form = form_name(source, m)};
}

const char *ms_describe_file(const ms_source *source, int file, uint64_t *size_bytes) {
    *size_bytes = source->files[file].size_bytes;
    return source->files[file].path;
}

/* ------------------------------------------------------------ open and close */

static int open_reader(struct ms_engine *engine, const ms_engine_options *options, char *err, size_t errlen) {
    char why[MS_MESSAGE_BYTES];
    if (strcmp(options->reader, "mmap") == 0) return 0;
    if (options->direct != MS_DIRECT_NO) {
        int rc = ms_source_use_direct(engine->source, why, sizeof why);
        if (rc < 0 && options->direct == MS_DIRECT_YES) return ms_fail(rc, err, errlen, "%s; use direct=\"auto\"", why);
        if (rc < 0) ms_engine_note(engine, "reads go through the page cache: %s", why);
    }
    if (strcmp(options->reader, "uring") == 0) return ms_reader_uring_open(MS_URING_DEPTH, &engine->reader, err, errlen);
    if (strcmp(options->reader, "pread") == 0) return ms_reader_pread_open(MS_PREAD_THREADS, &engine->reader, err, errlen);
    if (strcmp(options->reader, "auto") == 0) return ms_pick_reader(engine, err, errlen);
    return ms_fail(-EINVAL, err, errlen, "unknown reader \"%s\"; known are auto, uring, pread and mmap", options->reader);
}

/* The mmap store computes with rows as the file has them. */
static bool computes_interleaved(const struct ms_engine *engine, const struct ms_matrix *matrix) {
    return ms_interleaving_prototype(engine->interleaving, matrix) && (engine->reader || matrix->form > MS_FORM_PLAIN);
}

static int require_interleaved(const struct ms_engine *engine, char *err, size_t errlen) {
    const struct ms_source *source = engine->source;
    for (int l = 0; l < source->n_layers; l++)
        for (int m = 0; m < source->layers[l].n_matrices; m++)
            if (computes_interleaved(engine, &source->layers[l].matrices[m])) return 0;
    return ms_fail(-EINVAL, err, errlen, "kernels=\"interleaved\": reader=\"mmap\" computes in the pages of %s, which hold plain rows; use kernels=\"plain\" or another reader, or: moestream convert %s NEW.gguf", source->files[0].path, source->files[0].path);
}

/* Says so when experts of a laid file must be converted each time they are read. */
static void note_conversion(struct ms_engine *engine) {
    const struct ms_source *source = engine->source;
    if (!source->layout || !engine->reader) return;
    for (int l = 0; l < source->n_layers; l++)
        for (int m = 0; m < source->layers[l].n_matrices; m++) {
            const struct ms_matrix *matrix = &source->layers[l].matrices[m];
            const struct ms_permutation *stored = ms_source_interleaving(source, matrix);
            bool wanted = ms_interleaving_prototype(engine->interleaving, matrix) != NULL;
            if (stored ? wanted && ms_interleaving_is_stored(engine->interleaving, source, matrix) : !wanted) continue;
            ms_engine_note(engine, "experts are converted as they arrive (%s is stored %s, the kernels want %s); made once by: moestream convert %s NEW.gguf%s", matrix->name,
                           stored ? ms_permutation_describe(stored).name : "plain", wanted ? "interleaved rows" : "plain rows", source->files[0].path,
                           wanted ? "" : " --target plain");
            return;
        }
}

/* blk.(0|1|3).attn_norm.weight, of the blocks with experts. */
static char *norm_pattern(const struct ms_source *source) {
    size_t size = 64 + 12 * (size_t)source->n_layers, used = 0;
    char *pattern = malloc(size);
    if (!pattern) return NULL;
    used += (size_t)snprintf(pattern, size, "^blk\\.(");
    for (int l = 0; l < source->n_layers; l++) used += (size_t)snprintf(pattern + used, size - used, l ? "|%d" : "%d", source->layers[l].block);
    snprintf(pattern + used, size - used, ")\\.attn_norm\\.weight$");
    return pattern;
}

struct ms_expert_tensor *ms_engine_hook(struct ms_engine *engine, int block, int kind) {
    for (int l = 0; l < engine->source->n_layers; l++)
        if (engine->source->layers[l].block == block) return &engine->tensors[l][MS_MAX_MATRICES - 1 - kind];
    return NULL;
}

static int open_prerouter(struct ms_engine *engine, const ms_engine_options *options, char *err, size_t errlen) {
    struct ms_source *source = engine->source;
    engine->norm_pattern = norm_pattern(source);
    engine->routing = ms_routing_new(source->n_layers, options->cache_aware);
    engine->prerouter = (struct ms_prerouter_model){.source = source, .wanted = engine->wanted, .routers = ms_routers_new(source->n_layers), .routing = engine->routing,
                                                    .predictors = (unsigned)options->predictors, .automatic = options->automatic};
    if (!engine->norm_pattern || !engine->routing || !engine->prerouter.routers) return ms_fail(-ENOMEM, err, errlen, "out of memory for %d layers", source->n_layers);
    return 0;
}

int ms_engine_replay(ms_engine *engine, const int32_t *experts, int n_tokens, int n_layers, int n_choices, const float *recall, char *err, size_t errlen) {
    memcpy(engine->prerouter.recall, recall, sizeof engine->prerouter.recall);
    return ms_routing_replay(engine->routing, experts, n_tokens, n_layers, n_choices, err, errlen);
}

int ms_engine_heads(ms_engine *engine, const ms_head *heads, int n, int mode, ms_head_shape shape, char *err, size_t errlen) {
    if (engine->heads) return ms_fail(-EALREADY, err, errlen, "the engine has its heads already");
    if (!ms_engine_router_type(engine)) return ms_fail(-EINVAL, err, errlen, "its routers are quantised, so that heads can neither choose in their place nor know how they choose");
    return ms_heads_open(engine->source, heads, n, mode, shape, &engine->heads, err, errlen);
}

int ms_engine_decode_rows(ms_engine *engine, int n_rows, ms_head_memory *const *memories, const int32_t *positions, const uint8_t *flags) {
    return engine->heads ? ms_heads_announce(engine->heads, n_rows, memories, positions, flags) : 0;
}

ms_head_memory *ms_engine_head_memory(ms_engine *engine) { return engine->heads ? ms_head_memory_new(engine->heads) : NULL; }

int ms_engine_open(const char *path, const ms_engine_options *options, ms_engine **out, char *err, size_t errlen) {
    struct ms_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    pthread_mutex_init(&engine->mutex, NULL);
    engine->verify = options->verify;
    snprintf(engine->policy, sizeof engine->policy, "%s", options->policy);
    engine->compute = options->compute;
    int rc = ms_source_open(path, &engine->source, err, errlen);
    if (rc < 0) goto fail;
    struct ms_source *source = engine->source;
    if (options->experts_used > 0 && options->experts_used != source->n_experts_used) {
        ms_engine_note(engine, "a token takes %d of the experts in a layer in place of the file's %d, which changes what the model says", options->experts_used, source->n_experts_used);
        source->n_experts_used = options->experts_used;
    }
    engine->wanted = calloc((size_t)source->n_layers, sizeof(bool));
    engine->tensors = calloc((size_t)source->n_layers, sizeof *engine->tensors);
    engine->zeros = calloc((size_t)source->n_layers, sizeof *engine->zeros);
    if (!engine->wanted || !engine->tensors || !engine->zeros) {
        rc = ms_fail(-ENOMEM, err, errlen, "out of memory for %d layers", source->n_layers);
        goto fail;
    }
    for (int l = 0; l < source->n_layers; l++)
        for (int m = MS_WEIGHT_ROUTER; m < MS_MAX_MATRICES; m++) engine->tensors[l][m < 0 ? MS_MAX_MATRICES - 1 - m : m] = (struct ms_expert_tensor){.engine = engine, .layer = l, .matrix = m};
    rc = open_prerouter(engine, options, err, errlen);
    if (rc < 0) goto fail;
    rc = open_reader(engine, options, err, errlen);
    if (rc < 0) goto fail;
    bool interleaved = options->kernels != MS_KERNELS_PLAIN && (engine->reader || source->layout);
    if (interleaved) rc = ms_interleaving_open(source, &engine->interleaving, err, errlen);
    if (rc < 0) goto fail;
    if (options->kernels == MS_KERNELS_INTERLEAVED && !engine->reader) rc = require_interleaved(engine, err, errlen);
    if (rc < 0) goto fail;
    note_conversion(engine);
    ms_device_attach(engine);
    *out = engine;
    return 0;
fail:
    ms_engine_close(engine);
    return rc;
}

void ms_engine_close(ms_engine *engine) {
    if (!engine) return;
    if (engine->store) engine->store->stop(engine->store);
    if (engine->reader) engine->reader->close(engine->reader); /* reads in flight end before their slots go */
    if (engine->store) engine->store->close(engine->store);
    ms_products_close(engine->products);
    ms_interleaving_close(engine->interleaving);
    ms_source_close(engine->source);
    pthread_mutex_destroy(&engine->mutex);
    for (int t = 0; t < engine->n_timelines; t++) ms_timeline_close(engine->timelines[t]);
    free(engine->timelines);
    ms_routers_free(engine->prerouter.routers);
    ms_routing_free(engine->routing);
    ms_heads_close(engine->heads);
    free(engine->norm_pattern);
    free(engine->wanted);
    free(engine->tensors);
    free(engine->zeros);
    free(engine);
}

const ms_source *ms_engine_source(const ms_engine *engine) { return engine->source; }
const char *ms_engine_reader(const ms_engine *engine) { return engine->reader ? engine->reader->name : "mmap"; }
bool ms_engine_direct(const ms_engine *engine) { return engine->reader && engine->source->alignment > 1; }
const char *ms_engine_notes(const ms_engine *engine) { return engine->notes; }
void *ms_engine_buffer_type(ms_engine *engine) { return &engine->buffer_type; }
const char *ms_norm_pattern(const ms_engine *engine) { return engine->norm_pattern; }
void *ms_engine_norm_type(ms_engine *engine) { return &engine->norm_type; }
void *ms_engine_router_type(ms_engine *engine) { return engine->source->routers_are_floats ? &engine->router_type : NULL; }

/* ------------------------------------------------------------ loading and starting */

uint64_t ms_engine_minimum_bytes(const ms_engine *engine) { return ms_slots_minimum_bytes(engine->source, engine->loaded ? engine->wanted : NULL); }
uint64_t ms_engine_maximum_bytes(const ms_engine *engine) { return ms_slots_maximum_bytes(engine->source, engine->loaded ? engine->wanted : NULL); }

FILE *ms_engine_load_begin(ms_engine *engine) {
    engine->loading = true;
    engine->load_error[0] = 0;
    return ms_virtual_gguf_open(engine->source, engine->load_error, sizeof engine->load_error);
}

int ms_engine_load_end(ms_engine *engine, FILE *stream, char *err, size_t errlen) {
    if (stream) fclose(stream);
    engine->loading = false;
    engine->loaded = true;
    /* llama.cpp has its copy now */
    free(engine->source->header);
    engine->source->header = NULL;
    engine->source->header_bytes = 0;
    return engine->load_error[0] ? ms_fail(-EIO, err, errlen, "%s", engine->load_error) : 0;
}

int ms_engine_start(ms_engine *engine, uint64_t budget_bytes, char *err, size_t errlen) {
    if (engine->store) return ms_fail(-EALREADY, err, errlen, "the engine is started already");
    if (engine->heads && ms_heads_require_loaded(engine->heads, engine->wanted, err, errlen) < 0) return -EINVAL;
    struct ms_slots_options options = {.budget_bytes = budget_bytes, .verify = engine->verify, .wanted = engine->wanted, .policy = engine->policy, .timeline = &engine->timeline};
    int rc = engine->reader ? ms_slots_open(engine->source, engine->reader, engine->interleaving, options, &engine->store, err, errlen)
                            : ms_mapping_open(engine->source, engine->interleaving, engine->verify, &engine->store, err, errlen);
    engine->prerouter.store = engine->store;
    if (rc < 0 || engine->compute == MS_COMPUTE_GGML) return rc;
    return ms_products_open(engine->source, engine->wanted, engine->store, engine->compute == MS_COMPUTE_FAST, &engine->products, err, errlen);
}

/* ------------------------------------------------------------ what happened */

ms_stats ms_engine_stats(ms_engine *engine) {
    ms_stats stats = {0};
    if (engine->store) {
        struct ms_store_counters c = engine->store->counters(engine->store);
        stats = (ms_stats){
            .hits = c.hits, .misses = c.misses, .reads = c.reads, .bytes_read = c.bytes_read, .read_ns = c.read_ns, .wait_ns = c.wait_ns, .convert_ns = c.convert_ns,
            .guessed = c.guessed, .useful = c.useful, .late = c.late, .wasted = c.wasted, .guessed_bytes = c.guessed_bytes, .wasted_bytes = c.wasted_bytes,
            .slots_used = c.slots_used, .slots_total = c.slots_total, .slot_bytes = c.slot_bytes, .cache_bytes = c.capacity_bytes,
            .expert_resident_bytes = c.resident_bytes,
        };
    }
    for (int l = 0; l < engine->source->n_layers; l++)
        for (int m = 0; m < engine->source->layers[l].n_matrices; m++)
            if (computes_interleaved(engine, &engine->source->layers[l].matrices[m])) stats.matrices_interleaved++;
            else stats.matrices_plain++;
    pthread_mutex_lock(&engine->mutex);
    stats.tokens = engine->counters.tokens;
    stats.compute_ns = engine->counters.compute_ns;
    stats.wait_ns += engine->counters.wait_ns;
    stats.attention_ns = engine->counters.attention_ns;
    stats.router_ns = engine->counters.router_ns;
    stats.fused_blocks = engine->counters.fused_blocks;
    stats.ggml_blocks = engine->counters.ggml_blocks;
    stats.dropped = engine->counters.dropped;
    stats.heads_ns = engine->counters.heads_ns;
    stats.heads_bytes = engine->counters.heads_bytes;
    pthread_mutex_unlock(&engine->mutex);
    const struct ms_prerouter_model *prerouter = &engine->prerouter;
    stats.replaced = ms_routing_replaced(engine->routing);
    stats.predict_ns = __atomic_load_n(&prerouter->predict_ns, __ATOMIC_RELAXED);
    stats.depth = __atomic_load_n(&prerouter->depth, __ATOMIC_RELAXED);
    stats.verdict = ms_engine_verdict(engine);
    stats.trial_without_ns = __atomic_load_n(&prerouter->trial_ns[0], __ATOMIC_RELAXED);
    stats.trial_with_ns = __atomic_load_n(&prerouter->trial_ns[1], __ATOMIC_RELAXED);
    return stats;
}

void ms_engine_set_predictors(ms_engine *engine, int predictors, bool automatic) {
    engine->prerouter.predictors = (unsigned)predictors;
    engine->prerouter.automatic = automatic;
}

int ms_engine_pace(ms_engine *engine, uint64_t bytes_per_s, char *err, size_t errlen) {
    int rc = engine->store->pace(engine->store, bytes_per_s);
    if (rc == -ENOTSUP) return ms_fail(rc, err, errlen, "reads of reader=\"mmap\" are the kernel's and cannot be slowed down; use another reader");
    return rc < 0 ? ms_fail(rc, err, errlen, "out of memory for slowing down reads") : 0;
}

int ms_engine_verdict(const ms_engine *engine) { return __atomic_load_n(&engine->prerouter.verdict, __ATOMIC_ACQUIRE); }

ms_predictions ms_engine_predictions(ms_engine *engine, int depth) {
    const struct ms_prediction_counters *c = depth < 0 ? &engine->prerouter.known : &engine->prerouter.ahead[depth];
    ms_predictions predictions = {.layers = __atomic_load_n(&c->layers, __ATOMIC_RELAXED), .experts = __atomic_load_n(&c->experts, __ATOMIC_RELAXED),
                                  .recalled = __atomic_load_n(&c->recalled, __ATOMIC_RELAXED), .exact = __atomic_load_n(&c->exact, __ATOMIC_RELAXED)};
    for (int r = 0; r < MS_RANKS; r++) {
        predictions.absent[r] = __atomic_load_n(&c->absent[r], __ATOMIC_RELAXED);
        predictions.absent_right[r] = __atomic_load_n(&c->absent_right[r], __ATOMIC_RELAXED);
    }
    return predictions;
}

int ms_engine_layers_known(ms_engine *engine, bool *reads_state) {
    int known = 0;
    *reads_state = true;
    for (int l = 0; l < engine->source->n_layers; l++) {
        if (!engine->wanted[l]) continue;
        enum ms_router_input input = ms_routers_input(engine->prerouter.routers, l);
        known += input != MS_ROUTER_UNKNOWN;
        *reads_state = *reads_state && input == MS_ROUTER_READS_STATE;
    }
    return known;
}

double ms_engine_zeros(ms_engine *engine, int layer) {
    uint64_t of = __atomic_load_n(&engine->zeros[layer].of, __ATOMIC_RELAXED), zeros = __atomic_load_n(&engine->zeros[layer].zeros, __ATOMIC_RELAXED);
    return of ? (double)zeros / (double)of : -1;
}

void ms_engine_add(struct ms_engine *engine, const struct ms_experts_counters *counters, const char *err) {
    struct ms_experts_counters *sum = &engine->counters;
    pthread_mutex_lock(&engine->mutex);
    sum->tokens += counters->tokens;
    sum->compute_ns += counters->compute_ns;
    sum->wait_ns += counters->wait_ns;
    sum->attention_ns += counters->attention_ns;
    sum->router_ns += counters->router_ns;
    sum->fused_blocks += counters->fused_blocks;
    sum->ggml_blocks += counters->ggml_blocks;
    sum->dropped += counters->dropped;
    sum->heads_ns += counters->heads_ns;
    sum->heads_bytes += counters->heads_bytes;
    if (err[0]) {
        engine->error_code = -EIO;
        ms_fail(0, engine->error, sizeof engine->error, "%s", err);
    }
    pthread_mutex_unlock(&engine->mutex);
}

int ms_engine_take_error(ms_engine *engine, char *err, size_t errlen) {
    pthread_mutex_lock(&engine->mutex);
    int code = engine->error_code;
    if (code) ms_fail(code, err, errlen, "%s", engine->error);
    engine->error_code = 0;
    pthread_mutex_unlock(&engine->mutex);
    return code;
}

/* ------------------------------------------------------------ recording */

/* Between the numbers of two recordings: a thread that still adds to the one before takes none of the next. */
#define NUMBERS_APART 65536

/* Makes a timeline of that capacity the last of the engine's. false: out of memory. */
static bool next_timeline(struct ms_engine *engine, size_t capacity) {
    int n = engine->n_timelines;
    uint64_t first = n ? ms_timeline_next(engine->timelines[n - 1]) + NUMBERS_APART : 1;
    for (int t = 0; t < n; t++) {
        struct ms_timeline *found = engine->timelines[t];
        if (ms_timeline_capacity(found) != capacity) continue;
        ms_timeline_restart(found, first);
        engine->timelines[t] = engine->timelines[n - 1];
        engine->timelines[n - 1] = found;
        return true;
    }
    struct ms_timeline **timelines = realloc(engine->timelines, (size_t)(n + 1) * sizeof(struct ms_timeline *));
    if (timelines) engine->timelines = timelines;
    struct ms_timeline *made = timelines ? ms_timeline_open(capacity, first) : NULL;
    if (made) timelines[engine->n_timelines++] = made;
    return made != NULL;
}

bool ms_engine_record(ms_engine *engine, size_t capacity) {
    pthread_mutex_lock(&engine->mutex);
    bool possible = capacity == 0 || next_timeline(engine, capacity);
    if (possible) engine->timeline = capacity ? engine->timelines[engine->n_timelines - 1] : NULL;
    pthread_mutex_unlock(&engine->mutex);
    return possible;
}

size_t ms_engine_recorded(ms_engine *engine, ms_event *out, size_t capacity, uint64_t *dropped) {
    if (dropped) *dropped = 0;
    pthread_mutex_lock(&engine->mutex);
    size_t n = engine->n_timelines ? ms_timeline_read(engine->timelines[engine->n_timelines - 1], out, capacity, dropped) : 0;
    pthread_mutex_unlock(&engine->mutex);
    return n;
}
