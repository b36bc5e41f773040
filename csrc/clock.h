/* clock.h - one monotonic clock for every counter, in nanoseconds. */
#ifndef MS_CLOCK_H
#define MS_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t ms_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
