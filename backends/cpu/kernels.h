/* What the C files share. Functions named `*_team` are called by every thread of a parallel region
 * together, split the work among them, and end with a barrier. */
#ifndef OCTAVO_KERNELS_H
#define OCTAVO_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "team.h"

#define EXPORT __attribute__((visibility("default")))

/* ---- linear layers ---------------------------------------------------------------------------- */

enum { W_F32 = 0, W_BF16 = 1, W_I8 = 2, W_I4 = 3 };

/* k inputs, n outputs. w: packed weights (see linear.c for the layout of each kind), zeros where an
 * output's place is empty. paired: the outputs are two halves, whose panels alternate. bias: floats in
 * the order of the packed outputs, or NULL. */
typedef struct {
  int64_t k, n, kind, paired;
  const void *w;
  const float *bias;
} linear_t;

/* Where output n is packed: panel * PANEL + lane. */
static inline int64_t packed_place(const linear_t *l, int64_t n) {
  if (!l->paired) return n;
  const int64_t half = l->n / 2, i = n % half;
  return (2 * (i / 16) + n / half) * 16 + i % 16;
}
static inline int64_t packed_panels(const linear_t *l) {
  return l->paired ? 2 * ((l->n / 2 + 15) / 16) : (l->n + 15) / 16;
}

/* Rows of k inputs, DT_F32 or DT_BF16, `stride` elements apart. With `norm`, a row is divided by the
 * root of its mean square (plus eps) and multiplied by norm[k] first. */
typedef struct {
  const void *x;
  int64_t type, stride;
  const float *norm;
  double eps;
} source_t;

/* Rows of outputs. add: to what is there, which is float32. activation: of a paired layer, whose
 * result is then activation(first half) * second half, n / 2 wide. */
enum { ACT_NONE, ACT_SILU, ACT_GELU, ACT_GELU_TANH };
typedef struct {
  void *y;
  int64_t type, stride, add, activation;
} target_t;

/* y = x w + bias. shared: linear_shared_bytes of memory that all threads see. */
void linear_team(const team_t *team, const linear_t *l, const source_t *x, int64_t rows, const target_t *y, void *shared);
size_t linear_shared_bytes(const linear_t *l, int64_t rows);

/* The weights of output n, k floats. */
void unpack_row(const linear_t *l, int64_t n, float *to);

/* ---- rows of activations ------------------------------------------------------------------------ */

/* to[k] = from[k], or normalized; `to` may be `from`. */
void rms_norm_row(const float *from, int64_t k, const float *weight, double eps, float *to);

/* ---- attention ---------------------------------------------------------------------------------- */

/* One layer. Strides are in elements; a head's `head_size` values lie together. scale: of the logits.
 * window: positions a query sees, itself included (0: all). soft_cap: 0 for none. rope_dim leading
 * values of a head rotate by cos_sin[position][rope_dim], cosines then sines. q_norm, k_norm: weights
 * [head_size] of a normalization before that, or NULL. kv_type: of the pool; a head's int8 values are
 * followed by their scale, a float. */
typedef struct {
  int64_t heads, kv_heads, head_size, value_size, window, rope_dim, rope_interleaved, kv_type;
  double scale, soft_cap, norm_eps;
  const float *cos_sin, *q_norm, *k_norm;
  void *k, *v;
  int64_t k_block, k_token, k_head, v_block, v_token, v_head;
} attention_t;

/* A step's batch: `rows` sequences, whose new tokens lie one sequence after another. starts[rows + 1]:
 * first new token of each. seq_lens[rows]: tokens with this step's. table: block ids of each row,
 * `table_stride` apart. slots[tokens]: where each token's key and value go. positions[tokens]. */
typedef struct {
  int64_t rows, tokens, block_size, table_stride;
  const int32_t *starts, *seq_lens, *table;
  const int64_t *slots, *positions;
} batch_t;

/* How the work of a batch is cut, for layers of one shape; made by octavo_attention_plan. */
typedef struct plan plan_t;

/* q[tokens, heads, head_size], k and v are rows of `type` with a stride a token; out likewise. */
void attention_team(const team_t *team, const attention_t *layer, const batch_t *batch, const plan_t *plan,
                    const void *q, int64_t qstride, const void *k, int64_t kstride, const void *v,
                    int64_t vstride, int type, void *out, int64_t ostride);

/* ---- memory of a thread ------------------------------------------------------------------------ */

/* At least `bytes` of memory private to this thread, aligned to 64, valid until the next call with
 * the same slot. NULL when the machine has no more. */
enum { SCRATCH_X, SCRATCH_W, SCRATCH_ROW, SCRATCH_ATTENTION, SCRATCH_SHARED, SCRATCH_DECODER, SCRATCH_SLOTS };
void *thread_scratch(int slot, size_t bytes);

#endif
