#include "kernels.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "message.h"
#include "moestream.h"

struct prototype {
    int type;
    int64_t columns, rows;
    struct ggml_tensor *tensor;
    ggml_backend_buffer_t buffer;
    ms_permutation *permutation; /* what interleaving does to the bits, of a laid file; else NULL */
};

struct ms_interleaving {
    struct ggml_context *context;
    int n_prototypes;
    struct prototype *prototypes;
};

ggml_backend_buffer_type_t ms_repack_buffer_type(void) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!cpu) return NULL;
    ggml_backend_dev_get_extra_bufts_t extra_bufts =
        (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t *buft = extra_bufts ? extra_bufts(cpu) : NULL; buft && *buft; buft++)
        if (strcmp(ggml_backend_buft_name(*buft), "CPU_REPACK") == 0) return *buft;
    return NULL;
}

/* Asks ggml what llama.cpp asks when it places an expert tensor: can the CPU
 * run this product with the weight in that buffer? */
static bool would_interleave(ggml_backend_dev_t cpu, ggml_backend_buffer_type_t buft, const struct ms_matrix *matrix, int n_experts, int n_used) {
    struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() * 8, .no_alloc = true});
    if (!context) return false;
    struct ggml_tensor *weight = ggml_new_tensor_3d(context, (enum ggml_type)matrix->type, matrix->columns, matrix->rows, n_experts);
    struct ggml_tensor *input = ggml_new_tensor_3d(context, GGML_TYPE_F32, matrix->columns, n_used, 512);
    struct ggml_tensor *ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, n_used, 512);
    struct ggml_tensor *product = ggml_mul_mat_id(context, weight, input, ids);
    weight->buffer = ggml_backend_buft_alloc_buffer(buft, 0);
    bool yes = ggml_backend_dev_supports_op(cpu, product);
    ggml_backend_buffer_free(weight->buffer);
    ggml_free(context);
    return yes;
}

static const struct prototype *find(const struct ms_interleaving *interleaving, const struct ms_matrix *matrix) {
    for (int i = 0; i < interleaving->n_prototypes; i++) {
        const struct prototype *p = &interleaving->prototypes[i];
        if (p->type == matrix->type && p->columns == matrix->columns && p->rows == matrix->rows) return p;
    }
    return NULL;
}

int ms_interleaving_open(const struct ms_source *source, struct ms_interleaving **out, char *err, size_t errlen) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_buffer_type_t buft = ms_repack_buffer_type();
    *out = NULL;
    if (!buft) return 0;
    size_t n = (size_t)source->n_layers * MS_MAX_MATRICES;
    struct ms_interleaving *interleaving = calloc(1, sizeof *interleaving);
    if (interleaving) {
        interleaving->context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() * (n + 1), .no_alloc = true});
        interleaving->prototypes = calloc(n, sizeof(struct prototype));
    }
    if (!interleaving || !interleaving->context || !interleaving->prototypes) goto out_of_memory;
    for (int l = 0; l < source->n_layers; l++) {
        const struct ms_layer *layer = &source->layers[l];
        for (int m = 0; m < layer->n_matrices; m++) {
            const struct ms_matrix *matrix = &layer->matrices[m];
            if (matrix->form == MS_FORM_NEURON_MAJOR || matrix->by_row || find(interleaving, matrix)) continue;
            struct prototype *p = &interleaving->prototypes[interleaving->n_prototypes++];
            *p = (struct prototype){.type = matrix->type, .columns = matrix->columns, .rows = matrix->rows};
            if (!would_interleave(cpu, buft, matrix, layer->n_experts, source->n_experts_used)) continue;
            p->tensor = ggml_new_tensor_3d(interleaving->context, (enum ggml_type)matrix->type, matrix->columns, matrix->rows, 1);
            /* address space of one expert, never touched: only buffer and extra are used */
            p->buffer = ggml_backend_buft_alloc_buffer(buft, ggml_nbytes(p->tensor));
            if (!p->buffer || ggml_backend_tensor_alloc(p->buffer, p->tensor, ggml_backend_buffer_get_base(p->buffer)) != GGML_STATUS_SUCCESS)
                goto out_of_memory;
            int rc = source->layout ? ms_permutation_native(matrix->type, matrix->columns, matrix->rows, &p->permutation, err, errlen) : 0;
            if (rc < 0) {
                ms_interleaving_close(interleaving);
                return rc;
            }
        }
    }
    *out = interleaving;
    return 0;
out_of_memory:
    ms_interleaving_close(interleaving);
    return ms_fail(-ENOMEM, err, errlen, "out of memory for the interleaved kernels");
}

void ms_interleaving_close(struct ms_interleaving *interleaving) {
    if (!interleaving) return;
    for (int i = 0; i < interleaving->n_prototypes; i++) {
        ggml_backend_buffer_free(interleaving->prototypes[i].buffer);
        ms_permutation_free(interleaving->prototypes[i].permutation);
    }
    ggml_free(interleaving->context);
    free(interleaving->prototypes);
    free(interleaving);
}

const struct ggml_tensor *ms_interleaving_prototype(const struct ms_interleaving *interleaving, const struct ms_matrix *matrix) {
    const struct prototype *p = interleaving && matrix->form != MS_FORM_NEURON_MAJOR && !matrix->by_row ? find(interleaving, matrix) : NULL;
    return p ? p->tensor : NULL;
}

bool ms_interleaving_is_stored(const struct ms_interleaving *interleaving, const struct ms_source *source, const struct ms_matrix *matrix) {
    const struct ms_permutation *stored = ms_source_interleaving(source, matrix);
    const struct prototype *p = interleaving && stored ? find(interleaving, matrix) : NULL;
    return p && p->tensor && p->permutation && ms_permutation_equal(stored, p->permutation);
}

void ms_interleave(const struct ggml_tensor *prototype, const struct ms_matrix *matrix, const void *plain, void *out) {
    struct ggml_tensor expert = *prototype;
    expert.data = out;
    ggml_backend_tensor_set(&expert, plain, 0, matrix->slice_bytes);
}
