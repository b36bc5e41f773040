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
#include "huge_pages.h"
#include "message.h"
#include "moestream.h"
#include "policy.h"
#include "store.h"
#include "thread.h"

#define CACHE_LINE ((size_t)64)

enum state { EMPTY, LOADING, READY, FAILED };

struct slot {
    struct slots *pool;
    int layer, expert;
    enum state state;
    int pins;
    bool cool;   /* its room is spare */
    bool ahead;  /* asked for before it was wanted, and not wanted yet: a miss when it is */
    int pending; /* reads whose bytes are not ready yet */
    int status;  /* of the first that failed */
    int bad_read;
    struct ms_read reads[MS_MAX_MATRICES];
    struct slot *next_arrival;
    int arrived[MS_MAX_MATRICES]; /* reads that are done, with bytes not yet converted */
    int n_arrived;
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
    class->policy->used(class->policy, (int)(slot - class->slots));
    set_cool(class, slot, false);
}

static void forget(struct slots *pool, struct class *class, struct slot *slot) {
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
static struct slot *take_slot(struct slots *pool, int layer, int expert, enum ms_room room) {
    struct layer_slots *ls = &pool->layers[layer];
    struct class *class = ls->class;
    if (class->n_idle == 0) return NULL;
    int s = class->n_used < class->n_slots ? empty_slot(class, ls->first_key + (uint64_t)expert) : -1;
    if (s < 0) {
        if (room == MS_ROOM_SPARE && class->n_cool == 0) return NULL;
        s = class->policy->victim(class->policy, room == MS_ROOM_SPARE ? may_evict_cool : may_evict, class);
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
    slot->ahead = false;
    slot->status = 0;
    slot->n_arrived = 0;
    ls->slot_of[expert] = s;
    class->policy->filled(class->policy, s);
    return slot;
}

static void read_is_ready(struct slots *pool, struct slot *slot, int read, int status) {
    struct class *class = class_of(pool, slot);
    if (status < 0 && slot->status == 0) {
        slot->status = status;
        slot->bad_read = read;
    }
    if (--slot->pending > 0) return;
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

/* Called on a reader's thread. */
static void read_done(struct ms_read *read, int status) {
    struct slot *slot = read->owner;
    struct slots *pool = slot->pool;
    int index = (int)(read - slot->reads);
    pthread_mutex_lock(&pool->mutex);
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
    pthread_mutex_unlock(&pool->mutex);
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

static void prepare_reads(struct slots *pool, struct slot *slot, struct ms_read **list) {
    const struct ms_source *source = pool->source;
    const struct ms_layer *layer = &source->layers[slot->layer];
    const struct layer_slots *ls = &pool->layers[slot->layer];
    slot->pending = ms_expert_n_reads(layer);
    for (int i = slot->pending - 1; i >= 0; i--) {
        slot->reads[i] = ms_expert_read(source, layer, i, slot->expert);
        slot->reads[i].destination = slot_memory(ls->class, slot) + (layer->record_bytes ? 0 : ls->rooms[i].offset);
        slot->reads[i].done = read_done;
        slot->reads[i].owner = slot;
        slot->reads[i].next = *list;
        *list = &slot->reads[i];
    }
}

static int slots_capacity(struct ms_store *store, int layer) { return ((struct slots *)store)->layers[layer].class->n_slots; }

static void release_locked(struct slots *pool, int layer, const int32_t *indices, int n) {
    struct class *class = pool->layers[layer].class;
    for (int i = 0; i < n; i++) unpin(pool, class, &class->slots[indices[i]]);
    tell(pool);
}

static void slots_release(struct ms_store *store, int layer, const int32_t *indices, int n) {
    struct slots *pool = (struct slots *)store;
    pthread_mutex_lock(&pool->mutex);
    release_locked(pool, layer, indices, n);
    pthread_mutex_unlock(&pool->mutex);
}

/* Waits until the layer's class can take these experts all at once. Pins are
 * taken in one step and only ever released afterwards, so waiting here while
 * another context computes cannot deadlock. */
static void wait_for_room(struct slots *pool, struct layer_slots *ls, const int32_t *experts, int n) {
    for (;;) {
        int wanted = 0;
        for (int i = 0; i < n; i++) {
            int s = ls->slot_of[experts[i]];
            if (s < 0 || is_idle(&ls->class->slots[s])) wanted++;
        }
        if (wanted <= ls->class->n_idle) return;
        pthread_cond_wait(&pool->changed, &pool->mutex);
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

/* Submits with the mutex let go, for a reader may call read_done at once. */
static void submit(struct slots *pool, struct ms_read *reads) {
    if (!reads) return;
    pthread_mutex_unlock(&pool->mutex);
    pool->reader->submit(pool->reader, reads);
    pthread_mutex_lock(&pool->mutex);
}

/* Mutex held on entry and exit. */
static int begin_locked(struct slots *pool, int layer, const int32_t *experts, int n, enum ms_room room, int32_t *indices, char *err, size_t errlen) {
    struct layer_slots *ls = &pool->layers[layer];
    struct class *class = ls->class;
    struct ms_read *reads = NULL;
    int misses = 0, pinned = 0;
    for (int i = 0; i < n; i++) misses += indices[i] < 0 && ls->slot_of[experts[i]] < 0;
    int rc = misses ? ms_layer_check(pool->source, layer, err, errlen) : 0;
    if (rc < 0) return rc;
    if (room == MS_ROOM_ALL) wait_for_room(pool, ls, experts, n);
    for (int i = 0; i < n; i++) { /* what is there is pinned before anything is evicted */
        if (indices[i] >= 0 || ls->slot_of[experts[i]] < 0) continue;
        indices[i] = ls->slot_of[experts[i]];
        pin(class, &class->slots[indices[i]]);
        use(class, &class->slots[indices[i]]);
        if (class->slots[indices[i]].ahead) pool->counters.misses++;
        else pool->counters.hits++;
        class->slots[indices[i]].ahead = false;
        pinned++;
    }
    for (int i = 0; i < n; i++) {
        if (indices[i] >= 0) continue;
        struct slot *slot = take_slot(pool, layer, experts[i], room);
        if (!slot) break; /* never with MS_ROOM_ALL: wait_for_room counted */
        indices[i] = (int32_t)(slot - class->slots);
        prepare_reads(pool, slot, &reads);
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
    while (is_unsettled(pool)) wait_or_convert(pool);
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
    struct ms_read *reads = NULL;
    pthread_mutex_lock(&pool->mutex);
    for (int i = 0; i < n; i++) /* what is there is not given up for the others */
        if (ls->slot_of[experts[i]] >= 0) use(ls->class, &ls->class->slots[ls->slot_of[experts[i]]]);
    int done = 0;
    for (; done < n; done++) {
        if (ls->slot_of[experts[done]] >= 0) continue;
        struct slot *slot = take_slot(pool, layer, experts[done], MS_ROOM_SPARE);
        if (!slot) break;
        slot->pins = 0; /* it is loading, and so not given to another */
        slot->ahead = true;
        prepare_reads(pool, slot, &reads);
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
    free(pool->waiter_scratch);
    free(pool->layers);
    free(pool->classes);
    free(pool);
}

static int build_class(struct slots *pool, struct class *class, char *err, size_t errlen) {
    class->pool = pool;
    class->n_idle = class->n_slots;
    class->slots = calloc((size_t)class->n_slots, sizeof(struct slot));
    class->policy = ms_policy_lru(class->n_slots);
    if (!class->slots || !class->policy) return ms_fail(-ENOMEM, err, errlen, "out of memory for the table of %d slots", class->n_slots);
    for (int s = 0; s < class->n_slots; s++) class->slots[s].pool = pool;
    return reserve(class, err, errlen);
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
                                   .cool = slots_cool, .prefetch = slots_prefetch, .fair_share = slots_fair_share, .view = slots_view, .counters = slots_counters, .close = slots_close};
    pool->source = source;
    pool->reader = reader;
    pool->verify = options.verify;
    pool->last_arrival = &pool->arrivals;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->changed, NULL);
    pthread_cond_init(&pool->arrived, NULL);
    pool->classes = calloc((size_t)source->n_layers, sizeof(struct class));
    pool->layers = calloc((size_t)source->n_layers, sizeof(struct layer_slots));
    int rc = pool->classes && pool->layers ? 0 : ms_fail(-ENOMEM, err, errlen, "out of memory");
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
    for (int c = 0; c < pool->n_classes && rc == 0; c++) rc = build_class(pool, &pool->classes[c], err, errlen);
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
