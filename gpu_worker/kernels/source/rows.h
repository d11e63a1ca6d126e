// What is done to each token by itself: embedding, rotation and the KV cache.
#pragma once

#include <algorithm>

#include "attention.h"
#include "linear.h"
#include "simd.h"

namespace legato {

// One token's embedding out of the packed matrix, so that a tied head and embedding are in memory once.
inline void embed(const void* packed, const float* scales, int32_t type, int inputs, int64_t token, float multiplier,
                  float* to) {
  for (int k = 0; k < inputs; ++k) {
    const int64_t place = place_of((int)token, k, inputs, type);
    const float weight = type == kFloat32    ? ((const float*)packed)[place]
                         : type == kBfloat16 ? widen(((const uint16_t*)packed)[place])
                                             : ((const int8_t*)packed)[place] * scales[token];
    to[k] = weight * multiplier;
  }
}

// Turn one head to its position, in the half-split pairing of Hugging Face (dimension i with i + head_dim / 2).
inline void rotate(float* head, int head_dim, const float* cosine, const float* sine) {
  const int half = head_dim / 2;
  int d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    const Vector first = load(head + d), second = load(head + half + d), c = load(cosine + d), s = load(sine + d);
    store(head + d, fma(first, c, -(second * s)));
    store(head + half + d, fma(second, c, first * s));
  }
  for (; d < half; ++d) {
    const float first = head[d], second = head[half + d];
    head[d] = first * cosine[d] - second * sine[d];
    head[half + d] = second * cosine[d] + first * sine[d];
  }
}

inline void scale_head(float* head, int head_dim, const float* norm, float eps) {
  const float scale = inverse_norm(head, head_dim, eps);
  for (int d = 0; d < head_dim; ++d) head[d] = head[d] * scale * norm[d];
}

template <class Element>
Element narrowed(float x) {
  if constexpr (sizeof(Element) == 2)
    return narrow(x);
  else
    return x;
}

// Put one head's key and value into the pool.
template <class Element>
void store_kv(const KvPool& pool, int64_t slot, int kv_head, int head_dim, const float* key, const float* value) {
  const int64_t block = slot / pool.block_size, token = slot % pool.block_size;
  Element* keys = (Element*)pool.keys + block * pool.key_block + kv_head * pool.key_head + token * pool.key_token;
  Element* values = (Element*)pool.values + block * pool.value_block + kv_head * pool.value_head + token * pool.value_token;
  for (int d = 0; d < head_dim; ++d) keys[d * pool.key_dim] = narrowed<Element>(key[d]);
  for (int d = 0; d < head_dim; ++d) values[d] = narrowed<Element>(value[d]);
}

}  // namespace legato
