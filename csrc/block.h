/* block.h - a layer's experts as one operation: gate and up, activation, down, and the weighted sum.
 *
 * llama.cpp's graph has a node for each, with all threads meeting between
 * them, and each for all experts. Here a layer is a set of pieces of work that
 * threads take as they come free and as bytes come in:
 *
 *   few rows an expert (decode)   the rows of the matrices are divided: a part of gate and up, then of down
 *   many (prompts)                the tokens are: one thread takes some tokens of one expert all the way through
 *
 * Products have ggml's bits (product.h); what lies between them, whatever it
 * is as long as it goes row by row, is computed by ggml itself on a few rows
 * at a time. So the result has stock's bits.
 *
 * An expert is computed when its bytes are there, while others are being read.
 * A prompt may want more experts than there is room for: each is read once,
 * computed for all its tokens, and makes room for the next; meanwhile experts
 * of the next layer are asked for. See block.c for what then stays in memory.
 */
#ifndef MS_BLOCK_H
#define MS_BLOCK_H

#include <stdbool.h>
#include <stdint.h>

#include "ggml-backend.h"
#include "ggml.h"
#include "product.h"
#include "source.h"
#include "store.h"

#define MS_BLOCK_ROW_NODES 12

/* What a run of graph nodes is, if it is such a layer. */
struct ms_block_nodes {
    int layer;
    struct ggml_tensor *ids;      /* I32 {choices, tokens} */
    struct ggml_tensor *input;    /* F32 {columns, choices or 1, tokens} */
    int n_first;                  /* gate and up, either order; or one of up and gate_up */
    struct ggml_tensor *first[2]; /* the nodes */
    int first_matrix[2];
    int n_rowwise;                /* what is between, in order */
    struct ggml_tensor *rowwise[MS_BLOCK_ROW_NODES];
    struct ggml_tensor *down;
    int down_matrix;
    int gate; /* of ReGLU: which of `first` decides what is zero; else -1 */
    bool zeros; /* the activation gives zeros */
    int end;  /* the first node that does not belong to it */
    /* sum over the choices of weight times down, or NULL where the graph does something else with them */
    struct ggml_tensor *weights; /* F32 {1, choices, tokens} */
    struct ggml_tensor *sum;     /* F32 {rows of down, tokens} */
};

struct ms_expert_tensor;
typedef const struct ms_expert_tensor *(*ms_expert_lookup)(const struct ggml_tensor *weight);

/* Is graph[begin, end), which begins with an expert product, a block? */
bool ms_block_recognise(struct ggml_cgraph *graph, int begin, int end, ms_expert_lookup lookup, struct ms_block_nodes *nodes);

/* What the blocks of a context use: scratch, and what they remember of the last prompt. */
struct ms_block;
struct ms_block *ms_block_new(void); /* NULL: out of memory */
void ms_block_free(struct ms_block *block);

struct ms_block_result {
    int64_t wait_ns;       /* the threads' mean time without anything to compute */
    uint64_t activations;  /* values behind the activation, where it gives zeros; else 0 */
    uint64_t zeros;        /* of these */
    uint64_t dropped;      /* choices whose expert was not computed: 0 */
};

/* What the first thread does once the block's experts are on their way, what all threads do before they compute (NULL:
 * nothing; it is over when the block is), and where the first records that it waits. */
struct ms_block_meanwhile {
    void (*function)(void *context);
    void (*share)(void *context);
    void *context;
    struct ms_timeline *timeline; /* or NULL */
    uint32_t batch;
};

/* Computes a block for the experts in wanted[0, n), the distinct ones of ids, on `cpu`, with n_threads threads.
 * GGML_STATUS_FAILED leaves the sentence in err. */
enum ggml_status ms_block_compute(struct ms_block *block, ggml_backend_t cpu, int n_threads, const struct ms_source *source, struct ms_store *store,
                                  const struct ms_products *products, const struct ms_block_nodes *nodes, const int32_t *wanted, int n,
                                  const struct ms_block_meanwhile *meanwhile, struct ms_block_result *result, char *err, size_t errlen);

#endif
