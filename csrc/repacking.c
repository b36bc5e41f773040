/* repacking.c - which table a machine's ggml follows.
 *
 * For the running ggml the table is discovered: a few small matrices whose
 * bits are known are stored by it, and where the bits went is the table.
 * Nothing of its rules is copied, so a release that changes them changes the
 * table with them. For other machines the simple layouts are described here
 * (and compared with ggml's by tools/check_arm).
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "kernels.h"
#include "message.h"
#include "moestream.h"

#define PROBE_ROWS 16 /* the most that any table interleaves */
#define CHECK_ROWS 32
#define CHECK_BLOCKS 3
#define MAX_RUN_BITS 65536

static int check_shape(int type, int64_t columns, int64_t rows, char *err, size_t errlen) {
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size((enum ggml_type)type) == 0)
        return ms_fail(-EINVAL, err, errlen, "type %d is none of this ggml", type);
    const char *name = ggml_type_name((enum ggml_type)type);
    int64_t block = ggml_blck_size((enum ggml_type)type);
    if (columns < 1 || rows < 1)
        return ms_fail(-EINVAL, err, errlen, "a matrix of %lld x %lld: columns and rows must be at least 1", (long long)columns, (long long)rows);
    if (columns % block)
        return ms_fail(-EINVAL, err, errlen, "a matrix of %lld columns: not a multiple of the block of %s, %lld", (long long)columns, name,
                       (long long)block);
    int64_t bytes;
    if (__builtin_mul_overflow(columns, rows, &bytes) || __builtin_mul_overflow(bytes, (int64_t)ggml_type_size((enum ggml_type)type), &bytes))
        return ms_fail(-EINVAL, err, errlen, "a matrix of %lld x %lld: too large", (long long)columns, (long long)rows);
    return 0;
}

/* ---------------------------------------------------------------- watching ggml */

/* A tensor as ggml would place one of that shape, with its own choice of
 * kernel, but whose contents are a small matrix of ours. */
struct probe {
    struct ggml_context *context;
    ggml_backend_buffer_t buffer;
    struct ggml_tensor *tensor; /* NULL: ggml leaves that shape plain */
};

static void probe_close(struct probe *probe) {
    ggml_backend_buffer_free(probe->buffer);
    ggml_free(probe->context);
}

static int probe_open(struct probe *probe, enum ggml_type type, int64_t columns, int64_t rows) {
    *probe = (struct probe){0};
    ggml_backend_buffer_type_t repack = ms_repack_buffer_type();
    if (!repack) return 0;
    probe->context = ggml_init((struct ggml_init_params){.mem_size = ggml_tensor_overhead() * 2, .no_alloc = true});
    probe->buffer = ggml_backend_buft_alloc_buffer(repack, 64); /* what it writes to is ours */
    if (!probe->context || !probe->buffer) {
        probe_close(probe);
        return -ENOMEM;
    }
    struct ggml_tensor *tensor = ggml_new_tensor_2d(probe->context, type, columns, rows);
    tensor->buffer = probe->buffer;
    tensor->data = ggml_backend_buffer_get_base(probe->buffer);
    ggml_backend_buffer_init_tensor(probe->buffer, tensor);
    if (tensor->extra) probe->tensor = tensor;
    return 0;
}

/* Has ggml store a matrix of so many block columns and rows. */
static void store(const struct probe *probe, int64_t block_columns, int64_t rows, const uint8_t *plain, uint8_t *out) {
    struct ggml_tensor matrix = *probe->tensor;
    matrix.ne[0] = block_columns * ggml_blck_size(matrix.type);
    matrix.ne[1] = rows;
    matrix.nb[1] = ggml_row_size(matrix.type, matrix.ne[0]);
    matrix.nb[2] = matrix.nb[3] = matrix.nb[1] * (size_t)rows;
    matrix.data = out;
    ggml_backend_tensor_set(&matrix, plain, 0, ggml_nbytes(&matrix));
}

static int bit_of(const uint8_t *bytes, uint32_t bit) { return bytes[bit / 8] >> bit % 8 & 1; }

