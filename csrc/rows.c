#include "rows.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "ggml-cpu.h"
#include "rows_kernels.h"

#define MAX_SETS 5
#define VALUES_ROWS 32     /* rows that are decoded at a time, for many tokens */
#define VALUES_COLUMNS 256 /* columns of these, at most: a multiple of every type's block */

static const char *const type_names[MS_ROWS_N_TYPES] = {"q4_0", "q8_0"};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct ms_rows_set sets[MAX_SETS]; /* those of this machine; dot[type][0] has ggml's bits or is NULL */
static char described[MAX_SETS][128];
static int n_sets;
static char available[128];
static _Atomic int in_use;
float ms_half_values[1 << 16];

/* Own kernels' number of a type, or -1. */
static int own(enum ggml_type type) {
    return type == GGML_TYPE_Q4_0 ? MS_ROWS_Q4_0 : type == GGML_TYPE_Q8_0 ? MS_ROWS_Q8_0 : -1;
}

/* ---------------------------------------------------------------- portable */

static void portable_add_values(int64_t columns, const float *values, size_t stride, const int32_t *which, const float *x, int n, float *y) {
    for (int i = 0; i < n; i++) {
        const float *w = values + (size_t)which[i] * stride;
        for (int64_t c = 0; c < columns; c++) y[c] = fmaf(x[i], w[c], y[c]);
    }
}

static bool always(void) {
    return true;
}

static const struct ms_rows_set portable = {.name = "portable", .is_here = always, .add_values = portable_add_values};

/* ---------------------------------------------------------------- are our dots ggml's? */

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* A finite half of either sign, of very different magnitudes; subnormal and zero ones too. */
static uint16_t random_half(uint32_t *state) {
    uint32_t kind = next_random(state) % 16;
    uint16_t mantissa = next_random(state) & 0x3FF, sign = next_random(state) << 15 & 0x8000;
    uint16_t exponent = kind == 0 ? 0 : kind < 4 ? next_random(state) % 30 : 8 + next_random(state) % 8;
    return kind == 1 ? sign : (uint16_t)(sign | exponent << 10 | mantissa);
}

static void fill(uint8_t *bytes, size_t n_blocks, size_t block_bytes, uint32_t *state) {
    for (size_t b = 0; b < n_blocks; b++, bytes += block_bytes) {
        uint16_t d = random_half(state);
        bool is_zero = next_random(state) % 16 == 0;
        memcpy(bytes, &d, sizeof d);
        for (size_t i = sizeof d; i < block_bytes; i++) bytes[i] = is_zero ? 0 : (uint8_t)next_random(state);
        if (block_bytes != sizeof(struct ms_block_q8_0)) continue;
        for (size_t i = sizeof d; i < block_bytes; i++) /* ggml quantises to -127 ... 127 */
            if (bytes[i] == 0x80) bytes[i] = 0x7F;
    }
}

static bool has_the_bits_of_ggml(ms_rows_dot_tile *dot, enum ggml_type type) {
    enum { MAX_BLOCKS = 65 };
    static const int lengths[] = {1, 2, 3, 24, 48, 64, MAX_BLOCKS};
    static uint8_t rows[MS_ROWS_TILE * MAX_BLOCKS * sizeof(struct ms_block_q8_0)];
    static uint8_t activations[MS_ACTIVATIONS_TILE * MAX_BLOCKS * sizeof(struct ms_block_q8_0)];
    ggml_vec_dot_t theirs = ggml_get_type_traits_cpu(type)->vec_dot;
    uint32_t state = 1;
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
        for (int n = 1; n <= MS_ACTIVATIONS_TILE; n++) {
            int columns = lengths[l] * MS_ROWS_BLOCK;
            size_t row_bytes = ggml_row_size(type, columns), activation_bytes = ggml_row_size(GGML_TYPE_Q8_0, columns);
            fill(rows, (size_t)(MS_ROWS_TILE * lengths[l]), ggml_type_size(type), &state);
            fill(activations, (size_t)(n * lengths[l]), sizeof(struct ms_block_q8_0), &state);
            const uint8_t *at[MS_ROWS_TILE];
            for (int r = 0; r < MS_ROWS_TILE; r++) at[r] = rows + (size_t)r * row_bytes;
            float out[MS_ACTIVATIONS_TILE][MS_ROWS_TILE], expected;
            dot(lengths[l], at, at, activations, activation_bytes, n, out);
            for (int a = 0; a < n; a++)
                for (int r = 0; r < MS_ROWS_TILE; r++) {
                    theirs(columns, &expected, 0, at[r], 0, activations + (size_t)a * activation_bytes, 0, 1);
                    if (memcmp(&expected, &out[a][r], sizeof expected)) return false;
                }
        }
    return true;
}

