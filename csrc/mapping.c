/* mapping.c - experts computed in place from mapped files.
 *
 * The mapping is never populated as a whole. What a layer needs is asked for
 * with MADV_WILLNEED (all of it at once, so that the disk sees the depth) and
 * then waited for with MADV_POPULATE_READ, which reports a failing disk as an
 * error where a page fault would be a signal. What stays is the kernel's
 * choice: the page cache is the cache, shared by all processes on the file.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "message.h"
#include "moestream.h"
#include "store.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

struct mapping {
    struct ms_store base;
    struct ms_source *source;
    const struct ms_interleaving *interleaving;
    bool verify;
    size_t page;
    uint8_t **files;
    pthread_mutex_t mutex;
    struct ms_store_counters counters; /* under the mutex */
};

struct range {
    uint8_t *begin;
    size_t bytes;
};

static struct range pages_of(const struct mapping *mapping, struct ms_extent extent) {
    uint8_t *begin = mapping->files[extent.file] + extent.offset;
    uint8_t *aligned = (uint8_t *)((uintptr_t)begin / mapping->page * mapping->page);
    return (struct range){aligned, (size_t)(begin - aligned) + extent.bytes};
}

static size_t absent_bytes(const struct mapping *mapping, struct range range, unsigned char *resident) {
    size_t pages = (range.bytes + mapping->page - 1) / mapping->page, absent = 0;
    if (mincore(range.begin, range.bytes, (void *)resident) < 0) return 0;
    for (size_t i = 0; i < pages; i++) absent += !(resident[i] & 1);
    return absent * mapping->page;
}

static int mapping_capacity(struct ms_store *store, int layer) { return ((struct mapping *)store)->source->layers[layer].n_experts; }

/* -ENODATA: the file ends before this expert does. -EIO: the disk does not give it. */
static int populate(const struct mapping *mapping, struct ms_extent extent) {
    uint64_t end = extent.offset + extent.bytes;
    struct range range = pages_of(mapping, extent);
    int fd = mapping->source->files[extent.file].fd;
    struct stat st;
    if (fstat(fd, &st) == 0 && (uint64_t)st.st_size < end) return -ENODATA;
    while (madvise(range.begin, range.bytes, MADV_POPULATE_READ) < 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno != EINVAL && errno != ENOSYS) {
            int code = errno == EFAULT ? EIO : errno;
            return fstat(fd, &st) == 0 && (uint64_t)st.st_size < end ? -ENODATA : -code;
        }
        for (size_t at = 0; at < range.bytes; at += mapping->page) (void)*(volatile uint8_t *)(range.begin + at); /* before Linux 5.14 */
        break;
    }
    return 0;
}

static int mapping_acquire(struct ms_store *store, int layer, const int32_t *experts, int n, int32_t *indices, char *err, size_t errlen) {
    struct mapping *mapping = (struct mapping *)store;
    const struct ms_layer *l = &mapping->source->layers[layer];
    int n_reads = ms_expert_n_reads(l);
    size_t largest = 0;
    for (int r = 0; r < n_reads; r++)
        if (ms_expert_extent(l, r, 0).bytes > largest) largest = ms_expert_extent(l, r, 0).bytes;
    unsigned char *resident = malloc(largest / mapping->page + 2);
    if (!resident) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    int64_t begin = ms_now_ns();
    uint64_t hits = 0, bytes = 0;
    for (int i = 0; i < n; i++) {
        size_t absent = 0;
        indices[i] = experts[i];
        for (int r = 0; r < n_reads; r++) {
            struct range range = pages_of(mapping, ms_expert_extent(l, r, experts[i]));
            size_t missing = absent_bytes(mapping, range, resident);
            if (missing) madvise(range.begin, range.bytes, MADV_WILLNEED);
            absent += missing;
        }
        hits += absent == 0;
        bytes += absent;
    }
    free(resident);
    int rc = ms_layer_check(mapping->source, layer, err, errlen);
    for (int r = 0; r < n_reads && rc == 0; r++)
        for (int i = 0; i < n && rc == 0; i++) {
            struct ms_extent extent = ms_expert_extent(l, r, experts[i]);
            rc = populate(mapping, extent);
            if (rc == 0 && mapping->verify && !ms_expert_is_valid(l, r, experts[i], mapping->files[extent.file] + extent.offset)) rc = -EBADMSG;
            if (rc < 0) ms_expert_failure(mapping->source, l, r, experts[i], rc, err, errlen);
        }
    int64_t spent = ms_now_ns() - begin;
    pthread_mutex_lock(&mapping->mutex);
    mapping->counters.hits += hits;
    mapping->counters.misses += (uint64_t)n - hits;
    mapping->counters.bytes_read += bytes;
    if (bytes) mapping->counters.read_ns += spent;
    mapping->counters.wait_ns += spent;
    pthread_mutex_unlock(&mapping->mutex);
    return rc;
}

