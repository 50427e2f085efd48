/* One token a row, as octavo.core.contracts.sampler defines it: temperature, top_k, top_p and min_p,
 * then the best of value plus Gumbel noise.
 *
 * Nothing is sorted. top_k and top_p are a limit, the last token that is kept in descending order; it
 * is found by histograms of the values' bits, from the upper ones down, of tokens or of their weights.
 * Noise is computed only where it can still win: its generator's word bounds it without a logarithm.
 */
#include <math.h>

#include "kernels.h"
#include "simd.h"

#define BINS 2048
#define WEIGHT_ONE 0x1p40
#define LOWEST_WEIGHT -28.5 /* e^x 2^40 rounds to 0 below */
#define GUMBEL_MOST 22.88
#define LN2 0.69314718056

/* Kept are tokens with a larger value, or with this one and an id up to `last`. */
typedef struct {
  float value;
  int64_t last;
} limit_t;

static int keeps(limit_t limit, float x, int64_t t) {
  return x > limit.value || (x == limit.value && t <= limit.last);
}

/* ---- the largest value -------------------------------------------------------------------------------- */

#define CHUNK 1024

/* The first of the largest of x[n]; *top: its value, NAN when one is. */
static int64_t largest_of(const float *x, int64_t n, float *top) {
  const vf zero = vf_set(0.0f), one = vf_set(1.0f), above = vf_set(INFINITY), below = vf_set(-INFINITY);
  vf nan = zero;
  float lanes[LANES], broken = 0.0f;
  int64_t where = 0;
  *top = -INFINITY;
  for (int64_t start = 0; start < n; start += CHUNK) {
    const int64_t end = n - start < CHUNK ? n : start + CHUNK;
    vf most = below;
    for (int64_t i = start; i < end; i += LANES) {
      vf a;
      if (i + LANES <= n) {
        a = vf_load(x + i);
      } else {
        for (int j = 0; j < LANES; j++) lanes[j] = i + j < n ? x[i + j] : -INFINITY;
        a = vf_load(lanes);
      }
      most = vf_max(a, most);
      /* a NaN is neither below infinity nor above minus infinity */
      nan = vf_max(nan, vf_mul(vf_less(a, above, zero, one), vf_less(below, a, zero, one)));
    }
    vf_store(lanes, most);
    for (int j = 0; j < LANES; j++)
      if (lanes[j] > *top) *top = lanes[j], where = start;
  }
  vf_store(lanes, nan);
  for (int j = 0; j < LANES; j++) broken += lanes[j];
  if (broken > 0.0f) *top = NAN;
  while (where < n - 1 && x[where] != *top && !(broken > 0.0f)) where++;
  return where;
}

/* to = x / temperature, at most the largest finite float */
static void divide(const float *x, int64_t n, float temperature, float *to) {
  const vf by = vf_set(temperature), most = vf_set(3.402823466e38f);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) vf_store(to + i, vf_min(vf_div(vf_load(x + i), by), most));
  for (; i < n; i++) {
    const float a = x[i] / temperature;
    to[i] = a > 3.402823466e38f ? 3.402823466e38f : a;
  }
}

/* ---- limits ---------------------------------------------------------------------------------------------- */

