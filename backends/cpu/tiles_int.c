/* Register tiles of linear layers with 8- and 4-bit weights; see integers.h. */
#include "integers.h"
#include "tiles.h"

/* The integer sums of one group, M rows by NP panels. */
INLINE void group_i8(const int M, const int NP, const int8_t *q, const int32_t *t, const uint8_t *w,
                     int64_t stride, vi *acc) {
#pragma GCC unroll 12
  for (int r = 0; r < M; r++)
#pragma GCC unroll 16
    for (int j = 0; j < NP * VPP; j++) acc[r * NP * VPP + j] = vi_set(I8_OFFSET ? t[r] : 0);
#pragma GCC unroll 8
  for (int quad = 0; quad < GROUP / 4; quad++) {
    vb wv[MAX_W];
#pragma GCC unroll 16
    for (int j = 0; j < NP * VPP; j++)
      wv[j] = vb_load(w + j / VPP * stride + 2 * PANEL + quad * 4 * PANEL + j % VPP * 4 * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) {
      vb x = vb_quad(q + r * GROUP + quad * 4);
#pragma GCC unroll 16
      for (int j = 0; j < NP * VPP; j++) acc[r * NP * VPP + j] = dot_i8(acc[r * NP * VPP + j], wv[j], x);
    }
  }
}

INLINE void group_i4(const int M, const int NP, const int8_t *q, const uint8_t *w, int64_t stride,
                     vi *acc) {
#pragma GCC unroll 12
  for (int r = 0; r < M; r++)
#pragma GCC unroll 16
    for (int j = 0; j < NP * VPP; j++) acc[r * NP * VPP + j] = vi_set(0);
#pragma GCC unroll 4
  for (int pair = 0; pair < GROUP / 8; pair++)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      vb wv[MAX_W];
#pragma GCC unroll 16
      for (int j = 0; j < NP * VPP; j++) {
        vb both = vb_load(w + j / VPP * stride + 4 * PANEL + pair * 4 * PANEL + j % VPP * 4 * LANES);
        wv[j] = half ? vb_high(both) : vb_low(both);
      }
#pragma GCC unroll 12
      for (int r = 0; r < M; r++) {
        vb x = vb_quad(q + r * GROUP + pair * 8 + half * 4);
#pragma GCC unroll 16
        for (int j = 0; j < NP * VPP; j++)
          acc[r * NP * VPP + j] = dot_i4(acc[r * NP * VPP + j], wv[j], x);
      }
    }
}

/* c[M][cstride] (+)= x w over kc inputs (a multiple of GROUP); `first`: c starts at zero. x: packed
 * groups. w: NP panels, `stride` bytes apart. */
INLINE void tile_int(const int M, const int NP, const int kind, const void *x, const void *w,
                     int64_t stride, int64_t kc, float *c, int64_t cstride, int first) {
  const int8_t *q = x;
  const uint8_t *wg = w;
  /* the float sums wait in memory, close together, while integers have the registers */
  float sums[MAX_ACC * LANES] __attribute__((aligned(64)));
  for (int r = 0; r < M; r++)
    for (int j = 0; j < NP * VPP; j++)
      vf_store(sums + (r * NP * VPP + j) * LANES, first ? vf_set(0.0f) : vf_load(c + r * cstride + j * LANES));
  for (int64_t k = 0; k < kc; k += GROUP) {
    const float *d = (const float *)(q + M * GROUP), *s = d + M;
    vi acc[MAX_ACC];
    if (kind == W_I8)
      group_i8(M, NP, q, (const int32_t *)(s + M), wg, stride, acc);
    else
      group_i4(M, NP, q, wg, stride, acc);
#pragma GCC unroll 16
    for (int j = 0; j < NP * VPP; j++) {
      const uint16_t *half = (const uint16_t *)(wg + j / VPP * stride) + j % VPP * LANES;
      const vf wd = vf_load_f16(half), wm = kind == W_I4 ? vf_load_f16(half + PANEL) : wd;
#pragma GCC unroll 12
      for (int r = 0; r < M; r++) {
        float *at = sums + (r * NP * VPP + j) * LANES;
        const vi total = kind == W_I8 ? acc[r * NP * VPP + j] : dot_i4_sum(acc[r * NP * VPP + j]);
        vf sum = vf_fma(vf_mul(vf_set(d[r]), wd), vi_to_float(total), vf_load(at));
        if (kind == W_I4) sum = vf_fma(wm, vf_set(s[r]), sum);
        vf_store(at, sum);
        /* one after another: a compiler that loads all sums first has no registers left */
        __asm__ volatile("" ::: "memory");
      }
    }
    q += XGROUP_BYTES(M);
    wg += kind == W_I8 ? I8_BYTES : I4_BYTES;
  }
  for (int r = 0; r < M; r++)
    for (int j = 0; j < NP * VPP; j++)
      vf_store(c + r * cstride + j * LANES, vf_load(sums + (r * NP * VPP + j) * LANES));
}

#define INT_TILE(kind, M, NP) TILE_DEFINE(tile_int, kind, M, NP)
FOR_TILES(INT_TILE, W_I8)
FOR_TILES(INT_TILE, W_I4)

const tile_fn int_tiles[2][MR + 1][4] = {{FOR_TILES(TILE_ENTRY, W_I8)}, {FOR_TILES(TILE_ENTRY, W_I4)}};
