#include "layout.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml.h"
#include "gguf.h"
#include "message.h"
#include "moestream.h"

#define VERSION 1
#define MAX_INTERLEAVINGS 64

/* What is wrong with one file, said in one way. */
struct reading {
    const struct gguf_context *gguf;
    const char *path;
    char *err;
    size_t errlen;
};

#define bad(r, ...) bad(r, __VA_ARGS__)

static int bad(const struct reading *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int bad(const struct reading *r, const char *format, ...) {
    char what[MS_MESSAGE_BYTES / 2];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return ms_fail(-EINVAL, r->err, r->errlen, "%s: the tables of the laid file are damaged: %s; convert or download it again", r->path, what);
}

/* ------------------------------------------------------------ keys */

static const char *const known_keys[] = {
    "moestream.version",       "moestream.tool",       "moestream.architecture", "moestream.source.name",   "moestream.source.sha256", "moestream.source.alignment",
    "moestream.source.tensors", "moestream.target",    "moestream.layer.block",  "moestream.layer.parts",   "moestream.part.tensor",   "moestream.part.type",
    "moestream.part.columns",  "moestream.part.rows",  "moestream.part.offset",  "moestream.part.bytes",    "moestream.part.form",     "moestream.checksums",
};

static bool is_known(const char *key) {
    int number, end = 0;
    for (size_t i = 0; i < sizeof known_keys / sizeof *known_keys; i++)
        if (strcmp(key, known_keys[i]) == 0) return true;
    if (sscanf(key, "moestream.interleaving.%d.%n", &number, &end) != 1 || end == 0) return false;
    static const char *const fields[] = {"name", "type", "rows", "bits", "inverted"};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (strcmp(key + end, fields[i]) == 0) return true;
    return false;
}

static int find(const struct reading *r, const char *key, enum gguf_type type, int64_t *id) {
    *id = gguf_find_key(r->gguf, key);
    if (*id < 0) return bad(r, "key %s is missing", key);
    if (gguf_get_kv_type(r->gguf, *id) != type) return bad(r, "key %s is %s, expected %s", key, gguf_type_name(gguf_get_kv_type(r->gguf, *id)), gguf_type_name(type));
    return 0;
}

static int find_u32(const struct reading *r, const char *key, uint32_t *value) {
    int64_t id;
    int rc = find(r, key, GGUF_TYPE_UINT32, &id);
    if (rc == 0) *value = gguf_get_val_u32(r->gguf, id);
    return rc;
}

static int find_string(const struct reading *r, const char *key, const char **value) {
    int64_t id;
    int rc = find(r, key, GGUF_TYPE_STRING, &id);
    if (rc == 0) *value = gguf_get_val_str(r->gguf, id);
    return rc;
}

/* An array of `type` with `n` entries (*n: any number, told). *data is NULL for strings. */
static int find_array(const struct reading *r, const char *key, enum gguf_type type, int64_t *id, uint64_t *n, const void **data) {
    uint64_t expected = *n;
    int rc = find(r, key, GGUF_TYPE_ARRAY, id);
    if (rc < 0) return rc;
    if (gguf_get_arr_type(r->gguf, *id) != type)
        return bad(r, "key %s is an array of %s, expected %s", key, gguf_type_name(gguf_get_arr_type(r->gguf, *id)), gguf_type_name(type));
    *n = gguf_get_arr_n(r->gguf, *id);
    if (expected != UINT64_MAX && *n != expected)
        return bad(r, "key %s has %llu entries, expected %llu", key, (unsigned long long)*n, (unsigned long long)expected);
    *data = type == GGUF_TYPE_STRING ? NULL : gguf_get_arr_data(r->gguf, *id);
    return 0;
}

/* ------------------------------------------------------------ interleavings */

static int read_interleaving(const struct reading *r, int number, struct ms_permutation **out) {
    char key[64];
    const char *name = NULL;
    uint32_t type = 0, rows = 0;
    const void *bits, *inverted;
    uint64_t n_bits = UINT64_MAX;
    int64_t id;
    int rc;
#define KEY(field) (snprintf(key, sizeof key, "moestream.interleaving.%d." field, number), key)
    if ((rc = find_string(r, KEY("name"), &name)) < 0) return rc;
    if ((rc = find_u32(r, KEY("type"), &type)) < 0) return rc;
    if ((rc = find_u32(r, KEY("rows"), &rows)) < 0) return rc;
    if ((rc = find_array(r, KEY("bits"), GGUF_TYPE_UINT16, &id, &n_bits, &bits)) < 0) return rc;
    if ((rc = find_array(r, KEY("inverted"), GGUF_TYPE_UINT8, &id, &n_bits, &inverted)) < 0) return rc;
#undef KEY
    char why[MS_MESSAGE_BYTES / 2];
    if (type > INT32_MAX || rows > INT32_MAX || ms_permutation_from_table(name, (int)type, (int)rows, bits, inverted, n_bits, out, why, sizeof why) < 0)
        return bad(r, "moestream.interleaving.%d: %s", number, type > INT32_MAX || rows > INT32_MAX ? "type or rows out of range" : why);
    return 0;
}

static int read_interleavings(const struct reading *r, struct ms_layout *layout) {
    layout->permutations = calloc(MAX_INTERLEAVINGS, sizeof *layout->permutations);
    if (!layout->permutations) return ms_fail(-ENOMEM, r->err, r->errlen, "out of memory");
    for (int number = 1;; number++) {
        char key[64];
        snprintf(key, sizeof key, "moestream.interleaving.%d.name", number);
        if (gguf_find_key(r->gguf, key) < 0) return 0;
        if (number > MAX_INTERLEAVINGS) return bad(r, "more than %d interleavings", MAX_INTERLEAVINGS);
        int rc = read_interleaving(r, number, &layout->permutations[number - 1]);
        if (rc < 0) return rc;
        layout->n_permutations = number;
    }
}

/* ------------------------------------------------------------ parts */

/* Bytes of a matrix of this type; 0 if the type does not exist or the row is no whole number of blocks. */
static uint64_t matrix_bytes(int type, uint64_t columns, uint64_t rows) {
    if (type < 0 || type >= GGML_TYPE_COUNT) return 0;
    uint64_t block = (uint64_t)ggml_blck_size((enum ggml_type)type), size = ggml_type_size((enum ggml_type)type);
    if (block == 0 || size == 0 || columns == 0 || rows == 0 || columns % block) return 0;
    if (columns > (1ull << 31) || rows > (1ull << 31)) return 0; /* a record is one read of 32 bits */
    uint64_t row = columns / block * size;
    return rows > UINT32_MAX / row ? 0 : row * rows;
}

static bool is_expert_tensor(const char *name, int block) {
    static const char *const kinds[] = {"gate", "up", "down", "gate_up"};
    char expected[64];
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        snprintf(expected, sizeof expected, "blk.%d.ffn_%s_exps.weight", block, kinds[i]);
        if (strcmp(name, expected) == 0) return true;
    }
    return false;
}

