/* experts.h - the MoE block: products with experts that are not all in memory.
 *
 * llama.cpp's graph multiplies by a whole expert tensor (GGML_OP_MUL_MAT_ID).
 * A run of nodes on one layer that is a whole MoE block is computed as one
 * (block.h). Otherwise, or where the engine wants it so, each product is lent,
 * for the time of its computation, a view of the store in place of that tensor
 * and indices into the view in place of expert numbers. ggml's own kernels
 * then compute it, so the bits are stock's.
 *
 * A lent run of nodes (up, gate, GLU, down) is acquired once and computed as
 * one graph. When the layer wants more experts than the store can
 * hold at once, or the kernels' work area would grow past a bound, each
 * product is worked in rounds: the rows of some experts are gathered,
 * multiplied and scattered. A round holds all rows of its experts, because
 * ggml picks its kernel by their number.
 */
#ifndef MS_EXPERTS_H
#define MS_EXPERTS_H

#include <stddef.h>
#include <stdint.h>

#include "block.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "heads.h"
#include "prerouter.h"
#include "product.h"
#include "routing.h"
#include "source.h"
#include "store.h"
#include "timeline.h"

/* What an expert tensor's `extra` points to: where it is in the table. Other weights whose operations come to us have
 * one too, in place of a matrix: */
#define MS_WEIGHT_NORM (-1)   /* of the state before a layer's attention */
#define MS_WEIGHT_ROUTER (-2)
struct ms_expert_tensor {
    struct ms_engine *engine;
    int layer, matrix;
};

/* One context's computation: a private CPU backend and scratch memory. */
struct ms_experts;
struct ms_experts *ms_experts_new(ms_expert_lookup lookup, ms_expert_lookup hook_lookup); /* of experts, and of the others; NULL: out of memory */
void ms_experts_free(struct ms_experts *experts);
void ms_experts_set_threads(struct ms_experts *experts, int n_threads);
void ms_experts_set_abort(struct ms_experts *experts, ggml_abort_callback callback, void *data);

/* What a graph is computed with: all of one engine. */
struct ms_experts_model {
    const struct ms_source *source;
    struct ms_store *store;
    const struct ms_products *products; /* NULL: every node by ggml */
    int first_layer, last_layer; /* of the loaded model: tokens are counted where they pass the first */
    struct ms_prerouter_model *prerouter;
    struct ms_routing *routing;
    struct ms_heads *heads; /* NULL: there are none */
    struct ms_timeline *timeline; /* NULL: nothing is recorded */
};

/* What computations did; added to. Times in nanoseconds. */
struct ms_experts_counters {
    uint64_t tokens; /* that passed the first layer */
    int64_t compute_ns;
    int64_t attention_ns; /* from one layer's experts to what comes here for the next */
    int64_t router_ns;    /* nodes here that come before a layer's experts */
    int64_t wait_ns; /* without anything to compute; besides what the store counts */
    uint64_t fused_blocks, ggml_blocks; /* layers computed as one, or node by node */
    uint64_t dropped;     /* experts that should have been run where heads route, and were not */
    int64_t heads_ns;     /* threads' mean time on heads; in none of the above */
    uint64_t heads_bytes; /* of their weights, read */
};

/* Of one layer, where the activation gives zeros; atomic. */
struct ms_experts_zeros {
    uint64_t zeros, of;
};

/* Computes a graph (or split); model is NULL if nothing in it is the engine's. zeros: one a layer of the source.
 * GGML_STATUS_FAILED leaves the sentence in err. */
enum ggml_status ms_experts_compute(struct ms_experts *experts, const struct ms_experts_model *model, struct ggml_cgraph *graph, struct ms_experts_counters *counters,
                                    struct ms_experts_zeros *zeros, char *err, size_t errlen);

#endif
