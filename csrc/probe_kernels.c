/* probe_kernels.c - how fast a token's products read weights from memory, and its attention keys and values.
 *
 * A pass is a graph of many products of one vector, each with a matrix of its
 * own, over more memory than caches hold; ggml's CPU backend computes it with
 * the threads that decode uses. The matrices are copies of one, of valid
 * weights, in huge pages as experts in slots are, or in ordinary ones as
 * dense weights.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "clock.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "kernels.h"
#include "message.h"
#include "moestream.h"
#include "probe.h"
#include "rows.h"
#include "tensor.h"

#define QUANTISED_ROWS 32 /* the rest of a matrix repeats them */

struct ms_kernel_probe {
    uint8_t *memory;
    size_t bytes;
    int n_threads;
    ggml_backend_t cpu;
};

int ms_kernel_probe_open(uint64_t size_bytes, bool huge, int n_threads, ms_kernel_probe **out, char *err, size_t errlen) {
    struct ms_kernel_probe *probe = calloc(1, sizeof *probe);
    if (probe) {
        probe->bytes = (size_t)size_bytes;
        probe->n_threads = n_threads;
        probe->memory = ms_probe_map(&probe->bytes, huge);
        probe->cpu = ggml_backend_cpu_init();
    }
    if (!probe || !probe->memory || !probe->cpu) {
        ms_kernel_probe_close(probe);
        return ms_fail(-ENOMEM, err, errlen, "no %llu MB of memory to measure how fast weights in it are multiplied", (unsigned long long)size_bytes / 1000000);
    }
    ggml_backend_cpu_set_n_threads(probe->cpu, n_threads);
    *out = probe;
    return 0;
}

void ms_kernel_probe_close(ms_kernel_probe *probe) {
    if (!probe) return;
    if (probe->cpu) ggml_backend_free(probe->cpu);
    if (probe->memory) munmap(probe->memory, probe->bytes);
    free(probe);
}

/* ------------------------------------------------------------ passes */

/* Computes the graph over and over. Writes how long each time took, in seconds, and returns how often, or -EIO. */
static int time_graph(struct ms_kernel_probe *probe, struct ggml_cgraph *graph, int64_t for_ns, double *seconds, int max, char *err, size_t errlen) {
    int n = -1; /* the first finds threads asleep and memory cold */
    int64_t end = ms_now_ns() + for_ns;
    do {
        int64_t begin = ms_now_ns();
        if (ggml_backend_graph_compute(probe->cpu, graph) != GGML_STATUS_SUCCESS) return ms_fail(-EIO, err, errlen, "ggml cannot compute a product of weights");
        if (n >= 0) seconds[n] = (double)(ms_now_ns() - begin) / 1e9;
        n++;
    } while (n < 1 || (n < max && ms_now_ns() < end));
    return n;
}

/* Values of both signs and all sizes up to one. */
static void fill(float *values, size_t n) {
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)(state >> 8) / (float)(1 << 23) - 1;
    }
}

/* ------------------------------------------------------------ products */

/* One matrix of the type, its rows plain. NULL: out of memory. */
static uint8_t *make_matrix(enum ggml_type type, int64_t columns, int64_t rows) {
    size_t row_bytes = ggml_row_size(type, columns), some = (size_t)(rows < QUANTISED_ROWS ? rows : QUANTISED_ROWS);
    uint8_t *matrix = malloc(row_bytes * (size_t)rows);
    float *values = malloc(some * (size_t)columns * sizeof(float)), *importance = malloc((size_t)columns * sizeof(float)); /* a few types cannot do without */
    bool ok = matrix && values && importance;
    if (ok) {
        fill(values, some * (size_t)columns);
        for (int64_t i = 0; i < columns; i++) importance[i] = 1;
        ggml_quantize_chunk(type, values, matrix, 0, (int64_t)some, columns, importance);
        for (size_t row = some; row < (size_t)rows; row++) memcpy(matrix + row * row_bytes, matrix + (row - some) * row_bytes, row_bytes);
    }
    free(values);
    free(importance);
    if (ok) return matrix;
    free(matrix);
    return NULL;
}

/* What makes ggml take its interleaved kernels for a matrix of that shape. */
struct interleaved {
    struct ggml_context *context;
    ggml_backend_buffer_t buffer;
    struct ggml_tensor *prototype; /* NULL: ggml leaves that shape plain */
};

