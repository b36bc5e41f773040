/* thread.h - a thread with a small stack.
 *
 * What the cache may take is measured with what was allocated and not touched
 * counted as promised; the usual 8 MiB of stack for each reading thread would
 * be 70 MiB that no thread ever touches.
 */
#ifndef MS_THREAD_H
#define MS_THREAD_H

#include <pthread.h>

#define MS_THREAD_STACK_BYTES ((size_t)256 << 10)

/* As pthread_create: 0 or an errno. */
static inline int ms_thread_start(pthread_t *thread, void *(*run)(void *), void *argument) {
    pthread_attr_t attributes;
    int rc = pthread_attr_init(&attributes);
    if (rc) return rc;
    rc = pthread_attr_setstacksize(&attributes, MS_THREAD_STACK_BYTES);
    if (rc == 0) rc = pthread_create(thread, &attributes, run, argument);
    pthread_attr_destroy(&attributes);
    return rc;
}

#endif
