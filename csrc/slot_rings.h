/* slot_rings.h - slots in order, for policies: several rings of which a slot is in one or none.
 *
 * Each ring goes through a sentinel of its own, numbered behind the slots: next
 * of it is the front, previous of it the back. A slot in no ring points at itself.
 */
#ifndef MS_SLOT_RINGS_H
#define MS_SLOT_RINGS_H

#include <stdbool.h>
#include <stdlib.h>

struct ms_rings {
    int n_slots;
    int *next, *previous;
};

static inline bool ms_rings_open(struct ms_rings *rings, int n_slots, int n_rings) {
    int n = n_slots + n_rings;
    rings->n_slots = n_slots;
    rings->next = malloc(sizeof(int) * (size_t)n);
    rings->previous = malloc(sizeof(int) * (size_t)n);
    if (!rings->next || !rings->previous) return false;
    for (int i = 0; i < n; i++) rings->next[i] = rings->previous[i] = i;
    return true;
}

static inline void ms_rings_close(struct ms_rings *rings) {
    free(rings->next);
    free(rings->previous);
}

static inline void ms_rings_remove(struct ms_rings *rings, int slot) {
    rings->next[rings->previous[slot]] = rings->next[slot];
    rings->previous[rings->next[slot]] = rings->previous[slot];
    rings->next[slot] = rings->previous[slot] = slot;
}

static inline void ms_rings_put_behind(struct ms_rings *rings, int slot, int before) {
    ms_rings_remove(rings, slot);
    int after = rings->next[before];
    rings->next[slot] = after;
    rings->previous[slot] = before;
    rings->previous[after] = slot;
    rings->next[before] = slot;
}

static inline void ms_rings_to_front(struct ms_rings *rings, int ring, int slot) { ms_rings_put_behind(rings, slot, rings->n_slots + ring); }

static inline void ms_rings_to_back(struct ms_rings *rings, int ring, int slot) {
    ms_rings_remove(rings, slot);
    ms_rings_put_behind(rings, slot, rings->previous[rings->n_slots + ring]);
}

/* Puts all of ring `from` before the front of `to`, in their order. */
static inline void ms_rings_append(struct ms_rings *rings, int from, int to) {
    int source = rings->n_slots + from, target = rings->n_slots + to;
    int front = rings->next[source], back = rings->previous[source], old_front = rings->next[target];
    if (front == source) return;
    rings->next[source] = rings->previous[source] = source;
    rings->next[target] = front;
    rings->previous[front] = target;
    rings->next[back] = old_front;
    rings->previous[old_front] = back;
}

/* From the back of a ring, the first slot for which `may` says yes; -1: there is none. */
static inline int ms_rings_last(const struct ms_rings *rings, int ring, bool (*may)(void *, int), void *context) {
    int sentinel = rings->n_slots + ring;
    for (int slot = rings->previous[sentinel]; slot != sentinel; slot = rings->previous[slot])
        if (may(context, slot)) return slot;
    return -1;
}

#endif
