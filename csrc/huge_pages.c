#include "huge_pages.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "thread.h"

#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define LOOK_AGAIN_NS (500 * 1000000L)
#define LOWEST_PRIORITY 19

struct ms_huge_pages {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t stopping;
    bool stop;
    int n_ranges;
    struct ms_huge_range *ranges;
    bool **done; /* per range, per huge page */
};

static bool sleep_unless_stopped(struct ms_huge_pages *pages, long ns) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += ns;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&pages->mutex);
    if (!pages->stop) pthread_cond_timedwait(&pages->stopping, &pages->mutex, &until);
    bool stop = pages->stop;
    pthread_mutex_unlock(&pages->mutex);
    return !stop;
}

#ifdef __linux__

/* One pass over all ranges. Returns how many huge pages are still to be made, or -1 if the kernel makes none. */
static long collapse_what_is_full(struct ms_huge_pages *pages) {
    long left = 0;
    for (int r = 0; r < pages->n_ranges; r++) {
        const struct ms_huge_range *range = &pages->ranges[r];
        for (size_t i = 0; i < range->bytes / MS_HUGE_PAGE_BYTES; i++) {
            if (pages->done[r][i]) continue;
            size_t offset = i * MS_HUGE_PAGE_BYTES;
            if (!range->full(range->context, offset, MS_HUGE_PAGE_BYTES)) {
                left++;
                continue;
            }
            /* a page that a read holds right now is refused; it has had its chance */
            if (madvise(range->memory + offset, MS_HUGE_PAGE_BYTES, MADV_COLLAPSE) < 0 && errno == EINVAL) return -1;
            pages->done[r][i] = true;
            if (!sleep_unless_stopped(pages, 100000)) return left;
        }
    }
    return left;
}

static void *exchange(void *argument) {
    struct ms_huge_pages *pages = argument;
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), LOWEST_PRIORITY);
    long left = 1;
    while (left > 0 && sleep_unless_stopped(pages, LOOK_AGAIN_NS)) left = collapse_what_is_full(pages);
    for (int r = 0; left < 0 && r < pages->n_ranges; r++)
        madvise(pages->ranges[r].memory, pages->ranges[r].bytes / MS_HUGE_PAGE_BYTES * MS_HUGE_PAGE_BYTES, MADV_HUGEPAGE);
    return NULL;
}

struct ms_huge_pages *ms_huge_pages_start(const struct ms_huge_range *ranges, int n_ranges) {
    struct ms_huge_pages *pages = calloc(1, sizeof *pages);
    if (!pages) return NULL;
    pthread_mutex_init(&pages->mutex, NULL);
    pthread_cond_init(&pages->stopping, NULL);
    pages->ranges = calloc((size_t)n_ranges, sizeof *ranges);
    pages->done = calloc((size_t)n_ranges, sizeof *pages->done);
    bool enough = pages->ranges && pages->done;
    for (int r = 0; enough && r < n_ranges; r++) {
        pages->ranges[r] = ranges[r];
        pages->n_ranges = r + 1;
        pages->done[r] = calloc(ranges[r].bytes / MS_HUGE_PAGE_BYTES + 1, sizeof(bool));
        enough = pages->done[r] != NULL;
    }
    if (enough && ms_thread_start(&pages->thread, exchange, pages) == 0) return pages;
    pages->stop = true;
    ms_huge_pages_stop(pages);
    return NULL;
}

#else

struct ms_huge_pages *ms_huge_pages_start(const struct ms_huge_range *ranges, int n_ranges) {
    (void)ranges;
    (void)n_ranges;
    return NULL;
}

#endif

void ms_huge_pages_stop(struct ms_huge_pages *pages) {
    if (!pages) return;
    pthread_mutex_lock(&pages->mutex);
    bool running = !pages->stop;
    pages->stop = true;
    pthread_cond_signal(&pages->stopping);
    pthread_mutex_unlock(&pages->mutex);
    if (running) pthread_join(pages->thread, NULL);
    for (int r = 0; r < pages->n_ranges; r++) free(pages->done[r]);
    pthread_mutex_destroy(&pages->mutex);
    pthread_cond_destroy(&pages->stopping);
    free(pages->done);
    free(pages->ranges);
    free(pages);
}
