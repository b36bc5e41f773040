/* slots.c - the expert pool: fixed slots, filled by reads, reused without end.
 *
 * Layers whose experts take the same room share a class of slots; a model of
 * one quantisation has one class, mixed ones have a few. Within a class any
 * slot takes any expert. A slot is
 *
 *     empty -> loading -> ready -> (evicted) loading -> ...
 *                      -> failed -> empty
 *
 * and is never given to another expert while it is pinned or loading. All
 * state is under one mutex; the reads and the interleaving run outside it.
 *
 * Where a matrix's bytes lie inside a slot is the same for all experts of a
 * layer, since one product addresses them at a fixed stride. Direct reads
 * start at an aligned offset, so the bytes wanted begin a little behind the
 * start of the room they are read into: when that distance is the same for
 * all experts it is simply part of the layout, otherwise the bytes are moved
 * on arrival. A record of a laid file is a slot as it is: one read, nothing to
 * move, and nothing to convert where its rows are what the kernels want.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "clock.h"
#include "guesses.h"
#include "huge_pages.h"
#include "message.h"
#include "moestream.h"
#include "pacer.h"
#include "policy.h"
#include "reuse.h"
#include "store.h"
#include "thread.h"
#include "timeline.h"

#define CACHE_LINE ((size_t)64)
#define MOST_GUESSES 4096
#define MOST_AHEAD 1024
/* Reads ahead are asked for only while less than this is in flight: enough to keep the disk busy with what is known to
 * be wanted; of what is guessed as little as keeps it busy at all, since a demand has to wait for it. */
#define CERTAIN_BYTES ((size_t)8 << 20)
#define GUESSED_BYTES ((size_t)1 << 20)
/* What is guessed is read in pieces, so that a demand waits for a piece of it and not for all, and a guess whose layer has
 * passed costs no more than the pieces read. */
#define PIECE_BYTES ((size_t)512 << 10)
#define MOST_PIECES 16 /* of one read; larger ones have larger pieces */
#define MOST_PARTIAL 8 /* experts of which only pieces are there */
#define MOST_REGRET 0.5 /* how probable the use of what is given up for a guess may be, in shares of the guess's own probability */
#define LIKELY 0.5f     /* what is expected at least so surely, and is in memory, is not given up for others */

enum state { EMPTY, LOADING, READY, FAILED };

struct slot {
    struct slots *pool;
    int layer, expert;
    enum state state;
    int pins;
    bool cool;   /* its room is spare */
    bool ahead;  /* asked for before it was wanted, and not wanted yet: a miss when it is */
    bool late;   /* wanted while that was on its way */
    uint64_t due;       /* when it is expected to be wanted, as slots.position counts; 0: it is not */
    uint64_t last_batch; /* in which it was used */
    int64_t asked_ns;
    uint64_t event;     /* of its read, in the timeline */
    int pending; /* reads whose bytes are not ready yet */
    int status;  /* of the first that failed */
    int bad_read;
    struct ms_read reads[MS_MAX_MATRICES];
    struct slot *next_arrival;
    int arrived[MS_MAX_MATRICES]; /* reads that are done, with bytes not yet converted */
    int n_arrived;
};

/* An expert that is being read piece by piece. */
struct partial {
    struct slot *slot; /* NULL: none */
    int n_pieces, n_asked, n_arrived;
    bool given_up; /* while nobody wants it: its room is needed, or a piece could not be read */
    int status[MS_MAX_MATRICES]; /* of the read that a piece is of */
    struct ms_read pieces[MS_MAX_MATRICES * MOST_PIECES];
};

struct class {
    struct slots *pool;
    size_t slot_bytes;
    uint64_t n_experts; /* that may want a slot here */
    int n_minimum;
    int n_slots, n_used;
    int n_idle; /* neither pinned nor loading: may be given away */
    int n_cool;
    uint8_t *memory;
    size_t memory_bytes;
    struct slot *slots;
    struct ms_policy *policy;
};

/* Where a matrix is inside its layer's slots. */
struct room {
    size_t offset;      /* of the room, aligned for direct reads */
    size_t data_offset; /* of the first byte of the matrix */
    const struct ggml_tensor *prototype;
    const struct ms_permutation *stored; /* interleaving to undo on arrival, or NULL */
    bool interleave; /* on arrival, with the prototype */
    bool move;       /* on arrival: reads begin at a distance that differs between experts */
};

struct layer_slots {
    struct class *class;
    uint64_t first_key; /* of its experts among those of the class */
    int *slot_of;       /* expert -> slot, or -1 */
    struct room rooms[MS_MAX_MATRICES];
    bool convert; /* something must be done to what was read */
};

struct slots {
    struct ms_store base;
    struct ms_source *source;
    struct ms_reader *reader;
    bool verify;
    int n_classes;
    struct class *classes;
    struct layer_slots *layers;
    size_t scratch_bytes;
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* for who waits: a slot became ready, failed or idle, or something arrived */
    uint64_t events;        /* how often that happened; written under the mutex */
    pthread_cond_t arrived; /* for the converter, which need not wake for anything else */
    struct slot *arrivals, **last_arrival;
    bool closing;
    struct ms_huge_pages *huge_pages;
    bool has_converter;
    pthread_t converter;
    uint8_t *waiter_scratch; /* free for one waiting thread at a time */
    struct ms_store_counters counters;
    /* what is expected */
    struct ms_guesses *guesses;
    struct ms_reuse reuse;
    struct partial partials[MOST_PARTIAL];
    struct slot *ahead[MOST_AHEAD]; /* asked for ahead, and not known yet whether for good */
    int n_ahead;
    uint64_t batch;    /* evaluations so far, by their first layer */
    uint64_t position; /* batch x layers + the layer that computes now */
    size_t in_flight_bytes;
    int64_t busy_since_ns; /* while something is in flight */
    struct ms_pacer *pacer; /* NULL: reads arrive when they arrive; atomic */
    bool stopped;     /* nothing is read ahead any more */
    int n_settling;   /* threads for which nothing is read ahead for a while */
    int n_submitting; /* threads that hand reads to the reader */
    struct ms_timeline *_Atomic *timeline; /* NULL while nothing is recorded; atomic */
};

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* ------------------------------------------------------------ sizes */