/* ---------------------------------------------------------------- which are used */

static ms_rows_dot_tile *with_the_bits_of_ggml(ms_rows_dot_tile *const ways[MS_ROWS_WAYS], enum ggml_type type) {
    for (int i = 0; i < MS_ROWS_WAYS && ways[i]; i++)
        if (has_the_bits_of_ggml(ways[i], type)) return ways[i];
    return NULL;
}

static void take(const struct ms_rows_set *set) {
    static const enum ggml_type types[MS_ROWS_N_TYPES] = {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0};
    struct ms_rows_set *mine = &sets[n_sets];
    char *text = described[n_sets];
    *mine = *set;
    int length = snprintf(text, sizeof *described, "%s:", set->name), empty = length;
    for (int t = 0; t < MS_ROWS_N_TYPES; t++) {
        mine->dot[t][0] = with_the_bits_of_ggml(set->dot[t], types[t]);
        if (mine->dot[t][0]) length += snprintf(text + length, sizeof *described - (size_t)length, "%s %s", length > empty ? "," : "", type_names[t]);
    }
    if (length == empty) snprintf(text + length, sizeof *described - (size_t)length, " ggml's dots");
    size_t end = strlen(available);
    snprintf(available + end, sizeof available - end, "%s%s", n_sets ? " " : "", set->name);
    n_sets++;
}

static void choose(void) {
    ggml_cpu_init(); /* tables that its dots look at */
    for (int i = 0; i < 1 << 16; i++) ms_half_values[i] = ggml_fp16_to_fp32((ggml_fp16_t)i);
#if defined(__x86_64__) || defined(__aarch64__)
    for (const struct ms_rows_set *set = ms_rows_sets; set->name; set++)
        if (set->is_here()) take(set);
#endif
    take(&portable);
}

static const struct ms_rows_set *used(void) {
    pthread_once(&once, choose);
    return &sets[atomic_load_explicit(&in_use, memory_order_relaxed)];
}

const char *ms_rows_kernels(void) {
    return described[used() - sets];
}

const char *ms_rows_available(void) {
    used();
    return available;
}

int ms_rows_use(const char *name) {
    used();
    for (int i = 0; i < n_sets; i++)
        if (strcmp(sets[i].name, name) == 0) {
            atomic_store(&in_use, i);
            return 0;
        }
    return -ENOTSUP;
}

/* ---------------------------------------------------------------- dots */

/* Which rows of a matrix are meant; beyond the last, the last. */
struct list {
    const uint8_t *matrix;
    size_t row_bytes;
    const int32_t *rows; /* or NULL: first, first + 1, ... */
    int first, n;
};

static const uint8_t *row_of(const struct list *list, int i) {
    if (i >= list->n) i = list->n - 1;
    return list->matrix + (size_t)(list->rows ? list->rows[i] : list->first + i) * list->row_bytes;
}

static void point(const struct list *list, int at, const uint8_t *rows[MS_ROWS_TILE]) {
    for (int r = 0; r < MS_ROWS_TILE; r++) rows[r] = row_of(list, at + r);
}

/* Asks for the first rows, so that one waits for memory once and not line by line. */
static void fetch_first(const struct list *list, size_t bytes) {
    for (int i = 0; i < MS_ROWS_TILE && i < list->n; i++) {
        const uint8_t *row = row_of(list, i);
        for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
        __builtin_prefetch(row + bytes - 1);
    }
}

