/* The register tiles of linear layers: M rows by NP panels of accumulators, NP a power of two. */
#ifndef OCTAVO_TILES_H
#define OCTAVO_TILES_H

#include "kernels.h"
#include "simd.h"

#define XB 16 /* inputs of one row that lie together in a packed tile of x */

/* MR: rows of the largest tile. FOR_TILES: the shapes that fill the registers, and narrower ones for
 * the panels that are left over. LOW: rows of the tiles that many rows are cut into, which load the
 * least; FOR_TALL_TILES: for floats, those that take a few more rows at once, so that their weights are
 * read once. */
#define LOW (MR < 6 ? MR : 6)
#if defined(OCTAVO_AVX512)
#define MR 12
#define MAX_ACC 24
#define FOR_TALL_TILES(DO, kind)                                                                  \
  DO(kind, 7, 2) DO(kind, 7, 1) DO(kind, 8, 2) DO(kind, 8, 1) DO(kind, 9, 2) DO(kind, 9, 1)       \
  DO(kind, 10, 2) DO(kind, 10, 1) DO(kind, 11, 2) DO(kind, 11, 1) DO(kind, 12, 2) DO(kind, 12, 1)
#define FOR_TILES(DO, kind)                                                                       \
  DO(kind, 1, 8) DO(kind, 1, 2) DO(kind, 1, 1) DO(kind, 2, 8) DO(kind, 2, 2) DO(kind, 2, 1)       \
  DO(kind, 3, 4) DO(kind, 3, 2) DO(kind, 3, 1) DO(kind, 4, 4) DO(kind, 4, 2) DO(kind, 4, 1)       \
  DO(kind, 5, 4) DO(kind, 5, 2) DO(kind, 5, 1) DO(kind, 6, 4) DO(kind, 6, 2) DO(kind, 6, 1)
#elif defined(OCTAVO_AVX2)
#define MR 6
#define MAX_ACC 12
#define FOR_TILES(DO, kind)                                                                       \
  DO(kind, 1, 4) DO(kind, 1, 2) DO(kind, 1, 1) DO(kind, 2, 2) DO(kind, 2, 1) DO(kind, 3, 2)       \
  DO(kind, 3, 1) DO(kind, 4, 1) DO(kind, 5, 1) DO(kind, 6, 1)
#elif defined(OCTAVO_NEON)
#define MR 6
#define MAX_ACC 24
#define FOR_TILES(DO, kind)                                                                       \
  DO(kind, 1, 4) DO(kind, 1, 1) DO(kind, 2, 2) DO(kind, 2, 1) DO(kind, 3, 2) DO(kind, 3, 1)       \
  DO(kind, 4, 1) DO(kind, 5, 1) DO(kind, 6, 1)
#else
#define MR 2
#define MAX_ACC 8
#define FOR_TILES(DO, kind) DO(kind, 1, 1) DO(kind, 2, 1)
#endif
#ifndef FOR_TALL_TILES
#define FOR_TALL_TILES(DO, kind)
#endif
#define MAX_W 16 /* vectors of one input's weights */

/* c[M][cstride] (+)= x w over kc inputs of a packed tile; `first`: c starts at zero. w: panels that
 * are `stride` elements (integers: bytes) apart. */
typedef void (*tile_fn)(const void *x, const void *w, int64_t stride, int64_t kc, float *c,
                        int64_t cstride, int first);

/* [0: W_F32 or W_I8, 1: W_BF16 or W_I4][M][log2 NP], NULL where there is no such shape. */
extern const tile_fn float_tiles[2][MR + 1][4], int_tiles[2][MR + 1][4];

/* log2 of the most panels a tile of M rows can take of `left`. */
static inline int widest(int64_t M, int64_t left) {
  int log = 3;
  while (log && (!float_tiles[0][M][log] || (1 << log) > left)) log--;
  return log;
}

#define TILE_LOG(NP) ((NP) == 8 ? 3 : (NP) == 4 ? 2 : (NP) == 2 ? 1 : 0)
#define TILE_ENTRY(kind, M, NP) [M][TILE_LOG(NP)] = kind##_##M##_##NP,
#define TILE_DEFINE(body, kind, M, NP)                                                            \
  static void kind##_##M##_##NP(const void *x, const void *w, int64_t stride, int64_t kc,         \
                                float *c, int64_t cstride, int first) {                           \
    body(M, NP, kind, x, w, stride, kc, c, cstride, first);                                       \
  }

#endif
