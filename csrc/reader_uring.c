/* reader_uring.c - reads through io_uring, by raw system calls.
 *
 * Whoever submits fills the submission ring under a lock and enters the
 * kernel; one thread sleeps in the kernel until something completes, so that
 * waiting costs no core. Reads beyond what keeps the disk busy wait in a list
 * and go out as others complete.
 */
#include <errno.h>

#include "message.h"
#include "reader.h"
#include "thread.h"

#ifdef __linux__
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A disk that is given everything at once serves everything at once, and all
 * of it arrives at the end. With just enough in flight to keep the disk busy,
 * reads arrive one after the other and are interleaved or computed meanwhile:
 * here a tenth more tokens per second at 864 KiB a read. */
#define BUSY_BYTES ((size_t)6 << 20)
#define BUSY_READS 6

struct uring_reader {
    struct ms_reader base;
    int ring;
    pthread_t reaper;
    void *memory;
    size_t memory_bytes;
    struct io_uring_sqe *sqes;
    size_t sqes_bytes;
    unsigned *sq_tail, *sq_mask, *sq_array;
    unsigned *cq_head, *cq_tail, *cq_mask;
    struct io_uring_cqe *cqes;
    /* under the mutex */
    pthread_mutex_t mutex;
    struct ms_read *first, **last; /* not yet in the ring */
    int in_ring, depth;
    size_t bytes_in_ring;
    int failed; /* -errno once the kernel refuses the ring itself */
};

static int enter(int ring, unsigned submit, unsigned wait) {
    return (int)syscall(__NR_io_uring_enter, ring, submit, wait, wait ? IORING_ENTER_GETEVENTS : 0, NULL, 0);
}

static struct io_uring_sqe *next_sqe(struct uring_reader *reader) {
    unsigned index = *reader->sq_tail & *reader->sq_mask;
    struct io_uring_sqe *sqe = &reader->sqes[index];
    memset(sqe, 0, sizeof *sqe);
    reader->sq_array[index] = index;
    return sqe;
}

static void push_sqe(struct uring_reader *reader) { __atomic_store_n(reader->sq_tail, *reader->sq_tail + 1, __ATOMIC_RELEASE); }

static bool has_room(const struct uring_reader *reader) {
    return reader->in_ring < reader->depth && (reader->in_ring < BUSY_READS || reader->bytes_in_ring < BUSY_BYTES);
}

/* Moves as much as it should from the list into the ring. Mutex held. Returns the
 * reads that are to be failed because the kernel refuses the ring. */
static struct ms_read *fill(struct uring_reader *reader) {
    unsigned n = 0;
    while (reader->first && has_room(reader)) {
        struct ms_read *read = reader->first;
        reader->first = read->next;
        if (!reader->first) reader->last = &reader->first;
        struct io_uring_sqe *sqe = next_sqe(reader);
        sqe->opcode = IORING_OP_READ;
        sqe->fd = read->fd;
        sqe->off = read->offset + read->got_bytes;
        sqe->addr = (uint64_t)(uintptr_t)(read->destination + read->got_bytes);
        sqe->len = read->asked_bytes = read->size_bytes - read->got_bytes;
        sqe->user_data = (uint64_t)(uintptr_t)read;
        push_sqe(reader);
        reader->in_ring++;
        reader->bytes_in_ring += read->asked_bytes;
        n++;
    }
    while (n) {
        int taken = enter(reader->ring, n, 0);
        if (taken > 0) n -= (unsigned)taken;
        else if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) {
            reader->failed = -errno;
            break;
        }
    }
    if (!reader->failed) return NULL;
    struct ms_read *refused = reader->first;
    for (; n; n--) { /* take back what the kernel did not */
        unsigned tail = *reader->sq_tail - 1;
        struct ms_read *read = (struct ms_read *)(uintptr_t)reader->sqes[tail & *reader->sq_mask].user_data;
        __atomic_store_n(reader->sq_tail, tail, __ATOMIC_RELEASE);
        reader->in_ring--;
        reader->bytes_in_ring -= read->asked_bytes;
        read->next = refused;
        refused = read;
    }
    reader->first = NULL;
    reader->last = &reader->first;
    return refused;
}

static void fail_all(struct uring_reader *reader, struct ms_read *list) {
    while (list) {
        struct ms_read *next = list->next;
        ms_reader_ended(&reader->base, 0);
        list->done(list, reader->failed);
        list = next;
    }
}

static void uring_submit(struct ms_reader *base, struct ms_read *list) {
    struct uring_reader *reader = (struct uring_reader *)base;
    struct ms_read **end = ms_reader_began(base, &list);
    if (!end) return;
    pthread_mutex_lock(&reader->mutex);
    *reader->last = list;
    reader->last = end;
    struct ms_read *refused = fill(reader);
    pthread_mutex_unlock(&reader->mutex);
    fail_all(reader, refused);
}

