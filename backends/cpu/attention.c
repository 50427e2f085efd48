/* Attention over a paged KV cache: keys are rotated and written, then every query attends.
 *
 * A query's result depends on its own q and its keys and values only. Positions are cut at fixed
 * places: tiles of 64 positions inside parts of 256, both counted from position 0. Within a part the
 * softmax is online (Milakov and Gimelshein, 2018), tile by tile; parts are folded together in
 * ascending order. A logit is one chain of fused multiply-adds over the head's values, an output one
 * chain over the positions of a tile. How queries and parts are spread over threads changes nothing.
 *
 * Legend: T tokens, H query heads, K KV heads, G = H / K, D head size, Dv value size, n queries of a
 * task, R = n G its rows (row i G + g is query i of head g of the KV head).
 */
#include "activations.h"
#include "attention.h"
#include "simd.h"
#include "tiles.h"

/* ---- a tile's keys and values as panels of float32 ------------------------------------------------ */

/* 16 rows of 16 floats, transposed: to[16][16]. */
static void transpose(const float *const *rows, int64_t at, float *to) {
#if defined(OCTAVO_AVX512)
  __m512 r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(rows[i] + at);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + 2 + j]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  /* r[4 i + j] holds column 4 l + j of rows 4 i .. 4 i + 3 in its 128-bit lane l */
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    __m512 a = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88), b = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
    __m512 c = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd), d = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
    _mm512_storeu_ps(to + j * 16, _mm512_shuffle_f32x4(a, b, 0x88));
    _mm512_storeu_ps(to + (4 + j) * 16, _mm512_shuffle_f32x4(c, d, 0x88));
    _mm512_storeu_ps(to + (8 + j) * 16, _mm512_shuffle_f32x4(a, b, 0xdd));
    _mm512_storeu_ps(to + (12 + j) * 16, _mm512_shuffle_f32x4(c, d, 0xdd));
  }
#elif defined(OCTAVO_AVX2)
  for (int rb = 0; rb < 16; rb += 8)
    for (int cb = 0; cb < 16; cb += 8) {
      __m256 r[8], t[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(rows[rb + i] + at + cb);
#pragma GCC unroll 4
      for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
          r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
          r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
        }
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        _mm256_storeu_ps(to + (cb + j) * 16 + rb, _mm256_permute2f128_ps(r[j], r[4 + j], 0x20));
        _mm256_storeu_ps(to + (cb + 4 + j) * 16 + rb, _mm256_permute2f128_ps(r[j], r[4 + j], 0x31));
      }
    }
#else
  for (int d = 0; d < 16; d++)
    for (int i = 0; i < 16; i++) to[d * 16 + i] = rows[i][at + d];
#endif
}

/* `count` values of a tensor from `at` on, as float32. */
INLINE void widen_as(const void *from, int64_t at, const int type, int64_t count, float *to) {
  const int64_t size = type == DT_F32 ? 4 : type == DT_FP8 || type == DT_I8 ? 1 : 2;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) vf_store(to + i, vf_load_as(from, at + i, type));
  if (i < count) { /* never read past a head's values */
    char some[LANES * 4] = {0};
    float wide[LANES];
    memcpy(some, (const char *)from + (at + i) * size, (size_t)((count - i) * size));
    vf_store(wide, vf_load_as(some, 0, type));
    memcpy(to + i, wide, (size_t)(count - i) * 4);
  }
}

/* The scale of a head's `count` int8 values at `at`, which lies behind them. */
INLINE vf scale_of(const void *from, int64_t at, int64_t count) {
  float scale;
  memcpy(&scale, (const char *)from + at + count, sizeof scale);
  return vf_set(scale);
}

