/* permutation.c - tables of bits, and how they are run.
 *
 * A table names the source of every bit; run as it stands it would cost a
 * dozen operations a bit. Almost all of a real one moves whole bytes, though,
 * several at a time. So when a table is opened it is compiled into two lists:
 * copies of 8, 4, 2 or 1 bytes, and for the bytes that are put together from
 * several (scales of 6 bits) pieces, each a mask and a rotation of one byte.
 * The pieces differ for the two directions, the copies do not.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml.h"
#include "message.h"
#include "moestream.h"

#define MAX_ROWS 64
#define MAX_BITS 65536 /* what 16 bits can name */
#define NAME_BYTES 64

/* A byte of the plain side of a run is one of a row's block: the blocks of a run lie apart there. */
struct place {
    uint16_t row;
    uint16_t byte;
};

struct copy {
    struct place plain;
    uint16_t interleaved;
    uint8_t inverted[8];
};

struct piece {
    struct place plain;
    uint16_t interleaved;
    uint8_t mask;     /* of the byte it is taken from */
    uint8_t rotation; /* to the left, then */
    uint8_t inverted; /* of the result */
};

/* The first pieces of bytes set them, the others are added. */
struct pieces {
    struct piece *list;
    int n_first, n;
};

struct ms_permutation {
    char name[NAME_BYTES];
    int type, rows;
    uint32_t n_bits;
    uint16_t *bits;
    uint8_t *inverted;
    int64_t block_columns;
    size_t block_bytes;
    struct copy *copies; /* longest first */
    int n_copies[4];     /* of 8, 4, 2, 1 bytes */
    struct pieces to_interleaved, to_plain;
};

/* ---------------------------------------------------------------- compiling */

/* The byte that byte `to` of the run is a copy of, and which of its bits are inverted; -1 if it is none. */
static int whole_source(const struct ms_permutation *p, uint32_t to, uint8_t *inverted) {
    const uint16_t *bits = p->bits + 8 * to;
    *inverted = 0;
    for (int j = 0; j < 8; j++) {
        if (bits[j] != (bits[0] & ~7) + j) return -1;
        *inverted |= (uint8_t)(p->inverted[8 * to + (uint32_t)j] << j);
    }
    return bits[0] / 8;
}

static struct place place(const struct ms_permutation *p, uint32_t byte) {
    return (struct place){.row = (uint16_t)(byte / p->block_bytes), .byte = (uint16_t)(byte % p->block_bytes)};
}

/* How many bytes from `to` on are copies of successive bytes of one block. */
static uint32_t copied_from(const struct ms_permutation *p, uint32_t to) {
    uint8_t inverted;
    int first = whole_source(p, to, &inverted);
    if (first < 0) return 0;
    uint32_t n = 1, room = (uint32_t)(p->block_bytes - (uint32_t)first % p->block_bytes);
    while (n < room && to + n < p->n_bits / 8 && whole_source(p, to + n, &inverted) == first + (int)n) n++;
    return n;
}

/* Appends the copies of `size` bytes to the n there are: as many of 8 as a
 * stretch holds, then at most one each of 4, 2 and 1. */
static int add_copies(struct ms_permutation *p, int n, uint32_t size) {
    int added = 0;
    for (uint32_t to = 0, length; to < p->n_bits / 8; to += length ? length : 1) {
        length = copied_from(p, to);
        uint32_t begin = size == 8 ? 0 : length & ~(2 * size - 1);
        for (uint32_t i = begin; i < (length & ~(size - 1)); i += size) {
            struct copy *copy = &p->copies[n + added++];
            copy->interleaved = (uint16_t)(to + i);
            for (uint32_t k = 0; k < size; k++) {
                int from = whole_source(p, to + i + k, &copy->inverted[k]);
                if (k == 0) copy->plain = place(p, (uint32_t)from);
            }
        }
    }
    return added;
}

/* Of the byte whose bits come from `bits`: those, none of them `done`, that
 * come from the same byte by the same rotation as the lowest. That byte to *from. */
static struct piece next_piece(const uint16_t *bits, uint8_t *done, uint32_t *from) {
    int lowest = __builtin_ctz(~(unsigned)*done);
    struct piece piece = {.rotation = (uint8_t)((lowest - bits[lowest] % 8) & 7)};
    *from = bits[lowest] / 8u;
    for (int j = lowest; j < 8; j++) {
        int bit = bits[j] % 8;
        if (bits[j] / 8u != *from || ((j - bit) & 7) != piece.rotation) continue;
        piece.mask |= (uint8_t)(1u << bit);
        *done |= (uint8_t)(1u << j);
    }
    return piece;
}

/* The pieces of one direction: bit i of the result is bit bits[i] of what it
 * is made from, for the bytes of the result that no copy has `made`. */
