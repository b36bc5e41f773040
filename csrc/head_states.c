#include "head_states.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "message.h"
#include "tensor.h"

/* What heads said, twice: of the step under way and of the next one. */
struct ms_head_memory {
    int n_heads, n_experts;
    int32_t position; /* of the step that `said` of the other side is about; -1: none */
    int32_t n_said;   /* heads that have spoken of it */
    int32_t side;     /* of the step under way; the other one's logits are the next step's, its experts the last step's */
    size_t bytes;     /* of what follows */
    float *logits;    /* [2][heads][experts] */
    int32_t *n;       /* [2][heads]: experts executed */
    int32_t *experts; /* [2][heads][experts], of which these */
    uint8_t memory[];
};

struct row {
    struct ms_head_memory *memory; /* where it is a step; else NULL */
    bool predicted;                /* by what the step before said */
    bool output;
};

struct ms_head_states {
    int n_experts;
    struct ms_announced_row *announced;
    int announced_capacity;
    int n_rows, n_outputs, n_steps, n_predicted;
    struct row *rows;
    int row_capacity;
    int written; /* the layer whose logits were written last in this evaluation, or -1 */
    /* the work under way */
    struct ms_head_work *work;
    int head;  /* -1: none */
    int begun; /* the last one in this evaluation, or -1 */
    struct ms_head_input *inputs;
    int input_capacity;
    /* asking a layer's rule */
    float *scores;
    struct ms_router_scratch scratch;
};

struct ms_head_states *ms_head_states_new(void) {
    struct ms_head_states *states = calloc(1, sizeof *states);
    if (!states) return NULL;
    states->head = states->begun = states->written = -1;
    states->work = ms_head_work_new();
    if (states->work) return states;
    free(states);
    return NULL;
}

void ms_head_states_free(struct ms_head_states *states) {
    if (!states) return;
    ms_router_scratch_free(&states->scratch);
    ms_head_work_free(states->work);
    free(states->announced);
    free(states->rows);
    free(states->inputs);
    free(states->scores);
    free(states);
}

/* ------------------------------------------------------------ a sequence's memory */

struct ms_head_memory *ms_head_memory_new(const struct ms_heads *heads) {
    size_t n_heads = (size_t)ms_heads_count(heads), n_experts = (size_t)ms_heads_experts(heads);
    size_t logits = 2 * n_heads * n_experts, counts = 2 * n_heads, bytes = (2 * logits + counts) * sizeof(int32_t);
    struct ms_head_memory *memory = calloc(1, sizeof *memory + bytes);
    if (!memory) return NULL;
    *memory = (struct ms_head_memory){.n_heads = (int)n_heads, .n_experts = (int)n_experts, .position = -1, .bytes = bytes};
    memory->logits = (float *)memory->memory;
    memory->n = (int32_t *)(memory->logits + logits);
    memory->experts = memory->n + counts;
    return memory;
}

void ms_head_memory_free(struct ms_head_memory *memory) { free(memory); }

#define SAVED_NUMBERS 5 /* before the lists: heads, experts, and where the sequence is */

size_t ms_head_memory_bytes(const struct ms_head_memory *memory) { return SAVED_NUMBERS * sizeof(int32_t) + memory->bytes; }

void ms_head_memory_save(const struct ms_head_memory *memory, void *out) {
    int32_t numbers[SAVED_NUMBERS] = {memory->n_heads, memory->n_experts, memory->position, memory->n_said, memory->side};
    memcpy(out, numbers, sizeof numbers);
    memcpy((uint8_t *)out + sizeof numbers, memory->memory, memory->bytes);
}

bool ms_head_memory_restore(struct ms_head_memory *memory, const void *saved, size_t bytes) {
    int32_t numbers[SAVED_NUMBERS];
    if (bytes != ms_head_memory_bytes(memory)) return false;
    memcpy(numbers, saved, sizeof numbers);
    if (numbers[0] != memory->n_heads || numbers[1] != memory->n_experts || numbers[4] < 0 || numbers[4] > 1) return false;
    int n_logits = 2 * memory->n_heads * memory->n_experts;
    const float *logits = (const float *)((const uint8_t *)saved + sizeof numbers);
    const int32_t *n = (const int32_t *)(logits + n_logits), *experts = n + 2 * memory->n_heads;
    for (int i = 0; i < n_logits; i++)
        if (!isfinite(logits[i])) return false;
    for (int h = 0; h < 2 * memory->n_heads; h++) {
        if (n[h] < 0 || n[h] > memory->n_experts) return false;
        for (int i = 0; i < n[h]; i++)
            if (experts[h * memory->n_experts + i] < 0 || experts[h * memory->n_experts + i] >= memory->n_experts) return false;
    }
    memory->position = numbers[2];
    memory->n_said = numbers[3];
    memory->side = numbers[4];
    memcpy(memory->memory, (const uint8_t *)saved + sizeof numbers, memory->bytes);
    return true;
}