/* The `count` values of a head at `at`, as float32; `to` has room for whole panels. */
static void widen(const void *from, int64_t at, int type, int64_t count, float *to) {
  switch (type) {
    case DT_I8:
      widen_as(from, at, DT_I8, count, to);
      for (int64_t i = 0; i < count; i += LANES)
        vf_store(to + i, vf_mul(vf_load(to + i), scale_of(from, at, count)));
      break;
    case DT_F32: widen_as(from, at, DT_F32, count, to); break;
    case DT_BF16: widen_as(from, at, DT_BF16, count, to); break;
    case DT_F16: widen_as(from, at, DT_F16, count, to); break;
    default: widen_as(from, at, DT_FP8, count, to);
  }
}

/* Where `count` positions from `first` on lie in a pool, in elements. */
static void locate(const batch_t *b, int64_t row, int64_t first, int64_t count, int64_t block, int64_t token,
                   int64_t *at) {
  const int32_t *id = b->table + row * b->table_stride + first / b->block_size;
  int64_t offset = first % b->block_size;
  for (int64_t i = 0; i < count; id++, offset = 0)
    for (; i < count && offset < b->block_size; i++, offset++) at[i] = *id * block + offset * token;
}

/* Keys of positions [from, to) of the tile that begins at `tile`: panels of 16 positions, [4][D][16].
 * Lanes outside repeat a key inside; their logits are never used. */
static void gather_keys(const attention_t *l, const batch_t *b, int64_t row, int64_t kv_head, int64_t tile,
                        int64_t from, int64_t to, float *wide, float *keys) {
  const int64_t D = l->head_size, whole = D / 16 * 16, padded = (D + 15) / 16 * 16;
  int64_t at[TILE];
  locate(b, row, from, to - from, l->k_block, l->k_token, at);
  for (int64_t p = (from - tile) / 16 * 16; p < to - tile; p += 16) {
    const float *rows[16];
    for (int64_t i = 0; i < 16; i++) {
      int64_t n = tile + p + i;
      n = (n < from ? from : n >= to ? to - 1 : n) - from;
      const int64_t start = at[n] + kv_head * l->k_head;
      if (l->kv_type == DT_F32) {
        rows[i] = (const float *)l->k + start;
      } else {
        widen(l->k, start, (int)l->kv_type, D, wide + i * padded);
        rows[i] = wide + i * padded;
      }
    }
    float *panel = keys + p * D;
    for (int64_t d = 0; d < whole; d += 16) transpose(rows, d, panel + d * 16);
    for (int64_t d = whole; d < D; d++)
      for (int i = 0; i < 16; i++) panel[d * 16 + i] = rows[i][d];
  }
}

/* Values likewise: panels of 16 dimensions, [Dv padded / 16][TILE][16]. */
INLINE void gather_values_as(const attention_t *l, const int type, const int64_t *at, int64_t count, float *values) {
  const int64_t D = l->value_size, whole = D / 16 * 16;
  for (int64_t n = 0; n < count; n++)
    for (int64_t d = 0; d < whole; d += 16)
      for (int i = 0; i < 16; i += LANES)
        vf_store(values + d * TILE + n * 16 + i, vf_load_as(l->v, at[n] + d + i, type));
  for (int64_t n = 0; n < count && whole < D; n++)
    widen_as(l->v, at[n] + whole, type, D - whole, values + whole * TILE + n * 16);
  for (int64_t n = 0; n < count && type == DT_I8; n++)
    for (int64_t d = 0; d < D; d += 16)
      for (int i = 0; i < 16; i += LANES) {
        float *to = values + d * TILE + n * 16 + i;
        vf_store(to, vf_mul(vf_load(to), scale_of(l->v, at[n], D)));
      }
}

static void gather_values(const attention_t *l, const batch_t *b, int64_t row, int64_t kv_head, int64_t tile,
                          int64_t from, int64_t to, float *values) {
  int64_t at[TILE];
  locate(b, row, from, to - from, l->v_block, l->v_token, at);
  for (int64_t n = 0; n < to - from; n++) at[n] += kv_head * l->v_head;
  values += (from - tile) * 16;
  switch (l->kv_type) {
    case DT_F32: gather_values_as(l, DT_F32, at, to - from, values); break;
    case DT_BF16: gather_values_as(l, DT_BF16, at, to - from, values); break;
    case DT_F16: gather_values_as(l, DT_F16, at, to - from, values); break;
    case DT_I8: gather_values_as(l, DT_I8, at, to - from, values); break;
    default: gather_values_as(l, DT_FP8, at, to - from, values);
  }
}