static int check_part(const struct reading *r, const struct ms_layout *layout, const struct ms_laid_layer *layer, int index) {
    const struct ms_part *part = &layer->parts[index];
    if (!is_expert_tensor(part->tensor, layer->block)) return bad(r, "part %s is no expert tensor of block %d", part->tensor, layer->block);
    for (int i = 0; i < index; i++)
        if (strcmp(layer->parts[i].tensor, part->tensor) == 0) return bad(r, "part %s is there twice", part->tensor);
    if (part->form < MS_FORM_NEURON_MAJOR || part->form > layout->n_permutations) return bad(r, "part %s has form %d, which is not defined", part->tensor, part->form);
    bool transposed = part->form == MS_FORM_NEURON_MAJOR;
    if (transposed && !strstr(part->tensor, "ffn_down_exps")) return bad(r, "part %s is neuron-major, which is for ffn_down_exps", part->tensor);
    uint64_t columns = (uint64_t)part->columns, rows = (uint64_t)part->rows;
    uint64_t bytes = transposed ? matrix_bytes(part->type, rows, columns) : matrix_bytes(part->type, columns, rows);
    if (bytes == 0 || bytes != part->size_bytes)
        return bad(r, "part %s has %llu bytes; type %d with %llu x %llu has %llu", part->tensor, (unsigned long long)part->size_bytes, part->type,
                   (unsigned long long)columns, (unsigned long long)rows, (unsigned long long)bytes);
    uint64_t free_from = index ? layer->parts[index - 1].offset + layer->parts[index - 1].size_bytes : 0; /* each below 2^33 */
    if (part->offset % MS_PART_ALIGNMENT || part->offset < free_from || part->offset > UINT32_MAX)
        return bad(r, "part %s begins at %llu of its record, expected a multiple of %u from %llu on", part->tensor, (unsigned long long)part->offset, MS_PART_ALIGNMENT,
                   (unsigned long long)free_from);
    if (part->form <= 0) return 0;
    ms_permutation_description interleaving = ms_permutation_describe(layout->permutations[part->form - 1]);
    if (interleaving.type != part->type || rows % (uint64_t)interleaving.rows)
        return bad(r, "part %s (type %d, %llu rows) cannot have interleaving %d (type %d, %d rows)", part->tensor, part->type, (unsigned long long)rows, part->form,
                   interleaving.type, interleaving.rows);
    return 0;
}

