/* Packing of weights into the layouts of linear.c and integers.h, rounding them to 8 and 4 bits, and
 * reading rows back (embeddings that share their weight with the head). */
#include "kernels.h"
#include "simd.h"
#include "integers.h"

#include <stdio.h>

static _Thread_local struct {
  void *at;
  size_t bytes;
} scratch[SCRATCH_SLOTS];

void *thread_scratch(int slot, size_t bytes) {
  if (scratch[slot].bytes < bytes) {
    free(scratch[slot].at);
    scratch[slot].bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    scratch[slot].at = aligned_alloc(64, scratch[slot].bytes);
    if (!scratch[slot].at) {
      fprintf(stderr, "octavo: out of memory: %zu bytes of scratch for a kernel\n", bytes);
      abort();
    }
  }
  return scratch[slot].at;
}

/* ---- numbers ------------------------------------------------------------------------------------ */

static uint32_t bits_of(float a) {
  uint32_t b;
  memcpy(&b, &a, 4);
  return b;
}

static float float_of(uint32_t b) {
  float a;
  memcpy(&a, &b, 4);
  return a;
}

static float from_f16(uint16_t h) {
  const uint32_t rest = h & 0x7fff, sign = (uint32_t)(h & 0x8000) << 16;
  if (rest < 0x0400) return float_of(bits_of((float)rest * 0x1p-24f) | sign);
  return float_of((rest >= 0x7c00 ? 0x7f800000u | rest << 13 : (rest << 13) + 0x38000000u) | sign);
}

