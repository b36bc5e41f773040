#include "product.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "message.h"
#include "rows.h"

/* Kernels take many rows and activations at once, and then what is left in smaller steps: there is something for each. */
#define PROBE_ROWS 72   /* 64 + 8 */
#define PROBE_TOKENS 78 /* 64 + 12 + 2, and more than from which on any kernel of ggml's takes several at once */

struct ms_products {
    int n;
    struct ms_product *all; /* one a type and shape */
    const struct ms_product *(*of)[MS_MAX_MATRICES]; /* per layer */
};

/* ------------------------------------------------------------ computing */

bool ms_product_same_activations(const struct ms_product *a, const struct ms_product *b) {
    return a->columns == b->columns && a->quantise == b->quantise && a->activation_bytes == b->activation_bytes && a->quantise_four == b->quantise_four;
}

/* How many of n activations go to gemm; the others are computed one by one. */
static int in_fours(const struct ms_product *product, int n) { return product->gemm ? n / 4 * 4 : 0; }

void ms_product_quantise(const struct ms_product *product, const float *const *activations, int n, void *out, float *scratch) {
    size_t columns = (size_t)product->columns;
    int fours = in_fours(product, n);
    for (int a = 0; a < fours; a += 4) {
        for (int i = 0; i < 4; i++) memcpy(scratch + (size_t)i * columns, activations[a + i], columns * sizeof(float));
        product->quantise_four(scratch, (char *)out + (size_t)a * product->activation_bytes, product->columns);
    }
    for (int a = fours; a < n; a++) {
        char *one = (char *)out + (size_t)a * product->activation_bytes;
        if (product->quantise) product->quantise(activations[a], one, product->columns);
        else memcpy(one, activations[a], columns * sizeof(float));
    }
}

static void multiply_interleaved(const struct ms_product *product, const uint8_t *rows, int64_t n_rows, const char *quantised, int n, float *const *outputs, float *scratch) {
    int fours = in_fours(product, n);
    if (fours) {
        product->gemm((int)product->columns, scratch, (size_t)n_rows, rows, quantised, fours, (int)n_rows);
        for (int a = 0; a < fours; a++) memcpy(outputs[a], scratch + (size_t)a * (size_t)n_rows, (size_t)n_rows * sizeof(float));
    }
    for (int a = fours; a < n; a++)
        product->gemv((int)product->columns, outputs[a], (size_t)n_rows, rows, quantised + (size_t)a * product->activation_bytes, 1, (int)n_rows);
}

static void multiply_plain(const struct ms_product *product, const uint8_t *matrix, int64_t first, int64_t n_rows, const void *quantised, int n, float *const *outputs, float *scratch) {
    float *out = n == 1 ? outputs[0] : scratch;
    ms_rows_dot(product->type, product->columns, matrix, NULL, (int)first, (int)n_rows, quantised, product->activation_bytes, n, out, (size_t)n_rows);
    for (int a = 0; a < n && n > 1; a++) memcpy(outputs[a], scratch + (size_t)a * (size_t)n_rows, (size_t)n_rows * sizeof(float));
}

void ms_product_multiply(const struct ms_product *product, const uint8_t *matrix, int64_t first, int64_t n_rows, const void *quantised, int n,
                         float *const *outputs, float *scratch) {
    if (product->gemv) multiply_interleaved(product, matrix + (size_t)first * product->row_bytes, n_rows, quantised, n, outputs, scratch);
    else multiply_plain(product, matrix, first, n_rows, quantised, n, outputs, scratch);
}

/* ------------------------------------------------------------ what gives ggml's bits */

/* A small matrix and activations, and ggml's product of them. */
struct probe {
    struct ggml_context *context;
    ggml_backend_buffer_t buffer;
    struct ggml_tensor *weight;
    float *activations; /* [PROBE_TOKENS][columns] */
    float *one, *many;  /* ggml's products [PROBE_ROWS] of the first token alone, and [PROBE_TOKENS][PROBE_ROWS] of all together */
};

static void probe_close(struct probe *probe) {
    ggml_backend_buffer_free(probe->buffer);
    ggml_free(probe->context);
    free(probe->activations);
    free(probe->one);
    free(probe->many);
}

/* Values of very different size, so that a sum in another order is another sum. */
static void fill(float *values, size_t n, uint32_t seed) {
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        float size = (float)(1 << (seed >> 8 & 7));
        values[i] = ((float)(seed >> 12) / (float)(1 << 20) - 0.5f) * size;
    }
}

