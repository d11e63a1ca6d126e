// Attention over a bfloat16 pool where the processor multiplies pairs of bfloat16 (see add_pairs): queries and weights are
// rounded to it, scores and sums are float32. The steps, their order and the softmax are attention.h's own.
//
// A word of keys holds two dimensions of one key, a word of values one dimension of two keys. The pool has neither, so a
// few rows (a decode's) put words together as they read, and many have it done once, in the scratch: the same words either
// way, so that who computes a row does not change a bit.
#pragma once

#include "amx.h"
#include "attention.h"

#if defined(LEGATO_AVX512BF16)

namespace legato {

static_assert(kTileKeys == kLanes, "a vector of words of keys is a tile's");

// The words of 16 bfloat16 and the 16 that lie behind them: the first of both, the second of both...
inline Words interleave(__m512i both) {
  alignas(64) static const uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (Words)_mm512_permutexvar_epi16(_mm512_load_si512((const void*)kOrder), both);
}
inline Words interleave(const uint16_t* first, const uint16_t* second) {
  const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first));
  // Absent: a key that is not there, whose weight is 0, and whose place may hold anything.
  return interleave(second ? _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)second), 1)
                           : _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)first)));
}

inline void store_words(uint32_t* to, Words x) { std::memcpy(to, &x, sizeof x); }

// One step's keys and values, as Step has them.
struct PairStep {
  int start, num_keys;
  const char* keys[kTiles];    // packed: [head_dim / 2][kTileKeys] words; in the pool: [head_dim][kTileKeys] bfloat16
  const char* values[kTiles];  // packed: [kTileKeys / 2][head_dim] words; in the pool: [kTileKeys], value_token apart
  int64_t value_token;
  NextStep next;
};

// Dimensions d and d + 1 (d even) of a tile's keys: the same bytes, packed or not.
template <bool IsPacked>
Words key_words(const char* keys, int d) {
  const char* pair = keys + d * kTileKeys * 2;
  if constexpr (IsPacked)
    return load_words(pair);
  else
    return interleave(_mm512_loadu_si512((const void*)pair));
}

// Dimensions [first, first + kLanes) of a tile's values of keys key and key + 1 (key even).
template <bool IsPacked>
Words value_words(const PairStep& step, int index, int key, int first, int head_dim) {
  if constexpr (IsPacked) return load_words(step.values[index] + ((int64_t)key / 2 * head_dim + first) * 4);
  const uint16_t* own = (const uint16_t*)step.values[index] + key * step.value_token + first;
  return interleave(own, index * kTileKeys + key + 1 < step.num_keys ? own + step.value_token : nullptr);
}

