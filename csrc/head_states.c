#include "head_states.h"

#include <stdlib.h>
#include <string.h>

#include "message.h"
#include "tensor.h"

#define NO_SEQUENCE (-1)

struct executed {
    int n;
    int32_t *experts; /* [most] */
};

struct sequence {
    int32_t id;
    int32_t position; /* of the step that `said` of the other side is about; -1: none */
    int n_said;       /* heads that have spoken of it */
    int side;         /* of the step under way; the other one's logits are the next step's, its experts the last step's */
    float *logits[2]; /* [heads][experts] */
    struct executed *executed[2]; /* [heads] */
    void *memory;
};

struct row {
    int sequence;   /* index, where it is a step; else NO_SEQUENCE */
    bool predicted; /* by what the step before said */
    bool output;
};

struct ms_head_states {
    int n_heads, n_experts;
    struct ms_announced_row *announced;
    int announced_capacity;
    int n_rows, n_outputs, n_steps, n_predicted;
    struct row *rows;
    int row_capacity;
    struct sequence *sequences;
    int n_sequences;
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
    for (int s = 0; s < states->n_sequences; s++) free(states->sequences[s].memory);
    ms_router_scratch_free(&states->scratch);
    ms_head_work_free(states->work);
    free(states->announced);
    free(states->rows);
    free(states->sequences);
    free(states->inputs);
    free(states->scores);
    free(states);
}

/* ------------------------------------------------------------ sequences */

static void *grown(void *list, int *capacity, int n, size_t each) {
    if (n <= *capacity) return list;
    void *larger = realloc(list, (size_t)n * each);
    if (larger) *capacity = n;
    return larger;
}

static struct sequence *find_sequence(struct ms_head_states *states, int32_t id) {
    for (int s = 0; s < states->n_sequences; s++)
        if (states->sequences[s].id == id) return &states->sequences[s];
    return NULL;
}

static struct sequence *add_sequence(struct ms_head_states *states, int32_t id) {
    size_t heads = (size_t)states->n_heads, experts = (size_t)states->n_experts;
    struct sequence *more = realloc(states->sequences, (size_t)(states->n_sequences + 1) * sizeof *more);
    if (!more) return NULL;
    states->sequences = more;
    size_t logits_bytes = heads * experts * sizeof(float), lists_bytes = heads * sizeof(struct executed), experts_bytes = heads * experts * sizeof(int32_t);
    uint8_t *memory = calloc(2, lists_bytes + logits_bytes + experts_bytes);
    if (!memory) return NULL;
    struct sequence *made = &more[states->n_sequences++];
    *made = (struct sequence){.id = id, .position = -1, .memory = memory};
    for (int side = 0; side < 2; side++) {
        made->executed[side] = (struct executed *)memory;
        made->logits[side] = (float *)(memory += lists_bytes);
        int32_t *lists = (int32_t *)(memory += logits_bytes);
        memory += experts_bytes;
        for (size_t h = 0; h < heads; h++) made->executed[side][h].experts = lists + h * experts;
    }
    return made;
}

static bool is_complete(const struct ms_head_states *states, const struct sequence *sequence) { return sequence->n_said == states->n_heads; }

/* A step at `position` begins: what was said of it is on its side now. Returns whether something was. */
static bool step(struct ms_head_states *states, struct sequence *sequence, int32_t position, bool continues) {
    bool predicted = continues && sequence->position == position && is_complete(states, sequence);
    sequence->side ^= 1;
    sequence->position = position + 1;
    sequence->n_said = 0;
    for (int h = 0; h < states->n_heads; h++) {
        sequence->executed[sequence->side][h].n = 0;
        if (!predicted) sequence->executed[sequence->side ^ 1][h].n = 0;
    }
    return predicted;
}

