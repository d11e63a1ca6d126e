// Attention over a bfloat16 pool by AMX's tiles (see amx.h): 16 rows at a time meet a step's keys, and then its values,
// which are packed as attention_pairs.h packs them. The softmax is attention.h's own.
//
// For a decode's few rows packing would cost more than the tiles save, and keys come from memory anyway. They are multiplied
// as float32, in the order in which tiles sum: of 32 products the even ones and the odd ones, then both. The bits are the
// same, since tiles round as float32 does, but for denormal numbers, which they take for 0; so do few rows.
#pragma once

#include "amx.h"
#include "attention_pairs.h"

#if defined(LEGATO_AMX)

namespace legato {

inline bool is_few(int rows) { return rows <= kAttentionRows; }

// While it lives, denormal numbers are 0 to this thread's vectors, too.
class DenormalsAreZero {
 public:
  DenormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~DenormalsAreZero() { _mm_setcsr(before_); }
  DenormalsAreZero(const DenormalsAreZero&) = delete;

 private:
  const unsigned before_;
};

inline Vector rounded(Vector x) {
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)halves), 16);
}

// Queries lie row by row, [rows][head_dim], scaled so that 2 to the power of a score is its weight: in bfloat16 for tiles, or
// rounded to it.
inline void lay_out_query_rows(const AttentionShape& shape, const Tile& tile, const float* queries, int64_t stride,
                               float* to) {
  const int group = shape.group(), head_dim = shape.head_dim, rows = tile.num_queries * group;
  const Vector scale = splat(shape.scale * 1.4426950408889634f);
  for (int row = 0; row < rows; ++row) {
    const float* from = queries + (tile.first_token + row / group) * stride +
                        (int64_t)(tile.kv_head * group + row % group) * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) {
      const Vector query = load(from + d) * scale;
      if (is_few(rows))
        store(to + row * head_dim + d, rounded(query));
      else
        store_narrowed((uint16_t*)to + row * head_dim + d, query);
    }
  }
}

// The values of keys that are not there, up to a whole depth: their weights are 0, but memory may hold no number.
inline void clear_absent_values(const PairStep& step, int head_dim, uint32_t* values) {
  const int end = (step.num_keys + kAmxDepth - 1) / kAmxDepth * kAmxDepth;
  for (int key = (step.num_keys + 1) / 2 * 2; key < end; key += 2)
    for (int d = 0; d < head_dim; d += kLanes) store_words(values + key / 2 * head_dim + d, Words{});
}

