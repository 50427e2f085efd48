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

#define KC 256 /* inputs a block, when there are many rows */
#define MC 96  /* rows a block */

static tile_fn tile_of(int64_t kind, int64_t M, int log) {
  return kind == W_F32 || kind == W_BF16 ? float_tiles[kind == W_BF16][M][log] : int_tiles[kind == W_I4][M][log];
}

/* ---- packing x ------------------------------------------------------------------------------------- */

/* Bytes of kc inputs of M rows. */
static size_t packed_bytes(int64_t kind, int64_t M, int64_t kc) {
  if (kind == W_I8 || kind == W_I4) return (size_t)((kc + GROUP - 1) / GROUP * XGROUP_BYTES(M));
  return (size_t)((kc + XB - 1) / XB * XB * M) * sizeof(float);
}

static void copy_floats(float *to, const void *x, int xtype, int64_t at, int64_t count, int64_t padded) {
  if (xtype == DT_F32)
    memcpy(to, (const float *)x + at, (size_t)count * sizeof(float));
  else
    for (int64_t i = 0; i < count; i++) {
      uint32_t bits = (uint32_t)((const uint16_t *)x)[at + i] << 16;
      memcpy(to + i, &bits, 4);
    }
  for (int64_t i = count; i < padded; i++) to[i] = 0.0f;
}

/* M rows of x from input k0 on, kc of them, to a packed tile. */
static void pack_tile(int64_t kind, const void *x, int xtype, int64_t xstride, int64_t M, int64_t k0,
                      int64_t kc, void *to) {
  for (int64_t r = 0; r < M; r++) {
    int64_t row = r * xstride + k0;
    if (kind == W_I8 || kind == W_I4) {
      float group[GROUP];
      for (int64_t k = 0; k < kc; k += GROUP) {
        copy_floats(group, x, xtype, row + k, kc - k < GROUP ? kc - k : GROUP, GROUP);
        quantize_group(group, (int8_t *)to + k / GROUP * XGROUP_BYTES(M), M, r);
      }
    } else {
      for (int64_t k = 0; k < kc; k += XB)
        copy_floats((float *)to + k * M + r * XB, x, xtype, row + k, kc - k < XB ? kc - k : XB, XB);
    }
  }
}

/* ---- outputs ----------------------------------------------------------------------------------------- */

/* Finish M rows of `panels` panels from c: scale, bias, conversion; `count` outputs are real. */
static void store_tile(const linear_t *l, const float *c, int64_t cstride, int64_t M, int64_t panel0,
                       int64_t count, void *y, int ytype, int64_t ystride) {
  const float *scale = l->kind == W_I8 ? l->scale + panel0 * PANEL : NULL;
  const float *bias = l->bias ? l->bias + panel0 * PANEL : NULL;
  if ((const void *)c == y && !scale && !bias) return;
  for (int64_t r = 0; r < M; r++)
    for (int64_t n = 0; n < count; n += LANES) {
      float lanes[LANES] = {0};
      const int64_t some = count - n < LANES ? count - n : LANES;
      memcpy(lanes, c + r * cstride + n, (size_t)some * sizeof(float));
      vf a = vf_load(lanes);
      if (scale) a = vf_mul(a, vf_load(scale + n));
      if (bias) a = vf_add(a, vf_load(bias + n));
      if (ytype == DT_F32) {
        vf_store(lanes, a);
        memcpy((float *)y + r * ystride + n, lanes, (size_t)some * sizeof(float));
      } else {
        uint16_t half[LANES];
        vf_store_bf16(half, a);
        memcpy((uint16_t *)y + r * ystride + n, half, (size_t)some * sizeof(uint16_t));
      }
    }
}

/* ---- one thread's share --------------------------------------------------------------------------------- */

typedef struct {
  const linear_t *l;
  const void *x;
  void *y;
  int xtype, ytype;
  int64_t xstride, ystride;
} job_t;

static int64_t panel_stride(const linear_t *l) { /* elements or bytes */
  const int64_t groups = (l->k + GROUP - 1) / GROUP;
  return l->kind == W_I8 ? groups * I8_BYTES : l->kind == W_I4 ? groups * I4_BYTES : l->k * PANEL;
}

static const void *weights_at(const linear_t *l, int64_t panel0, int64_t k0) {
  const int64_t at = panel0 * panel_stride(l);
  switch (l->kind) {
    case W_F32: return (const float *)l->w + at + k0 * PANEL;
    case W_BF16: return (const uint16_t *)l->w + at + k0 * PANEL;
    case W_I8: return (const uint8_t *)l->w + at + k0 / GROUP * I8_BYTES;
    default: return (const uint8_t *)l->w + at + k0 / GROUP * I4_BYTES;
  }
}

/* Rows of a block split into tiles of nearly equal height, packed one after another. */
typedef struct {
  int64_t count, rows[MC], offset[MC + 1]; /* offset: bytes */
} tiling_t;

static void split_rows(tiling_t *t, int64_t kind, int64_t rows, int64_t kc) {
  t->count = (rows + MR - 1) / MR;
  t->offset[0] = 0;
  for (int64_t i = 0; i < t->count; i++) {
    t->rows[i] = rows / t->count + (i < rows % t->count);
    t->offset[i + 1] = t->offset[i] + (int64_t)((packed_bytes(kind, t->rows[i], kc) + 63) / 64 * 64);
  }
}