static int interleaved_open(struct interleaved *interleaved, enum ggml_type type, int64_t columns, int64_t rows) {
    *interleaved = (struct interleaved){0};
    ggml_backend_buffer_type_t buft = ms_repack_buffer_type();
    if (!buft) return 0;
    interleaved->context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() * 2, .no_alloc = true});
    if (!interleaved->context) return -ENOMEM;
    struct ggml_tensor *tensor = ggml_new_tensor_2d(interleaved->context, type, columns, rows);
    interleaved->buffer = ggml_backend_buft_alloc_buffer(buft, ggml_nbytes(tensor));
    if (!interleaved->buffer || ggml_backend_tensor_alloc(interleaved->buffer, tensor, ggml_backend_buffer_get_base(interleaved->buffer)) != GGML_STATUS_SUCCESS) return -ENOMEM;
    if (tensor->extra) interleaved->prototype = tensor;
    return 0;
}

static void interleaved_close(struct interleaved *interleaved) {
    ggml_backend_buffer_free(interleaved->buffer);
    ggml_free(interleaved->context);
}

/* Of the products by rows.h: the matrix is in the first source's place, its activations come with it. */
struct by_rows {
    enum ggml_type type;
    int64_t columns;
    const uint8_t *matrix;
    const void *activations;
    size_t activation_bytes;
};

static void multiply_rows(struct ggml_tensor *dst, const struct ggml_tensor *a, int ith, int nth, void *userdata) {
    (void)a;
    const struct by_rows *of = userdata;
    int first = (int)(dst->ne[0] * ith / nth), end = (int)(dst->ne[0] * (ith + 1) / nth);
    ms_rows_dot(of->type, of->columns, of->matrix, NULL, first, end - first, of->activations, of->activation_bytes, 1, (float *)dst->data + first, 1);
}

/* Matrix i of n in an order in which no two neighbours follow each other: the golden ratio of n apart, or a little more. */
static size_t scattered(size_t i, size_t n) {
    size_t step = (size_t)((double)n * 0.618) + 1;
    for (size_t a = step, b = n; b != 0;) { /* without a common divisor every matrix has its turn */
        size_t rest = a % b;
        a = b;
        b = rest;
        if (b == 0 && a != 1) a = ++step, b = n;
    }
    return i * step % n;
}

int ms_kernel_probe_products(ms_kernel_probe *probe, const ms_kernel_probe_options *options, double *seconds, int max, char *err, size_t errlen) {
    if (options->type < 0 || options->type >= GGML_TYPE_COUNT || ggml_blck_size((enum ggml_type)options->type) == 0)
        return ms_fail(-EINVAL, err, errlen, "type %d is none of this ggml", options->type);
    enum ggml_type type = (enum ggml_type)options->type, activation = ggml_get_type_traits_cpu(type)->vec_dot_type;
    int64_t columns = options->columns, rows = options->rows;
    size_t matrix_bytes = ggml_row_size(type, columns) * (size_t)rows;
    if (columns % ggml_blck_size(type) || matrix_bytes * (size_t)options->n > probe->bytes)
        return ms_fail(-EINVAL, err, errlen, "%d matrices of %lld x %lld do not fit", options->n, (long long)columns, (long long)rows);
    size_t n = (size_t)options->n;
    struct interleaved interleaved = {0};
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() * (3 * n + 2) + ggml_graph_overhead_custom(2 * n + 2, false), .no_alloc = true});
    struct by_rows *by_rows = calloc(n, sizeof *by_rows);
    float *input = malloc((size_t)columns * sizeof(float)), *output = malloc((size_t)rows * sizeof(float));
    void *activations = malloc(ggml_row_size(activation, columns));
    uint8_t *matrix = make_matrix(type, columns, rows);
    int rc = context && by_rows && input && output && activations && matrix ? 0 : -ENOMEM;
    if (rc == 0 && options->kernels == MS_PROBE_INTERLEAVED) rc = interleaved_open(&interleaved, type, columns, rows);
    if (rc < 0) {
        ms_fail(rc, err, errlen, "out of memory for the kernels of %s", ggml_type_name(type));
        goto done;
    }
    if (options->kernels == MS_PROBE_INTERLEAVED && !interleaved.prototype) {
        rc = ms_fail(-ENOTSUP, err, errlen, "ggml does not interleave %s here", ggml_type_name(type));
        goto done;
    }
    fill(input, (size_t)columns);
    if (activation == GGML_TYPE_F32) memcpy(activations, input, (size_t)columns * sizeof(float));
    else ggml_get_type_traits_cpu(activation)->from_float(input, activations, columns);
    for (size_t i = 0; i < n; i++) {
        uint8_t *to = probe->memory + i * matrix_bytes;
        if (i > 0) memcpy(to, probe->memory, matrix_bytes);
        else if (!interleaved.prototype) memcpy(to, matrix, matrix_bytes);
        else {
            struct ggml_tensor first = *interleaved.prototype;
            first.data = to;
            ggml_backend_tensor_set(&first, matrix, 0, matrix_bytes);
        }
    }
    struct ggml_cgraph *graph = ggml_new_graph_custom(context, 2 * n + 2, false);
    struct ggml_tensor *vector = ggml_new_tensor_1d(context, GGML_TYPE_F32, columns), *place = ggml_new_tensor_1d(context, GGML_TYPE_F32, rows);
    vector->data = input;
    place->data = output;
    for (size_t i = 0; i < n; i++) {
        struct ggml_tensor *product;
        uint8_t *weights = probe->memory + (options->scattered ? scattered(i, n) : i) * matrix_bytes;
        if (options->kernels == MS_PROBE_ROWS) {
            by_rows[i] = (struct by_rows){type, columns, weights, activations, ggml_row_size(activation, columns)};
            product = ggml_map_custom1(context, place, multiply_rows, GGML_N_TASKS_MAX, &by_rows[i]);
        } else {
            struct ggml_tensor *weight = ggml_new_tensor_2d(context, type, columns, rows);
            weight->data = weights;
            if (interleaved.prototype) {
                weight->buffer = interleaved.prototype->buffer;
                weight->extra = interleaved.prototype->extra;
            }
            product = ggml_mul_mat(context, weight, vector);
        }
        product->data = output;
        ggml_build_forward_expand(graph, product);
    }
    rc = time_graph(probe, graph, options->for_ns, seconds, max, err, errlen);
