/* Activation functions of gated layers. */
#ifndef OCTAVO_ACTIVATIONS_H
#define OCTAVO_ACTIVATIONS_H

#include "kernels.h"
#include "simd.h"

/* tanh y = 1 - 2 / (e^2y + 1) */
INLINE vf vf_tanh(vf y) {
  const vf e = vf_add(vf_exp(vf_add(y, y)), vf_set(1.0f));
  return vf_sub(vf_set(1.0f), vf_div(vf_set(2.0f), e));
}

/* Error function: Abramowitz and Stegun 7.1.26, absolute error below 2e-7. */
INLINE vf vf_erf(vf y) {
  const vf zero = vf_set(0.0f), size = vf_max(vf_sub(zero, y), y);
  const vf t = vf_div(vf_set(1.0f), vf_fma(vf_set(0.3275911f), size, vf_set(1.0f)));
  vf p = vf_set(1.061405429f);
  p = vf_fma(p, t, vf_set(-1.453152027f));
  p = vf_fma(p, t, vf_set(1.421413741f));
  p = vf_fma(p, t, vf_set(-0.284496736f));
  p = vf_fma(p, t, vf_set(0.254829592f));
  p = vf_mul(p, t);
  const vf e = vf_exp(vf_sub(zero, vf_mul(size, size)));
  const vf r = vf_sub(vf_set(1.0f), vf_mul(p, e));
  return vf_less(y, zero, vf_sub(zero, r), r);
}

INLINE vf activate(int activation, vf x) {
  const vf one = vf_set(1.0f), half = vf_set(0.5f);
  switch (activation) {
    case ACT_SILU: return vf_div(x, vf_add(one, vf_exp(vf_sub(vf_set(0.0f), x))));
    case ACT_GELU: return vf_mul(vf_mul(half, x), vf_add(one, vf_erf(vf_mul(x, vf_set(0.70710678118654752f)))));
    case ACT_GELU_TANH: { /* tanh(sqrt(2 / pi) (x + 0.044715 x^3)) */
      const vf cube = vf_mul(vf_mul(x, x), x);
      const vf inner = vf_mul(vf_set(0.79788456080286536f), vf_fma(vf_set(0.044715f), cube, x));
      return vf_mul(vf_mul(half, x), vf_add(one, vf_tanh(inner)));
    }
    default: return x;
  }
}

#endif
