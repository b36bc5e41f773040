/* moestream.h - the C interface of moestream, as the Python package uses it.
 *
 * An engine streams the experts of one model. The order of calls is
 *
 *     ms_abi_check            once per process, before anything else
 *     ms_engine_open          parses the files, checks them, picks a reader
 *     ms_engine_load_begin    -> FILE *, for llama_model_load_from_file_ptr
 *                                with load_mode NONE and tensor_buft_overrides
 *                                { ms_expert_pattern -> ms_engine_buffer_type,
 *                                  ms_router_pattern -> ms_engine_router_type }
 *     ms_engine_load_end
 *     ms_engine_start         gives the experts their memory
 *     llama_decode ...        computes; on failure ms_engine_take_error says why
 *     ms_engine_close         after the model and its contexts are freed
 *
 * Ownership: what open returns is closed by its close; strings belong to the
 * engine and live as long. Threads: an engine may be used by several contexts
 * at once; open, load, start and close belong to one thread. Returns: 0, or
 * -errno with a sentence in err (always terminated, may be NULL).
 * Sizes are in bytes, times in nanoseconds. Every count is since ms_engine_start.
 *
 * The Python side reads this file as its cffi declarations: no macros, and no
 * includes that it would miss.
 */
#ifndef MOESTREAM_H
#define MOESTREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct ms_source ms_source;
typedef struct ms_engine ms_engine;

/* ---------------------------------------------------------------- plug-in */

/* The llama-cpp-python version whose headers this library was compiled with. */
const char *ms_built_for(void);

/* Compares our copy of ggml's plug-in structs with the running library.
 * -EPROTO: they differ. */
int ms_abi_check(char *err, size_t errlen);

/* Regular expressions of the tensors that are streamed, and of the routers. */
const char *ms_expert_pattern(void);
const char *ms_router_pattern(void);

/* ---------------------------------------------------------------- what a model holds */

typedef struct ms_description {
    const char *architecture;
    const char *model_name; /* empty if the file has none */
    int n_files;
    int n_blocks;  /* transformer layers */
    int n_layers;  /* of these, layers with experts */
    int n_experts_used;
    bool laid; /* one record per expert, see docs/layout.md */
    uint64_t dense_bytes;
    uint64_t expert_bytes;
    uint64_t disk_bytes;
    uint64_t minimum_cache_bytes; /* one token's experts, in slots as reads are made now */
    uint64_t maximum_cache_bytes; /* every expert */
} ms_description;

typedef struct ms_layer_description {
    int block;
    int n_experts;
    int n_matrices;
    uint64_t record_bytes; /* of a laid file, else 0 */
} ms_layer_description;

typedef struct ms_matrix_description {
    const char *tensor_name;
    const char *type_name;
    int64_t columns;
    int64_t rows; /* of one expert */
    uint64_t slice_bytes;
    int file;
    uint64_t offset; /* of expert 0 */
    const char *form; /* "plain", "neuron-major", or the name of its interleaving */
} ms_matrix_description;

/* Opens and checks a model without loading it; see source.h for the errors. */
int ms_source_open(const char *path, ms_source **out, char *err, size_t errlen);
void ms_source_close(ms_source *source);
/* Takes direct reads where the file system serves them; slots then are sized for their alignment. */
int ms_source_use_direct(ms_source *source, char *err, size_t errlen);
ms_description ms_describe(const ms_source *source);
ms_layer_description ms_describe_layer(const ms_source *source, int layer);
ms_matrix_description ms_describe_matrix(const ms_source *source, int layer, int matrix);
const char *ms_describe_file(const ms_source *source, int file, uint64_t *size_bytes);

/* ---------------------------------------------------------------- engine */

enum ms_kernels { MS_KERNELS_AUTO = 0, MS_KERNELS_PLAIN = 1, MS_KERNELS_INTERLEAVED = 2 };
enum ms_compute { MS_COMPUTE_EXACT = 0, MS_COMPUTE_FAST = 1, MS_COMPUTE_GGML = 2 };
enum ms_direct { MS_DIRECT_AUTO = 0, MS_DIRECT_YES = 1, MS_DIRECT_NO = 2 };

typedef struct ms_engine_options {
    int kernels;        /* enum ms_kernels */
    int compute;        /* enum ms_compute */
    int direct;         /* enum ms_direct */
    const char *reader; /* "auto", "uring", "pread", "mmap" */
    bool verify;        /* check the weights of every expert that arrives */
    int experts_used;   /* top-k in place of the file's, or 0 */
} ms_engine_options;

typedef struct ms_stats {
    uint64_t tokens;
    uint64_t hits;   /* experts found in memory, one count per layer and batch */
    uint64_t misses; /* experts that had to be read */
    uint64_t reads; /* asked of the disk; the mmap reader does not count them */
    uint64_t bytes_read;
    int64_t read_ns;    /* with at least one read in flight */
    int64_t wait_ns;    /* computation blocked on experts */
    int64_t compute_ns; /* expert kernels */
    int64_t attention_ns; /* from the experts of one layer to the router of the next */
    int64_t router_ns;  /* choosing experts; 0 where the router does not come right before them */
    int64_t convert_ns; /* CPU time on what arrived: interleaving, moving, checking */
    int slots_used;
    int slots_total;
    uint64_t slot_bytes;
    uint64_t cache_bytes;          /* of all slots */
    uint64_t expert_resident_bytes; /* of the slots used */
    uint64_t fused_blocks;          /* layers computed as one operation, one count a layer and batch */
    uint64_t ggml_blocks;           /* layers computed node by node */
    int matrices_plain;             /* expert tensors computed with plain rows */
    int matrices_interleaved;
} ms_stats;

