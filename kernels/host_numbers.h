// Numbers of the kernels for a CPU (bfloat16 beside float32, e^x, gates), and their loops over threads.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "host_threads.h"

struct Bfloat16 {
  uint16_t bits;
};

inline float widened(float x) { return x; }
inline float widened(Bfloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, Bfloat16* to) {  // to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  to->bits = x != x ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
// As a number of type T holds it.
template <typename T>
inline float rounded(float x) {
  T y;
  narrow(x, &y);
  return widened(y);
}

// The largest of some numbers; of NaNs, that of the others.
template <typename T>
float largest(const T* x, int64_t count) {
  constexpr int64_t kAtOnce = 64;
  float lanes[kAtOnce], most = -INFINITY;
  for (float& one : lanes) one = -INFINITY;
  int64_t v = 0;
  for (; v + kAtOnce <= count; v += kAtOnce)
    for (int64_t i = 0; i < kAtOnce; i++) {
      const float value = widened(x[v + i]);
      lanes[i] = value > lanes[i] ? value : lanes[i];
    }
  for (; v < count; v++) most = widened(x[v]) > most ? widened(x[v]) : most;
  for (int64_t half = kAtOnce / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; i++) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
  return lanes[0] > most ? lanes[0] : most;
}

// Rows of a pass over a paged pool. paged_compiled.py and call_list.py say what the numbers are.
struct Rows {
  const int64_t *tables, *places, *lengths, *begins, *ancestors, *first;
  int64_t num_rows, longest_row, table_width, block_size;
};

// GCC may also compile a function again for each of its callers.
#if defined(__GNUC__) && !defined(__clang__)
#define DRAFTSMITH_ONCE __attribute__((noinline, noclone))
#else
#define DRAFTSMITH_ONCE __attribute__((noinline))
#endif
// One step of a loop: compiled once, so that its bits do not depend on the number of threads.
template <typename Step>
DRAFTSMITH_ONCE void take(const Step& step, int64_t i) {
  step(i);
}

// `step(i)` of 0 <= i < count.
template <typename Step>
inline void each(int64_t count, int threads, const Step& step) {
  if (threads > 1 && count > 1)
    return team().run(
        count, threads, [](const void* s, int64_t i) { take(*static_cast<const Step*>(s), i); }, &step);
  for (int64_t i = 0; i < count; i++) take(step, i);
}

// e^x of x <= 0 to two units in the last place; a NaN stays one.
inline float exponential(float x) {
  float bounded = x < -87.0f ? -87.0f : x;
  float whole = rintf(bounded * 1.44269504f);
  float rest = (bounded - whole * 0.693145752f) - whole * 1.42860677e-6f;
  float power = 1.98756912e-4f;
  power = power * rest + 1.39819994e-3f;
  power = power * rest + 8.33345205e-3f;
  power = power * rest + 4.16657962e-2f;
  power = power * rest + 1.66666657e-1f;
  power = power * rest + 5.00000000e-1f;
  power = power * rest * rest + rest + 1.0f;
  int32_t bits;
  memcpy(&bits, &power, sizeof bits);
  bits += int32_t(whole) << 23;
  float value;
  memcpy(&value, &bits, sizeof value);
  // One choice behind the other: of one inside the other the compiler makes no vectors.
  value = x == x ? value : x;
  return x < -87.0f ? 0.0f : value;
}

// silu(x) * factor, the former rounded to T first.
template <typename T>
inline float gated(T x, T factor) {
  const float a = widened(x), e = exponential(-fabsf(a));
  const float sigmoid = (a < 0 ? e : 1.0f) / (1.0f + e);
  return rounded<T>(a * sigmoid) * widened(factor);
}
