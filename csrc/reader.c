#include "reader.h"

#include <errno.h>

#include "clock.h"

/* Counters are touched by the submitting and the completing threads; busy time
 * needs both ends to agree, so they share a spin lock held for a few loads. */
static void lock(struct ms_reader *reader) {
    while (__atomic_test_and_set(&reader->counters_lock, __ATOMIC_ACQUIRE)) {}
}
static void unlock(struct ms_reader *reader) { __atomic_clear(&reader->counters_lock, __ATOMIC_RELEASE); }

struct ms_read **ms_reader_began(struct ms_reader *reader, struct ms_read **list) {
    int n_reads = 0;
    struct ms_read **end = list;
    for (; *end; end = &(*end)->next) {
        (*end)->got_bytes = 0;
        n_reads++;
    }
    if (n_reads == 0) return NULL;
    lock(reader);
    if (reader->in_flight == 0) reader->busy_since_ns = ms_now_ns();
    reader->in_flight += n_reads;
    unlock(reader);
    return end;
}

void ms_reader_ended(struct ms_reader *reader, uint32_t bytes) {
    lock(reader);
    reader->counters.reads++;
    reader->counters.bytes += bytes;
    if (--reader->in_flight == 0) reader->counters.busy_ns += ms_now_ns() - reader->busy_since_ns;
    unlock(reader);
}

struct ms_reader_counters ms_reader_read_counters(struct ms_reader *reader) {
    lock(reader);
    struct ms_reader_counters counters = reader->counters;
    if (reader->in_flight > 0) counters.busy_ns += ms_now_ns() - reader->busy_since_ns;
    unlock(reader);
    return counters;
}

int ms_reader_progress(struct ms_read *read, int64_t n, int *status) {
    *status = 0;
    if (n == -EINTR || n == -EAGAIN) return 1;
    if (n == -EINVAL && read->got_bytes % 512 != 0) n = -ENODATA; /* a direct read that ended inside a block: so did the file */
    if (n < 0) {
        *status = (int)n;
        return 0;
    }
    read->got_bytes += (uint32_t)n;
    if (read->got_bytes >= read->size_bytes) return 0;
    if (n > 0 && read->got_bytes < read->needed_bytes) return 1;
    if (read->got_bytes < read->needed_bytes) *status = -ENODATA;
    return 0;
}
