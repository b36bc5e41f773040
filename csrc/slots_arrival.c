/* slots_arrival.c - what becomes of a read that has ended. */
#include "slots_pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "pacer.h"

/* ------------------------------------------------------------ arrival */

uint8_t *ms_slots_memory(const struct class *class, const struct slot *slot) {
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
        convert_matrix(&ls->rooms[m], matrix, stored, ms_slots_memory(ls->class, slot) + ls->rooms[m].data_offset, scratch);
    }
    return 0;
}

/* Takes one arrival and converts it. Mutex held on entry and exit. */
void ms_slots_convert_one(struct slots *pool, uint8_t *scratch) {
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
    ms_slots_read_is_ready(pool, slot, read, status);
}

void ms_slots_ask(struct slots *pool, struct ms_read *read, struct asked *list) {
    read->asked_ns = ms_now_ns();
    if (pool->in_flight_bytes == 0) pool->busy_since_ns = read->asked_ns;
    pool->in_flight_bytes += read->size_bytes;
    read->next = NULL;
    if (list->last) list->last->next = read;
    else list->first = read;
    list->last = read;
}

void ms_slots_note_arrival(struct slots *pool, const struct ms_read *read) {
    pool->in_flight_bytes -= read->size_bytes;
    if (pool->in_flight_bytes == 0) pool->counters.busy_ns += ms_now_ns() - pool->busy_since_ns;
}

/* The bytes of a read of an expert are there, or could not be read. Mutex held. */
void ms_slots_end_read(struct slots *pool, struct slot *slot, int index, int status) {
    if (status == 0 && pool->layers[slot->layer].convert) {
        if (slot->n_arrived == 0) {
            slot->next_arrival = NULL;
            *pool->last_arrival = slot;
            pool->last_arrival = &slot->next_arrival;
        }
        slot->arrived[slot->n_arrived++] = index;
        pthread_cond_signal(&pool->arrived);
        ms_slots_tell(pool);
    } else {
        ms_slots_read_is_ready(pool, slot, index, status);
    }
}

static void read_arrived(struct ms_read *read, int status) {
    struct slot *slot = read->owner;
    struct slots *pool = slot->pool;
    pthread_mutex_lock(&pool->mutex);
    ms_slots_note_arrival(pool, read);
    ms_slots_end_read(pool, slot, (int)(read - slot->reads), status);
    ms_slots_read_expected(pool);
    pthread_mutex_unlock(&pool->mutex);
}

struct ms_pacer *ms_slots_pacer_of(const struct slots *pool) { return __atomic_load_n(&pool->pacer, __ATOMIC_ACQUIRE); }

/* Called on a reader's thread. */
void ms_slots_read_done(struct ms_read *read, int status) {
    struct slot *slot = read->owner;
    struct ms_pacer *pacer = ms_slots_pacer_of(slot->pool);
    if (pacer) ms_pacer_add(pacer, read, status, read_arrived);
    else read_arrived(read, status);
}

/* A second pair of hands beside the thread that waits in acquire. */
void *ms_slots_converter(void *argument) {
    struct slots *pool = argument;
    uint8_t *scratch = malloc(pool->scratch_bytes);
    pthread_mutex_lock(&pool->mutex);
    while (!pool->closing) {
        if (pool->arrivals && scratch) ms_slots_convert_one(pool, scratch);
        else pthread_cond_wait(&pool->arrived, &pool->mutex);
    }
    pthread_mutex_unlock(&pool->mutex);
    free(scratch);
    return NULL;
}
