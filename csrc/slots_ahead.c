/* slots_ahead.c - experts that are expected are read while the disk has nothing better to do. */
#include "slots_pool.h"

#include <errno.h>

#include "clock.h"
#include "moestream.h"
#include "pacer.h"

/* Reads ahead are asked for only while less than this is in flight: enough to keep the disk busy with what is known to
 * be wanted; of what is guessed as little as keeps it busy at all, since a demand has to wait for it. */
#define CERTAIN_BYTES ((size_t)8 << 20)
#define GUESSED_BYTES ((size_t)1 << 20)
/* What is guessed is read in pieces, so that a demand waits for a piece of it and not for all, and a guess whose layer has
 * passed costs no more than the pieces read. */
#define PIECE_BYTES ((size_t)512 << 10)
#define LIKELY 0.5f /* what is expected at least so surely, and is in memory, is not given up for others */

/* ------------------------------------------------------------ asking for an expert */

/* Writes down the reads that bring a slot's expert. */
static void prepare_reads(struct slots *pool, struct slot *slot) {
    const struct ms_source *source = pool->source;
    const struct ms_layer *layer = &source->layers[slot->layer];
    const struct layer_slots *ls = &pool->layers[slot->layer];
    slot->pending = ms_expert_n_reads(layer);
    for (int i = 0; i < slot->pending; i++) {
        slot->reads[i] = ms_expert_read(source, layer, i, slot->expert);
        slot->reads[i].destination = ms_slots_memory(ls->class, slot) + (layer->record_bytes ? 0 : ls->rooms[i].offset);
        slot->reads[i].done = ms_slots_read_done;
        slot->reads[i].owner = slot;
    }
    slot->asked_ns = ms_now_ns();
    slot->event = 0;
}

void ms_slots_ask_all(struct slots *pool, struct slot *slot, struct asked *list) {
    prepare_reads(pool, slot);
    for (int i = 0; i < slot->pending; i++) ms_slots_ask(pool, &slot->reads[i], list);
}

/* Nobody holds it: it is loading, and so not given to another. */
static void note_ahead(struct slots *pool, struct slot *slot) {
    slot->pins = 0;
    slot->ahead = true;
    pool->counters.guessed++;
    if (slot->due && pool->n_ahead < MOST_AHEAD) pool->ahead[pool->n_ahead++] = slot;
}

static void ask_ahead(struct slots *pool, struct slot *slot, struct asked *list) {
    note_ahead(pool, slot);
    ms_slots_ask_all(pool, slot, list);
    pool->counters.guessed_bytes += ms_slots_read_bytes(pool, slot);
}

/* A guess that did not come true in its layer leaves its room to the next: it must not outlive what was used. */
static void cool_mistaken(struct slots *pool) {
    int kept = 0;
    for (int i = 0; i < pool->n_ahead; i++) {
        struct slot *slot = pool->ahead[i];
        if (!slot->ahead || !slot->due) continue;
        if (slot->due >= pool->position) {
            pool->ahead[kept++] = slot;
            continue;
        }
        struct class *class = ms_slots_class_of(pool, slot);
        class->policy->cooled(class->policy, (int)(slot - class->slots));
        ms_slots_set_cool(class, slot, true);
    }
    pool->n_ahead = kept;
}

/* ------------------------------------------------------------ piece by piece */

/* The partial of a slot; of NULL: an unused one. NULL: there is none. */
static struct partial *partial_of(struct slots *pool, const struct slot *slot) {
    for (int i = 0; i < MOST_PARTIAL; i++)
        if (pool->partials[i].slot == slot) return &pool->partials[i];
    return NULL;
}

static size_t bytes_asked(const struct partial *partial) {
    size_t bytes = 0;
    for (int i = 0; i < partial->n_asked; i++) bytes += partial->pieces[i].size_bytes;
    return bytes;
}

/* Its layer has passed without it: what there is of it goes. */
static void drop_partial(struct slots *pool, struct partial *partial) {
    struct slot *slot = partial->slot;
    struct class *class = ms_slots_class_of(pool, slot);
    partial->slot = NULL;
    slot->ahead = false;
    pool->counters.wasted++;
    pool->counters.wasted_bytes += bytes_asked(partial);
    ms_slots_forget(pool, class, slot);
    class->n_idle++;
    ms_slots_tell(pool);
}