int ms_engine_open(const char *path, const ms_engine_options *options, ms_engine **out, char *err, size_t errlen);
const ms_source *ms_engine_source(const ms_engine *engine);
/* The reader taken ("uring", "pread", "mmap"), and whether its reads bypass the page cache. */
const char *ms_engine_reader(const ms_engine *engine);
bool ms_engine_direct(const ms_engine *engine);
/* What the user should know of choices made, one sentence a line; may be empty. */
const char *ms_engine_notes(const ms_engine *engine);
/* ggml_backend_buffer_type_t for the expert tensors. */
void *ms_engine_buffer_type(ms_engine *engine);
/* The same for the routers, so that it is known when they are computed. NULL: they are
 * quantised, and llama.cpp must be left to choose how it stores them. */
void *ms_engine_router_type(ms_engine *engine);

/* The budget bounds for what is loaded (before loading: for all in the file). */
uint64_t ms_engine_minimum_bytes(const ms_engine *engine);
uint64_t ms_engine_maximum_bytes(const ms_engine *engine);

FILE *ms_engine_load_begin(ms_engine *engine);
/* Closes the stream. -EIO: it could not be read through; the sentence says where. */
int ms_engine_load_end(ms_engine *engine, FILE *stream, char *err, size_t errlen);

/* budget: for the slots; ignored by the mmap reader. -ENOSPC: under the minimum. */
int ms_engine_start(ms_engine *engine, uint64_t budget_bytes, char *err, size_t errlen);

ms_stats ms_engine_stats(ms_engine *engine);
/* The share of zeros behind the activation of a layer; -1 where it gives none, or before the first token. */
double ms_engine_zeros(ms_engine *engine, int layer);

/* Why the last computation failed: its -errno and the sentence, once; 0 if it did not fail here. */
int ms_engine_take_error(ms_engine *engine, char *err, size_t errlen);

void ms_engine_close(ms_engine *engine);

/* ---------------------------------------------------------------- laid files */

/* An interleaving (docs/layout.md, "Forms of a part"): a permutation of the
 * bits in runs of blocks, some of them inverted. It never changes once made.
 * All of these may be called by any thread. */
typedef struct ms_permutation ms_permutation;

typedef struct ms_permutation_description {
    const char *name; /* "q4_0 8x8": rows, and the bytes of a row that stay together; "q1_0 4 rows" where that says nothing */
    int type;         /* enum ggml_type */
    int rows;
    const uint16_t *bits;
    const uint8_t *inverted;
    uint32_t n_bits; /* length of both */
    int block_columns; /* values in a block of the type */
} ms_permutation_description;

/* How the running ggml stores matrices of this type and shape for its fast
 * kernels. Found by watching it do so. *out NULL: rows stay plain, or what ggml
 * does is no such table. -EINVAL: no such type or shape; -ENOMEM. */
int ms_permutation_native(int type, int64_t columns, int64_t rows, ms_permutation **out, char *err, size_t errlen);

/* How ggml stores them on another machine: "plain", "x86-avx2", "x86-avx512",
 * "arm-dotprod" or "arm-i8mm". On the machine itself as ms_permutation_native
 * has it. For another, Q4_0, Q8_0, IQ4_NL and MXFP4 from our own description of
 * the layout; other types only where this machine has the same layout (Q4_K:
 * AVX2, AVX-512 and i8mm), and else *out is NULL: they stay plain, although
 * that machine could have them interleaved. *out NULL too if it keeps that type
 * or shape plain. -EINVAL: no such target, type or shape; -ENOMEM. */
int ms_permutation_for_target(const char *target, int type, int64_t columns, int64_t rows, ms_permutation **out, char *err, size_t errlen);

/* From a file's table. -EINVAL: it is no permutation, is not as long as that
 * many blocks of the type, or rows or type are out of range; -ENOMEM. */
int ms_permutation_from_table(const char *name, int type, int rows, const uint16_t *bits, const uint8_t *inverted, size_t n_bits,
                              ms_permutation **out, char *err, size_t errlen);

ms_permutation_description ms_permutation_describe(const ms_permutation *permutation);
/* Of all but the name. */
bool ms_permutation_equal(const ms_permutation *a, const ms_permutation *b);

/* Plain to interleaved, and back. `rows` is a multiple of the table's, `columns`
 * of the type's block; in and out must not overlap. */
void ms_permutation_apply(const ms_permutation *permutation, const void *plain, void *out, int64_t columns, int64_t rows);
void ms_permutation_invert(const ms_permutation *permutation, const void *interleaved, void *out, int64_t columns, int64_t rows);
void ms_permutation_free(ms_permutation *permutation);

/* The target that is this machine, as the running ggml sees it; "plain" if it is none of them. */
const char *ms_native_target(void);

/* CRC-32C of n bytes that go on from those whose checksum is `crc`; 0 to begin. */
uint32_t ms_crc32c(uint32_t crc, const void *data, size_t n);

#endif
