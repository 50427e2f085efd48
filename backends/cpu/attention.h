/* What the attention files share: how a batch is cut into tasks, and rotation and writing of keys. */
#ifndef OCTAVO_ATTENTION_H
#define OCTAVO_ATTENTION_H

#include "kernels.h"

#define TILE 64
#define PART 256
#define HEAD_MOST 512 /* values of a head */

/* Queries [q0, q0 + n) of a row of the batch. part: -1 when the task goes through all parts itself,
 * else it leaves that part in the partial results, `partial` rows after the first. */
typedef struct {
  int32_t row, q0, n, part;
  int64_t partial, cost;
} task_t;

/* The `count` parts of a split task, folded when all are there. */
typedef struct {
  int32_t row, q0, n, count;
  int64_t partial;
} fold_t;

/* partial: [K][partial_rows][Dv padded + 2]. */
struct plan {
  int64_t tasks, folds, task_room, fold_room, partial_rows, partial_room;
  task_t *task;
  fold_t *fold;
  float *partial;
};

/* The first position that a query at `position` sees. */
static inline int64_t first_seen(int64_t position, int64_t window) {
  return window && position >= window ? position - window + 1 : 0;
}

/* Rotate a head's values at a position, in place; x has room for whole panels. */
void rotate(const attention_t *l, int64_t position, float *x);

/* Write the batch's keys, rotated, and values into the pool. */
void write_kv_team(const team_t *team, const attention_t *l, const batch_t *b, const void *k, int64_t kstride, const void *v,
                   int64_t vstride, int type);

#endif