static int read_parts(const struct reading *r, struct ms_layout *layout) {
    uint64_t n = UINT64_MAX;
    int64_t id, tensor_id;
    int rc;
    const void *blocks = NULL, *counts = NULL, *none, *types, *columns, *rows, *offsets, *bytes, *forms;
    if ((rc = find_array(r, "moestream.layer.block", GGUF_TYPE_UINT32, &id, &n, &blocks)) < 0) return rc;
    uint64_t n_layers = n;
    if ((rc = find_array(r, "moestream.layer.parts", GGUF_TYPE_UINT32, &id, &n, &counts)) < 0) return rc;
    n = UINT64_MAX;
    if ((rc = find_array(r, "moestream.part.tensor", GGUF_TYPE_STRING, &tensor_id, &n, &none)) < 0) return rc;
    if ((rc = find_array(r, "moestream.part.type", GGUF_TYPE_UINT32, &id, &n, &types)) < 0) return rc;
    if ((rc = find_array(r, "moestream.part.columns", GGUF_TYPE_UINT64, &id, &n, &columns)) < 0) return rc;
    if ((rc = find_array(r, "moestream.part.rows", GGUF_TYPE_UINT64, &id, &n, &rows)) < 0) return rc;
    if ((rc = find_array(r, "moestream.part.offset", GGUF_TYPE_UINT64, &id, &n, &offsets)) < 0) return rc;
    if ((rc = find_array(r, "moestream.part.bytes", GGUF_TYPE_UINT64, &id, &n, &bytes)) < 0) return rc;
    if ((rc = find_array(r, "moestream.part.form", GGUF_TYPE_INT32, &id, &n, &forms)) < 0) return rc;
    if (n_layers == 0 || n_layers > INT32_MAX / 8 || n > INT32_MAX / 8) return bad(r, "%llu layers and %llu parts", (unsigned long long)n_layers, (unsigned long long)n);
    layout->layers = calloc(n_layers, sizeof *layout->layers);
    layout->parts = calloc(n ? n : 1, sizeof *layout->parts);
    if (!layout->layers || !layout->parts) return ms_fail(-ENOMEM, r->err, r->errlen, "out of memory for %llu parts", (unsigned long long)n);
    layout->n_layers = (int)n_layers;
    layout->n_parts = (int)n;
    for (uint64_t p = 0; p < n; p++) {
        layout->parts[p] = (struct ms_part){
            .tensor = strdup(gguf_get_arr_str(r->gguf, tensor_id, p)),
            .type = (int)((const uint32_t *)types)[p],
            .columns = (int64_t)((const uint64_t *)columns)[p],
            .rows = (int64_t)((const uint64_t *)rows)[p],
            .offset = ((const uint64_t *)offsets)[p],
            .size_bytes = ((const uint64_t *)bytes)[p],
            .form = ((const int32_t *)forms)[p],
        };
        if (!layout->parts[p].tensor) return ms_fail(-ENOMEM, r->err, r->errlen, "out of memory");
    }
    uint64_t used = 0;
    for (uint64_t l = 0; l < n_layers; l++) {
        uint32_t block = ((const uint32_t *)blocks)[l], count = ((const uint32_t *)counts)[l];
        if (block > INT32_MAX || (l && (int64_t)block <= layout->layers[l - 1].block)) return bad(r, "moestream.layer.block is not ascending at entry %llu", (unsigned long long)l);
        if (count < 1 || count > 3 || count > n - used) return bad(r, "block %u has %u parts", block, count);
        layout->layers[l] = (struct ms_laid_layer){.block = (int)block, .n_parts = (int)count, .parts = layout->parts + used};
        used += count;
        for (int p = 0; p < (int)count; p++)
            if ((rc = check_part(r, layout, &layout->layers[l], p)) < 0) return rc;
    }
    return used == n ? 0 : bad(r, "%llu parts belong to no layer", (unsigned long long)(n - used));
}

