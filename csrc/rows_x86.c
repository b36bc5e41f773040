/* The kernels of rows.h for x86: AVX2, AVX-512, and AVX-512 with VNNI.
 *
 * ggml's dot keeps 8 sums, each of 4 neighbouring values of every block, in the
 * lanes of one register, and adds block after block with a fused multiply-add.
 * Sums within a block are of integers, so how they come about does not matter.
 * In AVX-512, one register holds the 8 sums of two rows. */
#include "rows_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define VNNI __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define UNROLL _Pragma("GCC unroll 8")

INLINE int64_t size_of(int type) {
    return type == MS_ROWS_Q4_0 ? sizeof(struct ms_block_q4_0) : sizeof(struct ms_block_q8_0);
}

INLINE const uint8_t *at(const uint8_t *row, int64_t block, int type) {
    return row + block * size_of(type);
}

/* Asks for what `next` has where the blocks from `begin` to `end` are in the rows worked on; a row need not begin with a line. */
INLINE void prefetch(const uint8_t *const *next, int n, int64_t begin, int64_t end, int64_t n_blocks, int64_t step) {
    for (int64_t line = (begin * step + 63) & ~(int64_t)63; line < end * step; line += 64)
        for (int r = 0; r < n; r++) _mm_prefetch((const char *)next[r] + line, _MM_HINT_T0);
    if (end == n_blocks)
        for (int r = 0; r < n; r++) _mm_prefetch((const char *)next[r] + end * step - 1, _MM_HINT_T0);
}

/* The scale of a block. From the table, because converting takes the ports that shuffles need. */
INLINE const float *scale_of(const uint8_t *block) {
    uint16_t half;
    memcpy(&half, block, sizeof half);
    return &ms_half_values[half];
}

/* In ggml's order. */
AVX2 INLINE float sum_of_8(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* ---------------------------------------------------------------- AVX2 */

/* Values of a block: unsigned and 8 too large (Q4_0), or signed. */
AVX2 INLINE __m256i quants_avx2(const uint8_t *block, int type) {
    if (type == MS_ROWS_Q8_0) return _mm256_loadu_si256((const __m256i *)(block + 2));
    __m128i packed = _mm_loadu_si128((const __m128i *)(block + 2));
    return _mm256_and_si256(_mm256_set1_epi8(15), _mm256_inserti128_si256(_mm256_castsi128_si256(packed), _mm_srli_epi16(packed, 4), 1));
}

AVX2 INLINE __m256i sums_of_4(__m256i is_unsigned, __m256i is_signed) {
    return _mm256_madd_epi16(_mm256_set1_epi16(1), _mm256_maddubs_epi16(is_unsigned, is_signed));
}

AVX2 INLINE void dot_avx2(int64_t n_blocks, const uint8_t *const *rows, const uint8_t *const *next, const uint8_t *activations,
                          size_t activation_bytes, float (*out)[MS_ROWS_TILE], int type, int n_rows, int n_activations) {
    __m256 sum[4][2]; /* n_rows x n_activations */
    UNROLL for (int r = 0; r < n_rows; r++) UNROLL for (int a = 0; a < n_activations; a++) sum[r][a] = _mm256_setzero_ps();
    for (int64_t b = 0; b < n_blocks; b++) {
        prefetch(next, n_rows, b, b + 1, n_blocks, size_of(type));
        __m256i y[2], less[2];
        __m256 y_scale[2];
        UNROLL for (int a = 0; a < n_activations; a++) {
            const uint8_t *block = at(activations + (size_t)a * activation_bytes, b, MS_ROWS_Q8_0);
            y[a] = quants_avx2(block, MS_ROWS_Q8_0);
            y_scale[a] = _mm256_broadcast_ss(scale_of(block));
            less[a] = sums_of_4(_mm256_set1_epi8(8), y[a]);
        }
        UNROLL for (int r = 0; r < n_rows; r++) {
            const uint8_t *block = at(rows[r], b, type);
            __m256i x = quants_avx2(block, type);
            __m256 x_scale = _mm256_broadcast_ss(scale_of(block));
            UNROLL for (int a = 0; a < n_activations; a++) {
                __m256i product = type == MS_ROWS_Q4_0 ? _mm256_sub_epi32(sums_of_4(x, y[a]), less[a])
                                                       : sums_of_4(_mm256_sign_epi8(x, x), _mm256_sign_epi8(y[a], x));
                sum[r][a] = _mm256_fmadd_ps(_mm256_mul_ps(x_scale, y_scale[a]), _mm256_cvtepi32_ps(product), sum[r][a]);
            }
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) UNROLL for (int a = 0; a < n_activations; a++) out[a][r] = sum_of_8(sum[r][a]);
}

/* In halves of the tile, two activations at a time: what 16 registers hold. */
AVX2 INLINE void dot_halves_avx2(int64_t n_blocks, const uint8_t *const *rows, const uint8_t *const *next, const uint8_t *activations,
                                 size_t activation_bytes, int n_activations, float (*out)[MS_ROWS_TILE], int type) {
    for (int half = 0; half < MS_ROWS_TILE; half += 4) {
        float part[2][MS_ROWS_TILE];
        for (int a = 0; a < n_activations; a += 2) {
            const uint8_t *y = activations + (size_t)a * activation_bytes;
            int n = n_activations - a < 2 ? 1 : 2;
            if (n == 2) dot_avx2(n_blocks, rows + half, next + half, y, activation_bytes, part, type, 4, 2);
            else dot_avx2(n_blocks, rows + half, next + half, y, activation_bytes, part, type, 4, 1);
            for (int i = 0; i < n; i++)
                for (int r = 0; r < 4; r++) out[a + i][half + r] = part[i][r];
        }
    }
}

AVX2 static void dot_q4_0_avx2(int64_t n_blocks, const uint8_t *const rows[MS_ROWS_TILE], const uint8_t *const next[MS_ROWS_TILE],
                               const uint8_t *activations, size_t activation_bytes, int n_activations, float out[][MS_ROWS_TILE]) {
    dot_halves_avx2(n_blocks, rows, next, activations, activation_bytes, n_activations, out, MS_ROWS_Q4_0);
}

AVX2 static void dot_q8_0_avx2(int64_t n_blocks, const uint8_t *const rows[MS_ROWS_TILE], const uint8_t *const next[MS_ROWS_TILE],
                               const uint8_t *activations, size_t activation_bytes, int n_activations, float out[][MS_ROWS_TILE]) {
    dot_halves_avx2(n_blocks, rows, next, activations, activation_bytes, n_activations, out, MS_ROWS_Q8_0);
}

/* The 32 values of a block; products of a scale and a quant are exact. */
AVX2 INLINE void values_avx2(const uint8_t *block, int type, __m256 w[4]) {
    __m256 scale = _mm256_broadcast_ss(scale_of(block));
    __m256i q = quants_avx2(block, type);
    if (type == MS_ROWS_Q4_0) q = _mm256_sub_epi8(q, _mm256_set1_epi8(8));
    __m128i low = _mm256_castsi256_si128(q), high = _mm256_extracti128_si256(q, 1);
    w[0] = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)));
    w[1] = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(low, 8))));
    w[2] = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)));
    w[3] = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(high, 8))));
}

