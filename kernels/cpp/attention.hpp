// Attention over pages.

#pragma once

#include "vectors.hpp"

namespace {

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
  float scale, softcap;     // scores s become softcap · tanh(s / softcap); 0 leaves them
};

// A layer as it is attended to; a query sees the last `window` tokens of its own, itself included, 0: all.
struct Layer {
  int index;
  int64_t window;
  INLINE int64_t first_seen(int64_t length) const { return window ? std::max<int64_t>(0, length - window) : 0; }
};

// Up to QUERIES queries of one sequence, at one key head; query i is row i / group, head i % group of the part's rows.
struct Unit {
  const int64_t *pages;
  int64_t first_row, context;
  int first_query, num_queries;
  INLINE int64_t length(int query, int group) const { return context + (first_query + query) / group + 1; }
  INLINE int64_t longest(int group) const { return length(num_queries - 1, group); }
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

// Attends with Q queries of a unit to the tokens [SPLIT · split, SPLIT · (split + 1)) of their sequence that one of them sees.
// Pages that none sees are skipped: they would add exact zeros, so a query's bits do not depend on its neighbours in the unit.
template <class T, int Q>
void attend(const AttentionStep &step, const Unit &unit, const uint32_t (*q)[MAX_DIM], Layer layer, int head, int split, Result &out) {
  constexpr int PARTS = Words<T>::PARTS;
  const int dim = step.dim, group = step.heads / step.kv_heads;
  const int64_t head_words = PAGE * dim / PARTS, kind_words = head_words * step.kv_heads;
  const int64_t start = std::max<int64_t>((int64_t)split * SPLIT, layer.first_seen(unit.length(0, group)) / PAGE * PAGE);
  const int64_t end = std::min<int64_t>(unit.longest(group), (int64_t)(split + 1) * SPLIT);
  const int tokens = (int)(end - start), num_pages = (tokens + PAGE - 1) / PAGE;
  const uint32_t *keys[2 * SPLIT / PAGE + AHEAD];  // in the order of use: keys, values
  const uint32_t **values = keys + num_pages;
  for (int i = 0; i < num_pages; i++) {
    const int64_t page = unit.pages[start / PAGE + i];
    keys[i] = (const uint32_t *)step.data + (page * step.num_layers + layer.index) * 2 * kind_words + head * head_words;
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

  if (step.softcap > 0)
    for (int i = 0; i < Q; i++)
      for (int at = 0; at < num_pages * PAGE; at += LANES) store(s[i] + at, capped(load(s[i] + at), step.softcap));

  for (int i = 0; i < Q; i++) {
    const int64_t length = unit.length(i, group);
    const int own = (int)std::clamp<int64_t>(length - start, 0, tokens);  // behind it, and before `hidden`, nothing is seen
    const int hidden = (int)std::clamp<int64_t>(layer.first_seen(length) - start, 0, own), at_first = hidden / LANES * LANES;
    auto seen = [&](int at) { return (lanes() < own - at) & (lanes() >= hidden - at); };
    const floats least = all(-std::numeric_limits<float>::infinity());
    floats m = least, l = {};
    for (int at = at_first; at < own; at += LANES) m = larger(seen(at) ? load(s[i] + at) : least, m);
    out.m[i] = largest(m);
    for (int at = 0; at < num_pages * PAGE; at += LANES) {
      floats e = {};
      if (at >= at_first && at < own) e = seen(at) ? exponential(load(s[i] + at) - out.m[i]) : e;
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
void attend_any(const AttentionStep &step, const Unit &unit, const uint32_t (*q)[MAX_DIM], Layer layer, int head, int split, Result &out) {
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

// How a step is attended to: its units, and room for the results of splits. One serves all layers, and all threads of a team.
struct AttentionWork {
  const AttentionStep &step;
  const int group;
  std::vector<Unit> units;
  std::vector<Result> parts;

  explicit AttentionWork(const AttentionStep &step) : step(step), group(step.heads / step.kv_heads) {
    for (int64_t i = 0; i < step.num_parts; i++) {
      const int64_t *part = step.parts + 4 * i;
      const int queries = (int)(part[1] * group), blocks = (queries + QUERIES - 1) / QUERIES, size = (queries + blocks - 1) / blocks;
      for (int first = 0; first < queries; first += size)
        units.push_back({(const int64_t *)part[3], part[0], part[2], first, std::min(size, queries - first)});
    }
    const int most = most_splits(Layer{});
    if (spreads(most)) parts.resize(num_items() * most);  // enough for layers with windows, which see less
  }

  int64_t num_items() const { return (int64_t)units.size() * step.kv_heads; }
  int first_split(const Unit &unit, Layer layer) const { return (int)(layer.first_seen(unit.length(0, group)) / SPLIT); }
  int end_split(const Unit &unit) const { return (int)((unit.longest(group) + SPLIT - 1) / SPLIT); }
  int most_splits(Layer layer) const {
    int most = 1;
    for (const Unit &unit : units) most = std::max(most, end_split(unit) - first_split(unit, layer));
    return most;
  }
  bool spreads(int most) const { return most > 1 && num_items() < 8 * step.threads; }  // too few items to fill the threads
};

template <class T>
void attention(AttentionWork &work, const T *qk, int64_t qk_stride, const T *v, int64_t v_stride, T *out, Layer layer) {
  const AttentionStep &step = work.step;
  const int64_t num_items = work.num_items(), kv_heads = step.kv_heads;
  const int most = work.most_splits(layer);
  alignas(64) uint32_t q[QUERIES][MAX_DIM];
#pragma omp for schedule(static)
  for (int64_t t = 0; t < step.num_rows; t++) append(step, qk, qk_stride, v, v_stride, layer.index, t);
  if (work.spreads(most)) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_items * most; i++) {
      const int64_t item = i / most;
      const Unit &unit = work.units[item / kv_heads];
      const int split = work.first_split(unit, layer) + i % most, head = item % kv_heads;
      if (split >= work.end_split(unit)) continue;
      copy_queries(step, unit, qk, qk_stride, head, q);
      attend_any<T>(step, unit, q, layer, head, split, work.parts[i]);
    }
#pragma omp for schedule(static)
    for (int64_t item = 0; item < num_items; item++) {
      const Unit &unit = work.units[item / kv_heads];
      Result &result = work.parts[item * most];
      const int num_splits = work.end_split(unit) - work.first_split(unit, layer);
      for (int split = 1; split < num_splits; split++) merge(result, (&result)[split], unit.num_queries, step.dim);
      finish(step, unit, result, item % kv_heads, out);
    }
  } else {
    Result result, next;
#pragma omp for schedule(dynamic, num_items < 16 ? 1 : 4)
    for (int64_t item = 0; item < num_items; item++) {
      const Unit &unit = work.units[item / kv_heads];
      const int head = item % kv_heads, first = work.first_split(unit, layer);
      copy_queries(step, unit, qk, qk_stride, head, q);
      attend_any<T>(step, unit, q, layer, head, first, result);
      for (int split = first + 1; split < work.end_split(unit); split++) {
        attend_any<T>(step, unit, q, layer, head, split, next);
        merge(result, next, unit.num_queries, step.dim);
      }
      finish(step, unit, result, head, out);
    }
  }
}

}  // namespace