/* One block column of PROBE_ROWS rows. All zero, what comes out is the
 * inverted bits; and with bit b of its own number in every bit, what comes out
 * is bit b of where each came from. */
static void watch(const struct probe *probe, uint32_t n_bits, uint16_t *bits, uint8_t *inverted, uint8_t *plain, uint8_t *stored) {
    memset(plain, 0, n_bits / 8);
    store(probe, 1, PROBE_ROWS, plain, stored);
    for (uint32_t i = 0; i < n_bits; i++) {
        inverted[i] = (uint8_t)bit_of(stored, i);
        bits[i] = 0;
    }
    for (int b = 0; (n_bits - 1) >> b; b++) {
        memset(plain, 0, n_bits / 8);
        for (uint32_t i = 0; i < n_bits; i++) plain[i / 8] |= (uint8_t)((i >> b & 1) << i % 8);
        store(probe, 1, PROBE_ROWS, plain, stored);
        for (uint32_t i = 0; i < n_bits; i++) bits[i] |= (uint16_t)((bit_of(stored, i) ^ inverted[i]) << b);
    }
}

/* Whether the first n bits say what all bits do: each run of n is the first again. */
static bool repeats(const uint16_t *bits, const uint8_t *inverted, uint32_t n_bits, uint32_t n) {
    for (uint32_t i = 0; i < n_bits; i++)
        if (bits[i] != bits[i % n] + i / n * n || bits[i % n] >= n || inverted[i] != inverted[i % n]) return false;
    return true;
}

/* Whether the table gives what ggml gives, for arbitrary bytes of a larger matrix. -ENOMEM. */
static int agrees(const struct ms_permutation *table, const struct probe *probe) {
    int64_t columns = CHECK_BLOCKS * ggml_blck_size(probe->tensor->type);
    size_t size_bytes = ggml_row_size(probe->tensor->type, columns) * CHECK_ROWS;
    uint8_t *plain = malloc(3 * size_bytes);
    if (!plain) return -ENOMEM;
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (size_t i = 0; i < size_bytes; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        plain[i] = (uint8_t)(state >> 56);
    }
    store(probe, CHECK_BLOCKS, CHECK_ROWS, plain, plain + size_bytes);
    ms_permutation_apply(table, plain, plain + 2 * size_bytes, columns, CHECK_ROWS);
    int same = memcmp(plain + size_bytes, plain + 2 * size_bytes, size_bytes) == 0;
    free(plain);
    return same;
}

/* ---------------------------------------------------------------- names */

/* The most bytes of a row that stay together. */
static uint32_t longest_copy(const uint16_t *bits, uint32_t n_bits) {
    uint32_t longest = 0;
    for (uint32_t begin = 0, end; begin < n_bits; begin = end) {
        for (end = begin + 1; end < n_bits && bits[end] == bits[end - 1] + 1; end++) {}
        if (end - begin > longest) longest = end - begin;
    }
    return longest / 8;
}

static int make(enum ggml_type type, int rows, const uint16_t *bits, const uint8_t *inverted, uint32_t n_bits, struct ms_permutation **out,
                char *err, size_t errlen) {
    char name[64];
    uint32_t chunk_bytes = longest_copy(bits, n_bits);
    if (chunk_bytes >= 4)
        snprintf(name, sizeof name, "%s %dx%u", ggml_type_name(type), rows, chunk_bytes);
    else
        snprintf(name, sizeof name, "%s %d rows", ggml_type_name(type), rows);
    return ms_permutation_from_table(name, (int)type, rows, bits, inverted, n_bits, out, err, errlen);
}

static bool is_permutation(const uint16_t *bits, uint32_t n_bits, uint8_t *seen) {
    memset(seen, 0, n_bits);
    for (uint32_t i = 0; i < n_bits; i++)
        if (bits[i] >= n_bits || seen[bits[i]]++) return false;
    return true;
}

/* ---------------------------------------------------------------- this machine */

/* ggml logs every tensor that it repacks; a probe is none of the user's. */
static void say_nothing(enum ggml_log_level level, const char *text, void *unused) {
    (void)level;
    (void)text;
    (void)unused;
}

