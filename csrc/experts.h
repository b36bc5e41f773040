/* experts.h - the MoE block: products with experts that are not all in memory.
 *
 * llama.cpp's graph multiplies by a whole expert tensor (GGML_OP_MUL_MAT_ID).
 * Here each such node is lent, for the time of its computation, a view of the
 * store in place of that tensor and indices into the view in place of expert
 * numbers. ggml's own kernels then compute it, so the bits are stock's.
 *
 * A run of nodes on one layer (up, gate, GLU, down) is acquired once and
 * computed as one graph. When the layer wants more experts than the store can
 * hold at once, or the kernels' work area would grow past a bound, each
 * product is worked in rounds: the rows of some experts are gathered,
 * multiplied and scattered. A round holds all rows of its experts, because
 * ggml picks its kernel by their number.
 */
#ifndef MS_EXPERTS_H
#define MS_EXPERTS_H

#include <stddef.h>
#include <stdint.h>

#include "ggml-backend.h"
#include "ggml.h"
#include "source.h"
#include "store.h"

/* What an expert tensor's `extra` points to: where it is in the table. */
struct ms_expert_tensor {
    struct ms_engine *engine;
    int layer, matrix;
};

/* Answers for a tensor of the graph which expert tensor it is, or NULL. */
typedef const struct ms_expert_tensor *(*ms_expert_lookup)(const struct ggml_tensor *weight);

/* One context's computation: a private CPU backend and scratch memory. */
struct ms_experts;
struct ms_experts *ms_experts_new(ms_expert_lookup lookup); /* NULL: out of memory */
void ms_experts_free(struct ms_experts *experts);
void ms_experts_set_threads(struct ms_experts *experts, int n_threads);
void ms_experts_set_abort(struct ms_experts *experts, ggml_abort_callback callback, void *data);

/* Computes a graph (or split) whose expert products are all of one engine's
 * store. GGML_STATUS_FAILED leaves the sentence in err. Counts into *compute_ns
 * and into *tokens (tokens that passed the engine's first layer). */
enum ggml_status ms_experts_compute(struct ms_experts *experts, struct ms_store *store, const struct ms_source *source,
                                    struct ggml_cgraph *graph, int first_layer, int64_t *compute_ns, uint64_t *tokens, char *err, size_t errlen);

#endif
