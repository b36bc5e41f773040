#include "source.h"

#include <errno.h>
#include <fcntl.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ggml.h"
#include "gguf.h"
#include "llama.h"
#include "message.h"

/* ------------------------------------------------------------ one file */

/* The last error ggml logged while a header was being parsed: it names the key
 * or tensor that is wrong, which a NULL from gguf_init does not. */
static void keep_error_line(enum ggml_log_level level, const char *text, void *line) {
    if (level != GGML_LOG_LEVEL_ERROR) return;
    const char *colon = strstr(text, ": "); /* "function: message\n" */
    if (colon) text = colon + 2;
    if (strncmp(text, "failed to read ", 15) == 0 && *(char *)line) return; /* says less than the line before it */
    snprintf(line, MS_MESSAGE_BYTES / 2, "%s", text);
    ((char *)line)[strcspn(line, "\n")] = 0;
}

static struct gguf_context *parse_header(const char *path, struct ggml_context **tensors, char *line) {
    ggml_log_callback callback;
    void *user_data;
    line[0] = 0;
    ggml_log_get(&callback, &user_data);
    ggml_log_set(keep_error_line, line);
    struct gguf_context *gguf = gguf_init_from_file(path, (struct gguf_init_params){.no_alloc = true, .ctx = tensors});
    ggml_log_set(callback, user_data);
    return gguf;
}

static int check_magic(const char *path, int fd, char *err, size_t errlen) {
    uint8_t start[8];
    ssize_t n = pread(fd, start, sizeof start, 0);
    if (n < 0) return ms_fail(-errno, err, errlen, "%s: cannot be read: %s", path, strerror(errno));
    if (n < (ssize_t)sizeof start)
        return ms_fail(-EINVAL, err, errlen, "%s: not a GGUF file: it has only %zd bytes; download it again", path, n);
    if (memcmp(start, "GGUF", 4) != 0) {
        char shown[5] = {0};
        for (int i = 0; i < 4; i++) shown[i] = start[i] >= 32 && start[i] < 127 ? (char)start[i] : '.';
        return ms_fail(-EINVAL, err, errlen, "%s: not a GGUF file: it starts with '%s' where 'GGUF' should stand; convert the model to GGUF first", path, shown);
    }
    uint32_t version;
    memcpy(&version, start + 4, 4);
    if (version != 0 && (version & 0xffff) == 0)
        return ms_fail(-EINVAL, err, errlen, "%s: a GGUF of the other byte order (big-endian on a little-endian machine, or the reverse); convert a copy of it with: gguf-convert-endian FILE %s", path,
                       (union { uint16_t u; uint8_t b; }){1}.b ? "little" : "big");
    return 0;
}

static uint64_t hash_header(int fd, uint64_t size_bytes) {
    uint64_t hash = 1469598103934665603u; /* FNV-1a, eight bytes at a time: noticing another file, not defending against one */
    uint8_t block[1 << 16];
    for (uint64_t at = 0; at < size_bytes;) {
        size_t want = size_bytes - at < sizeof block ? size_bytes - at : sizeof block;
        ssize_t n = pread(fd, block, want, (off_t)at);
        if (n <= 0) return 0;
        memset(block + n, 0, (8 - n % 8) % 8);
        for (ssize_t i = 0; i < n; i += 8) {
            uint64_t word;
            memcpy(&word, block + i, 8);
            hash = (hash ^ word) * 1099511628211u;
        }
        at += (uint64_t)n;
    }
    return hash;
}

