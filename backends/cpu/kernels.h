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

/* ---- memory of a thread ------------------------------------------------------------------------ */

/* At least `bytes` of memory private to this thread, aligned to 64, valid until the next call with
 * the same slot. NULL when the machine has no more. */
enum { SCRATCH_X = 0, SCRATCH_W = 1, SCRATCH_ATTENTION = 2, SCRATCH_SLOTS = 4 };
void *thread_scratch(int slot, size_t bytes);

#endif
