/* What the C files share. Functions named `*_team` are called by every thread of an OpenMP parallel
 * region together, split the work among them, and end with a barrier. */
#ifndef OCTAVO_KERNELS_H
#define OCTAVO_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_get_num_threads(void) { return 1; }
#endif

#define EXPORT __attribute__((visibility("default")))

/* ---- linear layers ---------------------------------------------------------------------------- */

enum { W_F32 = 0, W_BF16 = 1, W_I8 = 2, W_I4 = 3 };

/* k inputs, n outputs. w: packed weights (see linear.c for the layout of each kind). scale: float of
 * each output, padded to whole panels (W_I8 only). bias: likewise, or NULL. */
typedef struct {
  int64_t k, n, kind;
  const void *w;
  const float *scale;
  const float *bias;
} linear_t;

/* y[rows, n] = x[rows, k] w + bias; x and y are DT_F32 or DT_BF16, row strides in elements. */
void linear_team(const linear_t *l, const void *x, int xtype, int64_t xstride, int64_t rows, void *y,
                 int ytype, int64_t ystride);

/* ---- attention ---------------------------------------------------------------------------------- */

/* One layer. Strides are in elements; a head's `head_size` values lie together. scale: of the logits.
 * window: positions a query sees, itself included (0: all). soft_cap: 0 for none. rope_dim leading
 * values of a head rotate by cos_sin[position][rope_dim], cosines then sines. kv_type: of the pool. */
typedef struct {
  int64_t heads, kv_heads, head_size, value_size, window, rope_dim, rope_interleaved, kv_type;
  double scale, soft_cap;
  const float *cos_sin;
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
void attention_team(const attention_t *layer, const batch_t *batch, const plan_t *plan, const void *q,
                    int64_t qstride, const void *k, int64_t kstride, const void *v, int64_t vstride,
                    int type, void *out, int64_t ostride);

/* ---- memory of a thread ------------------------------------------------------------------------ */

/* At least `bytes` of memory private to this thread, aligned to 64, valid until the next call with
 * the same slot. NULL when the machine has no more. */
enum { SCRATCH_X, SCRATCH_W, SCRATCH_ATTENTION, SCRATCH_SLOTS };
void *thread_scratch(int slot, size_t bytes);

#endif
