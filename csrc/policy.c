#include "policy.h"

#include <stdlib.h>

/* A ring through one sentinel, the slot number n_slots: next of it is the most
 * recently used slot, previous of it the least. A slot outside the ring points
 * at itself. */
struct lru {
    struct ms_policy base;
    int sentinel;
    int *next, *previous;
};

static void unlink_slot(struct lru *lru, int slot) {
    lru->next[lru->previous[slot]] = lru->next[slot];
    lru->previous[lru->next[slot]] = lru->previous[slot];
    lru->next[slot] = lru->previous[slot] = slot;
}

static void link_behind(struct lru *lru, int slot, int before) {
    int after = lru->next[before];
    lru->next[slot] = after;
    lru->previous[slot] = before;
    lru->previous[after] = slot;
    lru->next[before] = slot;
}

static void lru_used(struct ms_policy *policy, int slot) {
    struct lru *lru = (struct lru *)policy;
    unlink_slot(lru, slot);
    link_behind(lru, slot, lru->sentinel);
}

static void lru_cooled(struct ms_policy *policy, int slot) {
    struct lru *lru = (struct lru *)policy;
    unlink_slot(lru, slot);
    link_behind(lru, slot, lru->previous[lru->sentinel]);
}

static void lru_emptied(struct ms_policy *policy, int slot) { unlink_slot((struct lru *)policy, slot); }

static int lru_victim(struct ms_policy *policy, bool (*may)(void *, int), void *context) {
    struct lru *lru = (struct lru *)policy;
    for (int slot = lru->previous[lru->sentinel]; slot != lru->sentinel; slot = lru->previous[slot])
        if (may(context, slot)) return slot;
    return -1;
}

static void lru_free(struct ms_policy *policy) {
    struct lru *lru = (struct lru *)policy;
    free(lru->next);
    free(lru->previous);
    free(lru);
}

struct ms_policy *ms_policy_lru(int n_slots) {
    struct lru *lru = calloc(1, sizeof *lru);
    if (!lru) return NULL;
    lru->base = (struct ms_policy){.filled = lru_used, .used = lru_used, .cooled = lru_cooled, .emptied = lru_emptied, .victim = lru_victim, .free = lru_free};
    lru->sentinel = n_slots;
    lru->next = malloc(sizeof(int) * (size_t)(n_slots + 1));
    lru->previous = malloc(sizeof(int) * (size_t)(n_slots + 1));
    if (!lru->next || !lru->previous) {
        lru_free(&lru->base);
        return NULL;
    }
    for (int i = 0; i <= n_slots; i++) lru->next[i] = lru->previous[i] = i;
    return &lru->base;
}
