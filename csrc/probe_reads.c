/* probe_reads.c - what a disk gives to reads such as the engine's: so many asked for at once, then all waited for. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "engine.h"
#include "probe.h"

/* Arrivals go to memory here and there, as to slots, and not to what a cache still holds. */
#define ROOM_BYTES ((size_t)64 << 20)
#define ALIGNMENT 4096

struct ms_read_probe {
    char *path;
    int fd, fd_direct;
    uint64_t file_bytes;
    uint8_t *room;
    size_t room_bytes, next;
    unsigned seed;
    uint64_t place; /* of the next sequential read */
    struct ms_reader *uring, *threads;
    char why_buffered[MS_MESSAGE_BYTES], why_threads[MS_MESSAGE_BYTES];
};

static void open_direct(struct ms_read_probe *probe) {
#ifdef O_DIRECT
    probe->fd_direct = open(probe->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    /* accepted at open does not mean accepted at read */
    if (probe->fd_direct >= 0 && pread(probe->fd_direct, probe->room, ALIGNMENT, 0) > 0) return;
    ms_fail(0, probe->why_buffered, sizeof probe->why_buffered, "its file system refuses direct reads (%s)", strerror(errno));
    if (probe->fd_direct >= 0) close(probe->fd_direct);
    probe->fd_direct = -1;
#else
    ms_fail(0, probe->why_buffered, sizeof probe->why_buffered, "this system has no O_DIRECT");
#endif
}

int ms_read_probe_open(const char *path, ms_read_probe **out, char *err, size_t errlen) {
    struct ms_read_probe *probe = calloc(1, sizeof *probe);
    if (!probe) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    probe->fd = probe->fd_direct = -1;
    probe->seed = 1;
    probe->room_bytes = ROOM_BYTES;
    probe->path = strdup(path);
    probe->room = ms_probe_map(&probe->room_bytes, true);
    int rc = 0;
    struct stat st;
    if (!probe->path || !probe->room) rc = ms_fail(-ENOMEM, err, errlen, "out of memory");
    else if ((probe->fd = open(path, O_RDONLY | O_CLOEXEC)) < 0 || fstat(probe->fd, &st) < 0) rc = ms_fail(-errno, err, errlen, "%s: %s", path, strerror(errno));
    else rc = ms_reader_pread_open(MS_PREAD_THREADS, &probe->threads, err, errlen);
    if (rc < 0) {
        ms_read_probe_close(probe);
        return rc;
    }
    memset(probe->room, 1, probe->room_bytes);
    probe->file_bytes = (uint64_t)st.st_size;
    open_direct(probe);
    ms_reader_uring_open(MS_URING_DEPTH, &probe->uring, probe->why_threads, sizeof probe->why_threads);
    *out = probe;
    return 0;
}

void ms_read_probe_close(ms_read_probe *probe) {
    if (!probe) return;
    if (probe->uring) probe->uring->close(probe->uring);
    if (probe->threads) probe->threads->close(probe->threads);
    if (probe->fd_direct >= 0) close(probe->fd_direct);
    if (probe->fd >= 0) close(probe->fd);
    if (probe->room) munmap(probe->room, probe->room_bytes);
    free(probe->path);
    free(probe);
}

const char *ms_read_probe_why_buffered(const ms_read_probe *probe) { return probe->why_buffered; }
const char *ms_read_probe_why_no_uring(const ms_read_probe *probe) { return probe->why_threads; }

/* ------------------------------------------------------------ batches */

struct batch {
    pthread_mutex_t mutex;
    pthread_cond_t done;
    int outstanding, status;
    int64_t latency_ns; /* of all reads, summed */
};

static void arrived(struct ms_read *read, int status) {
    struct batch *batch = read->owner;
    int64_t now = ms_now_ns();
    pthread_mutex_lock(&batch->mutex);
    if (status < 0) batch->status = status;
    batch->latency_ns += now - read->asked_ns;
    if (--batch->outstanding == 0) pthread_cond_signal(&batch->done);
    pthread_mutex_unlock(&batch->mutex);
}

static uint64_t random_place(struct ms_read_probe *probe, uint64_t size_bytes) {
    uint64_t places = (probe->file_bytes - size_bytes) / ALIGNMENT + 1;
    uint64_t number = (uint64_t)rand_r(&probe->seed) << 31 ^ (uint64_t)rand_r(&probe->seed);
    return number % places * ALIGNMENT;
}

/* So that buffered reads come from the disk. */
static void drop_pages(const struct ms_read_probe *probe, uint64_t offset, uint64_t size_bytes) {
#ifdef POSIX_FADV_DONTNEED
    posix_fadvise(probe->fd, (off_t)offset, (off_t)size_bytes, POSIX_FADV_DONTNEED);
#else
    (void)probe, (void)offset, (void)size_bytes;
#endif
}

static uint64_t next_place(struct ms_read_probe *probe, uint64_t size_bytes) {
    if (probe->place + size_bytes > probe->file_bytes) {
        probe->place = 0;
        drop_pages(probe, 0, 0);
    }
    uint64_t place = probe->place;
    probe->place += size_bytes;
    return place;
}

/* Where the next reads go, and to which memory. What buffered ones at random would find in the page cache, because it was read ahead, is dropped. */
static void fill(struct ms_read_probe *probe, const ms_read_probe_options *options, struct batch *batch, struct ms_read *reads) {
    for (int i = 0; i < options->depth; i++) {
        if (probe->next + options->size_bytes > probe->room_bytes) probe->next = 0;
        reads[i] = (struct ms_read){
            .fd = options->direct ? probe->fd_direct : probe->fd,
            .offset = options->random ? random_place(probe, options->size_bytes) : next_place(probe, options->size_bytes),
            .size_bytes = options->size_bytes,
            .needed_bytes = options->size_bytes,
            .destination = probe->room + probe->next,
            .done = arrived,
            .owner = batch,
            .next = i + 1 < options->depth ? &reads[i + 1] : NULL,
        };
        probe->next += options->size_bytes;
        if (!options->direct && options->random) drop_pages(probe, reads[i].offset, options->size_bytes);
    }
}

static int64_t process_cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Asks for one batch and waits for it. Its time in ns, or -errno. */
static int64_t run_batch(struct ms_reader *reader, struct batch *batch, struct ms_read *reads, int n) {
    int64_t begin = ms_now_ns();
    for (int i = 0; i < n; i++) reads[i].asked_ns = begin;
    batch->outstanding = n;
    reader->submit(reader, reads);
    pthread_mutex_lock(&batch->mutex);
    while (batch->outstanding) pthread_cond_wait(&batch->done, &batch->mutex);
    pthread_mutex_unlock(&batch->mutex);
    return batch->status < 0 ? batch->status : ms_now_ns() - begin;
}

int ms_read_probe_run(ms_read_probe *probe, const ms_read_probe_options *options, double *slices, int max_slices, double *latencies, int max_latencies,
                      ms_read_probe_result *result, char *err, size_t errlen) {
    struct ms_reader *reader = options->uring ? probe->uring : probe->threads;
    *result = (ms_read_probe_result){0};
    if (!reader || (options->direct && probe->fd_direct < 0)) return ms_fail(-ENOTSUP, err, errlen, "%s: no such reads here", probe->path);
    if (options->depth < 1 || options->size_bytes % ALIGNMENT || options->size_bytes == 0 || (uint64_t)options->size_bytes * (uint64_t)options->depth > probe->room_bytes ||
        options->size_bytes > probe->file_bytes)
        return ms_fail(-EINVAL, err, errlen, "%s: cannot be measured with %d reads of %u bytes", probe->path, options->depth, options->size_bytes);
    struct ms_read *reads = calloc((size_t)options->depth, sizeof *reads);
    if (!reads) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    struct batch batch = {.mutex = PTHREAD_MUTEX_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};
    uint64_t batch_bytes = (uint64_t)options->depth * options->size_bytes, slice_bytes = 0;
    int64_t slice_ns = 0, end = ms_now_ns() + options->for_ns, cpu = process_cpu_ns();
    int rc = 0;
    if (!options->direct) drop_pages(probe, 0, 0);
    do {
        fill(probe, options, &batch, reads);
        batch.latency_ns = 0;
        int64_t ns = run_batch(reader, &batch, reads, options->depth);
        if (ns < 0) {
            rc = ms_fail((int)ns, err, errlen, "%s: cannot be read: %s", probe->path, strerror(-(int)ns));
            break;
        }
        result->bytes += batch_bytes;
        result->ns += ns;
        slice_bytes += batch_bytes;
        slice_ns += ns;
        if (result->n_latencies < max_latencies) latencies[result->n_latencies++] = (double)batch.latency_ns / options->depth / 1e9;
        if (slice_ns >= options->slice_ns && result->n_slices < max_slices) {
            slices[result->n_slices++] = (double)slice_bytes / ((double)slice_ns / 1e9);
            slice_bytes = 0;
            slice_ns = 0;
        }
    } while (ms_now_ns() < end);
    if (rc == 0 && result->n_slices == 0 && max_slices > 0) slices[result->n_slices++] = (double)slice_bytes / ((double)slice_ns / 1e9);
    result->cpu_ns = process_cpu_ns() - cpu;
    free(reads);
    return rc;
}
