/* engine.h - one model's streaming, inside: what device and reader choice share. */
#ifndef MS_ENGINE_H
#define MS_ENGINE_H

#include <pthread.h>

#include "experts.h"
#include "ggml_plugin_abi.h"
#include "kernels.h"
#include "message.h"
#include "moestream.h"
#include "reader.h"
#include "source.h"
#include "store.h"
#include "timeline.h"

struct ms_engine {
    struct ms_source *source;
    struct ms_interleaving *interleaving; /* NULL: plain rows */
    struct ms_reader *reader;             /* NULL: the mmap store */
    struct ms_store *store;               /* NULL until started */
    int compute;                          /* enum ms_compute */
    struct ms_products *products;         /* NULL until started, or if ggml is to compute every node */
    bool verify;
    char policy[32];
    char notes[2 * MS_MESSAGE_BYTES];
    /* llama.cpp merges buffer types of one name, so each engine's is its own */
    char buffer_type_name[32], router_type_name[32], norm_type_name[32];
    struct ggml_backend_buffer_type buffer_type; /* of expert tensors */
    struct ggml_backend_buffer_type router_type; /* of routers: ordinary memory, whose products come to our device */
    struct ggml_backend_buffer_type norm_type;   /* the same for the norms before attention */
    char *norm_pattern;                          /* which tensors these are */
    struct ms_expert_tensor (*tensors)[MS_MAX_MATRICES + 2]; /* per layer: matrices, norm, router */
    struct ms_routing *routing;
    struct ms_heads *heads; /* NULL: routing is not predicted */
    struct ms_prerouter_model prerouter;
    bool *wanted;  /* per layer: the loaded model has a tensor of it */
    bool loading;  /* buffers made now are for experts: address space, no memory */
    bool loaded;
    char load_error[MS_MESSAGE_BYTES];
    /* what computation leaves, under the mutex */
    pthread_mutex_t mutex;
    struct ms_experts_counters counters;
    struct ms_experts_zeros *zeros; /* per layer */
    int error_code;
    char error[MS_MESSAGE_BYTES];
    /* Recording. Who adds events reads `timeline` once for each; it is written under the mutex, as is the rest. */
    struct ms_timeline *_Atomic timeline; /* NULL: nothing is recorded */
    struct ms_timeline **timelines;       /* all that were, for threads that still have one; the last is the newest recording */
    int n_timelines;
};

/* Adds what a computation counted, and keeps its error if there is one. */
void ms_engine_add(struct ms_engine *engine, const struct ms_experts_counters *counters, const char *err);

void ms_engine_note(struct ms_engine *engine, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* What the `extra` of the norm (MS_WEIGHT_NORM) or router of a block is; NULL: the block has no experts. */
struct ms_expert_tensor *ms_engine_hook(struct ms_engine *engine, int block, int kind);

/* device.c: registers the device on the first call of the process and fills in the engine's buffer type. */
void ms_device_attach(struct ms_engine *engine);

/* pick_reader.c: the faster reader on this file by a short measurement; says which and why in a note. */
int ms_pick_reader(struct ms_engine *engine, char *err, size_t errlen);

#define MS_URING_DEPTH 64
#define MS_PREAD_THREADS 8

#endif
