/* Prints, as one JSON object a line, what this machine's ggml and our checksum
 * do, for tools/check_arm to compare:
 *
 *     tables TYPE COLUMNS ROWS [TYPE COLUMNS ROWS ...]
 *
 * first the target and the checksums, then for each matrix its table or null. */
#include <stdio.h>
#include <stdlib.h>

#include "checksum.h"
#include "ggml.h"
#include "moestream.h"

static void log_nothing(enum ggml_log_level level, const char *text, void *context) {
    (void)level;
    (void)text;
    (void)context;
}

static void print_checksums(void) {
    enum { N = 20000 };
    static uint8_t bytes[N];
    for (int i = 0; i < N; i++) bytes[i] = (uint8_t)(i * 7 + i / 256);
    printf("{\"target\": \"%s\", \"way\": \"%s\", \"crc32c\": %u, \"portable\": %u, \"known\": %u}\n", ms_native_target(), ms_crc32c_way(),
           ms_crc32c(0, bytes, N), ms_crc32c_portable(0, bytes, N), ms_crc32c(0, "123456789", 9));
}

static bool gives_back(const ms_permutation *table, size_t size_bytes, int64_t columns, int64_t rows) {
    uint8_t *plain = malloc(3 * size_bytes);
    if (!plain) abort();
    for (size_t i = 0; i < size_bytes; i++) plain[i] = (uint8_t)(i * 2654435761u >> 13);
    ms_permutation_apply(table, plain, plain + size_bytes, columns, rows);
    ms_permutation_invert(table, plain + size_bytes, plain + 2 * size_bytes, columns, rows);
    bool same = true;
    for (size_t i = 0; i < size_bytes; i++) same = same && plain[i] == plain[2 * size_bytes + i];
    free(plain);
    return same;
}

static int print_table(int type, int64_t columns, int64_t rows) {
    char err[1024];
    ms_permutation *table;
    if (ms_permutation_native(type, columns, rows, &table, err, sizeof err) < 0) {
        fprintf(stderr, "tables: %s\n", err);
        return 1;
    }
    if (!table) {
        puts("null");
        return 0;
    }
    ms_permutation_description told = ms_permutation_describe(table);
    size_t size_bytes = ggml_row_size((enum ggml_type)type, columns) * (size_t)rows;
    printf("{\"name\": \"%s\", \"rows\": %d, \"gives_back\": %s, \"bits\": [", told.name, told.rows,
           gives_back(table, size_bytes, columns, rows) ? "true" : "false");
    for (uint32_t i = 0; i < told.n_bits; i++) printf(i ? ",%u" : "%u", told.bits[i]);
    printf("], \"inverted\": [");
    for (uint32_t i = 0; i < told.n_bits; i++) printf(i ? ",%u" : "%u", told.inverted[i]);
    puts("]}");
    ms_permutation_free(table);
    return 0;
}

int main(int argc, char **argv) {
    ggml_log_set(log_nothing, NULL);
    print_checksums();
    for (int i = 1; i + 2 < argc; i += 3)
        if (print_table(atoi(argv[i]), atoll(argv[i + 1]), atoll(argv[i + 2]))) return 1;
    return 0;
}
