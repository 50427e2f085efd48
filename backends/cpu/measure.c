/* What the machine can do at best: bytes read and multiply-adds a second, for benchmarks to compare
 * with. */
#include "kernels.h"
#include "simd.h"

#define CHAINS 12 /* multiply-adds in flight: latency times units */

/* Read n floats (a multiple of 4 * LANES) on all threads; the sum is of no interest. */
EXPORT float octavo_measure_read(const float *x, int64_t n, int64_t threads) {
  float total = 0.0f;
#pragma omp parallel num_threads((int)threads) reduction(+ : total)
  {
    vf sum[4] = {vf_set(0.0f), vf_set(0.0f), vf_set(0.0f), vf_set(0.0f)};
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i += 4 * LANES)
      for (int j = 0; j < 4; j++) sum[j] = vf_add(sum[j], vf_load(x + i + j * LANES));
    float lanes[LANES];
    vf_store(lanes, vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
    for (int i = 0; i < LANES; i++) total += lanes[i];
  }
  return total;
}

/* `rounds` rounds of multiply-adds in registers on each thread: 2 * CHAINS * LANES operations a round.
 * Returns the operations of one round. */
EXPORT int64_t octavo_measure_multiply(int64_t rounds, int64_t threads, float *out) {
#pragma omp parallel num_threads((int)threads)
  {
    vf a[CHAINS];
    const vf x = vf_set(out[0]), y = vf_set(out[1]);
    for (int i = 0; i < CHAINS; i++) a[i] = vf_set((float)i);
    for (int64_t k = 0; k < rounds; k++) {
#pragma GCC unroll 12
      for (int i = 0; i < CHAINS; i++) a[i] = vf_fma(a[i], x, y);
    }
    float lanes[LANES], sum = 0.0f;
    for (int i = 0; i < CHAINS; i++) {
      vf_store(lanes, a[i]);
      sum += lanes[0];
    }
#pragma omp critical
    out[2] += sum; /* so that the loop is not left out */
  }
  return 2 * CHAINS * LANES;
}