AVX2 INLINE void add_avx2(int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows, const uint8_t *const *next, int n_next,
                          float *y, int type) {
    for (int64_t b = 0; b < n_blocks; b++, y += MS_ROWS_BLOCK) {
        prefetch(next, n_next, b, b + 1, n_blocks, size_of(type));
        __m256 sum[4], w[4];
        UNROLL for (int i = 0; i < 4; i++) sum[i] = _mm256_loadu_ps(y + 8 * i);
        for (int r = 0; r < n_rows; r++) {
            values_avx2(at(rows[r], b, type), type, w);
            UNROLL for (int i = 0; i < 4; i++) sum[i] = _mm256_fmadd_ps(_mm256_set1_ps(x[r]), w[i], sum[i]);
        }
        UNROLL for (int i = 0; i < 4; i++) _mm256_storeu_ps(y + 8 * i, sum[i]);
    }
}

AVX2 static void add_q4_0_avx2(int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows, const uint8_t *const *next,
                               int n_next, float *y) {
    if (n_rows == MS_ROWS_TILE) add_avx2(n_blocks, rows, x, MS_ROWS_TILE, next, n_next, y, MS_ROWS_Q4_0);
    else add_avx2(n_blocks, rows, x, n_rows, next, n_next, y, MS_ROWS_Q4_0);
}

AVX2 static void add_q8_0_avx2(int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows, const uint8_t *const *next,
                               int n_next, float *y) {
    if (n_rows == MS_ROWS_TILE) add_avx2(n_blocks, rows, x, MS_ROWS_TILE, next, n_next, y, MS_ROWS_Q8_0);
    else add_avx2(n_blocks, rows, x, n_rows, next, n_next, y, MS_ROWS_Q8_0);
}