static bool is_stopped(const struct slots *pool) { return pool->stopped || pool->n_settling > 0; }

static bool is_over(const struct slots *pool, const struct partial *partial) {
    return partial->slot->ahead && partial->n_asked < partial->n_pieces && (is_stopped(pool) || partial->given_up || partial->slot->due < pool->position);
}

static void piece_arrived(struct ms_read *piece, int status) {
    struct partial *partial = piece->owner;
    struct slot *slot = partial->slot;
    struct slots *pool = slot->pool;
    pthread_mutex_lock(&pool->mutex);
    ms_slots_note_arrival(pool, piece);
    if (status < 0) {
        partial->status[piece->index] = status;
        partial->given_up = true;
    }
    if (++partial->n_arrived == partial->n_pieces) {
        int n_reads = slot->pending;
        partial->slot = NULL;
        for (int i = 0; i < n_reads; i++) ms_slots_end_read(pool, slot, i, partial->status[i]);
    } else if (partial->n_arrived == partial->n_asked && is_over(pool, partial)) {
        drop_partial(pool, partial);
    }
    ms_slots_read_expected(pool);
    pthread_mutex_unlock(&pool->mutex);
}

static void piece_done(struct ms_read *piece, int status) {
    struct partial *partial = piece->owner;
    struct ms_pacer *pacer = ms_slots_pacer_of(partial->slot->pool);
    if (pacer) ms_pacer_add(pacer, piece, status, piece_arrived);
    else piece_arrived(piece, status);
}

/* Cuts the reads of a slot into pieces, none of them asked for yet. */
static void begin_partial(struct slots *pool, struct partial *partial, struct slot *slot) {
    prepare_reads(pool, slot);
    *partial = (struct partial){.slot = slot};
    for (int r = 0; r < slot->pending; r++) {
        const struct ms_read *read = &slot->reads[r];
        size_t each = round_up((read->size_bytes + MOST_PIECES - 1) / MOST_PIECES, PIECE_BYTES);
        for (size_t at = 0; at < read->size_bytes; at += each) {
            size_t left = read->size_bytes - at, needed = read->needed_bytes > at ? read->needed_bytes - at : 0;
            struct ms_read *piece = &partial->pieces[partial->n_pieces++];
            *piece = *read;
            piece->offset += at;
            piece->destination += at;
            piece->size_bytes = (uint32_t)(left < each ? left : each);
            piece->needed_bytes = (uint32_t)(needed < piece->size_bytes ? needed : piece->size_bytes);
            piece->done = piece_done;
            piece->owner = partial;
            piece->index = r;
        }
    }
}

static void ask_piece(struct slots *pool, struct partial *partial, struct asked *list) {
    struct ms_read *piece = &partial->pieces[partial->n_asked++];
    pool->counters.guessed_bytes += piece->size_bytes;
    ms_slots_ask(pool, piece, list);
}

/* The slot's expert is wanted, or known to be: what is missing of it is read at once. */
void ms_slots_ask_rest(struct slots *pool, struct slot *slot, struct asked *list) {
    struct partial *partial = partial_of(pool, slot);
    while (partial && partial->n_asked < partial->n_pieces) ask_piece(pool, partial, list);
}

/* The partial that is wanted first, of those with pieces to be asked for. */
static struct partial *first_partial(struct slots *pool) {
    struct partial *first = NULL;
    for (int i = 0; i < MOST_PARTIAL; i++) {
        struct partial *partial = &pool->partials[i];
        if (!partial->slot || partial->n_asked == partial->n_pieces || is_over(pool, partial)) continue;
        if (!first || partial->slot->due < first->slot->due) first = partial;
    }
    return first;
}

void ms_slots_drop_passed(struct slots *pool) {
    for (int i = 0; i < MOST_PARTIAL; i++) {
        struct partial *partial = &pool->partials[i];
        if (partial->slot && partial->n_arrived == partial->n_asked && is_over(pool, partial)) drop_partial(pool, partial);
    }
}