static void *reap(void *argument) {
    struct uring_reader *reader = argument;
    bool closing = false;
    for (;;) {
        unsigned head = *reader->cq_head;
        if (head == __atomic_load_n(reader->cq_tail, __ATOMIC_ACQUIRE)) {
            if (closing && reader->in_ring == 0) return NULL;
            if (enter(reader->ring, 0, 1) < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) return NULL;
            continue;
        }
        struct io_uring_cqe cqe = reader->cqes[head & *reader->cq_mask];
        __atomic_store_n(reader->cq_head, head + 1, __ATOMIC_RELEASE);
        struct ms_read *read = (struct ms_read *)(uintptr_t)cqe.user_data;
        if (!read) { /* the no-op of close */
            closing = true;
            continue;
        }
        int status, again = ms_reader_progress(read, cqe.res, &status);
        pthread_mutex_lock(&reader->mutex);
        reader->in_ring--;
        reader->bytes_in_ring -= read->asked_bytes;
        if (again) { /* the rest of it goes first */
            read->next = reader->first;
            if (!reader->first) reader->last = &read->next;
            reader->first = read;
        }
        struct ms_read *refused = fill(reader);
        pthread_mutex_unlock(&reader->mutex);
        fail_all(reader, refused);
        if (again) continue;
        ms_reader_ended(&reader->base, read->got_bytes);
        read->done(read, status);
    }
}

static void unmap(struct uring_reader *reader) {
    if (reader->memory) munmap(reader->memory, reader->memory_bytes);
    if (reader->sqes) munmap(reader->sqes, reader->sqes_bytes);
    close(reader->ring);
    pthread_mutex_destroy(&reader->mutex);
    free(reader);
}

static void uring_close(struct ms_reader *base) {
    struct uring_reader *reader = (struct uring_reader *)base;
    pthread_mutex_lock(&reader->mutex);
    next_sqe(reader)->opcode = IORING_OP_NOP;
    push_sqe(reader);
    while (enter(reader->ring, 1, 0) < 0 && (errno == EINTR || errno == EAGAIN || errno == EBUSY)) {}
    pthread_mutex_unlock(&reader->mutex);
    pthread_join(reader->reaper, NULL);
    unmap(reader);
}

int ms_reader_uring_open(int depth, struct ms_reader **out, char *err, size_t errlen) {
    struct io_uring_params params = {0};
    int ring = (int)syscall(__NR_io_uring_setup, (unsigned)depth, &params);
    if (ring < 0)
        return ms_fail(-errno, err, errlen, "this system does not offer io_uring (%s); use reader=\"pread\"", strerror(errno));
    struct uring_reader *reader = calloc(1, sizeof *reader);
    if (!reader || !(params.features & IORING_FEAT_SINGLE_MMAP)) {
        free(reader);
        close(ring);
        return ms_fail(-ENOSYS, err, errlen, "this kernel's io_uring is too old; use reader=\"pread\"");
    }
    reader->base = (struct ms_reader){.submit = uring_submit, .close = uring_close, .name = "uring"};
    reader->ring = ring;
    reader->depth = depth;
    reader->last = &reader->first;
    pthread_mutex_init(&reader->mutex, NULL);
    size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    reader->memory_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    reader->sqes_bytes = params.sq_entries * sizeof(struct io_uring_sqe);
    uint8_t *memory = mmap(NULL, reader->memory_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
    void *sqes = mmap(NULL, reader->sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
    reader->memory = memory == MAP_FAILED ? NULL : memory;
    reader->sqes = sqes == MAP_FAILED ? NULL : sqes;
    int rc = !reader->memory || !reader->sqes ? ENOMEM : 0;
    if (rc == 0) {
        reader->sq_tail = (unsigned *)(memory + params.sq_off.tail);
        reader->sq_mask = (unsigned *)(memory + params.sq_off.ring_mask);
        reader->sq_array = (unsigned *)(memory + params.sq_off.array);
        reader->cq_head = (unsigned *)(memory + params.cq_off.head);
        reader->cq_tail = (unsigned *)(memory + params.cq_off.tail);
        reader->cq_mask = (unsigned *)(memory + params.cq_off.ring_mask);
        reader->cqes = (struct io_uring_cqe *)(memory + params.cq_off.cqes);
        rc = ms_thread_start(&reader->reaper, reap, reader);
    }
    if (rc) {
        unmap(reader);
        return ms_fail(-rc, err, errlen, "cannot set up io_uring: %s", strerror(rc));
    }
    *out = &reader->base;
    return 0;
}

#else

int ms_reader_uring_open(int depth, struct ms_reader **out, char *err, size_t errlen) {
    (void)depth;
    (void)out;
    return ms_fail(-ENOSYS, err, errlen, "io_uring exists on Linux only; use reader=\"pread\"");
}

#endif
