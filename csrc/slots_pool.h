/* slots_pool.h - the expert pool, inside: what its parts share.
 *
 *   slots.c          sizes, acquire and release, building
 *   slots_room.c     the states of slots, and which is given up for another
 *   slots_arrival.c  reads end: bytes are checked, converted, ready
 *   slots_ahead.c    what is expected is read while the disk has nothing better to do, guesses in pieces
 *
 * All is under the pool's mutex unless it says otherwise.
 */
#ifndef MS_SLOTS_POOL_H
#define MS_SLOTS_POOL_H

#include <pthread.h>

#include "guesses.h"
#include "policy.h"
#include "reuse.h"
#include "store.h"
#include "timeline.h"

#define CACHE_LINE ((size_t)64)
#define MOST_GUESSES 4096
#define MOST_AHEAD 1024
#define MOST_PIECES 16 /* of one read; larger ones have larger pieces */
#define MOST_PARTIAL 8 /* experts of which only pieces are there */

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

/* Reads to be submitted together, in the order in which they were asked for. */
struct asked {
    struct ms_read *first, *last;
};

static inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* slots_room.c */
void ms_slots_tell(struct slots *pool);
struct class *ms_slots_class_of(struct slots *pool, const struct slot *slot);
bool ms_slots_is_idle(const struct slot *slot);
void ms_slots_pin(struct class *class, struct slot *slot);
void ms_slots_set_cool(struct class *class, struct slot *slot, bool cool);
void ms_slots_use(struct class *class, struct slot *slot);
void ms_slots_ahead_was_right(struct slots *pool, struct slot *slot);
size_t ms_slots_read_bytes(const struct slots *pool, const struct slot *slot);
void ms_slots_forget(struct slots *pool, struct class *class, struct slot *slot);
void ms_slots_unpin(struct slots *pool, struct class *class, struct slot *slot);
struct slot *ms_slots_take(struct slots *pool, int layer, int expert, enum ms_room room, float confidence);
void ms_slots_read_is_ready(struct slots *pool, struct slot *slot, int read, int status);

/* slots_arrival.c */
uint8_t *ms_slots_memory(const struct class *class, const struct slot *slot);
void ms_slots_convert_one(struct slots *pool, uint8_t *scratch);
void ms_slots_ask(struct slots *pool, struct ms_read *read, struct asked *list);
void ms_slots_note_arrival(struct slots *pool, const struct ms_read *read);
void ms_slots_end_read(struct slots *pool, struct slot *slot, int index, int status);
struct ms_pacer *ms_slots_pacer_of(const struct slots *pool);
void ms_slots_read_done(struct ms_read *read, int status);
void *ms_slots_converter(void *argument);

/* slots_ahead.c */
void ms_slots_ask_all(struct slots *pool, struct slot *slot, struct asked *list);
void ms_slots_ask_rest(struct slots *pool, struct slot *slot, struct asked *list);
void ms_slots_drop_passed(struct slots *pool);
void ms_slots_submit(struct slots *pool, struct asked reads);
void ms_slots_read_expected(struct slots *pool);
void ms_slots_give_up_partials(struct slots *pool, const struct class *class, int layer, const int32_t *experts, int n);
void ms_slots_give_up_mistaken(struct slots *pool, int layer);
void ms_slots_enter(struct ms_store *store, int layer, bool new_batch);
void ms_slots_expect(struct ms_store *store, int layer, const int32_t *experts, const float *confidences, int n);
void ms_slots_holds(struct ms_store *store, int layer, int n_experts, bool *held);
int ms_slots_pace(struct ms_store *store, uint64_t rate);
void ms_slots_stop(struct ms_store *store);
int ms_slots_prefetch(struct ms_store *store, int layer, const int32_t *experts, int n);

#endif
