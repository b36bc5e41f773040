/* slots_room.c - the states of slots, and which is given up for another. */
#include "slots_pool.h"

#include "clock.h"

#define MOST_REGRET 0.5 /* how probable the use of what is given up for a guess may be, in shares of the guess's own probability */

/* ------------------------------------------------------------ slot states (mutex held) */

static struct ms_timeline *timeline_of(const struct slots *pool) { return pool->timeline ? *pool->timeline : NULL; }

void ms_slots_tell(struct slots *pool) {
    __atomic_store_n(&pool->events, pool->events + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->changed);
}

struct class *ms_slots_class_of(struct slots *pool, const struct slot *slot) { return pool->layers[slot->layer].class; }

bool ms_slots_is_idle(const struct slot *slot) { return slot->pins == 0 && slot->state != LOADING; }

void ms_slots_pin(struct class *class, struct slot *slot) {
    if (ms_slots_is_idle(slot)) class->n_idle--;
    slot->pins++;
}

void ms_slots_set_cool(struct class *class, struct slot *slot, bool cool) {
    class->n_cool += (int)cool - (int)slot->cool;
    slot->cool = cool;
}

void ms_slots_use(struct class *class, struct slot *slot) {
    struct slots *pool = class->pool;
    class->policy->used(class->policy, (int)(slot - class->slots));
    ms_slots_set_cool(class, slot, false);
    ms_reuse_used(&pool->reuse, pool->batch - slot->last_batch);
    slot->last_batch = pool->batch;
    if (slot->due <= pool->position) slot->due = 0; /* else it is for the next evaluation, too */
}

/* What was asked for ahead is wanted now. */
void ms_slots_ahead_was_right(struct slots *pool, struct slot *slot) {
    slot->ahead = false;
    slot->late = slot->state == LOADING;
    if (slot->late) {
        pool->counters.late++;
        return;
    }
    pool->counters.useful++;
    ms_timeline_decide(timeline_of(pool), slot->event, MS_OUTCOME_USEFUL);
}

size_t ms_slots_read_bytes(const struct slots *pool, const struct slot *slot) {
    const struct ms_layer *layer = &pool->source->layers[slot->layer];
    size_t bytes = 0;
    for (int i = 0; i < ms_expert_n_reads(layer); i++) bytes += slot->reads[i].size_bytes;
    return bytes;
}

static void ahead_was_wrong(struct slots *pool, struct slot *slot) {
    slot->ahead = false;
    pool->counters.wasted++;
    pool->counters.wasted_bytes += ms_slots_read_bytes(pool, slot);
    ms_timeline_decide(timeline_of(pool), slot->event, MS_OUTCOME_WASTED);
}

void ms_slots_forget(struct slots *pool, struct class *class, struct slot *slot) {
    if (slot->ahead) ahead_was_wrong(pool, slot);
    ms_reuse_given_up(&pool->reuse, pool->batch - slot->last_batch);
    pool->layers[slot->layer].slot_of[slot->expert] = -1;
    class->policy->emptied(class->policy, (int)(slot - class->slots));
    ms_slots_set_cool(class, slot, false);
    slot->state = EMPTY;
    class->n_used--;
}

void ms_slots_unpin(struct slots *pool, struct class *class, struct slot *slot) {
    slot->pins--;
    if (slot->pins == 0 && slot->state == FAILED) ms_slots_forget(pool, class, slot);
    if (ms_slots_is_idle(slot)) class->n_idle++;
}

static bool may_evict(void *class, int slot) {
    const struct slot *candidate = &((struct class *)class)->slots[slot];
    return candidate->state == READY && candidate->pins == 0;
}

static bool may_evict_cool(void *class, int slot) { return may_evict(class, slot) && ((struct class *)class)->slots[slot].cool; }

static bool may_evict_unexpected(void *class, int slot) {
    const struct slot *candidate = &((struct class *)class)->slots[slot];
    return may_evict(class, slot) && candidate->due < candidate->pool->position;
}

static bool may_evict_until_next(void *class, int slot) {
    const struct slots *pool = ((struct class *)class)->pool;
    return may_evict(class, slot) && ((struct class *)class)->slots[slot].due >= (pool->batch + 1) * (uint64_t)pool->source->n_layers;
}

struct trade {
    struct class *class;
    double most_probable; /* use of what is given up */
};