static void ggml_dots(enum ggml_type type, int64_t columns, const struct list *list, const uint8_t *activations, size_t activation_bytes,
                      int n_activations, float *out, size_t out_stride) {
    ggml_vec_dot_t dot = ggml_get_type_traits_cpu(type)->vec_dot;
    for (int i = 0; i < list->n; i++) {
        const uint8_t *row = row_of(list, i);
        for (int a = 0; a < n_activations; a++)
            dot((int)columns, out + (size_t)a * out_stride + i, 0, row, 0, activations + (size_t)a * activation_bytes, 0, 1);
    }
}

void ms_rows_dot(enum ggml_type type, int64_t columns, const uint8_t *matrix, const int32_t *rows, int first, int n_rows,
                 const uint8_t *activations, size_t activation_bytes, int n_activations, float *out, size_t out_stride) {
    struct list list = {matrix, ggml_row_size(type, columns), rows, first, n_rows};
    const struct ms_rows_set *set = used();
    int number = own(type);
    ms_rows_dot_tile *dot = number < 0 ? NULL : set->dot[number][0];
    if (!dot) {
        ggml_dots(type, columns, &list, activations, activation_bytes, n_activations, out, out_stride);
        return;
    }
    const uint8_t *tile[MS_ROWS_TILE], *next[MS_ROWS_TILE];
    float found[MS_ACTIVATIONS_TILE][MS_ROWS_TILE];
    fetch_first(&list, list.row_bytes);
    for (int i = 0; i < n_rows; i += MS_ROWS_TILE) {
        int n = n_rows - i < MS_ROWS_TILE ? n_rows - i : MS_ROWS_TILE;
        point(&list, i, tile);
        point(&list, i + MS_ROWS_TILE, next);
        for (int a = 0; a < n_activations; a += MS_ACTIVATIONS_TILE) {
            int m = n_activations - a < MS_ACTIVATIONS_TILE ? n_activations - a : MS_ACTIVATIONS_TILE;
            dot(columns / MS_ROWS_BLOCK, tile, next, activations + (size_t)a * activation_bytes, activation_bytes, m, found);
            for (int k = 0; k < m; k++) memcpy(out + (size_t)(a + k) * out_stride + i, found[k], (size_t)n * sizeof(float));
        }
    }
}

/* ---------------------------------------------------------------- weighted sums */

static void decode(const struct ms_rows_set *set, enum ggml_type type, const uint8_t *row, float *out, int64_t n) {
    int number = own(type);
    if (number >= 0 && set->decode[number]) set->decode[number](n / MS_ROWS_BLOCK, row, out);
    else if (type == GGML_TYPE_F32) memcpy(out, row, (size_t)n * sizeof(float));
    else ggml_get_type_traits(type)->to_float(row, out, n);
}

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* By decoding, for types without a kernel of their own. */
static void add_decoded(const struct ms_rows_set *set, enum ggml_type type, const struct list *list, const float *x, int64_t begin, int64_t end,
                        float *y) {
    float values[VALUES_COLUMNS];
    const int32_t only = 0;
    for (int64_t c = begin; c < end; c += VALUES_COLUMNS)
        for (int i = 0; i < list->n; i++) {
            int64_t n = smaller(end - c, VALUES_COLUMNS);
            decode(set, type, row_of(list, i) + ggml_row_size(type, c), values, n);
            set->add_values(n, values, 0, &only, x + i, 1, y + c);
        }
}

void ms_rows_add(enum ggml_type type, const uint8_t *matrix, int64_t columns, const int32_t *rows, const float *x, int n, int64_t begin,
                 int64_t end, float *y) {
    struct list list = {matrix, ggml_row_size(type, columns), rows, 0, n};
    const struct ms_rows_set *set = used();
    int number = own(type);
    ms_rows_add_tile *add = number < 0 ? NULL : set->add[number];
    if (begin >= end) return;
    if (!add) {
        add_decoded(set, type, &list, x, begin, end, y);
        return;
    }
    list.matrix += ggml_row_size(type, begin);
    const uint8_t *tile[MS_ROWS_TILE], *next[MS_ROWS_TILE];
    fetch_first(&list, ggml_row_size(type, end - begin));
    for (int i = 0; i < n; i += MS_ROWS_TILE) {
        point(&list, i, tile);
        point(&list, i + MS_ROWS_TILE, next);
        int left = n - i - MS_ROWS_TILE;
        add((end - begin) / MS_ROWS_BLOCK, tile, x + i, n - i < MS_ROWS_TILE ? n - i: MS_ROWS_TILE, next,
            left <= 0 ? 0 : (int)smaller(left, MS_ROWS_TILE), y + begin);
    }
}

