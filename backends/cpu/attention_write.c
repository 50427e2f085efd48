/* Rotary position embedding, and writing keys and values into the paged pool. */
#include "attention.h"
#include "simd.h"

/* Rotary embedding (Su et al., 2021): pairs (i, i + r/2), or (2i, 2i + 1) when interleaved, turn by
 * the angle whose cosine and sine the table has for the position. */
void rotate(const attention_t *l, int64_t position, float *x) {
  const int64_t half = l->rope_dim / 2;
  if (!half) return;
  const float *cosine = l->cos_sin + position * l->rope_dim, *sine = cosine + half;
  if (l->rope_interleaved) {
    for (int64_t i = 0; i < half; i++) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = fmaf(a, cosine[i], -(b * sine[i]));
      x[2 * i + 1] = fmaf(b, cosine[i], a * sine[i]);
    }
    return;
  }
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const vf a = vf_load(x + i), b = vf_load(x + half + i), c = vf_load(cosine + i), s = vf_load(sine + i);
    vf_store(x + i, vf_fma(a, c, vf_sub(vf_set(0.0f), vf_mul(b, s))));
    vf_store(x + half + i, vf_fma(b, c, vf_mul(a, s)));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = fmaf(a, cosine[i], -(b * sine[i]));
    x[half + i] = fmaf(b, cosine[i], a * sine[i]);
  }
}

/* Nearest even float8 e4m3; beyond 448 becomes 448, NaN stays NaN. */
static uint8_t to_fp8(float a) {
  uint32_t bits;
  memcpy(&bits, &a, 4);
  const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
  const float size = fabsf(a);
  if (size != size) return sign | 0x7f;
  if (size >= 448.0f) return sign | 0x7e;
  if (size < 0x1p-6f) return sign | (uint8_t)nearbyintf(size * 0x1p9f);
  bits &= 0x7fffffff;
  bits += 0x7ffff + (bits >> 20 & 1);
  return sign | (uint8_t)((bits - (120u << 23)) >> 20);
}

static void read_head(const void *from, int64_t at, int type, int64_t size, float *to) {
  for (int64_t i = 0; i < size; i++) {
    if (type == DT_F32) {
      to[i] = ((const float *)from)[at + i];
    } else {
      const uint32_t bits = (uint32_t)((const uint16_t *)from)[at + i] << 16;
      memcpy(to + i, &bits, 4);
    }
  }
}

/* int8 values and behind them their float32 scale, the largest magnitude over 127. A head with a NaN
 * or an infinity has scale NaN. */
static void write_int8(const float *from, int64_t size, int8_t *to) {
  float most = 0.0f, scale;
  int finite = 1;
  for (int64_t i = 0; i < size; i++) {
    const float a = fabsf(from[i]);
    finite &= a <= 3.402823466e38f;
    most = a > most ? a : most;
  }
  const float inverse = finite && most > 1e-30f ? 127.0f / most : 0.0f;
  for (int64_t i = 0; i < size; i++) to[i] = (int8_t)(finite ? nearbyintf(from[i] * inverse) : 0.0f);
  scale = finite ? most / 127.0f : NAN;
  memcpy(to + size, &scale, sizeof scale);
}

static void write_head(const float *from, int64_t size, void *to, int64_t at, int64_t type) {
  if (type == DT_F32) {
    memcpy((float *)to + at, from, (size_t)size * sizeof(float));
  } else if (type == DT_I8) {
    write_int8(from, size, (int8_t *)to + at);
  } else if (type == DT_FP8) {
    for (int64_t i = 0; i < size; i++) ((uint8_t *)to)[at + i] = to_fp8(from[i]);
  } else {
    for (int64_t i = 0; i < size; i += LANES) {
      uint16_t half[LANES];
      const vf a = vf_load(from + i);
      type == DT_BF16 ? vf_store_bf16(half, a) : vf_store_f16(half, a);
      memcpy((uint16_t *)to + at + i, half, (size_t)(size - i < LANES ? size - i : LANES) * 2);
    }
  }
}

void write_kv_team(const team_t *team, const attention_t *l, const batch_t *b, const void *k, int64_t kstride, const void *v,
                   int64_t vstride, int type) {
  for (int64_t t = team_first(team, b->tokens); t < team_end(team, b->tokens); t++) {
    const int64_t block = b->slots[t] / b->block_size, offset = b->slots[t] % b->block_size;
    float head[HEAD_MOST + PANEL];
    for (int64_t h = 0; h < l->kv_heads; h++) {
      read_head(k, t * kstride + h * l->head_size, type, l->head_size, head);
      if (l->k_norm) rms_norm_row(head, l->head_size, l->k_norm, l->norm_eps, head);
      rotate(l, b->positions[t], head);
      write_head(head, l->head_size, l->k, block * l->k_block + offset * l->k_token + h * l->k_head, l->kv_type);
      read_head(v, t * vstride + h * l->value_size, type, l->value_size, head);
      write_head(head, l->value_size, l->v, block * l->v_block + offset * l->v_token + h * l->v_head, l->kv_type);
    }
  }
  team_barrier(team);
}
