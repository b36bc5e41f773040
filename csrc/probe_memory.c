/* probe_memory.c - how fast all threads together read memory that no cache holds. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "clock.h"
#include "huge_pages.h"
#include "message.h"
#include "moestream.h"
#include "probe.h"
#include "thread.h"

struct part {
    pthread_t thread;
    const uint8_t *bytes;
    size_t n;
    uint64_t sum;
};

struct ms_memory_probe {
    uint8_t *memory;
    size_t part_bytes;
    int n_threads;
    struct part parts[];
};

/* Vectors of any machine, several sums, so that no addition waits for the one before; what is returned keeps the reads from being left out. */
typedef uint64_t vector __attribute__((vector_size(64)));

static void *add_up(void *argument) {
    struct part *part = argument;
    vector sums[4] = {{0}}, all = {0};
    for (const uint8_t *at = part->bytes, *end = at + part->n; at < end; at += sizeof sums)
        for (int i = 0; i < 4; i++) sums[i] += ((const vector *)at)[i];
    for (int i = 0; i < 4; i++) all += sums[i];
    part->sum = all[0] + all[1] + all[2] + all[3] + all[4] + all[5] + all[6] + all[7];
    return NULL;
}

uint8_t *ms_probe_map(size_t *bytes, bool huge) {
    *bytes = (*bytes + MS_HUGE_PAGE_BYTES - 1) / MS_HUGE_PAGE_BYTES * MS_HUGE_PAGE_BYTES;
    uint8_t *memory = mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
    if (huge) madvise(memory, *bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

int ms_memory_probe_open(uint64_t size_bytes, int n_threads, ms_memory_probe **out, char *err, size_t errlen) {
    struct ms_memory_probe *probe = calloc(1, sizeof *probe + sizeof(struct part) * (size_t)n_threads);
    if (!probe) return ms_fail(-ENOMEM, err, errlen, "out of memory");
    probe->n_threads = n_threads;
    probe->part_bytes = (size_t)(size_bytes / (uint64_t)n_threads) / 4096 * 4096;
    size_t all = probe->part_bytes * (size_t)n_threads;
    probe->memory = ms_probe_map(&all, true);
    if (!probe->memory) {
        free(probe);
        return ms_fail(-ENOMEM, err, errlen, "no %zu MB of memory to measure how fast it is read", all / 1000000);
    }
    memset(probe->memory, 1, all);
    for (int i = 0; i < n_threads; i++) probe->parts[i] = (struct part){.bytes = probe->memory + (size_t)i * probe->part_bytes, .n = probe->part_bytes};
    *out = probe;
    return 0;
}

double ms_memory_probe_pass(ms_memory_probe *probe) {
    int n = 0;
    int64_t begin = ms_now_ns();
    while (n < probe->n_threads - 1 && ms_thread_start(&probe->parts[n].thread, add_up, &probe->parts[n]) == 0) n++;
    for (int i = n; i < probe->n_threads; i++) add_up(&probe->parts[i]);
    for (int i = 0; i < n; i++) pthread_join(probe->parts[i].thread, NULL);
    return (double)probe->part_bytes * probe->n_threads / ((double)(ms_now_ns() - begin) / 1e9);
}

void ms_memory_probe_close(ms_memory_probe *probe) {
    if (!probe) return;
    munmap(probe->memory, probe->part_bytes * (size_t)probe->n_threads);
    free(probe);
}
