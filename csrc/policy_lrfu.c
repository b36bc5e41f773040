/* policy_lrfu.c - least recently / frequently used (D. Lee et al., LRFU, IEEE Transactions on Computers 50/12, 2001).
 *
 * An expert's value is the sum over its uses of 2^-(age / half-life): with a
 * long half-life that orders by frequency, with a short one by recency. Ages
 * grow for all alike, so the order changes only with a use, and what is kept is
 * the logarithm of the value as it would be at time 0. It outlives eviction: a
 * scan of experts that are used once each does not make others forgotten.
 *
 * HALF_LIFE was chosen by replaying routing traces (docs/trace.md): of real ones,
 * and of synthetic ones with the locality that others published. Longer ones find
 * more where routing is stable, and less than LRU where it moves with the text.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "policy.h"
#include "slot_heap.h"

#define HALF_LIFE 0.5 /* in uses, a mean expert's */

struct lrfu {
    struct ms_policy base;
    struct ms_heap heap; /* by value; the ranks of those that cooled are below 0, and values are above */
    int *key_of;         /* of the slots that are filled */
    double *value;       /* log2, of each key; 0: never used */
    int64_t uses;
    double half_life; /* in uses */
    double coldest;
};

static void lrfu_used(struct ms_policy *policy, int slot) {
    struct lrfu *lrfu = (struct lrfu *)policy;
    double *value = &lrfu->value[lrfu->key_of[slot]];
    double now = (double)++lrfu->uses / lrfu->half_life; /* log2 of a use now */
    double more = now > *value ? now : *value, less = now > *value ? *value : now;
    *value = less > 0 ? more + log2(1 + exp2(less - more)) : more;
    ms_heap_put(&lrfu->heap, slot, *value);
}

static void lrfu_filled(struct ms_policy *policy, int slot, int key) {
    ((struct lrfu *)policy)->key_of[slot] = key;
    lrfu_used(policy, slot);
}

static void lrfu_cooled(struct ms_policy *policy, int slot) {
    struct lrfu *lrfu = (struct lrfu *)policy;
    ms_heap_put(&lrfu->heap, slot, --lrfu->coldest);
}

static void lrfu_emptied(struct ms_policy *policy, int slot) { ms_heap_remove(&((struct lrfu *)policy)->heap, slot); }

static int lrfu_victim(struct ms_policy *policy, bool (*may)(void *, int), void *context) { return ms_heap_lowest(&((struct lrfu *)policy)->heap, may, context); }

static void lrfu_free(struct ms_policy *policy) {
    struct lrfu *lrfu = (struct lrfu *)policy;
    ms_heap_close(&lrfu->heap);
    free(lrfu->key_of);
    free(lrfu->value);
    free(lrfu);
}

struct ms_policy *ms_policy_lrfu(int n_slots, int n_keys) {
    struct lrfu *lrfu = calloc(1, sizeof *lrfu);
    if (!lrfu) return NULL;
    lrfu->base = (struct ms_policy){.filled = lrfu_filled, .used = lrfu_used, .cooled = lrfu_cooled, .emptied = lrfu_emptied, .victim = lrfu_victim, .free = lrfu_free};
    lrfu->half_life = HALF_LIFE * n_keys;
    lrfu->key_of = malloc(sizeof(int) * (size_t)n_slots);
    lrfu->value = calloc((size_t)n_keys, sizeof(double));
    if (ms_heap_open(&lrfu->heap, n_slots) && lrfu->key_of && lrfu->value) return &lrfu->base;
    lrfu_free(&lrfu->base);
    return NULL;
}
