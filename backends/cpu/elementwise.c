/* Kernels on rows of activations. A row's result depends on that row alone. */
#include "kernels.h"
#include "simd.h"

/* x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019). Squares are summed in 16 lanes, each
 * a chain over the row, and the lanes in a fixed tree. */
void rms_norm_row(const float *from, int64_t k, const float *weight, double eps, float *to) {
  panel squares = panel_set(0.0f);
  const int64_t whole = k / PANEL * PANEL;
  for (int64_t i = 0; i < whole; i += PANEL)
    for (int v = 0; v < VPP; v++) {
      const vf a = vf_load(from + i + v * LANES);
      squares.v[v] = vf_fma(a, a, squares.v[v]);
    }
  if (whole < k) {
    float last[PANEL] = {0};
    memcpy(last, from + whole, (size_t)(k - whole) * sizeof(float));
    for (int v = 0; v < VPP; v++) {
      const vf a = vf_load(last + v * LANES);
      squares.v[v] = vf_fma(a, a, squares.v[v]);
    }
  }
  const float inverse = 1.0f / sqrtf(panel_sum(squares) / (float)k + (float)eps);
  int64_t i = 0;
  for (; i < whole; i += LANES)
    vf_store(to + i, vf_mul(vf_mul(vf_load(from + i), vf_set(inverse)), vf_load(weight + i)));
  for (; i < k; i++) to[i] = from[i] * inverse * weight[i];
}
