/* checksum.h - CRC-32C (Castagnoli), as iSCSI and the laid file have it.
 *
 * By the instruction of the CPU where it has one, by tables elsewhere. Both
 * give the same number; any thread.
 */
#ifndef MS_CHECKSUM_H
#define MS_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of n bytes that go on from those whose checksum is `crc`; 0 to begin. */
uint32_t ms_crc32c(uint32_t crc, const void *data, size_t n);

/* The same by tables, whatever the CPU has; for tests. */
uint32_t ms_crc32c_portable(uint32_t crc, const void *data, size_t n);

/* "sse4.2", "arm crc" or "tables": what ms_crc32c uses on this machine. */
const char *ms_crc32c_way(void);

#endif