/* Orders as the float does; adding 0 makes -0 and 0 one. */
static uint32_t key_of(float x) {
  const float a = x + 0.0f;
  uint32_t bits;
  memcpy(&bits, &a, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static float value_of(uint32_t key) {
  const uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

/* Fixed-point weight of a value: 2^40 for `top`. */
static int64_t weight_of(float x, double top) {
  const double relative = (double)x - top;
  return relative < LOWEST_WEIGHT ? 0 : (int64_t)nearbyint(exp(relative) * WEIGHT_ONE);
}

/* What is kept when tokens are taken in descending order, from those that `within` keeps, until `need`
 * of them are there (share 0), or a share of all their weights. ids: room for n. */
static limit_t cut(const float *x, int64_t n, limit_t within, int64_t need, double share, double top, int32_t *ids) {
  static const int shifts[3] = {21, 10, 0}, bits[3] = {11, 11, 10};
  int64_t bins[BINS], count = 0;
  uint32_t prefix = 0;
  for (int level = 0; level < 3; level++) {
    const uint32_t mask = (1u << bits[level]) - 1;
    const int64_t candidates = level ? count : n;
    memset(bins, 0, sizeof bins);
    for (int64_t i = 0; i < candidates; i++) {
      const int64_t t = level ? ids[i] : i;
      if (!level && !keeps(within, x[t], t)) continue;
      bins[key_of(x[t]) >> shifts[level] & mask] += share > 0 ? weight_of(x[t], top) : 1;
    }
    if (!level && share > 0) {
      int64_t total = 0;
      for (int i = 0; i < BINS; i++) total += bins[i];
      need = (int64_t)ceil(share * (double)total);
    }
    int64_t bin = mask;
    while (bin && bins[bin] < need) need -= bins[bin--];
    prefix |= (uint32_t)bin << shifts[level];
    count = 0;
    for (int64_t i = 0; i < candidates; i++) {
      const int64_t t = level ? ids[i] : i;
      if (!level && !keeps(within, x[t], t)) continue;
      if ((key_of(x[t]) >> shifts[level] & mask) == (uint32_t)bin) ids[count++] = (int32_t)t;
    }
  }
  /* all that are left have one value; the lower ids come first */
  limit_t limit = {value_of(prefix), n};
  const int64_t each = share > 0 ? weight_of(limit.value, top) : 1;
  for (int64_t i = 0; i < count && each > 0; i++, need -= each)
    if (need <= each) {
      limit.last = ids[i];
      break;
    }
  return limit;
}

/* ---- the draw -------------------------------------------------------------------------------------------- */

/* Philox 4x32 with 10 rounds (Salmon et al., SC'11). */
static void philox(uint32_t c[4], uint64_t seed) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int i = 0; i < 10; i++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t a = (uint64_t)c[0] * 0xD2511F53u, b = (uint64_t)c[2] * 0xCD9E8D57u;
    c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0, c[1] = (uint32_t)b;
    c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1, c[3] = (uint32_t)a;
  }
}

typedef struct {
  const float *x;
  int64_t n, token;
  limit_t limit;
  float floor, best;
  uint64_t seed;
  uint32_t position, index;
} draw_t;

/* Whether noise of this word can reach `need`: with g = 2^32 - 1 - word of b bits, u = 1 - (g + 1/2) / 2^32,
 * and -log(-log u) <= -log(1 - u) <= (33 - b) log 2. */
static int can_reach(uint32_t word, double need) {
  const uint32_t gap = ~word;
  const int b = gap ? 32 - __builtin_clz(gap) : 0;
  return need <= (33 - b) * LN2;
}

static void try_block(draw_t *d, int64_t block) {
  float most = -INFINITY, x[4];
  for (int i = 0; i < 4; i++) {
    const int64_t t = 4 * block + i;
    const int kept = t < d->n && d->x[t] >= d->floor && keeps(d->limit, d->x[t], t);
    x[i] = kept ? d->x[t] : -INFINITY;
    most = x[i] > most ? x[i] : most;
  }
  if (most == -INFINITY) return;
  /* what rounding of the sums may add */
  const double slack = (fabs((double)d->best) + fabs((double)most) + GUMBEL_MOST) * 0x1p-22;
  if (d->token >= 0 && (double)most + GUMBEL_MOST + slack < (double)d->best) return;
  uint32_t words[4] = {(uint32_t)block, d->position, d->index, 0};
  philox(words, d->seed);
  for (int i = 0; i < 4; i++) {
    const int64_t t = 4 * block + i;
    if (x[i] == -INFINITY) continue;
    if (d->token >= 0 && !can_reach(words[i], (double)d->best - (double)x[i] - 2 * slack)) continue;
    const double u = ((double)words[i] + 0.5) * 0x1p-32;
    const float score = x[i] + (float)-log(-log(u));
    if (d->token < 0 || score > d->best || (score == d->best && t < d->token)) d->best = score, d->token = t;
  }
}

/* The least float32 that min_p lets pass. */
static float floor_of(float top, float min_p) {
  const double exact = (double)top + log((double)min_p);
  const float rounded = (float)exact;
  return (double)rounded < exact ? nextafterf(rounded, INFINITY) : rounded;
}

/* Parameters of one row. */
typedef struct {
  float temperature, top_p, min_p;
  int64_t top_k, seed, position, index;
} row_t;

static int64_t sample_row(const float *logits, int64_t n, const row_t *r, int64_t top) {
  float *x = thread_scratch(SCRATCH_X, (size_t)n * 8);
  int32_t *ids = (int32_t *)(x + n);
  divide(logits, n, r->temperature, x);
  const float most = x[top];
  limit_t limit = {-INFINITY, n};
  if (r->top_k < n) limit = cut(x, n, limit, r->top_k, 0, most, ids);
  if (r->top_p < 1.0f) limit = cut(x, n, limit, 0, r->top_p, most, ids);
  draw_t d = {x, n, -1, limit, -INFINITY, -INFINITY, (uint64_t)r->seed, (uint32_t)r->position, (uint32_t)r->index};
  if (r->min_p > 0.0f) d.floor = floor_of(most, r->min_p);
  try_block(&d, top / 4); /* a good score early leaves others without a chance */
  for (int64_t block = 0; block < (n + 3) / 4; block++) try_block(&d, block);
  return d.token;
}

/* Parameters of all rows. */
typedef struct {
  const float *temperature, *top_p, *min_p;
  const int32_t *top_k;
  const int64_t *seed, *position, *index;
} columns_t;

/* Tokens of `rows` rows of logits[rows][n], `stride` apart. columns: NULL when all rows are greedy.
 * valid: 0 where every logit is minus infinity or one is NaN, and the token then means nothing. */
EXPORT void octavo_sample(const float *logits, int64_t stride, int64_t rows, int64_t n, const columns_t *columns,
                          int64_t *token, uint8_t *valid, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(dynamic, 1) if (rows > 1 && columns)
  for (int64_t i = 0; i < rows; i++) {
    const float *x = logits + i * stride;
    float most;
    token[i] = largest_of(x, n, &most);
    valid[i] = most > -INFINITY;
    if (!valid[i] || !columns || columns->temperature[i] <= 0.0f) continue;
    const row_t row = {
        columns->temperature[i], columns->top_p[i],    columns->min_p[i], columns->top_k[i],
        columns->seed[i],        columns->position[i], columns->index[i],
    };
    token[i] = sample_row(x, n, &row, token[i]);
  }
}