static int64_t mtime_ns(const struct stat *st) {
#ifdef __APPLE__
    return (int64_t)st->st_mtimespec.tv_sec * 1000000000 + st->st_mtimespec.tv_nsec;
#else
    return (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
#endif
}

/* Opens one file and parses its header; the caller owns *gguf and *tensors. */
static int open_file(const char *path, struct ms_file *file, struct gguf_context **gguf, struct ggml_context **tensors,
                     char *err, size_t errlen) {
    struct stat st;
    char line[MS_MESSAGE_BYTES / 2];
    file->path = strdup(path);
    file->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0)
        return ms_fail(-errno, err, errlen, "%s: %s%s", path, strerror(errno),
                       errno == ENOENT ? "; check the path" : errno == EACCES ? "; you lack the permission to read it" : "");
    if (fstat(file->fd, &st) < 0) return ms_fail(-errno, err, errlen, "%s: %s", path, strerror(errno));
    if (S_ISDIR(st.st_mode))
        return ms_fail(-EISDIR, err, errlen, "%s: is a directory; name the .gguf file in it (of a split model the first shard, ...-00001-of-...)", path);
    if (!S_ISREG(st.st_mode)) return ms_fail(-EINVAL, err, errlen, "%s: not a regular file; experts are read at random, which needs one", path);
    int rc = check_magic(path, file->fd, err, errlen);
    if (rc < 0) return rc;
    *gguf = parse_header(path, tensors, line);
    if (!*gguf)
        return ms_fail(-EINVAL, err, errlen, "%s: the GGUF header is damaged%s%s; download or convert the model again", path, line[0] ? ": " : "", line);
    file->size_bytes = (uint64_t)st.st_size;
    file->mtime_ns = mtime_ns(&st);
    file->data_offset = gguf_get_data_offset(*gguf);
    file->header_hash = hash_header(file->fd, file->data_offset);
    for (int64_t i = 0; i < gguf_get_n_tensors(*gguf); i++) {
        uint64_t begin = file->data_offset + gguf_get_tensor_offset(*gguf, i), size = gguf_get_tensor_size(*gguf, i);
        if (begin > file->size_bytes || size > file->size_bytes - begin)
            return ms_fail(-ENODATA, err, errlen, "%s: truncated: tensor %s is at bytes %llu to %llu, but the file ends at %llu; download it again", path,
                           gguf_get_tensor_name(*gguf, i), (unsigned long long)begin, (unsigned long long)(begin + size), (unsigned long long)file->size_bytes);
    }
    return 0;
}

/* ------------------------------------------------------------ metadata */

static bool find_unsigned(const struct gguf_context *gguf, const char *key, uint64_t *value) {
    int64_t id = gguf_find_key(gguf, key);
    if (id < 0) return false;
    switch (gguf_get_kv_type(gguf, id)) {
        case GGUF_TYPE_UINT16: *value = gguf_get_val_u16(gguf, id); return true;
        case GGUF_TYPE_INT32: *value = (uint64_t)gguf_get_val_i32(gguf, id); return true;
        case GGUF_TYPE_UINT32: *value = gguf_get_val_u32(gguf, id); return true;
        case GGUF_TYPE_UINT64: *value = gguf_get_val_u64(gguf, id); return true;
        case GGUF_TYPE_ARRAY: { /* one value per layer: the largest */
            enum gguf_type type = gguf_get_arr_type(gguf, id);
            if (type != GGUF_TYPE_INT32 && type != GGUF_TYPE_UINT32) return false;
            const int32_t *values = gguf_get_arr_data(gguf, id);
            *value = 0;
            for (size_t i = 0; i < gguf_get_arr_n(gguf, id); i++)
                if (values[i] > 0 && (uint64_t)values[i] > *value) *value = (uint64_t)values[i];
            return true;
        }
        default: return false;
    }
}

static void find_string(const struct gguf_context *gguf, const char *key, char *out, size_t out_bytes) {
    int64_t id = gguf_find_key(gguf, key);
    if (id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_STRING) snprintf(out, out_bytes, "%s", gguf_get_val_str(gguf, id));
}

static bool find_architecture_unsigned(const struct ms_source *source, const struct gguf_context *gguf, const char *key, uint64_t *value) {
    char full[128];
    snprintf(full, sizeof full, "%s.%s", source->architecture, key);
    return find_unsigned(gguf, full, value);
}

/* ------------------------------------------------------------ the table of experts */

