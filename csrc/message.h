/* message.h - how a failure is said.
 *
 * A function that can fail returns 0 or -errno and puts one sentence into the
 * caller's buffer: what failed, on which file, tensor and offset, and what to
 * do about it. The buffer may be NULL.
 */
#ifndef MS_MESSAGE_H
#define MS_MESSAGE_H

#include <stddef.h>

#define MS_MESSAGE_BYTES 1024

/* Formats the sentence and returns `code`, so that a failure is one statement. */
int ms_fail(int code, char *err, size_t errlen, const char *format, ...) __attribute__((format(printf, 4, 5)));

#endif
