/* Prints, as one JSON object a line, for each instruction set that this
 * machine has row kernels for (csrc/rows.h): what it uses, how many dots have
 * not the bits of ggml's vec_dot, and how many sums not those of the portable
 * kernels; of how many. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-cpu.h"
#include "ggml.h"
#include "rows.h"

enum { ROWS = 37, TOKENS = 17, MOST_COLUMNS = 2080 };

static uint8_t matrix[ROWS * MOST_COLUMNS * 2], activations[TOKENS * MOST_COLUMNS * 2];
static float x[TOKENS * ROWS];
static int32_t list[ROWS];
static uint32_t state = 1;

struct sums {
    float one[MOST_COLUMNS], many[TOKENS][MOST_COLUMNS];
};

static float random_value(void) {
    state = state * 1664525u + 1013904223u;
    return ((float)(state >> 8) / (1 << 23) - 1) * (float)(1 << (state >> 20 & 15));
}

static void quantise(enum ggml_type type, int n_rows, int columns, uint8_t *out) {
    static float values[MOST_COLUMNS];
    for (int r = 0; r < n_rows; r++) {
        for (int c = 0; c < columns; c++) values[c] = c / 32 % 7 == r % 7 ? 0 : random_value();
        ggml_get_type_traits_cpu(type)->from_float(values, out + (size_t)r * ggml_row_size(type, columns), columns);
    }
}

static int different_dots(enum ggml_type type, int columns) {
    static float found[TOKENS][ROWS];
    size_t row_bytes = ggml_row_size(type, columns), activation_bytes = ggml_row_size(GGML_TYPE_Q8_0, columns);
    int n = 0;
    ms_rows_dot(type, columns, matrix, list, 0, ROWS, activations, activation_bytes, TOKENS, found[0], ROWS);
    for (int a = 0; a < TOKENS; a++)
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *row = matrix + (size_t)list[r] * row_bytes, *activation = activations + (size_t)a * activation_bytes;
            float expected;
            ggml_get_type_traits_cpu(type)->vec_dot(columns, &expected, 0, row, 0, activation, 0, 1);
            n += memcmp(&expected, &found[a][r], sizeof expected) != 0;
        }
    return n;
}

static void sum(enum ggml_type type, int columns, struct sums *out) {
    for (int c = 0; c < columns; c++) {
        out->one[c] = (float)c;
        for (int t = 0; t < TOKENS; t++) out->many[t][c] = (float)c;
    }
    ms_rows_add(type, matrix, columns, list, x, ROWS, 0, columns, out->one);
    ms_rows_add_tokens(type, matrix, columns, ROWS, x, ROWS, TOKENS, 0, columns, out->many[0], MOST_COLUMNS);
}

static int different_sums(enum ggml_type type, int columns, const char *name) {
    static struct sums found, expected;
    int n = 0;
    sum(type, columns, &found);
    ms_rows_use("portable");
    sum(type, columns, &expected);
    ms_rows_use(name);
    for (int c = 0; c < columns; c++) n += memcmp(&found.one[c], &expected.one[c], sizeof(float)) != 0;
    for (int t = 0; t < TOKENS; t++)
        for (int c = 0; c < columns; c++) n += memcmp(&found.many[t][c], &expected.many[t][c], sizeof(float)) != 0;
    return n;
}

static void check(const char *name) {
    static const enum ggml_type types[] = {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0};
    static const int lengths[] = {32, 64, 96, 768, MOST_COLUMNS};
    int dots = 0, sums = 0, n = 0;
    ms_rows_use(name);
    for (int t = 0; t < 2; t++)
        for (int l = 0; l < 5; l++, n++) {
            quantise(types[t], ROWS, lengths[l], matrix);
            quantise(GGML_TYPE_Q8_0, TOKENS, lengths[l], activations);
            dots += different_dots(types[t], lengths[l]);
            sums += different_sums(types[t], lengths[l], name);
        }
    printf("{\"set\": \"%s\", \"kernels\": \"%s\", \"matrices\": %d, \"different_dots\": %d, \"different_sums\": %d}\n", name, ms_rows_kernels(),
           n, dots, sums);
}

int main(void) {
    char names[256];
    for (int i = 0; i < ROWS; i++) list[i] = i * 5 % ROWS;
    for (int i = 0; i < TOKENS * ROWS; i++) x[i] = i % 3 ? random_value() : 0;
    snprintf(names, sizeof names, "%s", ms_rows_available());
    for (char *rest = NULL, *name = strtok_r(names, " ", &rest); name; name = strtok_r(NULL, " ", &rest)) check(name);
    return 0;
}