AVX2 INLINE void decode_avx2(int64_t n_blocks, const uint8_t *row, float *out, int type) {
    for (int64_t b = 0; b < n_blocks; b++) {
        __m256 w[4];
        values_avx2(at(row, b, type), type, w);
        UNROLL for (int i = 0; i < 4; i++) _mm256_storeu_ps(out + b * MS_ROWS_BLOCK + 8 * i, w[i]);
    }
}

AVX2 static void decode_q4_0_avx2(int64_t n_blocks, const uint8_t *row, float *out) {
    decode_avx2(n_blocks, row, out, MS_ROWS_Q4_0);
}

AVX2 static void decode_q8_0_avx2(int64_t n_blocks, const uint8_t *row, float *out) {
    decode_avx2(n_blocks, row, out, MS_ROWS_Q8_0);
}

AVX2 static void add_values_avx2(int64_t columns, const float *values, size_t stride, const int32_t *which, const float *x, int n, float *y) {
    int64_t c = 0;
    for (; c + 64 <= columns; c += 64) {
        __m256 sum[8];
        UNROLL for (int k = 0; k < 8; k++) sum[k] = _mm256_loadu_ps(y + c + 8 * k);
        for (int i = 0; i < n; i++) {
            const float *w = values + (size_t)which[i] * stride + c;
            __m256 factor = _mm256_set1_ps(x[i]);
            UNROLL for (int k = 0; k < 8; k++) sum[k] = _mm256_fmadd_ps(factor, _mm256_loadu_ps(w + 8 * k), sum[k]);
        }
        UNROLL for (int k = 0; k < 8; k++) _mm256_storeu_ps(y + c + 8 * k, sum[k]);
    }
    for (int i = 0; i < n; i++)
        for (int64_t k = c; k < columns; k++) y[k] = __builtin_fmaf(x[i], values[(size_t)which[i] * stride + (size_t)k], y[k]);
}

/* ---------------------------------------------------------------- AVX-512 */

#define UPPER 0xFF00 /* the second row's half, in parts of 4 bytes */
#define BLOCKS 4     /* of a row, for sums */

/* Values of two rows' blocks, unsigned: 8 (Q4_0) or 128 (Q8_0) too large. */
VNNI INLINE __m512i quants_vnni(const uint8_t *first, const uint8_t *second, int type) {
    if (type == MS_ROWS_Q8_0) {
        __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(first + 2)));
        both = _mm512_mask_broadcast_i64x4(both, 0xF0, _mm256_loadu_si256((const __m256i *)(second + 2)));
        return _mm512_xor_si512(both, _mm512_set1_epi8(-128));
    }
    __m512i both = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(first + 2)));
    both = _mm512_mask_broadcast_i32x4(both, UPPER, _mm_loadu_si128((const __m128i *)(second + 2)));
    __m512i shifts = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0);
    return _mm512_and_si512(_mm512_set1_epi8(15), _mm512_srlv_epi64(both, shifts));
}

VNNI INLINE __m512 scales_vnni(const uint8_t *first, const uint8_t *second) {
    return _mm512_mask_broadcastss_ps(_mm512_set1_ps(*scale_of(first)), UPPER, _mm_load_ss(scale_of(second)));
}

VNNI INLINE void dot_vnni(int64_t n_blocks, const uint8_t *const *rows, const uint8_t *const *next, const uint8_t *activations,
                          size_t activation_bytes, float (*out)[MS_ROWS_TILE], int type, int n_activations) {
    enum { PAIRS = MS_ROWS_TILE / 2 };
    __m512 sum[PAIRS][MS_ACTIVATIONS_TILE];
    UNROLL for (int p = 0; p < PAIRS; p++) UNROLL for (int a = 0; a < n_activations; a++) sum[p][a] = _mm512_setzero_ps();
    __m512i bias = _mm512_set1_epi8(type == MS_ROWS_Q4_0 ? 8 : -128);
    for (int64_t b = 0; b < n_blocks; b++) {
        prefetch(next, MS_ROWS_TILE, b, b + 1, n_blocks, size_of(type));
        __m512i x[PAIRS];
        __m512 scale[PAIRS];
        UNROLL for (int p = 0; p < PAIRS; p++) {
            const uint8_t *first = at(rows[2 * p], b, type), *second = at(rows[2 * p + 1], b, type);
            x[p] = quants_vnni(first, second, type);
            scale[p] = scales_vnni(first, second);
        }
        UNROLL for (int a = 0; a < n_activations; a++) {
            const uint8_t *block = at(activations + (size_t)a * activation_bytes, b, MS_ROWS_Q8_0);
            __m512i y = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(block + 2)));
            __m512 y_scale = _mm512_set1_ps(*scale_of(block));
            __m512i less = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_dpbusd_epi32(_mm512_setzero_si512(), bias, y));
            UNROLL for (int p = 0; p < PAIRS; p++) {
                __m512 product = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(less, x[p], y));
                sum[p][a] = _mm512_fmadd_ps(_mm512_mul_ps(scale[p], y_scale), product, sum[p][a]);
            }
        }
    }
    UNROLL for (int p = 0; p < PAIRS; p++) UNROLL for (int a = 0; a < n_activations; a++) {
        out[a][2 * p] = sum_of_8(_mm512_castps512_ps256(sum[p][a]));
        out[a][2 * p + 1] = sum_of_8(_mm512_extractf32x8_ps(sum[p][a], 1));
    }
}