static void mapping_release(struct ms_store *store, int layer, const int32_t *indices, int n) {
    (void)store;
    (void)layer;
    (void)indices;
    (void)n;
}

/* Here nothing is ever on its way: what begin was asked for is there when it returns. */
static int mapping_begin(struct ms_store *store, int layer, const int32_t *experts, int n, enum ms_room room, int32_t *indices, char *err, size_t errlen) {
    (void)room;
    int first = 0;
    while (first < n && indices[first] >= 0) first++;
    int rc = mapping_acquire(store, layer, experts + first, n - first, indices + first, err, errlen);
    return rc < 0 ? rc : n - first;
}

static int mapping_presence(struct ms_store *store, int layer, int32_t index) {
    (void)store;
    (void)layer;
    (void)index;
    return 1;
}

static int mapping_failure(struct ms_store *store, int layer, int32_t index, char *err, size_t errlen) {
    struct mapping *mapping = (struct mapping *)store;
    return ms_expert_failure(mapping->source, &mapping->source->layers[layer], 0, index, -EIO, err, errlen);
}

static uint64_t mapping_events(struct ms_store *store) {
    (void)store;
    return 0;
}

static void mapping_wait(struct ms_store *store, uint64_t seen) {
    (void)store;
    (void)seen;
    sched_yield();
}

static void mapping_settle(struct ms_store *store) { (void)store; }

/* The kernel's page cache takes no advice of this kind. */
static void mapping_cool(struct ms_store *store, int layer, const int32_t *indices, int n) { mapping_release(store, layer, indices, n); }

static void mapping_enter(struct ms_store *store, int layer, bool new_batch) {
    (void)store;
    (void)layer;
    (void)new_batch;
}

/* Nothing is known of what is in memory: the engine refuses guesses with this store. */
static void mapping_expect(struct ms_store *store, int layer, const int32_t *experts, const float *confidences, int n) {
    (void)store;
    (void)layer;
    (void)experts;
    (void)confidences;
    (void)n;
}

static void mapping_holds(struct ms_store *store, int layer, int n_experts, bool *held) {
    (void)store;
    (void)layer;
    memset(held, 0, (size_t)n_experts * sizeof *held);
}

static int mapping_pace(struct ms_store *store, uint64_t rate) {
    (void)store;
    (void)rate;
    return -ENOTSUP;
}

static void mapping_stop(struct ms_store *store) { (void)store; }

static int mapping_prefetch(struct ms_store *store, int layer, const int32_t *experts, int n) {
    struct mapping *mapping = (struct mapping *)store;
    const struct ms_layer *l = &mapping->source->layers[layer];
    for (int i = 0; i < n; i++)
        for (int r = 0; r < ms_expert_n_reads(l); r++) {
            struct range range = pages_of(mapping, ms_expert_extent(l, r, experts[i]));
            madvise(range.begin, range.bytes, MADV_WILLNEED);
        }
    return n;
}

