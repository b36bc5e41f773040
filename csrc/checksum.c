#include "checksum.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define INSTRUCTION "sse4.2"
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#define STEP_1(crc, byte) _mm_crc32_u8(crc, byte)
#define STEP_8(crc, word) (uint32_t) _mm_crc32_u64(crc, word)
static bool has_instruction(void) { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define INSTRUCTION "arm crc"
#define WITH_INSTRUCTION __attribute__((target("+crc")))
#define STEP_1(crc, byte) __crc32cb(crc, byte)
#define STEP_8(crc, word) __crc32cd(crc, word)
#define HWCAP_CRC32_BIT (1ul << 7) /* of the kernel's ABI; old C libraries do not name it */
static bool has_instruction(void) { return getauxval(AT_HWCAP) & HWCAP_CRC32_BIT; }
#endif

#define POLYNOMIAL 0x82f63b78u /* x^32 left out, bit 31 is x^0 */
/* The instruction has a latency of three cycles and one can begin in each, so
 * three stretches of this length are summed at a time. */
#define STRETCH 2048

/* by_distance[k][b]: what byte b contributes k bytes further on. */
static uint32_t by_distance[8][256];
/* across_stretch[k][b]: what byte k of a sum, being b, becomes after STRETCH zero bytes. */
static uint32_t across_stretch[4][256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t after_byte(uint32_t sum, uint8_t byte) { return by_distance[0][(uint8_t)(sum ^ byte)] ^ sum >> 8; }

static void make_tables(void) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t sum = b;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? POLYNOMIAL : 0);
        by_distance[0][b] = sum;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t b = 0; b < 256; b++) by_distance[k][b] = after_byte(by_distance[k - 1][b], 0);
    for (int bit = 0; bit < 32; bit++) {
        uint32_t sum = 1u << bit;
        for (int i = 0; i < STRETCH; i++) sum = after_byte(sum, 0);
        /* linear: an entry is the sum of those of its bits, and those without this bit are done */
        uint32_t *table = across_stretch[bit / 8];
        for (uint32_t b = 0; b < 1u << bit % 8; b++) table[b | 1u << bit % 8] = table[b] ^ sum;
    }
}

/* ---------------------------------------------------------------- tables */

static uint64_t little_endian_word(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static uint32_t sum_by_tables(uint32_t sum, const uint8_t *p, size_t n) {
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word = little_endian_word(p) ^ sum;
        sum = 0;
        for (int k = 0; k < 8; k++) sum ^= by_distance[7 - k][(uint8_t)(word >> 8 * k)];
    }
    for (; n; n--) sum = after_byte(sum, *p++);
    return sum;
}

uint32_t ms_crc32c_portable(uint32_t crc, const void *data, size_t n) {
    pthread_once(&once, make_tables);
    return ~sum_by_tables(~crc, data, n);
}

/* ---------------------------------------------------------------- instruction */

#ifdef INSTRUCTION

static uint32_t shifted(uint32_t sum) {
    return across_stretch[0][(uint8_t)sum] ^ across_stretch[1][(uint8_t)(sum >> 8)] ^ across_stretch[2][(uint8_t)(sum >> 16)] ^
           across_stretch[3][sum >> 24];
}

WITH_INSTRUCTION static uint32_t sum_by_instruction(uint32_t sum, const uint8_t *p, size_t n) {
    for (; n >= 3 * STRETCH; n -= 3 * STRETCH, p += 3 * STRETCH) {
        uint32_t second = 0, third = 0;
        for (size_t i = 0; i < STRETCH; i += 8) {
            sum = STEP_8(sum, little_endian_word(p + i));
            second = STEP_8(second, little_endian_word(p + i + STRETCH));
            third = STEP_8(third, little_endian_word(p + i + 2 * STRETCH));
        }
        sum = shifted(shifted(sum) ^ second) ^ third;
    }
    for (; n >= 8; n -= 8, p += 8) sum = STEP_8(sum, little_endian_word(p));
    for (; n; n--) sum = STEP_1(sum, *p++);
    return sum;
}

uint32_t ms_crc32c(uint32_t crc, const void *data, size_t n) {
    if (!has_instruction()) return ms_crc32c_portable(crc, data, n);
    if (n >= 3 * STRETCH) pthread_once(&once, make_tables);
    return ~sum_by_instruction(~crc, data, n);
}

const char *ms_crc32c_way(void) { return has_instruction() ? INSTRUCTION : "tables"; }

#else

uint32_t ms_crc32c(uint32_t crc, const void *data, size_t n) { return ms_crc32c_portable(crc, data, n); }

const char *ms_crc32c_way(void) { return "tables"; }

#endif