VNNI INLINE void dot_any_vnni(int64_t n_blocks, const uint8_t *const *rows, const uint8_t *const *next, const uint8_t *activations,
                              size_t activation_bytes, int n_activations, float (*out)[MS_ROWS_TILE], int type) {
    switch (n_activations) {
        case 1: dot_vnni(n_blocks, rows, next, activations, activation_bytes, out, type, 1); break;
        case 2: dot_vnni(n_blocks, rows, next, activations, activation_bytes, out, type, 2); break;
        case 3: dot_vnni(n_blocks, rows, next, activations, activation_bytes, out, type, 3); break;
        default: dot_vnni(n_blocks, rows, next, activations, activation_bytes, out, type, 4); break;
    }
}

VNNI static void dot_q4_0_vnni(int64_t n_blocks, const uint8_t *const rows[MS_ROWS_TILE], const uint8_t *const next[MS_ROWS_TILE],
                               const uint8_t *activations, size_t activation_bytes, int n_activations, float out[][MS_ROWS_TILE]) {
    dot_any_vnni(n_blocks, rows, next, activations, activation_bytes, n_activations, out, MS_ROWS_Q4_0);
}

VNNI static void dot_q8_0_vnni(int64_t n_blocks, const uint8_t *const rows[MS_ROWS_TILE], const uint8_t *const next[MS_ROWS_TILE],
                               const uint8_t *activations, size_t activation_bytes, int n_activations, float out[][MS_ROWS_TILE]) {
    dot_any_vnni(n_blocks, rows, next, activations, activation_bytes, n_activations, out, MS_ROWS_Q8_0);
}

/* The 32 values of a block. The 16 that a Q4_0 block can have are in one register, to look up. */
AVX512 INLINE void values_avx512(const uint8_t *block, int type, __m512 w[2]) {
    __m512 scale = _mm512_set1_ps(*scale_of(block));
    if (type == MS_ROWS_Q8_0) {
        w[0] = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(block + 2)))));
        w[1] = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(block + 18)))));
        return;
    }
    __m512 table = _mm512_mul_ps(scale, _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
    __m512i q = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(block + 2)));
    w[0] = _mm512_permutexvar_ps(q, table); /* looks at the low four bits only */
    w[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), table);
}

/* Blocks b to b + n: so many sums at a time that one is done when its next addition comes. */
AVX512 INLINE void add_blocks_avx512(int64_t b, int n, int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows,
                                     const uint8_t *const *next, int n_next, float *y, int type) {
    __m512 sum[2 * BLOCKS], w[2];
    y += b * MS_ROWS_BLOCK;
    prefetch(next, n_next, b, b + n, n_blocks, size_of(type));
    UNROLL for (int k = 0; k < 2 * n; k++) sum[k] = _mm512_loadu_ps(y + 16 * k);
    UNROLL for (int r = 0; r < n_rows; r++) {
        __m512 factor = _mm512_set1_ps(x[r]);
        UNROLL for (int k = 0; k < n; k++) {
            values_avx512(at(rows[r], b + k, type), type, w);
            sum[2 * k] = _mm512_fmadd_ps(factor, w[0], sum[2 * k]);
            sum[2 * k + 1] = _mm512_fmadd_ps(factor, w[1], sum[2 * k + 1]);
        }
    }
    UNROLL for (int k = 0; k < 2 * n; k++) _mm512_storeu_ps(y + 16 * k, sum[k]);
}

