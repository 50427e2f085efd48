/* Linear layers with 8- and 4-bit weights: formats and integer products.
 *
 * Activations are rounded to 8 bits in groups of 32 inputs of a row, x ~ dx * qx, |qx| <= 127; the
 * products of a group are summed in integers, so exactly, and the groups in float32, ascending:
 *   W_I8  w ~ d[g, n] qw:           acc = fma(dx d, sum(qx qw), acc)
 *   W_I4  w ~ d[g, n] qw + m[g, n]: the same, then acc = fma(m, dx sum(qx), acc)
 * with qw in [-127, 127], respectively [0, 15], d and m in float16.
 *
 * A group of a panel holds its 32 x 16 weights as quads, 4 inputs of one output side by side:
 *   W_I8  544 bytes, d[16], then [8 quads][16 outputs][4]
 *   W_I4  320 bytes, d[16], m[16], then [4][16 outputs][4]: input 8 j + i in the low half of byte i
 *         of row j, input 8 j + 4 + i in the high half
 */
#ifndef OCTAVO_INTEGERS_H
#define OCTAVO_INTEGERS_H

#include "kernels.h"
#include "simd.h"

#define GROUP 32
#define I8_BYTES 544
#define I4_BYTES 320

/* A group of a packed tile of M rows: q[M][32], then d[M], s[M] = d sum(q), t[M] = -128 sum(q). */
#define XGROUP_BYTES(M) ((M) * 44)

/* ---- LANES outputs times one quad -------------------------------------------------------------- */

#if defined(OCTAVO_X86)

typedef vi vb; /* LANES quads */
#if defined(OCTAVO_AVX512)
INLINE vb vb_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE vb vb_low(vb a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE vb vb_high(vb a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
#else
INLINE vb vb_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE vb vb_low(vb a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
INLINE vb vb_high(vb a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }
#endif
INLINE vb vb_quad(const int8_t *q) {
  int32_t four;
  memcpy(&four, q, 4);
  return vi_set(four);
}

#if defined(OCTAVO_AVX512) && defined(__AVX512VNNI__)
#define DOT_UNSIGNED 1
INLINE vi dot_u8(vi acc, vb w, vb x) { return _mm512_dpbusd_epi32(acc, w, x); }
#elif defined(OCTAVO_AVX2) && defined(__AVXVNNI__)
#define DOT_UNSIGNED 1
INLINE vi dot_u8(vi acc, vb w, vb x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
#endif

#ifdef DOT_UNSIGNED
/* bytes hold qw + 128, and the sum starts at -128 sum(qx) */
#define I8_OFFSET 128
INLINE vi dot_i8(vi acc, vb w, vb x) { return dot_u8(acc, w, x); }
INLINE vi dot_i4(vi acc, vb w, vb x) { return dot_u8(acc, w, x); }
INLINE vi dot_i4_sum(vi acc) { return acc; }
#elif defined(OCTAVO_AVX512)
#define I8_OFFSET 0
INLINE vi dot_i8(vi acc, vb w, vb x) {
  vb signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
  vi pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_x);
  return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
/* 16-bit sums: 8 quads of at most 2 * 15 * 127 each */
INLINE vi dot_i4(vi acc, vb w, vb x) { return _mm512_add_epi16(acc, _mm512_maddubs_epi16(w, x)); }
INLINE vi dot_i4_sum(vi acc) { return _mm512_madd_epi16(acc, _mm512_set1_epi16(1)); }
#else
#define I8_OFFSET 0
INLINE vi dot_i8(vi acc, vb w, vb x) {
  vi pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE vi dot_i4(vi acc, vb w, vb x) { return _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x)); }
INLINE vi dot_i4_sum(vi acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
#endif

#else /* NEON and plain C: LANES = 4 */

#define I8_OFFSET 0
typedef int8_t vb __attribute__((vector_size(16)));
INLINE vb vb_load(const void *p) { vb a; memcpy(&a, p, 16); return a; }
INLINE vb vb_low(vb a) { return a & 15; }
INLINE vb vb_high(vb a) { return (a >> 4) & 15; }
INLINE vb vb_quad(const int8_t *q) {
  vb a;
  for (int i = 0; i < 16; i++) a[i] = q[i % 4];
  return a;
}
#if defined(OCTAVO_NEON) && defined(__ARM_FEATURE_DOTPROD)
INLINE vi dot_i8(vi acc, vb w, vb x) { return vdotq_s32(acc, (int8x16_t)w, (int8x16_t)x); }
#else
INLINE vi dot_i8(vi acc, vb w, vb x) {
  for (int i = 0; i < 16; i++) acc[i / 4] += (int32_t)w[i] * x[i];
  return acc;
}
#endif
INLINE vi dot_i4(vi acc, vb w, vb x) { return dot_i8(acc, w, x); }
INLINE vi dot_i4_sum(vi acc) { return acc; }

#endif

/* Round 32 floats to row r of M of a packed group. Magnitudes below 1e-30 count as zero; a group with
 * a NaN or an infinity has scale NaN. */
INLINE void quantize_group(const float *x, int8_t *group, int64_t M, int64_t r) {
  const vi magnitude = vi_set(0x7fffffff); /* floats without sign are ordered as integers, NaN above all */
  vi top = vi_set(0);
  for (int i = 0; i < GROUP; i += LANES) top = vi_max(top, vi_and(vf_as_int(vf_load(x + i)), magnitude));
  const int32_t bits = vi_most(top);
  float most, d = NAN;
  memcpy(&most, &bits, 4);
  const int finite = bits < 0x7f800000;
  const float inverse = finite && most > 1e-30f ? 127.0f / most : 0.0f;
  if (finite) d = most / 127.0f;
  vi sum = vi_set(0);
  for (int i = 0; i < GROUP; i += LANES) {
    const vi q = finite ? vf_to_int(vf_mul(vf_load(x + i), vf_set(inverse))) : vi_set(0);
    vi_store_i8(group + r * GROUP + i, q);
    sum = vi_add(sum, q);
  }
  const int32_t total = vi_sum(sum), t = -128 * total;
  const float s = d * (float)total;
  memcpy(group + M * GROUP + r * 4, &d, 4);
  memcpy(group + M * (GROUP + 4) + r * 4, &s, 4);
  memcpy(group + M * (GROUP + 8) + r * 4, &t, 4);
}

#endif
