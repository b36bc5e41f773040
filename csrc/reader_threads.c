/* reader_threads.c - portable reads: a few threads that pread from one queue. */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "message.h"
#include "reader.h"
#include "thread.h"

struct pread_reader {
    struct ms_reader base;
    pthread_mutex_t mutex;
    pthread_cond_t wanted;
    struct ms_read *first, **last;
    bool closing;
    int n_threads;
    pthread_t threads[];
};

static void *serve(void *argument) {
    struct pread_reader *reader = argument;
    for (;;) {
        pthread_mutex_lock(&reader->mutex);
        while (!reader->first && !reader->closing) pthread_cond_wait(&reader->wanted, &reader->mutex);
        struct ms_read *read = reader->first;
        if (read) {
            reader->first = read->next;
            if (!reader->first) reader->last = &reader->first;
        }
        pthread_mutex_unlock(&reader->mutex);
        if (!read) return NULL;
        int status;
        int64_t n;
        do {
            n = pread(read->fd, read->destination + read->got_bytes, read->size_bytes - read->got_bytes, (off_t)(read->offset + read->got_bytes));
            if (n < 0) n = -errno;
        } while (ms_reader_progress(read, n, &status));
        ms_reader_ended(&reader->base, read->got_bytes);
        read->done(read, status);
    }
}

static void pread_submit(struct ms_reader *base, struct ms_read *list) {
    struct pread_reader *reader = (struct pread_reader *)base;
    struct ms_read **end = ms_reader_began(base, &list);
    if (!end) return;
    pthread_mutex_lock(&reader->mutex);
    *reader->last = list;
    reader->last = end;
    pthread_cond_broadcast(&reader->wanted);
    pthread_mutex_unlock(&reader->mutex);
}

static void pread_close(struct ms_reader *base) {
    struct pread_reader *reader = (struct pread_reader *)base;
    pthread_mutex_lock(&reader->mutex);
    reader->closing = true;
    pthread_cond_broadcast(&reader->wanted);
    pthread_mutex_unlock(&reader->mutex);
    for (int i = 0; i < reader->n_threads; i++) pthread_join(reader->threads[i], NULL);
    pthread_mutex_destroy(&reader->mutex);
    pthread_cond_destroy(&reader->wanted);
    free(reader);
}

int ms_reader_pread_open(int n_threads, struct ms_reader **out, char *err, size_t errlen) {
    struct pread_reader *reader = calloc(1, sizeof *reader + sizeof(pthread_t) * (size_t)n_threads);
    if (!reader) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    reader->base = (struct ms_reader){.submit = pread_submit, .close = pread_close, .name = "pread"};
    pthread_mutex_init(&reader->mutex, NULL);
    pthread_cond_init(&reader->wanted, NULL);
    reader->last = &reader->first;
    for (int i = 0; i < n_threads; i++) {
        int rc = ms_thread_start(&reader->threads[i], serve, reader);
        if (rc && i == 0) {
            pread_close(&reader->base);
            return ms_fail(-rc, err, errlen, "cannot start a reading thread: %s", strerror(rc));
        }
        if (rc) break; /* fewer threads read too */
        reader->n_threads++;
    }
    *out = &reader->base;
    return 0;
}
