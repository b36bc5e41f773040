/* virtual_gguf.h - the stream that llama.cpp loads a model from.
 *
 * It shows one ordinary GGUF whatever the files on disk hold: the source's
 * virtual header, then the tensors. Dense tensors are read through. A seek to
 * the first byte of an expert tensor answers "end of file"; llama.cpp then
 * reads min(length, size - position) = 0 bytes and goes on, so that loading
 * touches no expert and takes the time of the dense part.
 *
 * Stdio rounds seeks down to a multiple of its buffer, so every tensor of the
 * virtual GGUF is aligned to the buffer's size and such a seek is exact.
 * (Unbuffered would be exact too, but reads a byte at a time.)
 */
#ifndef MS_VIRTUAL_GGUF_H
#define MS_VIRTUAL_GGUF_H

#include <stdio.h>

#include "source.h"

/* The source must outlive the stream. A read that fails leaves its sentence in
 * `err` (which must outlive it too) beside the stdio error. NULL: out of memory. */
FILE *ms_virtual_gguf_open(const struct ms_source *source, char *err, size_t errlen);

#endif
