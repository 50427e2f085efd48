/* Vectors of float32 for AVX-512, AVX2, NEON, and plain C as the last resort.
 *
 * A panel is PANEL = 16 outputs, VPP vectors of LANES floats. Every kernel keeps one chain of fused
 * multiply-adds an output, so the three vector widths give the same bits. Horizontal sums and
 * maxima go through `panel_sum` and `panel_max`: lane i with i + 8, then 4, 2, 1, at every width.
 */
#ifndef OCTAVO_SIMD_H
#define OCTAVO_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define PANEL 16
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__) && !defined(OCTAVO_GENERIC)
#define OCTAVO_AVX512 1
#define OCTAVO_X86 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(OCTAVO_GENERIC)
#define OCTAVO_AVX2 1
#define OCTAVO_X86 1
#elif defined(__ARM_NEON) && defined(__aarch64__) && !defined(OCTAVO_GENERIC)
#define OCTAVO_NEON 1
#endif

#ifdef OCTAVO_X86
#include <immintrin.h>
#endif
#ifdef OCTAVO_NEON
#include <arm_neon.h>
#endif

/* ---- vf: LANES floats, vi: LANES int32 ------------------------------------------------------ */

#if defined(OCTAVO_AVX512)

#define LANES 16
#define ISA_NAME "avx512"
typedef __m512 vf;
typedef __m512i vi;
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf vf_set(float a) { return _mm512_set1_ps(a); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vi vf_to_int(vf a) { return _mm512_cvtps_epi32(a); }
INLINE vf vi_to_float(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi vi_set(int32_t a) { return _mm512_set1_epi32(a); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi vi_neg(vi a) { return _mm512_sub_epi32(_mm512_setzero_si512(), a); }
#define vi_shl(a, n) _mm512_slli_epi32(a, n)
#define vi_shr(a, n) _mm512_srli_epi32(a, n)
INLINE vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
INLINE int32_t vi_most(vi a) { return _mm512_reduce_max_epi32(a); }
INLINE int32_t vi_sum(vi a) { return _mm512_reduce_add_epi32(a); }
INLINE void vi_store_i8(int8_t *p, vi a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }
INLINE vf vi_as_float(vi a) { return _mm512_castsi512_ps(a); }
INLINE vi vf_as_int(vf a) { return _mm512_castps_si512(a); }
/* a where x < y, else b (also when x is NaN) */
INLINE vf vf_less(vf x, vf y, vf a, vf b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}
/* LANES bfloat16 or float16 values as floats */
INLINE vf vf_load_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf vf_load_i8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE void vi_store_u16(uint16_t *p, vi a) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(a)); }
INLINE void vf_store_f16(uint16_t *p, vf a) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(OCTAVO_AVX2)

#define LANES 8
#define ISA_NAME "avx2"
typedef __m256 vf;
typedef __m256i vi;
INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
INLINE vf vf_set(float a) { return _mm256_set1_ps(a); }
INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vi vf_to_int(vf a) { return _mm256_cvtps_epi32(a); }
INLINE vf vi_to_float(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vi vi_set(int32_t a) { return _mm256_set1_epi32(a); }
INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi vi_neg(vi a) { return _mm256_sub_epi32(_mm256_setzero_si256(), a); }
#define vi_shl(a, n) _mm256_slli_epi32(a, n)
#define vi_shr(a, n) _mm256_srli_epi32(a, n)
INLINE vi vi_max(vi a, vi b) { return _mm256_max_epi32(a, b); }
INLINE int32_t vi_most(vi a) {
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
INLINE int32_t vi_sum(vi a) {
  __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
INLINE void vi_store_i8(int8_t *p, vi a) { /* the lowest byte of each */
  const __m256i b = _mm256_shuffle_epi8(a, _mm256_set1_epi32(0x0c080400));
  const int32_t low = _mm_cvtsi128_si32(_mm256_castsi256_si128(b));
  const int32_t high = _mm_cvtsi128_si32(_mm256_extracti128_si256(b, 1));
  memcpy(p, &low, 4);
  memcpy(p + 4, &high, 4);
}
INLINE vf vi_as_float(vi a) { return _mm256_castsi256_ps(a); }
INLINE vi vf_as_int(vf a) { return _mm256_castps_si256(a); }
INLINE vf vf_less(vf x, vf y, vf a, vf b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ)); }
INLINE vf vf_load_bf16(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE vf vf_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf vf_load_i8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE void vi_store_u16(uint16_t *p, vi a) {
  __m256i words = _mm256_packus_epi32(a, a);
  _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08)));
}
INLINE void vf_store_f16(uint16_t *p, vf a) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(OCTAVO_NEON)

