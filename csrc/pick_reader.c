/* pick_reader.c - which reader is faster on this very file. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "engine.h"

#define TRIAL_NS (40 * 1000000)
#define TRIAL_READS 24 /* as many as a layer that misses all of eight experts asks for */
#define TRIALS 2

struct trial {
    pthread_mutex_t mutex;
    pthread_cond_t done;
    int outstanding, status;
};

static void trial_done(struct ms_read *read, int status) {
    struct trial *trial = read->owner;
    pthread_mutex_lock(&trial->mutex);
    if (status < 0) trial->status = status;
    if (--trial->outstanding == 0) pthread_cond_signal(&trial->done);
    pthread_mutex_unlock(&trial->mutex);
}

/* Reads batches of random experts until TRIAL_NS have passed. Bytes per second, or -errno. */
static double measure(struct ms_engine *engine, struct ms_reader *reader, uint8_t *memory, size_t room, unsigned *seed) {
    const struct ms_source *source = engine->source;
    struct trial trial = {.mutex = PTHREAD_MUTEX_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};
    struct ms_read reads[TRIAL_READS];
    uint64_t bytes = 0;
    int64_t begin = ms_now_ns(), spent = 0;
    while (spent < TRIAL_NS && trial.status == 0) {
        for (int i = 0; i < TRIAL_READS; i++) {
            const struct ms_layer *layer = &source->layers[rand_r(seed) % (unsigned)source->n_layers];
            int index = (int)(rand_r(seed) % (unsigned)ms_expert_n_reads(layer));
            reads[i] = ms_expert_read(source, layer, index, (int)(rand_r(seed) % (unsigned)layer->n_experts));
            reads[i].destination = memory + (size_t)i * room;
            reads[i].done = trial_done;
            reads[i].owner = &trial;
            reads[i].next = i + 1 < TRIAL_READS ? &reads[i + 1] : NULL;
            bytes += reads[i].needed_bytes;
        }
        trial.outstanding = TRIAL_READS;
        reader->submit(reader, reads);
        pthread_mutex_lock(&trial.mutex);
        while (trial.outstanding) pthread_cond_wait(&trial.done, &trial.mutex);
        pthread_mutex_unlock(&trial.mutex);
        spent = ms_now_ns() - begin;
    }
    return trial.status < 0 ? trial.status : (double)bytes / ((double)spent / 1e9);
}

int ms_pick_reader(struct ms_engine *engine, char *err, size_t errlen) {
    struct ms_reader *uring = NULL, *threads = NULL;
    char why[MS_MESSAGE_BYTES];
    int rc = ms_reader_pread_open(MS_PREAD_THREADS, &threads, err, errlen);
    if (rc < 0) return rc;
    engine->reader = threads;
    if (ms_reader_uring_open(MS_URING_DEPTH, &uring, why, sizeof why) < 0) {
        ms_engine_note(engine, "reader: pread, because %s", why);
        return 0;
    }
    size_t room = 0;
    for (int l = 0; l < engine->source->n_layers; l++) {
        size_t bytes = ms_slot_bytes(engine->source, &engine->source->layers[l]);
        if (bytes > room) room = bytes;
    }
    room = (room + 4095) / 4096 * 4096;
    void *memory = NULL;
    double best_uring = 0, best_threads = 0;
    unsigned seed = 1;
    if (posix_memalign(&memory, 4096, room * TRIAL_READS) == 0) {
        for (int i = 0; i < TRIALS; i++) {
            double a = measure(engine, uring, memory, room, &seed), b = measure(engine, threads, memory, room, &seed);
            if (a > best_uring) best_uring = a;
            if (b > best_threads) best_threads = b;
        }
        free(memory);
    }
    /* io_uring needs no threads to wait in, so it wins a draw */
    bool take_uring = best_uring >= 0.95 * best_threads;
    ms_engine_note(engine, "reader: %s, measured on this file: uring %.2f GB/s, pread %.2f GB/s", take_uring ? "uring" : "pread", best_uring / 1e9, best_threads / 1e9);
    engine->reader = take_uring ? uring : threads;
    struct ms_reader *other = take_uring ? threads : uring;
    other->close(other);
    memset(&engine->reader->counters, 0, sizeof engine->reader->counters);
    return 0;
}
