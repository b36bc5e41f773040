#include "pacer.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "clock.h"
#include "thread.h"

struct ms_pacer {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    pthread_t thread;
    bool stopping;
    uint64_t rate;
    int64_t free_ns;             /* when the disk is done with what it was given so far */
    struct ms_read *first, **last;
};

static void wait_until(struct ms_pacer *pacer, int64_t ns) {
    struct timespec until = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    pthread_cond_timedwait(&pacer->changed, &pacer->mutex, &until);
}

static void *hand_on(void *argument) {
    struct ms_pacer *pacer = argument;
    pthread_mutex_lock(&pacer->mutex);
    while (!pacer->stopping || pacer->first) {
        struct ms_read *read = pacer->first;
        if (!read) {
            pthread_cond_wait(&pacer->changed, &pacer->mutex);
        } else if (!pacer->stopping && read->paced_until_ns > ms_now_ns()) {
            wait_until(pacer, read->paced_until_ns);
        } else {
            pacer->first = read->next;
            if (!pacer->first) pacer->last = &pacer->first;
            pthread_mutex_unlock(&pacer->mutex);
            read->paced_arrived(read, read->paced_status);
            pthread_mutex_lock(&pacer->mutex);
        }
    }
    pthread_mutex_unlock(&pacer->mutex);
    return NULL;
}

struct ms_pacer *ms_pacer_start(void) {
    struct ms_pacer *pacer = calloc(1, sizeof *pacer);
    if (!pacer) return NULL;
    pacer->last = &pacer->first;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#ifndef __APPLE__
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_mutex_init(&pacer->mutex, NULL);
    pthread_cond_init(&pacer->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    if (ms_thread_start(&pacer->thread, hand_on, pacer) == 0) return pacer;
    free(pacer);
    return NULL;
}

void ms_pacer_set_rate(struct ms_pacer *pacer, uint64_t rate) {
    pthread_mutex_lock(&pacer->mutex);
    pacer->rate = rate;
    pacer->free_ns = 0;
    pthread_mutex_unlock(&pacer->mutex);
}

void ms_pacer_add(struct ms_pacer *pacer, struct ms_read *read, int status, void (*arrived)(struct ms_read *read, int status)) {
    pthread_mutex_lock(&pacer->mutex);
    if (pacer->free_ns < read->asked_ns) pacer->free_ns = read->asked_ns;
    if (pacer->rate) pacer->free_ns += (int64_t)((double)read->size_bytes * 1e9 / (double)pacer->rate);
    read->paced_until_ns = pacer->free_ns;
    read->paced_status = status;
    read->paced_arrived = arrived;
    read->next = NULL;
    *pacer->last = read;
    pacer->last = &read->next;
    pthread_cond_signal(&pacer->changed);
    pthread_mutex_unlock(&pacer->mutex);
}

void ms_pacer_stop(struct ms_pacer *pacer) {
    if (!pacer) return;
    pthread_mutex_lock(&pacer->mutex);
    pacer->stopping = true;
    pthread_cond_signal(&pacer->changed);
    pthread_mutex_unlock(&pacer->mutex);
    pthread_join(pacer->thread, NULL);
    pthread_mutex_destroy(&pacer->mutex);
    pthread_cond_destroy(&pacer->changed);
    free(pacer);
}