#define LANES 4
#define ISA_NAME "neon"
typedef float32x4_t vf;
typedef int32x4_t vi;
INLINE vf vf_load(const float *p) { return vld1q_f32(p); }
INLINE void vf_store(float *p, vf a) { vst1q_f32(p, a); }
INLINE vf vf_set(float a) { return vdupq_n_f32(a); }
INLINE vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
/* as x86: the second operand when either is NaN */
INLINE vf vf_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE vf vf_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE vf vf_round(vf a) { return vrndnq_f32(a); }
INLINE vi vf_to_int(vf a) { return vcvtnq_s32_f32(a); }
INLINE vf vi_to_float(vi a) { return vcvtq_f32_s32(a); }
INLINE vi vi_set(int32_t a) { return vdupq_n_s32(a); }
INLINE vi vi_add(vi a, vi b) { return vaddq_s32(a, b); }
INLINE vi vi_and(vi a, vi b) { return vandq_s32(a, b); }
INLINE vi vi_neg(vi a) { return vnegq_s32(a); }
#define vi_shl(a, n) vshlq_n_s32(a, n)
#define vi_shr(a, n) vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), n))
INLINE vi vi_max(vi a, vi b) { return vmaxq_s32(a, b); }
INLINE int32_t vi_most(vi a) { return vmaxvq_s32(a); }
INLINE int32_t vi_sum(vi a) { return vaddvq_s32(a); }
INLINE void vi_store_i8(int8_t *p, vi a) {
  for (int i = 0; i < 4; i++) p[i] = (int8_t)a[i];
}
INLINE vf vi_as_float(vi a) { return vreinterpretq_f32_s32(a); }
INLINE vi vf_as_int(vf a) { return vreinterpretq_s32_f32(a); }
INLINE vf vf_less(vf x, vf y, vf a, vf b) { return vbslq_f32(vcltq_f32(x, y), a, b); }
INLINE vf vf_load_bf16(const uint16_t *p) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16));
}
INLINE vf vf_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE vf vf_load_i8(const int8_t *p) {
  int32_t four;
  memcpy(&four, p, 4);
  int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
INLINE void vi_store_u16(uint16_t *p, vi a) { vst1_u16(p, vmovn_u32(vreinterpretq_u32_s32(a))); }
INLINE void vf_store_f16(uint16_t *p, vf a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }

#else

#define LANES 4
#define ISA_NAME "generic"
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));
#define EACH for (int lane = 0; lane < 4; lane++)
INLINE vf vf_load(const float *p) { vf a; memcpy(&a, p, 16); return a; }
INLINE void vf_store(float *p, vf a) { memcpy(p, &a, 16); }
INLINE vf vf_set(float a) { return (vf){a, a, a, a}; }
INLINE vf vf_add(vf a, vf b) { return a + b; }
INLINE vf vf_sub(vf a, vf b) { return a - b; }
INLINE vf vf_mul(vf a, vf b) { return a * b; }
INLINE vf vf_div(vf a, vf b) { return a / b; }
#ifdef FP_FAST_FMAF
INLINE vf vf_fma(vf a, vf b, vf c) { EACH c[lane] = fmaf(a[lane], b[lane], c[lane]); return c; }
#else
INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
#endif
INLINE vf vf_max(vf a, vf b) { EACH a[lane] = a[lane] > b[lane] ? a[lane] : b[lane]; return a; }
INLINE vf vf_min(vf a, vf b) { EACH a[lane] = a[lane] < b[lane] ? a[lane] : b[lane]; return a; }
INLINE vf vf_round(vf a) { EACH a[lane] = nearbyintf(a[lane]); return a; }
INLINE vi vf_to_int(vf a) { vi r; EACH r[lane] = (int32_t)nearbyintf(a[lane]); return r; }
INLINE vf vi_to_float(vi a) { vf r; EACH r[lane] = (float)a[lane]; return r; }
INLINE vi vi_set(int32_t a) { return (vi){a, a, a, a}; }
INLINE vi vi_add(vi a, vi b) { return a + b; }
INLINE vi vi_and(vi a, vi b) { return a & b; }
INLINE vi vi_neg(vi a) { return -a; }
#define vi_shl(a, n) ((a) << (n))
#define vi_shr(a, n) ((vi)((vu)(a) >> (n)))
INLINE vi vi_max(vi a, vi b) { EACH a[lane] = a[lane] > b[lane] ? a[lane] : b[lane]; return a; }
INLINE int32_t vi_most(vi a) { int32_t r = a[0]; EACH r = a[lane] > r ? a[lane] : r; return r; }
INLINE int32_t vi_sum(vi a) { return a[0] + a[1] + a[2] + a[3]; }
INLINE void vi_store_i8(int8_t *p, vi a) { EACH p[lane] = (int8_t)a[lane]; }
INLINE vf vi_as_float(vi a) { return (vf)a; }
INLINE vi vf_as_int(vf a) { return (vi)a; }
INLINE vf vf_less(vf x, vf y, vf a, vf b) { EACH b[lane] = x[lane] < y[lane] ? a[lane] : b[lane]; return b; }
INLINE vf vf_load_bf16(const uint16_t *p) { vi r; EACH r[lane] = (int32_t)((uint32_t)p[lane] << 16); return (vf)r; }
INLINE float f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
  float value;
  if (rest >= 0x7c00) bits = 0x7f800000u | (rest << 13);
  else if (rest >= 0x0400) bits = (rest << 13) + 0x38000000u;
  else { value = (float)rest * 0x1p-24f; memcpy(&bits, &value, 4); }
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}
INLINE vf vf_load_f16(const uint16_t *p) { vf r; EACH r[lane] = f16_to_f32(p[lane]); return r; }
INLINE vf vf_load_i8(const int8_t *p) { vf r; EACH r[lane] = (float)p[lane]; return r; }
INLINE void vi_store_u16(uint16_t *p, vi a) { EACH p[lane] = (uint16_t)a[lane]; }
INLINE uint16_t f32_to_f16(float a) {
  uint32_t bits;
  memcpy(&bits, &a, 4);
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) return (uint16_t)(sign | (uint16_t)nearbyintf(fabsf(a) * 0x1p24f));
  return (uint16_t)(sign | ((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13));
}
INLINE void vf_store_f16(uint16_t *p, vf a) { EACH p[lane] = f32_to_f16(a[lane]); }
#undef EACH

