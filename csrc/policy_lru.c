/* policy_lru.c - least recently used: one ring, the most recent at its front. */
#include "policy.h"
#include "slot_rings.h"

struct lru {
    struct ms_policy base;
    struct ms_rings rings;
};

static void lru_used(struct ms_policy *policy, int slot) { ms_rings_to_front(&((struct lru *)policy)->rings, 0, slot); }

static void lru_filled(struct ms_policy *policy, int slot, int key) {
    (void)key;
    lru_used(policy, slot);
}

static void lru_cooled(struct ms_policy *policy, int slot) { ms_rings_to_back(&((struct lru *)policy)->rings, 0, slot); }

static void lru_emptied(struct ms_policy *policy, int slot) { ms_rings_remove(&((struct lru *)policy)->rings, slot); }

static int lru_victim(struct ms_policy *policy, bool (*may)(void *, int), void *context) {
    return ms_rings_last(&((struct lru *)policy)->rings, 0, may, context);
}

static void lru_free(struct ms_policy *policy) {
    ms_rings_close(&((struct lru *)policy)->rings);
    free(policy);
}

struct ms_policy *ms_policy_lru(int n_slots, int n_keys) {
    (void)n_keys;
    struct lru *lru = calloc(1, sizeof *lru);
    if (!lru) return NULL;
    lru->base = (struct ms_policy){.filled = lru_filled, .used = lru_used, .cooled = lru_cooled, .emptied = lru_emptied, .victim = lru_victim, .free = lru_free};
    if (ms_rings_open(&lru->rings, n_slots, 1)) return &lru->base;
    lru_free(&lru->base);
    return NULL;
}
