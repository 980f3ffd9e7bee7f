// The native CPU form: products, paged attention, rotary positions, add + norm, gated activation, low-rank rows, likeliest token.
//
// One source for every machine. Arithmetic is written on vectors of 16 floats in the compiler's own vector types, which it splits
// to what the machine has (AVX-512, AVX2, NEON, SSE or none); only the pair product of bfloat16, its rounding and a few
// reductions have an AVX-512 path. kernels/native.py compiles it, checks the machine and calls it; every pointer it passes is
// row-major and lives for the call.
//
// A row's bits depend on that row alone: each sum runs over one row in one order, however rows are blocked, shared out to threads
// or split for long contexts. Nothing reads a token behind a sequence's length, so what lies there, NaN included, reaches nobody.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;
typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

template <class To, class From>
INLINE To as(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

INLINE floats all(float v) { return floats{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
INLINE words all_words(uint32_t v) { return words{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
INLINE ints lanes() { return ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

INLINE floats widen(halves v) { return as<floats>(__builtin_convertvector(v, words) << 16); }

INLINE halves narrow(floats v) {  // to nearest, ties to even
#if defined(__AVX512BF16__)
  return as<halves>(_mm512_cvtneps_pbh(as<__m512>(v)));
#else
  words bits = as<words>(v);
  words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(v == v ? rounded : ((bits >> 16) | 0x40), halves);
#endif
}

INLINE floats load(const float *p) {
  floats v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE floats load(const bf16 *p) {
  halves v;
  memcpy(&v, p, sizeof v);
  return widen(v);
}
INLINE void store(float *p, floats v) { memcpy(p, &v, sizeof v); }
INLINE void store(bf16 *p, floats v) {
  halves h = narrow(v);
  memcpy(p, &h, sizeof h);
}
template <class T>
INLINE floats load_some(const T *p, int count) {  // zero behind count
  T full[LANES] = {};
  memcpy(full, p, count * sizeof(T));
  return load(full);
}
template <class T>
INLINE void store_some(T *p, floats v, int count) {
  T full[LANES];
  store(full, v);
  memcpy(p, full, count * sizeof(T));
}

INLINE floats fma(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return as<floats>(_mm512_fmadd_ps(as<__m512>(a), as<__m512>(b), as<__m512>(c)));
#else
  return a * b + c;
#endif
}
INLINE floats larger(floats a, floats b) { return a > b ? a : b; }
INLINE float sum(floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(as<__m512>(v));
#else
  float s[LANES];
  memcpy(s, &v, sizeof v);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] += s[i + n];
  return s[0];
#endif
}
INLINE float largest(floats v) {
  float m = v[0];
  for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// exp(x) to (1 + |x|) · 1e-7 relative; below -87 the smallest normal number, and NaN stays NaN.
INLINE floats exponential(floats x) {
  const floats magic = all(12582912.f);
  x = x < all(-87.f) ? all(-87.f) : x;
  x = x > all(88.f) ? all(88.f) : x;
  floats t = x * all(1.44269504f), shifted = t + magic, n = shifted - magic, f = t - n;
  floats p = all(1.5403530e-4f);  // ln(2)^k / k!, for |f| <= 1/2
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f}) p = fma(p, f, all(c));
  ints power = (as<ints>(shifted) - as<ints>(magic) + 127) << 23;
  return p * as<floats>(power);
}

// A word is 4 bytes of a page: two bfloat16, or one float. `step` adds, in every lane, the products of the parts of two words.
template <class T>
struct Words;
template <>
struct Words<bf16> {
  static constexpr int PARTS = 2;
  static INLINE floats step(floats acc, words a, words b) {
#if defined(__AVX512BF16__)
    return as<floats>(_mm512_dpbf16_ps(as<__m512>(acc), as<__m512bh>(a), as<__m512bh>(b)));
#else
    acc = fma(as<floats>(a << 16), as<floats>(b << 16), acc);
    return fma(as<floats>(a & 0xffff0000u), as<floats>(b & 0xffff0000u), acc);
#endif
  }
  static INLINE void pack(uint32_t *p, floats v) {  // 16 values to 8 words
    halves h = narrow(v);
    memcpy(p, &h, sizeof h);
  }
  static INLINE words first_part(words v) { return v & 0xffffu; }
};
template <>
struct Words<float> {
  static constexpr int PARTS = 1;
  static INLINE floats step(floats acc, words a, words b) { return fma(as<floats>(a), as<floats>(b), acc); }
  static INLINE void pack(uint32_t *p, floats v) { memcpy(p, &v, sizeof v); }
  static INLINE words first_part(words v) { return v; }
};
INLINE words load_words(const uint32_t *p) {
  words v;
  memcpy(&v, p, sizeof v);
  return v;
}

// ------------------------------------------------------------------------------------------------------------------- products

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

// ------------------------------------------------------------------------------------------------------------------ attention

constexpr int PAGE = 16;       // tokens of a page
constexpr int SPLIT = 512;     // tokens that are attended to at a time; results of splits are merged in order
constexpr int QUERIES = 6;     // queries that share a walk over pages
constexpr int MAX_DIM = 256;   // head dimension
constexpr int AHEAD = 2;       // blocks that are fetched before they are needed

// Mirrors kernels.native.AttentionStep.
struct AttentionStep {
  void *data;               // pages [pages, layers, 2, kv_heads, 16 · dim]
  const int64_t *kv_rows;   // [rows], see PagedKv.row_of
  const int64_t *parts;     // [num_parts, 4]: first row, rows, context, address of the page list (int64)
  int64_t num_rows, num_parts, num_layers, heads, kv_heads, dim;
  int64_t threads;
  float scale;
};

// Up to QUERIES queries of one sequence, at one key head; query i is row i / group, head i % group of the part's rows.
struct Unit {
  const int64_t *pages;
  int64_t first_row, context;
  int first_query, num_queries;
};

struct Result {
  float m[QUERIES], l[QUERIES];
  alignas(64) float o[QUERIES][MAX_DIM];
};

// `keys[P …]` follow in memory order of use: line d of block p + P is fetched while block p is worked on.
template <class T, int Q, int P>
INLINE void score(const uint32_t *const *keys, const uint32_t (*q)[MAX_DIM], int num_words, floats scale, float (*s)[SPLIT], int at) {
  floats acc[P][Q] = {};
  for (int d = 0; d < num_words; d++)
    for (int p = 0; p < P; p++) {
      words k = load_words(keys[p] + d * PAGE);
      __builtin_prefetch(keys[p + AHEAD] + d * PAGE);
      for (int i = 0; i < Q; i++) acc[p][i] = Words<T>::step(acc[p][i], k, all_words(q[i][d]));
    }
  for (int p = 0; p < P; p++)
    for (int i = 0; i < Q; i++) store(s[i] + at + p * PAGE, acc[p][i] * scale);
}

template <class T, int Q, int V>
INLINE void weigh(const uint32_t *const *values, const uint32_t (*p)[SPLIT], int tokens, int dim, int column, Result &out) {
  constexpr int PARTS = Words<T>::PARTS, PER_PAGE = PAGE / PARTS;
  floats acc[Q][V] = {};
  auto add = [&](int w, bool whole) {
    const int64_t at = (w % PER_PAGE) * dim + column;
    const uint32_t *row = values[w / PER_PAGE] + at, *next = values[w / PER_PAGE + AHEAD] + at;
    words v[V];
    for (int c = 0; c < V; c++) __builtin_prefetch(next + c * LANES);
    for (int c = 0; c < V; c++) v[c] = whole ? load_words(row + c * LANES) : Words<T>::first_part(load_words(row + c * LANES));
    for (int i = 0; i < Q; i++) {
      words weight = all_words(p[i][w]);
      for (int c = 0; c < V; c++) acc[i][c] = Words<T>::step(acc[i][c], v[c], weight);
    }
  };
  int whole = tokens / PARTS;
  for (int w = 0; w < whole; w++) add(w, true);
  if (tokens % PARTS) add(whole, false);
  for (int i = 0; i < Q; i++)
    for (int c = 0; c < V; c++) store(out.o[i] + column + c * LANES, acc[i][c]);
}

// Attends with Q queries of a unit to the tokens [SPLIT · split, …) of their sequence.
template <class T, int Q>
void attend(const AttentionStep &step, const Unit &unit, const uint32_t (*q)[MAX_DIM], int layer, int head, int split, Result &out) {
  constexpr int PARTS = Words<T>::PARTS;
  const int dim = step.dim, group = step.heads / step.kv_heads;
  const int64_t head_words = PAGE * dim / PARTS, kind_words = head_words * step.kv_heads;
  const int64_t start = (int64_t)split * SPLIT;
  const int64_t longest = unit.context + (unit.first_query + Q - 1) / group + 1;
  const int tokens = (int)std::min<int64_t>(longest - start, SPLIT), num_pages = (tokens + PAGE - 1) / PAGE;
  const uint32_t *keys[2 * SPLIT / PAGE + AHEAD];  // in the order of use: keys, values
  const uint32_t **values = keys + num_pages;
  for (int i = 0; i < num_pages; i++) {
    const int64_t page = unit.pages[start / PAGE + i];
    keys[i] = (const uint32_t *)step.data + (page * step.num_layers + layer) * 2 * kind_words + head * head_words;
    values[i] = keys[i] + kind_words;
  }
  for (int i = 0; i < AHEAD; i++) values[num_pages + i] = i < num_pages ? keys[i] + head_words : keys[0];  // often the next item's
  alignas(64) float s[Q][SPLIT];
  alignas(64) uint32_t p[Q][SPLIT];
  const floats scale = all(step.scale);
  int page = 0;
  if constexpr (Q <= 4)
    for (; page + 2 <= num_pages; page += 2) score<T, Q, 2>(keys + page, q, dim / PARTS, scale, s, page * PAGE);
  for (; page < num_pages; page++) score<T, Q, 1>(keys + page, q, dim / PARTS, scale, s, page * PAGE);

  for (int i = 0; i < Q; i++) {
    const int64_t length = unit.context + (unit.first_query + i) / group + 1;
    const int own = (int)std::clamp<int64_t>(length - start, 0, tokens);
    const floats least = all(-std::numeric_limits<float>::infinity());
    floats m = least, l = {};
    for (int at = 0; at < own; at += LANES) m = larger(lanes() < own - at ? load(s[i] + at) : least, m);
    out.m[i] = largest(m);
    for (int at = 0; at < num_pages * PAGE; at += LANES) {
      floats e = {};
      if (at < own) e = lanes() < own - at ? exponential(load(s[i] + at) - out.m[i]) : e;
      l += e;
      Words<T>::pack(p[i] + at / PARTS, e);
    }
    out.l[i] = sum(l);
  }
  int column = 0;
  for (; column + 64 <= dim; column += 64) weigh<T, Q, 4>(values, p, tokens, dim, column, out);
  for (; column < dim; column += LANES) weigh<T, Q, 1>(values, p, tokens, dim, column, out);
}

// Merges the next split of a sequence into the result of the splits before it.
void merge(Result &into, const Result &next, int queries, int dim) {
  for (int i = 0; i < queries; i++) {
    if (next.l[i] == 0) continue;
    const float m = next.m[i] > into.m[i] ? next.m[i] : into.m[i];
    const float old = expf(into.m[i] - m), fresh = expf(next.m[i] - m);
    into.m[i] = m;
    into.l[i] = into.l[i] * old + next.l[i] * fresh;
    for (int c = 0; c < dim; c += LANES) store(into.o[i] + c, fma(load(into.o[i] + c), all(old), load(next.o[i] + c) * all(fresh)));
  }
}

template <class T>
void attend_any(const AttentionStep &step, const Unit &unit, const uint32_t (*q)[MAX_DIM], int layer, int head, int split, Result &out) {
  switch (unit.num_queries) {
    case 1: return attend<T, 1>(step, unit, q, layer, head, split, out);
    case 2: return attend<T, 2>(step, unit, q, layer, head, split, out);
    case 3: return attend<T, 3>(step, unit, q, layer, head, split, out);
    case 4: return attend<T, 4>(step, unit, q, layer, head, split, out);
    case 5: return attend<T, 5>(step, unit, q, layer, head, split, out);
    default: return attend<T, 6>(step, unit, q, layer, head, split, out);
  }
}

template <class T>
void copy_queries(const AttentionStep &step, const Unit &unit, const T *qk, int64_t stride, int head, uint32_t (*q)[MAX_DIM]) {
  const int group = step.heads / step.kv_heads;
  for (int i = 0; i < unit.num_queries; i++) {
    const int query = unit.first_query + i;
    memcpy(q[i], qk + (unit.first_row + query / group) * stride + (head * group + query % group) * step.dim, step.dim * sizeof(T));
  }
}

template <class T>
void finish(const AttentionStep &step, const Unit &unit, const Result &result, int head, T *out) {
  const int group = step.heads / step.kv_heads;
  for (int i = 0; i < unit.num_queries; i++) {
    const int query = unit.first_query + i;
    T *row = out + ((unit.first_row + query / group) * step.heads + head * group + query % group) * step.dim;
    const floats inverse = all(1.f / result.l[i]);
    for (int c = 0; c < step.dim; c += LANES) store(row + c, load(result.o[i] + c) * inverse);
  }
}

// Writes the keys and values of one row to its page. Keys lie in words [dim / parts, token], values in words [token / parts, dim].
template <class T>
void append(const AttentionStep &step, const T *qk, int64_t qk_stride, const T *v, int64_t v_stride, int layer, int64_t t) {
  constexpr int PARTS = Words<T>::PARTS;
  const int dim = step.dim;
  const int64_t head_size = (int64_t)PAGE * dim, kind_size = head_size * step.kv_heads, rows_per_page = step.num_layers * 2 * PAGE;
  const int64_t page = step.kv_rows[t] / rows_per_page, offset = step.kv_rows[t] % rows_per_page;
  T *keys = (T *)step.data + (page * step.num_layers + layer) * 2 * kind_size, *values = keys + kind_size;
  for (int head = 0; head < step.kv_heads; head++, keys += head_size, values += head_size) {
    const T *key = qk + t * qk_stride + (step.heads + head) * dim, *value = v + t * v_stride + head * dim;
    for (int d = 0; d < dim / PARTS; d++) memcpy(keys + (d * PAGE + offset) * PARTS, key + d * PARTS, sizeof(uint32_t));
    T *to = values + offset / PARTS * PARTS * dim + offset % PARTS;
    for (int d = 0; d < dim; d++) to[d * PARTS] = value[d];
  }
}

std::vector<Unit> units_of(const AttentionStep &step) {
  const int group = step.heads / step.kv_heads;
  std::vector<Unit> units;
  for (int64_t i = 0; i < step.num_parts; i++) {
    const int64_t *part = step.parts + 4 * i;
    const int queries = (int)(part[1] * group), blocks = (queries + QUERIES - 1) / QUERIES, size = (queries + blocks - 1) / blocks;
    for (int first = 0; first < queries; first += size)
      units.push_back({(const int64_t *)part[3], part[0], part[2], first, std::min(size, queries - first)});
  }
  return units;
}

int splits_of(const Unit &unit, int group) {
  const int64_t longest = unit.context + (unit.first_query + unit.num_queries - 1) / group + 1;
  return (int)((longest + SPLIT - 1) / SPLIT);
}

template <class T>
void attention(const AttentionStep &step, const T *qk, int64_t qk_stride, const T *v, int64_t v_stride, T *out, int layer) {
  const std::vector<Unit> units = units_of(step);
  const int group = step.heads / step.kv_heads, kv_heads = step.kv_heads;
  const int64_t num_items = (int64_t)units.size() * kv_heads;
  int most_splits = 1;
  for (const Unit &unit : units) most_splits = std::max(most_splits, splits_of(unit, group));
  const bool spread = most_splits > 1 && num_items < 8 * step.threads;  // too few items to fill the threads
  std::vector<Result> parts(spread ? num_items * most_splits : 0);
#pragma omp parallel num_threads(step.threads)
  {
    alignas(64) uint32_t q[QUERIES][MAX_DIM];
#pragma omp for schedule(static)
    for (int64_t t = 0; t < step.num_rows; t++) append(step, qk, qk_stride, v, v_stride, layer, t);
    if (spread) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_items * most_splits; i++) {
        const int64_t item = i / most_splits;
        const Unit &unit = units[item / kv_heads];
        const int split = i % most_splits, head = item % kv_heads;
        if (split >= splits_of(unit, group)) continue;
        copy_queries(step, unit, qk, qk_stride, head, q);
        attend_any<T>(step, unit, q, layer, head, split, parts[i]);
      }
#pragma omp for schedule(static)
      for (int64_t item = 0; item < num_items; item++) {
        const Unit &unit = units[item / kv_heads];
        Result &result = parts[item * most_splits];
        for (int split = 1; split < splits_of(unit, group); split++) merge(result, (&result)[split], unit.num_queries, step.dim);
        finish(step, unit, result, item % kv_heads, out);
      }
    } else {
      Result result, next;
#pragma omp for schedule(dynamic, 4)
      for (int64_t item = 0; item < num_items; item++) {
        const Unit &unit = units[item / kv_heads];
        const int head = item % kv_heads;
        copy_queries(step, unit, qk, qk_stride, head, q);
        attend_any<T>(step, unit, q, layer, head, 0, result);
        for (int split = 1; split < splits_of(unit, group); split++) {
          attend_any<T>(step, unit, q, layer, head, split, next);
          merge(result, next, unit.num_queries, step.dim);
        }
        finish(step, unit, result, head, out);
      }
    }
  }
}

// --------------------------------------------------------------------------------------------------------------- layer pieces

// x += y, unless y is null; out = x / sqrt(mean(x²) + eps) · weight.
template <class T>
void add_norm(T *x, const T *y, const T *weight, T *out, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 7)
  for (int64_t t = 0; t < rows; t++) {
    T *row = x + t * width;
    floats squares = {};
    auto add = [&](int64_t i, int count) {
      floats v = load_some(row + i, count);
      if (y) {
        store_some(row + i, v + load_some(y + t * width + i, count), count);
        v = load_some(row + i, count);
      }
      squares = fma(v, v, squares);
    };
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) add(i, LANES);
    if (i < width) add(i, (int)(width - i));
    const floats factor = all(1.f / sqrtf(sum(squares) / width + eps));
    for (i = 0; i + LANES <= width; i += LANES) store(out + t * width + i, load(row + i) * factor * load(weight + i));
    if (i < width) {
      const int count = (int)(width - i);
      store_some(out + t * width + i, load_some(row + i, count) * factor * load_some(weight + i, count), count);
    }
  }
}

// Turns `heads` heads of every row in place: halves a, b become a·cos − b·sin, b·cos + a·sin.
template <class T>
INLINE void turn(T *a, T *b, const T *cosines, const T *sines, int count) {
  const floats c = load_some(cosines, count), s = load_some(sines, count), u = load_some(a, count), w = load_some(b, count);
  store_some(a, fma(u, c, -(w * s)), count);
  store_some(b, fma(w, c, u * s), count);
}
template <class T>
void rotate(T *x, int64_t stride, const T *cosines, const T *sines, int64_t rows, int64_t heads, int64_t dim, int threads) {
  const int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads) if (rows > 7)
  for (int64_t t = 0; t < rows; t++)
    for (int64_t head = 0; head < heads; head++) {
      T *a = x + t * stride + head * dim, *b = a + half;
      const T *c = cosines + t * half, *s = sines + t * half;
      int64_t i = 0;
      for (; i + LANES <= half; i += LANES) turn(a + i, b + i, c + i, s + i, LANES);
      if (i < half) turn(a + i, b + i, c + i, s + i, (int)(half - i));
    }
}