#endif

#define VPP (PANEL / LANES)

/* Nearest even bfloat16; NaN stays NaN (its magnitude is the only one above infinity's). */
INLINE void vf_store_bf16(uint16_t *p, vf a) {
  vi bits = vf_as_int(a);
  vi odd = vi_and(vi_shr(bits, 16), vi_set(1));
  vi up = vi_add(odd, vi_set(0x7fff));
  vi magnitude = vi_and(bits, vi_set(0x7fffffff));
  vi nan = vi_shr(vi_add(vi_set(0x7f800000), vi_neg(magnitude)), 31); /* 1 for NaN, else 0 */
  vi keep = vi_add(nan, vi_set(-1));                                  /* 0 for NaN, else all ones */
  vi_store_u16(p, vi_shr(vi_add(bits, vi_and(up, keep)), 16));
}

/* ---- panels: 16 floats ----------------------------------------------------------------------- */

typedef struct { vf v[VPP]; } panel;

INLINE panel panel_load(const float *p) {
  panel r;
  for (int i = 0; i < VPP; i++) r.v[i] = vf_load(p + i * LANES);
  return r;
}
INLINE void panel_store(float *p, panel a) {
  for (int i = 0; i < VPP; i++) vf_store(p + i * LANES, a.v[i]);
}
INLINE panel panel_set(float a) {
  panel r;
  for (int i = 0; i < VPP; i++) r.v[i] = vf_set(a);
  return r;
}
INLINE float panel_sum(panel a) {
  float t[PANEL];
  panel_store(t, a);
  for (int half = PANEL / 2; half; half /= 2)
    for (int i = 0; i < half; i++) t[i] = t[i] + t[i + half];
  return t[0];
}
INLINE float panel_max(panel a) {
  float t[PANEL];
  panel_store(t, a);
  for (int half = PANEL / 2; half; half /= 2)
    for (int i = 0; i < half; i++) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
  return t[0];
}