AVX512 INLINE void add_avx512(int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows, const uint8_t *const *next,
                              int n_next, float *y, int type) {
    int64_t b = 0;
    for (; b + BLOCKS <= n_blocks; b += BLOCKS) add_blocks_avx512(b, BLOCKS, n_blocks, rows, x, n_rows, next, n_next, y, type);
    for (; b < n_blocks; b++) add_blocks_avx512(b, 1, n_blocks, rows, x, n_rows, next, n_next, y, type);
}

/* All of a tile at once, then four rows, then one by one. */
AVX512 INLINE void add_rows_avx512(int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows, const uint8_t *const *next,
                                   int n_next, float *y, int type) {
    int r = 0;
    if (n_rows == MS_ROWS_TILE) {
        add_avx512(n_blocks, rows, x, MS_ROWS_TILE, next, n_next, y, type);
        return;
    }
    if (n_rows >= 4) {
        add_avx512(n_blocks, rows, x, 4, next, n_next, y, type);
        r = 4;
    }
    for (; r < n_rows; r++) add_avx512(n_blocks, rows + r, x + r, 1, next, 0, y, type);
}

AVX512 static void add_q4_0_avx512(int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows, const uint8_t *const *next,
                                   int n_next, float *y) {
    add_rows_avx512(n_blocks, rows, x, n_rows, next, n_next, y, MS_ROWS_Q4_0);
}

AVX512 static void add_q8_0_avx512(int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows, const uint8_t *const *next,
                                   int n_next, float *y) {
    add_rows_avx512(n_blocks, rows, x, n_rows, next, n_next, y, MS_ROWS_Q8_0);
}

AVX512 INLINE void decode_avx512(int64_t n_blocks, const uint8_t *row, float *out, int type) {
    for (int64_t b = 0; b < n_blocks; b++) {
        __m512 w[2];
        values_avx512(at(row, b, type), type, w);
        _mm512_storeu_ps(out + b * MS_ROWS_BLOCK, w[0]);
        _mm512_storeu_ps(out + b * MS_ROWS_BLOCK + 16, w[1]);
    }
}

AVX512 static void decode_q4_0_avx512(int64_t n_blocks, const uint8_t *row, float *out) {
    decode_avx512(n_blocks, row, out, MS_ROWS_Q4_0);
}

AVX512 static void decode_q8_0_avx512(int64_t n_blocks, const uint8_t *row, float *out) {
    decode_avx512(n_blocks, row, out, MS_ROWS_Q8_0);
}

AVX512 static void add_values_avx512(int64_t columns, const float *values, size_t stride, const int32_t *which, const float *x, int n,
                                     float *y) {
    int64_t c = 0;
    for (; c + 128 <= columns; c += 128) {
        __m512 sum[8];
        UNROLL for (int k = 0; k < 8; k++) sum[k] = _mm512_loadu_ps(y + c + 16 * k);
        for (int i = 0; i < n; i++) {
            const float *w = values + (size_t)which[i] * stride + c;
            __m512 factor = _mm512_set1_ps(x[i]);
            UNROLL for (int k = 0; k < 8; k++) sum[k] = _mm512_fmadd_ps(factor, _mm512_loadu_ps(w + 16 * k), sum[k]);
        }
        UNROLL for (int k = 0; k < 8; k++) _mm512_storeu_ps(y + c + 16 * k, sum[k]);
    }
    add_values_avx2(columns - c, values + c, stride, which, x, n, y + c);
}

/* ---------------------------------------------------------------- which there are */

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

static bool has_vnni(void) {
    return has_avx512() && __builtin_cpu_supports("avx512vnni");
}

const struct ms_rows_set ms_rows_sets[] = {
    {.name = "avx512vnni",
     .is_here = has_vnni,
     .dot = {{dot_q4_0_vnni}, {dot_q8_0_vnni}},
     .add = {add_q4_0_avx512, add_q8_0_avx512},
     .decode = {decode_q4_0_avx512, decode_q8_0_avx512},
     .add_values = add_values_avx512},
    {.name = "avx512",
     .is_here = has_avx512,
     .dot = {{dot_q4_0_avx2}, {dot_q8_0_avx2}},
     .add = {add_q4_0_avx512, add_q8_0_avx512},
     .decode = {decode_q4_0_avx512, decode_q8_0_avx512},
     .add_values = add_values_avx512},
    {.name = "avx2",
     .is_here = has_avx2,
     .dot = {{dot_q4_0_avx2}, {dot_q8_0_avx2}},
     .add = {add_q4_0_avx2, add_q8_0_avx2},
     .decode = {decode_q4_0_avx2, decode_q8_0_avx2},
     .add_values = add_values_avx2},
    {0},
};

#endif