static size_t room_bytes(const struct ms_source *source, const struct ms_matrix *matrix) {
    size_t alignment = source->alignment;
    return round_up(matrix->slice_bytes + (alignment - 1), alignment > CACHE_LINE ? alignment : CACHE_LINE);
}

size_t ms_slot_bytes(const struct ms_source *source, const struct ms_layer *layer) {
    size_t bytes = layer->record_bytes;
    if (bytes) return bytes;
    for (int m = 0; m < layer->n_matrices; m++) bytes += room_bytes(source, &layer->matrices[m]);
    return bytes;
}

static bool is_wanted(const bool *wanted, int layer) { return !wanted || wanted[layer]; }

static int used_experts(const struct ms_source *source, const struct ms_layer *layer) {
    return source->n_experts_used < layer->n_experts ? source->n_experts_used : layer->n_experts;
}

uint64_t ms_slots_minimum_bytes(const struct ms_source *source, const bool *wanted) {
    uint64_t bytes = 0;
    for (int l = 0; l < source->n_layers; l++)
        if (is_wanted(wanted, l)) bytes += (uint64_t)used_experts(source, &source->layers[l]) * ms_slot_bytes(source, &source->layers[l]);
    return bytes;
}

uint64_t ms_slots_maximum_bytes(const struct ms_source *source, const bool *wanted) {
    uint64_t bytes = 0;
    for (int l = 0; l < source->n_layers; l++)
        if (is_wanted(wanted, l)) bytes += (uint64_t)source->layers[l].n_experts * ms_slot_bytes(source, &source->layers[l]);
    return bytes;
}

/* Every class gets its minimum; what is left is shared in proportion to the
 * bytes of the experts it serves. */
static void share_budget(struct slots *pool, uint64_t budget_bytes) {
    uint64_t left = budget_bytes, total = 0;
    for (int c = 0; c < pool->n_classes; c++) {
        struct class *class = &pool->classes[c];
        class->n_slots = class->n_minimum;
        left -= (uint64_t)class->n_minimum * class->slot_bytes;
        total += (class->n_experts - (uint64_t)class->n_minimum) * class->slot_bytes;
    }
    for (int c = 0; c < pool->n_classes && total; c++) {
        struct class *class = &pool->classes[c];
        uint64_t missing = class->n_experts - (uint64_t)class->n_minimum;
        uint64_t more = left >= total ? missing : (uint64_t)((double)left * (double)(missing * class->slot_bytes) / (double)total) / class->slot_bytes;
        class->n_slots += (int)(more < missing ? more : missing);
    }
}

/* ------------------------------------------------------------ slot states (mutex held) */

static struct ms_timeline *timeline_of(const struct slots *pool) { return pool->timeline ? *pool->timeline : NULL; }

static void tell(struct slots *pool) {
    __atomic_store_n(&pool->events, pool->events + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->changed);
}

static struct class *class_of(struct slots *pool, const struct slot *slot) { return pool->layers[slot->layer].class; }

static bool is_idle(const struct slot *slot) { return slot->pins == 0 && slot->state != LOADING; }

static void pin(struct class *class, struct slot *slot) {
    if (is_idle(slot)) class->n_idle--;
    slot->pins++;
}

static void set_cool(struct class *class, struct slot *slot, bool cool) {
    class->n_cool += (int)cool - (int)slot->cool;
    slot->cool = cool;
}

static void use(struct class *class, struct slot *slot) {
    struct slots *pool = class->pool;
    class->policy->used(class->policy, (int)(slot - class->slots));
    set_cool(class, slot, false);
    ms_reuse_used(&pool->reuse, pool->batch - slot->last_batch);
    slot->last_batch = pool->batch;
    slot->due = 0;
}

/* What was asked for ahead is wanted now. */
static void ahead_was_right(struct slots *pool, struct slot *slot) {
    slot->ahead = false;
    slot->late = slot->state == LOADING;
    if (slot->late) {
        pool->counters.late++;
        return;
    }
    pool->counters.useful++;
    ms_timeline_decide(timeline_of(pool), slot->event, MS_OUTCOME_USEFUL);
}

static size_t read_bytes(const struct slots *pool, const struct slot *slot) {
    const struct ms_layer *layer = &pool->source->layers[slot->layer];
    size_t bytes = 0;
    for (int i = 0; i < ms_expert_n_reads(layer); i++) bytes += slot->reads[i].size_bytes;
    return bytes;
}

static void ahead_was_wrong(struct slots *pool, struct slot *slot) {
    slot->ahead = false;
    pool->counters.wasted++;
    pool->counters.wasted_bytes += read_bytes(pool, slot);
    ms_timeline_decide(timeline_of(pool), slot->event, MS_OUTCOME_WASTED);
}

static void forget(struct slots *pool, struct class *class, struct slot *slot) {
    if (slot->ahead) ahead_was_wrong(pool, slot);
    ms_reuse_given_up(&pool->reuse, pool->batch - slot->last_batch);
    pool->layers[slot->layer].slot_of[slot->expert] = -1;
    class->policy->emptied(class->policy, (int)(slot - class->slots));
    set_cool(class, slot, false);
    slot->state = EMPTY;
    class->n_used--;
}