/* e^x in float32: x = n ln 2 + r, |r| <= ln 2 / 2, degree-6 polynomial (Cody and Waite's reduction,
 * coefficients of the Cephes library's expf), relative error below 2e-7. 0 below -87.3 (also for
 * -inf), e^88.3 above 88.3; NaN stays NaN. */
INLINE vf vf_exp(vf x) {
  const vf low = vf_set(-87.3f);
  vf c = vf_min(vf_set(88.3f), vf_max(low, x));
  vf n = vf_round(vf_mul(c, vf_set(1.44269504088896341f)));
  vf r = vf_fma(n, vf_set(-0.693359375f), c);
  r = vf_fma(n, vf_set(2.12194440e-4f), r);
  vf y = vf_set(1.9875691500e-4f);
  y = vf_fma(y, r, vf_set(1.3981999507e-3f));
  y = vf_fma(y, r, vf_set(8.3334519073e-3f));
  y = vf_fma(y, r, vf_set(4.1665795894e-2f));
  y = vf_fma(y, r, vf_set(1.6666665459e-1f));
  y = vf_fma(y, r, vf_set(5.0000001201e-1f));
  y = vf_add(vf_fma(vf_mul(r, r), y, r), vf_set(1.0f));
  vf power = vi_as_float(vi_shl(vi_add(vf_to_int(n), vi_set(127)), 23));
  return vf_less(x, low, vf_set(0.0f), vf_mul(y, power));
}

INLINE float scalar_exp(float x) {
  float lanes[LANES];
  vf_store(lanes, vf_exp(vf_set(x)));
  return lanes[0];
}

/* ---- element types of tensors ---------------------------------------------------------------- */

enum { DT_F32 = 0, DT_BF16 = 1, DT_F16 = 2, DT_FP8 = 3, DT_I8 = 4 };

/* float8 e4m3 (Micikevicius et al., 2022): its exponent and mantissa, shifted into place, are the
 * value times 2^-120; magnitude 127 is NaN. */
INLINE vf vf_load_fp8(const uint8_t *p) {
  int32_t wide[LANES];
  for (int i = 0; i < LANES; i++) wide[i] = p[i];
  vi bits;
  memcpy(&bits, wide, sizeof bits);
  vi magnitude = vi_and(bits, vi_set(0x7f));
  vi sign = vi_shl(vi_and(bits, vi_set(0x80)), 24);
  vf size = vf_mul(vi_as_float(vi_shl(magnitude, 20)), vf_set(0x1p120f));
  vi nan = vi_and(vi_neg(vi_shr(vi_add(magnitude, vi_set(1)), 7)), vi_set(0x7fc00000));
  return vi_as_float(vi_add(vi_add(vf_as_int(vf_less(size, vf_set(480.0f), size, vf_set(0.0f))), sign), nan));
}

INLINE vf vf_load_as(const void *p, int64_t at, int type) {
  switch (type) {
    case DT_F32: return vf_load((const float *)p + at);
    case DT_BF16: return vf_load_bf16((const uint16_t *)p + at);
    case DT_F16: return vf_load_f16((const uint16_t *)p + at);
    case DT_I8: return vf_load_i8((const int8_t *)p + at);
    default: return vf_load_fp8((const uint8_t *)p + at);
  }
}

#endif