static struct ms_layer *layer_of_block(struct ms_source *source, int block) {
    for (int i = 0; i < source->n_layers; i++)
        if (source->layers[i].block == block) return &source->layers[i];
    struct ms_layer *grown = realloc(source->layers, sizeof(struct ms_layer) * (size_t)(source->n_layers + 1));
    if (!grown) return NULL;
    source->layers = grown;
    struct ms_layer *layer = &source->layers[source->n_layers++];
    memset(layer, 0, sizeof *layer);
    layer->block = block;
    return layer;
}

/* Adds one matrix of all a layer's experts to the table; the caller then says where they lie. */
static int add_matrix(struct ms_source *source, int block, int file, const struct ggml_tensor *tensor, struct ms_layer **out_layer,
                      struct ms_matrix **out_matrix, char *err, size_t errlen) {
    const char *path = source->files[file].path;
    struct ms_layer *layer = layer_of_block(source, block);
    if (!layer) return ms_fail(-ENOMEM, err, errlen, "out of memory for the table of experts");
    if (tensor->ne[0] < 1 || tensor->ne[1] < 1 || tensor->ne[3] != 1 || tensor->ne[2] < 1 || tensor->ne[2] > INT32_MAX)
        return ms_fail(-EINVAL, err, errlen, "%s: tensor %s has shape %lld x %lld x %lld x %lld, expected columns x rows x experts", path, tensor->name,
                       (long long)tensor->ne[0], (long long)tensor->ne[1], (long long)tensor->ne[2], (long long)tensor->ne[3]);
    if (layer->n_matrices == MS_MAX_MATRICES) return ms_fail(-EINVAL, err, errlen, "%s: block %d has more expert tensors than gate, up and down", path, block);
    if (layer->n_matrices && layer->n_experts != tensor->ne[2])
        return ms_fail(-EINVAL, err, errlen, "%s: tensor %s holds %lld experts, %s holds %d", path, tensor->name, (long long)tensor->ne[2],
                       layer->matrices[0].name, layer->n_experts);
    layer->n_experts = (int)tensor->ne[2];
    struct ms_matrix *matrix = &layer->matrices[layer->n_matrices++];
    snprintf(matrix->name, sizeof matrix->name, "%s", tensor->name);
    matrix->type = tensor->type;
    matrix->columns = tensor->ne[0];
    matrix->rows = tensor->ne[1];
    matrix->slice_bytes = tensor->nb[2];
    matrix->file = file;
    *out_layer = layer;
    *out_matrix = matrix;
    return 0;
}

static int add_expert_tensor(struct ms_source *source, int block, int file, uint64_t offset, const struct ggml_tensor *tensor,
                             char *err, size_t errlen) {
    struct ms_layer *layer;
    struct ms_matrix *matrix;
    int rc = add_matrix(source, block, file, tensor, &layer, &matrix, err, errlen);
    if (rc < 0) return rc;
    matrix->offset = offset;
    matrix->stride_bytes = matrix->slice_bytes;
    return 0;
}

/* Shows llama.cpp a tensor; 0, or -EINVAL if an earlier one had its name. */
static int add_virtual_tensor(struct ms_source *source, struct gguf_context *header, int file, const struct ggml_tensor *tensor, struct ms_segment segment,
                              char *err, size_t errlen) {
    if (gguf_find_tensor(header, tensor->name) >= 0)
        return ms_fail(-EINVAL, err, errlen, "%s: tensor %s is in an earlier shard too; the shards do not belong together", source->files[file].path, tensor->name);
    struct ms_segment *grown = realloc(source->segments, sizeof(struct ms_segment) * (size_t)(source->n_segments + 1));
    if (!grown) return ms_fail(-ENOMEM, err, errlen, "out of memory for the tensors of %s", source->files[file].path);
    source->segments = grown;
    segment.file = file;
    source->segments[source->n_segments++] = segment;
    gguf_add_tensor(header, tensor);
    return 0;
}

