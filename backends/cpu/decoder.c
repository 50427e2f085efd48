/* A whole decoder (Llama's shape) in one call: embedding, layers, final norm.
 *
 * All layers run inside one parallel region: a layer costs a few barriers instead of some twenty
 * operators. Activations are float32 throughout, whatever the weights are. Norms happen while the next
 * product packs its rows, the activation and the residual addition while the last one stores.
 *
 * Legend: T tokens, E hidden size, H query heads, K KV heads, D head size, I inner size.
 */
#include "kernels.h"

#include <string.h>

typedef struct {
  const float *attention_norm, *mlp_norm; /* [E] */
  const linear_t *qkv, *o, *gate_up, *down;
  const attention_t *attention;
  const plan_t *plan;
} layer_t;

/* embedding: [vocab, E] of embedding_type, or NULL: then the rows of the packed head are it. */
typedef struct {
  int64_t layers, hidden, inner, vocab, embedding_type, activation;
  double eps;
  const layer_t *layer;
  const float *norm;
  const void *embedding;
  const linear_t *head;
} decoder_t;

/* Widest rows of the layers, and what they share. */
typedef struct {
  int64_t qkv, attended;
  size_t shared;
} sizes_t;

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static sizes_t measure(const decoder_t *d, int64_t tokens) {
  sizes_t s = {0, 0, 0};
  for (int64_t i = 0; i < d->layers; i++) {
    const layer_t *l = d->layer + i;
    if (l->qkv->n > s.qkv) s.qkv = l->qkv->n;
    if (l->o->k > s.attended) s.attended = l->o->k;
    s.shared = larger(s.shared, linear_shared_bytes(l->qkv, tokens));
    s.shared = larger(s.shared, linear_shared_bytes(l->o, tokens));
    s.shared = larger(s.shared, linear_shared_bytes(l->gate_up, tokens));
    s.shared = larger(s.shared, linear_shared_bytes(l->down, tokens));
  }
  return s;
}

static void embed_team(const team_t *team, const decoder_t *d, const int64_t *ids, int64_t tokens, float *to) {
  for (int64_t t = team_first(team, tokens); t < team_end(team, tokens); t++) {
    float *row = to + t * d->hidden;
    const int64_t at = ids[t] * d->hidden;
    if (ids[t] < 0 || ids[t] >= d->vocab)
      memset(row, 0, (size_t)d->hidden * sizeof(float));
    else if (!d->embedding)
      unpack_row(d->head, ids[t], row);
    else if (d->embedding_type == 0)
      memcpy(row, (const float *)d->embedding + at, (size_t)d->hidden * sizeof(float));
    else
      for (int64_t i = 0; i < d->hidden; i++) {
        const uint32_t bits = (uint32_t)((const uint16_t *)d->embedding)[at + i] << 16;
        memcpy(row + i, &bits, sizeof bits);
      }
  }
  team_barrier(team);
}

static void layer_team(const team_t *team, const decoder_t *d, const layer_t *l, const batch_t *b, sizes_t s, float *residual,
                       float *qkv, float *attended, float *inner, void *shared) {
  const attention_t *a = l->attention;
  const int64_t E = d->hidden, q = a->heads * a->head_size, k = a->kv_heads * a->head_size;
  const source_t first = {residual, 0, E, l->attention_norm, d->eps}, second = {residual, 0, E, l->mlp_norm, d->eps};
  const source_t heads = {attended, 0, s.attended, NULL, 0}, gated = {inner, 0, d->inner, NULL, 0};
  const target_t to_qkv = {qkv, 0, s.qkv, 0, ACT_NONE}, to_inner = {inner, 0, d->inner, 0, d->activation};
  const target_t add = {residual, 0, E, 1, ACT_NONE};
  linear_team(team, l->qkv, &first, b->tokens, &to_qkv, shared);
  attention_team(team, a, b, l->plan, qkv, s.qkv, qkv + q, s.qkv, qkv + q + k, s.qkv, 0, attended, s.attended);
  linear_team(team, l->o, &heads, b->tokens, &add, shared);
  linear_team(team, l->gate_up, &second, b->tokens, &to_inner, shared);
  linear_team(team, l->down, &gated, b->tokens, &add, shared);
}

/* hidden[T, E]: after the final norm, float32. */
EXPORT void octavo_decoder(const decoder_t *d, const int64_t *ids, const batch_t *b, float *hidden, int64_t threads) {
  const sizes_t s = measure(d, b->tokens);
  const size_t floats = (size_t)(b->tokens * (d->hidden + s.qkv + s.attended + d->inner));
  float *residual = thread_scratch(SCRATCH_DECODER, floats * sizeof(float));
  float *qkv = residual + b->tokens * d->hidden, *attended = qkv + b->tokens * s.qkv;
  float *inner = attended + b->tokens * s.attended;
  void *shared = thread_scratch(SCRATCH_SHARED, s.shared);
  shared_team_t all = {0};
#pragma omp parallel num_threads((int)threads)
  {
    const team_t me = join_team(&all);
    embed_team(&me, d, ids, b->tokens, residual);
    for (int64_t i = 0; i < d->layers; i++)
      layer_team(&me, d, d->layer + i, b, s, residual, qkv, attended, inner, shared);
    for (int64_t t = team_first(&me, b->tokens); t < team_end(&me, b->tokens); t++)
      rms_norm_row(residual + t * d->hidden, d->hidden, d->norm, d->eps, hidden + t * d->hidden);
    team_barrier(&me);
  }
}