int ms_permutation_native(int type_number, int64_t columns, int64_t rows, struct ms_permutation **out, char *err, size_t errlen) {
    *out = NULL;
    int code = check_shape(type_number, columns, rows, err, errlen);
    if (code) return code;
    enum ggml_type type = (enum ggml_type)type_number;
    size_t block_bytes = ggml_type_size(type);
    if (!ggml_is_quantized(type) || 8 * block_bytes * PROBE_ROWS > MAX_RUN_BITS) return 0;

    ggml_log_callback callback;
    void *user_data;
    ggml_log_get(&callback, &user_data);
    ggml_log_set(say_nothing, NULL);
    uint32_t n_bits = (uint32_t)(8 * block_bytes * PROBE_ROWS);
    struct probe probe;
    uint16_t *bits = malloc(n_bits * sizeof *bits);
    uint8_t *inverted = malloc(n_bits), *seen = malloc(n_bits), *plain = malloc(n_bits / 8), *stored = malloc(n_bits / 8);
    if (!bits || !inverted || !seen || !plain || !stored || probe_open(&probe, type, columns, rows) < 0) {
        code = ms_fail(-ENOMEM, err, errlen, "out of memory for the interleaving of %s", ggml_type_name(type));
        goto end;
    }
    if (probe.tensor) {
        watch(&probe, n_bits, bits, inverted, plain, stored);
        for (int r = 4; r <= PROBE_ROWS && !*out && code == 0; r *= 2) {
            uint32_t n = (uint32_t)(8 * block_bytes) * (uint32_t)r;
            if (rows % r || !repeats(bits, inverted, n_bits, n) || !is_permutation(bits, n, seen)) continue;
            code = make(type, r, bits, inverted, n, out, err, errlen);
        }
        int same = *out ? agrees(*out, &probe) : 1;
        if (same < 0) code = ms_fail(same, err, errlen, "out of memory for the interleaving of %s", ggml_type_name(type));
        if (same <= 0) {
            ms_permutation_free(*out);
            *out = NULL;
        }
    }
    probe_close(&probe);
end:
    ggml_log_set(callback, user_data);
    free(bits);
    free(inverted);
    free(seen);
    free(plain);
    free(stored);
    return code;
}

const char *ms_native_target(void) {
    if (ggml_cpu_has_avx512()) return "x86-avx512";
    if (ggml_cpu_has_avx2()) return "x86-avx2";
    if (ggml_cpu_has_neon() && ggml_cpu_has_matmul_int8()) return "arm-i8mm";
    if (ggml_cpu_has_neon() && ggml_cpu_has_dotprod()) return "arm-dotprod";
    return "plain";
}

/* ---------------------------------------------------------------- other machines */

/* What the kernels of a target take: rows that are interleaved, in chunks of so many bytes. */
struct choice {
    enum ggml_type type;
    int rows, chunk_bytes;
};

/* arm-i8mm is what most such machines do; with SVE of 256 bits ggml stores Q4_0
 * as on x86, which ms_permutation_native finds there. */
static const struct target {
    const char *name;
    struct choice choices[8]; /* up to rows 0 */
} targets[] = {
    {"plain", {{.rows = 0}}},
    {"x86-avx2", {{GGML_TYPE_Q4_0, 8, 8}, {GGML_TYPE_Q4_K, 8, 8}, {GGML_TYPE_IQ4_NL, 8, 8}, {GGML_TYPE_MXFP4, 8, 8}}},
    {"x86-avx512",
     {{GGML_TYPE_Q4_0, 8, 8}, {GGML_TYPE_Q4_K, 8, 8}, {GGML_TYPE_IQ4_NL, 8, 8}, {GGML_TYPE_MXFP4, 8, 8}, {GGML_TYPE_Q2_K, 8, 8}}},
    {"arm-dotprod",
     {{GGML_TYPE_Q4_0, 4, 4},
      {GGML_TYPE_Q8_0, 4, 4},
      {GGML_TYPE_IQ4_NL, 4, 4},
      {GGML_TYPE_MXFP4, 4, 4},
      {GGML_TYPE_Q4_K, 8, 4},
      {GGML_TYPE_Q5_K, 8, 4},
      {GGML_TYPE_Q6_K, 8, 4}}},
    {"arm-i8mm",
     {{GGML_TYPE_Q4_0, 4, 8},
      {GGML_TYPE_Q8_0, 4, 8},
      {GGML_TYPE_IQ4_NL, 4, 4},
      {GGML_TYPE_MXFP4, 4, 4},
      {GGML_TYPE_Q4_K, 8, 8},
      {GGML_TYPE_Q5_K, 8, 8},
      {GGML_TYPE_Q6_K, 8, 8}}},
};

