#include "trial.h"

#include <stdlib.h>
#include <string.h>

#define WATCH_TOKENS 16
#define LEAST_WAIT 0.03   /* share of the time below which there is nothing to win */
#define BLOCK_TOKENS 5    /* the first of a block is not counted: it finds what the other way left */
#define WORTH 0.99        /* what must be left of the time */
#define HOPELESS 1.10
#define HOPELESS_TOKENS 8
#define SHORTEST_HOLD 256
#define LONGEST_HOLD 8192

void ms_trial_begin(struct ms_trial *trial) { *trial = (struct ms_trial){.phase = MS_TRIAL_WATCHES, .hold = SHORTEST_HOLD}; }

static int compare(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int64_t median(const int64_t *times, int n) {
    int64_t sorted[MS_TRIAL_TOKENS];
    memcpy(sorted, times, sizeof *times * (size_t)n);
    qsort(sorted, (size_t)n, sizeof *sorted, compare);
    return n ? sorted[n / 2] : 0;
}

static void enter(struct ms_trial *trial, int phase, bool on) {
    trial->phase = phase;
    trial->on = on;
    trial->n = 0;
    trial->watched_ns = trial->waited_ns = 0;
}

static void watch(struct ms_trial *trial, int64_t duration_ns, int64_t wait_ns) {
    trial->watched_ns += duration_ns;
    trial->waited_ns += wait_ns;
    if (trial->n < WATCH_TOKENS) return;
    bool worth_trying = (double)trial->waited_ns > LEAST_WAIT * (double)trial->watched_ns;
    enter(trial, worth_trying ? MS_TRIAL_TRIES : MS_TRIAL_WATCHES, false);
    trial->n_of[0] = trial->n_of[1] = 0;
}

static void decide(struct ms_trial *trial) {
    bool verdict = (double)trial->medians[1] < WORTH * (double)trial->medians[0];
    if (trial->n_trials++ && verdict == trial->verdict) trial->hold = trial->hold < LONGEST_HOLD / 2 ? 2 * trial->hold : LONGEST_HOLD;
    else trial->hold = SHORTEST_HOLD;
    trial->verdict = verdict;
    enter(trial, MS_TRIAL_HOLDS, verdict);
}

static void try(struct ms_trial *trial, int64_t duration_ns) {
    int block = (trial->n - 1) / BLOCK_TOKENS, within = (trial->n - 1) % BLOCK_TOKENS;
    if (within > 0 && trial->n_of[trial->on] < MS_TRIAL_TOKENS) trial->times[trial->on][trial->n_of[trial->on]++] = duration_ns;
    if (within < BLOCK_TOKENS - 1) return;
    for (int way = 0; way < 2; way++) trial->medians[way] = median(trial->times[way], trial->n_of[way]);
    bool hopeless = trial->n_of[0] >= HOPELESS_TOKENS && trial->n_of[1] >= HOPELESS_TOKENS && (double)trial->medians[1] > HOPELESS * (double)trial->medians[0];
    if (hopeless || (trial->n_of[0] >= MS_TRIAL_TOKENS && trial->n_of[1] >= MS_TRIAL_TOKENS)) decide(trial);
    else trial->on = (block + 1) % 4 == 1 || (block + 1) % 4 == 2;
}

void ms_trial_observe(struct ms_trial *trial, int64_t duration_ns, int64_t wait_ns) {
    trial->n++;
    if (trial->phase == MS_TRIAL_WATCHES) watch(trial, duration_ns, wait_ns);
    else if (trial->phase == MS_TRIAL_TRIES) try(trial, duration_ns);
    else if (trial->n >= trial->hold) enter(trial, MS_TRIAL_WATCHES, false);
}
