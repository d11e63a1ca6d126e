// A part of a tile's attention, by whatever multiplies its pool's elements.
#pragma once

#include "amx.h"
#include "attention.h"
#include "attention_amx.h"
#include "attention_pairs.h"

namespace legato {

// Whether queries for this pool are laid out in bfloat16.
inline bool is_by_pairs(const KvPool& pool) { return kHasPairs && pool.is_bfloat16; }

// Whether attention over it goes by tiles.
inline bool is_by_amx(const KvPool& pool, const AttentionShape& shape) {
  return kHasAmx && pool.is_bfloat16 && shape.head_dim % kAmxDepth == 0 && lies_in_tiles(pool);
}

inline void lay_out_queries_for(const KvPool& pool, const AttentionShape& shape, const Tile& tile, const float* queries,
                                int64_t stride, float* to) {
#if defined(LEGATO_AMX)
  if (is_by_amx(pool, shape)) return lay_out_query_rows(shape, tile, queries, stride, to);
#endif
  if (is_by_pairs(pool))
    lay_out_queries(shape, tile, queries, stride, (uint16_t*)to);
  else
    lay_out_queries(shape, tile, queries, stride, to);
}

// Compute the part of keys [start, end) for every row of a tile into scratch.part. Queries are laid out already.
inline void attend_part(const KvPool& pool, const AttentionShape& shape, const Tile& tile, int start, int end,
                        AttentionScratch& scratch) {
#if defined(LEGATO_AMX)
  if (is_by_amx(pool, shape)) return attend_part_by_amx(pool, shape, tile, start, end, scratch);
#endif
#if defined(LEGATO_AVX512BF16)
  if (is_by_pairs(pool)) return attend_part_by_pairs(pool, shape, tile, start, end, scratch);
#endif
  if (!pool.is_bfloat16)
    attend_part_of<float, float>(pool, shape, tile, start, end, scratch);
  else if (tile.num_queries * shape.group() <= kAttentionRows)
    attend_part_of<uint16_t, uint16_t>(pool, shape, tile, start, end, scratch);
  else  // Several blocks of rows read each step: widened once for all of them.
    attend_part_of<uint16_t, float>(pool, shape, tile, start, end, scratch);
}

}  // namespace legato