inline PairStep open_pair_step(const KvPool& pool, const AttentionShape& shape, const Tile& tile, int start, int end,
                               bool is_packed, AttentionScratch& scratch) {
  const uint16_t* pool_keys = (const uint16_t*)pool.keys + tile.kv_head * pool.key_head;
  const uint16_t* pool_values = (const uint16_t*)pool.values + tile.kv_head * pool.value_head;
  const int head_dim = shape.head_dim, num_keys = std::min(kStepKeys, end - start);
  PairStep step{start, num_keys, {}, {}, pool.value_token, find_next_step<uint16_t>(pool, tile, start + kStepKeys, end)};
  for (int index = 0; index * kTileKeys < num_keys; ++index) {
    const int first = start + index * kTileKeys, count = std::min(kTileKeys, num_keys - index * kTileKeys);
    const int64_t block = tile.block_table[first / pool.block_size], offset = first % pool.block_size;
    const uint16_t* from_keys = pool_keys + block * pool.key_block + offset * pool.key_token;
    const uint16_t* from_values = pool_values + block * pool.value_block + offset * pool.value_token;
    if (!is_packed) {
      step.keys[index] = (const char*)from_keys;
      step.values[index] = (const char*)from_values;
      continue;
    }
    uint32_t* keys = (uint32_t*)scratch.keys + index * kTileKeys / 2 * head_dim;
    uint32_t* values = (uint32_t*)scratch.values + index * kTileKeys / 2 * head_dim;
    step.keys[index] = (const char*)keys;
    step.values[index] = (const char*)values;
    // Where a key of the tile is, if it is there.
    const auto key_at = [&](int key) {
      const int64_t own = tile.block_table[(first + key) / pool.block_size];
      return pool_keys + own * pool.key_block + (first + key) % pool.block_size * pool.key_token;
    };
    const auto value_at = [&](int key) -> const uint16_t* {
      if (key >= count) return nullptr;
      const int64_t own = tile.block_table[(first + key) / pool.block_size];
      return pool_values + own * pool.value_block + (first + key) % pool.block_size * pool.value_token;
    };
    if (lies_in_tiles(pool))
      for (int d = 0; d < head_dim; d += 2) {
        if constexpr (kHasAmx) step.next.prefetch(index, d);  // Elsewhere the scores do.
        store_words(keys + d / 2 * kTileKeys, key_words<false>((const char*)from_keys, d));
      }
    else
      for (int key = 0; key < kTileKeys; ++key) {
        const uint16_t* from = key < count ? key_at(key) : nullptr;  // Masked later, but multiplied before.
        for (int d = 0; d < head_dim; ++d)
          ((uint16_t*)keys)[(d / 2 * kTileKeys + key) * 2 + d % 2] = from ? from[d * pool.key_dim] : 0;
      }
    for (int key = 0; key < count; key += 2) {
      const uint16_t *one = value_at(key), *other = value_at(key + 1);
      for (int d = 0; d < head_dim; d += kLanes)
        store_words(values + key / 2 * head_dim + d, interleave(one + d, other ? other + d : nullptr));
    }
  }
  return step;
}

template <int Rows, int Vectors, class RowOf, class VectorOf>
__attribute__((always_inline)) inline void add_outer_pairs(const RowOf& row_of, const VectorOf& vector_of,
                                                           Vector (&sums)[Rows][Vectors]) {
  Words vectors[Vectors];
  unroll<Vectors>([&](auto v) { vectors[v] = vector_of(v); });
  unroll<Rows>([&](auto row) {
    const Words x = row_of(row);
    unroll<Vectors>([&](auto v) { sums[row][v] = add_pairs(sums[row][v], vectors[v], x); });
  });
}

// scores[row][key] of one block of rows, whose queries lie as lay_out_queries says, in bfloat16.
template <int Rows, bool IsPacked>
void score_pairs(const uint16_t* queries, int head_dim, const PairStep& step, float* scores) {
  constexpr int kVectors = attention_vectors(Rows);
  for (int first = 0; first < step.num_keys; first += kVectors * kLanes) {
    const char* keys[kVectors];
    find_keys(step.keys, step.num_keys, first, keys);
    Vector sums[Rows][kVectors];
    unroll<Rows>([&](auto row) { unroll<kVectors>([&](auto v) { sums[row][v] = splat(0.0f); }); });
    const uint16_t* query = queries;
    for (int d = 0; d < head_dim; query += (kAttentionRows - 1) * kQueryDims)
      for (int in_slab = 0; in_slab < kQueryDims; in_slab += 2, d += 2, query += 2) {
        for (int v = 0; v < kVectors; ++v) step.next.prefetch(first / kTileKeys + v, d);
        add_outer_pairs<Rows, kVectors>([&](auto row) { return splat_word(query + row * kQueryDims); },
                                        [&](auto v) { return key_words<IsPacked>(keys[v], d); }, sums);
      }
    unroll<Rows>([&](auto row) {
      unroll<kVectors>([&](auto v) { store(scores + row * kStepKeys + first + v * kLanes, sums[row][v]); });
    });
  }
}

