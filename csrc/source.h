/* source.h - GGUF files on disk, as a table of experts.
 *
 * A source owns the descriptors of one model (one file or all shards of a
 * split set) and knows where every expert of every layer lies: file, offset,
 * size, and per matrix its type and shape. Nothing above it cares how the
 * files are laid out: in a stock GGUF the matrices of an expert are slices of
 * three tensors, in a laid one (layout.h) parts of one record.
 *
 * Everything is checked when the source is opened, from the header alone: a
 * file that ends before its last tensor does is refused with the tensor named.
 * After that the table never changes and may be read by any thread.
 */
#ifndef MS_SOURCE_H
#define MS_SOURCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

#define MS_MAX_MATRICES 3 /* gate, up, down; or gate_up, down; or up, down */
#define MS_TENSOR_NAME_BYTES 64
#define MS_ROUTER_TENSOR "^blk\\.[0-9]+\\.ffn_gate_inp\\.weight$"
/* The tensors that are streamed, for regcomp here and std::regex in llama.cpp; group 1 is the block. */
#define MS_EXPERT_TENSOR "^blk\\.([0-9]+)\\.ffn_(gate|up|down|gate_up)_exps\\.weight$"
/* Of tensors in the virtual GGUF; a multiple of the stream's buffer, see virtual_gguf.h. */
#define MS_VIRTUAL_ALIGNMENT (1u << 16)

struct ms_file {
    char *path;
    int fd;        /* buffered */
    int fd_direct; /* O_DIRECT, or -1 */
    uint64_t size_bytes;
    uint64_t data_offset; /* where tensor data starts: all before it is header */
    uint64_t header_hash;
    int64_t mtime_ns;
};

/* One `blk.N.ffn_*_exps.weight`: n_experts slices of the same type and shape. */
struct ms_matrix {
    char name[MS_TENSOR_NAME_BYTES];
    int type;       /* enum ggml_type, as stored */
    int form;       /* MS_FORM_NEURON_MAJOR, MS_FORM_PLAIN, or the number of its interleaving */
    bool by_row;    /* stored plain to be computed row by row, only where the gate opens: up beside a neuron-major down */
    int64_t columns; /* ne[0] */
    int64_t rows;    /* ne[1] of one expert */
    size_t slice_bytes;
    int file;
    uint64_t offset;       /* of expert 0 in that file; expert e is at offset + e * stride_bytes */
    uint64_t stride_bytes; /* slice_bytes in a stock file, the record's size in a laid one */
};

struct ms_layer {
    int block; /* N of blk.N */
    int n_experts;
    int n_matrices;
    struct ms_matrix matrices[MS_MAX_MATRICES];
    /* laid files: expert e's record, with all its matrices */
    size_t record_bytes; /* 0 in a stock file */
    uint64_t record_offset; /* of expert 0's; in the file of the matrices */
    const uint32_t *checksums; /* CRC-32C, one an expert */
};

/* One tensor as the virtual GGUF shows it, in virtual order. */
struct ms_segment {
    uint64_t virtual_offset;
    uint64_t size_bytes;
    int file;
    uint64_t offset;
    bool is_expert;
};

struct ms_source {
    int n_files;
    struct ms_file *files;
    int n_layers; /* with experts */
    struct ms_layer *layers;
    int n_blocks;
    int n_experts_used; /* top-k, the largest over the layers */
    bool experts_used_by_layer; /* the file has a list of them, one a layer */
    int n_groups, n_groups_used; /* of experts, of which a token may use those in some groups only; 0 where there are none */
    int n_experts_sharing; /* this many experts share one more, and a token takes as many of those; 0 where there are none */
    bool routers_are_floats; /* none is of a type that llama.cpp might store otherwise than in the file */
    struct ms_layout *layout; /* of a laid file, else NULL */
    char architecture[64];
    char model_name[256];
    uint64_t dense_bytes;
    uint64_t expert_bytes;
    /* the header that llama.cpp is shown, and what lies behind it */
    uint8_t *header;
    size_t header_bytes;
    int n_segments;
    struct ms_segment *segments;
    uint64_t virtual_bytes;
    /* O_DIRECT: alignment of offsets, sizes and addresses in bytes; 1 = buffered reads */
    size_t alignment;
};

/* Opens the model at `path`: a GGUF, or the first shard of a split set.
 *   -ENOENT, -EACCES, -EISDIR   the file, or a shard of it
 *   -EINVAL                     not a GGUF, or a damaged or foreign one
 *   -ENODATA                    truncated; the tensor is named
 *   -EPROTO                     laid out by a later moestream
 *   -ENOTSUP                    no experts in it
 *   -ENOMEM */
int ms_source_open(const char *path, struct ms_source **out, char *err, size_t errlen);
void ms_source_close(struct ms_source *source);

/* Opens the files for O_DIRECT if an aligned read of each of them succeeds;
 * otherwise leaves the source buffered and returns -errno with the reason. */
int ms_source_use_direct(struct ms_source *source, char *err, size_t errlen);

/* Size of all files in bytes. */
uint64_t ms_source_disk_bytes(const struct ms_source *source);

/* Looks whether a file still is what was opened. A changed modification time
 * alone is forgiven when the header is the same; another model is -ESTALE. */
int ms_source_check(struct ms_source *source, int file, char *err, size_t errlen);

/* Experts that a token takes in this layer. */
int ms_experts_used(const struct ms_source *source, int layer);

/* Finds a tensor among the experts: its layer index, and its matrix in *matrix. -1 if absent. */
int ms_source_find(const struct ms_source *source, const char *tensor_name, int *matrix);

/* The interleaving in which a matrix is stored; NULL if its rows are plain or it is neuron-major. */
const struct ms_permutation *ms_source_interleaving(const struct ms_source *source, const struct ms_matrix *matrix);

#endif