static bool ask_ggml(ggml_backend_t cpu, const struct ggml_tensor *weight, float *activations, int n_tokens, float *out) {
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() * 8 + ggml_graph_overhead_custom(4, false), .no_alloc = true});
    if (!context) return false;
    int32_t ids[PROBE_TOKENS] = {0};
    struct ggml_tensor *input = ggml_new_tensor_3d(context, GGML_TYPE_F32, weight->ne[0], 1, n_tokens);
    struct ggml_tensor *choice = ggml_new_tensor_2d(context, GGML_TYPE_I32, 1, n_tokens);
    struct ggml_tensor *product = ggml_mul_mat_id(context, (struct ggml_tensor *)weight, input, choice);
    input->data = activations;
    choice->data = ids;
    product->data = out;
    struct ggml_cgraph *graph = ggml_new_graph_custom(context, 4, false);
    product->flags |= GGML_TENSOR_FLAG_COMPUTE;
    ggml_graph_add_node(graph, product);
    bool done = ggml_backend_graph_compute(cpu, graph) == GGML_STATUS_SUCCESS;
    ggml_free(context);
    return done;
}

static bool probe_open(struct probe *probe, ggml_backend_t cpu, const struct ms_product *product) {
    size_t columns = (size_t)product->columns;
    *probe = (struct probe){.context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() * 2, .no_alloc = true})};
    float *values = malloc(PROBE_ROWS * columns * sizeof(float));
    void *plain = malloc(PROBE_ROWS * ggml_row_size(product->type, product->columns));
    float *importance = malloc(columns * sizeof(float)); /* a few types cannot be quantised to without */
    bool ok = probe->context && values && plain && importance;
    if (ok) {
        fill(values, PROBE_ROWS * columns, 1);
        for (size_t i = 0; i < columns; i++) importance[i] = 1.0f;
        ggml_quantize_chunk(product->type, values, plain, 0, PROBE_ROWS, product->columns, importance);
        probe->weight = ggml_new_tensor_3d(probe->context, product->type, product->columns, PROBE_ROWS, 1);
        ggml_backend_buffer_type_t buft = product->prototype ? ggml_backend_buffer_get_type(product->prototype->buffer) : ggml_backend_cpu_buffer_type();
        probe->buffer = ggml_backend_buft_alloc_buffer(buft, ggml_backend_buft_get_alloc_size(buft, probe->weight));
        probe->activations = malloc(PROBE_TOKENS * columns * sizeof(float));
        probe->one = malloc(PROBE_ROWS * sizeof(float));
        probe->many = malloc(PROBE_TOKENS * PROBE_ROWS * sizeof(float));
        ok = probe->buffer && probe->activations && probe->one && probe->many &&
             ggml_backend_tensor_alloc(probe->buffer, probe->weight, ggml_backend_buffer_get_base(probe->buffer)) == GGML_STATUS_SUCCESS;
    }
    if (ok) {
        fill(probe->activations, PROBE_TOKENS * columns, 2);
        ggml_backend_tensor_set(probe->weight, plain, 0, PROBE_ROWS * ggml_row_size(product->type, product->columns));
        ok = ask_ggml(cpu, probe->weight, probe->activations, 1, probe->one) && ask_ggml(cpu, probe->weight, probe->activations, PROBE_TOKENS, probe->many);
    }
    free(values);
    free(plain);
    free(importance);
    return ok;
}

/* Has this way of computing ggml's bits, for n activations at once? */
static bool is_exact(const struct ms_product *product, const struct probe *probe, int n, const float *expected) {
    size_t columns = (size_t)product->columns;
    char *quantised = malloc((size_t)n * product->activation_bytes);
    float *scratch = malloc((columns * 4 + (size_t)n * PROBE_ROWS) * sizeof(float)), *out = calloc((size_t)n * PROBE_ROWS, sizeof(float));
    const float *activations[PROBE_TOKENS];
    float *outputs[PROBE_TOKENS];
    bool same = quantised && scratch && out;
    for (int a = 0; a < n && same; a++) {
        activations[a] = probe->activations + (size_t)a * columns;
        outputs[a] = out + (size_t)a * PROBE_ROWS;
    }
    if (same) {
        ms_product_quantise(product, activations, n, quantised, scratch);
        ms_product_multiply(product, probe->weight->data, 0, PROBE_ROWS, quantised, n, outputs, scratch);
        same = memcmp(out, expected, (size_t)n * PROBE_ROWS * sizeof(float)) == 0;
    }
    free(quantised);
    free(scratch);
    free(out);
    return same;
}

/* ------------------------------------------------------------ choosing */

static bool choose_plain(struct ms_product *product, const struct probe *probe) {
    if (!ggml_get_type_traits_cpu(product->type)->vec_dot || !is_exact(product, probe, 1, probe->one)) return false;
    product->by_ggml = !is_exact(product, probe, PROBE_TOKENS, probe->many);
    return true;
}

