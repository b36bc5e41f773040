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
#include "pacer.h"
#include "slots_pool.h"
#include "thread.h"

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

uint64_t ms_slots_minimum_bytes(const struct ms_source *source, const bool *wanted) {
    uint64_t bytes = 0;
    for (int l = 0; l < source->n_layers; l++)
        if (is_wanted(wanted, l)) bytes += (uint64_t)ms_experts_used(source, l) * ms_slot_bytes(source, &source->layers[l]);
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

/* ------------------------------------------------------------ acquire and release */

static int slots_capacity(struct ms_store *store, int layer) { return ((struct slots *)store)->layers[layer].class->n_slots; }

static void release_locked(struct slots *pool, int layer, const int32_t *indices, int n) {
    struct class *class = pool->layers[layer].class;
    for (int i = 0; i < n; i++) ms_slots_unpin(pool, class, &class->slots[indices[i]]);
    ms_slots_tell(pool);
    ms_slots_read_expected(pool);
}

static void slots_release(struct ms_store *store, int layer, const int32_t *indices, int n) {
    struct slots *pool = (struct slots *)store;
    pthread_mutex_lock(&pool->mutex);
    release_locked(pool, layer, indices, n);
    pthread_mutex_unlock(&pool->mutex);
}

/* Can all of these be pinned now? */
static bool has_room(const struct layer_slots *ls, const int32_t *experts, int n) {
    int wanted = 0;
    for (int i = 0; i < n; i++) {
        int s = ls->slot_of[experts[i]];
        if (s < 0 || ms_slots_is_idle(&ls->class->slots[s])) wanted++;
    }
    return wanted <= ls->class->n_idle;
}

/* Waits until the layer's class can take these experts all at once. Pins are
 * taken in one step and only ever released afterwards, so waiting here while
 * another context computes cannot deadlock. */
static void wait_for_room(struct slots *pool, int layer, const int32_t *experts, int n) {
    while (!has_room(&pool->layers[layer], experts, n)) {
        ms_slots_give_up_partials(pool, pool->layers[layer].class, layer, experts, n);
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
    ms_slots_convert_one(pool, scratch);
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
        ms_slots_pin(class, slot);
        ms_slots_use(class, slot);
        if (slot->ahead) {
            pool->counters.misses++;
            ms_slots_ahead_was_right(pool, slot);
            ms_slots_ask_rest(pool, slot, &reads);
        } else {
            pool->counters.hits++;
        }
        pinned++;
    }
    for (int i = 0; i < n; i++) {
        if (indices[i] >= 0) continue;
        struct slot *slot = ms_slots_take(pool, layer, experts[i], room, 1);
        if (!slot && room == MS_ROOM_ANY) {
            ms_slots_give_up_partials(pool, class, layer, experts, n);
            slot = ms_slots_take(pool, layer, experts[i], room, 1);
        }
        if (!slot) break; /* never with MS_ROOM_ALL: wait_for_room counted */
        indices[i] = (int32_t)(slot - class->slots);
        ms_slots_ask_all(pool, slot, &reads);
        pool->counters.misses++;
        pinned++;
    }
    if (room == MS_ROOM_ALL) ms_slots_give_up_mistaken(pool, layer);
    ms_slots_submit(pool, reads);
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
    ms_slots_drop_passed(pool);
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

/* ------------------------------------------------------------ advice */

static void slots_cool(struct ms_store *store, int layer, const int32_t *indices, int n) {
    struct slots *pool = (struct slots *)store;
    struct class *class = pool->layers[layer].class;
    pthread_mutex_lock(&pool->mutex);
    for (int i = 0; i < n; i++) {
        class->policy->cooled(class->policy, indices[i]);
        ms_slots_set_cool(class, &class->slots[indices[i]], true);
    }
    pthread_mutex_unlock(&pool->mutex);
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
                                   .enter = ms_slots_enter, .expect = ms_slots_expect, .holds = ms_slots_holds, .stop = ms_slots_stop, .pace = ms_slots_pace, .cool = slots_cool, .prefetch = ms_slots_prefetch, .fair_share = slots_fair_share, .view = slots_view, .counters = slots_counters, .close = slots_close};
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
        ls->class->n_minimum += ms_experts_used(source, l);
        ls->slot_of = malloc(sizeof(int) * (size_t)layer->n_experts);
        if (!ls->slot_of) rc = ms_fail(-ENOMEM, err, errlen, "out of memory");
        for (int e = 0; e < layer->n_experts && rc == 0; e++) ls->slot_of[e] = -1;
        lay_out(pool, l, interleaving);
    }
    if (rc == 0) share_budget(pool, options.budget_bytes);
    for (int c = 0; c < pool->n_classes && rc == 0; c++) rc = build_class(pool, &pool->classes[c], options.policy, err, errlen);
    if (rc == 0 && pool->scratch_bytes) {
        pool->waiter_scratch = malloc(pool->scratch_bytes);
        pool->has_converter = pool->waiter_scratch && ms_thread_start(&pool->converter, ms_slots_converter, pool) == 0;
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
