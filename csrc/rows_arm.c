/* The kernels of rows.h for 64-bit ARM, with the dot product instructions.
 *
 * ggml's dot keeps two registers of 4 sums, one of the blocks with even
 * numbers and one of the odd ones; block after block is added with a fused
 * multiply-add. The last of an odd number of blocks is added alone. */
#include "rows_kernels.h"

#if defined(__aarch64__)

#include <arm_neon.h>
#include <string.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#define UNROLL _Pragma("GCC unroll 16")
#define AT_ONCE 4 /* rows in the registers of a dot */

INLINE int64_t size_of(int type) {
    return type == MS_ROWS_Q4_0 ? sizeof(struct ms_block_q4_0) : sizeof(struct ms_block_q8_0);
}

INLINE const uint8_t *at(const uint8_t *row, int64_t block, int type) {
    return row + block * size_of(type);
}

INLINE float scale_of(const uint8_t *block) {
    __fp16 half;
    memcpy(&half, block, sizeof half);
    return half;
}

/* Asks for what `next` has where the blocks from `begin` to `end` are in the rows worked on; a row need not begin with a line. */
INLINE void prefetch(const uint8_t *const *next, int n, int64_t begin, int64_t end, int64_t n_blocks, int64_t step) {
    for (int64_t line = (begin * step + 63) & ~(int64_t)63; line < end * step; line += 64)
        for (int r = 0; r < n; r++) __builtin_prefetch(next[r] + line);
    if (end == n_blocks)
        for (int r = 0; r < n; r++) __builtin_prefetch(next[r] + end * step - 1);
}

INLINE void quants(const uint8_t *block, int type, int8x16_t q[2]) {
    if (type == MS_ROWS_Q8_0) {
        q[0] = vld1q_s8((const int8_t *)block + 2);
        q[1] = vld1q_s8((const int8_t *)block + 18);
        return;
    }
    uint8x16_t packed = vld1q_u8(block + 2);
    q[0] = vsubq_s8(vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(15))), vdupq_n_s8(8));
    q[1] = vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(packed, 4)), vdupq_n_s8(8));
}

/* ---------------------------------------------------------------- dots */

DOTPROD INLINE int32x4_t sums_of_8(const int8x16_t x[2], const int8x16_t y[2]) {
    return vdotq_s32(vdotq_s32(vdupq_n_s32(0), x[0], y[0]), x[1], y[1]);
}

/* Whether a product is fused with the sum it is added to depends on the compiler that ggml was made with: in the sums of the
 * blocks (Clang fuses), in the last of an odd number of blocks (every compiler that optimises). */
enum { FUSED = 1, LAST_FUSED = 2 };

DOTPROD INLINE float add_last(float sum, const uint8_t *x_block, const uint8_t *y_block, int type, int way) {
    int8x16_t x[2], y[2];
    quants(x_block, type, x);
    quants(y_block, MS_ROWS_Q8_0, y);
    float left = (float)vaddvq_s32(sums_of_8(x, y)), right = scale_of(y_block);
    if (type == MS_ROWS_Q4_0) left *= scale_of(x_block);
    else right *= scale_of(x_block);
    return way & LAST_FUSED ? __builtin_fmaf(left, right, sum) : sum + left * right;
}

