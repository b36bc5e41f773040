/* trial.h - does it pay here? Two ways of computing a token, tried in turn.
 *
 * While tokens hardly wait for experts nothing is tried. Else some tokens are
 * computed with, some without, in blocks (without, with, with, without), and
 * the faster way is kept for a while, for longer each time that it wins again.
 * A way that is clearly slower is left before the trial is over.
 */
#ifndef MS_TRIAL_H
#define MS_TRIAL_H

#include <stdbool.h>
#include <stdint.h>

#define MS_TRIAL_TOKENS 24 /* of each way, in a trial */

enum ms_trial_phase { MS_TRIAL_WATCHES, MS_TRIAL_TRIES, MS_TRIAL_HOLDS };

struct ms_trial {
    int phase;        /* enum ms_trial_phase */
    bool on;          /* how the next token is to be computed */
    bool verdict;     /* of the last trial */
    int n_trials;
    int n;            /* tokens in this phase */
    int hold;         /* tokens until the next trial */
    int64_t watched_ns, waited_ns;
    int n_of[2];
    int64_t times[2][MS_TRIAL_TOKENS]; /* without, with */
    int64_t medians[2]; /* of the last trial */
};

void ms_trial_begin(struct ms_trial *trial);
/* A token was computed as `on` said. wait_ns: of duration_ns, waiting for experts. */
void ms_trial_observe(struct ms_trial *trial, int64_t duration_ns, int64_t wait_ns);

#endif
