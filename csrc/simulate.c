/* simulate.c - replays routing through a cache and a disk that are only numbers.
 *
 * A step is one layer of one token. Time goes by in the compute lane; what the
 * disk does meanwhile is worked out afterwards, up to the time reached: it is
 * idle from disk_free_ns on. The cache decides at the same points as the engine
 * does: what is there is used before anything is evicted for the rest.
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "message.h"
#include "moestream.h"
#include "policy.h"
#include "slot_heap.h"

struct place {
    int key;
    int64_t pinned;   /* the step that last wanted it, or -1 */
    int64_t expected; /* the last step that is guessed to want it, or -1 */
    bool guessed;     /* read for a guess, and not wanted yet */
    int64_t ready_ns;
};

struct simulation {
    const ms_simulation_options *options;
    ms_simulation *result;
    struct ms_policy *policy;
    int n_keys;
    int64_t n_steps;
    int64_t step; /* being computed: what it wants is pinned */
    bool routed;  /* it is known which experts that is */
    int n_used;
    int *slot_of; /* of each key, or -1 */
    struct place *slots;
    int64_t *ready; /* of the step's experts */
    int64_t now_ns, disk_free_ns;
    int64_t begin_ns; /* of what is counted */
    int64_t next_guess, end_guess; /* steps whose guesses are not asked for yet; known */
    int next_in_guess;
};

/* ------------------------------------------------------------ Belady */

struct belady {
    struct ms_policy base;
    struct ms_heap heap; /* by falling time of the next use */
    int64_t *next;       /* of each access, the next one to its expert */
    int64_t *at;         /* of each key, its next access */
    int *key_of;         /* of the slots that are filled */
};

static void belady_used(struct ms_policy *policy, int slot) {
    struct belady *belady = (struct belady *)policy;
    int64_t *at = &belady->at[belady->key_of[slot]];
    *at = belady->next[*at];
    ms_heap_put(&belady->heap, slot, -(double)*at);
}

static void belady_filled(struct ms_policy *policy, int slot, int key) {
    ((struct belady *)policy)->key_of[slot] = key;
    belady_used(policy, slot);
}

static void belady_cooled(struct ms_policy *policy, int slot) {
    (void)policy;
    (void)slot;
}

static void belady_emptied(struct ms_policy *policy, int slot) { ms_heap_remove(&((struct belady *)policy)->heap, slot); }

static int belady_victim(struct ms_policy *policy, bool (*may)(void *, int), void *context) { return ms_heap_lowest(&((struct belady *)policy)->heap, may, context); }

static void belady_free(struct ms_policy *policy) {
    struct belady *belady = (struct belady *)policy;
    ms_heap_close(&belady->heap);
    free(belady->next);
    free(belady->at);
    free(belady->key_of);
    free(belady);
}

static int key_of(const ms_simulation_options *options, int64_t access) {
    return (int)(access / options->top_k % options->n_layers) * options->n_experts + options->experts[access];
}

static int belady_open(const ms_simulation_options *options, struct ms_policy **out, char *err, size_t errlen) {
    int64_t n = options->n_tokens * options->n_layers * options->top_k;
    int n_keys = options->n_layers * options->n_experts;
    struct belady *belady = calloc(1, sizeof *belady);
    if (!belady) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    belady->base = (struct ms_policy){.filled = belady_filled, .used = belady_used, .cooled = belady_cooled, .emptied = belady_emptied, .victim = belady_victim, .free = belady_free};
    belady->key_of = malloc(sizeof(int) * (size_t)options->n_slots);
    belady->at = malloc(sizeof(int64_t) * (size_t)n_keys);
    belady->next = malloc(sizeof(int64_t) * (size_t)n);
    if (!ms_heap_open(&belady->heap, options->n_slots) || !belady->key_of || !belady->at || !belady->next) {
        belady_free(&belady->base);
        return ms_fail(-ENOMEM, err, errlen, "out of memory for %lld accesses", (long long)n);
    }
    for (int k = 0; k < n_keys; k++) belady->at[k] = INT64_MAX;
    for (int64_t i = n - 1; i >= 0; i--) {
        int key = key_of(options, i);
        belady->next[i] = belady->at[key];
        belady->at[key] = i;
    }
    *out = &belady->base;
    return 0;
}

/* ------------------------------------------------------------ the cache */

static bool may_evict(void *context, int slot) {
    const struct simulation *s = context;
    return !s->routed || s->slots[slot].pinned != s->step;
}

