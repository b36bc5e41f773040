/* guesses.h - experts that may be wanted soon: the nearest first, among these the surest.
 *
 * A list without opinions of its own: who guesses is prerouter.c, who reads is
 * slots.c. Time is counted in layers computed ("due": the layer's number among
 * all that were and will be). The caller serialises all calls.
 */
#ifndef MS_GUESSES_H
#define MS_GUESSES_H

#include <stdbool.h>
#include <stdint.h>

struct ms_guess {
    uint64_t due;
    int32_t layer, expert;
    float confidence; /* how probable it is that it will be wanted then; 1: it is known */
};

struct ms_guesses;
struct ms_guesses *ms_guesses_new(int capacity); /* NULL: out of memory */
void ms_guesses_free(struct ms_guesses *guesses);

/* The latest opinion on an expert is the one that counts. Where the list is full the last of all is dropped, perhaps this one. */
void ms_guesses_add(struct ms_guesses *guesses, struct ms_guess guess);
/* Forgets what was guessed for a layer: a newer opinion follows. */
void ms_guesses_withdraw(struct ms_guesses *guesses, int32_t layer);
/* Forgets what is due at `now` or before. */
void ms_guesses_expire(struct ms_guesses *guesses, uint64_t now);
void ms_guesses_clear(struct ms_guesses *guesses);
/* The first, valid until the next call; NULL if there is none. */
const struct ms_guess *ms_guesses_first(const struct ms_guesses *guesses);
void ms_guesses_drop_first(struct ms_guesses *guesses);

#endif
