/* store.c - what both stores do alike: ask for an expert's bytes, doubt them, and say what is wrong with them. */
#include "store.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ggml.h"
#include "message.h"
#include "moestream.h"

/* ------------------------------------------------------------ reads */

struct ms_extent ms_expert_extent(const struct ms_layer *layer, int index, int expert) {
    const struct ms_matrix *matrix = &layer->matrices[index];
    if (layer->record_bytes) return (struct ms_extent){matrix->file, layer->record_offset + (uint64_t)expert * layer->record_bytes, layer->record_bytes};
    return (struct ms_extent){matrix->file, matrix->offset + (uint64_t)expert * matrix->stride_bytes, matrix->slice_bytes};
}

int ms_expert_n_reads(const struct ms_layer *layer) { return layer->record_bytes ? 1 : layer->n_matrices; }

struct ms_read ms_expert_read(const struct ms_source *source, const struct ms_layer *layer, int index, int expert) {
    struct ms_extent extent = ms_expert_extent(layer, index, expert);
    const struct ms_file *file = &source->files[extent.file];
    uint64_t aligned = extent.offset / source->alignment * source->alignment;
    size_t needed = (size_t)(extent.offset - aligned) + extent.bytes;
    return (struct ms_read){
        .fd = file->fd_direct >= 0 ? file->fd_direct : file->fd,
        .offset = aligned,
        .size_bytes = (uint32_t)((needed + source->alignment - 1) / source->alignment * source->alignment),
        .needed_bytes = (uint32_t)needed,
    };
}

int ms_neuron_major_type(const struct ms_matrix *matrix) { return matrix->form == MS_FORM_NEURON_MAJOR ? matrix->type : -1; }

int ms_expert_failure(const struct ms_source *source, const struct ms_layer *layer, int index, int expert, int status, char *err, size_t errlen) {
    struct ms_extent extent = ms_expert_extent(layer, index, expert);
    const char *path = source->files[extent.file].path;
    char what[MS_TENSOR_NAME_BYTES];
    if (layer->record_bytes) snprintf(what, sizeof what, "moestream.blk.%d.experts", layer->block);
    else memcpy(what, layer->matrices[index].name, sizeof what);
    unsigned long long offset = extent.offset;
    if (status == -ENODATA)
        return ms_fail(status, err, errlen, "%s: expert %d of %s at offset %llu (%zu bytes) is gone: the file was truncated while it was in use; restore it and call again",
                       path, expert, what, offset, extent.bytes);
    if (status == -EBADMSG && layer->record_bytes)
        return ms_fail(status, err, errlen, "%s: expert %d of %s at offset %llu (%zu bytes) does not have the checksum it was written with; the file is damaged, convert or download it again",
                       path, expert, what, offset, extent.bytes);
    if (status == -EBADMSG)
        return ms_fail(status, err, errlen, "%s: expert %d of %s at offset %llu (%zu bytes) holds no valid weights (NaN or infinite scales); the file is damaged, download it again",
                       path, expert, what, offset, extent.bytes);
    return ms_fail(status, err, errlen, "%s: reading expert %d of %s at offset %llu (%zu bytes): %s", path, expert, what, offset, extent.bytes, strerror(-status));
}

bool ms_expert_is_valid(const struct ms_layer *layer, int index, int expert, const void *data) {
    if (layer->record_bytes) return ms_crc32c(0, data, layer->record_bytes) == layer->checksums[expert];
    return ggml_validate_row_data((enum ggml_type)layer->matrices[index].type, data, layer->matrices[index].slice_bytes);
}

int ms_layer_check(struct ms_source *source, int layer, char *err, size_t errlen) {
    const struct ms_layer *l = &source->layers[layer];
    for (int m = 0; m < l->n_matrices; m++) {
        if (m > 0 && l->matrices[m].file == l->matrices[m - 1].file) continue;
        int rc = ms_source_check(source, l->matrices[m].file, err, errlen);
        if (rc < 0) return rc;
    }
    return 0;
}

/* ------------------------------------------------------------ as the virtual GGUF shows it */

static int read_fully(int fd, uint8_t *out, size_t bytes, uint64_t offset) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(fd, out + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? -errno : -ENODATA;
        done += (size_t)n;
    }
    return 0;
}

/* rows x columns of F16, out of `columns` stored rows of `rows` values each. */
static int transpose(const struct ms_matrix *matrix, const uint8_t *stored, uint8_t *out) {
    const struct ggml_type_traits *traits = ggml_get_type_traits((enum ggml_type)matrix->type);
    size_t rows = (size_t)matrix->rows, columns = (size_t)matrix->columns, row_bytes = matrix->slice_bytes / columns;
    float *values = malloc(rows * sizeof(float));
    if (!values) return -ENOMEM;
    for (size_t n = 0; n < columns; n++) {
        if (matrix->type == GGML_TYPE_F32) memcpy(values, stored + n * row_bytes, row_bytes);
        else traits->to_float(stored + n * row_bytes, values, (int64_t)rows);
        for (size_t r = 0; r < rows; r++) ((ggml_fp16_t *)out)[r * columns + n] = ggml_fp32_to_fp16(values[r]);
    }
    free(values);
    return 0;
}

int ms_expert_plain(const struct ms_source *source, const struct ms_matrix *matrix, int expert, uint8_t **out, size_t *bytes) {
    bool transposed = matrix->form == MS_FORM_NEURON_MAJOR;
    const struct ms_permutation *interleaving = ms_source_interleaving(source, matrix);
    *bytes = transposed ? (size_t)(matrix->rows * matrix->columns) * sizeof(ggml_fp16_t) : matrix->slice_bytes;
    uint8_t *stored = malloc(matrix->slice_bytes), *plain = transposed || interleaving ? malloc(*bytes) : stored;
    int rc = stored && plain ? read_fully(source->files[matrix->file].fd, stored, matrix->slice_bytes, matrix->offset + (uint64_t)expert * matrix->stride_bytes) : -ENOMEM;
    if (rc == 0 && transposed) rc = transpose(matrix, stored, plain);
    if (rc == 0 && interleaving) ms_permutation_invert(interleaving, stored, plain, matrix->columns, matrix->rows);
    if (stored != plain) free(stored);
    if (rc < 0) {
        free(plain);
        plain = NULL;
    }
    *out = plain;
    return rc;
}