/* Adds a layer of records: a matrix for each part, and the tensor that llama.cpp expects in its place. */
static int add_records(struct ms_source *source, int block, int file, uint64_t offset, const struct ggml_tensor *bundle, struct gguf_context *header,
                       char *err, size_t errlen) {
    const char *path = source->files[file].path;
    const struct ms_laid_layer *laid = ms_layout_find(source->layout, block);
    if (!laid) return ms_fail(-EINVAL, err, errlen, "%s: tensor %s is of a block that moestream.layer.block does not list; convert or download it again", path, bundle->name);
    if (bundle->type != GGML_TYPE_I8 || bundle->ne[2] != 1 || bundle->ne[3] != 1 || bundle->ne[1] > INT32_MAX || bundle->ne[0] % MS_RECORD_ALIGNMENT ||
        bundle->ne[0] > UINT32_MAX - MS_RECORD_ALIGNMENT || offset % MS_RECORD_ALIGNMENT)
        return ms_fail(-EINVAL, err, errlen, "%s: tensor %s (%s, %lld x %lld, at %llu) is no run of page-aligned records; convert or download it again", path, bundle->name,
                       ggml_type_name(bundle->type), (long long)bundle->ne[0], (long long)bundle->ne[1], (unsigned long long)offset);
    for (int p = 0; p < laid->n_parts; p++) {
        const struct ms_part *part = &laid->parts[p];
        if (part->offset + part->size_bytes > (uint64_t)bundle->ne[0])
            return ms_fail(-EINVAL, err, errlen, "%s: part %s ends at %llu of a record of %lld bytes; convert or download it again", path, part->tensor,
                           (unsigned long long)(part->offset + part->size_bytes), (long long)bundle->ne[0]);
        /* A neuron-major matrix has its blocks along the other side; as F16 it may have any shape. */
        enum ggml_type shown = part->form == MS_FORM_NEURON_MAJOR ? GGML_TYPE_F16 : (enum ggml_type)part->type;
        struct ggml_tensor tensor = {.type = shown, .ne = {part->columns, part->rows, bundle->ne[1], 1}};
        ggml_set_name(&tensor, part->tensor);
        tensor.nb[0] = ggml_type_size(shown);
        tensor.nb[1] = ggml_row_size(shown, part->columns);
        tensor.nb[2] = tensor.nb[1] * (size_t)part->rows;
        tensor.nb[3] = tensor.nb[2] * (size_t)bundle->ne[1];
        struct ms_layer *layer;
        struct ms_matrix *matrix;
        int rc = add_virtual_tensor(source, header, file, &tensor, (struct ms_segment){.is_expert = true, .size_bytes = tensor.nb[3]}, err, errlen);
        if (rc == 0) rc = add_matrix(source, block, file, &tensor, &layer, &matrix, err, errlen);
        if (rc < 0) return rc;
        matrix->type = part->type;
        matrix->form = part->form;
        matrix->slice_bytes = part->size_bytes;
        matrix->offset = offset + part->offset;
        matrix->stride_bytes = (uint64_t)bundle->ne[0];
        layer->record_bytes = (size_t)bundle->ne[0];
        layer->record_offset = offset;
        source->expert_bytes += part->size_bytes * (uint64_t)bundle->ne[1];
    }
    return 0;
}

static struct ms_matrix *matrix_of(struct ms_layer *layer, const char *kind) {
    for (int m = 0; m < layer->n_matrices; m++)
        if (strstr(layer->matrices[m].name, kind)) return &layer->matrices[m];
    return NULL;
}

static void mark_by_row(struct ms_layer *layer) {
    struct ms_matrix *up = matrix_of(layer, ".ffn_up_exps"), *down = matrix_of(layer, ".ffn_down_exps");
    if (up && down && matrix_of(layer, ".ffn_gate_exps")) up->by_row = up->form == MS_FORM_PLAIN && down->form == MS_FORM_NEURON_MAJOR;
}

