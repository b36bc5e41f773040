/* slot_heap.h - slots by rank, for policies: the lowest is found at once, changes take logarithmic time. */
#ifndef MS_SLOT_HEAP_H
#define MS_SLOT_HEAP_H

#include <stdbool.h>

struct ms_heap {
    int n;
    double *rank; /* of each slot that is in the heap */
    int *slots;   /* those of 2i+1 and 2i+2 rank no lower than that of i */
    int *place;   /* of each slot among these, or -1 */
};

/* false: out of memory; close it even so. */
bool ms_heap_open(struct ms_heap *heap, int n_slots);
void ms_heap_close(struct ms_heap *heap);
/* Puts a slot in, or gives it another rank. */
void ms_heap_put(struct ms_heap *heap, int slot, double rank);
/* Nothing happens if it is not in. */
void ms_heap_remove(struct ms_heap *heap, int slot);
/* The slot of lowest rank for which `may` says yes, or -1. It takes time in proportion to the slots refused on the way. */
int ms_heap_lowest(const struct ms_heap *heap, bool (*may)(void *, int), void *context);

#endif
