/* Linear layers: y = x w^T + b, one packed layout and one order of summation for every number of
 * rows.
 *
 * Weights are packed in panels of 16 outputs, [N/16][K][16], the last panel filled up with zeros.
 * With float weights each output is one chain acc = fma(x[k], w[k], acc), k ascending from acc = 0,
 * then + bias. Blocking over k parks the accumulators in memory, which changes no bit, and a thread
 * owns whole outputs: a row's result depends on nothing but the row. Integer weights: integers.h.
 */
#include "kernels.h"
#include "simd.h"
#include "integers.h"
#include "tiles.h"
#include "activations.h"

/* inputs a block: the weights of a tile's panels stay in the first cache */
#define KC(kind) ((kind) == W_I8 || (kind) == W_I4 ? 512 : 256)
#define CACHED_X (384 << 10)  /* bytes of packed rows that stay in the second cache */
#define BLOCK_ROWS 96         /* most rows a block */
#define SHARED_WORK 8192      /* packing more floats than this is shared between the threads */
#define SUPER_BYTES (4 << 20) /* about the packed rows that are shared at once */

static int is_int(const linear_t *l) { return l->kind == W_I8 || l->kind == W_I4; }

static tile_fn tile_of(int64_t kind, int64_t M, int log) {
  return kind == W_F32 || kind == W_BF16 ? float_tiles[kind == W_BF16][M][log] : int_tiles[kind == W_I4][M][log];
}

/* ---- packing x ------------------------------------------------------------------------------------- */

/* Bytes of kc inputs of M rows of a packed tile. */
static int64_t packed_bytes(const linear_t *l, int64_t M, int64_t kc) {
  if (is_int(l)) return (kc + GROUP - 1) / GROUP * XGROUP_BYTES(M);
  return (kc + XB - 1) / XB * XB * M * 4;
}

/* One row as float32, normalized if asked; `room` holds k floats and a panel. */
static const float *read_row(const linear_t *l, const source_t *x, int64_t row, float *room) {
  const float *from = (const float *)x->x + row * x->stride;
  if (x->type == DT_BF16) {
    const uint16_t *half = (const uint16_t *)x->x + row * x->stride;
    int64_t k = 0;
    for (; k + LANES <= l->k; k += LANES) vf_store(room + k, vf_load_bf16(half + k));
    for (; k < l->k; k++) {
      const uint32_t bits = (uint32_t)half[k] << 16;
      memcpy(room + k, &bits, 4);
    }
    from = room;
  }
  if (!x->norm) return from;
  rms_norm_row(from, l->k, x->norm, x->eps, room);
  return room;
}

/* Rows [row, row + M) to a packed tile. */
static void pack_tile(const linear_t *l, const source_t *x, int64_t row, int64_t M, char *to) {
  float *room = thread_scratch(SCRATCH_ROW, (size_t)(l->k + GROUP) * sizeof(float));
  const int64_t whole = is_int(l) ? l->k / GROUP * GROUP : l->k / XB * XB;
  for (int64_t r = 0; r < M; r++) {
    const float *from = read_row(l, x, row + r, room);
    float last[GROUP] = {0};
    memcpy(last, from + whole, (size_t)(l->k - whole) * sizeof(float));
    if (is_int(l)) {
      for (int64_t k = 0; k < l->k; k += GROUP)
        quantize_group(k < whole ? from + k : last, (int8_t *)to + k / GROUP * XGROUP_BYTES(M), M, r);
    } else {
      for (int64_t k = 0; k < l->k; k += XB)
        memcpy((float *)to + k * M + r * XB, k < whole ? from + k : last, XB * sizeof(float));
    }
  }
}

/* ---- outputs ----------------------------------------------------------------------------------------- */

/* LANES outputs from c: bias, and the activation with the panel after it. */
INLINE vf finish(const linear_t *l, const target_t *t, const float *c, int64_t place, int i) {
  vf a = vf_load(c + i);
  if (l->bias) a = vf_add(a, vf_load(l->bias + place + i));
  if (t->activation == ACT_NONE) return a;
  vf b = vf_load(c + PANEL + i);
  if (l->bias) b = vf_add(b, vf_load(l->bias + place + PANEL + i));
  return vf_mul(activate((int)t->activation, a), b);
}

/* 16 outputs of one row, finished, into columns [column, column + count) of y. */
static void store_panel(const linear_t *l, const target_t *t, const float *c, int64_t place, int64_t row,
                        int64_t column, int64_t count) {
  float lanes[PANEL];
  float *y = (float *)t->y + row * t->stride + column;
  if (t->type == DT_F32 && count == PANEL) {
    for (int i = 0; i < PANEL; i += LANES) {
      const vf a = finish(l, t, c, place, i);
      vf_store(y + i, t->add ? vf_add(vf_load(y + i), a) : a);
    }
    return;
  }
  for (int i = 0; i < PANEL; i += LANES) vf_store(lanes + i, finish(l, t, c, place, i));
  if (t->type == DT_F32) {
    for (int64_t i = 0; i < count; i++) y[i] = t->add ? y[i] + lanes[i] : lanes[i];
    return;
  }
  uint16_t halves[PANEL];
  for (int i = 0; i < PANEL; i += LANES) vf_store_bf16(halves + i, vf_load(lanes + i));
  memcpy((uint16_t *)t->y + row * t->stride + column, halves, (size_t)count * sizeof(uint16_t));
}