// out = gate / (1 + exp(−gate)) · up, of rows [gate, up].
template <class T>
void silu_mul(const T *gate_up, T *out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int64_t t = 0; t < rows; t++) {
    const T *gate = gate_up + t * 2 * width, *up = gate + width;
    T *row = out + t * width;
    auto act = [](floats g, floats u) { return g / (all(1.f) + exponential(-g)) * u; };
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(row + i, act(load(gate + i), load(up + i)));
    if (i < width) {
      const int count = (int)(width - i);
      store_some(row + i, act(load_some(gate + i, count), load_some(up + i, count)), count);
    }
  }
}

// First index of the largest of every row, and whether the largest is finite; a NaN anywhere makes a row not finite.
template <class T>
void likeliest(const T *x, int64_t *index, uint8_t *finite, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
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

// ------------------------------------------------------------------------------------------------------------------- low rank

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

#define EXPORT extern "C" __attribute__((visibility("default")))
#define FOR_BOTH(DEFINE) DEFINE(bf16, bfloat16) DEFINE(float, float32)
#define DEFINE_ALL(T, NAME)                                                                                                       \
  EXPORT void linear_##NAME(const T *x, int64_t x_stride, const uint32_t *weight, T *y, int64_t rows, int64_t depth,             \
                            int64_t width, int64_t threads) {                                                                     \
    linear<T>(x, x_stride, weight, y, rows, depth, width, (int)threads);                                                          \
  }                                                                                                                               \
  EXPORT void attention_##NAME(const AttentionStep *step, const T *qk, int64_t qk_stride, const T *v, int64_t v_stride, T *out,  \
                               int64_t layer) {                                                                                   \
    attention<T>(*step, qk, qk_stride, v, v_stride, out, (int)layer);                                                             \
  }                                                                                                                               \
  EXPORT void low_rank_##NAME(const LowRankSite *site, const T *x, int64_t x_stride, T *y, int64_t y_stride, int64_t layer) {    \
    low_rank<T>(*site, x, x_stride, y, y_stride, (int)layer);                                                                     \
  }                                                                                                                               \
  EXPORT void add_norm_##NAME(T *x, const T *y, const T *weight, T *out, int64_t rows, int64_t width, float eps,                 \
                              int64_t threads) {                                                                                  \
    add_norm<T>(x, y, weight, out, rows, width, eps, (int)threads);                                                               \
  }                                                                                                                               \
  EXPORT void rotate_##NAME(T *x, int64_t stride, const T *cosines, const T *sines, int64_t rows, int64_t heads, int64_t dim,    \
                            int64_t threads) {                                                                                    \
    rotate<T>(x, stride, cosines, sines, rows, heads, dim, (int)threads);                                                         \
  }                                                                                                                               \
  EXPORT void silu_mul_##NAME(const T *gate_up, T *out, int64_t rows, int64_t width, int64_t threads) {                          \
    silu_mul<T>(gate_up, out, rows, width, (int)threads);                                                                         \
  }                                                                                                                               \
  EXPORT void likeliest_##NAME(const T *x, int64_t *index, uint8_t *finite, int64_t rows, int64_t width, int64_t threads) {      \
    likeliest<T>(x, index, finite, rows, width, (int)threads);                                                                    \
  }
FOR_BOTH(DEFINE_ALL)