static bool is_complete(const struct ms_head_memory *memory) { return memory->n_said == memory->n_heads; }

static size_t place_of(const struct ms_head_memory *memory, int side, int head) { return (size_t)side * (size_t)memory->n_heads + (size_t)head; }
static float *logits_at(const struct ms_head_memory *memory, int side, int head) { return memory->logits + place_of(memory, side, head) * (size_t)memory->n_experts; }
static int32_t *experts_at(const struct ms_head_memory *memory, int side, int head) { return memory->experts + place_of(memory, side, head) * (size_t)memory->n_experts; }
static int32_t *n_at(const struct ms_head_memory *memory, int side, int head) { return memory->n + place_of(memory, side, head); }

/* A step at `position` begins: what was said of it is on its side now. Returns whether something was. */
static bool step(struct ms_head_memory *memory, int32_t position, bool continues) {
    bool predicted = continues && memory->position == position && is_complete(memory);
    memory->side ^= 1;
    memory->position = position + 1;
    memory->n_said = 0;
    for (int h = 0; h < memory->n_heads; h++) {
        *n_at(memory, memory->side, h) = 0;
        if (!predicted) *n_at(memory, memory->side ^ 1, h) = 0;
    }
    return predicted;
}

/* ------------------------------------------------------------ an evaluation */

static void *grown(void *list, int *capacity, int n, size_t each) {
    if (n <= *capacity) return list;
    void *larger = realloc(list, (size_t)n * each);
    if (larger) *capacity = n;
    return larger;
}

bool ms_head_states_enter(struct ms_head_states *states, struct ms_heads *heads, int n_tokens) {
    states->n_experts = ms_heads_experts(heads);
    states->head = states->begun = states->written = -1;
    states->n_rows = states->n_outputs = states->n_steps = states->n_predicted = 0;
    int n = ms_heads_take_announced(heads, &states->announced, &states->announced_capacity);
    if (n != n_tokens) return true; /* not announced, or divided: all is as in a prompt */
    struct row *rows = grown(states->rows, &states->row_capacity, n, sizeof *rows);
    if (!rows) return false;
    states->rows = rows;
    states->n_rows = n;
    for (int r = 0; r < n; r++) {
        const struct ms_announced_row *said = &states->announced[r];
        rows[r] = (struct row){.memory = said->memory, .output = said->flags & MS_ROW_OUTPUT};
        states->n_outputs += rows[r].output;
        if (!said->memory) continue;
        rows[r].predicted = step(said->memory, said->position, said->flags & MS_ROW_CONTINUES);
        states->n_steps++;
        states->n_predicted += rows[r].predicted;
    }
    return true;
}

bool ms_head_states_know_all(const struct ms_head_states *states) { return states->n_rows > 0 && states->n_predicted == states->n_rows; }

/* ------------------------------------------------------------ a layer that was predicted */

/* The row of the evaluation that is row `i` of the n that a layer computes: llama.cpp leaves out in the last layer what is
 * not asked for. -1: not known. */
static int row_of(const struct ms_head_states *states, int n, int i) {
    if (n == states->n_rows) return i;
    if (n != states->n_outputs) return -1;
    for (int r = 0; r < states->n_rows; r++)
        if (states->rows[r].output && i-- == 0) return r;
    return -1;
}

int ms_head_states_predicted(const struct ms_head_states *states, const struct ms_heads *heads, int layer, int n) {
    if (ms_heads_predicting(heads, layer) < 0 || states->n_predicted == 0) return 0;
    int predicted = 0;
    for (int i = 0; i < n; i++) {
        int r = row_of(states, n, i);
        if (r < 0) return -1;
        predicted += states->rows[r].predicted;
    }
    return predicted;
}

/* What was said of the step under way, or, on the other side, of the next. */
static const float *logits_of(const struct ms_head_states *states, int row, int head, bool next) {
    const struct ms_head_memory *memory = states->rows[row].memory;
    return logits_at(memory, memory->side ^ (int)next, head);
}

void ms_head_states_write(struct ms_head_states *states, const struct ms_heads *heads, int layer, struct ggml_tensor *logits) {
    int head = ms_heads_predicting(heads, layer), n = (int)logits->ne[1];
    for (int i = 0; i < n; i++) {
        int r = row_of(states, n, i);
        if (states->rows[r].predicted) memcpy((char *)logits->data + (size_t)i * logits->nb[1], logits_of(states, r, head, false), (size_t)states->n_experts * sizeof(float));
    }
    states->written = layer;
}

bool ms_head_states_written(const struct ms_head_states *states, int layer) { return states->written == layer; }

