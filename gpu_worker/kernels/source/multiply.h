// A block of rows by panels of weights, by whatever multiplies them.
#pragma once

#include "linear.h"

namespace legato {

#if defined(LEGATO_AMX)

// Where a slab of a panel lies as tiles want it: [kSlab / 2][kPanel] words of two bfloat16.
struct Bfloat16Slabs {
  static constexpr int kBytes = kSlab * kPanel * 2;
  explicit Bfloat16Slabs(const char* panel) : panel_(panel) {}
  void prepare(int) {}
  const char* operator[](int slab) const { return panel_ + (int64_t)slab * kBytes; }

 private:
  const char* panel_;
};

// Bfloat16 holds int8 exactly. One slab is unpacked while tiles meet the one before.
struct Int8Slabs {
  static constexpr int kBytes = kSlab * kPanel;
  explicit Int8Slabs(const char* panel) : panel_(panel) {}
  void prepare(int slab) {
    const int8_t* from = (const int8_t*)panel_ + (int64_t)slab * kBytes;
    uint32_t* to = unpacked_[slab % 2];
    for (int pair = 0; pair < kSlab / 2; ++pair, from += 2 * kPanel, to += kPanel)
      for (int first = 0; first < kPanel; first += kLanes) {
        const Words even = (Words)load_int8(from + first), odd = (Words)load_int8(from + kPanel + first);
        const Words both = (even >> 16) | (odd & 0xffff0000u);
        std::memcpy(to + first, &both, sizeof both);
      }
  }
  const char* operator[](int slab) const { return (const char*)unpacked_[slab % 2]; }

 private:
  const char* panel_;
  alignas(64) uint32_t unpacked_[2][kSlab / 2 * kPanel];
};

// Sums of Panels panels, panel_stride bytes apart, for up to kMostAmxRows rows of bfloat16, [slab][num_rows][kSlab]. Of
// more than kAmxRows if HasSecond, and then of one panel.
template <class Slabs, int Panels, bool HasSecond>
void multiply_panels_by_amx(const char* panel, int64_t panel_stride, const float* laid_out, int num_rows, int num_slabs,
                            PanelSums* sums) {
  constexpr int kHalf = kAmxBytes, kWords = kPanel * 4;
  static_assert(kAmxDepth == kSlab && 2 * kAmxBytes == kWords, "a tile of weights is half a panel wide, a slab deep");
  const char* rows = (const char*)laid_out;
  Slabs own(panel), other(panel + panel_stride);  // The other of two.
  own.prepare(0);
  if constexpr (Panels == 2) other.prepare(0);
  shape_amx(num_rows);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int slab = 0; slab < num_slabs; ++slab) {
    for (int line = 0; line < Slabs::kBytes; line += 64) {
      const char* ahead = panel + (int64_t)slab * Slabs::kBytes + kPrefetchBytes + line;
      __builtin_prefetch(ahead, 0, 3);
      if constexpr (Panels == 2) __builtin_prefetch(ahead + panel_stride, 0, 3);
    }
    if (slab + 1 < num_slabs) {
      own.prepare(slab + 1);
      if constexpr (Panels == 2) other.prepare(slab + 1);
    }
    settle_memory();
    _tile_loadd(4, rows, kAmxBytes);
    _tile_loadd(6, own[slab], kWords);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, own[slab] + kHalf, kWords);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Panels == 2) {
      _tile_loadd(6, other[slab], kWords);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, other[slab] + kHalf, kWords);
      _tile_dpbf16ps(3, 4, 7);
    } else if constexpr (HasSecond) {
      _tile_loadd(5, rows + kAmxRows * kAmxBytes, kAmxBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    settle_memory();
    rows += num_rows * kAmxBytes;
  }
  constexpr int kStride = sizeof(sums[0][0]);
  _tile_stored(0, &sums[0][0][0], kStride);
  _tile_stored(1, &sums[0][0][1], kStride);
  if constexpr (Panels == 2) {
    _tile_stored(2, &sums[1][0][0], kStride);
    _tile_stored(3, &sums[1][0][1], kStride);
  } else if constexpr (HasSecond) {
    _tile_stored(2, &sums[0][kAmxRows][0], kStride);
    _tile_stored(3, &sums[0][kAmxRows][1], kStride);
  }
  settle_memory();
}

template <class Slabs>
void multiply_by_amx(int num_rows, bool is_single, const char* panel, int64_t panel_stride, const float* rows, int num_slabs,
                     PanelSums* sums) {
  const auto multiplier = !is_single             ? multiply_panels_by_amx<Slabs, 2, false>
                          : num_rows <= kAmxRows ? multiply_panels_by_amx<Slabs, 1, false>
                                                 : multiply_panels_by_amx<Slabs, 1, true>;
  multiplier(panel, panel_stride, rows, num_rows, num_slabs, sums);
}

#endif

// sums of one panel, or of as many as panels_at_once says, for up to most_rows rows.
inline void multiply(int32_t type, int num_rows, bool is_single, const char* panel, int64_t panel_stride, const float* rows,
                     int num_slabs, PanelSums* sums) {
#if defined(LEGATO_AMX)
  if (is_by_amx(type)) {
    const auto multiplier = type == kInt8 ? multiply_by_amx<Int8Slabs> : multiply_by_amx<Bfloat16Slabs>;
    return multiplier(num_rows, is_single, panel, panel_stride, rows, num_slabs, sums);
  }
#endif
  panel_multiplier(type, num_rows, is_single)(panel, panel_stride, rows, num_slabs, sums);
}

}  // namespace legato