/* ---- one task ---------------------------------------------------------------------------------------- */

/* What a thread works with; all rows padded to whole panels. D, V: padded head sizes. */
typedef struct {
  int64_t R, D, V, tiles;
  float *q;                     /* packed tiles of rows, [D / 16][M][16] each */
  float *keys, *values, *wide;  /* of one tile of positions */
  float *p, *packed;            /* logits, then weights: [R][TILE]; packed for one tile of rows */
  float *acc, *top, *sum;       /* of the part: [R][V], [R], [R] */
  float *acc_all, *top_all, *sum_all; /* of the parts so far */
  int64_t *low, *high;          /* positions that each row sees */
} work_t;

static int64_t floats_of(int64_t R, int64_t D, int64_t V) {
  return R * (D + TILE + 2 * V + 4) + TILE * (D + V) + 16 * D + MR * TILE;
}

static void lay_out(work_t *w, const attention_t *l, int64_t R) {
  w->R = R, w->D = (l->head_size + 15) / 16 * 16, w->V = (l->value_size + 15) / 16 * 16;
  w->tiles = (R + MR - 1) / MR;
  const int64_t floats = (floats_of(R, w->D, w->V) + 15) / 16 * 16;
  float *at = thread_scratch(SCRATCH_ATTENTION, (size_t)floats * 4 + (size_t)R * 16 + (size_t)w->tiles * 8);
  w->keys = at, at += TILE * w->D;
  w->values = at, at += TILE * w->V;
  w->wide = at, at += 16 * w->D;
  w->packed = at, at += MR * TILE;
  w->q = at, at += R * w->D;
  w->p = at, at += R * TILE;
  w->acc = at, at += R * w->V;
  w->acc_all = at, at += R * w->V;
  w->top = at, at += R;
  w->sum = at, at += R;
  w->top_all = at, at += R;
  w->sum_all = at;
  w->low = (int64_t *)((char *)w->keys + floats * 4);
  w->high = w->low + R;
}

/* Rows of tile i, which begin at row `*first`. */
static int64_t tile_rows(const work_t *w, int64_t i, int64_t *first) {
  const int64_t each = w->R / w->tiles, more = w->R % w->tiles;
  *first = i * each + (i < more ? i : more);
  return each + (i < more);
}

/* The task's queries, rotated and scaled, in packed tiles, and what each of them sees. */
static void load_queries(work_t *w, const attention_t *l, const batch_t *b, const task_t *t, int64_t kv_head,
                         const void *q, int64_t qstride, int type) {
  const int64_t G = l->heads / l->kv_heads, first = b->starts[t->row] + t->q0;
  const int64_t before = b->seq_lens[t->row] - b->starts[t->row + 1] + first; /* position of query q0 */
  for (int64_t i = 0, r0 = 0; i < w->tiles; i++) {
    const int64_t M = tile_rows(w, i, &r0);
    for (int64_t m = 0; m < M; m++) {
      const int64_t r = r0 + m, token = first + r / G;
      widen(q, token * qstride + (kv_head * G + r % G) * l->head_size, type, l->head_size, w->wide);
      if (l->q_norm) rms_norm_row(w->wide, l->head_size, l->q_norm, l->norm_eps, w->wide);
      rotate(l, b->positions[token], w->wide);
      float *to = w->q + r0 * w->D + m * XB;
      for (int64_t d = 0; d < w->D; d++)
        to[d / XB * M * XB + d % XB] = d < l->head_size ? w->wide[d] * (float)l->scale : 0.0f;
      w->low[r] = first_seen(before + r / G, l->window);
      w->high[r] = before + r / G + 1;
    }
  }
}

