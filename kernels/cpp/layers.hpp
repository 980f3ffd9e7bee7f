// All layers of a decoder in one go: the parts that the other files hold, in their order.

#pragma once

#include <chrono>

#include "attention.hpp"
#include "epilogue.hpp"
#include "low_rank.hpp"
#include "pieces.hpp"
#include "products.hpp"

namespace {

constexpr int SITES = 4;  // products of a layer, each with its low-rank part: qkv, o, gate_up, down
enum Part { PRODUCTS, ATTENTION, ADAPTERS, BETWEEN, PARTS };

// Mirrors dataplane.model.native_stack.LayerPlan. A null pointer says that the layer has no such thing.
struct LayerPlan {
  const Weight *products[SITES];
  const void *attention_norm, *qk_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;
  const void *cosines, *sines;  // [positions, half]
  int64_t half, window;
};

// Mirrors dataplane.model.native_stack.StackPlan.
struct StackPlan {
  const LayerPlan *layers;
  int64_t num_layers, hidden, inner;
  int64_t norms_are_float, is_gelu;
  double *seconds;  // [PARTS], added to
  float eps;
};

// Mirrors dataplane.model.native_stack.StackStep. It says what a step is; the buffers are contiguous.
struct StackStep {
  const AttentionStep *attention;
  const LowRankSite *low_rank[SITES];   // null: there is nothing to add in the step
  const EpilogueSite *epilogue[SITES];  // likewise
  const int64_t *positions;             // [rows]
  void *x, *y;                          // [rows, hidden]: the residual stream, and what is to be added to it in the end
  void *narrow, *wide;                  // [rows, widest input of a product], [rows, widest output]
  int64_t rows, threads;
};

// Adds up where the time of a team goes, as its first thread sees it.
class Laps {
 public:
  explicit Laps(double *seconds) : seconds(seconds), since(now()) {}
  void lap(Part part) {
#pragma omp master
    {
      const double time = now();
      seconds[part] += time - since, since = time;
    }
  }

 private:
  static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
  double *seconds, since;
};

// Called by every thread of a team; every part ends with a barrier.
template <class T>
void run_layers(const StackPlan &stack, const StackStep &step, AttentionWork &work) {
  const int64_t rows = step.rows, hidden = stack.hidden, inner = stack.inner, dim = step.attention->dim;
  const int64_t q_size = step.attention->heads * dim, kv_size = step.attention->kv_heads * dim, qkv_size = q_size + 2 * kv_size;
  T *x = (T *)step.x, *y = (T *)step.y, *narrow = (T *)step.narrow, *wide = (T *)step.wide;
  Laps laps(stack.seconds);

  auto norm = [&](T *from, int64_t from_stride, const T *added, const void *weight, T *to, int64_t to_stride, int64_t groups, int64_t width) {
    if (stack.norms_are_float)
      add_norm<T, float>(from, from_stride, added, (const float *)weight, to, to_stride, rows, groups, width, stack.eps);
    else
      add_norm<T, T>(from, from_stride, added, (const T *)weight, to, to_stride, rows, groups, width, stack.eps);
  };
  for (int64_t i = 0; i < stack.num_layers; i++) {
    const LayerPlan &layer = stack.layers[i];
    auto product = [&](int site, const T *in, T *out) {
      const Weight &weight = *layer.products[site];
      linear<T>(weight, in, weight.depth, out, rows);
      laps.lap(PRODUCTS);
      if (step.low_rank[site]) low_rank<T>(*step.low_rank[site], in, weight.depth, out, weight.width, (int)i);
      if (step.epilogue[site]) epilogue<T>(*step.epilogue[site], out, weight.width, (int)i);
      laps.lap(ADAPTERS);
    };
    norm(x, hidden, i ? y : nullptr, layer.attention_norm, narrow, hidden, 1, hidden);
    laps.lap(BETWEEN);
    product(0, narrow, wide);
    if (layer.qk_norm) norm(wide, qkv_size, nullptr, layer.qk_norm, wide, qkv_size, (q_size + kv_size) / dim, dim);
    if (layer.cosines)
      rotate<T>(wide, qkv_size, (const T *)layer.cosines, (const T *)layer.sines, step.positions, rows, (q_size + kv_size) / dim, dim,
                layer.half);
    laps.lap(BETWEEN);
    attention<T>(work, wide, qkv_size, wide + q_size + kv_size, qkv_size, narrow, Layer{(int)i, layer.window});
    laps.lap(ATTENTION);
    product(1, narrow, y);
    if (layer.post_attention_norm) norm(y, hidden, nullptr, layer.post_attention_norm, y, hidden, 1, hidden);
    norm(x, hidden, y, layer.mlp_norm, narrow, hidden, 1, hidden);
    laps.lap(BETWEEN);
    product(2, narrow, wide);
    if (stack.is_gelu)
      gated<T>(wide, narrow, rows, inner, [](floats g) { return gelu_tanh(g); });
    else
      gated<T>(wide, narrow, rows, inner, [](floats g) { return silu(g); });
    laps.lap(BETWEEN);
    product(3, narrow, y);
    if (layer.post_mlp_norm) norm(y, hidden, nullptr, layer.post_mlp_norm, y, hidden, 1, hidden);
    laps.lap(BETWEEN);
  }
}

}  // namespace
