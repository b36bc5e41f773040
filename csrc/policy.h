/* policy.h - which slot to give up next.
 *
 * A policy orders the slots of one size class by how soon they will be missed.
 * It is told when a slot is filled, used and emptied, and is asked for a
 * victim; it knows nothing of files, layers or locks. The caller serialises
 * all calls. After opening, nothing is allocated and no call fails.
 */
#ifndef MS_POLICY_H
#define MS_POLICY_H

#include <stdbool.h>
#include <stddef.h>

struct ms_policy {
    /* With expert `key`, 0..n_keys-1, of those that may want a slot here: a policy may remember what it gave up. */
    void (*filled)(struct ms_policy *policy, int slot, int key);
    void (*used)(struct ms_policy *policy, int slot);
    void (*cooled)(struct ms_policy *policy, int slot); /* will be missed less than any other */
    void (*emptied)(struct ms_policy *policy, int slot);
    /* The best slot for which `may` says yes, or -1 if it says yes to none. */
    int (*victim)(struct ms_policy *policy, bool (*may)(void *context, int slot), void *context);
    void (*free)(struct ms_policy *policy);
};

/* The policy of that name:
 *
 *     lru   the slot that was used longest ago goes first
 *     lfu   the expert that was used least often goes first; counts outlive eviction and are halved from time to time
 *     lrfu  between the two: a use counts the less the longer ago it was
 *
 * -EINVAL: no such policy, the sentence lists them; -ENOMEM. */
int ms_policy_open(const char *name, int n_slots, int n_keys, struct ms_policy **out, char *err, size_t errlen);

/* For ms_policy_open. NULL: out of memory. */
struct ms_policy *ms_policy_lru(int n_slots, int n_keys);
struct ms_policy *ms_policy_lfu(int n_slots, int n_keys);
struct ms_policy *ms_policy_lrfu(int n_slots, int n_keys);

#endif