/* Panels [p, p + count) times all tiles over one block of inputs, into c (stride of rows cstride). */
static void block(const job_t *j, const tiling_t *t, const char *packed, int64_t p, int64_t count,
                  int64_t k0, int64_t kc, float *c, int64_t cstride) {
  const linear_t *l = j->l;
  int64_t kind = l->kind, stride = panel_stride(l);
  const char *w = weights_at(l, p, k0);
  int64_t step = stride * (kind == W_F32 ? 4 : kind == W_BF16 ? 2 : 1);
  if (kind == W_BF16 && t->count > 1) { /* convert once for all tiles */
    float *wide = thread_scratch(SCRATCH_W, (size_t)(count * kc * PANEL) * sizeof(float));
    for (int64_t i = 0; i < count; i++)
      for (int64_t at = 0; at < kc * PANEL; at += LANES)
        vf_store(wide + i * kc * PANEL + at, vf_load_bf16((const uint16_t *)(w + i * step) + at));
    kind = W_F32, stride = kc * PANEL, step = stride * 4, w = (const char *)wide;
  }
  for (int64_t i = 0, row = 0; i < t->count; row += t->rows[i++])
    for (int64_t q = 0; q < count;) {
      const int log = widest(t->rows[i], count - q);
      tile_of(kind, t->rows[i], log)(packed + t->offset[i], w + q * step, stride, kc,
                                   c + row * cstride + q * PANEL, cstride, k0 == 0);
      q += 1 << log;
    }
}

/* Rows [r0, r1) of panels [p0, p1), by one thread. */
static void share(const job_t *j, int64_t r0, int64_t r1, int64_t p0, int64_t p1) {
  const linear_t *l = j->l;
  const int ints = l->kind == W_I8 || l->kind == W_I4;
  const int64_t xsize = j->xtype == DT_F32 ? 4 : 2, ysize = j->ytype == DT_F32 ? 4 : 2;
  /* whole panels of float32 outputs accumulate in place, others in scratch */
  int64_t direct = j->ytype == DT_F32 ? l->n / PANEL : 0;
  direct = direct < p0 ? p0 : direct > p1 ? p1 : direct;
  for (int64_t rb = r0; rb < r1; rb += MC) {
    const int64_t rows = r1 - rb < MC ? r1 - rb : MC;
    const int64_t kcb = rows > 2 * MR ? KC : l->k, spare = (p1 - direct) * PANEL;
    const char *x = (const char *)j->x + rb * j->xstride * xsize;
    char *y = (char *)j->y + rb * j->ystride * ysize;
    tiling_t t;
    split_rows(&t, l->kind, rows, kcb < l->k ? kcb : l->k);
    const size_t packed_size = (size_t)t.offset[t.count];
    char *packed = thread_scratch(SCRATCH_X, packed_size + (size_t)(rows * spare) * sizeof(float));
    float *side = (float *)(packed + packed_size);
    const int64_t group = 1 << widest(t.rows[t.count - 1], 8);
    for (int64_t k0 = 0; k0 < l->k; k0 += kcb) {
      const int64_t kc = l->k - k0 < kcb ? l->k - k0 : kcb;
      const int plain = rows == 1 && !ints && j->xtype == DT_F32;
      for (int64_t i = 0, row = 0; i < t.count && !plain; row += t.rows[i++])
        pack_tile(l->kind, x + row * j->xstride * xsize, j->xtype, j->xstride, t.rows[i], k0, kc,
                  packed + t.offset[i]);
      for (int64_t p = p0; p < p1;) {
        const int64_t end = p < direct ? direct : p1, count = end - p < group ? end - p : group;
        float *c = p < direct ? (float *)y + p * PANEL : side + (p - direct) * PANEL;
        const int64_t cstride = p < direct ? j->ystride : spare;
        block(j, &t, plain ? x + k0 * 4 : packed, p, count, k0, ints ? (kc + GROUP - 1) / GROUP * GROUP : kc,
              c, cstride);
        if (k0 + kc == l->k) {
          const int64_t left = l->n - p * PANEL;
          store_tile(l, c, cstride, rows, p, left < count * PANEL ? left : count * PANEL,
                     y + p * PANEL * ysize, j->ytype, j->ystride);
        }
        p += count;
      }
    }
  }
}

void linear_team(const linear_t *l, const void *x, int xtype, int64_t xstride, int64_t rows, void *y,
                 int ytype, int64_t ystride) {
  const job_t job = {l, x, y, xtype, ytype, xstride, ystride};
  const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
  const int64_t panels = (l->n + PANEL - 1) / PANEL;
  int64_t row_shares = 1; /* split rows too when there are few panels a thread */
  while (panels * row_shares < 8 * threads && 2 * row_shares <= threads && rows >= 2 * row_shares * MR)
    row_shares *= 2;
  const int64_t panel_shares = threads / row_shares;
  if (me < row_shares * panel_shares) {
    const int64_t a = me / panel_shares, b = me % panel_shares;
    share(&job, rows * a / row_shares, rows * (a + 1) / row_shares, panels * b / panel_shares,
          panels * (b + 1) / panel_shares);
  }
#pragma omp barrier
}

/* Work below this many multiply-adds is not worth waking threads for. */
#define SMALL_WORK 65536

EXPORT void octavo_linear(const linear_t *l, const void *x, int64_t xtype, int64_t xstride, int64_t rows,
                          void *y, int64_t ytype, int64_t ystride, int64_t threads) {
  const int team = rows * l->n * l->k < SMALL_WORK ? 1 : (int)threads;
#pragma omp parallel num_threads(team)
  linear_team(l, x, (int)xtype, xstride, rows, y, (int)ytype, ystride);
}
