// What lies between the products of a layer, and the likeliest token.

#pragma once

#include "vectors.hpp"

namespace {

// x += y, unless y is null; out = x / sqrt(mean(x²) + eps) · weight, rounded once. A row of x, x_stride from the next, is `groups`
// rows of `width` that are normed each by itself, with a weight of its own; likewise a row of out, which may be x. y is contiguous.
template <class T, class W>
void add_norm(T *x, int64_t x_stride, const T *y, const W *weights, T *out, int64_t out_stride, int64_t rows, int64_t groups,
              int64_t width, float eps) {
#pragma omp for schedule(static)
  for (int64_t item = 0; item < rows * groups; item++) {
    const int64_t group = item % groups;
    T *row = x + item / groups * x_stride + group * width, *to = out + item / groups * out_stride + group * width;
    const T *added = y + item * width;
    const W *weight = weights + group * width;
    floats squares = {};
    auto add = [&](int64_t i, int count) {
      floats v = load_some(row + i, count);
      if (y) {
        store_some(row + i, v + load_some(added + i, count), count);
        v = load_some(row + i, count);
      }
      squares = fma(v, v, squares);
    };
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) add(i, LANES);
    if (i < width) add(i, (int)(width - i));
    const floats factor = all(1.f / sqrtf(sum(squares) / width + eps));
    for (i = 0; i + LANES <= width; i += LANES) store(to + i, load(row + i) * factor * load(weight + i));
    if (i < width) {
      const int count = (int)(width - i);
      store_some(to + i, load_some(row + i, count) * factor * load_some(weight + i, count), count);
    }
  }
}

// Turns `heads` heads of every row in place: the halves a, b of the first 2 · half entries become a·cos − b·sin, b·cos + a·sin.
// Angles are those of row positions[t] of the tables, of row t where there are no positions.
template <class T>
INLINE void turn(T *a, T *b, const T *cosines, const T *sines, int count) {
  const floats c = load_some(cosines, count), s = load_some(sines, count), u = load_some(a, count), w = load_some(b, count);
  store_some(a, fma(u, c, -(w * s)), count);
  store_some(b, fma(w, c, u * s), count);
}
template <class T>
void rotate(T *x, int64_t stride, const T *cosines, const T *sines, const int64_t *positions, int64_t rows, int64_t heads,
            int64_t dim, int64_t half) {
#pragma omp for schedule(static)
  for (int64_t item = 0; item < rows * heads; item++) {
    const int64_t t = item / heads, at = (positions ? positions[t] : t) * half;
    T *a = x + t * stride + item % heads * dim, *b = a + half;
    const T *c = cosines + at, *s = sines + at;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) turn(a + i, b + i, c + i, s + i, LANES);
    if (i < half) turn(a + i, b + i, c + i, s + i, (int)(half - i));
  }
}

INLINE floats silu(floats g) { return g / (all(1.f) + exponential(-g)); }
INLINE floats gelu_tanh(floats g) {  // g / 2 · (1 + tanh(z)) = g / (1 + exp(−2z)), z = sqrt(2 / π) · (g + 0.044715 g³)
  return g / (all(1.f) + exponential(g * fma(g * g, all(-2.f * 0.7978845608f * 0.044715f), all(-2.f * 0.7978845608f))));
}

// out = act(gate) · up, of rows [gate, up].
template <class T, class Act>
INLINE void gated(const T *gate_up, T *out, int64_t rows, int64_t width, Act act) {
  constexpr int64_t PIECE = 16 * LANES;
  const int64_t pieces = (width + PIECE - 1) / PIECE;
#pragma omp for schedule(static)
  for (int64_t item = 0; item < rows * pieces; item++) {
    const int64_t t = item / pieces, end = std::min((item % pieces + 1) * PIECE, width);
    const T *gate = gate_up + t * 2 * width, *up = gate + width;
    T *row = out + t * width;
    int64_t i = item % pieces * PIECE;
    for (; i + LANES <= end; i += LANES) store(row + i, act(load(gate + i)) * load(up + i));
    if (i < end) {
      const int count = (int)(end - i);
      store_some(row + i, act(load_some(gate + i, count)) * load_some(up + i, count), count);
    }
  }
}

// x = cap · tanh(x / cap).
template <class T>
void cap_all(T *x, int64_t count, float cap) {
  const int64_t whole = count / LANES;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < whole; i++) store(x + i * LANES, capped(load(x + i * LANES), cap));
  const int left = (int)(count % LANES);
#pragma omp single
  if (left) store_some(x + whole * LANES, capped(load_some(x + whole * LANES, left), cap), left);
}

// First index of the largest of every row, and whether the largest is finite; a NaN anywhere makes a row not finite.
template <class T>
void likeliest(const T *x, int64_t *index, uint8_t *finite, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
  for (int64_t t = 0; t < rows; t++) {
    const T *row = x + t * width;
    floats m = all(-std::numeric_limits<float>::infinity());
    ints nan = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
      const floats v = load(row + i);
      m = larger(v, m);
      nan |= v != v;
    }
    float best = largest(m);
    bool whole = true;
    for (int k = 0; k < LANES; k++) whole &= !nan[k];
    for (int64_t k = i; k < width; k++) {
      const float v = load_some(row + k, 1)[0];
      best = v > best ? v : best;
      whole &= v == v;
    }
    finite[t] = whole && std::isfinite(best);
    index[t] = 0;
    const floats target = all(best);
    for (i = 0; i < width; i += LANES) {
      const int count = (int)std::min<int64_t>(LANES, width - i);
      const floats v = count == LANES ? load(row + i) : load_some(row + i, count);
      const ints hit = (v == target) & (lanes() < count);
      int k = 0;
      while (k < LANES && !hit[k]) k++;
      if (k < LANES) {
        index[t] = i + k;
        break;
      }
    }
  }
}

}  // namespace
