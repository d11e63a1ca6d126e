// Paged attention over all rows of a hybrid batch: decodes and chunks, grouped query heads, online softmax.
//
// The keys of a request are cut into parts of kPartKeys positions, and those into steps of kStepKeys, both counted from
// position 0. A part yields a maximum, a sum and a weighted mean of values (Dao et al., 2022); parts are merged in order.
// Who computes a part, and how many queries it is computed for at a time, does not change a bit: a decode with a
// long context has its parts computed by several threads, a chunk goes through them one after another.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "simd.h"

namespace legato {

constexpr int kTileKeys = 16;   // Keys lie transposed, [dimension][16 keys], so that 16 scores are computed at once.
constexpr int kStepKeys = 64;   // One softmax step; its keys, or its values (16 KiB each), stay in the first-level cache.
constexpr int kPartKeys = 256;  // A decode of 1,000 tokens is 4 parts for each kv head: enough for a few threads.
constexpr int kTiles = kStepKeys / kTileKeys;
constexpr int kQueryDims = 16;  // Dimensions of a query that lie side by side; heads have a multiple of it.
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// One layer's KV pool. Strides are in elements; a value's dimensions lie side by side.
struct KvPool {
  void* keys;
  void* values;
  int32_t is_bfloat16, block_size;
  int64_t key_block, key_head, key_dim, key_token;
  int64_t value_block, value_head, value_token;
};

// Whether every 16 keys lie as [dimension][16 keys], and the values of as many side by side.
inline bool lies_in_tiles(const KvPool& pool) {
  return pool.block_size % kTileKeys == 0 && pool.key_token == 1 && pool.key_dim == kTileKeys;
}

struct AttentionShape {
  int32_t num_heads, num_kv_heads, head_dim, window;  // window 0: every earlier key is seen
  float scale;                                         // of scores
  int group() const { return num_heads / num_kv_heads; }
};

// Queries of one request and kv head that go through the same keys. A row is a (query, head of the group).
struct Tile {
  int first_token, num_queries;  // in the flat batch
  int first_position;            // of the first query
  const int64_t* block_table;
  int kv_head;
};

// A row of a part: weighted values, [head_dim], then sums of weights, [kLanes], then the greatest score, alone in a vector.
// Sums are added up over lanes only when the row is finished.
inline int part_size(int head_dim) { return head_dim + 2 * kLanes; }
inline float& max_of(float* part, int head_dim) { return part[head_dim + kLanes]; }

inline void clear_part(float* part, int head_dim) {
  std::fill(part, part + part_size(head_dim), 0.0f);
  max_of(part, head_dim) = kNegativeInfinity;
}

// What a sum relative to one maximum is multiplied by to be relative to a greater one.
inline float rescaling(float max, float new_max) {
  return max == kNegativeInfinity ? 0.0f : exp2_of_nonpositive(splat(max - new_max))[0];
}

// Merge the result of the next part into the total of those before it.
inline void merge_part(float* total, const float* part, int head_dim) {
  const float part_max = part[head_dim + kLanes];
  const float max = std::max(max_of(total, head_dim), part_max);
  const Vector keep = splat(rescaling(max_of(total, head_dim), max)), add = splat(rescaling(part_max, max));
  for (int d = 0; d < head_dim + kLanes; d += kLanes) store(total + d, fma(load(part + d), add, load(total + d) * keep));
  max_of(total, head_dim) = max;
}

// Write a finished row: its weighted values over its sum of weights.
inline void write_attended(const float* total, int head_dim, float* output) {
  const Vector inverse = splat(1.0f / sum_of_lanes(load(total + head_dim)));
  for (int d = 0; d < head_dim; d += kLanes) store(output + d, load(total + d) * inverse);
}

// What one thread needs while it works on a tile.
struct AttentionScratch {
  float* queries;  // as lay_out_queries says
  float* keys;     // [kTiles][head_dim][kTileKeys]
  float* values;   // [kStepKeys][head_dim]
  float* scores;   // [rows][kStepKeys], then the weights that they become
  float* keep;     // [rows], what a step scales a row's earlier values by
  float* part;     // [rows][part_size]
  float* total;    // the same, of all parts so far