/* Gives every layer its checksums; all the tables list must be there. */
static int finish_layout(struct ms_source *source, char *err, size_t errlen) {
    const struct ms_layout *layout = source->layout;
    const char *path = source->files[0].path;
    uint64_t n = 0;
    for (int l = 0; l < source->n_layers; l++) n += (uint64_t)source->layers[l].n_experts;
    if (source->n_layers != layout->n_layers)
        return ms_fail(-EINVAL, err, errlen, "%s: has the records of %d layers, moestream.layer.block lists %d; convert or download it again", path, source->n_layers, layout->n_layers);
    if (n != layout->n_checksums)
        return ms_fail(-EINVAL, err, errlen, "%s: has %llu records and %llu checksums; convert or download it again", path, (unsigned long long)n, (unsigned long long)layout->n_checksums);
    n = 0;
    for (int l = 0; l < source->n_layers; l++) {
        source->layers[l].checksums = layout->checksums + n;
        n += (uint64_t)source->layers[l].n_experts;
        mark_by_row(&source->layers[l]);
    }
    return 0;
}

static int compare_layers(const void *a, const void *b) {
    return ((const struct ms_layer *)a)->block - ((const struct ms_layer *)b)->block;
}

struct patterns {
    regex_t expert_tensor, records, router;
};

/* Adds a file's tensors to the table and to the virtual header. */
static int add_file(struct ms_source *source, int file, const struct gguf_context *gguf, struct ggml_context *tensors, struct gguf_context *header,
                    const struct patterns *patterns, char *err, size_t errlen) {
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); i++) {
        const char *name = gguf_get_tensor_name(gguf, i);
        struct ggml_tensor *tensor = ggml_get_tensor(tensors, name);
        uint64_t offset = source->files[file].data_offset + gguf_get_tensor_offset(gguf, i), size = gguf_get_tensor_size(gguf, i);
        regmatch_t groups[2];
        bool is_expert = regexec(&patterns->expert_tensor, name, 2, groups, 0) == 0;
        int rc;
        if (regexec(&patterns->router, name, 0, NULL, 0) == 0 && ggml_is_quantized(tensor->type)) source->routers_are_floats = false;
        if (source->layout && is_expert) {
            rc = ms_fail(-EINVAL, err, errlen, "%s: tensor %s is in a laid file beside its records; convert or download it again", source->files[file].path, name);
        } else if (source->layout && regexec(&patterns->records, name, 2, groups, 0) == 0) {
            rc = add_records(source, atoi(name + groups[1].rm_so), file, offset, tensor, header, err, errlen);
        } else {
            rc = add_virtual_tensor(source, header, file, tensor, (struct ms_segment){.is_expert = is_expert, .offset = offset, .size_bytes = size}, err, errlen);
            if (rc == 0 && is_expert) rc = add_expert_tensor(source, atoi(name + groups[1].rm_so), file, offset, tensor, err, errlen);
            if (is_expert) source->expert_bytes += size;
            else source->dense_bytes += size;
        }
        if (rc < 0) return rc;
    }
    return 0;
}

/* ------------------------------------------------------------ the header that llama.cpp is shown */

/* An empty GGUF at our alignment. ggml takes the alignment of what it writes
 * from what it parsed, so it is given a header of one key to parse. */
static struct gguf_context *new_virtual_header(void) {
    static const char key[] = "general.alignment";
    uint8_t bytes[64];
    size_t n = 0;
    struct { const void *from; size_t size; } parts[] = {
        {"GGUF", 4}, {&(uint32_t){3}, 4}, {&(int64_t){0}, 8}, {&(int64_t){1}, 8},
        {&(uint64_t){sizeof key - 1}, 8}, {key, sizeof key - 1}, {&(uint32_t){GGUF_TYPE_UINT32}, 4}, {&(uint32_t){MS_VIRTUAL_ALIGNMENT}, 4},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        memcpy(bytes + n, parts[i].from, parts[i].size);
        n += parts[i].size;
    }
    return gguf_init_from_buffer(bytes, n, (struct gguf_init_params){.no_alloc = true});
}

/* One GGUF of all shards: their keys and tensors, without the keys that would
 * make llama.cpp look for shards. */
static int build_virtual_header(struct ms_source *source, struct gguf_context *header, char *err, size_t errlen) {
    source->header_bytes = gguf_get_meta_size(header);
    source->header = malloc(source->header_bytes);
    if (!source->header) return ms_fail(-ENOMEM, err, errlen, "out of memory for a header of %zu bytes", source->header_bytes);
    gguf_get_meta_data(header, source->header);
    source->virtual_bytes = source->header_bytes;
    for (int i = 0; i < source->n_segments; i++) {
        struct ms_segment *segment = &source->segments[i];
        segment->virtual_offset = source->header_bytes + gguf_get_tensor_offset(header, i);
        source->virtual_bytes = segment->virtual_offset + segment->size_bytes;
    }
    return 0;
}