/* For a guess: nothing that is wanted now, is expected, or is on its way. */
static bool may_evict_for_guess(void *context, int slot) {
    const struct simulation *s = context;
    const struct place *place = &s->slots[slot];
    return may_evict(context, slot) && place->expected < s->step + s->routed && place->ready_ns <= s->disk_free_ns;
}

/* -1: there is no room. */
static int take_slot(struct simulation *s, int key, bool (*may)(void *, int)) {
    int slot = s->n_used;
    if (s->n_used < s->options->n_slots) {
        s->n_used++;
    } else {
        slot = s->policy->victim(s->policy, may, s);
        if (slot < 0) return -1;
        s->slot_of[s->slots[slot].key] = -1;
        s->policy->emptied(s->policy, slot);
    }
    s->slots[slot] = (struct place){.key = key, .pinned = -1, .expected = -1};
    s->slot_of[key] = slot;
    s->policy->filled(s->policy, slot, key);
    return slot;
}

/* ------------------------------------------------------------ guesses */

/* Those for the steps up to `ahead` layers from this one are known now; those for steps that passed are forgotten. */
static void learn_guesses(struct simulation *s) {
    if (!s->options->guesses) return;
    if (s->next_guess < s->step) {
        s->next_guess = s->step;
        s->next_in_guess = 0;
    }
    int64_t end = s->step + s->options->ahead + 1;
    s->end_guess = end < s->n_steps ? end : s->n_steps;
}

/* false: there is no room. */
static bool read_guess(struct simulation *s, int key) {
    int slot = take_slot(s, key, may_evict_for_guess);
    if (slot < 0) return false;
    s->disk_free_ns += s->options->read_ns;
    s->slots[slot].ready_ns = s->disk_free_ns;
    s->slots[slot].guessed = true;
    s->result->guessed++;
    return true;
}

/* Asks for guesses that the disk can begin from `from_ns` on and before now, as long as there is room for them. */
static void let_disk_run(struct simulation *s, int64_t from_ns) {
    const ms_simulation_options *options = s->options;
    while (s->next_guess < s->end_guess) {
        int64_t step = s->next_guess;
        int expert = options->guesses[step * options->n_guessed + s->next_in_guess];
        int key = (int)(step % options->n_layers) * options->n_experts + expert;
        bool expired = step < s->step + s->routed;
        if (expert >= 0 && !expired) {
            if (s->slot_of[key] < 0) {
                if (s->disk_free_ns < from_ns) s->disk_free_ns = from_ns;
                if (s->disk_free_ns >= s->now_ns || !read_guess(s, key)) return;
            }
            struct place *place = &s->slots[s->slot_of[key]];
            if (place->expected < step) place->expected = step;
        }
        if (++s->next_in_guess < options->n_guessed && !expired) continue;
        s->next_guess++;
        s->next_in_guess = 0;
    }
}

/* ------------------------------------------------------------ a step */

static void use(struct simulation *s, struct place *place) {
    if (!place->guessed) s->result->hits++;
    else if (place->ready_ns <= s->now_ns) s->result->useful++;
    else s->result->late++;
    place->guessed = false;
    place->pinned = s->step;
    s->policy->used(s->policy, (int)(place - s->slots));
}

static void ask(struct simulation *s) {
    const ms_simulation_options *options = s->options;
    int64_t access = s->step * options->top_k;
    s->routed = true;
    for (int i = 0; i < options->top_k; i++) {
        int slot = s->slot_of[key_of(options, access + i)];
        s->ready[i] = slot < 0 ? -1 : s->slots[slot].ready_ns;
        if (slot >= 0) use(s, &s->slots[slot]);
    }
    for (int i = 0; i < options->top_k; i++) {
        if (s->ready[i] >= 0) continue;
        struct place *place = &s->slots[take_slot(s, key_of(options, access + i), may_evict)];
        if (s->disk_free_ns < s->now_ns) s->disk_free_ns = s->now_ns;
        s->disk_free_ns += options->read_ns;
        s->ready[i] = place->ready_ns = s->disk_free_ns;
        place->pinned = s->step;
        s->result->misses++;
    }
}