static void store_panels(const linear_t *l, const target_t *t, const float *c, int64_t cstride, int64_t p,
                         int64_t count, int64_t row, int64_t rows) {
  const int64_t half = l->paired ? l->n / 2 : l->n, step = t->activation != ACT_NONE ? 2 : 1;
  for (int64_t q = p; q < p + count; q += step) {
    const int64_t at = (l->paired ? q / 2 : q) * PANEL, column = at + (l->paired && step == 1 ? q % 2 * half : 0);
    for (int64_t r = 0; r < rows; r++)
      store_panel(l, t, c + r * cstride + (q - p) * PANEL, q * PANEL, row + r, column,
                  half - at < PANEL ? half - at : PANEL);
  }
}

/* ---- one thread's share --------------------------------------------------------------------------------- */

static int64_t panel_stride(const linear_t *l) { /* elements or bytes */
  const int64_t groups = (l->k + GROUP - 1) / GROUP;
  return l->kind == W_I8 ? groups * I8_BYTES : l->kind == W_I4 ? groups * I4_BYTES : l->k * PANEL;
}

static const char *weights_at(const linear_t *l, int64_t panel0, int64_t k0) {
  const int64_t at = panel0 * panel_stride(l);
  switch (l->kind) {
    case W_F32: return (const char *)l->w + (at + k0 * PANEL) * 4;
    case W_BF16: return (const char *)l->w + (at + k0 * PANEL) * 2;
    case W_I8: return (const char *)l->w + at + k0 / GROUP * I8_BYTES;
    default: return (const char *)l->w + at + k0 / GROUP * I4_BYTES;
  }
}

/* Rows cut into `count` tiles of nearly equal height. */
typedef struct { int64_t rows, count, bytes; } tiling_t; /* bytes: of a packed tile */

static tiling_t cut_rows(const linear_t *l, int64_t rows) {
  const int64_t height = rows <= MR && !is_int(l) ? MR : LOW;
  const int64_t most = rows < height ? rows : height;
  return (tiling_t){rows, (rows + height - 1) / height, (packed_bytes(l, most, l->k) + 63) / 64 * 64};
}
static int64_t tile_start(tiling_t t, int64_t i) {
  const int64_t each = t.rows / t.count, more = t.rows % t.count;
  return i * each + (i < more ? i : more);
}
static int64_t tile_height(tiling_t t, int64_t i) { return t.rows / t.count + (i < t.rows % t.count); }

/* Tiles [t0, t1) times panels [p, p + count) into c. packed(i): tile i of x. */
static void multiply(const linear_t *l, tiling_t tiling, int64_t t0, int64_t t1, const char *const *packed,
                     int64_t p, int64_t count, float *c, int64_t cstride) {
  const int64_t kcb = t1 - t0 > 1 ? KC(l->kind) : l->k, first_row = tile_start(tiling, t0);
  for (int64_t k0 = 0; k0 < l->k; k0 += kcb) {
    int64_t kc = l->k - k0 < kcb ? l->k - k0 : kcb, kind = l->kind, stride = panel_stride(l);
    if (is_int(l)) kc = (kc + GROUP - 1) / GROUP * GROUP;
    const char *w = weights_at(l, p, k0);
    int64_t step = stride * (kind == W_F32 ? 4 : kind == W_BF16 ? 2 : 1);
    if (kind == W_BF16 && t1 - t0 > 2) { /* convert once for all tiles */
      float *wide = thread_scratch(SCRATCH_W, (size_t)(count * kc * PANEL) * sizeof(float));
      for (int64_t i = 0; i < count; i++)
        for (int64_t at = 0; at < kc * PANEL; at += LANES)
          vf_store(wide + i * kc * PANEL + at, vf_load_bf16((const uint16_t *)(w + i * step) + at));
      kind = W_F32, stride = kc * PANEL, step = stride * 4, w = (const char *)wide;
    }
    for (int64_t i = t0; i < t1; i++) {
      const int64_t M = tile_height(tiling, i);
      for (int64_t q = 0; q < count;) {
        const int log = widest(M, count - q);
        tile_of(kind, M, log)(packed[i - t0] + packed_bytes(l, M, k0), w + q * step, stride, kc,
                              c + (tile_start(tiling, i) - first_row) * cstride + q * PANEL, cstride, k0 == 0);
        q += 1 << log;
      }
    }
  }
}