// As add_values; weights are bfloat16, kStepKeys floats apart.
template <int Rows, int Vectors, bool IsPacked>
void add_value_pairs(const PairStep& step, int num_keys, const float* weights, const float* keep, int first, float* part,
                     int head_dim) {
  const int size = part_size(head_dim);
  Vector sums[Rows][Vectors];
  unroll<Rows>([&](auto row) {
    const Vector scale = splat(keep[row]);
    unroll<Vectors>([&](auto v) { sums[row][v] = load(part + row * size + first + v * kLanes) * scale; });
  });
  for (int key = 0; key < num_keys; key += 2)
    add_outer_pairs<Rows, Vectors>(
        [&](auto row) { return splat_word((const uint16_t*)(weights + row * kStepKeys) + key); },
        [&](auto v) {
          return value_words<IsPacked>(step, key / kTileKeys, key % kTileKeys, first + v * kLanes, head_dim);
        },
        sums);
  unroll<Rows>([&](auto row) {
    unroll<Vectors>([&](auto v) { store(part + row * size + first + v * kLanes, sums[row][v]); });
  });
}

// A row's weights, in place.
inline void narrow_weights(float* weights) {
  Vector wide[kTiles];
  for (int i = 0; i < kTiles; ++i) wide[i] = load(weights + i * kLanes);
  for (int i = 0; i < kTiles; ++i) store_narrowed((uint16_t*)weights + i * kLanes, wide[i]);
}

template <bool IsPacked>
void attend_pairs(const KvPool& pool, const AttentionShape& shape, const Tile& tile, int start, int end,
                  AttentionScratch& scratch) {
  const int group = shape.group(), rows = tile.num_queries * group, head_dim = shape.head_dim, size = part_size(head_dim);
  for (int row = 0; row < rows; ++row) clear_part(scratch.part + row * size, head_dim);
  for (int first = start; first < end; first += kStepKeys) {
    if (shape.window && first + kStepKeys + shape.window <= tile.first_position + 1) continue;  // No query sees it.
    const PairStep step = open_pair_step(pool, shape, tile, first, end, IsPacked, scratch);
    const auto num_seen = [&](int row) { return num_keys_seen(shape, tile, step, row); };
    int first_row = 0;  // of the blocks that see any of the keys
    while (tile.first_position + (std::min(first_row + kAttentionRows, rows) - 1) / group < first) first_row += kAttentionRows;
    for (int block = first_row; block < rows; block += kAttentionRows)
      with_rows(std::min(kAttentionRows, rows - block), [&](auto count) {
        float* scores = scratch.scores + block * kStepKeys;
        score_pairs<count, IsPacked>((const uint16_t*)scratch.queries + (int64_t)block * head_dim, head_dim, step, scores);
        for (int row = 0; row < count; ++row) {
          const int position = tile.first_position + (block + row) / group;
          const int low = shape.window ? std::max(0, position + 1 - shape.window - step.start) : 0;
          float* own = scores + row * kStepKeys;
          scratch.keep[block + row] = soften(own, low, num_seen(block + row), scratch.part + (block + row) * size, head_dim);
          narrow_weights(own);
        }
      });
    for (int block = first_row; block < rows; block += kAttentionRows)
      with_rows(std::min(kAttentionRows, rows - block), [&](auto count) {
        constexpr int kVectors = attention_vectors(count), kDims = kVectors * kLanes;
        const float *weights = scratch.scores + block * kStepKeys, *keep = scratch.keep + block;
        float* part = scratch.part + block * size;
        const int seen = num_seen(block + count - 1);
        int dim = 0;
        for (; dim + kDims <= head_dim; dim += kDims)
          add_value_pairs<count, kVectors, IsPacked>(step, seen, weights, keep, dim, part, head_dim);
        for (; dim < head_dim; dim += kLanes)
          add_value_pairs<count, 1, IsPacked>(step, seen, weights, keep, dim, part, head_dim);
      });
  }
}

inline void attend_part_by_pairs(const KvPool& pool, const AttentionShape& shape, const Tile& tile, int start, int end,
                                 AttentionScratch& scratch) {
  // Several blocks of rows read each step: packed once for all of them.
  if (tile.num_queries * shape.group() > kAttentionRows || !lies_in_tiles(pool))
    attend_pairs<true>(pool, shape, tile, start, end, scratch);
  else
    attend_pairs<false>(pool, shape, tile, start, end, scratch);
}

}  // namespace legato

#endif
