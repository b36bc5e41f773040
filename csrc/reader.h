/* reader.h - explicit reads into memory, many at once.
 *
 * A read is a struct the caller owns from submit until its `done` is called.
 * `done` runs on a thread of the reader, must not block for long, and may
 * submit again. Reads complete in any order.
 *
 * A read that the kernel cuts short is continued here. One that meets the end
 * of the file succeeds if `needed_bytes` arrived (padding after the last
 * tensor may be missing) and fails with -ENODATA otherwise.
 */
#ifndef MS_READER_H
#define MS_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ms_read {
    int fd;
    uint64_t offset; /* with size and destination aligned as the descriptor wants */
    uint32_t size_bytes;
    uint32_t needed_bytes;
    uint8_t *destination;
    void (*done)(struct ms_read *read, int status); /* 0 or -errno */
    void *owner;
    int index;         /* the owner's, as the two before: which of its reads it is of */
    int64_t asked_ns;
    /* the reader's own, from submit to done */
    uint32_t got_bytes;
    uint32_t asked_bytes; /* in the kernel's hands now */
    struct ms_read *next;
    /* the pacer's own, after that */
    int64_t paced_until_ns;
    int paced_status;
    void (*paced_arrived)(struct ms_read *read, int status);
};

struct ms_reader_counters {
    uint64_t reads;
    uint64_t bytes;
    int64_t busy_ns; /* time with at least one read in flight */
};

struct ms_reader {
    void (*submit)(struct ms_reader *reader, struct ms_read *list); /* linked by `next` */
    void (*close)(struct ms_reader *reader); /* waits for reads in flight */
    const char *name;
    struct ms_reader_counters counters; /* read with ms_reader_counters */
    int in_flight;
    int64_t busy_since_ns;
    bool counters_lock;
};

/* depth: reads in flight at most; fewer where a few large ones keep the disk busy. -ENOSYS or -EPERM where the kernel has no io_uring or forbids it. */
int ms_reader_uring_open(int depth, struct ms_reader **out, char *err, size_t errlen);
int ms_reader_pread_open(int n_threads, struct ms_reader **out, char *err, size_t errlen);

struct ms_reader_counters ms_reader_read_counters(struct ms_reader *reader);

/* For implementations: count reads in and out, and decide what n bytes (or
 * -errno) mean for one. ms_reader_began returns the end of the list, to append
 * to, or NULL if it is empty. ms_reader_progress returns 1 if the read must go on. */
struct ms_read **ms_reader_began(struct ms_reader *reader, struct ms_read **list);
void ms_reader_ended(struct ms_reader *reader, uint32_t bytes);
int ms_reader_progress(struct ms_read *read, int64_t n, int *status);

#endif
