// Products with packed weights.

#pragma once

#include "vectors.hpp"

namespace {

constexpr int TALL = 6;              // rows of a register tile; with 4 vectors of columns it takes 24 of 32 registers
constexpr int WIDE = 4;
constexpr int COLUMNS = WIDE * LANES;  // columns of a block of packed weights
constexpr int DEEP = 768;            // words of a row that are walked at a time, so that a block of weights stays in the L2 cache
constexpr int L2_WORDS = 1 << 17;    // of input rows beside it
constexpr int MOST_ROWS = 480;

// y[r] = x[r] W of one tile over words [first, last); `sums` carries float32 sums from one walk to the next, in the same order as
// one walk would add them.
template <class T, int R>
INLINE void product(const T *x, int64_t x_stride, const uint32_t *w, int64_t first, int64_t last, bool more, float *sums, T *y,
                    int64_t y_stride, int columns) {
  const uint32_t *rows[R];
  floats acc[R][WIDE];
  for (int r = 0; r < R; r++) {
    rows[r] = (const uint32_t *)(x + r * x_stride);
    for (int c = 0; c < WIDE; c++) acc[r][c] = first ? load(sums + r * COLUMNS + c * LANES) : floats{};
  }
  for (int64_t k = first; k < last; k++) {
    words v[WIDE];
    for (int c = 0; c < WIDE; c++) v[c] = load_words(w + k * COLUMNS + c * LANES);
    for (int r = 0; r < R; r++) {
      const words u = all_words(rows[r][k]);
      for (int c = 0; c < WIDE; c++) acc[r][c] = Words<T>::step(acc[r][c], v[c], u);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < WIDE; c++) {
      if (more)
        store(sums + r * COLUMNS + c * LANES, acc[r][c]);
      else if (columns == COLUMNS)
        store(y + r * y_stride + c * LANES, acc[r][c]);
      else if (columns > c * LANES)
        store_some(y + r * y_stride + c * LANES, acc[r][c], std::min(LANES, columns - c * LANES));
    }
}

// y = x W; W in blocks [width / COLUMNS, depth in words, COLUMNS], the last block padded.
template <class T>
void linear(const T *x, int64_t x_stride, const uint32_t *weight, T *y, int64_t rows, int64_t depth, int64_t width, int threads) {
  const int64_t num_words = depth / Words<T>::PARTS, num_blocks = (width + COLUMNS - 1) / COLUMNS;
  const int64_t chunk = std::clamp<int64_t>(L2_WORDS / std::min<int64_t>(num_words, DEEP) / TALL * TALL, TALL, MOST_ROWS);
  const int64_t num_chunks = (rows + chunk - 1) / chunk;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t item = 0; item < num_chunks * num_blocks; item++) {
    alignas(64) float sums[MOST_ROWS * COLUMNS];
    const int64_t begin = item / num_blocks * chunk, end = std::min(begin + chunk, rows), block = item % num_blocks;
    const uint32_t *w = weight + block * num_words * COLUMNS;
    const int columns = (int)std::min<int64_t>(COLUMNS, width - block * COLUMNS);
    for (int64_t first = 0; first < num_words; first += DEEP) {
      const int64_t last = std::min<int64_t>(first + DEEP, num_words);
      for (int64_t r = begin; r < end;) {
        const int64_t left = end - r;
        const int tall = (int)(left > TALL && left < 2 * TALL ? (left + 1) / 2 : std::min<int64_t>(TALL, left));
        const T *in = x + r * x_stride;
        T *out = y + r * width + block * COLUMNS;
        float *carried = sums + (r - begin) * COLUMNS;
        const bool more = last < num_words;
        switch (tall) {
          case 1: product<T, 1>(in, x_stride, w, first, last, more, carried, out, width, columns); break;
          case 2: product<T, 2>(in, x_stride, w, first, last, more, carried, out, width, columns); break;
          case 3: product<T, 3>(in, x_stride, w, first, last, more, carried, out, width, columns); break;
          case 4: product<T, 4>(in, x_stride, w, first, last, more, carried, out, width, columns); break;
          case 5: product<T, 5>(in, x_stride, w, first, last, more, carried, out, width, columns); break;
          default: product<T, TALL>(in, x_stride, w, first, last, more, carried, out, width, columns);
        }
        r += tall;
      }
    }
  }
}

}  // namespace
