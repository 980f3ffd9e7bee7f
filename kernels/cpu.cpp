// The native CPU form: products, paged attention, rotary positions, add + norm, gated activation, low-rank rows, likeliest token.
//
// One source for every machine. Arithmetic is written on vectors of 16 floats in the compiler's own vector types, which it splits
// to what the machine has (AVX-512, AVX2, NEON, SSE or none); only the pair product of bfloat16, its rounding and a few
// reductions have an AVX-512 path. kernels/native.py compiles it, checks the machine and calls it; every pointer it passes is
// row-major and lives for the call.
//
// A row's bits depend on that row alone: each sum runs over one row in one order, however rows are blocked, shared out to threads
// or split for long contexts. Nothing reads a token behind a sequence's length, so what lies there, NaN included, reaches nobody.

#include "cpp/layers.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Runs `work` in every thread of a team. What it calls shares its loops out to the team (`omp for`), and waits at their ends.
template <class Work>
INLINE void team(int64_t threads, Work work) {
#pragma omp parallel num_threads((int)threads)
  work();
}

constexpr int64_t FEW = 7;  // rows from which on a team is worth its start for what lies between products

}  // namespace

#define DEFINE_ALL(T, NAME)                                                                                                        \
  EXPORT void layers_##NAME(const StackPlan *stack, const StackStep *step) {                                                       \
    AttentionWork work(*step->attention);                                                                                          \
    team(step->threads, [&] { run_layers<T>(*stack, *step, work); });                                                              \
  }                                                                                                                                \
  EXPORT void linear_##NAME(const Weight *weight, const T *x, int64_t x_stride, T *y, int64_t rows, int64_t threads) {             \
    team(threads, [&] { linear<T>(*weight, x, x_stride, y, rows); });                                                              \
  }                                                                                                                                \
  EXPORT void attention_##NAME(const AttentionStep *step, const T *qk, int64_t qk_stride, const T *v, int64_t v_stride, T *out,    \
                               int64_t layer, int64_t window) {                                                                    \
    AttentionWork work(*step);                                                                                                     \
    team(step->threads, [&] { attention<T>(work, qk, qk_stride, v, v_stride, out, Layer{(int)layer, window}); });                  \
  }                                                                                                                                \
  EXPORT void low_rank_##NAME(const LowRankSite *site, const T *x, int64_t x_stride, T *y, int64_t y_stride, int64_t layer) {      \
    team(site->threads, [&] { low_rank<T>(*site, x, x_stride, y, y_stride, (int)layer); });                                        \
  }                                                                                                                                \
  EXPORT void epilogue_##NAME(const EpilogueSite *site, T *y, int64_t y_stride, int64_t layer) {                                   \
    team(site->num_rows > 1 ? site->threads : 1, [&] { epilogue<T>(*site, y, y_stride, (int)layer); });                            \
  }                                                                                                                                \
  EXPORT void add_norm_##NAME(T *x, int64_t x_stride, const T *y, const void *weight, int64_t weight_is_float, T *out, int64_t rows, \
                              int64_t groups, int64_t width, float eps, int64_t threads) {                                         \
    team(rows > FEW ? threads : 1, [&] {                                                                                           \
      if (weight_is_float)                                                                                                         \
        add_norm<T, float>(x, x_stride, y, (const float *)weight, out, groups * width, rows, groups, width, eps);                  \
      else                                                                                                                         \
        add_norm<T, T>(x, x_stride, y, (const T *)weight, out, groups * width, rows, groups, width, eps);                          \
    });                                                                                                                            \
  }                                                                                                                                \
  EXPORT void rotate_##NAME(T *x, int64_t stride, const T *cosines, const T *sines, int64_t rows, int64_t heads, int64_t dim,      \
                            int64_t half, int64_t threads) {                                                                       \
    team(rows > FEW ? threads : 1, [&] { rotate<T>(x, stride, cosines, sines, nullptr, rows, heads, dim, half); });                \
  }                                                                                                                                \
  EXPORT void silu_mul_##NAME(const T *gate_up, T *out, int64_t rows, int64_t width, int64_t threads) {                            \
    team(rows > 1 ? threads : 1, [&] { gated<T>(gate_up, out, rows, width, [](floats g) { return silu(g); }); });                  \
  }                                                                                                                                \
  EXPORT void gelu_tanh_mul_##NAME(const T *gate_up, T *out, int64_t rows, int64_t width, int64_t threads) {                       \
    team(rows > 1 ? threads : 1, [&] { gated<T>(gate_up, out, rows, width, [](floats g) { return gelu_tanh(g); }); });             \
  }                                                                                                                                \
  EXPORT void softcap_##NAME(T *x, int64_t count, float cap, int64_t threads) {                                                    \
    team(count > 16384 ? threads : 1, [&] { cap_all<T>(x, count, cap); });                                                         \
  }                                                                                                                                \
  EXPORT void likeliest_##NAME(const T *x, int64_t *index, uint8_t *finite, int64_t rows, int64_t width, int64_t threads) {        \
    team(rows > 1 ? threads : 1, [&] { likeliest<T>(x, index, finite, rows, width); });                                            \
  }

DEFINE_ALL(bf16, bfloat16)
DEFINE_ALL(float, float32)
