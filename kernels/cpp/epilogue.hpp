// Gains and shifts of adapters: what follows their low-rank rows.

#pragma once

#include "vectors.hpp"

namespace {

constexpr int MAX_PARTS = 4;  // slices of a site

// Mirrors kernels.native_epilogue.EpilogueSite.
struct EpilogueSite {
  const char *arena;
  const int64_t *gain_offset, *shift_offset;  // [slots, layers, slices] in elements of the arena; negative where there is none
  const int32_t *rows, *slots;                // rows of the batch that have either somewhere, and their slots
  int64_t num_rows, num_layers, num_slices, item_bytes, threads;
  int64_t count;  // slices of the site
  int64_t slice[MAX_PARTS], first[MAX_PARTS], last[MAX_PARTS];
};

// y = gain · y + shift over `width` columns; a missing vector is null.
template <class T>
INLINE void gain_and_shift(T *y, const float *gain, const float *shift, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) {
    const int count = (int)std::min<int64_t>(LANES, width - i);
    auto get = [&](const auto *p) { return count == LANES ? load(p + i) : load_some(p + i, count); };
    floats v = get(y);
    if (gain) v *= get(gain);
    if (shift) v += get(shift);
    count == LANES ? store(y + i, v) : store_some(y + i, v, count);
  }
}

template <class T>
void epilogue(const EpilogueSite &site, T *y, int64_t y_stride, int layer) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < site.num_rows; i++)
    for (int64_t s = 0; s < site.count; s++) {
      const int64_t at = (site.slots[i] * site.num_layers + layer) * site.num_slices + site.slice[s];
      auto vector = [&](int64_t offset) { return offset < 0 ? nullptr : (const float *)(site.arena + offset * site.item_bytes); };
      const float *gain = vector(site.gain_offset[at]), *shift = vector(site.shift_offset[at]);
      if (gain || shift) gain_and_shift(y + site.rows[i] * y_stride + site.first[s], gain, shift, site.last[s] - site.first[s]);
    }
}

}  // namespace
