// Low-rank rows, read in place.

#pragma once

#include "vectors.hpp"

namespace {

constexpr int ROWS = 16;       // rows of one adapter that an item handles
constexpr int RANKS = 16;      // rank rows that are packed together, and of an item of the first half
constexpr int TILE = 4;        // rank rows that are held in registers
constexpr int TALLEST = 5;     // rows that are
constexpr int MAX_SLICES = 4;
constexpr int WHOLE = 2;       // blocks a thread from which on a thread handles whole blocks
constexpr int COLUMN_ALIGN = 64;
constexpr int LINE = 64;

// Mirrors kernels.native_low_rank.LowRankSite.
struct LowRankSite {
  const void *arena;
  const int64_t *a_offset, *b_offset;  // [slots, layers, slices], see kernels/descriptors.py
  const int32_t *rank;
  const float *scale;
  const int32_t *rows;     // rows of the batch, sorted by adapter
  const int32_t *blocks;   // [num_blocks, 3]: slot, first place in `rows`, rows (at most ROWS) of one adapter
  float *h;                // [places, slices, max_rank]; max_rank is a multiple of RANKS
  int64_t num_blocks, max_rank, num_layers, num_slices, in_features, threads;
  int64_t count;           // slices of the site
  int64_t slice[MAX_SLICES], first[MAX_SLICES], last[MAX_SLICES];
};

// Bytes that are wanted soon; every step of the work before them fetches some, so that memory and arithmetic overlap.
struct Fetch {
  const char *at = nullptr, *end = nullptr;
  int64_t each = 0;
  template <class T>
  static Fetch of(const T *first, int64_t count, int64_t steps) {
    const int64_t bytes = count * sizeof(T);
    return {(const char *)first, (const char *)first + bytes, (bytes / std::max<int64_t>(1, steps) / LINE + 1) * LINE};
  }
  INLINE void step() {
    for (const char *stop = std::min(at + each, end); at < stop; at += LINE) __builtin_prefetch(at, 0, 2);
  }
};

INLINE void sums(const floats *v, float *out) {  // of each of TILE vectors
#if defined(__AVX512F__)
  auto low = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
  const __m512 first = low(as<__m512>(v[0]), as<__m512>(v[2])), second = low(as<__m512>(v[1]), as<__m512>(v[3]));
  const __m512 both = low(first, second);
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(both), _mm512_extractf32x8_ps(both, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  for (int j = 0; j < TILE; j++) out[j] = sum(v[j]);
#endif
}

// h[r][j] = scale · (x_r · a_j), for R rows and J rank rows.
template <class T, int R, int J>
INLINE void shrink(const T *const *x, const T *a, int64_t width, float scale, float *const *h, Fetch &next) {
  constexpr int STEP = 64 / sizeof(T);
  floats acc[R][J] = {};
  auto add = [&](int64_t k, int count) {
    words v[J];
    for (int j = 0; j < J; j++) v[j] = load_row(a + j * width + k, count);
    next.step();
    for (int r = 0; r < R; r++) {
      const words u = load_row(x[r] + k, count);
      for (int j = 0; j < J; j++) acc[r][j] = Words<T>::step(acc[r][j], u, v[j]);
    }
  };
  int64_t k = 0;
  for (; k + STEP <= width; k += STEP) add(k, STEP);
  if (k < width) add(k, (int)(width - k));
  for (int r = 0; r < R; r++) {
    if constexpr (J == TILE)
      sums(acc[r], h[r]);
    else
      for (int j = 0; j < J; j++) h[r][j] = sum(acc[r][j]);
    for (int j = 0; j < J; j++) h[r][j] *= scale;
  }
}

// Rounds and packs each RANKS entries of h, in place: words of neighbours that one step of a product takes.
template <class T>
void pack(float *h, int begin, int end) {
  for (int j = begin; j < end; j += RANKS) Words<T>::pack((uint32_t *)(h + j), load_some(h + j, std::min(RANKS, end - j)));
}

// y_r[column …] += Σ_j h[r][j] · b_j[column …], for R rows and V vectors of words; `count` columns are left.
template <class T, int R, int V>
INLINE void expand(T *const *y, const T *b, float *const *h, int64_t width, int rank, int64_t column, int count) {
  constexpr int PARTS = Words<T>::PARTS, STEP = PARTS * LANES;
  floats acc[R][V][PARTS] = {};
  auto get = [&](const T *p, int v) { return V > 1 ? load_words(p + v * STEP) : load_row(p, count); };
  for (int j = 0; j < rank; j += PARTS) {
    words pairs[V][PARTS];
    for (int v = 0; v < V; v++) {
      words rows[PARTS] = {};
      for (int p = 0; p < PARTS; p++)
        if (p == 0 || j + p < rank) rows[p] = get(b + (j + p) * width + column, v);
      Words<T>::pair(rows, pairs[v]);
    }
    for (int r = 0; r < R; r++) {
      const words factor = all_words(((const uint32_t *)h[r])[j / RANKS * RANKS + j % RANKS / PARTS]);
      for (int v = 0; v < V; v++)
        for (int p = 0; p < PARTS; p++) acc[r][v][p] = Words<T>::step(acc[r][v][p], pairs[v][p], factor);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      T *to = y[r] + column + v * STEP;
      floats total[PARTS];
      Words<T>::split(get(to, V > 1 ? 0 : v), total);
      for (int p = 0; p < PARTS; p++) total[p] += acc[r][v][p];
      store_row(to, Words<T>::join(total), V > 1 ? STEP : count);
    }
}

template <class T, int R>
void shrink_rows(const T *const *x, const T *a, int64_t width, int ranks, float scale, float *const *h, Fetch &next) {
  int j = 0;
  float *at[R];
  auto move = [&] { for (int r = 0; r < R; r++) at[r] = h[r] + j; };
  for (; j + TILE <= ranks; j += TILE) move(), shrink<T, R, TILE>(x, a + j * width, width, scale, at, next);
  for (; j < ranks; j++) move(), shrink<T, R, 1>(x, a + j * width, width, scale, at, next);
}

template <class T, int R>
void expand_rows(T *const *y, const T *b, float *const *h, int64_t width, int rank, int64_t first, int64_t last, Fetch &next) {
  constexpr int STEP = Words<T>::PARTS * LANES;
  int64_t column = first;
  for (; column + 2 * STEP <= last; column += 2 * STEP) next.step(), expand<T, R, 2>(y, b, h, width, rank, column, STEP);
  for (; column < last; column += STEP) expand<T, R, 1>(y, b, h, width, rank, column, (int)std::min<int64_t>(STEP, last - column));
}

// One slice of one adapter at one layer.
template <class T>
struct Pair {
  const T *a, *b;
  int64_t in, first, out;
  int rank;
  float scale;
  Pair(const LowRankSite &site, int layer, int slot, int64_t s) {
    const int64_t at = (slot * site.num_layers + layer) * site.num_slices + site.slice[s];
    const T *arena = (const T *)site.arena;
    a = arena + site.a_offset[at], b = arena + site.b_offset[at];
    in = site.in_features, first = site.first[s], out = site.last[s] - first;
    rank = site.rank[at], scale = site.scale[at];
  }
  Fetch rows_of_a(int64_t steps) const { return Fetch::of(a, rank * in, steps); }
  Fetch rows_of_b(int64_t steps) const { return Fetch::of(b, rank * out, steps); }
  int64_t shrinks() const { return (rank + TILE - 1) / TILE * (in * (int64_t)sizeof(T) / LINE); }
  int64_t expands() const { return out / (2 * LANES * Words<T>::PARTS); }

  // h = scale · A x of up to TALLEST rows, packed, for rank rows [begin, end).
  void shrink_tile(const T *const *x, float *const *h, int count, int begin, int end, Fetch &next) const {
    float *to[TALLEST];
    for (int r = 0; r < count; r++) to[r] = h[r] + begin;
    const T *from = a + begin * in;
    const int ranks = std::min(end, rank) - begin;
    switch (count) {
      case 1: shrink_rows<T, 1>(x, from, in, ranks, scale, to, next); break;
      case 2: shrink_rows<T, 2>(x, from, in, ranks, scale, to, next); break;
      case 3: shrink_rows<T, 3>(x, from, in, ranks, scale, to, next); break;
      case 4: shrink_rows<T, 4>(x, from, in, ranks, scale, to, next); break;
      default: shrink_rows<T, TALLEST>(x, from, in, ranks, scale, to, next);
    }
    for (int r = 0; r < count; r++) pack<T>(h[r], begin, begin + ranks);
  }

  // Adds h B to columns [begin, end) of up to TALLEST rows.
  void expand_tile(T *const *y, float *const *h, int count, int64_t begin, int64_t end, Fetch &next) const {
    if (rank == 0) return;
    T *to[TALLEST];
    for (int r = 0; r < count; r++) to[r] = y[r] + first;
    switch (count) {
      case 1: return expand_rows<T, 1>(to, b, h, out, rank, begin, end, next);
      case 2: return expand_rows<T, 2>(to, b, h, out, rank, begin, end, next);
      case 3: return expand_rows<T, 3>(to, b, h, out, rank, begin, end, next);
      case 4: return expand_rows<T, 4>(to, b, h, out, rank, begin, end, next);
      default: return expand_rows<T, TALLEST>(to, b, h, out, rank, begin, end, next);
    }
  }
};

// What a call works on: rows of x and y, and h of each row and slice.
template <class T>
struct LowRankCall {
  const LowRankSite &site;
  const T *x;
  int64_t x_stride;
  T *y;
  int64_t y_stride;
  int layer;

  // Calls `work` with x, y, h and number of every tile of rows of a block; h is of slice s. Tiles are about equally tall: one of a
  // single row costs half as much as one of five.
  template <class Work>
  INLINE void tiles(const int32_t *block, int64_t s, Work work) const {
    const int num_tiles = (block[2] + TALLEST - 1) / TALLEST;
    for (int tile = 0; tile < num_tiles; tile++) {
      const T *in[TALLEST];
      T *out[TALLEST];
      float *h[TALLEST];
      const int begin = block[2] * tile / num_tiles, count = block[2] * (tile + 1) / num_tiles - begin;
      for (int r = 0; r < count; r++) {
        const int64_t place = block[1] + begin + r, row = site.rows[place];
        in[r] = x + row * x_stride, out[r] = y + row * y_stride, h[r] = site.h + (place * site.count + s) * site.max_rank;
      }
      work(in, out, h, count);
    }
  }

  // Adds all slices of blocks [begin, end). While A is worked on B is fetched, and meanwhile the next slice's A.
  void whole_blocks(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; i++) {
      const int32_t *block = site.blocks + 3 * i;
      for (int64_t s = 0; s < site.count; s++) {
        const Pair<T> pair(site, layer, block[0], s);
        Fetch of_b = pair.rows_of_b(pair.shrinks()), of_next;
        if (s + 1 < site.count)
          of_next = Pair<T>(site, layer, block[0], s + 1).rows_of_a(pair.expands());
        else if (i + 1 < end)
          of_next = Pair<T>(site, layer, block[3], 0).rows_of_a(pair.expands());
        tiles(block, s, [&](const T *const *in, T *const *out, float *const *h, int count) {
          pair.shrink_tile(in, h, count, 0, pair.rank, of_b);
          pair.expand_tile(out, h, count, 0, pair.out, of_next);
        });
      }
    }
  }

  // The first block of a thread, so that all have about as much to do: reading an adapter costs what some rows do.
  int64_t share(int64_t thread) const {
    constexpr int64_t READING = 4;
    int64_t total = 0, sum = 0, i = 0;
    for (int64_t k = 0; k < site.num_blocks; k++) total += READING + site.blocks[3 * k + 2];
    for (; i < site.num_blocks && sum * site.threads < total * thread; i++) sum += READING + site.blocks[3 * i + 2];
    return i;
  }
};

// A thread takes whole blocks where there are enough of them; else slices, rank rows and columns are shared out.
template <class T>
void low_rank(const LowRankSite &site, const T *x, int64_t x_stride, T *y, int64_t y_stride, int layer) {
  const LowRankCall<T> call{site, x, x_stride, y, y_stride, layer};
  if (site.num_blocks >= WHOLE * site.threads || site.threads == 1) {
#pragma omp for schedule(static, 1)
    for (int64_t thread = 0; thread < site.threads; thread++) call.whole_blocks(call.share(thread), call.share(thread + 1));
    return;
  }
  const int64_t num_items = site.num_blocks * site.count, chunks = (site.max_rank + RANKS - 1) / RANKS;
#pragma omp for schedule(dynamic, 1)
  for (int64_t item = 0; item < num_items * chunks; item++) {
    const int64_t s = item / chunks % site.count;
    const int32_t *block = site.blocks + 3 * (item / chunks / site.count);
    const Pair<T> pair(site, layer, block[0], s);
    const int begin = (int)(item % chunks * RANKS);
    if (begin >= pair.rank) continue;
    Fetch of_b = pair.rows_of_b(pair.shrinks());
    call.tiles(block, s, [&](const T *const *in, T *const *, float *const *h, int count) {
      pair.shrink_tile(in, h, count, begin, begin + RANKS, of_b);
    });
  }
#pragma omp for schedule(dynamic, 1)
  for (int64_t item = 0; item < num_items * 2; item++) {
    const int64_t s = item / 2 % site.count;
    const int32_t *block = site.blocks + 3 * (item / 2 / site.count);
    const Pair<T> pair(site, layer, block[0], s);
    const int64_t middle = pair.out / 2 / COLUMN_ALIGN * COLUMN_ALIGN;
    Fetch nothing;
    call.tiles(block, s, [&](const T *const *, T *const *out, float *const *h, int count) {
      pair.expand_tile(out, h, count, item % 2 ? middle : 0, item % 2 ? pair.out : middle, nothing);
    });
  }
}

}  // namespace
