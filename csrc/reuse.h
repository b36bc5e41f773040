/* reuse.h - how probable it is that an expert not used for some tokens is used by the next.
 *
 * Counted while the model runs: of all times that an expert in memory had not
 * been used for `age` tokens, in how many did the next token use it? What a
 * guess may throw out is measured by this. The caller serialises all calls.
 */
#ifndef MS_REUSE_H
#define MS_REUSE_H

#include <stdint.h>

#define MS_REUSE_AGES 16 /* the last stands for it and all above */

struct ms_reuse {
    uint32_t used[MS_REUSE_AGES], of[MS_REUSE_AGES];
};

/* An expert was used after `age` tokens (1: by the next token) without it. */
void ms_reuse_used(struct ms_reuse *reuse, uint64_t age);
/* It was given up after so many. */
void ms_reuse_given_up(struct ms_reuse *reuse, uint64_t age);
/* 1 as long as too little is known. */
double ms_reuse_probability(const struct ms_reuse *reuse, uint64_t age);

#endif
