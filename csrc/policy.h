/* policy.h - which slot to give up next.
 *
 * A policy orders the slots of one size class by how soon they will be missed.
 * It is told when a slot is filled, used and emptied, and is asked for a
 * victim; it knows nothing of files, layers or locks. The caller serialises
 * all calls.
 */
#ifndef MS_POLICY_H
#define MS_POLICY_H

#include <stdbool.h>

struct ms_policy {
    void (*filled)(struct ms_policy *policy, int slot);
    void (*used)(struct ms_policy *policy, int slot);
    void (*cooled)(struct ms_policy *policy, int slot); /* will be missed less than any other */
    void (*emptied)(struct ms_policy *policy, int slot);
    /* The best slot for which `may` says yes, or -1 if it says yes to none. */
    int (*victim)(struct ms_policy *policy, bool (*may)(void *context, int slot), void *context);
    void (*free)(struct ms_policy *policy);
};

/* Least recently used. NULL: out of memory. */
struct ms_policy *ms_policy_lru(int n_slots);

#endif
