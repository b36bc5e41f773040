/* layout.h - the tables of a laid file (docs/layout.md), read from its GGUF header and checked.
 *
 * What is here is only what the header says; where the records are in which
 * file, the source knows.
 */
#ifndef MS_LAYOUT_H
#define MS_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gguf_context;
struct ms_permutation;

#define MS_LAID_ARCHITECTURE "moestream"
#define MS_LAID_TENSOR "^moestream\\.blk\\.([0-9]+)\\.experts$"
#define MS_RECORD_ALIGNMENT 4096u
#define MS_PART_ALIGNMENT 64u

/* Forms of a part; from 1 on it is the number of its interleaving. */
enum { MS_FORM_NEURON_MAJOR = -1, MS_FORM_PLAIN = 0 };

struct ms_part {
    char *tensor;
    int type;
    int64_t columns, rows;
    uint64_t offset; /* in the record */
    uint64_t size_bytes;
    int form;
};

struct ms_laid_layer {
    int block;
    int n_parts;
    const struct ms_part *parts;
};

struct ms_layout {
    char *architecture; /* the model's own */
    int n_layers;
    struct ms_laid_layer *layers;
    int n_parts;
    struct ms_part *parts;
    int n_permutations;
    struct ms_permutation **permutations; /* of form i at [i - 1] */
    uint64_t n_checksums;
    uint32_t *checksums;
};

/* Is this the header of a laid file? */
bool ms_layout_is_laid(const struct gguf_context *gguf);

/* Reads and checks the tables. -EINVAL names the file, the key and what is wrong
 * with it; -EPROTO: of a version that we do not know; -ENOMEM. */
int ms_layout_read(const struct gguf_context *gguf, const char *path, struct ms_layout **out, char *err, size_t errlen);
void ms_layout_free(struct ms_layout *layout);

/* The layer of a block; NULL if the tables have none. */
const struct ms_laid_layer *ms_layout_find(const struct ms_layout *layout, int block);

#endif