static int by_time(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void compute(struct simulation *s) {
    qsort(s->ready, (size_t)s->options->top_k, sizeof *s->ready, by_time);
    for (int i = 0; i < s->options->top_k; i++) {
        if (s->ready[i] > s->now_ns) {
            s->result->wait_ns += s->ready[i] - s->now_ns;
            s->now_ns = s->ready[i];
        }
        s->now_ns += s->options->expert_ns;
    }
}

static void run_step(struct simulation *s) {
    int64_t begin_ns = s->now_ns;
    s->routed = false;
    learn_guesses(s);
    s->now_ns += s->options->attention_ns;
    let_disk_run(s, begin_ns);
    begin_ns = s->now_ns;
    ask(s);
    compute(s);
    if ((s->step + 1) % s->options->n_layers == 0) s->now_ns += s->options->rest_ns;
    let_disk_run(s, begin_ns);
}

static void run_token(struct simulation *s, int64_t token) {
    const ms_simulation_options *options = s->options;
    int64_t begin_ns = s->now_ns;
    if (token == options->n_skipped) {
        *s->result = (ms_simulation){0};
        s->begin_ns = begin_ns;
    }
    for (int layer = 0; layer < options->n_layers; layer++, s->step++) run_step(s);
    if (options->token_ns && token >= options->n_skipped) options->token_ns[token - options->n_skipped] = s->now_ns - begin_ns;
}

/* ------------------------------------------------------------ all of it */

static bool fits(const int32_t *experts, int64_t n, int least, int n_experts) {
    for (int64_t i = 0; i < n; i++)
        if (experts[i] < least || experts[i] >= n_experts) return false;
    return true;
}

static int check(const ms_simulation_options *o, char *err, size_t errlen) {
    int64_t n_steps = o->n_tokens * o->n_layers;
    if (o->n_tokens < 1 || o->n_layers < 1 || o->n_experts < 1 || o->n_layers > INT_MAX / o->n_experts || o->top_k < 1 || o->top_k > o->n_experts || o->ahead < 0)
        return ms_fail(-EINVAL, err, errlen, "%lld tokens with %d of %d experts in %d layers, guessed %d layers ahead, cannot be simulated", (long long)o->n_tokens, o->top_k, o->n_experts,
                       o->n_layers, o->ahead);
    if (o->n_slots < o->n_layers * o->top_k)
        return ms_fail(-EINVAL, err, errlen, "a cache of %d experts cannot hold those of one token, %d layers x %d", o->n_slots, o->n_layers, o->top_k);
    if (!fits(o->experts, n_steps * o->top_k, 0, o->n_experts)) return ms_fail(-EINVAL, err, errlen, "the routing has an expert beyond %d", o->n_experts - 1);
    if (o->n_skipped < 0 || o->n_skipped >= o->n_tokens)
        return ms_fail(-EINVAL, err, errlen, "%lld tokens cannot be skipped of %lld", (long long)o->n_skipped, (long long)o->n_tokens);
    if (!o->guesses) return 0;
    if (o->n_guessed < 1 || !fits(o->guesses, n_steps * o->n_guessed, -1, o->n_experts)) return ms_fail(-EINVAL, err, errlen, "the guesses have an expert beyond %d", o->n_experts - 1);
    if (strcmp(o->policy, "belady") == 0) return ms_fail(-EINVAL, err, errlen, "policy \"belady\" knows the future and has no use for guesses");
    return 0;
}

int ms_simulate(const ms_simulation_options *options, ms_simulation *out, char *err, size_t errlen) {
    *out = (ms_simulation){0};
    int rc = check(options, err, errlen);
    if (rc < 0) return rc;
    struct simulation s = {.options = options, .result = out, .n_keys = options->n_layers * options->n_experts, .n_steps = options->n_tokens * options->n_layers};
    rc = strcmp(options->policy, "belady") == 0 ? belady_open(options, &s.policy, err, errlen)
                                                : ms_policy_open(options->policy, options->n_slots, s.n_keys, &s.policy, err, errlen);
    if (rc < 0) return rc;
    s.slot_of = malloc(sizeof(int) * (size_t)s.n_keys);
    s.slots = malloc(sizeof *s.slots * (size_t)options->n_slots);
    s.ready = malloc(sizeof *s.ready * (size_t)options->top_k);
    if (!s.slot_of || !s.slots || !s.ready) rc = ms_fail(-ENOMEM, err, errlen, "out of memory for a cache of %d experts", options->n_slots);
    for (int k = 0; k < s.n_keys && rc == 0; k++) s.slot_of[k] = -1;
    for (int64_t token = 0; token < options->n_tokens && rc == 0; token++) run_token(&s, token);
    out->total_ns = s.now_ns - s.begin_ns;
    s.policy->free(s.policy);
    free(s.slot_of);
    free(s.slots);
    free(s.ready);
    return rc;
}