static uint16_t to_bf16(float a) {
  const uint32_t b = bits_of(a);
  if (a != a) return (uint16_t)(b >> 16 | 0x40);
  return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

static void read_row(float *to, const void *from, int64_t type, int64_t at, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    to[i] = type == DT_F32    ? ((const float *)from)[at + i]
            : type == DT_BF16 ? float_of((uint32_t)((const uint16_t *)from)[at + i] << 16)
                              : from_f16(((const uint16_t *)from)[at + i]);
}

/* ---- rounding to 4 bits --------------------------------------------------------------------------- */

/* 32 weights of LANES outputs, side by side: w[i] holds weight i of every output. */
typedef struct { vf w[GROUP]; } block_t;

/* A try at scale d and minimum m (as float16 holds them): its squared error, and the sums that the
 * least-squares fit of its levels needs. */
typedef struct { vf d, m, error, q, qq, qx; } fit_t;

static vf as_f16(vf a) {
  uint16_t half[LANES];
  vf_store_f16(half, a);
  return vf_load_f16(half);
}

static vf level(vf x, vf m, vf inverse) {
  return vf_min(vf_max(vf_round(vf_mul(vf_sub(x, m), inverse)), vf_set(0.0f)), vf_set(15.0f));
}

static vf inverse_of(vf d) { /* 0 for 0 */
  return vf_less(vf_set(0.0f), d, vf_div(vf_set(1.0f), d), vf_set(0.0f));
}

static fit_t try_fit(const block_t *b, vf scale, vf minimum) {
  const vf zero = vf_set(0.0f);
  fit_t f = {as_f16(scale), as_f16(minimum), zero, zero, zero, zero};
  const vf inverse = inverse_of(f.d);
  for (int i = 0; i < GROUP; i++) {
    const vf x = b->w[i], q = level(x, f.m, inverse), off = vf_sub(vf_fma(f.d, q, f.m), x);
    f.error = vf_fma(off, off, f.error);
    f.q = vf_add(f.q, q), f.qq = vf_fma(q, q, f.qq), f.qx = vf_fma(q, x, f.qx);
  }
  return f;
}

static void keep_better(fit_t *best, const fit_t *f) {
  const vf old = best->error;
  best->d = vf_less(f->error, old, f->d, best->d);
  best->m = vf_less(f->error, old, f->m, best->m);
  best->error = vf_less(f->error, old, f->error, old);
}

/* Ranges tried, as parts of the full one. */
static const float RANGES[] = {1.0f, 0.94f, 0.88f, 0.82f, 0.74f, 0.66f};

/* Scale and minimum of LANES outputs: several ranges about the middle, each refitted twice to its own
 * levels by least squares; the least squared error wins, the widest range on ties. Weights that were
 * 4-bit before keep their levels. */
static fit_t quantize4(const block_t *b) {
  const vf zero = vf_set(0.0f), n = vf_set(GROUP);
  vf low = b->w[0], high = low, sum = zero;
  for (int i = 0; i < GROUP; i++)
    low = vf_min(b->w[i], low), high = vf_max(b->w[i], high), sum = vf_add(sum, b->w[i]);
  const vf range = vf_sub(high, low);
  fit_t best = try_fit(b, vf_mul(range, vf_set(1.0f / 15.0f)), low);
  for (size_t s = 0; s < sizeof RANGES / sizeof *RANGES; s++) {
    const vf wide = vf_mul(range, vf_set(RANGES[s]));
    fit_t f = try_fit(b, vf_mul(wide, vf_set(1.0f / 15.0f)), vf_mul(vf_set(0.5f), vf_sub(vf_add(high, low), wide)));
    for (int again = 0; again < 2; again++) {
      const vf det = vf_sub(vf_mul(n, f.qq), vf_mul(f.q, f.q));
      vf scale = vf_mul(vf_sub(vf_mul(n, f.qx), vf_mul(f.q, sum)), inverse_of(det));
      scale = vf_less(zero, scale, scale, f.d);
      f = try_fit(b, scale, vf_mul(vf_sub(sum, vf_mul(scale, f.q)), vf_set(1.0f / GROUP)));
      keep_better(&best, &f);
    }
  }
  return best;
}

/* ---- packing ------------------------------------------------------------------------------------------ */

/* Bytes of the packed weight. */
EXPORT int64_t octavo_packed_bytes(int64_t kind, int64_t k, int64_t n, int64_t paired) {
  const int64_t groups = (k + GROUP - 1) / GROUP;
  const linear_t shape = {.n = n, .paired = paired};
  const int64_t panels = packed_panels(&shape);
  switch (kind) {
    case W_F32: return panels * k * PANEL * 4;
    case W_BF16: return panels * k * PANEL * 2;
    case W_I8: return panels * groups * I8_BYTES;
    default: return panels * groups * I4_BYTES;
  }
}

/* Functions below take an output's place in the packed order, see packed_place. */
static uint8_t *group_at(const linear_t *l, int64_t n, int64_t k) {
  const int64_t groups = (l->k + GROUP - 1) / GROUP, size = l->kind == W_I8 ? I8_BYTES : I4_BYTES;
  return (uint8_t *)l->w + (n / PANEL * groups + k / GROUP) * size;
}

static void pack_float(const linear_t *l, int64_t place, const float *row) {
  const int64_t at = place / PANEL * l->k * PANEL + place % PANEL;
  if (l->kind == W_F32)
    for (int64_t i = 0; i < l->k; i++) ((float *)l->w)[at + i * PANEL] = row[i];
  else
    for (int64_t i = 0; i < l->k; i++) ((uint16_t *)l->w)[at + i * PANEL] = to_bf16(row[i]);
}

/* row: padded with zeros to whole groups. */
static void pack_int8(const linear_t *l, int64_t place, const float *row) {
  const int64_t lane = place % PANEL;
  for (int64_t k = 0; k < l->k; k += GROUP) {
    uint8_t *group = group_at(l, place, k);
    vf most = vf_set(0.0f);
    for (int i = 0; i < GROUP; i += LANES) {
      const vf a = vf_load(row + k + i);
      most = vf_max(vf_max(a, vf_sub(vf_set(0.0f), a)), most);
    }
    uint16_t d[LANES];
    float lanes[LANES], top = 0;
    vf_store(lanes, most);
    for (int i = 0; i < LANES; i++) top = lanes[i] > top ? lanes[i] : top;
    vf_store_f16(d, vf_set(top / 127.0f));
    memcpy(group + 2 * lane, d, 2);
    const vf inverse = inverse_of(vf_set(from_f16(*d))), limit = vf_set(127.0f);
    for (int i = 0; i < GROUP; i += LANES) {
      int32_t q[LANES];
      const vf x = vf_mul(vf_load(row + k + i), inverse);
      const vi v = vf_to_int(vf_max(vf_min(x, limit), vf_sub(vf_set(0.0f), limit)));
      memcpy(q, &v, sizeof v);
      for (int j = 0; j < LANES; j++)
        group[2 * PANEL + ((i + j) / 4 * PANEL + lane) * 4 + (i + j) % 4] = (uint8_t)(q[j] + I8_OFFSET);
    }
  }
}

/* LANES outputs from `place` on, whose rows are `stride` floats apart; only those in `mask`. */
static void pack_int4(const linear_t *l, int64_t place, const float *rows, int64_t stride, uint32_t mask) {
  for (int64_t k = 0; k < l->k; k += GROUP) {
    block_t b;
    float lanes[LANES], q[GROUP][LANES];
    uint16_t d[LANES], m[LANES];
    for (int i = 0; i < GROUP; i++) {
      for (int j = 0; j < LANES; j++) lanes[j] = rows[j * stride + k + i];
      b.w[i] = vf_load(lanes);
    }
    const fit_t f = quantize4(&b);
    const vf inverse = inverse_of(f.d);
    vf_store_f16(d, f.d), vf_store_f16(m, f.m);
    for (int i = 0; i < GROUP; i++) vf_store(q[i], level(b.w[i], f.m, inverse));
    uint8_t *group = group_at(l, place, k);
    for (int j = 0; j < LANES; j++) {
      const int64_t lane = place % PANEL + j;
      if (!(mask >> j & 1)) continue;
      memcpy(group + 2 * lane, d + j, 2);
      memcpy(group + 2 * PANEL + 2 * lane, m + j, 2);
      for (int i = 0; i < GROUP; i += 8)
        for (int c = 0; c < 4; c++)
          group[4 * PANEL + (i / 8 * PANEL + lane) * 4 + c] = (uint8_t)((int)q[i + c][j] | (int)q[i + 4 + c][j] << 4);
    }
  }
}

/* Outputs [n0, n0 + count) from a row-major [count, k] matrix of DT_F32, DT_BF16 or DT_F16. The
 * packed weight starts as zeros. */
EXPORT void octavo_pack(const linear_t *l, int64_t n0, int64_t count, const void *from, int64_t type,
                        int64_t stride, int64_t threads) {
  const int64_t padded = (l->k + GROUP - 1) / GROUP * GROUP, half = l->paired ? l->n / 2 : l->n;
#pragma omp parallel num_threads((int)threads)
  {
    float *rows = thread_scratch(SCRATCH_ROW, (size_t)(LANES * padded) * sizeof(float));
    memset(rows, 0, (size_t)(LANES * padded) * sizeof(float));
    /* LANES outputs at a time, aligned to their places; a half begins a new panel */
#pragma omp for schedule(dynamic, 4)
    for (int64_t chunk = 0; chunk < (half + LANES - 1) / LANES * (l->n / half); chunk++) {
      const int64_t first = chunk / ((half + LANES - 1) / LANES) * half + chunk % ((half + LANES - 1) / LANES) * LANES;
      uint32_t mask = 0;
      for (int64_t j = 0; j < LANES && first % half + j < half; j++) {
        const int64_t n = first + j;
        if (n < n0 || n >= n0 + count) continue;
        mask |= 1u << j;
        read_row(rows + j * padded, from, type, (n - n0) * stride, l->k);
        if (l->kind == W_F32 || l->kind == W_BF16) pack_float(l, packed_place(l, n), rows + j * padded);
        if (l->kind == W_I8) pack_int8(l, packed_place(l, n), rows + j * padded);
      }
      if (l->kind == W_I4 && mask) pack_int4(l, packed_place(l, first), rows, padded, mask);
    }
  }
}

/* Bias of the outputs [n0, n0 + count). */
EXPORT void octavo_pack_bias(const linear_t *l, int64_t n0, int64_t count, const float *from) {
  for (int64_t i = 0; i < count; i++) ((float *)l->bias)[packed_place(l, n0 + i)] = from[i];
}

/* One weight as the kernels use it. */
static float weight(const linear_t *l, int64_t n, int64_t k) {
  const int64_t lane = n % PANEL, at = n / PANEL * l->k * PANEL + k * PANEL + lane;
  if (l->kind == W_F32) return ((const float *)l->w)[at];
  if (l->kind == W_BF16) return float_of((uint32_t)((const uint16_t *)l->w)[at] << 16);
  const uint8_t *g = group_at(l, n, k);
  const int64_t i = k % GROUP;
  uint16_t d, m;
  memcpy(&d, g + 2 * lane, 2);
  if (l->kind == W_I8) {
    const uint8_t byte = g[2 * PANEL + (i / 4 * PANEL + lane) * 4 + i % 4];
    return from_f16(d) * (float)(int8_t)(byte - I8_OFFSET);
  }
  memcpy(&m, g + 2 * PANEL + 2 * lane, 2);
  const uint8_t byte = g[4 * PANEL + (i / 8 * PANEL + lane) * 4 + i % 4];
  return fmaf(from_f16(d), (float)(i % 8 < 4 ? byte & 15 : byte >> 4), from_f16(m));
}

void unpack_row(const linear_t *l, int64_t n, float *to) {
  const int64_t place = packed_place(l, n);
  for (int64_t k = 0; k < l->k; k++) to[k] = weight(l, place, k);
}

/* to[count, k]: the weights of the outputs `rows`, as DT_F32 or DT_BF16; zeros where out of range. */
EXPORT void octavo_unpack(const linear_t *l, const int64_t *rows, int64_t count, void *to, int64_t type,
                          int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static) if (count > 4)
  for (int64_t i = 0; i < count; i++)
    for (int64_t k = 0; k < l->k; k++) {
      const float a = rows[i] >= 0 && rows[i] < l->n ? weight(l, packed_place(l, rows[i]), k) : 0.0f;
      if (type == DT_F32)
        ((float *)to)[i * l->k + k] = a;
      else
        ((uint16_t *)to)[i * l->k + k] = to_bf16(a);
    }
}

EXPORT const char *octavo_isa(void) { return ISA_NAME; }