static int shard_path(const char *first, int n_shards, int shard, char *path, size_t path_bytes, char *err, size_t errlen) {
    char prefix[4096];
    if (llama_split_prefix(prefix, sizeof prefix, first, 0, n_shards) <= 0)
        return ms_fail(-EINVAL, err, errlen, "%s: the first of %d shards must be named like NAME-00001-of-%05d.gguf for the others to be found; rename it", first, n_shards, n_shards);
    llama_split_path(path, path_bytes, prefix, shard, n_shards);
    return 0;
}

/* llama.cpp is to see the model, not how it is laid out. */
static void show_own_architecture(const struct ms_source *source, const struct gguf_context *gguf, struct gguf_context *header) {
    for (int64_t i = 0; i < gguf_get_n_kv(gguf); i++)
        if (strncmp(gguf_get_key(gguf, i), "moestream.", 10) == 0) gguf_remove_key(header, gguf_get_key(gguf, i));
    gguf_set_val_str(header, "general.architecture", source->architecture);
}

/* How a token's experts are chosen. */
static void read_choice(struct ms_source *source, const struct gguf_context *gguf) {
    struct { const char *key; int *value; } numbers[] = {
        {"expert_used_count", &source->n_experts_used},
        {"expert_group_count", &source->n_groups},
        {"expert_group_used_count", &source->n_groups_used},
        {"experts_per_group", &source->n_experts_sharing},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        uint64_t value;
        if (find_architecture_unsigned(source, gguf, numbers[i].key, &value)) *numbers[i].value = (int)value;
    }
    char key[128];
    snprintf(key, sizeof key, "%s.expert_used_count", source->architecture);
    int64_t id = gguf_find_key(gguf, key);
    source->experts_used_by_layer = id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_ARRAY;
}

static int add_first_file(struct ms_source *source, const struct gguf_context *gguf, struct gguf_context *header, int *n_shards, char *err, size_t errlen) {
    const char *path = source->files[0].path;
    uint64_t shard = 0, shards = 1, value;
    find_unsigned(gguf, "split.count", &shards);
    find_unsigned(gguf, "split.no", &shard);
    if (shard != 0)
        return ms_fail(-EINVAL, err, errlen, "%s: is shard %llu of %llu; give the first one, ...-00001-of-%05llu.gguf, and the rest is found beside it", path,
                       (unsigned long long)shard + 1, (unsigned long long)shards, (unsigned long long)shards);
    if (shards < 1 || shards > 99999) return ms_fail(-EINVAL, err, errlen, "%s: split.count is %llu", path, (unsigned long long)shards);
    find_string(gguf, "general.architecture", source->architecture, sizeof source->architecture);
    if (ms_layout_is_laid(gguf)) {
        int rc = ms_layout_read(gguf, path, &source->layout, err, errlen);
        if (rc < 0) return rc;
        snprintf(source->architecture, sizeof source->architecture, "%s", source->layout->architecture);
    }
    find_string(gguf, "general.name", source->model_name, sizeof source->model_name);
    if (!source->architecture[0]) return ms_fail(-EINVAL, err, errlen, "%s: the header has no general.architecture; it is not a language model", path);
    if (find_architecture_unsigned(source, gguf, "block_count", &value)) source->n_blocks = (int)value;
    read_choice(source, gguf);
    for (int64_t i = 0; i < gguf_get_n_kv(gguf); i++) { /* gguf_set_kv aborts on what a NUL inside a key makes of it */
        const char *key = gguf_get_key(gguf, i);
        if (!key[0] || gguf_find_key(gguf, key) != i)
            return ms_fail(-EINVAL, err, errlen, "%s: the GGUF header is damaged: key %lld (\"%s\") holds a zero byte; download or convert the model again", path, (long long)i, key);
    }
    gguf_set_kv(header, gguf);
    gguf_remove_key(header, "split.no");
    gguf_remove_key(header, "split.count");
    gguf_remove_key(header, "split.tensors.count");
    if (source->layout) show_own_architecture(source, gguf, header);
    gguf_set_val_u32(header, "general.alignment", MS_VIRTUAL_ALIGNMENT);
    *n_shards = (int)shards;
    return 0;
}

