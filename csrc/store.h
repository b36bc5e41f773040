/* store.h - where experts are in memory while they are computed.
 *
 * Two stores: slots (a fixed pool that reads fill) and mapping (the file's own
 * pages). Both give a layer's matrix as an array of experts at a fixed stride,
 * addressed by an index that acquire returns; between acquire and release the
 * bytes of these experts stay where they are.
 *
 * There are two ways to get at them. acquire pins experts and blocks until all
 * of their bytes are there; a call that fails holds nothing. begin pins them
 * and asks for the bytes, so that the caller can compute what is there and
 * wait for the rest. Any thread may call either. Nobody waits for room while
 * holding pins, so callers cannot wait for each other in a circle.
 */
#ifndef MS_STORE_H
#define MS_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels.h"
#include "reader.h"
#include "source.h"

/* Expert `index` of the matrix begins at data + index * stride_bytes. */
struct ms_view {
    uint8_t *data;
    size_t stride_bytes;
    int n; /* indices are 0..n-1 */
    const struct ggml_tensor *prototype; /* of interleaved rows, or NULL for plain ones */
    int neuron_major_type; /* enum ggml_type of a matrix stored transposed, or -1 */
};

struct ms_store_counters {
    uint64_t hits, misses; /* what was asked for ahead is a miss when it is wanted first */
    uint64_t guessed, guessed_bytes; /* asked for ahead; of these: */
    uint64_t useful, late, wasted, wasted_bytes; /* there when wanted, on its way then, given up unused */
    uint64_t reads;
    uint64_t bytes_read; /* from the disk, padding included */
    int64_t read_ns;     /* time with at least one read in flight */
    int64_t busy_ns;     /* the same, as long as arrivals are slowed down */
    int64_t wait_ns;     /* time acquire blocked; not that of wait */
    int64_t convert_ns;  /* CPU time of interleaving, moving and checking what arrived */
    int slots_used, slots_total;
    uint64_t slot_bytes;     /* of the largest class */
    uint64_t resident_bytes; /* of the slots used */
    uint64_t capacity_bytes;
};

/* Which room a caller may have for experts that are not in memory. */
enum ms_room {
    MS_ROOM_ALL,   /* for every one, and it waits for that; not while it holds pins */
    MS_ROOM_ANY,   /* what is not pinned now */
    MS_ROOM_SPARE, /* of that, what is empty or cooled */
    MS_ROOM_GUESS, /* of that, what is worth less than the guess */
};

struct ms_store {
    /* How many experts of a layer can be acquired together. */
    int (*capacity)(struct ms_store *store, int layer);
    /* Distinct experts, n <= capacity. Writes n indices.
     *   -EIO, -ENODATA, ...  a read failed: file, tensor, expert and offset are in err
     *   -ESTALE              the file was replaced by another
     *   -EBADMSG             the bytes are not what was written (only with verify) */
    int (*acquire)(struct ms_store *store, int layer, const int32_t *experts, int n, int32_t *indices, char *err, size_t errlen);
    void (*release)(struct ms_store *store, int layer, const int32_t *indices, int n);
    /* Pins those of n distinct experts whose indices[i] is -1, asks for the bytes that are not in memory, and writes
     * their indices; those for which there is no room stay at -1. Returns how many it pinned, or as acquire does. */
    int (*begin)(struct ms_store *store, int layer, const int32_t *experts, int n, enum ms_room room, int32_t *indices, char *err, size_t errlen);
    /* Of a pinned expert: 1 its bytes are there, 0 they are on their way, < 0 they could not be read (-errno). */
    int (*presence)(struct ms_store *store, int layer, int32_t index);
    /* Puts the sentence for an expert that could not be read into err; returns its -errno. */
    int (*failure)(struct ms_store *store, int layer, int32_t index, char *err, size_t errlen);
    /* To sleep until something changes: take the count of events, look, and if there is nothing to do wait for
     * one more. A waiting thread converts what arrives. */
    uint64_t (*events)(struct ms_store *store);
    void (*wait)(struct ms_store *store, uint64_t seen);
    /* After a failure: waits for reads that nobody holds the experts of, so that what they end with is not taken for
     * the answer to who asks for these experts next. */
    void (*settle)(struct ms_store *store);
    /* A layer's experts are about to be begun. new_batch: it is the first layer of an evaluation. */
    void (*enter)(struct ms_store *store, int layer, bool new_batch);
    /* These experts will be wanted when the layer comes next, each with a confidence; replaces what was said of that
     * layer before. At confidence 1 it is known, and they are read as if wanted, though behind what is. Others are read
     * while the disk has nothing better to do, where something worth less can be given up. Never blocks. */
    void (*expect)(struct ms_store *store, int layer, const int32_t *experts, const float *confidences, int n);
    /* Which of a layer's experts are in memory; n_experts of them. */
    void (*holds)(struct ms_store *store, int layer, int n_experts, bool *held);
    /* Makes reads arrive as slowly as from a disk of `rate` bytes per second; 0: as they come. One thread at a time.
     * -ENOMEM; -ENOTSUP: this store does not read. */
    int (*pace)(struct ms_store *store, uint64_t rate);
    /* Nothing is read ahead from now on, and nobody is about to hand reads to the reader: before that is closed. */
    void (*stop)(struct ms_store *store);
    /* These pinned experts will be missed less than others: their room is spare until they are wanted again. */
    void (*cool)(struct ms_store *store, int layer, const int32_t *indices, int n);
    /* Asks for experts that will be wanted soon, in spare room; pins nothing. Returns how many of the list, from its
     * beginning, are in memory or on their way now. */
    int (*prefetch)(struct ms_store *store, int layer, const int32_t *experts, int n);
    /* This layer's part of the memory, in experts, if every layer had the same part of its own. */
    int (*fair_share)(struct ms_store *store, int layer);
    struct ms_view (*view)(struct ms_store *store, int layer, int matrix);
    struct ms_store_counters (*counters)(struct ms_store *store);
    void (*close)(struct ms_store *store); /* nothing may be pinned, and no read in flight */
};

