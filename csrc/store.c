/* store.c - what both stores do alike: ask for an expert's bytes, doubt them, and say what is wrong with them. */
#include "store.h"

#include <errno.h>
#include <string.h>

#include "ggml.h"
#include "message.h"

struct ms_read ms_expert_read(const struct ms_source *source, const struct ms_matrix *matrix, int expert) {
    const struct ms_file *file = &source->files[matrix->file];
    uint64_t begin = matrix->offset + (uint64_t)expert * matrix->slice_bytes;
    uint64_t aligned = begin / source->alignment * source->alignment;
    size_t needed = (size_t)(begin - aligned) + matrix->slice_bytes;
    return (struct ms_read){
        .fd = file->fd_direct >= 0 ? file->fd_direct : file->fd,
        .offset = aligned,
        .size_bytes = (uint32_t)((needed + source->alignment - 1) / source->alignment * source->alignment),
        .needed_bytes = (uint32_t)needed,
    };
}

int ms_expert_failure(const struct ms_source *source, const struct ms_matrix *matrix, int expert, int status, char *err, size_t errlen) {
    const char *path = source->files[matrix->file].path;
    unsigned long long offset = matrix->offset + (uint64_t)expert * matrix->slice_bytes;
    if (status == -ENODATA)
        return ms_fail(status, err, errlen, "%s: expert %d of %s at offset %llu (%zu bytes) is gone: the file was truncated while it was in use; restore it and call again",
                       path, expert, matrix->name, offset, matrix->slice_bytes);
    if (status == -EBADMSG)
        return ms_fail(status, err, errlen, "%s: expert %d of %s at offset %llu (%zu bytes) holds no valid weights (NaN or infinite scales); the file is damaged, download it again",
                       path, expert, matrix->name, offset, matrix->slice_bytes);
    return ms_fail(status, err, errlen, "%s: reading expert %d of %s at offset %llu (%zu bytes): %s", path, expert, matrix->name, offset, matrix->slice_bytes,
                   strerror(-status));
}

bool ms_weights_are_valid(const struct ms_matrix *matrix, const void *data) {
    return ggml_validate_row_data((enum ggml_type)matrix->type, data, matrix->slice_bytes);
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
