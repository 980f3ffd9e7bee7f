// Low-rank rows, read in place.

#pragma once

#include "vectors.hpp"

namespace {

constexpr int ROWS = 16;       // rows of one adapter that an item handles
constexpr int RANKS = 16;      // rank rows of an item of the first half
constexpr int TILE = 4;        // rows, and rank rows, that are held in registers
constexpr int MAX_SLICES = 4;
constexpr int FAR = 4;         // steps of columns that B is fetched ahead

// Mirrors kernels.native.LowRankSite.
struct LowRankSite {
  const void *arena;
  const int64_t *a_offset, *b_offset;  // [slots, layers, slices], see kernels/descriptors.py
  const int32_t *rank;
  const float *scale;
  const int32_t *rows;     // rows of the batch, sorted by adapter
  const int32_t *blocks;   // [num_blocks, 3]: slot, first place in `rows`, rows (at most ROWS) of one adapter
  float *h;                // [places, slices, max_rank]
  int64_t num_blocks, max_rank, num_layers, num_slices, in_features, threads;
  int64_t count;           // slices of the site
  int64_t slice[MAX_SLICES], first[MAX_SLICES], last[MAX_SLICES];
};

template <class T>
INLINE words load_row(const T *p, int count) {  // one vector of words; zero behind count
  if (count * sizeof(T) >= 64) return load_words((const uint32_t *)p);
  words v = {};
  memcpy(&v, p, count * sizeof(T));
  return v;
}

// h[r][j] = scale · (x_r · a_j), for R rows and J rank rows.
template <class T, int R, int J>
INLINE void shrink(const T *const *x, const T *a, int64_t width, float scale, float *const *h) {
  constexpr int STEP = 64 / sizeof(T);
  floats acc[R][J] = {};
  auto add = [&](int64_t k, int count) {
    words v[J];
    for (int j = 0; j < J; j++) {
      v[j] = load_row(a + j * width + k, count);
      __builtin_prefetch(a + (j + J) * width + k);  // the next tile's
    }
    for (int r = 0; r < R; r++) {
      const words u = load_row(x[r] + k, count);
      for (int j = 0; j < J; j++) acc[r][j] = Words<T>::step(acc[r][j], u, v[j]);
    }
  };
  int64_t k = 0;
  for (; k + STEP <= width; k += STEP) add(k, STEP);
  if (k < width) add(k, (int)(width - k));
  for (int r = 0; r < R; r++)
    for (int j = 0; j < J; j++) h[r][j] = scale * sum(acc[r][j]);
}

// y_r[column …] += Σ_j h[r][j] · b_j[column …], for R rows and V vectors of columns.
template <class T, int R, int V>
INLINE void expand(T *const *y, const T *b, const float *const *h, int64_t width, int rank, int64_t column, int count) {
  floats acc[R][V] = {};
  auto get = [&](const T *p, int v) { return V > 1 || count == LANES ? load(p + v * LANES) : load_some(p, count); };
  for (int j = 0; j < rank; j++) {
    floats row[V];
    for (int v = 0; v < V; v++) row[v] = get(b + j * width + column, v);
    if (V > 1) __builtin_prefetch(b + j * width + column + FAR * V * LANES);
    for (int r = 0; r < R; r++) {
      const floats factor = all(h[r][j]);
      for (int v = 0; v < V; v++) acc[r][v] = fma(factor, row[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      T *to = y[r] + column + v * LANES;
      const floats total = get(y[r] + column, v) + acc[r][v];
      if (V > 1 || count == LANES)
        store(to, total);
      else
        store_some(to, total, count);
    }
}

template <class T, int R>
void shrink_rows(const T *const *x, const T *a, int64_t width, int ranks, float scale, float *const *h) {
  int j = 0;
  float *at[R];
  auto move = [&] { for (int r = 0; r < R; r++) at[r] = h[r] + j; };
  for (; j + TILE <= ranks; j += TILE) move(), shrink<T, R, TILE>(x, a + j * width, width, scale, at);
  for (; j < ranks; j++) move(), shrink<T, R, 1>(x, a + j * width, width, scale, at);
}

template <class T, int R>
void expand_rows(T *const *y, const T *b, const float *const *h, int64_t width, int rank, int64_t first, int64_t last) {
  int64_t column = first;
  for (; column + 2 * LANES <= last; column += 2 * LANES) expand<T, R, 2>(y, b, h, width, rank, column, LANES);
  for (; column < last; column += LANES) expand<T, R, 1>(y, b, h, width, rank, column, (int)std::min<int64_t>(LANES, last - column));
}

template <class T>
void low_rank(const LowRankSite &site, const T *x, int64_t x_stride, T *y, int64_t y_stride, int layer) {
  const T *arena = (const T *)site.arena;
  const int64_t chunks = (site.max_rank + RANKS - 1) / RANKS, pitch = site.count * site.max_rank;
  const int64_t num_shrinks = site.num_blocks * site.count * chunks, num_expands = site.num_blocks * site.count * 2;
#pragma omp parallel num_threads(site.threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_shrinks; item++) {
      const int32_t *block = site.blocks + 3 * (item / (site.count * chunks));
      const int64_t s = item / chunks % site.count, j = item % chunks * RANKS;
      const int64_t at = (block[0] * site.num_layers + layer) * site.num_slices + site.slice[s];
      const int ranks = (int)std::min<int64_t>(RANKS, site.rank[at] - j);
      const T *a = arena + site.a_offset[at] + j * site.in_features;
      for (int first = 0; first < block[2] && ranks > 0; first += TILE) {
        const T *rows[TILE];
        float *h[TILE];
        const int count = std::min(TILE, block[2] - first);
        for (int r = 0; r < count; r++) {
          const int place = block[1] + first + r;
          rows[r] = x + site.rows[place] * x_stride;
          h[r] = site.h + place * pitch + s * site.max_rank + j;
        }
        switch (count) {
          case 1: shrink_rows<T, 1>(rows, a, site.in_features, ranks, site.scale[at], h); break;
          case 2: shrink_rows<T, 2>(rows, a, site.in_features, ranks, site.scale[at], h); break;
          case 3: shrink_rows<T, 3>(rows, a, site.in_features, ranks, site.scale[at], h); break;
          default: shrink_rows<T, 4>(rows, a, site.in_features, ranks, site.scale[at], h);
        }
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_expands; item++) {
      const int32_t *block = site.blocks + 3 * (item / (site.count * 2));
      const int64_t s = item / 2 % site.count, width = site.last[s] - site.first[s];
      const int64_t at = (block[0] * site.num_layers + layer) * site.num_slices + site.slice[s];
      const int rank = site.rank[at];
      const T *b = arena + site.b_offset[at];
      const int64_t middle = width / 2 / LANES / 2 * LANES * 2;
      const int64_t begin = item % 2 ? middle : 0, end = item % 2 ? width : middle;
      for (int first = 0; first < block[2] && rank > 0; first += TILE) {
        T *rows[TILE];
        const float *h[TILE];
        const int count = std::min(TILE, block[2] - first);
        for (int r = 0; r < count; r++) {
          const int place = block[1] + first + r;
          rows[r] = y + site.rows[place] * y_stride + site.first[s];
          h[r] = site.h + place * pitch + s * site.max_rank;
        }
        switch (count) {
          case 1: expand_rows<T, 1>(rows, b, h, width, rank, begin, end); break;
          case 2: expand_rows<T, 2>(rows, b, h, width, rank, begin, end); break;
          case 3: expand_rows<T, 3>(rows, b, h, width, rank, begin, end); break;
          default: expand_rows<T, 4>(rows, b, h, width, rank, begin, end);
        }
      }
    }
  }
}

}  // namespace