/* What is only guessed gives way: partials of the class that are not of these experts of the layer end, at once or when
 * their pieces in flight have arrived. */
void ms_slots_give_up_partials(struct slots *pool, const struct class *class, int layer, const int32_t *experts, int n) {
    for (int i = 0; i < MOST_PARTIAL; i++) {
        struct slot *slot = pool->partials[i].slot;
        bool wanted = !slot || ms_slots_class_of(pool, slot) != class;
        for (int e = 0; e < n && !wanted; e++) wanted = slot->layer == layer && slot->expert == experts[e];
        if (!wanted) pool->partials[i].given_up = true;
    }
    ms_slots_drop_passed(pool);
}

/* A layer has said all that it wants: what else is half read for it was a mistake. */
void ms_slots_give_up_mistaken(struct slots *pool, int layer) {
    for (int i = 0; i < MOST_PARTIAL; i++) {
        const struct slot *slot = pool->partials[i].slot;
        if (slot && slot->ahead && slot->layer == layer && slot->due <= pool->position) pool->partials[i].given_up = true;
    }
    ms_slots_drop_passed(pool);
}

/* ------------------------------------------------------------ in which order */

/* Submits with the mutex let go, for a reader may call read_done at once. */
void ms_slots_submit(struct slots *pool, struct asked reads) {
    if (!reads.first) return;
    pool->n_submitting++;
    pthread_mutex_unlock(&pool->mutex);
    pool->reader->submit(pool->reader, reads.first);
    pthread_mutex_lock(&pool->mutex);
    if (--pool->n_submitting == 0 && pool->stopped) pthread_cond_broadcast(&pool->changed);
}

/* Begins to read what a guess names; with an unused partial if it is not certain. false: there is no room for it, or no need. */
static bool begin_guess(struct slots *pool, const struct ms_guess *guess, struct asked *list) {
    bool certain = guess->confidence >= 1;
    if (pool->layers[guess->layer].slot_of[guess->expert] >= 0) return false;
    struct slot *slot = ms_slots_take(pool, guess->layer, guess->expert, MS_ROOM_GUESS, guess->confidence);
    if (!slot) return false;
    slot->due = guess->due;
    if (certain) {
        ask_ahead(pool, slot, list);
    } else {
        note_ahead(pool, slot);
        begin_partial(pool, partial_of(pool, NULL), slot);
    }
    return true;
}

/* How much may be in flight for the next of a guess to be asked for. What is known of the next evaluation is in no hurry, and
 * this one may have demands yet. */
static size_t most_in_flight(const struct slots *pool, const struct ms_guess *guess) {
    bool soon = guess->due < (pool->batch + 1) * (uint64_t)pool->source->n_layers;
    return guess->confidence >= 1 && soon ? CERTAIN_BYTES : GUESSED_BYTES;
}

/* Reads the first of what is expected, as much as may be in flight. Called whenever a read has ended, room was left, or
 * something is expected. Mutex held on entry and exit. */
void ms_slots_read_expected(struct slots *pool) {
    struct asked reads = {0};
    while (!is_stopped(pool)) {
        const struct ms_guess *guess = ms_guesses_first(pool->guesses);
        bool certain = guess && guess->confidence >= 1;
        struct partial *partial = first_partial(pool);
        if (partial && !certain && (!guess || partial->slot->due <= guess->due)) {
            if (pool->in_flight_bytes >= GUESSED_BYTES) break;
            ask_piece(pool, partial, &reads);
            continue;
        }
        if (!guess || pool->in_flight_bytes >= most_in_flight(pool, guess)) break;
        if (!certain && !partial_of(pool, NULL)) break; /* one of those under way has to end first */
        if (!begin_guess(pool, guess, &reads) && certain && pool->layers[guess->layer].slot_of[guess->expert] < 0) break; /* there will be room when this layer is done */
        ms_guesses_drop_first(pool->guesses);
    }
    ms_slots_submit(pool, reads);
}

/* ------------------------------------------------------------ what is expected */