/* Logits to weights for row r, of which positions [a, b) of the tile are seen; the row's maximum, sum
 * and outputs so far are rescaled. Weights outside are zero in the panels that [a, b) touches. */
static void soften(work_t *w, const attention_t *l, int64_t r, int64_t a, int64_t b, float *acc, float *top,
                   float *sum) {
  float *p = w->p + r * TILE;
  const int64_t p0 = a / 16, p1 = (b + 15) / 16;
  if (l->soft_cap > 0) {
    const vf cap = vf_set((float)l->soft_cap), inverse = vf_set(1.0f / (float)l->soft_cap);
    for (int64_t i = p0 * 16; i < p1 * 16; i += LANES)
      vf_store(p + i, vf_mul(cap, vf_tanh(vf_mul(vf_load(p + i), inverse))));
  }
  for (int64_t i = p0 * 16; i < a; i++) p[i] = -INFINITY;
  for (int64_t i = b; i < p1 * 16; i++) p[i] = -INFINITY;
  panel most = panel_load(p + p0 * 16);
  for (int64_t i = p0 + 1; i < p1; i++) {
    const panel more = panel_load(p + i * 16);
    for (int v = 0; v < VPP; v++) most.v[v] = vf_max(most.v[v], more.v[v]);
  }
  const float old = top[r], here = panel_max(most), now = here > old ? here : old;
  panel e[TILE / 16];
  for (int64_t i = 0; i < TILE / 16; i++) {
    e[i] = panel_set(0.0f);
    if (i >= p0 && i < p1)
      for (int v = 0; v < VPP; v++) {
        e[i].v[v] = vf_exp(vf_sub(vf_load(p + i * 16 + v * LANES), vf_set(now)));
        vf_store(p + i * 16 + v * LANES, e[i].v[v]);
      }
  }
  for (int v = 0; v < VPP; v++)
    e[0].v[v] = vf_add(vf_add(e[0].v[v], e[1].v[v]), vf_add(e[2].v[v], e[3].v[v]));
  const float rescale = scalar_exp(old - now);
  top[r] = now;
  sum[r] = fmaf(sum[r], rescale, panel_sum(e[0]));
  if (rescale != 1.0f)
    for (int64_t d = 0; d < w->V; d += LANES)
      vf_store(acc + r * w->V + d, vf_mul(vf_load(acc + r * w->V + d), vf_set(rescale)));
}

/* acc[M][V] += weights x values over positions [a, b) of the tile; x: packed weights of M rows. */
static void add_values(const work_t *w, const float *x, int64_t M, int64_t a, int64_t b, float *acc) {
  for (int64_t p = 0; p < w->V / 16;) {
    const int log = widest(M, w->V / 16 - p);
    float_tiles[0][M][log](x, w->values + (p * TILE + a) * 16, TILE * 16, b - a, acc + p * 16, w->V, 0);
    p += 1 << log;
  }
}

/* One tile of rows times one tile of positions [from, to). */
static void attend(work_t *w, const attention_t *l, int64_t i, int64_t tile, int64_t from, int64_t to,
                   float *acc, float *top, float *sum) {
  int64_t r0, a[MR], b[MR], low = 0, high = TILE;
  const int64_t M = tile_rows(w, i, &r0), p1 = (to - tile + 15) / 16;
  for (int64_t p = (from - tile) / 16; p < p1;) {
    const int log = widest(M, p1 - p);
    float_tiles[0][M][log](w->q + r0 * w->D, w->keys + p * 16 * l->head_size, 16 * l->head_size, l->head_size,
                           w->p + r0 * TILE + p * 16, TILE, 1);
    p += 1 << log;
  }
  for (int64_t m = 0; m < M; m++) {
    a[m] = w->low[r0 + m] > tile ? w->low[r0 + m] - tile : 0;
    b[m] = w->high[r0 + m] < tile + TILE ? w->high[r0 + m] - tile : TILE;
    if (a[m] >= b[m]) a[m] = b[m] = 0;
    if (a[m] < b[m]) soften(w, l, r0 + m, a[m], b[m], acc, top, sum);
    low = a[m] > low ? a[m] : low, high = b[m] < high ? b[m] : high;
  }
  /* Positions that all rows see go through one tile; what only some see comes before and after. */
  low = (low + 15) / 16 * 16;
  if (M == 1 || low >= high) low = high = 0;
  for (int64_t p = low; p < high; p += 16)
    for (int64_t m = 0; m < M; m++)
      memcpy(w->packed + ((p - low) * M + m * 16), w->p + (r0 + m) * TILE + p, 16 * sizeof(float));
  for (int64_t m = 0; m < M; m++) {
    const float *p = w->p + (r0 + m) * TILE;
    float *c = acc + (r0 + m) * w->V;
    if (low >= high)
      add_values(w, p + a[m], 1, a[m], b[m], c);
    else if (a[m] < low)
      add_values(w, p + a[m], 1, a[m], low, c);
  }
  if (low >= high) return;
  add_values(w, w->packed, M, low, high, acc + r0 * w->V);
  for (int64_t m = 0; m < M; m++)
    if (high < b[m]) add_values(w, w->p + (r0 + m) * TILE + high, 1, high, b[m], acc + (r0 + m) * w->V);
}

