/* moestream.h - the C interface of moestream, as the Python package uses it.
 *
 * An engine streams the experts of one model. The order of calls is
 *
 *     ms_abi_check            once per process, before anything else
 *     ms_engine_open          parses the files, checks them, picks a reader
 *     ms_engine_load_begin    -> FILE *, for llama_model_load_from_file_ptr
 *                                with load_mode NONE and tensor_buft_overrides
 *                                { ms_expert_pattern -> ms_engine_buffer_type,
 *                                  ms_router_pattern -> ms_engine_router_type,
 *                                  ms_norm_pattern -> ms_engine_norm_type }
 *     ms_engine_load_end
 *     ms_engine_heads         before contexts are made, where routing is predicted
 *     ms_engine_start         gives the experts their memory
 *     ms_engine_decode_rows, llama_decode ...
 *                             computes; on failure ms_engine_take_error says why
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
    int n_experts_choosable;    /* the most that a token could take */
    bool experts_used_by_layer; /* the file gives each layer a number of its own; n_experts_used is the largest */
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
/* What is predicted, any of them together. The last two belong to a replayed routing. */
enum ms_predictors { MS_PREDICTS_ROUTER = 1, MS_PREDICTS_LOOKAHEAD = 2, MS_PREDICTS_REPEAT = 4, MS_PREDICTS_ORACLE = 8, MS_PREDICTS_RANDOM = 16 };
enum ms_direct { MS_DIRECT_AUTO = 0, MS_DIRECT_YES = 1, MS_DIRECT_NO = 2 };