DOTPROD INLINE void dot_rows(int64_t n_blocks, const uint8_t *const *rows, const uint8_t *const *next, const uint8_t *activations,
                             size_t activation_bytes, float (*out)[MS_ROWS_TILE], int type, int way, int n_activations) {
    enum { MOST = 2 };
    float32x4_t sum[AT_ONCE][MOST][2];
    UNROLL for (int r = 0; r < AT_ONCE; r++) UNROLL for (int a = 0; a < n_activations; a++) sum[r][a][0] = sum[r][a][1] = vdupq_n_f32(0);
    for (int64_t b = 0; b + 1 < n_blocks; b += 2) {
        prefetch(next, AT_ONCE, b, b + 2, n_blocks - n_blocks % 2, size_of(type));
        UNROLL for (int odd = 0; odd < 2; odd++) {
            int8x16_t y[MOST][2];
            float y_scale[MOST];
            UNROLL for (int a = 0; a < n_activations; a++) {
                const uint8_t *block = at(activations + (size_t)a * activation_bytes, b + odd, MS_ROWS_Q8_0);
                quants(block, MS_ROWS_Q8_0, y[a]);
                y_scale[a] = scale_of(block);
            }
            UNROLL for (int r = 0; r < AT_ONCE; r++) {
                const uint8_t *block = at(rows[r], b + odd, type);
                int8x16_t x[2];
                quants(block, type, x);
                UNROLL for (int a = 0; a < n_activations; a++) {
                    float32x4_t dots = vcvtq_f32_s32(sums_of_8(x, y[a]));
                    float scale = scale_of(block) * y_scale[a];
                    sum[r][a][odd] = way & FUSED ? vfmaq_n_f32(sum[r][a][odd], dots, scale) : vaddq_f32(sum[r][a][odd], vmulq_n_f32(dots, scale));
                }
            }
        }
    }
    UNROLL for (int r = 0; r < AT_ONCE; r++) UNROLL for (int a = 0; a < n_activations; a++) {
        out[a][r] = vaddvq_f32(sum[r][a][0]) + vaddvq_f32(sum[r][a][1]);
        if (n_blocks % 2) {
            const uint8_t *y_block = at(activations + (size_t)a * activation_bytes, n_blocks - 1, MS_ROWS_Q8_0);
            out[a][r] = add_last(out[a][r], at(rows[r], n_blocks - 1, type), y_block, type, way);
        }
    }
}

DOTPROD INLINE void dot_tile(int64_t n_blocks, const uint8_t *const *rows, const uint8_t *const *next, const uint8_t *activations,
                             size_t activation_bytes, int n_activations, float (*out)[MS_ROWS_TILE], int type, int way) {
    for (int r = 0; r < MS_ROWS_TILE; r += AT_ONCE)
        for (int a = 0; a < n_activations; a += 2) {
            const uint8_t *y = activations + (size_t)a * activation_bytes;
            float part[2][MS_ROWS_TILE];
            int n = n_activations - a < 2 ? 1 : 2;
            if (n == 2) dot_rows(n_blocks, rows + r, next + r, y, activation_bytes, part, type, way, 2);
            else dot_rows(n_blocks, rows + r, next + r, y, activation_bytes, part, type, way, 1);
            for (int i = 0; i < n; i++) memcpy(&out[a + i][r], part[i], AT_ONCE * sizeof(float));
        }
}

#define DOT(name, type, way)                                                                                                          \
    DOTPROD static void name(int64_t n_blocks, const uint8_t *const rows[MS_ROWS_TILE], const uint8_t *const next[MS_ROWS_TILE],      \
                             const uint8_t *activations, size_t activation_bytes, int n_activations, float out[][MS_ROWS_TILE]) {     \
        dot_tile(n_blocks, rows, next, activations, activation_bytes, n_activations, out, type, way);                                 \
    }

DOT(dot_q4_0_fused, MS_ROWS_Q4_0, FUSED | LAST_FUSED)
DOT(dot_q4_0_last_fused, MS_ROWS_Q4_0, LAST_FUSED)
DOT(dot_q4_0_apart, MS_ROWS_Q4_0, 0)
DOT(dot_q8_0_fused, MS_ROWS_Q8_0, FUSED | LAST_FUSED)
DOT(dot_q8_0_last_fused, MS_ROWS_Q8_0, LAST_FUSED)
DOT(dot_q8_0_apart, MS_ROWS_Q8_0, 0)

/* ---------------------------------------------------------------- weighted sums */

/* The 32 values of a block; products of a scale and a quant are exact. */
INLINE void values_of(const uint8_t *block, int type, float32x4_t w[8]) {
    int8x16_t q[2];
    float scale = scale_of(block);
    quants(block, type, q);
    UNROLL for (int i = 0; i < 2; i++) {
        int16x8_t low = vmovl_s8(vget_low_s8(q[i])), high = vmovl_high_s8(q[i]);
        w[4 * i] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), scale);
        w[4 * i + 1] = vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(low)), scale);
        w[4 * i + 2] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), scale);
        w[4 * i + 3] = vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(high)), scale);
    }
}