/* What was guessed and did not come true; else nothing that this evaluation used, and nothing more probable to be used
 * than what is guessed. */
static bool may_evict_for_guess(void *trade, int slot) {
    const struct trade *t = trade;
    const struct slot *candidate = &t->class->slots[slot];
    if (!may_evict_unexpected(t->class, slot)) return false;
    if (candidate->ahead && candidate->due) return true;
    uint64_t age = candidate->pool->batch - candidate->last_batch;
    return age > 0 && (candidate->cool || candidate->ahead || ms_reuse_probability(&candidate->pool->reuse, age) <= t->most_probable);
}

/* The slot to give up for an expert; -1: none. confidence is that of a guess. */
static int victim(struct class *class, enum ms_room room, float confidence) {
    struct ms_policy *policy = class->policy;
    if (room == MS_ROOM_SPARE) return class->n_cool ? policy->victim(policy, may_evict_cool, class) : -1;
    if (room == MS_ROOM_GUESS && confidence < 1) {
        struct trade trade = {.class = class, .most_probable = MOST_REGRET * confidence};
        return policy->victim(policy, may_evict_for_guess, &trade);
    }
    int s = policy->victim(policy, may_evict_unexpected, class);
    if (s < 0 && room != MS_ROOM_GUESS) s = policy->victim(policy, may_evict_until_next, class); /* rather than what this evaluation still wants */
    return s < 0 && room != MS_ROOM_GUESS ? policy->victim(policy, may_evict, class) : s;
}

/* An empty slot near where this expert would be if all had one: a model that
 * fits then lies in order, which keeps the span one product addresses short. */
static int empty_slot(const struct class *class, uint64_t key) {
    int home = (int)(key * (uint64_t)class->n_slots / class->n_experts);
    for (int i = 0; i < class->n_slots; i++) {
        int s = home + i < class->n_slots ? home + i : home + i - class->n_slots;
        if (class->slots[s].state == EMPTY) return s;
    }
    return -1;
}

/* NULL: there is no such room. */
struct slot *ms_slots_take(struct slots *pool, int layer, int expert, enum ms_room room, float confidence) {
    struct layer_slots *ls = &pool->layers[layer];
    struct class *class = ls->class;
    if (class->n_idle == 0) return NULL;
    int s = class->n_used < class->n_slots ? empty_slot(class, ls->first_key + (uint64_t)expert) : -1;
    if (s < 0) {
        s = victim(class, room, confidence);
        if (s < 0) return NULL;
        ms_slots_forget(pool, class, &class->slots[s]);
    }
    struct slot *slot = &class->slots[s];
    class->n_idle--;
    class->n_used++;
    slot->layer = layer;
    slot->expert = expert;
    slot->state = LOADING;
    slot->pins = 1;
    slot->ahead = slot->late = false;
    slot->due = 0;
    slot->last_batch = pool->batch;
    slot->status = 0;
    slot->n_arrived = 0;
    ls->slot_of[expert] = s;
    class->policy->filled(class->policy, s, (int)ls->first_key + expert);
    return slot;
}

static void record_read(struct slots *pool, struct slot *slot) {
    ms_event event = {.begin_ns = slot->asked_ns, .end_ns = ms_now_ns(), .batch = (uint32_t)pool->batch, .bytes = (uint32_t)ms_slots_read_bytes(pool, slot), .block = pool->source->layers[slot->layer].block,
                      .expert = slot->expert, .kind = MS_EVENT_READ, .outcome = slot->late ? MS_OUTCOME_LATE : slot->ahead ? MS_OUTCOME_PENDING : MS_OUTCOME_DEMAND};
    slot->event = ms_timeline_add(timeline_of(pool), &event);
}

void ms_slots_read_is_ready(struct slots *pool, struct slot *slot, int read, int status) {
    struct class *class = ms_slots_class_of(pool, slot);
    if (status < 0 && slot->status == 0) {
        slot->status = status;
        slot->bad_read = read;
    }
    if (--slot->pending > 0) return;
    if (timeline_of(pool)) record_read(pool, slot);
    __atomic_store_n(&slot->state, slot->status < 0 ? FAILED : READY, __ATOMIC_RELEASE); /* presence looks without the mutex */
    if (slot->pins == 0) {
        if (slot->state == FAILED) ms_slots_forget(pool, class, slot);
        class->n_idle++;
    }
    ms_slots_tell(pool);
}
