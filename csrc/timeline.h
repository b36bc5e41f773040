/* timeline.h - what happened when: the last events of a recording, kept in a ring.
 *
 * Every thread that computes or reads adds to it; nothing in the engine reads
 * it. An event costs one atomic addition and the copy of 40 bytes into a place
 * of its own. Each place has a lock that is held for that copy alone, so one
 * thread meets another only if it comes round the whole ring meanwhile.
 *
 * Events are numbered from the `first` of ms_timeline_open on; 0 is no event.
 * The number stays valid for ever: once the event is overwritten it does
 * nothing.
 *
 * Starting and stopping while others add: a timeline is stopped by no longer
 * handing it to ms_timeline_add, that is by setting the (atomic) pointer they
 * take it from to NULL. Who took the pointer just before may still add, so a
 * timeline must stay open until no such thread is left; the engine keeps its
 * timelines until it closes, and takes one of the right size again for the next
 * recording. All functions but open and close may be called by any thread.
 */
#ifndef MS_TIMELINE_H
#define MS_TIMELINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "moestream.h"

struct ms_timeline;

/* capacity: events kept, at least 1; 48 bytes each. first: number of the first event, at least 1. NULL: out of memory. */
struct ms_timeline *ms_timeline_open(size_t capacity, uint64_t first);
void ms_timeline_close(struct ms_timeline *timeline);
size_t ms_timeline_capacity(const struct ms_timeline *timeline);

/* The number that the next event will get. */
uint64_t ms_timeline_next(struct ms_timeline *timeline);
/* Forgets what was added so far. first: number of the next event, above all before. */
void ms_timeline_restart(struct ms_timeline *timeline, uint64_t first);

/* Copies the event, over the oldest one if the ring is full, and returns its number. */
uint64_t ms_timeline_append(struct ms_timeline *timeline, const ms_event *event);

/* The same, and nothing at all (0) where nothing is recorded. */
static inline uint64_t ms_timeline_add(struct ms_timeline *timeline, const ms_event *event) {
    return timeline ? ms_timeline_append(timeline, event) : 0;
}

/* Sets the outcome of an event that is still in the ring (of this recording); else does nothing. NULL is allowed. */
void ms_timeline_decide(struct ms_timeline *timeline, uint64_t sequence, enum ms_outcome outcome);

/* Copies the newest `capacity` events at most, in the order of their numbers, and returns how many.
 * *dropped (may be NULL): events of this recording that are not among them, since they were overwritten,
 * are still being added, or did not fit. */
size_t ms_timeline_read(struct ms_timeline *timeline, ms_event *out, size_t capacity, uint64_t *dropped);

#endif
