// Vectors of floats. One library is built for each instruction set (see ../build.py), so this is the only file that
// knows which one it is: LEGATO_AVX512, LEGATO_AVX2, or neither, which any compiler can turn into what its machine has. Of
// tiles, amx.h knows.
//
// Products are added by fma() alone, and the compiler may not fuse others (-ffp-contract=off): where it may, one
// expression inlined at two places can round in two ways, and a result would depend on the path that led to it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(LEGATO_AMX)
#define LEGATO_AVX512BF16  // and tiles of bfloat16 besides
#endif
#if defined(LEGATO_AVX512BF16)
#define LEGATO_AVX512  // and products of bfloat16 besides
#endif
#if defined(LEGATO_AVX512) || defined(LEGATO_AVX2)
#include <immintrin.h>
#endif

namespace legato {

#if defined(LEGATO_AVX512)
constexpr int kLanes = 16;
constexpr int kLinearRows = 14;     // Rows that one pass over a panel serves: 14 x 2 sums fill 28 of 32 registers.
constexpr int kAttentionRows = 6;   // The same for attention: 6 x 4 sums, 4 vectors of keys or values.
constexpr int kAttentionVectors = 4;
#elif defined(LEGATO_AVX2)
constexpr int kLanes = 8;
constexpr int kLinearRows = 6;  // 6 x 2 sums in 16 registers.
constexpr int kAttentionRows = 6;
constexpr int kAttentionVectors = 2;
#else
constexpr int kLanes = 4;
constexpr int kLinearRows = 4;
constexpr int kAttentionRows = 4;
constexpr int kAttentionVectors = 2;
#endif

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVector __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));

// Call body(0) to body(Count - 1), with the index a constant. Plain loops over an array of sums are unrolled too late for
// GCC to see that the array could live in registers: it then stores every sum in every round.
template <int Count, int Index = 0, class Body>
__attribute__((always_inline)) inline void unroll(const Body& body) {
  if constexpr (Index < Count) {
    body(std::integral_constant<int, Index>{});
    unroll<Count, Index + 1>(body);
  }
}

inline Vector load(const float* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Words load_words(const void* from) {
  Words x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }

inline Vector splat(float x) {
#if defined(LEGATO_AVX512)
  return _mm512_set1_ps(x);
#elif defined(LEGATO_AVX2)
  return _mm256_set1_ps(x);
#else
  return Vector{x, x, x, x};
#endif
}

inline Vector fma(Vector a, Vector b, Vector c) {
#if defined(LEGATO_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(LEGATO_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline Vector maximum(Vector a, Vector b) {
#if defined(LEGATO_AVX512)
  return _mm512_max_ps(a, b);
#elif defined(LEGATO_AVX2)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline Vector minimum(Vector a, Vector b) {
#if defined(LEGATO_AVX512)
  return _mm512_min_ps(a, b);
#elif defined(LEGATO_AVX2)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// The first bfloat16 of each 32-bit word, widened; and the second.
inline Vector load_first_bfloat16(const void* pairs) { return (Vector)(load_words(pairs) << 16); }
inline Vector load_second_bfloat16(const void* pairs) {
#if defined(LEGATO_AVX512)
  // The mask lives in a mask register: a constant for `and` would take one of the 32 that hold sums.
  return (Vector)_mm512_maskz_loadu_epi16(0xaaaaaaaau, pairs);
#else
  return (Vector)(load_words(pairs) & 0xffff0000u);
#endif
}

// As many bfloat16 as there are lanes, widened.
inline Vector load_bfloat16(const uint16_t* from) {
#if defined(LEGATO_AVX512)
  const __m256i halves = _mm256_loadu_si256((const __m256i*)from);
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#elif defined(LEGATO_AVX2)
  const __m128i halves = _mm_loadu_si128((const __m128i*)from);
  return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
  Words words;
  for (int lane = 0; lane < kLanes; ++lane) words[lane] = (uint32_t)from[lane] << 16;
  return (Vector)words;
#endif
}

// Products of bfloat16 by pairs: to each lane's sum that of both halves of a word of weights with both of x. Twice the
// products of an fma, and nothing to widen; x is rounded to bfloat16 for it.
#if defined(LEGATO_AVX512BF16)
constexpr bool kHasPairs = true;
inline Vector add_pairs(Vector sums, Words weights, Words x) {
  return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)x);
}
inline Words splat_word(const void* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return (Words)_mm512_set1_epi32((int)word);
}
inline void store_narrowed(uint16_t* to, Vector x) {
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &halves, sizeof halves);
}
#else
constexpr bool kHasPairs = false;
inline Vector add_pairs(Vector sums, Words, Words) { return sums; }
inline Words splat_word(const void*) { return Words{}; }
inline void store_narrowed(uint16_t*, Vector) {}
#endif

// As many int8 as there are lanes, as floats.
inline Vector load_int8(const int8_t* from) {
#if defined(LEGATO_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(LEGATO_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Vector x;
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = from[lane];
  return x;
#endif
}

inline float widen(uint16_t bits) {
  const uint32_t word = (uint32_t)bits << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

// To the nearest bfloat16, ties to even, as torch rounds.
inline uint16_t narrow(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  if ((word & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(word >> 16) | 0x40;  // NaN stays NaN.
  return (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

// Lanes are added in a fixed tree: halves onto each other.
inline float sum_of_lanes(Vector x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

inline float greatest_lane(Vector x) {
#if defined(LEGATO_AVX512)
  return _mm512_reduce_max_ps(x);
#elif defined(LEGATO_AVX2)
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#else
  float greatest = x[0];
  for (int lane = 1; lane < kLanes; ++lane) greatest = x[lane] > greatest ? x[lane] : greatest;
  return greatest;
#endif
}

// 2 to the power of x, within 2 units of the last place, for x in [-127, 126]; at -127 it is exactly 0, since nothing is
// left of the exponent. The polynomial is Cephes' exp2f, on [-0.5, 0.5].
inline Vector exp2_in_range(Vector x) {
  // Adding 1.5 * 2^23 leaves no bits for the fraction: the nearest integer ends up in the low bits.
  const Vector magic = splat(12582912.0f);
  const Vector shifted = x + magic;
  const Vector fraction = x - (shifted - magic);
  Vector y = splat(1.535336188319500e-4f);
  y = fma(y, fraction, splat(1.339887440266574e-3f));
  y = fma(y, fraction, splat(9.618437357674640e-3f));
  y = fma(y, fraction, splat(5.550332471162809e-2f));
  y = fma(y, fraction, splat(2.402264791363012e-1f));
  y = fma(y, fraction, splat(6.931472028550421e-1f));
  y = fma(y, fraction, splat(1.0f));
  return (Vector)((IntVector)y + ((IntVector)shifted << 23));  // The magic number's own bits are shifted out.
}

// The same for x up to 0, of which minus infinity gives 0: the weight of a key that is not seen.
inline Vector exp2_of_nonpositive(Vector x) { return exp2_in_range(maximum(x, splat(-127.0f))); }

inline Vector silu(Vector x) {
  const Vector power = minimum(maximum(x * splat(-1.4426950408889634f), splat(-126.0f)), splat(126.0f));
  return x / (splat(1.0f) + exp2_in_range(power));
}

}  // namespace legato