void ms_slots_enter(struct ms_store *store, int layer, bool new_batch) {
    struct slots *pool = (struct slots *)store;
    pthread_mutex_lock(&pool->mutex);
    pool->batch += new_batch;
    pool->position = pool->batch * (uint64_t)pool->source->n_layers + (uint64_t)layer;
    ms_guesses_expire(pool->guesses, pool->position);
    ms_slots_drop_passed(pool);
    cool_mistaken(pool);
    pthread_mutex_unlock(&pool->mutex);
}

void ms_slots_expect(struct ms_store *store, int layer, const int32_t *experts, const float *confidences, int n) {
    struct slots *pool = (struct slots *)store;
    struct layer_slots *ls = &pool->layers[layer];
    uint64_t n_layers = (uint64_t)pool->source->n_layers;
    pthread_mutex_lock(&pool->mutex);
    uint64_t due = pool->position / n_layers * n_layers + (uint64_t)layer;
    if (due <= pool->position) due += n_layers;
    ms_guesses_withdraw(pool->guesses, layer);
    struct asked reads = {0};
    for (int i = 0; i < n && !is_stopped(pool); i++) {
        int s = ls->slot_of[experts[i]];
        if (s >= 0) {
            if (confidences[i] >= LIKELY) ls->class->slots[s].due = due;
            if (confidences[i] >= 1) ms_slots_ask_rest(pool, &ls->class->slots[s], &reads);
        } else {
            ms_guesses_add(pool->guesses, (struct ms_guess){.due = due, .layer = layer, .expert = experts[i], .confidence = confidences[i]});
        }
    }
    ms_slots_submit(pool, reads);
    ms_slots_read_expected(pool);
    pthread_mutex_unlock(&pool->mutex);
}

void ms_slots_holds(struct ms_store *store, int layer, int n_experts, bool *held) {
    struct slots *pool = (struct slots *)store;
    const struct layer_slots *ls = &pool->layers[layer];
    pthread_mutex_lock(&pool->mutex);
    for (int e = 0; e < n_experts; e++) held[e] = ls->slot_of[e] >= 0 && ls->class->slots[ls->slot_of[e]].state == READY;
    pthread_mutex_unlock(&pool->mutex);
}

int ms_slots_pace(struct ms_store *store, uint64_t rate) {
    struct slots *pool = (struct slots *)store;
    struct ms_pacer *pacer = pool->pacer ? pool->pacer : ms_pacer_start();
    if (!pacer) return -ENOMEM;
    ms_pacer_set_rate(pacer, rate);
    __atomic_store_n(&pool->pacer, pacer, __ATOMIC_RELEASE);
    return 0;
}

void ms_slots_stop(struct ms_store *store) {
    struct slots *pool = (struct slots *)store;
    pthread_mutex_lock(&pool->mutex);
    pool->stopped = true;
    ms_guesses_clear(pool->guesses);
    ms_slots_drop_passed(pool);
    while (pool->n_submitting) pthread_cond_wait(&pool->changed, &pool->mutex); /* the reader is closed next */
    pthread_mutex_unlock(&pool->mutex);
}

int ms_slots_prefetch(struct ms_store *store, int layer, const int32_t *experts, int n) {
    struct slots *pool = (struct slots *)store;
    struct layer_slots *ls = &pool->layers[layer];
    struct asked reads = {0};
    pthread_mutex_lock(&pool->mutex);
    for (int i = 0; i < n; i++) /* what is there is not given up for the others */
        if (ls->slot_of[experts[i]] >= 0) {
            struct slot *slot = &ls->class->slots[ls->slot_of[experts[i]]];
            ms_slots_use(ls->class, slot);
            ms_slots_ask_rest(pool, slot, &reads);
        }
    int done = 0;
    for (; done < n; done++) {
        if (ls->slot_of[experts[done]] >= 0) continue;
        struct slot *slot = ms_slots_take(pool, layer, experts[done], MS_ROOM_SPARE, 1);
        if (!slot) break;
        ask_ahead(pool, slot, &reads);
    }
    ms_slots_submit(pool, reads);
    pthread_mutex_unlock(&pool->mutex);
    return done;
}