  static int64_t size(int rows, int head_dim) {
    const int64_t padded = rows + kAttentionRows;
    return (padded + 2 * kStepKeys) * head_dim + padded * (kStepKeys + 1) + 2 * padded * part_size(head_dim);
  }
  AttentionScratch(float* memory, int rows, int head_dim) {
    const int64_t padded = rows + kAttentionRows;
    queries = memory;
    keys = queries + padded * head_dim;
    values = keys + kStepKeys * head_dim;
    scores = values + kStepKeys * head_dim;
    part = scores + padded * kStepKeys;
    total = part + padded * part_size(head_dim);
    keep = total + padded * part_size(head_dim);
  }
};

inline float widen_element(float x) { return x; }
inline float widen_element(uint16_t x) { return widen(x); }
inline Vector load_widened(const float* from) { return load(from); }
inline Vector load_widened(const uint16_t* from) { return load_bfloat16(from); }
inline void put(float* to, float x) { *to = x; }
inline void put(float* to, uint16_t x) { *to = widen(x); }
inline void put(uint16_t* to, uint16_t x) { *to = x; }

inline void widen_all(const uint16_t* from, int count, float* to) {
  for (int i = 0; i < count; i += kLanes) store(to + i, load_bfloat16(from + i));
}
template <class Element>
void widen_all(const Element*, int, Element*) {}  // Never called: what needs no widening is read where it lies.

// Where in the pool the next step's keys and values lie, to be asked for while this one is computed: a request's blocks lie
// anywhere, and the hardware guesses no further than the end of one. Little by little, since a request to memory for
// which there is no place at the moment is dropped.
struct NextStep {
  const char* keys[kTiles];
  const char* values[kTiles];
  int32_t bytes_per_dim;  // of a tile

