#include "reuse.h"

#define ENOUGH 64        /* observations from which a share says something */
#define FORGET (1u << 16) /* at so many all counts are halved: routing drifts with the text */

static int bucket(uint64_t age) { return age < MS_REUSE_AGES ? (int)age : MS_REUSE_AGES - 1; }

/* It was there, unused, at each age up to this. The last bucket, of several ages, counts once. */
static void observe(struct ms_reuse *reuse, uint64_t age) {
    for (int a = 1; a <= bucket(age); a++) reuse->of[a]++;
    if (reuse->of[1] < FORGET) return;
    for (int a = 1; a < MS_REUSE_AGES; a++) {
        reuse->of[a] /= 2;
        reuse->used[a] /= 2;
    }
}

void ms_reuse_used(struct ms_reuse *reuse, uint64_t age) {
    if (age == 0) return;
    observe(reuse, age);
    reuse->used[bucket(age)]++;
}

void ms_reuse_given_up(struct ms_reuse *reuse, uint64_t age) { observe(reuse, age); }

double ms_reuse_probability(const struct ms_reuse *reuse, uint64_t age) {
    int a = bucket(age);
    if (a == 0) return 1;
    if (a == MS_REUSE_AGES - 1) { /* many tokens in one bucket: the next one's share of it is what the ages before show at most */
        if (reuse->of[a - 1] >= ENOUGH) a--;
    }
    return reuse->of[a] < ENOUGH ? 1 : (double)reuse->used[a] / (double)reuse->of[a];
}