/* ggml's kernels for interleaved rows have no public names, but names they have. One that is called by the wrong one
 * of them computes something else, and is_exact says so. */
static bool choose_interleaved(struct ms_product *product, const struct probe *probe, bool fast) {
    static const struct {
        const char *suffix;
        int rows, bytes;
    } shapes[] = {{"8x8", 8, 8}, {"8x4", 8, 4}, {"4x8", 4, 8}, {"4x4", 4, 4}};
    enum ggml_type activation = ggml_get_type_traits_cpu(product->type)->vec_dot_type;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        char name[96];
        snprintf(name, sizeof name, "ggml_gemv_%s_%s_%s", ggml_type_name(product->type), shapes[i].suffix, ggml_type_name(activation));
        product->gemv = (ms_gem)dlsym(RTLD_DEFAULT, name);
        product->gemm = NULL;
        product->quantise_four = NULL;
        if (!product->gemv || product->rows % shapes[i].rows || !is_exact(product, probe, 1, probe->one)) continue;
        bool row_by_row = is_exact(product, probe, PROBE_TOKENS, probe->many);
        memcpy(name + 8, "m", 1);
        product->gemm = (ms_gem)dlsym(RTLD_DEFAULT, name);
        snprintf(name, sizeof name, "ggml_quantize_mat_%s_4x%d", ggml_type_name(activation), shapes[i].bytes);
        product->quantise_four = (ms_quantise_four)dlsym(RTLD_DEFAULT, name);
        bool by_fours = product->gemm && product->quantise_four && (fast || is_exact(product, probe, PROBE_TOKENS, probe->many));
        if (!by_fours) {
            product->gemm = NULL;
            product->quantise_four = NULL;
        }
        product->by_ggml = !row_by_row && !by_fours;
        return true;
    }
    return false;
}

static bool choose(struct ms_product *product, ggml_backend_t cpu, bool fast) {
    if (product->neuron_major) return true;
    enum ggml_type activation = ggml_get_type_traits_cpu(product->type)->vec_dot_type;
    product->activation_bytes = ggml_row_size(activation, product->columns);
    product->quantise = activation == GGML_TYPE_F32 ? NULL : ggml_get_type_traits_cpu(activation)->from_float;
    struct probe probe;
    bool ok = probe_open(&probe, cpu, product) && (product->prototype ? choose_interleaved(product, &probe, fast) : choose_plain(product, &probe));
    probe_close(&probe);
    return ok;
}

int ms_products_open(const struct ms_source *source, const bool *wanted_layers, struct ms_store *store, bool fast, struct ms_products **out, char *err, size_t errlen) {
    struct ms_products *products = calloc(1, sizeof *products);
    ggml_backend_t cpu = ggml_backend_cpu_init();
    if (products) {
        products->all = calloc((size_t)source->n_layers * MS_MAX_MATRICES, sizeof *products->all);
        products->of = calloc((size_t)source->n_layers, sizeof *products->of);
    }
    if (!products || !cpu || !products->all || !products->of) {
        ms_products_close(products);
        if (cpu) ggml_backend_free(cpu);
        return ms_fail(-ENOMEM, err, errlen, "out of memory for the expert kernels");
    }
    ggml_backend_cpu_set_n_threads(cpu, 1);
    for (int l = 0; l < source->n_layers; l++)
        for (int m = 0; wanted_layers[l] && m < source->layers[l].n_matrices; m++) {
            const struct ms_matrix *matrix = &source->layers[l].matrices[m];
            struct ms_view view = store->view(store, l, m);
            struct ms_product wanted = {.type = (enum ggml_type)matrix->type, .columns = matrix->columns, .rows = matrix->rows, .prototype = view.prototype,
                                        .neuron_major = view.neuron_major_type >= 0};
            wanted.row_bytes = wanted.neuron_major ? ggml_row_size(wanted.type, wanted.rows) : ggml_row_size(wanted.type, wanted.columns);
            struct ms_product *product = NULL;
            for (int i = 0; i < products->n && !product; i++) {
                struct ms_product *p = &products->all[i];
                if (p->type == wanted.type && p->columns == wanted.columns && p->rows == wanted.rows && p->prototype == wanted.prototype && p->neuron_major == wanted.neuron_major) product = p;
            }
            if (!product) {
                product = &products->all[products->n++];
                *product = wanted;
                product->usable = choose(product, cpu, fast);
            }
            products->of[l][m] = product->usable ? product : NULL;
        }
    ggml_backend_free(cpu);
    *out = products;
    return 0;
}

void ms_products_close(struct ms_products *products) {
    if (!products) return;
    free(products->all);
    free(products->of);
    free(products);
}

const struct ms_product *ms_product_of(const struct ms_products *products, int layer, int matrix) { return products->of[layer][matrix]; }