static bool add_pieces(const struct ms_permutation *p, const uint16_t *bits, const uint8_t *inverted, const uint8_t *made, bool to_plain,
                       struct pieces *out) {
    uint32_t n_bytes = p->n_bits / 8, n_single = 0;
    for (uint32_t to = 0; to < n_bytes; to++) n_single += !made[to];
    out->list = calloc((size_t)n_single * 8 + 1, sizeof *out->list);
    if (!out->list) return false;
    for (int pass = 0; pass < 2; pass++) { /* first pieces, then the others */
        for (uint32_t to = 0; to < n_bytes; to++) {
            uint8_t done = made[to] ? 0xff : 0;
            for (bool first = true; done != 0xff; first = false) {
                uint32_t from;
                struct piece piece = next_piece(bits + 8 * to, &done, &from);
                if (first != (pass == 0)) continue;
                piece.plain = place(p, to_plain ? to : from);
                piece.interleaved = (uint16_t)(to_plain ? from : to);
                for (uint32_t j = 0; first && j < 8; j++) piece.inverted |= (uint8_t)(inverted[8 * to + j] << j);
                out->list[out->n++] = piece;
            }
        }
        if (pass == 0) out->n_first = out->n;
    }
    return true;
}

static bool compile(struct ms_permutation *p) {
    size_t n_bytes = p->n_bits / 8;
    bool made = false;
    uint8_t *interleaved_made = calloc(n_bytes, 1), *plain_made = calloc(n_bytes, 1), *back_inverted = malloc(p->n_bits);
    uint16_t *back = malloc(p->n_bits * sizeof *back);
    p->copies = calloc(n_bytes, sizeof *p->copies);
    if (!interleaved_made || !plain_made || !back_inverted || !back || !p->copies) goto end;

    for (int i = 0, n = 0; i < 4; i++) n += p->n_copies[i] = add_copies(p, n, 8u >> i);
    for (uint32_t to = 0; to < n_bytes; to++) {
        uint8_t inverted;
        int from = whole_source(p, to, &inverted);
        if (from >= 0) interleaved_made[to] = plain_made[from] = 1;
    }
    for (uint32_t i = 0; i < p->n_bits; i++) {
        back[p->bits[i]] = (uint16_t)i;
        back_inverted[p->bits[i]] = p->inverted[i];
    }
    made = add_pieces(p, p->bits, p->inverted, interleaved_made, false, &p->to_interleaved) &&
           add_pieces(p, back, back_inverted, plain_made, true, &p->to_plain);
end:
    free(interleaved_made);
    free(plain_made);
    free(back_inverted);
    free(back);
    return made;
}

/* ---------------------------------------------------------------- tables */

static int check_bits(const char *name, const uint16_t *bits, const uint8_t *inverted, size_t n_bits, uint8_t *seen, char *err, size_t errlen) {
    for (size_t i = 0; i < n_bits; i++) {
        if (bits[i] >= n_bits)
            return ms_fail(-EINVAL, err, errlen, "interleaving '%s': bits[%zu] is %u, outside of the %zu bits of a run", name, i, bits[i], n_bits);
        if (seen[bits[i]]++)
            return ms_fail(-EINVAL, err, errlen, "interleaving '%s': not a permutation, bits[%zu] is the second %u", name, i, bits[i]);
        if (inverted[i] > 1)
            return ms_fail(-EINVAL, err, errlen, "interleaving '%s': inverted[%zu] is %u, must be 0 or 1", name, i, inverted[i]);
    }
    return 0;
}

int ms_permutation_from_table(const char *name, int type, int rows, const uint16_t *bits, const uint8_t *inverted, size_t n_bits,
                              struct ms_permutation **out, char *err, size_t errlen) {
    *out = NULL;
    if (type < 0 || type >= GGML_TYPE_COUNT || !ggml_is_quantized((enum ggml_type)type))
        return ms_fail(-EINVAL, err, errlen, "interleaving '%s': type %d is no quantised type of this ggml", name, type);
    size_t block_bytes = ggml_type_size((enum ggml_type)type);
    if (rows < 1 || rows > MAX_ROWS)
        return ms_fail(-EINVAL, err, errlen, "interleaving '%s': %d rows, must be 1 to %d", name, rows, MAX_ROWS);
    size_t run_bits = 8 * block_bytes * (size_t)rows;
    if (run_bits > MAX_BITS || n_bits != run_bits)
        return ms_fail(-EINVAL, err, errlen, "interleaving '%s': a table of %zu bits, but %d blocks of %s have %zu (at most %d can be named)", name,
                       n_bits, rows, ggml_type_name((enum ggml_type)type), run_bits, MAX_BITS);

    int code = -ENOMEM;
    uint8_t *seen = calloc(n_bits, 1);
    struct ms_permutation *p = calloc(1, sizeof *p);
    if (!seen || !p) goto fail;
    code = check_bits(name, bits, inverted, n_bits, seen, err, errlen);
    if (code) goto fail;
    code = -ENOMEM;
    snprintf(p->name, sizeof p->name, "%s", name);
    p->type = type;
    p->rows = rows;
    p->n_bits = (uint32_t)n_bits;
    p->block_columns = ggml_blck_size((enum ggml_type)type);
    p->block_bytes = block_bytes;
    p->bits = malloc(n_bits * sizeof *bits);
    p->inverted = malloc(n_bits);
    if (!p->bits || !p->inverted) goto fail;
    memcpy(p->bits, bits, n_bits * sizeof *bits);
    memcpy(p->inverted, inverted, n_bits);
    if (!compile(p)) goto fail;
    free(seen);
    *out = p;
    return 0;
fail:
    free(seen);
    ms_permutation_free(p);
    return code == -ENOMEM ? ms_fail(code, err, errlen, "interleaving '%s': out of memory", name) : code;
}

