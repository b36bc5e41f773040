#include "timeline.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define BUSY UINT64_MAX /* of a place: somebody copies into or out of it */

struct place {
    _Atomic uint64_t sequence; /* of the event in it, 0: none, or BUSY */
    ms_event event;
};

struct ms_timeline {
    _Atomic uint64_t next;  /* number of the next event */
    _Atomic uint64_t first; /* of this recording */
    size_t capacity;
    struct place places[];
};

struct ms_timeline *ms_timeline_open(size_t capacity, uint64_t first) {
    if (capacity > (SIZE_MAX - sizeof(struct ms_timeline)) / sizeof(struct place)) return NULL;
    /* zeroed pages are untouched memory: a recording takes what it fills */
    struct ms_timeline *timeline = calloc(1, sizeof *timeline + capacity * sizeof(struct place));
    if (!timeline) return NULL;
    timeline->capacity = capacity;
    atomic_init(&timeline->next, first);
    atomic_init(&timeline->first, first);
    return timeline;
}

void ms_timeline_close(struct ms_timeline *timeline) { free(timeline); }
size_t ms_timeline_capacity(const struct ms_timeline *timeline) { return timeline->capacity; }
uint64_t ms_timeline_next(struct ms_timeline *timeline) { return atomic_load(&timeline->next); }

void ms_timeline_restart(struct ms_timeline *timeline, uint64_t first) {
    atomic_store(&timeline->next, first);
    atomic_store(&timeline->first, first);
}

static struct place *place_of(struct ms_timeline *timeline, uint64_t sequence) { return &timeline->places[sequence % timeline->capacity]; }

/* Locks a place and returns the number of the event in it. */
static uint64_t lock(struct place *place) {
    for (;;) {
        uint64_t held = atomic_load_explicit(&place->sequence, memory_order_relaxed);
        if (held != BUSY && atomic_compare_exchange_weak_explicit(&place->sequence, &held, BUSY, memory_order_acquire, memory_order_relaxed)) return held;
        if (held == BUSY) sched_yield(); /* its owner may have lost its core */
    }
}

static void unlock(struct place *place, uint64_t sequence) { atomic_store_explicit(&place->sequence, sequence, memory_order_release); }

uint64_t ms_timeline_append(struct ms_timeline *timeline, const ms_event *event) {
    uint64_t sequence = atomic_fetch_add_explicit(&timeline->next, 1, memory_order_relaxed);
    struct place *place = place_of(timeline, sequence);
    uint64_t held = lock(place);
    if (held < sequence) { /* else others came round the ring since: ours is the older */
        place->event = *event;
        held = sequence;
    }
    unlock(place, held);
    return sequence;
}

void ms_timeline_decide(struct ms_timeline *timeline, uint64_t sequence, enum ms_outcome outcome) {
    if (!timeline || sequence < atomic_load_explicit(&timeline->first, memory_order_relaxed)) return;
    struct place *place = place_of(timeline, sequence);
    uint64_t held = lock(place);
    if (held == sequence) place->event.outcome = (uint8_t)outcome;
    unlock(place, held);
}

size_t ms_timeline_read(struct ms_timeline *timeline, ms_event *out, size_t capacity, uint64_t *dropped) {
    uint64_t first = atomic_load(&timeline->first), next = atomic_load(&timeline->next);
    size_t room = capacity < timeline->capacity ? capacity : timeline->capacity, n = 0;
    for (uint64_t sequence = next - first > room ? next - room : first; sequence < next; sequence++) {
        struct place *place = place_of(timeline, sequence);
        uint64_t held = lock(place);
        if (held == sequence) out[n++] = place->event;
        unlock(place, held);
    }
    if (dropped) *dropped = next - first - n;
    return n;
}