/* ---------------------------------------------------------------- weighted sums for several tokens */

/* What the tokens make of a few rows: of each the rows that are not 0, and their weights, in order. */
struct choice {
    int n;
    int32_t which[VALUES_ROWS];
    float x[VALUES_ROWS];
};

#define TOKENS 64     /* at a time */
#define FEW_TOKENS 16 /* fewer are few */
#define LISTED 512    /* rows that are gathered before they are added */

/* Returns a bit for each row that a token wants. */
static uint32_t choose_rows(const float *x, size_t x_stride, int n_rows, int n_tokens, struct choice *choices) {
    uint32_t wanted = 0;
    for (int t = 0; t < n_tokens; t++, x += x_stride) {
        struct choice *choice = &choices[t];
        int n = 0;
        for (int i = 0; i < n_rows; i++) {
            choice->which[n] = i;
            choice->x[n] = x[i];
            n += x[i] != 0;
            wanted |= (uint32_t)(x[i] != 0) << i;
        }
        choice->n = n;
    }
    return wanted;
}

/* A token's rows alone: while the tokens are few, decoding a row again costs less than writing down its values. */
static void add_active(enum ggml_type type, const uint8_t *matrix, int64_t columns, int n_rows, const float *x, int64_t begin, int64_t end,
                       float *y) {
    int32_t rows[LISTED];
    float factors[LISTED];
    int n = 0;
    for (int i = 0; i < n_rows; i++) {
        rows[n] = i;
        factors[n] = x[i];
        n += x[i] != 0;
        if (n < LISTED && i + 1 < n_rows) continue;
        ms_rows_add(type, matrix, columns, rows, factors, n, begin, end, y);
        n = 0;
    }
}

void ms_rows_add_tokens(enum ggml_type type, const uint8_t *matrix, int64_t columns, int n_rows, const float *x, size_t x_stride,
                        int n_tokens, int64_t begin, int64_t end, float *y, size_t y_stride) {
    const struct ms_rows_set *set = used();
    if (n_tokens < FEW_TOKENS && own(type) >= 0 && set->add[own(type)]) {
        for (int t = 0; t < n_tokens; t++)
            add_active(type, matrix, columns, n_rows, x + (size_t)t * x_stride, begin, end, y + (size_t)t * y_stride);
        return;
    }
    size_t row_bytes = ggml_row_size(type, columns);
    int64_t step = ggml_blck_size(type) > VALUES_COLUMNS / 2 ? VALUES_COLUMNS : VALUES_COLUMNS / 2; /* so that it stays in the L1 cache */
    struct choice choices[TOKENS];
    float values[VALUES_ROWS * VALUES_COLUMNS];
    for (int t = 0; t < n_tokens; t += TOKENS)
        for (int i = 0; i < n_rows; i += VALUES_ROWS) {
            int n = (int)smaller(n_rows - i, VALUES_ROWS), m = (int)smaller(n_tokens - t, TOKENS);
            uint32_t wanted = choose_rows(x + (size_t)t * x_stride + i, x_stride, n, m, choices);
            for (int64_t c = begin; c < end; c += step) {
                int64_t width = smaller(end - c, step);
                for (int r = 0; r < n; r++)
                    if (wanted >> r & 1)
                        decode(set, type, matrix + (size_t)(i + r) * row_bytes + ggml_row_size(type, c), values + r * step, width);
                for (int k = 0; k < m; k++)
                    set->add_values(width, values, (size_t)step, choices[k].which, choices[k].x, choices[k].n, y + (size_t)(t + k) * y_stride + c);
            }
        }
}