struct ms_timeline;

struct ms_slots_options {
    uint64_t budget_bytes;
    bool verify;        /* check every expert as it arrives */
    const bool *wanted; /* per layer: does the loaded model use it? */
    struct ms_timeline *_Atomic *timeline; /* where the recording that is on is found (NULL: none); or NULL */
    const char *policy; /* which expert is given up first, see policy.h */
};

/* Bytes a slot of this layer takes at the source's alignment. */
size_t ms_slot_bytes(const struct ms_source *source, const struct ms_layer *layer);

/* The smallest budget that holds one token's experts: sum over the wanted
 * layers (all, if wanted is NULL) of top-k slots. */
uint64_t ms_slots_minimum_bytes(const struct ms_source *source, const bool *wanted);
/* The budget that holds every expert. */
uint64_t ms_slots_maximum_bytes(const struct ms_source *source, const bool *wanted);

/* A pool of slots that `reader` fills. Source, reader and interleaving (may be
 * NULL) must outlive it. -ENOSPC: budget under the minimum; -EINVAL: no such policy; -ENOMEM. */
int ms_slots_open(struct ms_source *source, struct ms_reader *reader, const struct ms_interleaving *interleaving,
                  struct ms_slots_options options, struct ms_store **out, char *err, size_t errlen);

/* The files mapped and never populated: experts are computed in place, the
 * kernel's page cache is the cache. Rows are as the file has them: where
 * interleaved, `interleaving` must say that ggml stores them so here, or it is -ENOTSUP. */
int ms_mapping_open(struct ms_source *source, const struct ms_interleaving *interleaving, bool verify, struct ms_store **out, char *err, size_t errlen);

/* For the stores and who reads like them. */

/* What one read brings: a record, or a matrix. */
struct ms_extent {
    int file;
    uint64_t offset;
    size_t bytes;
};

/* How many reads bring an expert of this layer: one of its record in a laid file, one a matrix in a stock one. */
int ms_expert_n_reads(const struct ms_layer *layer);
/* Where what read number `index` of an expert brings is. */
struct ms_extent ms_expert_extent(const struct ms_layer *layer, int index, int expert);
/* The read number `index` of an expert, aligned as the source wants; the caller
 * adds destination and done. In a stock file it is of matrix `index`, whose
 * bytes are the last slice_bytes of needed_bytes. */
struct ms_read ms_expert_read(const struct ms_source *source, const struct ms_layer *layer, int index, int expert);
/* The type of a matrix stored transposed, or -1. */
int ms_neuron_major_type(const struct ms_matrix *matrix);
/* Puts the sentence for a read that failed (or weights that are none) into err; returns status. */
int ms_expert_failure(const struct ms_source *source, const struct ms_layer *layer, int index, int expert, int status, char *err, size_t errlen);
/* Is what read `index` brought what was written? A record has its checksum; a
 * stock file's plain matrix is looked through as ggml does under --check-tensors. */
bool ms_expert_is_valid(const struct ms_layer *layer, int index, int expert, const void *data);
/* One expert's matrix as the virtual GGUF shows it (plain rows; a neuron-major
 * one as F16), read through the page cache. *bytes is its length in *out, which the caller frees. */
int ms_expert_plain(const struct ms_source *source, const struct ms_matrix *matrix, int expert, uint8_t **out, size_t *bytes);
/* ms_source_check for the files of a layer. */
int ms_layer_check(struct ms_source *source, int layer, char *err, size_t errlen);

#endif
