#include "virtual_gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "message.h"

/* Dense tensors this far ahead are asked for while llama.cpp interleaves the
 * current one, so that reading and interleaving overlap. */
#define READ_AHEAD_BYTES (64u << 20)

struct stream {
    const struct ms_source *source;
    uint64_t position;
    char *err;
    size_t errlen;
    char buffer[MS_VIRTUAL_ALIGNMENT];
};

static int segment_at(const struct ms_source *source, uint64_t position) {
    int low = 0, high = source->n_segments - 1;
    while (low < high) { /* the last segment that begins at or before position */
        int middle = (low + high + 1) / 2;
        if (source->segments[middle].virtual_offset <= position) low = middle;
        else high = middle - 1;
    }
    return low;
}

static void read_ahead(const struct ms_source *source, int segment) {
#ifdef POSIX_FADV_WILLNEED
    uint64_t asked = 0;
    for (int i = segment + 1; i < source->n_segments && asked < READ_AHEAD_BYTES; i++) {
        const struct ms_segment *next = &source->segments[i];
        if (next->is_expert) continue;
        uint64_t size = next->size_bytes < READ_AHEAD_BYTES - asked ? next->size_bytes : READ_AHEAD_BYTES - asked;
        posix_fadvise(source->files[next->file].fd, (off_t)next->offset, (off_t)size, POSIX_FADV_WILLNEED);
        asked += size;
    }
#else
    (void)source;
    (void)segment;
#endif
}

static ssize_t stream_read(void *cookie, char *out, size_t size) {
    struct stream *stream = cookie;
    const struct ms_source *source = stream->source;
    size_t done = 0;
    while (done < size && stream->position < source->virtual_bytes) {
        if (stream->position < source->header_bytes) {
            size_t n = source->header_bytes - stream->position;
            if (n > size - done) n = size - done;
            memcpy(out + done, source->header + stream->position, n);
            done += n;
            stream->position += n;
            continue;
        }
        int index = segment_at(source, stream->position);
        const struct ms_segment *segment = &source->segments[index];
        uint64_t within = stream->position - segment->virtual_offset;
        if (segment->is_expert || within >= segment->size_bytes) { /* never wanted, or the padding between tensors */
            uint64_t end = index + 1 < source->n_segments ? source->segments[index + 1].virtual_offset : source->virtual_bytes;
            size_t n = end - stream->position < size - done ? end - stream->position : size - done;
            memset(out + done, 0, n);
            done += n;
            stream->position += n;
            continue;
        }
        if (within == 0) read_ahead(source, index);
        size_t n = segment->size_bytes - within < size - done ? segment->size_bytes - within : size - done;
        const struct ms_file *file = &source->files[segment->file];
        ssize_t got = pread(file->fd, out + done, n, (off_t)(segment->offset + within));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            int code = got < 0 ? errno : ENODATA;
            ms_fail(0, stream->err, stream->errlen, "%s: reading %zu bytes at offset %llu: %s", file->path, n,
                    (unsigned long long)(segment->offset + within), got < 0 ? strerror(code) : "the file ends before them");
            errno = code;
            return done ? (ssize_t)done : -1;
        }
        done += (size_t)got;
        stream->position += (size_t)got;
    }
    return (ssize_t)done;
}

static int stream_seek(void *cookie, int64_t *offset, int whence) {
    struct stream *stream = cookie;
    const struct ms_source *source = stream->source;
    int64_t base = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? (int64_t)stream->position : (int64_t)source->virtual_bytes;
    if (base + *offset < 0) return -1;
    uint64_t position = (uint64_t)(base + *offset);
    if (whence == SEEK_SET && position >= source->header_bytes && source->n_segments) {
        const struct ms_segment *segment = &source->segments[segment_at(source, position)];
        if (segment->is_expert && segment->virtual_offset == position) position = source->virtual_bytes;
    }
    stream->position = position;
    *offset = (int64_t)position;
    return 0;
}

static int stream_close(void *cookie) {
    free(cookie);
    return 0;
}

#ifdef __APPLE__
static int bsd_read(void *cookie, char *out, int size) { return (int)stream_read(cookie, out, (size_t)size); }
static fpos_t bsd_seek(void *cookie, fpos_t offset, int whence) {
    int64_t position = offset;
    return stream_seek(cookie, &position, whence) < 0 ? -1 : (fpos_t)position;
}
#else
static int glibc_seek(void *cookie, off64_t *offset, int whence) {
    int64_t position = *offset;
    int rc = stream_seek(cookie, &position, whence);
    *offset = position;
    return rc;
}
#endif

FILE *ms_virtual_gguf_open(const struct ms_source *source, char *err, size_t errlen) {
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream) return NULL;
    stream->source = source;
    stream->err = err;
    stream->errlen = errlen;
#ifdef __APPLE__
    FILE *file = funopen(stream, bsd_read, NULL, bsd_seek, stream_close);
#else
    FILE *file = fopencookie(stream, "rb", (cookie_io_functions_t){.read = stream_read, .seek = glibc_seek, .close = stream_close});
#endif
    if (!file) {
        free(stream);
        return NULL;
    }
    setvbuf(file, stream->buffer, _IOFBF, sizeof stream->buffer);
    return file;
}
