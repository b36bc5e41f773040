#include "policy.h"

#include <errno.h>
#include <string.h>

#include "message.h"

static const struct {
    const char *name;
    struct ms_policy *(*open)(int n_slots, int n_keys);
} policies[] = {{"lru", ms_policy_lru}, {"lfu", ms_policy_lfu}, {"lrfu", ms_policy_lrfu}};

int ms_policy_open(const char *name, int n_slots, int n_keys, struct ms_policy **out, char *err, size_t errlen) {
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
        if (strcmp(name, policies[i].name) != 0) continue;
        *out = policies[i].open(n_slots, n_keys);
        return *out ? 0 : ms_fail(-ENOMEM, err, errlen, "out of memory for the order of %d slots", n_slots);
    }
    return ms_fail(-EINVAL, err, errlen, "unknown policy \"%s\"; known are lru, lfu and lrfu", name);
}