  void prefetch(int tile, int dim) const {
    __builtin_prefetch(keys[tile] + dim * bytes_per_dim);
    __builtin_prefetch(values[tile] + dim * bytes_per_dim);
  }
};

template <class Source>
NextStep find_next_step(const KvPool& pool, const Tile& tile, int start, int end) {
  NextStep next{{}, {}, kTileKeys * (int)sizeof(Source)};
  for (int index = 0; index < kTiles; ++index) {
    // Past the end the last tile stands in, and is in the cache.
    const int first = std::min(start + index * kTileKeys, (end - 1) / kTileKeys * kTileKeys);
    const int64_t block = tile.block_table[first / pool.block_size], offset = first % pool.block_size;
    next.keys[index] = (const char*)((const Source*)pool.keys + tile.kv_head * pool.key_head + block * pool.key_block +
                                     offset * pool.key_token);
    next.values[index] = (const char*)((const Source*)pool.values + tile.kv_head * pool.value_head +
                                       block * pool.value_block + offset * pool.value_token);
  }
  return next;
}

// The keys and values of one step: where they lie in the pool, or copied if they do not lie as the kernels read them.
// Keys beyond num_keys are never read, except inside a tile of keys, where their scores are masked.
template <class Element>
struct Step {
  int start, num_keys;
  const Element* keys[kTiles];    // [head_dim][kTileKeys] each
  const Element* values[kTiles];  // [kTileKeys], value_token apart
  int64_t value_token;
  NextStep next;
};

// Element is what the step is to hold: the pool's own type, or float, which is worth a copy if many rows will read it.
template <class Source, class Element>
Step<Element> open_step(const KvPool& pool, const AttentionShape& shape, const Tile& tile, int start, int end,
                        AttentionScratch& scratch) {
  constexpr bool is_same = std::is_same_v<Source, Element>;
  const Source* pool_keys = (const Source*)pool.keys + tile.kv_head * pool.key_head;
  const Source* pool_values = (const Source*)pool.values + tile.kv_head * pool.value_head;
  const int head_dim = shape.head_dim, num_keys = std::min(kStepKeys, end - start);
  const bool has_whole_tiles = pool.block_size % kTileKeys == 0;
  const bool has_keys_in_place = is_same && has_whole_tiles && pool.key_token == 1 && pool.key_dim == kTileKeys;
  const bool has_values_in_place = is_same && has_whole_tiles;
  Step<Element> step{start, num_keys, {}, {}, has_values_in_place ? pool.value_token : head_dim,
                     find_next_step<Source>(pool, tile, start + kStepKeys, end)};
  for (int index = 0; index * kTileKeys < num_keys; ++index) {
    const int first = start + index * kTileKeys, count = std::min(kTileKeys, num_keys - index * kTileKeys);
    Element* keys = (Element*)scratch.keys + index * kTileKeys * head_dim;
    Element* values = (Element*)scratch.values + index * kTileKeys * head_dim;
    const int64_t block = tile.block_table[first / pool.block_size], offset = first % pool.block_size;
    const Source* from_keys = pool_keys + block * pool.key_block + offset * pool.key_token;
    const Source* from_values = pool_values + block * pool.value_block + offset * pool.value_token;
    step.keys[index] = keys;
    step.values[index] = values;
    if (has_keys_in_place)
      step.keys[index] = (const Element*)from_keys;
    else if (has_whole_tiles && pool.key_token == 1 && pool.key_dim == kTileKeys)
      widen_all(from_keys, head_dim * kTileKeys, keys);
    else
      for (int key = 0; key < kTileKeys; ++key) {
        if (!has_whole_tiles && key < count) {
          const int64_t own = tile.block_table[(first + key) / pool.block_size];
          from_keys = pool_keys + own * pool.key_block + (first + key) % pool.block_size * pool.key_token - key * pool.key_token;
        }
        if (key < count)
          for (int d = 0; d < head_dim; ++d) put(keys + d * kTileKeys + key, from_keys[key * pool.key_token + d * pool.key_dim]);
        else  // Masked later, but multiplied before.
          for (int d = 0; d < head_dim; ++d) put(keys + d * kTileKeys + key, Element{});
      }
    if (has_values_in_place)
      step.values[index] = (const Element*)from_values;
    else if (has_whole_tiles && pool.value_token == head_dim)
      widen_all(from_values, count * head_dim, values);
    else
      for (int key = 0; key < count; ++key) {
        if (!has_whole_tiles) {
          const int64_t own = tile.block_table[(first + key) / pool.block_size];
          from_values = pool_values + own * pool.value_block + (first + key) % pool.block_size * pool.value_token - key * pool.value_token;
        }
        const Source* from = from_values + key * pool.value_token;
        for (int d = 0; d < head_dim; ++d) put(values + key * head_dim + d, from[d]);
      }
  }
  return step;
}

// How many vectors of keys, or of a value's dimensions, meet a block of rows at a time. Few rows (a decode's) take twice as
// many: with fewer sums on the way than a fused multiplication has stages, each would wait for the one before.
constexpr int attention_vectors(int rows) {
  return rows * 2 <= kAttentionRows ? std::min(2 * kAttentionVectors, kStepKeys / kLanes) : kAttentionVectors;
}

// sums[row][v] += row_of(row) * vector_of(v). The fewer of the two are held in registers, beside the sums.
template <int Rows, int Vectors, class RowOf, class VectorOf>
__attribute__((always_inline)) inline void add_outer_product(const RowOf& row_of, const VectorOf& vector_of,
                                                             Vector (&sums)[Rows][Vectors]) {
  if constexpr (Rows < Vectors) {
    Vector rows[Rows];
    unroll<Rows>([&](auto row) { rows[row] = row_of(row); });
    unroll<Vectors>([&](auto v) {
      const Vector vector = vector_of(v);
      unroll<Rows>([&](auto row) { sums[row][v] = fma(rows[row], vector, sums[row][v]); });
    });
  } else {
    Vector vectors[Vectors];
    unroll<Vectors>([&](auto v) { vectors[v] = vector_of(v); });
    unroll<Rows>([&](auto row) {
      const Vector x = row_of(row);
      unroll<Vectors>([&](auto v) { sums[row][v] = fma(x, vectors[v], sums[row][v]); });
    });
  }
}

// Where vectors of a step's keys begin, from key first on. Past the last tile the first one stands in: its scores are masked.
template <int Vectors, class Element>
void find_keys(const Element* const (&tiles)[kTiles], int num_keys, int first, const Element* (&keys)[Vectors]) {
  for (int v = 0; v < Vectors; ++v) {
    const int key = first + v * kLanes;
    keys[v] = key < num_keys ? tiles[key / kTileKeys] + key % kTileKeys : tiles[0];
  }
}

// scores[row][key] of one block of rows.
template <int Rows, class Element>
void score(const float* queries, int head_dim, const Step<Element>& step, float* scores) {
  constexpr int kVectors = attention_vectors(Rows), kKeys = kVectors * kLanes, kTilesAtOnce = std::max(1, kKeys / kTileKeys);
  for (int first = 0; first < step.num_keys; first += kKeys) {
    const Element* keys[kVectors];
    find_keys(step.keys, step.num_keys, first, keys);
    Vector sums[Rows][kVectors];
    unroll<Rows>([&](auto row) { unroll<kVectors>([&](auto v) { sums[row][v] = splat(0.0f); }); });
    const float* query = queries;
    for (int d = 0; d < head_dim; query += (kAttentionRows - 1) * kQueryDims)
      for (int in_slab = 0; in_slab < kQueryDims; ++in_slab, ++d, ++query) {
        if (d % 2 == 0)
          for (int index = 0; index < kTilesAtOnce; ++index) step.next.prefetch(first / kTileKeys + index, d);
        add_outer_product<Rows, kVectors>(
            [&](auto row) { return splat(query[row * kQueryDims]); },
            [&](auto v) { return load_widened(keys[v] + d * kTileKeys); }, sums);
      }
    unroll<Rows>([&](auto row) {
      unroll<kVectors>([&](auto v) { store(scores + row * kStepKeys + first + v * kLanes, sums[row][v]); });
    });
  }
}

// Dimensions [first, first + Vectors * kLanes) of part[row] = part[row] * keep[row] + sum of weights * values.
template <int Rows, int Vectors, class Element>
void add_values(const Step<Element>& step, int num_keys, const float* weights, const float* keep, int first, float* part,
                int size) {
  Vector sums[Rows][Vectors];
  unroll<Rows>([&](auto row) {
    const Vector scale = splat(keep[row]);
    unroll<Vectors>([&](auto v) { sums[row][v] = load(part + row * size + first + v * kLanes) * scale; });
  });
  for (int index = 0; index * kTileKeys < num_keys; ++index) {
    const Element* values = step.values[index] + first;
    const int count = std::min(kTileKeys, num_keys - index * kTileKeys);
    for (int key = 0; key < count; ++key) {
      add_outer_product<Rows, Vectors>(
          [&](auto row) { return splat(weights[row * kStepKeys + index * kTileKeys + key]); },
          [&](auto v) { return load_widened(values + v * kLanes); }, sums);
      values += step.value_token;
    }
  }
  unroll<Rows>([&](auto row) {
    unroll<Vectors>([&](auto v) { store(part + row * size + first + v * kLanes, sums[row][v]); });
  });
}

// Turn a row's scores into weights relative to the greatest score so far; return what earlier values are to be scaled by.
// Only keys [low, high) of the step are seen.
inline float soften(float* scores, int low, int high, float* part, int head_dim) {
  constexpr int kParts = kStepKeys / kLanes;
  Vector masked[kParts];
  for (int i = 0; i < kParts; ++i) masked[i] = load(scores + i * kLanes);
  if (low > 0 || high < kStepKeys) {
    Vector key;
    for (int lane = 0; lane < kLanes; ++lane) key[lane] = (float)lane;
    for (int i = 0; i < kParts; ++i) {
      masked[i] = (key >= splat((float)low)) & (key < splat((float)high)) ? masked[i] : splat(kNegativeInfinity);
      key = key + splat((float)kLanes);
    }
  }
  Vector greatest = masked[0];
  for (int i = 1; i < kParts; ++i) greatest = maximum(greatest, masked[i]);
  float& max = max_of(part, head_dim);
  const float new_max = std::max(max, greatest_lane(greatest));
  const float keep = rescaling(max, new_max);
  const Vector reference = splat(new_max == kNegativeInfinity ? 0.0f : new_max);  // Infinity less itself is no number.
  Vector sums = load(part + head_dim) * splat(keep);
  for (int i = 0; i < kParts; ++i) {
    const Vector weight = exp2_of_nonpositive(masked[i] - reference);
    sums = sums + weight;
    store(scores + i * kLanes, weight);
  }
  store(part + head_dim, sums);
  max = new_max;
  return keep;
}

// How many of a step's keys a row sees, counted from the step's first.
template <class AnyStep>
int num_keys_seen(const AttentionShape& shape, const Tile& tile, const AnyStep& step, int row) {
  return std::min(step.num_keys, tile.first_position + row / shape.group() + 1 - step.start);
}

// Weights of one block of rows for a step's keys, and what the rows' earlier values are to be scaled by.
template <int Rows, class Element>
void weigh_block(const AttentionShape& shape, const Tile& tile, const Step<Element>& step, int first_row,
                 AttentionScratch& scratch) {
  const int head_dim = shape.head_dim, size = part_size(head_dim);
  float* scores = scratch.scores + first_row * kStepKeys;
  score<Rows>(scratch.queries + (int64_t)first_row * head_dim, head_dim, step, scores);
  for (int row = 0; row < Rows; ++row) {
    const int position = tile.first_position + (first_row + row) / shape.group();
    const int low = shape.window ? std::max(0, position + 1 - shape.window - step.start) : 0;
    const int high = num_keys_seen(shape, tile, step, first_row + row);
    scratch.keep[first_row + row] =
        soften(scores + row * kStepKeys, low, high, scratch.part + (first_row + row) * size, head_dim);
  }
}

template <int Rows, class Element>
void add_block(const AttentionShape& shape, const Tile& tile, const Step<Element>& step, int first_row,
               AttentionScratch& scratch) {
  constexpr int kVectors = attention_vectors(Rows), kDims = kVectors * kLanes;
  const int head_dim = shape.head_dim, size = part_size(head_dim);
  const int num_seen = num_keys_seen(shape, tile, step, first_row + Rows - 1);
  const float *weights = scratch.scores + first_row * kStepKeys, *keep = scratch.keep + first_row;
  float* part = scratch.part + first_row * size;
  int first = 0;
  for (; first + kDims <= head_dim; first += kDims)
    add_values<Rows, kVectors>(step, num_seen, weights, keep, first, part, size);
  for (; first < head_dim; first += kLanes) add_values<Rows, 1>(step, num_seen, weights, keep, first, part, size);
}

// Call body with num_rows as a constant.
template <int Rows = kAttentionRows, class Body>
void with_rows(int num_rows, const Body& body) {
  if constexpr (Rows > 0) {
    if (num_rows == Rows)
      body(std::integral_constant<int, Rows>{});
    else
      with_rows<Rows - 1>(num_rows, body);
  }
}

// Lay a tile's queries out in blocks of rows, [row block][head_dim / kQueryDims][kAttentionRows][kQueryDims], so that the
// offsets within a block are constants; scaled so that 2 to the power of a score is its weight. Element is float, or
// bfloat16 where it is multiplied.
template <class Element>
void lay_out_queries(const AttentionShape& shape, const Tile& tile, const float* queries, int64_t stride, Element* to) {
  const int group = shape.group(), rows = tile.num_queries * group;
  const Vector scale = splat(shape.scale * 1.4426950408889634f);
  for (int row = 0; row < rows; ++row) {
    const float* from = queries + (tile.first_token + row / group) * stride +
                        (int64_t)(tile.kv_head * group + row % group) * shape.head_dim;
    Element* out = to + (int64_t)(row / kAttentionRows) * kAttentionRows * shape.head_dim + row % kAttentionRows * kQueryDims;
    for (int d = 0; d < shape.head_dim; d += kQueryDims)
      for (int lane = 0; lane < kQueryDims; lane += kLanes)
        if constexpr (sizeof(Element) == 2)
          store_narrowed(out + d * kAttentionRows + lane, load(from + d + lane) * scale);
        else
          store(out + d * kAttentionRows + lane, load(from + d + lane) * scale);
  }
}

// Compute the part of keys [start, end) for every row of a tile into scratch.part. Queries are laid out already.
template <class Source, class Element>
void attend_part_of(const KvPool& pool, const AttentionShape& shape, const Tile& tile, int start, int end,
                    AttentionScratch& scratch) {
  const int group = shape.group(), rows = tile.num_queries * group;
  for (int row = 0; row < rows; ++row) clear_part(scratch.part + row * part_size(shape.head_dim), shape.head_dim);
  for (int first = start; first < end; first += kStepKeys) {
    if (shape.window && first + kStepKeys + shape.window <= tile.first_position + 1) continue;  // No query sees it.
    const Step<Element> step = open_step<Source, Element>(pool, shape, tile, first, end, scratch);
    int first_row = 0;  // of the blocks that see any of the keys
    while (tile.first_position + (std::min(first_row + kAttentionRows, rows) - 1) / group < first) first_row += kAttentionRows;
    // All rows meet the keys before any meets the values: one of the two stays in the first-level cache, both would not.
    for (int row = first_row; row < rows; row += kAttentionRows)
      with_rows(std::min(kAttentionRows, rows - row), [&](auto count) { weigh_block<count>(shape, tile, step, row, scratch); });
    for (int row = first_row; row < rows; row += kAttentionRows)
      with_rows(std::min(kAttentionRows, rows - row), [&](auto count) { add_block<count>(shape, tile, step, row, scratch); });
  }
}

}  // namespace legato