int ms_source_open(const char *path, struct ms_source **out, char *err, size_t errlen) {
    struct ms_source *source = calloc(1, sizeof *source);
    struct gguf_context *header = new_virtual_header();
    struct patterns patterns;
    int rc = regcomp(&patterns.expert_tensor, MS_EXPERT_TENSOR, REG_EXTENDED) || regcomp(&patterns.records, MS_LAID_TENSOR, REG_EXTENDED) ||
             regcomp(&patterns.router, MS_ROUTER_TENSOR, REG_EXTENDED | REG_NOSUB) ? -ENOMEM : 0;
    int n_shards = 1;
    if (rc < 0 || !source || !header) {
        rc = ms_fail(-ENOMEM, err, errlen, "out of memory");
        goto end;
    }
    source->alignment = 1;
    source->routers_are_floats = true;
    for (int i = 0; i < n_shards; i++) {
        struct gguf_context *gguf = NULL;
        struct ggml_context *tensors = NULL;
        char shard[4096];
        snprintf(shard, sizeof shard, "%s", path);
        if (i > 0) rc = shard_path(path, n_shards, i, shard, sizeof shard, err, errlen);
        struct ms_file *files = realloc(source->files, sizeof(struct ms_file) * (size_t)(i + 1));
        if (files) {
            source->files = files;
            source->files[i] = (struct ms_file){.fd = -1, .fd_direct = -1};
            source->n_files = i + 1;
        } else {
            rc = ms_fail(-ENOMEM, err, errlen, "out of memory");
        }
        if (rc == 0) rc = open_file(shard, &source->files[i], &gguf, &tensors, err, errlen);
        if (rc == -ENOENT && i > 0)
            rc = ms_fail(rc, err, errlen, "%s: shard %d of %d is missing; download it into the same folder", shard, i + 1, n_shards);
        if (rc == 0 && i == 0) rc = add_first_file(source, gguf, header, &n_shards, err, errlen);
        if (rc == 0) rc = add_file(source, i, gguf, tensors, header, &patterns, err, errlen);
        gguf_free(gguf);
        ggml_free(tensors);
        if (rc < 0) goto end;
    }
    if (source->n_layers == 0) {
        rc = ms_fail(-ENOTSUP, err, errlen, "%s: a dense model (%s) without experts, so there is nothing to stream; load it with expert_streaming=False (--no-expert-streaming)", path, source->architecture);
        goto end;
    }
    if (source->n_experts_used <= 0) {
        rc = ms_fail(-EINVAL, err, errlen, "%s: has experts but no %s.expert_used_count, so how many a token takes is unknown", path, source->architecture);
        goto end;
    }
    qsort(source->layers, (size_t)source->n_layers, sizeof(struct ms_layer), compare_layers);
    if (source->layout) rc = finish_layout(source, err, errlen);
    if (rc == 0) rc = build_virtual_header(source, header, err, errlen);
end:
    regfree(&patterns.expert_tensor);
    regfree(&patterns.records);
    regfree(&patterns.router);
    if (header) gguf_free(header);
    if (rc < 0) {
        ms_source_close(source);
        source = NULL;
    }
    *out = source;
    return rc;
}

void ms_source_close(struct ms_source *source) {
    if (!source) return;
    for (int i = 0; i < source->n_files; i++) {
        if (source->files[i].fd >= 0) close(source->files[i].fd);
        if (source->files[i].fd_direct >= 0) close(source->files[i].fd_direct);
        free(source->files[i].path);
    }
    free(source->files);
    free(source->layers);
    free(source->segments);
    free(source->header);
    ms_layout_free(source->layout);
    free(source);
}

