/* clock.h - time in nanoseconds: one monotonic clock, and the processor time of a thread. */
#ifndef MS_CLOCK_H
#define MS_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t ms_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Processor time of this thread: what runs elsewhere, and waiting, does not count. */
static inline int64_t ms_thread_cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
