/* pacer.h - a slower disk than there is, for measuring.
 *
 * What a read brought is handed on when a disk of the given rate would have
 * brought it: one read after the other, each beginning when it was asked for
 * or when the one before is done. Unlike a limit of the kernel's, which lets a
 * disk that was idle make up for it, such a disk never catches up.
 */
#ifndef MS_PACER_H
#define MS_PACER_H

#include <stdint.h>

#include "reader.h"

struct ms_pacer;
struct ms_pacer *ms_pacer_start(void); /* NULL: out of memory */
/* Bytes per second; 0: as fast as they come. Any thread. */
void ms_pacer_set_rate(struct ms_pacer *pacer, uint64_t rate);
/* A read has ended. It is the pacer's until `arrived` is called, on the pacer's thread. */
void ms_pacer_add(struct ms_pacer *pacer, struct ms_read *read, int status, void (*arrived)(struct ms_read *read, int status));
/* Hands on what is left at once, and ends. */
void ms_pacer_stop(struct ms_pacer *pacer);

#endif