bool ms_head_states_enter(struct ms_head_states *states, struct ms_heads *heads, int n_tokens) {
    states->n_heads = ms_heads_count(heads);
    states->n_experts = ms_heads_experts(heads);
    states->head = states->begun = states->written = -1;
    states->n_rows = states->n_outputs = states->n_steps = states->n_predicted = 0;
    int n = ms_heads_take_announced(heads, &states->announced, &states->announced_capacity);
    if (n != n_tokens) { /* not announced, or divided: nothing is known of where any sequence is */
        for (int s = 0; s < states->n_sequences; s++) states->sequences[s].position = -1;
        return true;
    }
    struct row *rows = grown(states->rows, &states->row_capacity, n, sizeof *rows);
    if (!rows) return false;
    states->rows = rows;
    states->n_rows = n;
    for (int r = 0; r < n; r++) {
        const struct ms_announced_row *said = &states->announced[r];
        struct sequence *sequence = find_sequence(states, said->sequence);
        bool is_step = said->flags & MS_ROW_STEP;
        if (is_step && !sequence && !(sequence = add_sequence(states, said->sequence))) return false;
        rows[r] = (struct row){.sequence = NO_SEQUENCE, .output = said->flags & MS_ROW_OUTPUT};
        states->n_outputs += rows[r].output;
        if (is_step) {
            rows[r].sequence = (int)(sequence - states->sequences);
            rows[r].predicted = step(states, sequence, said->position, said->flags & MS_ROW_CONTINUES);
            states->n_steps++;
            states->n_predicted += rows[r].predicted;
        } else if (sequence) {
            sequence->position = -1;
        }
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
    const struct sequence *sequence = &states->sequences[states->rows[row].sequence];
    return sequence->logits[sequence->side ^ (int)next] + (size_t)head * (size_t)states->n_experts;
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
        if (states->rows[r].sequence == NO_SEQUENCE) continue;
        struct sequence *sequence = &states->sequences[states->rows[r].sequence];
        struct executed *now = &sequence->executed[sequence->side][head];
        const struct executed *before = &sequence->executed[sequence->side ^ 1][head];
        now->n = k;
        for (int c = 0; c < k; c++) now->experts[c] = ms_choice(ids, c, r);
        inputs[n++] = (struct ms_head_input){.state = ms_row(input, 0, r), .now = now->experts, .n_now = k, .before = before->experts, .n_before = before->n,
                                             .logits = sequence->logits[sequence->side ^ 1] + (size_t)head * (size_t)states->n_experts};
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

void ms_head_states_end(struct ms_head_states *states, int n_threads, int64_t *heads_ns, uint64_t *heads_bytes) {
    if (states->head < 0) return;
    int64_t spent_ns;
    uint64_t bytes;
    ms_head_work_cost(states->work, &spent_ns, &bytes);
    *heads_ns += spent_ns / n_threads;
    *heads_bytes += bytes;
    for (int r = 0; r < states->n_rows; r++)
        if (states->rows[r].sequence != NO_SEQUENCE) states->sequences[states->rows[r].sequence].n_said++;
    states->head = -1;
}

/* ------------------------------------------------------------ what the next token takes */

int ms_head_states_next(struct ms_head_states *states, const struct ms_heads *heads, struct ms_routers *routers, int layer, int n_each, int32_t *experts, int most) {
    int head = ms_heads_predicting(heads, layer), n = 0;
    if (head < 0 || states->n_steps == 0 || !reserve_scores(states)) return 0;
    int32_t chosen[n_each];
    for (int r = 0; r < states->n_rows; r++) {
        if (states->rows[r].sequence == NO_SEQUENCE || states->sequences[states->rows[r].sequence].n_said <= head) continue;
        memcpy(states->scores, logits_of(states, r, head, true), (size_t)states->n_experts * sizeof(float));
        int found = ms_routers_choose_by(routers, layer, states->scores, n_each, chosen, &states->scratch);
        for (int i = 0; i < found && n < most; i++)
            if (!ms_contains(experts, n, chosen[i])) experts[n++] = chosen[i];
    }
    return n;
}