static struct ms_view mapping_view(struct ms_store *store, int layer, int matrix) {
    struct mapping *mapping = (struct mapping *)store;
    const struct ms_matrix *m = &mapping->source->layers[layer].matrices[matrix];
    return (struct ms_view){
        .data = mapping->files[m->file] + m->offset,
        .stride_bytes = m->stride_bytes,
        .n = mapping->source->layers[layer].n_experts,
        .prototype = m->form > MS_FORM_PLAIN ? ms_interleaving_prototype(mapping->interleaving, m) : NULL,
        .neuron_major_type = ms_neuron_major_type(m),
    };
}

static struct ms_store_counters mapping_counters(struct ms_store *store) {
    struct mapping *mapping = (struct mapping *)store;
    pthread_mutex_lock(&mapping->mutex);
    struct ms_store_counters counters = mapping->counters;
    pthread_mutex_unlock(&mapping->mutex);
    return counters;
}

static void mapping_close(struct ms_store *store) {
    struct mapping *mapping = (struct mapping *)store;
    for (int i = 0; mapping->files && i < mapping->source->n_files; i++)
        if (mapping->files[i]) munmap(mapping->files[i], mapping->source->files[i].size_bytes);
    pthread_mutex_destroy(&mapping->mutex);
    free(mapping->files);
    free(mapping);
}

int ms_mapping_open(struct ms_source *source, const struct ms_interleaving *interleaving, bool verify, struct ms_store **out, char *err, size_t errlen) {
    for (int l = 0; l < source->n_layers; l++)
        for (int m = 0; m < source->layers[l].n_matrices; m++) {
            const struct ms_matrix *matrix = &source->layers[l].matrices[m];
            if (ms_source_interleaving(source, matrix) && !ms_interleaving_is_stored(interleaving, source, matrix))
                return ms_fail(-ENOTSUP, err, errlen, "%s: %s is interleaved (%s) in a way that is not computed with here, and reader=\"mmap\" computes from the file as it is; use another reader, or: moestream convert %s NEW.gguf --target plain",
                               source->files[matrix->file].path, matrix->name, ms_permutation_describe(ms_source_interleaving(source, matrix)).name, source->files[0].path);
        }
    struct mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    mapping->base = (struct ms_store){.capacity = mapping_capacity, .acquire = mapping_acquire, .release = mapping_release,
                                      .begin = mapping_begin, .presence = mapping_presence, .failure = mapping_failure, .events = mapping_events, .wait = mapping_wait, .settle = mapping_settle,
                                      .enter = mapping_enter, .expect = mapping_expect, .holds = mapping_holds, .stop = mapping_stop, .pace = mapping_pace, .cool = mapping_cool, .prefetch = mapping_prefetch, .fair_share = mapping_capacity,
                                      .view = mapping_view, .counters = mapping_counters, .close = mapping_close};
    mapping->source = source;
    mapping->interleaving = interleaving;
    mapping->verify = verify;
    mapping->page = (size_t)sysconf(_SC_PAGESIZE);
    pthread_mutex_init(&mapping->mutex, NULL);
    mapping->files = calloc((size_t)source->n_files, sizeof(uint8_t *));
    int rc = mapping->files ? 0 : ms_fail(-ENOMEM, err, errlen, "out of memory");
    for (int i = 0; i < source->n_files && rc == 0; i++) {
        void *memory = mmap(NULL, source->files[i].size_bytes, PROT_READ, MAP_SHARED, source->files[i].fd, 0);
        if (memory == MAP_FAILED) {
            rc = ms_fail(-errno, err, errlen, "%s: cannot be mapped: %s; use reader=\"pread\"", source->files[i].path, strerror(errno));
        } else {
            mapping->files[i] = memory;
            madvise(memory, source->files[i].size_bytes, MADV_RANDOM); /* a fault must not read the neighbours too */
        }
    }
    if (rc < 0) {
        mapping_close(&mapping->base);
        return rc;
    }
    *out = &mapping->base;
    return 0;
}