done:
    interleaved_close(&interleaved);
    ggml_free(context);
    free(by_rows);
    free(input);
    free(output);
    free(activations);
    free(matrix);
    return rc;
}

/* ------------------------------------------------------------ attention */

int ms_kernel_probe_attention(ms_kernel_probe *probe, int layers, int heads, int kv_heads, int head, int positions, int64_t for_ns, double *seconds, int max, char *err, size_t errlen) {
    size_t n = (size_t)layers, row_bytes = (size_t)(kv_heads * head) * sizeof(ggml_fp16_t), cache_bytes = row_bytes * (size_t)positions;
    if (2 * n * cache_bytes > probe->bytes) return ms_fail(-EINVAL, err, errlen, "%d layers of %d positions do not fit", layers, positions);
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() * (5 * n + 3) + ggml_graph_overhead_custom(6 * n + 4, false), .no_alloc = true});
    size_t values = (size_t)(heads * head);
    float *query = malloc(values * sizeof(float)), *output = malloc(values * sizeof(float)), *some = malloc(row_bytes / sizeof(ggml_fp16_t) * sizeof(float));
    float *scores = malloc((size_t)heads * (size_t)positions * sizeof(float)), *mask = calloc((size_t)positions, sizeof *mask);
    int rc;
    if (!context || !query || !output || !some || !scores || !mask) {
        rc = ms_fail(-ENOMEM, err, errlen, "out of memory for attention");
        goto done;
    }
    fill(query, values);
    fill(some, row_bytes / sizeof(ggml_fp16_t));
    ggml_fp32_to_fp16_row(some, (ggml_fp16_t *)probe->memory, (int64_t)(row_bytes / sizeof(ggml_fp16_t)));
    for (size_t at = row_bytes; at < 2 * n * cache_bytes; at += row_bytes) memcpy(probe->memory + at, probe->memory, row_bytes);
    struct ggml_tensor *q = ggml_new_tensor_3d(context, GGML_TYPE_F32, head, 1, heads), *m = ggml_new_tensor_2d(context, GGML_TYPE_F32, positions, 1);
    q->data = query;
    m->data = mask;
    struct ggml_cgraph *graph = ggml_new_graph_custom(context, 6 * n + 4, false);
    for (size_t i = 0; i < n; i++) {
        /* As in llama.cpp's cache: of keys all heads of a position together, of values all positions of a value. */
        struct ggml_tensor *keys = ggml_new_tensor_3d(context, GGML_TYPE_F16, head, positions, kv_heads);
        keys->data = probe->memory + 2 * i * cache_bytes;
        keys->nb[1] = row_bytes;
        keys->nb[2] = (size_t)head * sizeof(ggml_fp16_t);
        keys->nb[3] = cache_bytes;
        struct ggml_tensor *transposed = ggml_new_tensor_3d(context, GGML_TYPE_F16, positions, head, kv_heads);
        transposed->data = probe->memory + (2 * i + 1) * cache_bytes;
        struct ggml_tensor *alike = ggml_mul_mat(context, keys, q);
        ggml_mul_mat_set_prec(alike, GGML_PREC_F32);
        struct ggml_tensor *shares = ggml_soft_max_ext(context, alike, m, 1.0f / sqrtf((float)head), 0);
        alike->data = shares->data = scores;
        struct ggml_tensor *attention = ggml_mul_mat(context, transposed, shares);
        attention->data = output;
        ggml_build_forward_expand(graph, attention);
    }
    rc = time_graph(probe, graph, for_ns, seconds, max, err, errlen);
done:
    ggml_free(context);
    free(query);
    free(output);
    free(some);
    free(scores);
    free(mask);
    return rc;
}