/* ------------------------------------------------------------ all of it */

bool ms_layout_is_laid(const struct gguf_context *gguf) {
    int64_t id = gguf_find_key(gguf, "general.architecture");
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_STRING && strcmp(gguf_get_val_str(gguf, id), MS_LAID_ARCHITECTURE) == 0;
}

static int read_all(const struct reading *r, struct ms_layout *layout) {
    uint32_t version = 0;
    const char *architecture = NULL;
    const void *checksums;
    uint64_t n = UINT64_MAX;
    int64_t id;
    int rc = find_u32(r, "moestream.version", &version);
    if (rc < 0) return rc;
    if (version != VERSION)
        return ms_fail(-EPROTO, r->err, r->errlen, "%s: a laid file of version %u, this moestream reads version %d; update moestream, or convert the model again", r->path, version, VERSION);
    for (int64_t i = 0; i < gguf_get_n_kv(r->gguf); i++) {
        const char *key = gguf_get_key(r->gguf, i);
        if (strncmp(key, "moestream.", 10) == 0 && !is_known(key)) return bad(r, "key %s is not known", key);
    }
    if (gguf_get_alignment(r->gguf) % MS_RECORD_ALIGNMENT) return bad(r, "general.alignment is %zu, expected a multiple of %u", gguf_get_alignment(r->gguf), MS_RECORD_ALIGNMENT);
    if ((rc = find_string(r, "moestream.architecture", &architecture)) < 0) return rc;
    layout->architecture = strdup(architecture);
    if ((rc = read_interleavings(r, layout)) < 0) return rc;
    if ((rc = read_parts(r, layout)) < 0) return rc;
    if ((rc = find_array(r, "moestream.checksums", GGUF_TYPE_UINT32, &id, &n, &checksums)) < 0) return rc;
    layout->n_checksums = n;
    layout->checksums = malloc(n * sizeof(uint32_t) + 1);
    if (!layout->architecture || !layout->checksums) return ms_fail(-ENOMEM, r->err, r->errlen, "out of memory");
    memcpy(layout->checksums, checksums, n * sizeof(uint32_t));
    return 0;
}

int ms_layout_read(const struct gguf_context *gguf, const char *path, struct ms_layout **out, char *err, size_t errlen) {
    struct reading reading = {gguf, path, err, errlen};
    struct ms_layout *layout = calloc(1, sizeof *layout);
    int rc = layout ? read_all(&reading, layout) : ms_fail(-ENOMEM, err, errlen, "out of memory");
    if (rc < 0) {
        ms_layout_free(layout);
        layout = NULL;
    }
    *out = layout;
    return rc;
}

void ms_layout_free(struct ms_layout *layout) {
    if (!layout) return;
    for (int i = 0; i < layout->n_permutations; i++) ms_permutation_free(layout->permutations[i]);
    for (int p = 0; p < layout->n_parts; p++) free(layout->parts[p].tensor);
    free(layout->permutations);
    free(layout->parts);
    free(layout->layers);
    free(layout->checksums);
    free(layout->architecture);
    free(layout);
}

const struct ms_laid_layer *ms_layout_find(const struct ms_layout *layout, int block) {
    for (int l = 0; l < layout->n_layers; l++)
        if (layout->layers[l].block == block) return &layout->layers[l];
    return NULL;
}
