/* huge_pages.h - huge pages for memory that is already full.
 *
 * Asking for huge pages before memory is touched makes the first touch wait
 * for the kernel to find two free megabytes, which on a machine whose memory
 * is full of page cache means compacting: filling a cache then runs at a
 * fifth of the disk's speed. So the pool is filled with ordinary pages, and a
 * thread of the lowest priority exchanges them, a huge page at a time, once
 * everything in it has arrived (MADV_COLLAPSE, Linux 6.1). Where the kernel
 * cannot do that the memory stays as it is and is only marked for khugepaged.
 */
#ifndef MS_HUGE_PAGES_H
#define MS_HUGE_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MS_HUGE_PAGE_BYTES ((size_t)2 << 20)

struct ms_huge_range {
    uint8_t *memory; /* on a huge-page boundary */
    size_t bytes;
    /* Is [offset, offset + bytes) full and at rest? Called on the thread. */
    bool (*full)(void *context, size_t offset, size_t bytes);
    void *context;
};

struct ms_huge_pages;

/* Copies the ranges. NULL where there is nothing to do or no thread for it: memory works without. */
struct ms_huge_pages *ms_huge_pages_start(const struct ms_huge_range *ranges, int n_ranges);
/* Ends the thread. The ranges must not be unmapped before. */
void ms_huge_pages_stop(struct ms_huge_pages *pages);

#endif