/* One part of the positions into acc, top, sum. */
static void attend_part(work_t *w, const attention_t *l, const batch_t *b, const task_t *t, int64_t kv_head,
                        int64_t part, float *acc, float *top, float *sum) {
  for (int64_t r = 0; r < w->R; r++) top[r] = -INFINITY, sum[r] = 0.0f;
  memset(acc, 0, (size_t)(w->R * w->V) * sizeof(float));
  const int64_t low = w->low[0], high = w->high[w->R - 1];
  for (int64_t tile = part * PART; tile < (part + 1) * PART; tile += TILE) {
    const int64_t from = low > tile ? low : tile, to = high < tile + TILE ? high : tile + TILE;
    if (from >= to) continue;
    gather_keys(l, b, t->row, kv_head, tile, from, to, w->wide, w->keys);
    gather_values(l, b, t->row, kv_head, tile, from, to, w->values);
    for (int64_t i = 0; i < w->tiles; i++) attend(w, l, i, tile, from, to, acc, top, sum);
  }
}

/* Fold a part of R rows into what earlier parts gave. A part that a row does not see changes nothing. */
static void fold(int64_t R, int64_t V, float *all, float *top_all, float *sum_all, const float *acc,
                 const float *top, const float *sum) {
  for (int64_t r = 0; r < R; r++) {
    if (sum[r] == 0.0f) continue;
    const float now = top[r] > top_all[r] ? top[r] : top_all[r];
    const float a = scalar_exp(top_all[r] - now), c = scalar_exp(top[r] - now);
    top_all[r] = now;
    sum_all[r] = fmaf(sum_all[r], a, sum[r] * c);
    for (int64_t d = 0; d < V; d += LANES) {
      const vf old = vf_mul(vf_load(all + r * V + d), vf_set(a));
      vf_store(all + r * V + d, vf_fma(vf_load(acc + r * V + d), vf_set(c), old));
    }
  }
}

static void write_out(const attention_t *l, const batch_t *b, const task_t *t, int64_t kv_head, int64_t V,
                      const float *acc, const float *sum, void *out, int64_t ostride, int type) {
  const int64_t G = l->heads / l->kv_heads, first = b->starts[t->row] + t->q0;
  for (int64_t r = 0; r < t->n * G; r++) {
    const int64_t at = (first + r / G) * ostride + (kv_head * G + r % G) * l->value_size;
    const vf inverse = vf_set(1.0f / sum[r]);
    for (int64_t d = 0; d < l->value_size; d += LANES) {
      const int64_t count = l->value_size - d < LANES ? l->value_size - d : LANES;
      const vf a = vf_mul(vf_load(acc + r * V + d), inverse);
      float wide[LANES];
      uint16_t half[LANES];
      vf_store(wide, a), vf_store_bf16(half, a);
      if (type == DT_F32)
        memcpy((float *)out + at + d, wide, (size_t)count * sizeof(float));
      else
        memcpy((uint16_t *)out + at + d, half, (size_t)count * sizeof(uint16_t));
    }
  }
}