static bool reserve_scores(struct ms_head_states *states) {
    if (!states->scores) states->scores = malloc((size_t)states->n_experts * sizeof(float));
    return states->scores != NULL;
}

int ms_head_states_missing(struct ms_head_states *states, const struct ms_heads *heads, struct ms_routers *routers, int layer, const struct ggml_tensor *ids) {
    int head = ms_heads_predicting(heads, layer), n = (int)ids->ne[1], k = (int)ids->ne[0], missing = 0;
    if (head < 0 || states->n_predicted == 0 || !reserve_scores(states)) return 0;
    for (int i = 0; i < n; i++) {
        int32_t chosen[k];
        int r = row_of(states, n, i);
        if (r < 0 || !states->rows[r].predicted) continue;
        for (int c = 0; c < k; c++) chosen[c] = ms_choice(ids, c, i);
        memcpy(states->scores, logits_of(states, r, head, false), (size_t)states->n_experts * sizeof(float));
        missing += ms_routers_missing(routers, layer, states->scores, chosen, k);
    }
    return missing;
}

/* ------------------------------------------------------------ a layer that owns a head */

bool ms_head_states_begin(struct ms_head_states *states, const struct ms_heads *heads, int block, int layer, const struct ggml_tensor *input, const struct ggml_tensor *ids, char *err, size_t errlen) {
    int head = ms_heads_owned_by(heads, layer), k = (int)ids->ne[0];
    states->head = -1;
    if (head < 0 || states->n_steps == 0 || states->begun == head) return true;
    states->begun = head;
    if (ids->ne[1] != states->n_rows || input->ne[1] != 1 || k > states->n_experts) {
        ms_fail(0, err, errlen, "block %d: its experts do not read the state that heads read (%lld inputs for each of %lld tokens of %d); load this model without heads: prerouter=\"off\"", block,
                (long long)input->ne[1], (long long)ids->ne[1], states->n_rows);
        return false;
    }
    struct ms_head_input *inputs = grown(states->inputs, &states->input_capacity, states->n_steps, sizeof *inputs);
    if (inputs) states->inputs = inputs;
    int n = 0;
    for (int r = 0; r < states->n_rows && inputs; r++) {
        struct ms_head_memory *memory = states->rows[r].memory;
        if (!memory) continue;
        int side = memory->side;
        int32_t *now = experts_at(memory, side, head);
        *n_at(memory, side, head) = k;
        for (int c = 0; c < k; c++) now[c] = ms_choice(ids, c, r);
        inputs[n++] = (struct ms_head_input){.state = ms_row(input, 0, r), .now = now, .n_now = k, .before = experts_at(memory, side ^ 1, head), .n_before = *n_at(memory, side ^ 1, head),
                                             .logits = logits_at(memory, side ^ 1, head)};
    }
    if (!inputs || !ms_head_work_begin(states->work, heads, head, inputs, n)) {
        ms_fail(0, err, errlen, "block %d: out of memory for its head", block);
        return false;
    }
    states->head = head;
    return true;
}

void ms_head_states_share(struct ms_head_states *states) {
    if (states->head >= 0) ms_head_work_share(states->work);
}

bool ms_head_states_end(struct ms_head_states *states, int n_threads, int64_t *heads_ns, uint64_t *heads_bytes) {
    if (states->head < 0) return true;
    int64_t spent_ns;
    uint64_t bytes;
    ms_head_work_cost(states->work, &spent_ns, &bytes);
    *heads_ns += spent_ns / n_threads;
    *heads_bytes += bytes;
    states->head = -1;
    if (!ms_head_work_is_finite(states->work)) return false;
    for (int r = 0; r < states->n_rows; r++)
        if (states->rows[r].memory) states->rows[r].memory->n_said++;
    return true;
}

/* ------------------------------------------------------------ what the next token takes */

int ms_head_states_next(struct ms_head_states *states, const struct ms_heads *heads, struct ms_routers *routers, int layer, int n_each, int32_t *experts, int most) {
    int head = ms_heads_predicting(heads, layer), n = 0;
    if (head < 0 || states->n_steps == 0 || !reserve_scores(states)) return 0;
    int32_t chosen[n_each];
    for (int r = 0; r < states->n_rows; r++) {
        if (!states->rows[r].memory || states->rows[r].memory->n_said <= head) continue;
        memcpy(states->scores, logits_of(states, r, head, true), (size_t)states->n_experts * sizeof(float));
        int found = ms_routers_choose_by(routers, layer, states->scores, n_each, chosen, &states->scratch);
        for (int i = 0; i < found && n < most; i++)
            if (!ms_contains(experts, n, chosen[i])) experts[n++] = chosen[i];
    }
    return n;
}