static const struct target *find_target(const char *name) {
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++)
        if (strcmp(targets[i].name, name) == 0) return &targets[i];
    return NULL;
}

static const struct choice *choice_of(const struct target *target, enum ggml_type type) {
    for (const struct choice *choice = target->choices; choice->rows; choice++)
        if (choice->type == type) return choice;
    return NULL;
}

/* Blocks that are a scale and then quants: the scales of all rows first, then
 * the quants, chunk by chunk from each row in turn. The four bits of Q4_0 are
 * stored as signed numbers, in place of numbers that 8 is to be taken from:
 * the highest bit of each is inverted. Returns 0 bits for other types. */
static uint32_t described(const struct choice *choice, uint16_t *bits, uint8_t *inverted) {
    uint32_t scale_bytes;
    switch (choice->type) {
    case GGML_TYPE_Q4_0:
    case GGML_TYPE_Q8_0:
    case GGML_TYPE_IQ4_NL: scale_bytes = 2; break;
    case GGML_TYPE_MXFP4: scale_bytes = 1; break;
    default: return 0;
    }
    uint32_t rows = (uint32_t)choice->rows, chunk = (uint32_t)choice->chunk_bytes, block = (uint32_t)ggml_type_size(choice->type);
    for (uint32_t to = 0; to < rows * block; to++) {
        uint32_t row = to / scale_bytes, byte = to % scale_bytes;
        bool quant = to >= rows * scale_bytes;
        if (quant) {
            uint32_t i = to - rows * scale_bytes;
            row = i / chunk % rows;
            byte = scale_bytes + i / (chunk * rows) * chunk + i % chunk;
        }
        for (uint32_t j = 0; j < 8; j++) {
            bits[8 * to + j] = (uint16_t)(8 * (row * block + byte) + j);
            inverted[8 * to + j] = quant && choice->type == GGML_TYPE_Q4_0 && j % 4 == 3;
        }
    }
    return 8 * rows * block;
}

int ms_permutation_for_target(const char *name, int type, int64_t columns, int64_t rows, struct ms_permutation **out, char *err, size_t errlen) {
    *out = NULL;
    int code = check_shape(type, columns, rows, err, errlen);
    if (code) return code;
    const struct target *target = find_target(name), *native = find_target(ms_native_target());
    if (!target)
        return ms_fail(-EINVAL, err, errlen, "no target '%s': plain, x86-avx2, x86-avx512, arm-dotprod or arm-i8mm", name);
    const struct choice *choice = choice_of(target, (enum ggml_type)type), *here = choice_of(native, (enum ggml_type)type);
    if (target == native) return strcmp(name, "plain") == 0 ? 0 : ms_permutation_native(type, columns, rows, out, err, errlen);
    if (!choice || rows % choice->rows) return 0;

    uint16_t bits[8 * 8 * 34]; /* eight blocks of Q8_0, the largest described */
    uint8_t inverted[sizeof bits / sizeof *bits];
    uint32_t n_bits = described(choice, bits, inverted);
    if (n_bits) return make(choice->type, choice->rows, bits, inverted, n_bits, out, err, errlen);
    bool same = here && here->rows == choice->rows && here->chunk_bytes == choice->chunk_bytes;
    return same ? ms_permutation_native(type, columns, rows, out, err, errlen) : 0;
}
