/* Cutting a batch's attention into tasks. How it is cut changes no result, see attention.c. */
#include "attention.h"

#define ROWS_MOST 96 /* rows (queries times heads of a group) of a task, unless one query has more */
#define ROWS_LEAST 12
#define TASKS_A_THREAD 4

EXPORT plan_t *octavo_plan_new(void) { return calloc(1, sizeof(plan_t)); }

EXPORT void octavo_plan_free(plan_t *plan) {
  if (!plan) return;
  free(plan->task);
  free(plan->fold);
  free(plan->partial);
  free(plan);
}

static void *grow(void *old, int64_t *room, int64_t need, size_t size) {
  if (need <= *room) return old;
  *room = need + need / 2 + 16;
  void *more = realloc(old, (size_t)*room * size);
  if (!more) abort();
  return more;
}

static task_t *add_task(plan_t *plan) {
  plan->task = grow(plan->task, &plan->task_room, plan->tasks + 1, sizeof(task_t));
  return plan->task + plan->tasks++;
}

/* Positions that queries [q0, q0 + n) of a row see: [low, high). */
static void seen(const batch_t *b, int64_t row, int64_t q0, int64_t n, int64_t window, int64_t *low, int64_t *high) {
  const int64_t before = b->seq_lens[row] - (b->starts[row + 1] - b->starts[row]);
  *low = first_seen(before + q0, window);
  *high = before + q0 + n;
}

/* One task, or one a part and a fold when it is worth more than `most`. */
static void cut(plan_t *plan, const batch_t *b, int64_t row, int64_t q0, int64_t n, int64_t group, int64_t window,
                int64_t most) {
  int64_t low, high;
  seen(b, row, q0, n, window, &low, &high);
  const int64_t first = low / PART, parts = (high - 1) / PART - first + 1;
  task_t task = {(int32_t)row, (int32_t)q0, (int32_t)n, -1, 0, n * (high - low)};
  if (parts == 1 || task.cost <= most) {
    *add_task(plan) = task;
    return;
  }
  plan->fold = grow(plan->fold, &plan->fold_room, plan->folds + 1, sizeof(fold_t));
  plan->fold[plan->folds++] = (fold_t){(int32_t)row, (int32_t)q0, (int32_t)n, (int32_t)parts, plan->partial_rows};
  task.cost = n * PART;
  for (int64_t part = first; part < first + parts; part++) {
    task.part = (int32_t)part, task.partial = plan->partial_rows;
    plan->partial_rows += n * group;
    *add_task(plan) = task;
  }
}

static int by_cost(const void *a, const void *b) {
  const int64_t x = ((const task_t *)a)->cost, y = ((const task_t *)b)->cost;
  return x < y ? 1 : x > y ? -1 : 0;
}

/* Plan for layers with `group` query heads a KV head. value_size: the largest of them. */
EXPORT void octavo_attention_plan(plan_t *plan, const batch_t *b, int64_t kv_heads, int64_t group,
                                  int64_t value_size, int64_t window, int64_t threads) {
  int64_t total = 0, queries = 0;
  for (int64_t row = 0; row < b->rows; row++) {
    const int64_t n = b->starts[row + 1] - b->starts[row];
    int64_t low, high;
    seen(b, row, n / 2, 1, window, &low, &high); /* the middle query stands for all */
    total += n * (high - low);
    queries += n;
  }
  /* as many queries a task as leave every thread some tasks */
  const int64_t wanted = threads * TASKS_A_THREAD;
  int64_t rows = queries * group * kv_heads / wanted;
  rows = rows < ROWS_LEAST ? ROWS_LEAST : rows > ROWS_MOST ? ROWS_MOST : rows;
  const int64_t each = rows / group > 1 ? rows / group : 1;
  const int64_t most = threads > 1 ? total * kv_heads / wanted : INT64_MAX;
  plan->tasks = plan->folds = plan->partial_rows = 0;
  for (int64_t row = 0; row < b->rows; row++) {
    const int64_t n = b->starts[row + 1] - b->starts[row];
    for (int64_t q0 = 0; q0 < n; q0 += each)
      cut(plan, b, row, q0, n - q0 < each ? n - q0 : each, group, window, most);
  }
  qsort(plan->task, (size_t)plan->tasks, sizeof(task_t), by_cost);
  plan->partial = grow(plan->partial, &plan->partial_room,
                       kv_heads * plan->partial_rows * ((value_size + 15) / 16 * 16 + 2), sizeof(float));
}