static void unpin(struct slots *pool, struct class *class, struct slot *slot) {
    slot->pins--;
    if (slot->pins == 0 && slot->state == FAILED) forget(pool, class, slot);
    if (is_idle(slot)) class->n_idle++;
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
static struct slot *take_slot(struct slots *pool, int layer, int expert, enum ms_room room, float confidence) {
    struct layer_slots *ls = &pool->layers[layer];
    struct class *class = ls->class;
    if (class->n_idle == 0) return NULL;
    int s = class->n_used < class->n_slots ? empty_slot(class, ls->first_key + (uint64_t)expert) : -1;
    if (s < 0) {
        s = victim(class, room, confidence);
        if (s < 0) return NULL;
        forget(pool, class, &class->slots[s]);
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
    ms_event event = {.begin_ns = slot->asked_ns, .end_ns = ms_now_ns(), .batch = (uint32_t)pool->batch, .bytes = (uint32_t)read_bytes(pool, slot), .block = pool->source->layers[slot->layer].block,
                      .expert = slot->expert, .kind = MS_EVENT_READ, .outcome = slot->late ? MS_OUTCOME_LATE : slot->ahead ? MS_OUTCOME_PENDING : MS_OUTCOME_DEMAND};
    slot->event = ms_timeline_add(timeline_of(pool), &event);
}

static void read_is_ready(struct slots *pool, struct slot *slot, int read, int status) {
    struct class *class = class_of(pool, slot);
    if (status < 0 && slot->status == 0) {
        slot->status = status;
        slot->bad_read = read;
    }
    if (--slot->pending > 0) return;
    if (timeline_of(pool)) record_read(pool, slot);
    __atomic_store_n(&slot->state, slot->status < 0 ? FAILED : READY, __ATOMIC_RELEASE); /* presence looks without the mutex */
    if (slot->pins == 0) {
        if (slot->state == FAILED) forget(pool, class, slot);
        class->n_idle++;
    }
    tell(pool);
}

/* ------------------------------------------------------------ arrival */

static uint8_t *slot_memory(const struct class *class, const struct slot *slot) {
    return class->memory + (size_t)(slot - class->slots) * class->slot_bytes;
}

/* Turns one matrix as stored, at `stored`, into what the kernels want, in its room. */
static void convert_matrix(const struct room *room, const struct ms_matrix *matrix, uint8_t *stored, uint8_t *data, uint8_t *scratch) {
    if (room->stored) {
        memcpy(scratch, stored, matrix->slice_bytes);
        ms_permutation_invert(room->stored, scratch, data, matrix->columns, matrix->rows);
        stored = data;
    }
    if (room->interleave) {
        memcpy(scratch, stored, matrix->slice_bytes);
        ms_interleave(room->prototype, matrix, scratch, data);
    } else if (stored != data) {
        memmove(data, stored, matrix->slice_bytes);
    }
}

/* Checks what a read brought, and converts it. No lock held. */
static int convert(struct slots *pool, struct slot *slot, int index, uint8_t *scratch) {
    const struct layer_slots *ls = &pool->layers[slot->layer];
    const struct ms_layer *layer = &pool->source->layers[slot->layer];
    const struct ms_read *read = &slot->reads[index];
    int first = layer->record_bytes ? 0 : index, last = layer->record_bytes ? layer->n_matrices - 1 : index;
    for (int m = first; m <= last; m++) {
        const struct ms_matrix *matrix = &layer->matrices[m];
        uint64_t wanted = matrix->offset + (uint64_t)slot->expert * matrix->stride_bytes;
        uint8_t *stored = read->destination + (wanted - read->offset);
        if (m == first && pool->verify && !ms_expert_is_valid(layer, index, slot->expert, layer->record_bytes ? read->destination : stored)) return -EBADMSG;
        convert_matrix(&ls->rooms[m], matrix, stored, slot_memory(ls->class, slot) + ls->rooms[m].data_offset, scratch);
    }
    return 0;
}

/* Takes one arrival and converts it. Mutex held on entry and exit. */
static void convert_one(struct slots *pool, uint8_t *scratch) {
    struct slot *slot = pool->arrivals;
    int read = slot->arrived[--slot->n_arrived];
    if (slot->n_arrived == 0) {
        pool->arrivals = slot->next_arrival;
        if (!pool->arrivals) pool->last_arrival = &pool->arrivals;
    }
    pthread_mutex_unlock(&pool->mutex);
    int64_t begin = ms_thread_cpu_ns();
    int status = convert(pool, slot, read, scratch);
    int64_t spent = ms_thread_cpu_ns() - begin;
    pthread_mutex_lock(&pool->mutex);
    pool->counters.convert_ns += spent;
    read_is_ready(pool, slot, read, status);
}

static void read_expected(struct slots *pool);

/* Reads to be submitted together, in the order in which they were asked for. */
struct asked {
    struct ms_read *first, *last;
};

static void ask(struct slots *pool, struct ms_read *read, struct asked *list) {
    read->asked_ns = ms_now_ns();
    if (pool->in_flight_bytes == 0) pool->busy_since_ns = read->asked_ns;
    pool->in_flight_bytes += read->size_bytes;
    read->next = NULL;
    if (list->last) list->last->next = read;
    else list->first = read;
    list->last = read;
}

static void note_arrival(struct slots *pool, const struct ms_read *read) {
    pool->in_flight_bytes -= read->size_bytes;
    if (pool->in_flight_bytes == 0) pool->counters.busy_ns += ms_now_ns() - pool->busy_since_ns;
}

/* The bytes of a read of an expert are there, or could not be read. Mutex held. */
static void end_read(struct slots *pool, struct slot *slot, int index, int status) {
    if (status == 0 && pool->layers[slot->layer].convert) {
        if (slot->n_arrived == 0) {
            slot->next_arrival = NULL;
            *pool->last_arrival = slot;
            pool->last_arrival = &slot->next_arrival;
        }
        slot->arrived[slot->n_arrived++] = index;
        pthread_cond_signal(&pool->arrived);
        tell(pool);
    } else {
        read_is_ready(pool, slot, index, status);
    }
}

static void read_arrived(struct ms_read *read, int status) {
    struct slot *slot = read->owner;
    struct slots *pool = slot->pool;
    pthread_mutex_lock(&pool->mutex);
    note_arrival(pool, read);
    end_read(pool, slot, (int)(read - slot->reads), status);
    read_expected(pool);
    pthread_mutex_unlock(&pool->mutex);
}

static struct ms_pacer *pacer_of(const struct slots *pool) { return __atomic_load_n(&pool->pacer, __ATOMIC_ACQUIRE); }

/* Called on a reader's thread. */
static void read_done(struct ms_read *read, int status) {
    struct slot *slot = read->owner;
    struct ms_pacer *pacer = pacer_of(slot->pool);
    if (pacer) ms_pacer_add(pacer, read, status, read_arrived);
    else read_arrived(read, status);
}

/* A second pair of hands beside the thread that waits in acquire. */
static void *converter(void *argument) {
    struct slots *pool = argument;
    uint8_t *scratch = malloc(pool->scratch_bytes);
    pthread_mutex_lock(&pool->mutex);
    while (!pool->closing) {
        if (pool->arrivals && scratch) convert_one(pool, scratch);
        else pthread_cond_wait(&pool->arrived, &pool->mutex);
    }
    pthread_mutex_unlock(&pool->mutex);
    free(scratch);
    return NULL;
}

/* ------------------------------------------------------------ acquire and release */

/* Writes down the reads that bring a slot's expert. */
static void prepare_reads(struct slots *pool, struct slot *slot) {
    const struct ms_source *source = pool->source;
    const struct ms_layer *layer = &source->layers[slot->layer];
    const struct layer_slots *ls = &pool->layers[slot->layer];
    slot->pending = ms_expert_n_reads(layer);
    for (int i = 0; i < slot->pending; i++) {
        slot->reads[i] = ms_expert_read(source, layer, i, slot->expert);
        slot->reads[i].destination = slot_memory(ls->class, slot) + (layer->record_bytes ? 0 : ls->rooms[i].offset);
        slot->reads[i].done = read_done;
        slot->reads[i].owner = slot;
    }
    slot->asked_ns = ms_now_ns();
    slot->event = 0;
}

static void ask_all(struct slots *pool, struct slot *slot, struct asked *list) {
    prepare_reads(pool, slot);
    for (int i = 0; i < slot->pending; i++) ask(pool, &slot->reads[i], list);
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
    ask_all(pool, slot, list);
    pool->counters.guessed_bytes += read_bytes(pool, slot);
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
        struct class *class = class_of(pool, slot);
        class->policy->cooled(class->policy, (int)(slot - class->slots));
        set_cool(class, slot, true);
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
    struct class *class = class_of(pool, slot);
    partial->slot = NULL;
    slot->ahead = false;
    pool->counters.wasted++;
    pool->counters.wasted_bytes += bytes_asked(partial);
    forget(pool, class, slot);
    class->n_idle++;
    tell(pool);
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
    note_arrival(pool, piece);
    if (status < 0) {
        partial->status[piece->index] = status;
        partial->given_up = true;
    }
    if (++partial->n_arrived == partial->n_pieces) {
        int n_reads = slot->pending;
        partial->slot = NULL;
        for (int i = 0; i < n_reads; i++) end_read(pool, slot, i, partial->status[i]);
    } else if (partial->n_arrived == partial->n_asked && is_over(pool, partial)) {
        drop_partial(pool, partial);
    }
    read_expected(pool);
    pthread_mutex_unlock(&pool->mutex);
}

static void piece_done(struct ms_read *piece, int status) {
    struct partial *partial = piece->owner;
    struct ms_pacer *pacer = pacer_of(partial->slot->pool);
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
    ask(pool, piece, list);
}

/* The slot's expert is wanted, or known to be: what is missing of it is read at once. */
static void ask_rest(struct slots *pool, struct slot *slot, struct asked *list) {
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

static void drop_passed(struct slots *pool) {
    for (int i = 0; i < MOST_PARTIAL; i++) {
        struct partial *partial = &pool->partials[i];
        if (partial->slot && partial->n_arrived == partial->n_asked && is_over(pool, partial)) drop_partial(pool, partial);
    }
}

/* ------------------------------------------------------------ asking */

/* Submits with the mutex let go, for a reader may call read_done at once. */
static void submit(struct slots *pool, struct asked reads) {
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
    struct slot *slot = take_slot(pool, guess->layer, guess->expert, MS_ROOM_GUESS, guess->confidence);
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

/* Reads the first of what is expected, as much as may be in flight. Called whenever a read has ended, room was left, or
 * something is expected. Mutex held on entry and exit. */
static void read_expected(struct slots *pool) {
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
        if (!guess || pool->in_flight_bytes >= (certain ? CERTAIN_BYTES : GUESSED_BYTES)) break;
        if (!certain && !partial_of(pool, NULL)) break; /* one of those under way has to end first */
        if (!begin_guess(pool, guess, &reads) && certain && pool->layers[guess->layer].slot_of[guess->expert] < 0) break; /* there will be room when this layer is done */
        ms_guesses_drop_first(pool->guesses);
    }
    submit(pool, reads);
}

static int slots_capacity(struct ms_store *store, int layer) { return ((struct slots *)store)->layers[layer].class->n_slots; }

static void release_locked(struct slots *pool, int layer, const int32_t *indices, int n) {
    struct class *class = pool->layers[layer].class;
    for (int i = 0; i < n; i++) unpin(pool, class, &class->slots[indices[i]]);
    tell(pool);
    read_expected(pool);
}

static void slots_release(struct ms_store *store, int layer, const int32_t *indices, int n) {
    struct slots *pool = (struct slots *)store;
    pthread_mutex_lock(&pool->mutex);
    release_locked(pool, layer, indices, n);
    pthread_mutex_unlock(&pool->mutex);
}

/* What is only guessed gives way: partials of the class that are not of these experts of the layer end, at once or when
 * their pieces in flight have arrived. */
static void give_up_partials(struct slots *pool, const struct class *class, int layer, const int32_t *experts, int n) {
    for (int i = 0; i < MOST_PARTIAL; i++) {
        struct slot *slot = pool->partials[i].slot;
        bool wanted = !slot || class_of(pool, slot) != class;
        for (int e = 0; e < n && !wanted; e++) wanted = slot->layer == layer && slot->expert == experts[e];
        if (!wanted) pool->partials[i].given_up = true;
    }
    drop_passed(pool);
}

/* Can all of these be pinned now? */
static bool has_room(const struct layer_slots *ls, const int32_t *experts, int n) {
    int wanted = 0;
    for (int i = 0; i < n; i++) {
        int s = ls->slot_of[experts[i]];
        if (s < 0 || is_idle(&ls->class->slots[s])) wanted++;
    }
    return wanted <= ls->class->n_idle;
}

/* Waits until the layer's class can take these experts all at once. Pins are
 * taken in one step and only ever released afterwards, so waiting here while
 * another context computes cannot deadlock. */
static void wait_for_room(struct slots *pool, int layer, const int32_t *experts, int n) {
    while (!has_room(&pool->layers[layer], experts, n)) {
        give_up_partials(pool, pool->layers[layer].class, layer, experts, n);
        if (!has_room(&pool->layers[layer], experts, n)) pthread_cond_wait(&pool->changed, &pool->mutex);
    }
}

/* One arrival is converted if there is one and nobody else has the scratch; else the thread sleeps. Mutex held on entry and exit. */
static void wait_or_convert(struct slots *pool) {
    uint8_t *scratch = pool->waiter_scratch;
    if (!pool->arrivals || !scratch) {
        pthread_cond_wait(&pool->changed, &pool->mutex);
        return;
    }
    pool->waiter_scratch = NULL;
    convert_one(pool, scratch);
    pool->waiter_scratch = scratch;
}

static bool all_there(const struct class *class, const int32_t *indices, int n) {
    for (int i = 0; i < n; i++)
        if (class->slots[indices[i]].state == LOADING) return false;
    return true;
}

/* Mutex held on entry and exit. */
static int begin_locked(struct slots *pool, int layer, const int32_t *experts, int n, enum ms_room room, int32_t *indices, char *err, size_t errlen) {
    struct layer_slots *ls = &pool->layers[layer];
    struct class *class = ls->class;
    struct asked reads = {0};
    int misses = 0, pinned = 0;
    for (int i = 0; i < n; i++) misses += indices[i] < 0 && ls->slot_of[experts[i]] < 0;
    int rc = misses ? ms_layer_check(pool->source, layer, err, errlen) : 0;
    if (rc < 0) return rc;
    if (room == MS_ROOM_ALL) wait_for_room(pool, layer, experts, n);
    for (int i = 0; i < n; i++) { /* what is there is pinned before anything is evicted */
        if (indices[i] >= 0 || ls->slot_of[experts[i]] < 0) continue;
        indices[i] = ls->slot_of[experts[i]];
        struct slot *slot = &class->slots[indices[i]];
        pin(class, slot);
        use(class, slot);
        if (slot->ahead) {
            pool->counters.misses++;
            ahead_was_right(pool, slot);
            ask_rest(pool, slot, &reads);
        } else {
            pool->counters.hits++;
        }
        pinned++;
    }
    for (int i = 0; i < n; i++) {
        if (indices[i] >= 0) continue;
        struct slot *slot = take_slot(pool, layer, experts[i], room, 1);
        if (!slot && room == MS_ROOM_ANY) {
            give_up_partials(pool, class, layer, experts, n);
            slot = take_slot(pool, layer, experts[i], room, 1);
        }
        if (!slot) break; /* never with MS_ROOM_ALL: wait_for_room counted */
        indices[i] = (int32_t)(slot - class->slots);
        ask_all(pool, slot, &reads);
        pool->counters.misses++;
        pinned++;
    }
    submit(pool, reads);
    return pinned;
}

static int slots_begin(struct ms_store *store, int layer, const int32_t *experts, int n, enum ms_room room, int32_t *indices, char *err, size_t errlen) {
    struct slots *pool = (struct slots *)store;
    pthread_mutex_lock(&pool->mutex);
    int pinned = begin_locked(pool, layer, experts, n, room, indices, err, errlen);
    pthread_mutex_unlock(&pool->mutex);
    return pinned;
}

static int slots_presence(struct ms_store *store, int layer, int32_t index) {
    const struct slot *slot = &((struct slots *)store)->layers[layer].class->slots[index];
    enum state state = __atomic_load_n(&slot->state, __ATOMIC_ACQUIRE);
    return state == FAILED ? slot->status : state == READY;
}

static int slots_failure(struct ms_store *store, int layer, int32_t index, char *err, size_t errlen) {
    struct slots *pool = (struct slots *)store;
    const struct slot *slot = &pool->layers[layer].class->slots[index];
    return ms_expert_failure(pool->source, &pool->source->layers[layer], slot->bad_read, slot->expert, slot->status, err, errlen);
}

static uint64_t slots_events(struct ms_store *store) { return __atomic_load_n(&((struct slots *)store)->events, __ATOMIC_ACQUIRE); }

static void slots_wait(struct ms_store *store, uint64_t seen) {
    struct slots *pool = (struct slots *)store;
    pthread_mutex_lock(&pool->mutex);
    while (pool->events == seen) wait_or_convert(pool);
    pthread_mutex_unlock(&pool->mutex);
}

static bool is_unsettled(const struct slots *pool) {
    for (int c = 0; c < pool->n_classes; c++)
        for (int s = 0; s < pool->classes[c].n_slots; s++)
            if (pool->classes[c].slots[s].state == LOADING && pool->classes[c].slots[s].pins == 0) return true;
    return false;
}

static void slots_settle(struct ms_store *store) {
    struct slots *pool = (struct slots *)store;
    pthread_mutex_lock(&pool->mutex);
    ms_guesses_clear(pool->guesses);
    pool->n_settling++;
    drop_passed(pool);
    while (is_unsettled(pool)) wait_or_convert(pool);
    pool->n_settling--;
    pthread_mutex_unlock(&pool->mutex);
}

static int slots_acquire(struct ms_store *store, int layer, const int32_t *experts, int n, int32_t *indices, char *err, size_t errlen) {
    struct slots *pool = (struct slots *)store;
    struct class *class = pool->layers[layer].class;
    for (int i = 0; i < n; i++) indices[i] = -1;
    pthread_mutex_lock(&pool->mutex);
    int64_t begin = ms_now_ns();
    int rc = begin_locked(pool, layer, experts, n, MS_ROOM_ALL, indices, err, errlen);
    if (rc >= 0) {
        bool blocked = !all_there(class, indices, n);
        while (!all_there(class, indices, n)) wait_or_convert(pool);
        rc = 0;
        for (int i = 0; i < n && rc == 0; i++)
            if (class->slots[indices[i]].state == FAILED) rc = slots_failure(store, layer, indices[i], err, errlen);
        if (blocked) pool->counters.wait_ns += ms_now_ns() - begin;
        if (rc < 0) release_locked(pool, layer, indices, n);
    }
    pthread_mutex_unlock(&pool->mutex);
    return rc;
}

/* ------------------------------------------------------------ what is expected */

static void slots_enter(struct ms_store *store, int layer, bool new_batch) {
    struct slots *pool = (struct slots *)store;
    pthread_mutex_lock(&pool->mutex);
    pool->batch += new_batch;
    pool->position = pool->batch * (uint64_t)pool->source->n_layers + (uint64_t)layer;
    ms_guesses_expire(pool->guesses, pool->position);
    drop_passed(pool);
    cool_mistaken(pool);
    pthread_mutex_unlock(&pool->mutex);
}

static void slots_expect(struct ms_store *store, int layer, const int32_t *experts, const float *confidences, int n) {
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
            if (confidences[i] >= 1) ask_rest(pool, &ls->class->slots[s], &reads);
        } else {
            ms_guesses_add(pool->guesses, (struct ms_guess){.due = due, .layer = layer, .expert = experts[i], .confidence = confidences[i]});
        }
    }
    submit(pool, reads);
    read_expected(pool);
    pthread_mutex_unlock(&pool->mutex);
}

static void slots_holds(struct ms_store *store, int layer, int n_experts, bool *held) {
    struct slots *pool = (struct slots *)store;
    const struct layer_slots *ls = &pool->layers[layer];
    pthread_mutex_lock(&pool->mutex);
    for (int e = 0; e < n_experts; e++) held[e] = ls->slot_of[e] >= 0 && ls->class->slots[ls->slot_of[e]].state == READY;
    pthread_mutex_unlock(&pool->mutex);
}

static int slots_pace(struct ms_store *store, uint64_t rate) {
    struct slots *pool = (struct slots *)store;
    struct ms_pacer *pacer = pool->pacer ? pool->pacer : ms_pacer_start();
    if (!pacer) return -ENOMEM;
    ms_pacer_set_rate(pacer, rate);
    __atomic_store_n(&pool->pacer, pacer, __ATOMIC_RELEASE);
    return 0;
}

static void slots_stop(struct ms_store *store) {
    struct slots *pool = (struct slots *)store;
    pthread_mutex_lock(&pool->mutex);
    pool->stopped = true;
    ms_guesses_clear(pool->guesses);
    drop_passed(pool);
    while (pool->n_submitting) pthread_cond_wait(&pool->changed, &pool->mutex); /* the reader is closed next */
    pthread_mutex_unlock(&pool->mutex);
}

/* ------------------------------------------------------------ advice */

static void slots_cool(struct ms_store *store, int layer, const int32_t *indices, int n) {
    struct slots *pool = (struct slots *)store;
    struct class *class = pool->layers[layer].class;
    pthread_mutex_lock(&pool->mutex);
    for (int i = 0; i < n; i++) {
        class->policy->cooled(class->policy, indices[i]);
        set_cool(class, &class->slots[indices[i]], true);
    }
    pthread_mutex_unlock(&pool->mutex);
}

static int slots_prefetch(struct ms_store *store, int layer, const int32_t *experts, int n) {
    struct slots *pool = (struct slots *)store;
    struct layer_slots *ls = &pool->layers[layer];
    struct asked reads = {0};
    pthread_mutex_lock(&pool->mutex);
    for (int i = 0; i < n; i++) /* what is there is not given up for the others */
        if (ls->slot_of[experts[i]] >= 0) {
            struct slot *slot = &ls->class->slots[ls->slot_of[experts[i]]];
            use(ls->class, slot);
            ask_rest(pool, slot, &reads);
        }
    int done = 0;
    for (; done < n; done++) {
        if (ls->slot_of[experts[done]] >= 0) continue;
        struct slot *slot = take_slot(pool, layer, experts[done], MS_ROOM_SPARE, 1);
        if (!slot) break;
        ask_ahead(pool, slot, &reads);
    }
    submit(pool, reads);
    pthread_mutex_unlock(&pool->mutex);
    return done;
}

static int slots_fair_share(struct ms_store *store, int layer) {
    const struct slots *pool = (struct slots *)store;
    const struct class *class = pool->layers[layer].class;
    return (int)((uint64_t)class->n_slots * (uint64_t)pool->source->layers[layer].n_experts / class->n_experts);
}

static struct ms_view slots_view(struct ms_store *store, int layer, int matrix) {
    const struct slots *pool = (struct slots *)store;
    const struct layer_slots *ls = &pool->layers[layer];
    return (struct ms_view){
        .data = ls->class->memory + ls->rooms[matrix].data_offset,
        .stride_bytes = ls->class->slot_bytes,
        .n = ls->class->n_slots,
        .prototype = ls->rooms[matrix].prototype,
        .neuron_major_type = ms_neuron_major_type(&pool->source->layers[layer].matrices[matrix]),
    };
}

static struct ms_store_counters slots_counters(struct ms_store *store) {
    struct slots *pool = (struct slots *)store;
    pthread_mutex_lock(&pool->mutex);
    struct ms_store_counters counters = pool->counters;
    for (int c = 0; c < pool->n_classes; c++) {
        const struct class *class = &pool->classes[c];
        counters.slots_used += class->n_used;
        counters.slots_total += class->n_slots;
        counters.resident_bytes += (uint64_t)class->n_used * class->slot_bytes;
        counters.capacity_bytes += (uint64_t)class->n_slots * class->slot_bytes;
        if (class->slot_bytes > counters.slot_bytes) counters.slot_bytes = class->slot_bytes;
    }
    pthread_mutex_unlock(&pool->mutex);
    struct ms_reader_counters reads = ms_reader_read_counters(pool->reader);
    counters.reads = reads.reads;
    counters.bytes_read = reads.bytes;
    counters.read_ns = reads.busy_ns;
    return counters;
}

/* ------------------------------------------------------------ building */

static struct class *class_for(struct slots *pool, size_t slot_bytes) {
    for (int c = 0; c < pool->n_classes; c++)
        if (pool->classes[c].slot_bytes == slot_bytes) return &pool->classes[c];
    struct class *class = &pool->classes[pool->n_classes++];
    class->slot_bytes = slot_bytes;
    return class;
}

static void lay_out(struct slots *pool, int layer_index, const struct ms_interleaving *interleaving) {
    const struct ms_source *source = pool->source;
    const struct ms_layer *layer = &source->layers[layer_index];
    struct layer_slots *ls = &pool->layers[layer_index];
    size_t offset = 0, alignment = source->alignment;
    ls->convert = pool->verify;
    for (int m = 0; m < layer->n_matrices; m++) {
        const struct ms_matrix *matrix = &layer->matrices[m];
        struct room *room = &ls->rooms[m];
        room->prototype = ms_interleaving_prototype(interleaving, matrix);
        if (ms_source_interleaving(source, matrix) && !ms_interleaving_is_stored(interleaving, source, matrix)) room->stored = ms_source_interleaving(source, matrix);
        room->interleave = room->prototype && (room->stored || matrix->form == MS_FORM_PLAIN);
        if (layer->record_bytes) {
            room->offset = room->data_offset = (size_t)(matrix->offset - layer->record_offset);
        } else {
            room->move = matrix->slice_bytes % alignment != 0;
            room->offset = offset;
            room->data_offset = offset + (!room->move && !room->interleave ? matrix->offset % alignment : 0);
            offset += room_bytes(source, matrix);
        }
        if (room->stored || room->interleave || room->move) ls->convert = true;
        if ((room->stored || room->interleave) && matrix->slice_bytes > pool->scratch_bytes) pool->scratch_bytes = matrix->slice_bytes;
    }
    if (ls->convert && pool->scratch_bytes == 0) pool->scratch_bytes = CACHE_LINE; /* that there is one is how arrivals find a thread */
}

/* Reserves the slots' memory on a huge-page boundary; pages come with the reads. */
static int reserve(struct class *class, char *err, size_t errlen) {
    size_t bytes = (size_t)class->n_slots * class->slot_bytes;
    class->memory_bytes = round_up(bytes, MS_HUGE_PAGE_BYTES) + MS_HUGE_PAGE_BYTES;
    uint8_t *memory = mmap(NULL, class->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return ms_fail(-ENOMEM, err, errlen, "cannot reserve %zu bytes for the expert cache: %s; give a smaller cache", bytes, strerror(errno));
    uint8_t *aligned = (uint8_t *)round_up((size_t)memory, MS_HUGE_PAGE_BYTES);
    if (aligned > memory) munmap(memory, (size_t)(aligned - memory));
    size_t tail = class->memory_bytes - (size_t)(aligned - memory) - round_up(bytes, MS_HUGE_PAGE_BYTES);
    if (tail) munmap(aligned + round_up(bytes, MS_HUGE_PAGE_BYTES), tail);
    class->memory = aligned;
    class->memory_bytes = round_up(bytes, MS_HUGE_PAGE_BYTES);
    return 0;
}

/* For huge_pages: has every slot in this part of a class arrived? */
static bool is_full(void *context, size_t offset, size_t bytes) {
    const struct class *class = context;
    size_t first = offset / class->slot_bytes, last = (offset + bytes - 1) / class->slot_bytes;
    bool full = true;
    pthread_mutex_lock(&class->pool->mutex);
    for (size_t s = first; s <= last && s < (size_t)class->n_slots; s++) full = full && class->slots[s].state == READY;
    pthread_mutex_unlock(&class->pool->mutex);
    return full;
}

static void start_huge_pages(struct slots *pool) {
    if (pool->n_classes <= 0) return;
    struct ms_huge_range *ranges = calloc((size_t)pool->n_classes, sizeof *ranges);
    for (int c = 0; ranges && c < pool->n_classes; c++) {
        struct class *class = &pool->classes[c];
        /* not the tail of the last huge page: the budget is a promise */
        ranges[c] = (struct ms_huge_range){.memory = class->memory, .bytes = (size_t)class->n_slots * class->slot_bytes, .full = is_full, .context = class};
    }
    if (ranges) pool->huge_pages = ms_huge_pages_start(ranges, pool->n_classes);
    free(ranges);
}

static void slots_close(struct ms_store *store) {
    struct slots *pool = (struct slots *)store;
    ms_huge_pages_stop(pool->huge_pages);
    ms_pacer_stop(pool->pacer);
    if (pool->has_converter) {
        pthread_mutex_lock(&pool->mutex);
        pool->closing = true;
        pthread_cond_signal(&pool->arrived);
        pthread_mutex_unlock(&pool->mutex);
        pthread_join(pool->converter, NULL);
    }
    for (int c = 0; c < pool->n_classes; c++) {
        struct class *class = &pool->classes[c];
        if (class->memory) munmap(class->memory, class->memory_bytes);
        if (class->policy) class->policy->free(class->policy);
        free(class->slots);
    }
    for (int l = 0; pool->layers && l < pool->source->n_layers; l++) free(pool->layers[l].slot_of);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->changed);
    pthread_cond_destroy(&pool->arrived);
    ms_guesses_free(pool->guesses);
    free(pool->waiter_scratch);
    free(pool->layers);
    free(pool->classes);
    free(pool);
}

static int build_class(struct slots *pool, struct class *class, const char *policy, char *err, size_t errlen) {
    class->pool = pool;
    class->n_idle = class->n_slots;
    class->slots = calloc((size_t)class->n_slots, sizeof(struct slot));
    if (!class->slots) return ms_fail(-ENOMEM, err, errlen, "out of memory for the table of %d slots", class->n_slots);
    for (int s = 0; s < class->n_slots; s++) class->slots[s].pool = pool;
    int rc = ms_policy_open(policy, class->n_slots, (int)class->n_experts, &class->policy, err, errlen);
    return rc < 0 ? rc : reserve(class, err, errlen);
}

int ms_slots_open(struct ms_source *source, struct ms_reader *reader, const struct ms_interleaving *interleaving,
                  struct ms_slots_options options, struct ms_store **out, char *err, size_t errlen) {
    uint64_t minimum = ms_slots_minimum_bytes(source, options.wanted);
    if (options.budget_bytes < minimum)
        return ms_fail(-ENOSPC, err, errlen, "an expert cache of %llu bytes cannot hold one token's experts; the smallest for this model is %llu bytes",
                       (unsigned long long)options.budget_bytes, (unsigned long long)minimum);
    struct slots *pool = calloc(1, sizeof *pool);
    if (!pool) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    pool->base = (struct ms_store){.capacity = slots_capacity, .acquire = slots_acquire, .release = slots_release,
                                   .begin = slots_begin, .presence = slots_presence, .failure = slots_failure, .events = slots_events, .wait = slots_wait, .settle = slots_settle,
                                   .enter = slots_enter, .expect = slots_expect, .holds = slots_holds, .stop = slots_stop, .pace = slots_pace, .cool = slots_cool, .prefetch = slots_prefetch, .fair_share = slots_fair_share, .view = slots_view, .counters = slots_counters, .close = slots_close};
    pool->source = source;
    pool->reader = reader;
    pool->verify = options.verify;
    pool->timeline = options.timeline;
    pool->last_arrival = &pool->arrivals;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->changed, NULL);
    pthread_cond_init(&pool->arrived, NULL);
    pool->classes = calloc((size_t)source->n_layers, sizeof(struct class));
    pool->layers = calloc((size_t)source->n_layers, sizeof(struct layer_slots));
    pool->guesses = ms_guesses_new(MOST_GUESSES);
    int rc = pool->classes && pool->layers && pool->guesses ? 0 : ms_fail(-ENOMEM, err, errlen, "out of memory");
    for (int l = 0; l < source->n_layers && rc == 0; l++) {
        const struct ms_layer *layer = &source->layers[l];
        if (!is_wanted(options.wanted, l)) continue;
        struct layer_slots *ls = &pool->layers[l];
        ls->class = class_for(pool, ms_slot_bytes(source, layer));
        ls->first_key = ls->class->n_experts;
        ls->class->n_experts += (uint64_t)layer->n_experts;
        ls->class->n_minimum += used_experts(source, layer);
        ls->slot_of = malloc(sizeof(int) * (size_t)layer->n_experts);
        if (!ls->slot_of) rc = ms_fail(-ENOMEM, err, errlen, "out of memory");
        for (int e = 0; e < layer->n_experts && rc == 0; e++) ls->slot_of[e] = -1;
        lay_out(pool, l, interleaving);
    }
    if (rc == 0) share_budget(pool, options.budget_bytes);
    for (int c = 0; c < pool->n_classes && rc == 0; c++) rc = build_class(pool, &pool->classes[c], options.policy, err, errlen);
    if (rc == 0 && pool->scratch_bytes) {
        pool->waiter_scratch = malloc(pool->scratch_bytes);
        pool->has_converter = pool->waiter_scratch && ms_thread_start(&pool->converter, converter, pool) == 0;
        if (!pool->has_converter) rc = ms_fail(-ENOMEM, err, errlen, "out of memory for interleaving experts on arrival");
    }
    if (rc < 0) {
        slots_close(&pool->base);
        return rc;
    }
    start_huge_pages(pool);
    *out = &pool->base;
    return 0;
}