/* Tiles [t0, t1) of rows times panels [p0, p1). shared: the tiles packed already, or NULL. */
static void share(const linear_t *l, const source_t *x, const target_t *y, tiling_t tiling, int64_t t0, int64_t t1,
                  int64_t p0, int64_t p1, int64_t row0, char *shared) {
  const int64_t tile_bytes = tiling.bytes;
  int64_t block = CACHED_X / tile_bytes;
  block = block < 1 ? 1 : block > BLOCK_ROWS / LOW ? BLOCK_ROWS / LOW : block;
  const int64_t widest_tile = 1 << widest(tile_height(tiling, tiling.count - 1), 8);
  const int64_t group = widest_tile > 2 ? widest_tile : 2, cstride = group * PANEL;
  for (int64_t b0 = t0; b0 < t1; b0 += block) {
    const int64_t b1 = t1 - b0 < block ? t1 : b0 + block, first = tile_start(tiling, b0);
    const int64_t rows = tile_start(tiling, b1 - 1) + tile_height(tiling, b1 - 1) - first;
    const char *packed[BLOCK_ROWS / LOW];
    const int plain = rows == 1 && !is_int(l) && x->type == DT_F32 && !x->norm;
    char *room = thread_scratch(SCRATCH_X, (size_t)(shared ? 0 : (b1 - b0) * tile_bytes) + (size_t)(rows * cstride) * 4);
    float *c = (float *)room;
    room += rows * cstride * 4;
    for (int64_t i = b0; i < b1; i++) {
      packed[i - b0] = shared ? shared + i * tile_bytes : room + (i - b0) * tile_bytes;
      if (plain)
        packed[0] = (const char *)((const float *)x->x + (row0 + first) * x->stride);
      else if (!shared)
        pack_tile(l, x, row0 + tile_start(tiling, i), tile_height(tiling, i), room + (i - b0) * tile_bytes);
    }
    for (int64_t p = p0; p < p1; p += group) {
      const int64_t count = p1 - p < group ? p1 - p : group;
      multiply(l, tiling, b0, b1, packed, p, count, c, cstride);
      store_panels(l, y, c, cstride, p, count, row0 + first, rows);
    }
  }
}

/* Rows that are packed, shared, and multiplied at once. */
static int64_t super_rows(const linear_t *l) {
  const int64_t rows = SUPER_BYTES / (l->k * 4) / BLOCK_ROWS * BLOCK_ROWS;
  return rows < BLOCK_ROWS ? BLOCK_ROWS : rows;
}

static int packs_together(const linear_t *l, int64_t rows, int64_t threads) {
  return threads > 1 && rows * l->k > SHARED_WORK;
}

size_t linear_shared_bytes(const linear_t *l, int64_t rows) {
  const int64_t most = super_rows(l), some = rows < most ? rows : most;
  const tiling_t tiling = cut_rows(l, some), one = cut_rows(l, MR);
  const int64_t all = tiling.count * tiling.bytes, last = one.count * one.bytes; /* whichever needs more */
  return (size_t)(all > last ? all : last);
}

void linear_team(const team_t *team, const linear_t *l, const source_t *x, int64_t rows, const target_t *y,
                 void *shared) {
  const int64_t threads = team->threads, unit = l->paired ? 2 : 1;
  const int64_t units = packed_panels(l) / unit, most = super_rows(l);
  for (int64_t row0 = 0; row0 < rows; row0 += most) {
    const tiling_t tiling = cut_rows(l, rows - row0 < most ? rows - row0 : most);
    const int together = packs_together(l, tiling.rows, threads);
    if (together) {
      for (int64_t i = team_first(team, tiling.count); i < team_end(team, tiling.count); i++)
        pack_tile(l, x, row0 + tile_start(tiling, i), tile_height(tiling, i), (char *)shared + i * tiling.bytes);
      team_barrier(team);
    }
    int64_t row_shares = 1; /* split rows too when there are few panels a thread */
    while (units * row_shares < 8 * threads && 2 * row_shares <= threads && tiling.count >= 2 * row_shares)
      row_shares *= 2;
    const int64_t panel_shares = threads / row_shares, a = team->me / panel_shares, b = team->me % panel_shares;
    if (a < row_shares)
      share(l, x, y, tiling, tiling.count * a / row_shares, tiling.count * (a + 1) / row_shares,
            units * b / panel_shares * unit, units * (b + 1) / panel_shares * unit, row0, together ? shared : NULL);
    team_barrier(team);
  }
}

/* Work below this many multiply-adds is not worth waking threads for. */
#define SMALL_WORK 65536

EXPORT void octavo_linear(const linear_t *l, const void *x, int64_t xtype, int64_t xstride, int64_t rows,
                          void *y, int64_t ytype, int64_t ystride, int64_t threads) {
  const source_t source = {x, xtype, xstride, NULL, 0};
  const target_t target = {y, ytype, ystride, 0, ACT_NONE};
  const int team = rows * l->n * l->k < SMALL_WORK ? 1 : (int)threads;
  void *shared = packs_together(l, rows, team) ? thread_scratch(SCRATCH_SHARED, linear_shared_bytes(l, rows)) : NULL;
  shared_team_t all = {0};
#pragma omp parallel num_threads(team)
  {
    const team_t me = join_team(&all);
    linear_team(&me, l, &source, rows, &target, shared);
  }
}
