/* kernels.h - ggml's interleaved ("repacked") matrix kernels, on our memory.
 *
 * Where the CPU and the shape allow it ggml multiplies faster with the rows of
 * a matrix interleaved in blocks. It does so for tensors in its own CPU_REPACK
 * buffers only; but what its kernels look at is the tensor's `buffer` and
 * `extra`. So for each matrix shape one prototype tensor is made there, and a
 * view of our memory that carries the prototype's two pointers runs the same
 * kernels, to the same bits.
 */
#ifndef MS_KERNELS_H
#define MS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>

#include "source.h"

struct ggml_backend_buffer_type;
struct ggml_tensor;
struct ms_interleaving;

/* ggml's CPU_REPACK: what is written to tensors in it is interleaved. NULL: this build has none. */
struct ggml_backend_buffer_type *ms_repack_buffer_type(void);

/* The prototypes of the matrices that ggml would interleave in a stock model
 * with `n_experts` experts; none of them where it would not.
 * -ENOMEM; 0 with *out NULL if this build of ggml interleaves nothing. */
int ms_interleaving_open(const struct ms_source *source, struct ms_interleaving **out, char *err, size_t errlen);
void ms_interleaving_close(struct ms_interleaving *interleaving);

/* The prototype for a matrix, or NULL if it runs with plain rows. */
const struct ggml_tensor *ms_interleaving_prototype(const struct ms_interleaving *interleaving, const struct ms_matrix *matrix);

/* Does the file have this matrix as ggml's interleaved kernels want it here? Then what is read is computed as it is. */
bool ms_interleaving_is_stored(const struct ms_interleaving *interleaving, const struct ms_source *source, const struct ms_matrix *matrix);

/* Interleaves one expert's plain bytes from `plain` into `out`, which must not overlap. Any thread. */
void ms_interleave(const struct ggml_tensor *prototype, const struct ms_matrix *matrix, const void *plain, void *out);

#endif
