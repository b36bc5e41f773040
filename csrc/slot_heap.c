#include "slot_heap.h"

#include <stdlib.h>

bool ms_heap_open(struct ms_heap *heap, int n_slots) {
    heap->n = 0;
    heap->rank = malloc(sizeof(double) * (size_t)n_slots);
    heap->slots = malloc(sizeof(int) * (size_t)n_slots);
    heap->place = malloc(sizeof(int) * (size_t)n_slots);
    for (int s = 0; heap->place && s < n_slots; s++) heap->place[s] = -1;
    return heap->rank && heap->slots && heap->place;
}

void ms_heap_close(struct ms_heap *heap) {
    free(heap->rank);
    free(heap->slots);
    free(heap->place);
}

static double rank_at(const struct ms_heap *heap, int at) { return heap->rank[heap->slots[at]]; }

static void set(struct ms_heap *heap, int at, int slot) {
    heap->slots[at] = slot;
    heap->place[slot] = at;
}

/* Moves the slot that is at `at` to where its rank belongs. */
static void settle(struct ms_heap *heap, int at) {
    int slot = heap->slots[at];
    for (; at > 0 && heap->rank[slot] < rank_at(heap, (at - 1) / 2); at = (at - 1) / 2) set(heap, at, heap->slots[(at - 1) / 2]);
    for (;;) {
        int child = 2 * at + 1;
        if (child + 1 < heap->n && rank_at(heap, child + 1) < rank_at(heap, child)) child++;
        if (child >= heap->n || rank_at(heap, child) >= heap->rank[slot]) break;
        set(heap, at, heap->slots[child]);
        at = child;
    }
    set(heap, at, slot);
}

void ms_heap_put(struct ms_heap *heap, int slot, double rank) {
    heap->rank[slot] = rank;
    if (heap->place[slot] < 0) set(heap, heap->n++, slot);
    settle(heap, heap->place[slot]);
}

void ms_heap_remove(struct ms_heap *heap, int slot) {
    int at = heap->place[slot];
    if (at < 0) return;
    heap->place[slot] = -1;
    int last = heap->slots[--heap->n];
    if (last == slot) return;
    set(heap, at, last);
    settle(heap, at);
}

static void look(const struct ms_heap *heap, int at, bool (*may)(void *, int), void *context, int *lowest) {
    if (at >= heap->n || (*lowest >= 0 && rank_at(heap, at) >= heap->rank[*lowest])) return;
    if (may(context, heap->slots[at])) {
        *lowest = heap->slots[at];
        return;
    }
    look(heap, 2 * at + 1, may, context, lowest);
    look(heap, 2 * at + 2, may, context, lowest);
}

int ms_heap_lowest(const struct ms_heap *heap, bool (*may)(void *, int), void *context) {
    int lowest = -1;
    look(heap, 0, may, context, &lowest);
    return lowest;
}
