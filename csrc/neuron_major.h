/* neuron_major.h - products with a down matrix that is stored transposed.
 *
 * Row n of it is what neuron n adds to the output, quantised along the output.
 * Where the activation left a zero (ReLU does, most of the time), the row is
 * not looked at.
 */
#ifndef MS_NEURON_MAJOR_H
#define MS_NEURON_MAJOR_H

struct ggml_tensor;

/* Computes what GGML_OP_MUL_MAT_ID would, for thread `ith` of `nth`; a ggml_custom_op_t.
 * dst->src[0]: the experts, ne = {outputs, neurons, experts}; src[1]: F32 {neurons, choices or 1, tokens};
 * src[2]: I32 {choices, tokens}, indices of experts. */
void ms_neuron_major_product(struct ggml_tensor *dst, int ith, int nth, void *unused);

#endif
