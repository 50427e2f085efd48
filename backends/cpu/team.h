/* Threads of one parallel region working through a sequence of phases.
 *
 * OpenMP makes the threads; phases are divided by a barrier of our own. libgomp's spins for
 * milliseconds, which on a machine with other work can keep the very thread from running that it
 * waits for; this one spins briefly and then sleeps.
 */
#ifndef OCTAVO_TEAM_H
#define OCTAVO_TEAM_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_get_num_threads(void) { return 1; }
#endif

/* What the threads of a region share; starts as zeros. */
typedef struct {
  _Alignas(64) _Atomic int32_t arrived;
  _Alignas(64) _Atomic int32_t round;
  _Atomic int32_t sleepers;
  _Alignas(64) _Atomic int64_t next;
} shared_team_t;

/* One thread's membership. */
typedef struct {
  shared_team_t *shared;
  int64_t threads, me;
} team_t;

static inline team_t join_team(shared_team_t *shared) {
  return (team_t){shared, omp_get_num_threads(), omp_get_thread_num()};
}

#define SPINS 3000 /* some tens of microseconds */

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Wait until all threads are here. Afterwards `team_next` counts from 0 again. */
static inline void team_barrier(const team_t *t) {
  if (t->threads == 1) {
    atomic_store_explicit(&t->shared->next, 0, memory_order_relaxed);
    return;
  }
  shared_team_t *s = t->shared;
  const int32_t round = atomic_load_explicit(&s->round, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&s->arrived, 1, memory_order_acq_rel) == t->threads - 1) {
    atomic_store_explicit(&s->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&s->next, 0, memory_order_relaxed);
    atomic_store(&s->round, round + 1);
#ifdef __linux__
    if (atomic_load(&s->sleepers)) syscall(SYS_futex, &s->round, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
    return;
  }
  for (int i = 0; i < SPINS; i++) {
    if (atomic_load_explicit(&s->round, memory_order_acquire) != round) return;
    relax();
  }
#ifdef __linux__
  atomic_fetch_add(&s->sleepers, 1);
  while (atomic_load(&s->round) == round) syscall(SYS_futex, &s->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
  atomic_fetch_sub(&s->sleepers, 1);
#else
  while (atomic_load_explicit(&s->round, memory_order_acquire) == round) sched_yield();
#endif
}

/* The next piece of a phase that all threads share; a barrier follows the phase. */
static inline int64_t team_next(const team_t *t) {
  return atomic_fetch_add_explicit(&t->shared->next, 1, memory_order_relaxed);
}

/* This thread's part [first, end) of `count` pieces. */
static inline int64_t team_first(const team_t *t, int64_t count) { return count * t->me / t->threads; }
static inline int64_t team_end(const team_t *t, int64_t count) { return count * (t->me + 1) / t->threads; }

#endif