/* ---- all tasks ------------------------------------------------------------------------------------------ */

typedef struct { float *acc, *top, *sum; } partial_t;

static partial_t partial_at(const plan_t *p, int64_t kv_head, int64_t row, int64_t R, int64_t V) {
  float *at = p->partial + (kv_head * p->partial_rows + row) * (V + 2);
  return (partial_t){at, at + R * V, at + R * (V + 1)};
}

static void run_task(const attention_t *l, const batch_t *b, const plan_t *plan, const task_t *t, int64_t kv_head,
                     const void *q, int64_t qstride, int type, void *out, int64_t ostride) {
  work_t w;
  lay_out(&w, l, t->n * (l->heads / l->kv_heads));
  load_queries(&w, l, b, t, kv_head, q, qstride, type);
  if (t->part >= 0) {
    const partial_t to = partial_at(plan, kv_head, t->partial, w.R, w.V);
    attend_part(&w, l, b, t, kv_head, t->part, to.acc, to.top, to.sum);
    return;
  }
  const int64_t first = w.low[0] / PART, last = (w.high[w.R - 1] - 1) / PART;
  attend_part(&w, l, b, t, kv_head, first, w.acc_all, w.top_all, w.sum_all);
  for (int64_t part = first + 1; part <= last; part++) {
    attend_part(&w, l, b, t, kv_head, part, w.acc, w.top, w.sum);
    fold(w.R, w.V, w.acc_all, w.top_all, w.sum_all, w.acc, w.top, w.sum);
  }
  write_out(l, b, t, kv_head, w.V, w.acc_all, w.sum_all, out, ostride, type);
}

static void run_fold(const attention_t *l, const batch_t *b, const plan_t *plan, const fold_t *f, int64_t kv_head,
                     int type, void *out, int64_t ostride) {
  const int64_t R = f->n * (l->heads / l->kv_heads), V = (l->value_size + 15) / 16 * 16;
  const task_t t = {f->row, f->q0, f->n, -1, 0, 0};
  const partial_t all = partial_at(plan, kv_head, f->partial, R, V);
  for (int64_t i = 1; i < f->count; i++) {
    const partial_t more = partial_at(plan, kv_head, f->partial + i * R, R, V);
    fold(R, V, all.acc, all.top, all.sum, more.acc, more.top, more.sum);
  }
  write_out(l, b, &t, kv_head, V, all.acc, all.sum, out, ostride, type);
}

void attention_team(const team_t *team, const attention_t *l, const batch_t *b, const plan_t *plan, const void *q,
                    int64_t qstride, const void *k, int64_t kstride, const void *v, int64_t vstride, int type,
                    void *out, int64_t ostride) {
  write_kv_team(team, l, b, k, kstride, v, vstride, type);
  const int64_t K = l->kv_heads;
  for (int64_t i = team_next(team); i < plan->tasks * K; i = team_next(team))
    run_task(l, b, plan, plan->task + i / K, i % K, q, qstride, type, out, ostride);
  team_barrier(team);
  if (!plan->folds) return;
  for (int64_t i = team_next(team); i < plan->folds * K; i = team_next(team))
    run_fold(l, b, plan, plan->fold + i / K, i % K, type, out, ostride);
  team_barrier(team);
}

EXPORT void octavo_attention(const attention_t *l, const batch_t *b, const plan_t *plan, const void *q,
                             int64_t qstride, const void *k, int64_t kstride, const void *v, int64_t vstride,
                             int64_t type, void *out, int64_t ostride, int64_t threads) {
  shared_team_t all = {0};
#pragma omp parallel num_threads((int)threads)
  {
    const team_t me = join_team(&all);
    attention_team(&me, l, b, plan, q, qstride, k, kstride, v, vstride, (int)type, out, ostride);
  }
}
