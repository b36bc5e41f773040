#include "guesses.h"

#include <stdlib.h>
#include <string.h>

/* A sorted array; [first, end) of it is in use. A token has some hundred guesses, so a search from end to end is nothing. */
struct ms_guesses {
    int capacity, first, end;
    struct ms_guess *list; /* twice the capacity, so that room at the front is made seldom */
};

struct ms_guesses *ms_guesses_new(int capacity) {
    struct ms_guesses *guesses = calloc(1, sizeof *guesses);
    if (!guesses) return NULL;
    guesses->capacity = capacity;
    guesses->list = calloc(2 * (size_t)capacity + 1, sizeof *guesses->list);
    if (guesses->list) return guesses;
    free(guesses);
    return NULL;
}

void ms_guesses_free(struct ms_guesses *guesses) {
    if (!guesses) return;
    free(guesses->list);
    free(guesses);
}

static bool comes_before(const struct ms_guess *a, const struct ms_guess *b) { return a->due != b->due ? a->due < b->due : a->confidence > b->confidence; }

static void remove_at(struct ms_guesses *guesses, int i) {
    guesses->end--;
    memmove(&guesses->list[i], &guesses->list[i + 1], (size_t)(guesses->end - i) * sizeof *guesses->list);
}

void ms_guesses_add(struct ms_guesses *guesses, struct ms_guess guess) {
    for (int i = guesses->first; i < guesses->end; i++)
        if (guesses->list[i].layer == guess.layer && guesses->list[i].expert == guess.expert) {
            remove_at(guesses, i);
            break;
        }
    if (guesses->end - guesses->first == guesses->capacity) {
        if (!comes_before(&guess, &guesses->list[guesses->end - 1])) return;
        guesses->end--;
    }
    if (guesses->end == 2 * guesses->capacity) {
        memmove(guesses->list, &guesses->list[guesses->first], (size_t)(guesses->end - guesses->first) * sizeof *guesses->list);
        guesses->end -= guesses->first;
        guesses->first = 0;
    }
    int at = guesses->end;
    while (at > guesses->first && comes_before(&guess, &guesses->list[at - 1])) at--;
    memmove(&guesses->list[at + 1], &guesses->list[at], (size_t)(guesses->end - at) * sizeof *guesses->list);
    guesses->list[at] = guess;
    guesses->end++;
}

void ms_guesses_withdraw(struct ms_guesses *guesses, int32_t layer) {
    int kept = guesses->first;
    for (int i = guesses->first; i < guesses->end; i++)
        if (guesses->list[i].layer != layer) guesses->list[kept++] = guesses->list[i];
    guesses->end = kept;
}

void ms_guesses_expire(struct ms_guesses *guesses, uint64_t now) {
    while (guesses->first < guesses->end && guesses->list[guesses->first].due <= now) guesses->first++;
}

void ms_guesses_clear(struct ms_guesses *guesses) { guesses->first = guesses->end = 0; }

const struct ms_guess *ms_guesses_first(const struct ms_guesses *guesses) { return guesses->first < guesses->end ? &guesses->list[guesses->first] : NULL; }

void ms_guesses_drop_first(struct ms_guesses *guesses) { guesses->first += guesses->first < guesses->end; }
