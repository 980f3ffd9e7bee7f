// Vectors of 16 floats, the two dtypes in memory, and words of 4 bytes: what all native parts are written in.

#pragma once

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

INLINE words widen_words(halves v) {
#if defined(__AVX512F__)
  return as<words>(_mm512_cvtepu16_epi32(as<__m256i>(v)));  // compilers make four instructions of the other form
#else
  return __builtin_convertvector(v, words);
#endif
}
INLINE floats widen(halves v) { return as<floats>(widen_words(v) << 16); }

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

// cap · tanh(x / cap); relative error below 2e-6.
INLINE floats capped(floats x, float cap) {
  const floats z = x * all(1.f / cap), square = z * z;
  floats series = all(-17.f / 315.f);  // of tanh(z) / z, for small z, where the other form cancels
  for (float c : {2.f / 15.f, -1.f / 3.f, 1.f}) series = fma(series, square, all(c));
  const floats whole = all(1.f) - all(2.f) / (exponential(z + z) + all(1.f));
  return all(cap) * (square < all(0.01f) ? z * series : whole);
}

// A word is 4 bytes: two bfloat16, or one float. `step` adds, in every lane, the products of the parts of two words; `split` gives
// the parts of all lanes, and `join` rounds them and puts them together; `pair` takes as many rows of words as a word has parts, and
// gives words of the rows' first parts, then of their second ones.
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
  static INLINE void split(words v, floats *parts) {
    parts[0] = as<floats>(v << 16);
    parts[1] = as<floats>(v & 0xffff0000u);
  }
  static INLINE void pair(const words *rows, words *pairs) {
    pairs[0] = (rows[0] & 0xffffu) | (rows[1] << 16);
    pairs[1] = (rows[0] >> 16) | (rows[1] & 0xffff0000u);
  }
  static INLINE words join(const floats *parts) {
    return widen_words(narrow(parts[0])) | widen_words(narrow(parts[1])) << 16;
  }
};
template <>
struct Words<float> {
  static constexpr int PARTS = 1;
  static INLINE floats step(floats acc, words a, words b) { return fma(as<floats>(a), as<floats>(b), acc); }
  static INLINE void pack(uint32_t *p, floats v) { memcpy(p, &v, sizeof v); }
  static INLINE words first_part(words v) { return v; }
  static INLINE void split(words v, floats *parts) { parts[0] = as<floats>(v); }
  static INLINE void pair(const words *rows, words *pairs) { pairs[0] = rows[0]; }
  static INLINE words join(const floats *parts) { return as<words>(parts[0]); }
};
INLINE words load_words(const void *p) {
  words v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
INLINE words load_row(const T *p, int count) {  // one vector of words; zero behind count
  if (count * sizeof(T) >= 64) return load_words(p);
  words v = {};
  memcpy(&v, p, count * sizeof(T));
  return v;
}
template <class T>
INLINE void store_row(T *p, words v, int count) {
  memcpy(p, &v, std::min<size_t>(64, count * sizeof(T)));
}

}  // namespace