// scores[row][key] of up to 16 rows. Past the last key: whatever the scratch holds, masked later.
inline void score_by_amx(const uint16_t* queries, int rows, int head_dim, const char* keys, float* scores) {
  const int tile_bytes = kTileKeys * head_dim * 2, row_bytes = head_dim * 2;
  constexpr int kDepthBytes = kAmxDepth * kTileKeys * 2;
  shape_amx(rows);
  settle_memory();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < head_dim; d += kAmxDepth, keys += kDepthBytes) {
    _tile_loadd(4, queries + d, row_bytes);
    _tile_loadd(6, keys, kAmxBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, keys + tile_bytes, kAmxBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, keys + 2 * tile_bytes, kAmxBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, keys + 3 * tile_bytes, kAmxBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
  constexpr int kStride = kStepKeys * sizeof(float);
  _tile_stored(0, scores, kStride);
  _tile_stored(1, scores + kTileKeys, kStride);
  _tile_stored(2, scores + 2 * kTileKeys, kStride);
  _tile_stored(3, scores + 3 * kTileKeys, kStride);
  settle_memory();
}

// Add weights times values to up to 16 rows of a part, which are scaled already.
inline void add_values_by_amx(const float* weights, int rows, int num_keys, int head_dim, const char* values, float* part) {
  const int part_stride = part_size(head_dim) * sizeof(float), value_stride = head_dim * 4;
  constexpr int kWeightStride = kStepKeys * sizeof(float);
  shape_amx(rows);
  settle_memory();
  for (int dim = 0; dim < head_dim; dim += 2 * kLanes) {
    _tile_loadd(0, part + dim, part_stride);
    _tile_loadd(1, part + dim + kLanes, part_stride);
    for (int key = 0; key < num_keys; key += kAmxDepth) {
      const char* from = values + (int64_t)key / 2 * value_stride + dim * 4;
      _tile_loadd(4, (const uint16_t*)weights + key, kWeightStride);
      _tile_loadd(6, from, value_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, from + kAmxBytes, value_stride);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, part + dim, part_stride);
    _tile_stored(1, part + dim + kLanes, part_stride);
  }
  settle_memory();
}

// How many vectors of scores, or of a value's dimensions, few rows have on the way: each has two sums.
constexpr int few_vectors(int rows) { return rows <= 3 ? 4 : 2; }

// scores[row][key] of few rows, by keys where they lie in the pool.
template <int Rows>
void score_few(const float* queries, int head_dim, const PairStep& step, float* scores) {
  constexpr int kVectors = few_vectors(Rows);
  for (int first = 0; first < step.num_keys; first += kVectors * kLanes) {
    const char* keys[kVectors];
    find_keys(step.keys, step.num_keys, first, keys);
    for (int d = 0; d < head_dim; d += kAmxDepth) {
      Vector even[Rows][kVectors], odd[Rows][kVectors];
      unroll<Rows>([&](auto row) { unroll<kVectors>([&](auto v) { even[row][v] = odd[row][v] = splat(0.0f); }); });
      for (int i = d; i < d + kAmxDepth; i += 2) {
        for (int v = 0; v < kVectors; ++v) step.next.prefetch(first / kTileKeys + v, i);
        const auto add = [&](int dim, Vector(&sums)[Rows][kVectors]) __attribute__((always_inline)) {
          add_outer_product<Rows, kVectors>(
              [&](auto row) { return splat(queries[row * head_dim + dim]); },
              [&](auto v) { return load_bfloat16((const uint16_t*)keys[v] + dim * kTileKeys); }, sums);
        };
        add(i, even);
        add(i + 1, odd);
      }
      unroll<Rows>([&](auto row) {
        unroll<kVectors>([&](auto v) {
          float* score = scores + row * kStepKeys + first + v * kLanes;
          store(score, (d ? load(score) : splat(0.0f)) + (even[row][v] + odd[row][v]));
        });
      });
    }
  }
}

// Add weights times values to Vectors vectors of few rows of a part, which are scaled already.
template <int Rows, int Vectors>
void add_values_few(const float* weights, const PairStep& step, int first, float* part, int size) {
  for (int start = 0; start < step.num_keys; start += kAmxDepth) {
    Vector even[Rows][Vectors], odd[Rows][Vectors];
    unroll<Rows>([&](auto row) { unroll<Vectors>([&](auto v) { even[row][v] = odd[row][v] = splat(0.0f); }); });
    for (int tile = start; tile < std::min(start + kAmxDepth, step.num_keys); tile += kTileKeys) {
      const uint16_t* values = (const uint16_t*)step.values[tile / kTileKeys] + first;
      const int end = std::min(tile + kTileKeys, step.num_keys);
      for (int key = tile; key < end; key += 2) {
        const auto add = [&](int key, Vector(&sums)[Rows][Vectors]) __attribute__((always_inline)) {
          add_outer_product<Rows, Vectors>([&](auto row) { return splat(weights[row * kStepKeys + key]); },
                                           [&](auto v) { return load_bfloat16(values + v * kLanes); }, sums);
          values += step.value_token;
        };
        add(key, even);
        if (key + 1 < end) add(key + 1, odd);
      }
    }
    unroll<Rows>([&](auto row) {
      unroll<Vectors>([&](auto v) {
        float* sum = part + row * size + first + v * kLanes;
        store(sum, load(sum) + (even[row][v] + odd[row][v]));
      });
    });
  }
}

// Turn scores of rows into weights of bfloat16, widened again for few rows; and scale what the rows have of values.
inline void weigh_rows(const AttentionShape& shape, const Tile& tile, const PairStep& step, int first, int end, bool is_widened,
                       AttentionScratch& scratch) {
  const int head_dim = shape.head_dim, size = part_size(head_dim);
  for (int row = first; row < end; ++row) {
    const int position = tile.first_position + row / shape.group();
    const int low = shape.window ? std::max(0, position + 1 - shape.window - step.start) : 0;
    float *weights = scratch.scores + row * kStepKeys, *part = scratch.part + row * size;
    const Vector keep = splat(soften(weights, low, num_keys_seen(shape, tile, step, row), part, head_dim));
    if (is_widened)
      for (int i = 0; i < kStepKeys; i += kLanes) store(weights + i, rounded(load(weights + i)));
    else
      narrow_weights(weights);
    for (int d = 0; d < head_dim; d += kLanes) store(part + d, load(part + d) * keep);
  }
}

inline void attend_step_by_few(const AttentionShape& shape, const Tile& tile, const PairStep& step,
                               AttentionScratch& scratch) {
  const int head_dim = shape.head_dim, size = part_size(head_dim);
  with_rows(tile.num_queries * shape.group(), [&](auto rows) {
    score_few<rows>(scratch.queries, head_dim, step, scratch.scores);
    weigh_rows(shape, tile, step, 0, rows, true, scratch);
    constexpr int kVectors = few_vectors(rows);
    int dim = 0;
    for (; dim + kVectors * kLanes <= head_dim; dim += kVectors * kLanes)
      add_values_few<rows, kVectors>(scratch.scores, step, dim, scratch.part, size);
    for (; dim < head_dim; dim += kLanes) add_values_few<rows, 1>(scratch.scores, step, dim, scratch.part, size);
  });
}

inline void attend_step_by_amx(const AttentionShape& shape, const Tile& tile, const PairStep& step,
                               AttentionScratch& scratch) {
  const int group = shape.group(), rows = tile.num_queries * group, head_dim = shape.head_dim, size = part_size(head_dim);
  clear_absent_values(step, head_dim, (uint32_t*)scratch.values);
  int first_row = 0;  // of the blocks that see any of the keys
  while (tile.first_position + (std::min(first_row + kAmxRows, rows) - 1) / group < step.start) first_row += kAmxRows;
  for (int block = first_row; block < rows; block += kAmxRows) {
    const int count = std::min(kAmxRows, rows - block);
    score_by_amx((const uint16_t*)scratch.queries + (int64_t)block * head_dim, count, head_dim, step.keys[0],
                 scratch.scores + block * kStepKeys);
    weigh_rows(shape, tile, step, block, block + count, false, scratch);
  }
  for (int block = first_row; block < rows; block += kAmxRows)
    add_values_by_amx(scratch.scores + block * kStepKeys, std::min(kAmxRows, rows - block), step.num_keys, head_dim,
                      step.values[0], scratch.part + block * size);
}

inline void attend_part_by_amx(const KvPool& pool, const AttentionShape& shape, const Tile& tile, int start, int end,
                               AttentionScratch& scratch) {
  const DenormalsAreZero denormals_are_zero;
  const int rows = tile.num_queries * shape.group();
  for (int row = 0; row < rows; ++row) clear_part(scratch.part + row * part_size(shape.head_dim), shape.head_dim);
  for (int first = start; first < end; first += kStepKeys) {
    if (shape.window && first + kStepKeys + shape.window <= tile.first_position + 1) continue;  // No query sees it.
    const bool is_packed = !is_few(rows);
    const PairStep step = open_pair_step(pool, shape, tile, first, end, is_packed, scratch);
    (is_packed ? attend_step_by_amx : attend_step_by_few)(shape, tile, step, scratch);
  }
}

}  // namespace legato

#endif