struct ms_permutation_description ms_permutation_describe(const struct ms_permutation *p) {
    return (struct ms_permutation_description){.name = p->name,
                                               .type = p->type,
                                               .rows = p->rows,
                                               .bits = p->bits,
                                               .inverted = p->inverted,
                                               .n_bits = p->n_bits,
                                               .block_columns = (int)p->block_columns};
}

bool ms_permutation_equal(const struct ms_permutation *a, const struct ms_permutation *b) {
    return a->type == b->type && a->rows == b->rows && a->n_bits == b->n_bits && memcmp(a->bits, b->bits, a->n_bits * sizeof *a->bits) == 0 &&
           memcmp(a->inverted, b->inverted, a->n_bits) == 0;
}

void ms_permutation_free(struct ms_permutation *p) {
    if (!p) return;
    free(p->bits);
    free(p->inverted);
    free(p->copies);
    free(p->to_interleaved.list);
    free(p->to_plain.list);
    free(p);
}

/* ---------------------------------------------------------------- running */

/* `size` and `to_plain` are constants where this is called: each call becomes a loop of plain moves. */
static inline __attribute__((always_inline)) const struct copy *run_copies(const struct copy *copy, int n, size_t size, bool to_plain,
                                                                           uint8_t *const *blocks, uint8_t *run) {
    for (const struct copy *end = copy + n; copy < end; copy++) {
        uint8_t *plain = blocks[copy->plain.row] + copy->plain.byte, *interleaved = run + copy->interleaved;
        uint64_t bytes = 0, inverted;
        memcpy(&bytes, to_plain ? interleaved : plain, size);
        memcpy(&inverted, copy->inverted, sizeof inverted);
        bytes ^= inverted;
        memcpy(to_plain ? plain : interleaved, &bytes, size);
    }
    return copy;
}

static inline __attribute__((always_inline)) void run_pieces(const struct pieces *pieces, bool to_plain, uint8_t *const *blocks, uint8_t *run) {
    for (int i = 0; i < pieces->n; i++) {
        const struct piece *piece = &pieces->list[i];
        uint8_t *plain = blocks[piece->plain.row] + piece->plain.byte, *interleaved = run + piece->interleaved;
        unsigned bits = (to_plain ? *interleaved : *plain) & piece->mask;
        uint8_t *to = to_plain ? plain : interleaved;
        uint8_t moved = (uint8_t)((bits << piece->rotation | bits >> (8 - piece->rotation)) ^ piece->inverted);
        *to = i < pieces->n_first ? moved : *to ^ moved;
    }
}

/* Every run of the matrix; only the side that `to_plain` names is written. */
static inline __attribute__((always_inline)) void run_all(const struct ms_permutation *p, uint8_t *plain, uint8_t *run, int64_t columns,
                                                          int64_t rows, bool to_plain) {
    size_t row_bytes = (size_t)(columns / p->block_columns) * p->block_bytes, run_bytes = p->n_bits / 8;
    for (int64_t group = 0; group < rows / p->rows; group++, plain += row_bytes * (size_t)p->rows) {
        uint8_t *blocks[MAX_ROWS];
        for (int r = 0; r < p->rows; r++) blocks[r] = plain + row_bytes * (size_t)r;
        for (size_t done = 0; done < row_bytes; done += p->block_bytes, run += run_bytes) {
            const struct copy *copies = p->copies;
            copies = run_copies(copies, p->n_copies[0], 8, to_plain, blocks, run);
            copies = run_copies(copies, p->n_copies[1], 4, to_plain, blocks, run);
            copies = run_copies(copies, p->n_copies[2], 2, to_plain, blocks, run);
            run_copies(copies, p->n_copies[3], 1, to_plain, blocks, run);
            run_pieces(to_plain ? &p->to_plain : &p->to_interleaved, to_plain, blocks, run);
            for (int r = 0; r < p->rows; r++) blocks[r] += p->block_bytes;
        }
    }
}

void ms_permutation_apply(const struct ms_permutation *p, const void *plain, void *out, int64_t columns, int64_t rows) {
    run_all(p, (uint8_t *)plain, out, columns, rows, false);
}

void ms_permutation_invert(const struct ms_permutation *p, const void *interleaved, void *out, int64_t columns, int64_t rows) {
    run_all(p, out, (uint8_t *)interleaved, columns, rows, true);
}