typedef struct ms_engine_options {
    int kernels;        /* enum ms_kernels */
    int compute;        /* enum ms_compute */
    int direct;         /* enum ms_direct */
    const char *reader; /* "auto", "uring", "pread", "mmap" */
    bool verify;        /* check the weights of every expert that arrives */
    int experts_used;   /* top-k in place of the file's, or 0 */
    int predictors;     /* enum ms_predictors; 0: experts are read when they are wanted */
    bool automatic;     /* guesses (all but the router's) only where a trial says that they pay */
    float cache_aware;  /* a cached expert is chosen if its odds are at least 1 - this of those of the last one chosen; 0: off */
    const char *policy; /* "lru", "lfu", "lrfu": which expert is given up first; the mmap reader has no use for it */
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
    uint64_t guessed;  /* experts asked for before they were wanted; of these: */
    uint64_t useful;   /* there when they were wanted */
    uint64_t late;     /* on their way then */
    uint64_t wasted;   /* given up unused */
    uint64_t guessed_bytes;
    uint64_t wasted_bytes;
    uint64_t replaced; /* choices that cache_aware changed */
    uint64_t dropped;   /* experts that should have been run where heads route, and were not: 0 */
    int64_t heads_ns;   /* computation spent on heads */
    uint64_t heads_bytes; /* of their weights, read from memory for that */
    int64_t predict_ns; /* spent on predicting */
    int depth;          /* layers ahead that are guessed now, at most 7 */
    int verdict;        /* of the last trial of guessing: 1 it pays, -1 it does not, 0 there was none */
    int64_t trial_without_ns; /* the median token of that trial */
    int64_t trial_with_ns;
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

/* The norms before the attention of layers with experts, so that something can be done there. The pattern is the engine's. */
const char *ms_norm_pattern(const ms_engine *engine);
void *ms_engine_norm_type(ms_engine *engine);

/* The budget bounds for what is loaded (before loading: for all in the file). */
uint64_t ms_engine_minimum_bytes(const ms_engine *engine);
uint64_t ms_engine_maximum_bytes(const ms_engine *engine);

FILE *ms_engine_load_begin(ms_engine *engine);
/* Closes the stream. -EIO: it could not be read through; the sentence says where. */
int ms_engine_load_end(ms_engine *engine, FILE *stream, char *err, size_t errlen);

/* budget: for the slots; ignored by the mmap reader. -ENOSPC: under the minimum; -EINVAL: no such policy. */
int ms_engine_start(ms_engine *engine, uint64_t budget_bytes, char *err, size_t errlen);

ms_stats ms_engine_stats(ms_engine *engine);

/* What is predicted from the next token on, as in the options; not while a token is computed. */
void ms_engine_set_predictors(ms_engine *engine, int predictors, bool automatic);

/* Makes reads of experts arrive as slowly as from a disk of so many bytes per second (0: as they come): for measuring.
 * After ms_engine_start, not while a token is computed. -ENOMEM; -ENOTSUP: the mmap reader does not read. */
int ms_engine_pace(ms_engine *engine, uint64_t bytes_per_s, char *err, size_t errlen);

/* `verdict` of the stats, at once. */
int ms_engine_verdict(const ms_engine *engine);

/* How good predictions were. */
typedef struct ms_predictions {
    uint64_t layers;   /* predicted, one count a layer and token */
    uint64_t experts;  /* that these chose */
    uint64_t recalled; /* of these, among as many predicted */
    uint64_t exact;    /* layers whose set was predicted whole */
    uint64_t absent[16];       /* predicted experts that were not in memory then, by their rank; the last: and above */
    uint64_t absent_right[16]; /* of these, chosen */
} ms_predictions;

/* depth -1: the model's own router before attention; 0: lookahead at the same point; 1 to 7: so many layers before; 8:
 * heads that advise, a token before. */
ms_predictions ms_engine_predictions(ms_engine *engine, int depth);
/* Loaded layers whose router is understood, after the first evaluation; *reads_state: all that are loaded choose before attention. */
int ms_engine_layers_known(ms_engine *engine, bool *reads_state);

/* ---------------------------------------------------------------- heads */

enum ms_heads_mode {
    MS_HEADS_ROUTE = 1,  /* what a head says is the choice: the router is not asked */
    MS_HEADS_ADVISE = 2, /* it is read ahead, and the router chooses */
};

/* A trained head: of the state that enters the experts of layer `owner` and of the experts that this ran, the router
 * logits of layer owner + 1 at the next token. Rows of weights, one behind the other; types are ggml's, of F32, F16, Q8_0
 * and Q4_0. See heads.h for what is computed. */
typedef struct ms_head {
    int owner; /* transformer layer */
    int type_linear, type_linear_onehot, type_fc1, type_fc1_onehot, type_fc2;
    const void *linear_h;      /* [experts] rows of columns values */
    const void *linear_onehot; /* [2 x experts] rows of experts values: of each expert at the token, then at the one before */
    const void *fc1_h;         /* [width] rows of columns values */
    const void *fc1_onehot;    /* [2 x experts] rows of width values */
    const void *fc2;           /* [experts] rows of width values */
} ms_head;

/* What all heads of a model have in common. */
typedef struct ms_head_shape {
    int columns; /* of the state */
    int experts; /* of a layer */
    int width;
} ms_head_shape;

/* What is said of a row, added up. */
enum ms_row_flags {
    MS_ROW_OUTPUT = 1,   /* its logits are asked for */
    MS_ROW_CONTINUES = 2 /* a step, and its sequence is as the step before left it */
};

/* What heads said of a sequence's next step. */
typedef struct ms_head_memory ms_head_memory;

/* Gives the engine heads, which it copies. Once, before a context is made, with routers in the engine's buffer type.
 * -EINVAL: they do not fit the model, or hold what is no number; -ENOMEM. */
int ms_engine_heads(ms_engine *engine, const ms_head *heads, int n, int mode, ms_head_shape shape, char *err, size_t errlen);
/* Of a sequence of which nothing was said. NULL: out of memory, or there are no heads. */
ms_head_memory *ms_engine_head_memory(ms_engine *engine);
void ms_head_memory_free(ms_head_memory *memory);
/* Saved with a sequence's state and restored with it, into a memory of the same engine or of another one with the same heads.
 * saved: where an int32_t may be. false, and nothing changed: it was not saved with heads of this shape. */
size_t ms_head_memory_bytes(const ms_head_memory *memory);
void ms_head_memory_save(const ms_head_memory *memory, void *out);
bool ms_head_memory_restore(ms_head_memory *memory, const void *saved, size_t bytes);
/* Before each decode, by the thread that decodes: the rows of the batch, in its order. A step of decoding (the only row of its
 * sequence, which is its own, and no part of a prompt) has a memory, which must stay until it is decoded; others have NULL: they
 * begin or go on with a prompt, for which routers choose, and the next step of their sequence is a first one: routers choose
 * there too. A step that continues is chosen for by what the step before said. Without this, or where llama.cpp divides the
 * batch, all are as in a prompt. n_rows 0 takes back what was said and not used. -ENOMEM. */
int ms_engine_decode_rows(ms_engine *engine, int n_rows, ms_head_memory *const *memories, const int32_t *positions, const uint8_t *flags);
/* One head on one token: state[columns], the experts run at it and at the one before -> logits[experts]. -EINVAL, -ENOMEM. */
int ms_head_logits(const ms_head *head, ms_head_shape shape, const float *state, const int32_t *now, int n_now, const int32_t *before, int n_before, float *logits, char *err, size_t errlen);

/* ---------------------------------------------------------------- replay */

/* Makes the model's routers follow a table [n_tokens][n_layers][n_choices], over and over: for measuring, where the
 * weights are random. Before the first token. recall[8]: how many of the true experts a lookahead finds, by depth, since
 * there is no state to look at. -EINVAL: not of this model's shape; -ENOMEM. */
int ms_engine_replay(ms_engine *engine, const int32_t *experts, int n_tokens, int n_layers, int n_choices, const float *recall, char *err, size_t errlen);
/* The share of zeros behind the activation of a layer; -1 where it gives none, or before the first token. */
double ms_engine_zeros(ms_engine *engine, int layer);

/* Why the last computation failed: its -errno and the sentence, once; 0 if it did not fail here. */
int ms_engine_take_error(ms_engine *engine, char *err, size_t errlen);

void ms_engine_close(ms_engine *engine);

/* ---------------------------------------------------------------- timeline */

enum ms_event_kind {
    MS_EVENT_ATTENTION = 0, /* from the end of one layer's experts to the router of the next; of the first from the hook before it */
    MS_EVENT_ROUTER = 1,    /* choosing experts */
    MS_EVENT_EXPERTS = 2,   /* all of a layer's experts, waits included */
    MS_EVENT_WAIT = 3,      /* within those: the first thread has nothing to compute */
    MS_EVENT_READ = 4,      /* of an expert, from submitted to arrived */
    MS_EVENT_PREDICT = 5,   /* guessing who is next, within the router or at the end of experts */
    MS_EVENT_OTHER = 6      /* from the last layer's experts to the first hook of the next batch */
};

enum ms_outcome {
    MS_OUTCOME_DEMAND = 0,  /* read because it was wanted; all others were read ahead */
    MS_OUTCOME_PENDING = 1, /* neither used nor evicted yet */
    MS_OUTCOME_USEFUL = 2,  /* there in time */
    MS_OUTCOME_LATE = 3,    /* wanted while it was on its way */
    MS_OUTCOME_WASTED = 4   /* evicted unused */
};

/* One thing that happened; 40 bytes, of which the last 4 are padding. */
typedef struct ms_event {
    int64_t begin_ns, end_ns; /* CLOCK_MONOTONIC */
    uint32_t batch;           /* evaluations since recording began: one a token in decode */
    uint32_t bytes;           /* of a read */
    int32_t block;            /* transformer layer; -1: none */
    int32_t expert;           /* of a read, else -1 */
    uint16_t tokens;          /* in the batch */
    uint8_t kind;             /* enum ms_event_kind */
    uint8_t outcome;          /* enum ms_outcome, of a read */
} ms_event;

/* Starts recording anew, with room for so many events (the oldest make room for others), or stops it (0).
 * Any thread, at any time; what was recorded can be had until the next start. false: out of memory,
 * and nothing changed. The memory is kept until the engine closes. */
bool ms_engine_record(ms_engine *engine, size_t capacity);
/* Copies the newest events at most, oldest first, and returns how many. *dropped: how many there were besides. */
size_t ms_engine_recorded(ms_engine *engine, ms_event *out, size_t capacity, uint64_t *dropped);

/* ---------------------------------------------------------------- simulation */

/* A model, a cache and a disk for ms_simulate. The disk reads one expert at a
 * time; attention, experts and the rest are computed one after another. */
typedef struct ms_simulation_options {
    int64_t n_tokens;
    int n_layers;
    int n_experts; /* in a layer */
    int top_k;
    const int32_t *experts; /* [n_tokens][n_layers][top_k] */
    const char *policy;     /* as of an engine, or "belady": who is wanted last goes first */
    int n_slots;            /* at least n_layers x top_k */
    const int32_t *guesses; /* [n_tokens][n_layers][n_guessed], -1 where there is none; may be NULL */
    int n_guessed;
    int ahead; /* layers from the one before whose attention a guess is made to the one it is for; at least 0 */
    int64_t read_ns; /* of an expert */
    int64_t attention_ns; /* of a layer */
    int64_t expert_ns; /* of one expert's computation */
    int64_t rest_ns; /* of a token: what comes after the last layer */
    int64_t n_skipped; /* tokens at the beginning that only fill the cache; fewer than n_tokens */
    int64_t *token_ns; /* [n_tokens - n_skipped]: what each of the others took; may be NULL */
} ms_simulation_options;

/* Of the tokens that are not skipped. What was guessed before them counts where it comes true. */
typedef struct ms_simulation {
    uint64_t hits;    /* experts in memory when they were wanted, guesses apart */
    uint64_t useful;  /* there because of a guess, and in time */
    uint64_t late;    /* on their way because of a guess */
    uint64_t misses;  /* the other experts: read on demand */
    uint64_t guessed; /* experts read because of a guess, whatever came of it */
    int64_t total_ns;
    int64_t wait_ns; /* of that, computation blocked on experts */
} ms_simulation;

/* Replays the routing of tokens, one by one, through a cache that is empty at
 * first, with the very policies of the engine. The experts of a layer are asked
 * for together and do not evict each other; each is computed as soon as it is
 * there. Guesses are read while the disk is idle, in their order, each evicting
 * what the policy gives up first of what is not guessed to be wanted. -EINVAL: no such policy, or sizes that do not fit; -ENOMEM. */
int ms_simulate(const ms_simulation_options *options, ms_simulation *out, char *err, size_t errlen);

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

/* ---------------------------------------------------------------- measuring a machine */

/* How fast all threads together read memory that no cache holds: more than a GiB passes by any.
 * One thread at a time, as the two below. -ENOMEM. */
typedef struct ms_memory_probe ms_memory_probe;
int ms_memory_probe_open(uint64_t size_bytes, int n_threads, ms_memory_probe **out, char *err, size_t errlen);
/* Bytes per second of one pass over all of it. */
double ms_memory_probe_pass(ms_memory_probe *probe);
void ms_memory_probe_close(ms_memory_probe *probe);

/* How fast a file is read with the engine's readers. -ENOENT, -EACCES, ...: it cannot be opened; -ENOMEM. */
typedef struct ms_read_probe ms_read_probe;
int ms_read_probe_open(const char *path, ms_read_probe **out, char *err, size_t errlen);
/* Why there are no direct reads, or no reads by io_uring; empty where there are. */
const char *ms_read_probe_why_buffered(const ms_read_probe *probe);
const char *ms_read_probe_why_no_uring(const ms_read_probe *probe);

/* `depth` reads are asked for at once and all are waited for, as experts of a layer are, over and over. Buffered ones find
 * nothing in the page cache, unless another process has the file mapped. */
typedef struct ms_read_probe_options {
    uint32_t size_bytes; /* a multiple of 4096; times depth at most 64 MiB */
    int depth;
    bool random;
    bool direct;
    bool uring;
    int64_t for_ns;   /* at least one batch */
    int64_t slice_ns; /* of reading, at least */
} ms_read_probe_options;

typedef struct ms_read_probe_result {
    uint64_t bytes;
    int64_t ns;     /* reading */
    int64_t cpu_ns; /* of the whole process */
    int n_slices;   /* bytes per second of each slice of time */
    int n_latencies; /* seconds from asked to arrived, the mean of each batch */
} ms_read_probe_result;

/* -ENOTSUP: there are no such reads here; -EINVAL: too large for the file or for the memory; -EIO, ...: of a read. */
int ms_read_probe_run(ms_read_probe *probe, const ms_read_probe_options *options, double *slices, int max_slices, double *latencies, int max_latencies,
                      ms_read_probe_result *result, char *err, size_t errlen);
void ms_read_probe_close(ms_read_probe *probe);

/* How fast weights are multiplied that are in memory and in no cache. size_bytes: of the memory they are in; huge: in huge pages,
 * as experts are, else in ordinary ones, as dense weights and keys and values are. -ENOMEM. */
typedef struct ms_kernel_probe ms_kernel_probe;
int ms_kernel_probe_open(uint64_t size_bytes, bool huge, int n_threads, ms_kernel_probe **out, char *err, size_t errlen);

enum ms_probe_kernels {
    MS_PROBE_PLAIN = 0,       /* ggml's, rows as they are in the file */
    MS_PROBE_INTERLEAVED = 1, /* ggml's for interleaved rows */
    MS_PROBE_ROWS = 2         /* ours for plain rows, which experts are computed with */
};

typedef struct ms_kernel_probe_options {
    int type;    /* enum ggml_type */
    int kernels; /* enum ms_probe_kernels */
    int64_t columns, rows;
    int n; /* matrices */
    bool scattered; /* each is elsewhere than the one before, as experts are; else one behind the other */
    int64_t for_ns;
} ms_kernel_probe_options;

/* Multiplies each of n matrices with one vector, over and over, and writes how many seconds each pass took, `max` of them at most.
 * Returns how many passes. -ENOTSUP: ggml does not interleave such a matrix here; -EINVAL: no such type, or too large; -ENOMEM. */
int ms_kernel_probe_products(ms_kernel_probe *probe, const ms_kernel_probe_options *options, double *seconds, int max, char *err, size_t errlen);
/* The same for the attention of one token in so many layers over F16 keys and values of `positions`, computed as llama.cpp does by
 * default: without flash attention. */
int ms_kernel_probe_attention(ms_kernel_probe *probe, int layers, int heads, int kv_heads, int head, int positions, int64_t for_ns, double *seconds, int max, char *err, size_t errlen);
void ms_kernel_probe_close(ms_kernel_probe *probe);

#endif