/* ------------------------------------------------------------ direct I/O */

static size_t direct_alignment(int fd) {
#ifdef STATX_DIOALIGN
    struct statx st;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0 && (st.stx_mask & STATX_DIOALIGN) && st.stx_dio_offset_align) {
        size_t memory = st.stx_dio_mem_align, offset = st.stx_dio_offset_align;
        return memory > offset ? memory : offset;
    }
#else
    (void)fd;
#endif
    return 4096; /* every file system's block divides it, or refuses it below */
}

int ms_source_use_direct(struct ms_source *source, char *err, size_t errlen) {
#ifdef O_DIRECT
    size_t alignment = 512;
    for (int i = 0; i < source->n_files; i++) {
        size_t file_alignment = direct_alignment(source->files[i].fd);
        if (file_alignment > alignment) alignment = file_alignment;
    }
    if (alignment > 4096) return ms_fail(-EOPNOTSUPP, err, errlen, "%s: wants direct reads aligned to %zu bytes", source->files[0].path, alignment);
    void *page = NULL;
    if (posix_memalign(&page, 4096, 4096)) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    int rc = 0;
    for (int i = 0; i < source->n_files && rc == 0; i++) {
        struct ms_file *file = &source->files[i];
        file->fd_direct = open(file->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
        /* accepted at open does not mean accepted at read */
        off_t probe = (off_t)(file->data_offset / 4096 * 4096);
        if (file->fd_direct < 0 || pread(file->fd_direct, page, 4096, probe) <= 0)
            rc = ms_fail(errno ? -errno : -EIO, err, errlen, "%s: its file system refuses direct reads (%s)", file->path, strerror(errno));
    }
    free(page);
    if (rc == 0) {
        source->alignment = alignment;
        return 0;
    }
    for (int i = 0; i < source->n_files; i++) {
        if (source->files[i].fd_direct >= 0) close(source->files[i].fd_direct);
        source->files[i].fd_direct = -1;
    }
    return rc;
#else
    return ms_fail(-EOPNOTSUPP, err, errlen, "%s: this system has no O_DIRECT", source->files[0].path);
#endif
}

/* ------------------------------------------------------------ later questions */

uint64_t ms_source_disk_bytes(const struct ms_source *source) {
    uint64_t sum = 0;
    for (int i = 0; i < source->n_files; i++) sum += source->files[i].size_bytes;
    return sum;
}

int ms_source_check(struct ms_source *source, int index, char *err, size_t errlen) {
    struct ms_file *file = &source->files[index];
    struct stat st;
    if (fstat(file->fd, &st) < 0) return ms_fail(-errno, err, errlen, "%s: %s", file->path, strerror(errno));
    if (mtime_ns(&st) == file->mtime_ns && (uint64_t)st.st_size == file->size_bytes) return 0;
    /* a shorter file is left to the read that misses its bytes: that one can name the offset */
    if ((uint64_t)st.st_size < file->size_bytes) return 0;
    if (hash_header(file->fd, file->data_offset) != file->header_hash)
        return ms_fail(-ESTALE, err, errlen, "%s: was overwritten by another file while it was in use; close the model and load it again", file->path);
    file->mtime_ns = mtime_ns(&st);
    file->size_bytes = (uint64_t)st.st_size;
    return 0;
}

int ms_experts_used(const struct ms_source *source, int layer) {
    int n_experts = source->layers[layer].n_experts;
    return source->n_experts_used < n_experts ? source->n_experts_used : n_experts;
}

int ms_source_find(const struct ms_source *source, const char *tensor_name, int *matrix) {
    for (int l = 0; l < source->n_layers; l++)
        for (int m = 0; m < source->layers[l].n_matrices; m++)
            if (strcmp(source->layers[l].matrices[m].name, tensor_name) == 0) {
                *matrix = m;
                return l;
            }
    return -1;
}

const struct ms_permutation *ms_source_interleaving(const struct ms_source *source, const struct ms_matrix *matrix) {
    return matrix->form > MS_FORM_PLAIN ? source->layout->permutations[matrix->form - 1] : NULL;
}
