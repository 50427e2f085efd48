/* Register tiles of linear layers with float32 or bfloat16 weights. */
#include "tiles.h"

INLINE vf load_weight(const void *w, int64_t at, const int kind) {
  return kind == W_F32 ? vf_load((const float *)w + at) : vf_load_bf16((const uint16_t *)w + at);
}



/* One input of M rows times NP panels. x: the first row's value, `xstep` floats a row. */
INLINE void tile_step(const int M, const int NP, const int kind, const float *x, const int xstep,
                      const void *w, int64_t at, int64_t stride, vf *acc) {
  vf wv[MAX_W];
#pragma GCC unroll 8
  for (int p = 0; p < NP; p++)
#pragma GCC unroll 4
    for (int i = 0; i < VPP; i++) wv[p * VPP + i] = load_weight(w, at + p * stride + i * LANES, kind);
#pragma GCC unroll 12
  for (int r = 0; r < M; r++) {
    vf xv = vf_set(x[r * xstep]);
#pragma GCC unroll 16
    for (int j = 0; j < NP * VPP; j++)
      acc[r * NP * VPP + j] = vf_fma(xv, wv[j], acc[r * NP * VPP + j]);
  }
}

/* c[M][cstride] (+)= x w over kc inputs; `first`: c starts at zero. x: packed [kc / XB][M][XB]. w:
 * NP panels, `stride` elements apart. */
INLINE void tile_float(const int M, const int NP, const int kind, const float *x, const void *w,
                       int64_t stride, int64_t kc, float *c, int64_t cstride, int first) {
  vf acc[MAX_ACC];
#pragma GCC unroll 12
  for (int r = 0; r < M; r++)
#pragma GCC unroll 16
    for (int j = 0; j < NP * VPP; j++)
      acc[r * NP * VPP + j] = first ? vf_set(0.0f) : vf_load(c + r * cstride + j * LANES);
  int64_t k = 0;
  for (; k + XB <= kc; k += XB, x += M * XB)
    for (int kk = 0; kk < XB; kk += M * NP * VPP > 8 ? 1 : 2) {
      tile_step(M, NP, kind, x + kk, XB, w, (k + kk) * PANEL, stride, acc);
      if (M * NP * VPP <= 8) /* a small tile leaves gaps that the next step fills */
        tile_step(M, NP, kind, x + kk + 1, XB, w, (k + kk + 1) * PANEL, stride, acc);
    }
  for (; k < kc; k++, x++) tile_step(M, NP, kind, x, XB, w, k * PANEL, stride, acc);
#pragma GCC unroll 12
  for (int r = 0; r < M; r++)
#pragma GCC unroll 16
    for (int j = 0; j < NP * VPP; j++) vf_store(c + r * cstride + j * LANES, acc[r * NP * VPP + j]);
}

#define FLOAT_TILE(kind, M, NP) TILE_DEFINE(tile_float, kind, M, NP)
FOR_TILES(FLOAT_TILE, W_F32)
FOR_TALL_TILES(FLOAT_TILE, W_F32)
FOR_TILES(FLOAT_TILE, W_BF16)
FOR_TALL_TILES(FLOAT_TILE, W_BF16)

const tile_fn float_tiles[2][MR + 1][4] = {
    {FOR_TILES(TILE_ENTRY, W_F32) FOR_TALL_TILES(TILE_ENTRY, W_F32)},
    {FOR_TILES(TILE_ENTRY, W_BF16) FOR_TALL_TILES(TILE_ENTRY, W_BF16)},
};