INLINE void add_rows(int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows, const uint8_t *const *next, int n_next, float *y,
                     int type) {
    for (int64_t b = 0; b < n_blocks; b++, y += MS_ROWS_BLOCK) {
        float32x4_t sum[8], w[8];
        prefetch(next, n_next, b, b + 1, n_blocks, size_of(type));
        UNROLL for (int k = 0; k < 8; k++) sum[k] = vld1q_f32(y + 4 * k);
        for (int r = 0; r < n_rows; r++) {
            values_of(at(rows[r], b, type), type, w);
            UNROLL for (int k = 0; k < 8; k++) sum[k] = vfmaq_n_f32(sum[k], w[k], x[r]);
        }
        UNROLL for (int k = 0; k < 8; k++) vst1q_f32(y + 4 * k, sum[k]);
    }
}

static void add_q4_0(int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows, const uint8_t *const *next, int n_next, float *y) {
    add_rows(n_blocks, rows, x, n_rows, next, n_next, y, MS_ROWS_Q4_0);
}

static void add_q8_0(int64_t n_blocks, const uint8_t *const *rows, const float *x, int n_rows, const uint8_t *const *next, int n_next, float *y) {
    add_rows(n_blocks, rows, x, n_rows, next, n_next, y, MS_ROWS_Q8_0);
}

INLINE void decode(int64_t n_blocks, const uint8_t *row, float *out, int type) {
    for (int64_t b = 0; b < n_blocks; b++) {
        float32x4_t w[8];
        values_of(at(row, b, type), type, w);
        UNROLL for (int k = 0; k < 8; k++) vst1q_f32(out + b * MS_ROWS_BLOCK + 4 * k, w[k]);
    }
}

static void decode_q4_0(int64_t n_blocks, const uint8_t *row, float *out) {
    decode(n_blocks, row, out, MS_ROWS_Q4_0);
}

static void decode_q8_0(int64_t n_blocks, const uint8_t *row, float *out) {
    decode(n_blocks, row, out, MS_ROWS_Q8_0);
}

static void add_values(int64_t columns, const float *values, size_t stride, const int32_t *which, const float *x, int n, float *y) {
    int64_t c = 0;
    for (; c + 64 <= columns; c += 64) {
        float32x4_t sum[16];
        UNROLL for (int k = 0; k < 16; k++) sum[k] = vld1q_f32(y + c + 4 * k);
        for (int i = 0; i < n; i++) {
            const float *w = values + (size_t)which[i] * stride + c;
            UNROLL for (int k = 0; k < 16; k++) sum[k] = vfmaq_n_f32(sum[k], vld1q_f32(w + 4 * k), x[i]);
        }
        UNROLL for (int k = 0; k < 16; k++) vst1q_f32(y + c + 4 * k, sum[k]);
    }
    for (int i = 0; i < n; i++)
        for (int64_t k = c; k < columns; k++) y[k] = __builtin_fmaf(x[i], values[(size_t)which[i] * stride + (size_t)k], y[k]);
}

/* ---------------------------------------------------------------- which there are */

static bool has_dotprod(void) {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
    return true;
#else
    return false;
#endif
}

static bool always(void) {
    return true;
}

const struct ms_rows_set ms_rows_sets[] = {
    {.name = "neon-dotprod",
     .is_here = has_dotprod,
     .dot = {{dot_q4_0_fused, dot_q4_0_last_fused, dot_q4_0_apart}, {dot_q8_0_fused, dot_q8_0_last_fused, dot_q8_0_apart}},
     .add = {add_q4_0, add_q8_0},
     .decode = {decode_q4_0, decode_q8_0},
     .add_values = add_values},
    {.name = "neon", .is_here = always, .add = {add_q4_0, add_q8_0}, .decode = {decode_q4_0, decode_q8_0}, .add_values = add_values},
    {0},
};

#endif
