/* prerouter.h - who is next: knows or guesses a layer's experts before the graph comes to choose them.
 *
 * Predictors have one interface: a state of the model or what was chosen goes
 * in, experts with a confidence come out and go to the store, which decides
 * what is worth reading.
 *
 *   router     the layer's own router, where it reads the state before
 *              attention (SmallThinker). Known, not guessed.
 *   lookahead  the router of a layer to come, applied to the state as it is
 *              now: of the next layers while this one's experts are computed,
 *              and once more just before a layer's attention.
 *   repeat     what the token before chose in that layer
 *   oracle, random   from a replayed routing (routing.h), for measuring only
 *   heads      what a trained head (heads.h) said a token before, where it advises
 *
 * A confidence is not what a router says but how often an expert of that rank
 * was indeed chosen, by layer and by how far ahead it was said; measured as
 * the model runs. How many layers ahead is guessed follows from measured
 * times: those of a layer, and of reading what it misses.
 *
 * One prerouter belongs to one context and its thread; what is shared is in
 * the model part. Prompts are not its business: they read nearly all experts
 * of the next layer anyway (block.h).
 */
#ifndef MS_PREROUTER_H
#define MS_PREROUTER_H

#include <stdbool.h>
#include <stdint.h>

#include "ggml.h"
#include "heads.h"
#include "routers.h"
#include "routing.h"
#include "source.h"
#include "store.h"
#include "trial.h"

#define MS_PREDICT_ROUTER 1
#define MS_PREDICT_LOOKAHEAD 2
#define MS_PREDICT_REPEAT 4
#define MS_PREDICT_ORACLE 8
#define MS_PREDICT_RANDOM 16

/* Predictions by how far ahead they were made: before the layer's own attention, and 1 to 7 layers before. */
#define MS_DEPTHS 8
#define MS_BY_HEADS MS_DEPTHS /* and by heads that advise, a token before */
#define MS_PREDICTIONS (MS_DEPTHS + 1)
#define MS_RANKS 16 /* counted apart; the last stands for all above */

struct ms_prediction_counters {
    uint64_t layers;   /* predicted */
    uint64_t experts;  /* that these chose */
    uint64_t recalled; /* of these, among as many predicted */
    uint64_t exact;    /* layers whose set was right */
    uint64_t absent[MS_RANKS];       /* predicted that were not in memory, by rank */
    uint64_t absent_right[MS_RANKS]; /* of these, chosen */
};

/* Of one engine. */
struct ms_prerouter_model {
    const struct ms_source *source;
    struct ms_store *store;
    const bool *wanted; /* per layer: is it loaded? */
    struct ms_routers *routers;
    struct ms_routing *routing;
    unsigned predictors;
    bool automatic; /* guesses are on where a trial says that they pay */
    float recall[MS_DEPTHS]; /* of a lookahead that is made up from a replayed routing */
    /* counted by all contexts; atomic */
    struct ms_prediction_counters known, ahead[MS_PREDICTIONS];
    int64_t predict_ns;
    int64_t trial_ns[2]; /* median token without and with, of the last trial; 0 before the first */
    int verdict;         /* of it: 0 none yet, 1 on, -1 off */
    int depth;
};

struct ms_prerouter;
struct ms_prerouter *ms_prerouter_new(void); /* NULL: out of memory */
void ms_prerouter_free(struct ms_prerouter *prerouter);

/* Just before the attention of a layer: `state` F32 {columns, tokens}, not yet normalised. */
void ms_prerouter_before_attention(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int layer, const struct ggml_tensor *state);
/* A layer has chosen (ids: I32 {choices, tokens}), and its experts are on their way. */
void ms_prerouter_chosen(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int layer, const struct ggml_tensor *ids);
/* The same layer has chosen for one token, and a head says what the next is likely to take, the surest first. */
void ms_prerouter_advise(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int layer, const int32_t *experts, int n);
/* What was advised is not about the evaluation that begins. */
void ms_prerouter_withdraw_advice(struct ms_prerouter *prerouter, const struct ms_prerouter_model *model);
/* For the evaluation that begins: the layers that these predict are chosen for already, so there is nothing to say of them; NULL: none. */
void ms_prerouter_settle(struct ms_prerouter *prerouter, const struct ms_heads *heads);
/* The last layer of a token is done: how long it took, and of that waiting. */
void ms_prerouter_token(struct ms_prerouter *prerouter, struct ms_prerouter_model *model, int64_t duration_ns, int64_t wait_ns);

#endif
