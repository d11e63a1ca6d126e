// Matrix products with weights that were packed once: y = x W^T, for one row of x or thousands.
//
// Packing puts the outputs side by side in the lanes of vectors, kPanel of them to a panel, so that a product of one
// input with a vector of weights adds to as many outputs. Each output is one sum in the order of its inputs, whatever
// the number of rows, and whoever computes which panel: the results are batch-invariant by construction.
//
// Few rows are as fast as the weights can be read (once); many rows as fast as the machine multiplies, because a panel
// stays in the first-level cache, and the rows in the second, while they meet.
#pragma once

#include <algorithm>

#include "amx.h"
#include "simd.h"

namespace legato {

enum WeightType : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

constexpr int kVectors = 2;                 // of outputs in a panel: with 14 rows, unpacking weights costs 1/14
constexpr int kPanel = kVectors * kLanes;   // outputs
constexpr int kPrefetchBytes = 2048;        // ahead in a panel: some 100 ns of reading
constexpr int kSlab = 32;                   // inputs; rows are laid out slab by slab, so that offsets are constants

inline int num_panels(int outputs) { return (outputs + kPanel - 1) / kPanel; }
inline int num_slabs(int inputs) { return (inputs + kSlab - 1) / kSlab; }
inline int weight_bytes(int32_t type) { return type == kFloat32 ? 4 : type == kBfloat16 ? 2 : 1; }
inline int64_t panel_bytes(int inputs, int32_t type) {
  return (int64_t)num_slabs(inputs) * kSlab * kPanel * weight_bytes(type);
}

// How each type unpacks a panel's weights of inputs k (first) and k + 1 (second). kPanel weights of k precede those of
// k + 1, except in bfloat16, where the two of one output share a word: a shift and a mask then unpack both.
struct Float32Weights {
  static constexpr int kPairBytes = 2 * kPanel * 4;
  static Vector first(const char* pair, int v) { return load((const float*)pair + v * kLanes); }
  static Vector second(const char* pair, int v) { return load((const float*)pair + kPanel + v * kLanes); }
};

struct Bfloat16Weights {
  static constexpr int kPairBytes = 2 * kPanel * 2;
  static Vector first(const char* pair, int v) { return load_first_bfloat16(pair + v * kLanes * 4); }
  static Vector second(const char* pair, int v) { return load_second_bfloat16(pair + v * kLanes * 4); }
};

struct Int8Weights {
  static constexpr int kPairBytes = 2 * kPanel;
  static Vector first(const char* pair, int v) { return load_int8((const int8_t*)pair + v * kLanes); }
  static Vector second(const char* pair, int v) { return load_int8((const int8_t*)pair + kPanel + v * kLanes); }
};

// Whether weights of this type are multiplied by tiles; whether rows for them are laid out in bfloat16.
inline bool is_by_amx(int32_t type) { return kHasAmx && type != kFloat32; }
inline bool is_by_pairs(int32_t type) { return is_by_amx(type) || (kHasPairs && type == kBfloat16); }

// Rows that one pass over a panel serves at most.
constexpr int kMostRows = kHasAmx ? kMostAmxRows : kLinearRows;
inline int most_rows(int32_t type) { return is_by_amx(type) ? kMostAmxRows : kLinearRows; }

using PanelSums = Vector[kMostRows][kVectors];

// How many panels one pass over few rows goes through at a time. With one row and one panel there are two sums, and each
// would wait for the multiplication before it (4 cycles) longer than for its weights. A tile's takes 52 cycles, and serves 16
// rows.
constexpr int kMostPanels = 2;
constexpr int panels_at_once(int rows) { return rows <= 2 ? kMostPanels : 1; }
inline int panels_at_once(int32_t type, int rows) {
  return is_by_amx(type) ? (rows <= kAmxRows ? kMostPanels : 1) : panels_at_once(rows);
}

// Sums of Panels panels, panel_stride bytes apart, for rows that lie slab by slab, [slab][Rows][kSlab].
template <int Rows, int Panels, class Weights>
void multiply_panels(const char* panel, int64_t panel_stride, const float* rows, int slabs, PanelSums* sums) {
  constexpr int kWide = Panels * kVectors;
  Vector local[Rows][kWide];
  unroll<Rows>([&](auto row) { unroll<kWide>([&](auto v) { local[row][v] = splat(0.0f); }); });
  for (int slab = 0; slab < slabs; ++slab) {
    for (int k = 0; k < kSlab; k += 2) {
      // The hardware follows a stream only to the end of its 4 KiB page; this crosses into the next.
      unroll<Panels>([&](auto p) {
        for (int line = 0; line < Weights::kPairBytes; line += 64)
          __builtin_prefetch(panel + p * panel_stride + kPrefetchBytes + line, 0, 3);
      });
      Vector weights[kWide];
      unroll<kWide>([&](auto v) { weights[v] = Weights::first(panel + v / kVectors * panel_stride, v % kVectors); });
      unroll<Rows>([&](auto row) {
        const Vector x = splat(rows[row * kSlab + k]);
        unroll<kWide>([&](auto v) { local[row][v] = fma(weights[v], x, local[row][v]); });
      });
      unroll<kWide>([&](auto v) { weights[v] = Weights::second(panel + v / kVectors * panel_stride, v % kVectors); });
      unroll<Rows>([&](auto row) {
        const Vector x = splat(rows[row * kSlab + k + 1]);
        unroll<kWide>([&](auto v) { local[row][v] = fma(weights[v], x, local[row][v]); });
      });
      panel += Weights::kPairBytes;
    }
    rows += Rows * kSlab;
  }
  unroll<Rows>([&](auto row) { unroll<kWide>([&](auto v) { sums[v / kVectors][row][v % kVectors] = local[row][v]; }); });
}

// The same for rows of bfloat16 that lie slab by slab, [slab][Rows][kSlab], and weights of bfloat16.
template <int Rows, int Panels>
void multiply_panels_by_pairs(const char* panel, int64_t panel_stride, const float* laid_out, int slabs, PanelSums* sums) {
  constexpr int kWide = Panels * kVectors;
  const char* rows = (const char*)laid_out;
  Vector local[Rows][kWide];
  unroll<Rows>([&](auto row) { unroll<kWide>([&](auto v) { local[row][v] = splat(0.0f); }); });
  for (int slab = 0; slab < slabs; ++slab) {
    for (int k = 0; k < kSlab; k += 2) {
      unroll<Panels>([&](auto p) {
        for (int line = 0; line < Bfloat16Weights::kPairBytes; line += 64)
          __builtin_prefetch(panel + p * panel_stride + kPrefetchBytes + line, 0, 3);
      });
      Words weights[kWide];
      unroll<kWide>([&](auto v) {
        weights[v] = load_words(panel + v / kVectors * panel_stride + v % kVectors * kLanes * 4);
      });
      unroll<Rows>([&](auto row) {
        const Words x = splat_word(rows + (row * kSlab + k) * 2);
        unroll<kWide>([&](auto v) { local[row][v] = add_pairs(local[row][v], weights[v], x); });
      });
      panel += Bfloat16Weights::kPairBytes;
    }
    rows += Rows * kSlab * 2;
  }
  unroll<Rows>([&](auto row) { unroll<kWide>([&](auto v) { sums[v / kVectors][row][v % kVectors] = local[row][v]; }); });
}

using MultiplyPanels = void (*)(const char*, int64_t, const float*, int, PanelSums*);

// The function for num_rows rows, and for one panel at a time or as many as panels_at_once says.
template <class Weights, int Rows = kLinearRows>
MultiplyPanels panel_multiplier(int num_rows, bool is_single) {
  if constexpr (Rows == 0)
    return nullptr;
  else if (num_rows != Rows)
    return panel_multiplier<Weights, Rows - 1>(num_rows, is_single);
  else if constexpr (kHasPairs && std::is_same_v<Weights, Bfloat16Weights>)
    return is_single ? multiply_panels_by_pairs<Rows, 1> : multiply_panels_by_pairs<Rows, panels_at_once(Rows)>;
  else
    return is_single ? multiply_panels<Rows, 1, Weights> : multiply_panels<Rows, panels_at_once(Rows), Weights>;
}

inline MultiplyPanels panel_multiplier(int32_t type, int num_rows, bool is_single) {
  switch (type) {
    case kFloat32: return panel_multiplier<Float32Weights>(num_rows, is_single);
    case kBfloat16: return panel_multiplier<Bfloat16Weights>(num_rows, is_single);
    default: return panel_multiplier<Int8Weights>(num_rows, is_single);
  }
}

// Rows in blocks of nearly equal size: 16 rows are 8 and 8, not 14 and 2, which would read the weights for so little.
struct RowBlocks {
  int num_rows, num_blocks, block_rows;
  RowBlocks(int rows, int most_rows)
      : num_rows(rows),
        num_blocks((rows + most_rows - 1) / most_rows),
        block_rows(num_blocks ? (rows + num_blocks - 1) / num_blocks : 0) {
    if (block_rows) num_blocks = (rows + block_rows - 1) / block_rows;
  }
  int rows_of(int block) const { return std::min(block_rows, num_rows - block * block_rows); }
};

// 1 / sqrt(mean(x^2) + eps) of one row.
inline float inverse_norm(const float* x, int size, float eps) {
  Vector squares = {};
  int k = 0;
  for (; k + kLanes <= size; k += kLanes) {
    const Vector part = load(x + k);
    squares = fma(part, part, squares);
  }
  float sum = sum_of_lanes(squares);
  for (; k < size; ++k) sum += x[k] * x[k];
  return 1.0f / __builtin_sqrtf(sum / (float)size + eps);
}

inline void lay_out(float* to, Vector x) { store(to, x); }
inline void lay_out(float* to, float x) { *to = x; }
inline void lay_out(uint16_t* to, Vector x) { store_narrowed(to, x); }
inline void lay_out(uint16_t* to, float x) { *to = narrow(x); }

// Lay rows out slab by slab, scaled by their norm and its weights if there are any; the last slab ends in zeros.
template <class Element>
void lay_out_rows_as(const float* x, int64_t stride, int rows, int inputs, const float* norm, float eps, Element* to) {
  for (int row = 0; row < rows; ++row) {
    const float* from = x + row * stride;
    const float scale = norm ? inverse_norm(from, inputs, eps) : 1.0f;
    for (int slab = 0; slab < num_slabs(inputs); ++slab) {
      Element* out = to + ((int64_t)slab * rows + row) * kSlab;
      const int start = slab * kSlab;
      const int end = std::min(kSlab, inputs - start);
      int k = 0;
      for (; k + kLanes <= end; k += kLanes) {
        Vector part = load(from + start + k);
        if (norm) part = part * splat(scale) * load(norm + start + k);
        lay_out(out + k, part);
      }
      for (; k < end; ++k) lay_out(out + k, norm ? from[start + k] * scale * norm[start + k] : from[start + k]);
      for (; k < kSlab; ++k) lay_out(out + k, 0.0f);
    }
  }
}

// As weights of this type want them. There is room for floats in any case.
inline void lay_out_rows(const float* x, int64_t stride, int rows, int inputs, const float* norm, float eps, int32_t type,
                         float* to) {
  if (is_by_pairs(type))
    lay_out_rows_as(x, stride, rows, inputs, norm, eps, (uint16_t*)to);
  else
    lay_out_rows_as(x, stride, rows, inputs, norm, eps, to);
}

enum Epilogue : int32_t {
  kStore = 0,    // y
  kAdd = 1,      // output + y: the residual stream
  kSiluMul = 2,  // silu(y of the first half of the outputs) * y of the second, packed so that a panel holds both
};

// The row of W whose weights lie in a column of a panel; -1 in the padding.
inline int source_row(int panel, int column, int outputs, int32_t epilogue) {
  int row = panel * kPanel + column;
  if (epilogue != kSiluMul) return row < outputs ? row : -1;
  row = panel * kLanes + column % kLanes;
  if (row >= outputs / 2) return -1;
  return column < kLanes ? row : outputs / 2 + row;
}

inline int num_panels(int outputs, int32_t epilogue) {
  return epilogue == kSiluMul ? (outputs / 2 + kLanes - 1) / kLanes : num_panels(outputs);
}

// Where in a packed matrix (not of kSiluMul) the weight of (output, input) is, in elements.
inline int64_t place_of(int output, int input, int inputs, int32_t type) {
  const int64_t panel = (int64_t)(output / kPanel) * num_slabs(inputs) * kSlab * kPanel;
  const int column = output % kPanel;
  if (type == kBfloat16) return panel + (int64_t)(input / 2) * 2 * kPanel + column * 2 + input % 2;
  return panel + (int64_t)input * kPanel + column;
}

// Write count lanes of y to one row of the output.
inline void write_lanes(float* output, Vector y, int count, bool is_added) {
  if (count >= kLanes) {
    store(output, is_added ? load(output) + y : y);
    return;
  }
  for (int lane = 0; lane < count; ++lane) output[lane] = is_added ? output[lane] + y[lane] : y[lane];
}

}  // namespace legato
