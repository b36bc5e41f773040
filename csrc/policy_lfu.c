/* policy_lfu.c - least frequently used, with ageing.
 *
 * Every expert has a count, in memory or not: what comes back is known. All
 * counts are halved once every PERIOD uses an expert, or what was wanted an
 * hour ago would stay for ever. Slots of one count share a ring, the most
 * recently used at its front; behind them all is the ring of those that cooled.
 */
#include <stdint.h>

#include "policy.h"
#include "slot_rings.h"

#define PERIOD 4 /* uses, a mean expert's, between two halvings */
#define MOST 63  /* counts stay there */
#define COOL 0   /* a ring */

struct lfu {
    struct ms_policy base;
    struct ms_rings rings; /* COOL, then one a count */
    int *key_of;           /* of the slots that are filled */
    uint8_t *count;        /* of each key */
    int n_keys;
    int64_t uses, period; /* since the last halving; between two */
};

static int ring_of(int count) { return COOL + 1 + count; }

static void halve(struct lfu *lfu) {
    for (int key = 0; key < lfu->n_keys; key++) lfu->count[key] /= 2;
    for (int count = 1; count <= MOST; count++) ms_rings_append(&lfu->rings, ring_of(count), ring_of(count / 2));
}

static void lfu_used(struct ms_policy *policy, int slot) {
    struct lfu *lfu = (struct lfu *)policy;
    uint8_t *count = &lfu->count[lfu->key_of[slot]];
    if (*count < MOST) ++*count;
    ms_rings_to_front(&lfu->rings, ring_of(*count), slot);
    if (++lfu->uses < lfu->period) return;
    lfu->uses = 0;
    halve(lfu);
}

static void lfu_filled(struct ms_policy *policy, int slot, int key) {
    ((struct lfu *)policy)->key_of[slot] = key;
    lfu_used(policy, slot);
}

static void lfu_cooled(struct ms_policy *policy, int slot) { ms_rings_to_back(&((struct lfu *)policy)->rings, COOL, slot); }

static void lfu_emptied(struct ms_policy *policy, int slot) { ms_rings_remove(&((struct lfu *)policy)->rings, slot); }

static int lfu_victim(struct ms_policy *policy, bool (*may)(void *, int), void *context) {
    int victim = -1;
    for (int ring = COOL; ring <= ring_of(MOST) && victim < 0; ring++) victim = ms_rings_last(&((struct lfu *)policy)->rings, ring, may, context);
    return victim;
}

static void lfu_free(struct ms_policy *policy) {
    struct lfu *lfu = (struct lfu *)policy;
    ms_rings_close(&lfu->rings);
    free(lfu->key_of);
    free(lfu->count);
    free(lfu);
}

struct ms_policy *ms_policy_lfu(int n_slots, int n_keys) {
    struct lfu *lfu = calloc(1, sizeof *lfu);
    if (!lfu) return NULL;
    lfu->base = (struct ms_policy){.filled = lfu_filled, .used = lfu_used, .cooled = lfu_cooled, .emptied = lfu_emptied, .victim = lfu_victim, .free = lfu_free};
    lfu->n_keys = n_keys;
    lfu->period = (int64_t)PERIOD * n_keys;
    lfu->key_of = malloc(sizeof(int) * (size_t)n_slots);
    lfu->count = calloc((size_t)n_keys, 1);
    if (ms_rings_open(&lfu->rings, n_slots, ring_of(MOST) + 1) && lfu->key_of && lfu->count) return &lfu->base;
    lfu_free(&lfu->base);
    return NULL;
}
