// Products with packed weights.

#pragma once

#include "vectors.hpp"

namespace {

constexpr int TALL = 8;              // rows of a register tile; with 3 vectors of columns it takes 24 of 32 registers
constexpr int WIDE = 3;
constexpr int COLUMNS = WIDE * LANES;  // columns of a block of packed weights
constexpr int DEEP = 768;            // words of a row that are walked at a time, so that a block of weights stays in the L2 cache
constexpr int L2_WORDS = 1 << 17;    // of input rows beside it
constexpr int MOST_ROWS = 480;

// Mirrors kernels.native.Weight.
struct Weight {
  const uint32_t *packed;  // blocks [width / COLUMNS, depth in words, COLUMNS], the last one padded
  const void *bias;        // [width], or null
  int64_t depth, width;
};

// y[r] = x[r] W of one tile over words [first, last); `sums` carries float32 sums from one walk to the next, in the same order as
// one walk would add them. Meanwhile weights that are needed next are fetched, `pace` bytes a word from `ahead` on: memory has
// time for that where a block is walked more than once.
template <class T, int R>
INLINE void product(const T *x, int64_t x_stride, const uint32_t *w, int64_t first, int64_t last, bool more, float *sums, T *y,
                    int64_t y_stride, int columns, const char *ahead, int64_t pace) {
  const uint32_t *rows[R];
  floats acc[R][WIDE];
  for (int r = 0; r < R; r++) {
    rows[r] = (const uint32_t *)(x + r * x_stride);
    for (int c = 0; c < columns; c += LANES) __builtin_prefetch(y + r * y_stride + c, 1);
    for (int c = 0; c < WIDE; c++) acc[r][c] = first ? load(sums + r * COLUMNS + c * LANES) : floats{};
  }
  for (int64_t k = first; k < last; k++) {
    words v[WIDE];
    for (int c = 0; c < WIDE; c++) v[c] = load_words(w + k * COLUMNS + c * LANES);
    if (pace) __builtin_prefetch(ahead, 0, 2);
    if (pace > 64) __builtin_prefetch(ahead + 64, 0, 2);
    ahead += pace;
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

// y += bias, for one block of columns.
template <class T>
INLINE void add_bias(T *y, int64_t y_stride, const T *bias, int64_t rows, int columns) {
  for (int64_t r = 0; r < rows; r++, y += y_stride)
    for (int c = 0; c < columns; c += LANES) {
      const int count = std::min(LANES, columns - c);
      store_some(y + c, load_some(y + c, count) + load_some(bias + c, count), count);
    }
}

// y = x W, rounded, and then + bias.
template <class T>
void linear(const Weight &weight, const T *x, int64_t x_stride, T *y, int64_t rows) {
  const int64_t width = weight.width, num_words = weight.depth / Words<T>::PARTS, num_blocks = (width + COLUMNS - 1) / COLUMNS;
  const int64_t chunk = std::clamp<int64_t>(L2_WORDS / std::min<int64_t>(num_words, DEEP) / TALL * TALL, TALL, MOST_ROWS);
  const int64_t num_chunks = (rows + chunk - 1) / chunk;
#pragma omp for schedule(static)
  for (int64_t item = 0; item < num_chunks * num_blocks; item++) {
    alignas(64) float sums[MOST_ROWS * COLUMNS];
    const int64_t begin = item / num_blocks * chunk, end = std::min(begin + chunk, rows), block = item % num_blocks;
    const uint32_t *w = weight.packed + block * num_words * COLUMNS;
    const int columns = (int)std::min<int64_t>(COLUMNS, width - block * COLUMNS);
    for (int64_t first = 0; first < num_words; first += DEEP) {
      const int64_t last = std::min<int64_t>(first + DEEP, num_words);
      const int64_t walks = (end - begin + TALL - 1) / TALL;
      const int64_t pace = walks > 1 ? COLUMNS * sizeof(uint32_t) / walks : 0;
      const char *ahead = (const char *)(w + last * COLUMNS);
      for (int64_t r = begin; r < end;) {
        const int64_t left = end - r;
        const int tall = (int)(left > TALL && left < 2 * TALL ? (left + 1) / 2 : std::min<int64_t>(TALL, left));
        const T *in = x + r * x_stride;
        T *out = y + r * width + block * COLUMNS;
        float *carried = sums + (r - begin) * COLUMNS;
        const bool more = last < num_words;
        switch (tall) {
          case 1: product<T, 1>(in, x_stride, w, first, last, more, carried, out, width, columns, ahead, pace); break;
          case 2: product<T, 2>(in, x_stride, w, first, last, more, carried, out, width, columns, ahead, pace); break;
          case 3: product<T, 3>(in, x_stride, w, first, last, more, carried, out, width, columns, ahead, pace); break;
          case 4: product<T, 4>(in, x_stride, w, first, last, more, carried, out, width, columns, ahead, pace); break;
          case 5: product<T, 5>(in, x_stride, w, first, last, more, carried, out, width, columns, ahead, pace); break;
          case 6: product<T, 6>(in, x_stride, w, first, last, more, carried, out, width, columns, ahead, pace); break;
          case 7: product<T, 7>(in, x_stride, w, first, last, more, carried, out, width, columns, ahead, pace); break;
          default: product<T, TALL>(in, x_stride, w, first, last, more, carried, out, width, columns, ahead, pace);
        }
        r += tall;
        ahead += pace * (last - first);
      }
    }
    if (weight.bias)
      add_bias(y + begin * width + block * COLUMNS, width, (const T *)weight.bias + block * COLUMNS, end - begin, columns);
  }
}

}  // namespace
