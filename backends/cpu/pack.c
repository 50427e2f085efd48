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

/* Nearest even; too large becomes the largest finite. */
static uint16_t to_f16(float a) {
  const uint16_t sign = (uint16_t)(bits_of(a) >> 16 & 0x8000);
  const float size = fabsf(a);
  if (size >= 65504.0f) return sign | 0x7bff;
  if (size < 0x1p-14f) return sign | (uint16_t)nearbyintf(size * 0x1p24f);
  uint32_t b = bits_of(size);
  b += 0xfff + (b >> 13 & 1);
  return sign | (uint16_t)((b - 0x38000000u) >> 13);
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

typedef struct {
  uint16_t d, m; /* float16 */
  uint8_t q[GROUP];
  float error; /* sum of squares */
} group4_t;

/* Levels and error of a group for a given scale and minimum, as float16 will hold them. */
static void round_group(const float *x, float scale, float minimum, group4_t *g) {
  g->d = to_f16(scale), g->m = to_f16(minimum);
  const float d = from_f16(g->d), m = from_f16(g->m), inverse = d > 0 ? 1.0f / d : 0.0f;
  g->error = 0;
  for (int i = 0; i < GROUP; i++) {
    float level = nearbyintf((x[i] - m) * inverse);
    level = level < 0 ? 0 : level > 15 ? 15 : level;
    g->q[i] = (uint8_t)level;
    const float off = d * level + m - x[i];
    g->error += off * off;
  }
}

/* The scale and minimum that fit the levels of `g` best (linear least squares). */
static int refit(const float *x, const group4_t *g, float *scale, float *minimum) {
  float n = GROUP, sq = 0, sqq = 0, sx = 0, sqx = 0;
  for (int i = 0; i < GROUP; i++) {
    const float q = g->q[i];
    sq += q, sqq += q * q, sx += x[i], sqx += q * x[i];
  }
  const float det = n * sqq - sq * sq;
  if (det <= 0) return 0;
  *scale = (n * sqx - sq * sx) / det;
  *minimum = (sx - *scale * sq) / n;
  return *scale > 0;
}

#define SHRINKS 12

/* 32 weights to levels 0 to 15: several ranges, from the full one down to about half, each refitted
 * to its own levels; the least squared error wins, the widest range on ties. */
static void quantize4(const float *x, group4_t *best) {
  float low = x[0], high = x[0];
  for (int i = 1; i < GROUP; i++) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
  round_group(x, (high - low) / 15.0f, low, best);
  for (int s = 0; s < SHRINKS && best->error > 0; s++) {
    group4_t g;
    const float part = 1.0f - 0.04f * (float)s, middle = 0.5f * (high + low), half = 0.5f * (high - low) * part;
    round_group(x, 2.0f * half / 15.0f, middle - half, &g);
    if (g.error < best->error) *best = g;
    for (int again = 0; again < 2; again++) {
      float scale, minimum;
      if (!refit(x, &g, &scale, &minimum)) break;
      round_group(x, scale, minimum, &g);
      if (g.error < best->error) *best = g;
    }
  }
}

/* ---- packing ------------------------------------------------------------------------------------------ */

/* Bytes of the packed weight. */
EXPORT int64_t octavo_packed_bytes(int64_t kind, int64_t k, int64_t n) {
  const int64_t panels = (n + PANEL - 1) / PANEL, groups = (k + GROUP - 1) / GROUP;
  switch (kind) {
    case W_F32: return panels * k * PANEL * 4;
    case W_BF16: return panels * k * PANEL * 2;
    case W_I8: return panels * groups * I8_BYTES;
    default: return panels * groups * I4_BYTES;
  }
}

static uint8_t *group_at(const linear_t *l, int64_t n, int64_t k) {
  const int64_t groups = (l->k + GROUP - 1) / GROUP, size = l->kind == W_I8 ? I8_BYTES : I4_BYTES;
  return (uint8_t *)l->w + (n / PANEL * groups + k / GROUP) * size;
}

static void pack_output(const linear_t *l, int64_t n, const float *row) {
  const int64_t k = l->k, lane = n % PANEL, padded = (k + GROUP - 1) / GROUP * GROUP;
  if (l->kind == W_F32) {
    float *w = (float *)l->w + n / PANEL * k * PANEL + lane;
    for (int64_t i = 0; i < k; i++) w[i * PANEL] = row[i];
  } else if (l->kind == W_BF16) {
    uint16_t *w = (uint16_t *)l->w + n / PANEL * k * PANEL + lane;
    for (int64_t i = 0; i < k; i++) w[i * PANEL] = to_bf16(row[i]);
  } else if (l->kind == W_I8) {
    float most = 0;
    for (int64_t i = 0; i < k; i++) most = fmaxf(most, fabsf(row[i]));
    const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
    ((float *)l->scale)[n] = most / 127.0f;
    for (int64_t i = 0; i < padded; i++)
      group_at(l, n, i)[(i % GROUP / 4 * PANEL + lane) * 4 + i % 4] =
          (uint8_t)((int32_t)nearbyintf(row[i] * inverse) + I8_OFFSET);
  } else {
    for (int64_t i = 0; i < padded; i += GROUP) {
      group4_t g;
      quantize4(row + i, &g);
      uint8_t *at = group_at(l, n, i), *q = at + 4 * PANEL;
      memcpy(at + 2 * lane, &g.d, 2);
      memcpy(at + 2 * PANEL + 2 * lane, &g.m, 2);
      for (int j = 0; j < GROUP; j += 8)
        for (int b = 0; b < 4; b++)
          q[(j / 8 * PANEL + lane) * 4 + b] = (uint8_t)(g.q[j + b] | g.q[j + 4 + b] << 4);
    }
  }
}

/* Outputs [n0, n0 + count) from a row-major [count, k] matrix of DT_F32, DT_BF16 or DT_F16. The
 * packed weight and scales start as zeros. */
EXPORT void octavo_pack(const linear_t *l, int64_t n0, int64_t count, const void *from, int64_t type,
                        int64_t stride, int64_t threads) {
  const int64_t padded = (l->k + GROUP - 1) / GROUP * GROUP;
#pragma omp parallel num_threads((int)threads)
  {
    float *row = thread_scratch(SCRATCH_X, (size_t)padded * sizeof(float));
    memset(row, 0, (size_t)padded * sizeof(float));
    /* whole panels to a thread, so that no two write into one cache line */
#pragma omp for schedule(dynamic, 1)
    for (int64_t p = n0 / PANEL; p <= (n0 + count - 1) / PANEL; p++)
      for (int64_t n = p * PANEL; n < (p + 1) * PANEL; n++)
        if (n >= n0 && n < n0 + count) {
          read_row(row, from, type, (n - n0) * stride, l->k);
          pack_output(l, n, row);
        }
  }
}

/* One weight as the kernels use it. */
static float weight(const linear_t *l, int64_t n, int64_t k) {
  const int64_t lane = n % PANEL, at = n / PANEL * l->k * PANEL + k * PANEL + lane;
  if (l->kind == W_F32) return ((const float *)l->w)[at];
  if (l->kind == W_BF16) return float_of((uint32_t)((const uint16_t *)l->w)[at] << 16);
  const uint8_t *g = group_at(l, n, k);
  const int64_t i = k % GROUP;
  if (l->kind == W_I8) {
    const uint8_t byte = g[(i / 4 * PANEL + lane) * 4 + i % 4];
    return l->scale[n] * (float)(int8_t)(byte - I8_OFFSET);
  }
  uint16_t d, m;
  memcpy(&d, g + 2 * lane, 2);
  memcpy(&m, g + 2 * PANEL + 2 * lane, 2);
  const uint8_t byte = g[4 * PANEL + (i / 8 * PANEL + lane) * 4 + i % 4];
  return fmaf(from_f16(d), (float)(i % 8 < 4 ? byte & 15 : byte >> 4), from_f16(m));
}

/* to[count, k]: the weights of the outputs `rows`, as DT_F32 or DT_BF16; zeros where out of range. */
EXPORT void octavo_unpack(const linear_t *l, const int64_t *rows, int64_t count, void *to, int64_t type,
                          int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static) if (count > 4)
  for (int64_t i = 0; i < count; i++)
    for (int64_t k = 0; k < l->k; k++) {
      const float a = rows[i] >= 0 && rows[i] < l->n ? weight(l, rows[i], k) : 0.0f;
      if (type == DT_F32)
        ((float *)to)[i * l->k + k] = a;
      else
        ((uint16_t *)to)[i * l->k + k] = to_bf16(a);
    }
}

EXPORT const char *octavo_isa(void) { return ISA_NAME; }
