// Registers of numbers on the processor that serves, and their products.

#pragma once

#include <utility>

#include "host_numbers.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

inline Lanes load(const float* from) {
  Lanes x;
  memcpy(&x, from, sizeof x);
  return x;
}

// Bits of numbers, each in a word.
inline Words words_of(const Bfloat16* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  Halves x;
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, Words);
#endif
}
inline Lanes load(const Bfloat16* from) { return (Lanes)(words_of(from) << 16); }

inline void store(Lanes x, float* to) { memcpy(to, &x, sizeof x); }
inline void store(Lanes x, Bfloat16* to) {  // to nearest, ties to even
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const Halves found = __builtin_convertvector(x == x ? rounded : Words{} + 0x7FC0, Halves);
  memcpy(to, &found, sizeof found);
}

// sum + w * x, rounded once where the processor can: the compiler, which may reorder sums, would often
// multiply and add apart.
inline Lanes multiplied(Lanes sum, Lanes w, float x) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)w, _mm512_set1_ps(x), (__m512)sum);
#elif defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)w, _mm256_set1_ps(x), (__m256)sum);
#else
  Lanes found = sum + w * x;
  // In this order: a row's sums must not depend on how many rows there are.
#if defined(__aarch64__)
  asm("" : "+w"(found));
#elif defined(__SSE__)
  asm("" : "+x"(found));
#endif
  return found;
#endif
}

// One step along the width: weights of `kLanes` outputs, and the numbers of a row that they meet.
template <typename T>
struct Step;

template <>
struct Step<float> {
  static constexpr int64_t kWidth = 1;
  static constexpr bool kPairs = false;  // whether the processor multiplies pairs
  typedef Lanes Weights;
  static inline Weights load(const float* from) {
    Weights w;
    memcpy(&w, from, sizeof w);
    return w;
  }
  static inline float meet(const float* row) { return *row; }
  static inline void add(Lanes& sum, Lanes w, float x) { sum = multiplied(sum, w, x); }
};

template <>
struct Step<Bfloat16> {
  static constexpr int64_t kWidth = 2;
#if defined(__AVX512BF16__)
  static constexpr bool kPairs = true;
  static_assert(kLanes == 16, "registers of 64 bytes");
  typedef __m512bh Weights;
  static inline Weights load(const Bfloat16* from) {
    return (__m512bh)_mm512_loadu_si512((const void*)from);
  }
  static inline __m512bh meet(const Bfloat16* row) {
    int32_t pair;
    memcpy(&pair, row, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static inline void add(Lanes& sum, const Weights& w, const __m512bh& x) {
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, w, x);
  }
#else
  static constexpr bool kPairs = false;
  struct Weights {
    Lanes even, odd;
  };
  static inline Weights load(const Bfloat16* from) {
    Words both;
    memcpy(&both, from, sizeof both);
    return {(Lanes)(both << 16), (Lanes)(both & 0xFFFF0000u)};
  }
  struct Pair {
    float even, odd;
  };
  static inline Pair meet(const Bfloat16* row) { return {widened(row[0]), widened(row[1])}; }
  static inline void add(Lanes& sum, const Weights& w, const Pair& x) {
    sum = multiplied(sum, w.even, x.even);
    sum = multiplied(sum, w.odd, x.odd);
  }
#endif
};

