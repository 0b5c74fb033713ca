// Products of a few rows with weights of 8 bits, on a CPU: codes are read once, in the order of
// memory, and become numbers in registers. int8_rows.py compiles it and says what the arguments are.
//
// Outputs are taken in groups of 48, as in few_rows_cpu.cpp. The codes of a group lie together: for
// each step along the width, a register's worth for the first outputs, for the next, and so on.

#include "../host_numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include <immintrin.h>
#define DRAFTSMITH_TABLES 1
#endif

namespace {

// One register of numbers, and the most rows at once: their sums stay in registers.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kTogether = 6;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8, kTogether = 2;
#else
constexpr int64_t kLanes = 4, kTogether = 2;
#endif
constexpr int64_t kGroup = 48;
constexpr int64_t kBlocks = kGroup / kLanes;  // registers of a group
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
constexpr int64_t kNear = 32;  // rows that a part of the width meets in a run
// Of the width: its products are summed apart, and its codes stay near until all rows met them.
constexpr int64_t kPart = 512;

// One step along the width: codes of `kLanes` outputs, and what they meet of a row.
constexpr int64_t kWidth = 4;
template <typename T>
struct Step {
  struct Weights {
    Lanes of[kWidth];
  };
  static inline int64_t place(int64_t lane, int64_t step) { return lane * kWidth + step; }
  static inline uint8_t encoded(int8_t code) { return uint8_t(code); }
  static inline Weights open(const uint8_t* from) {
    Words words;
    memcpy(&words, from, sizeof words);
    Weights w;
    for (int64_t step = 0; step < kWidth; step++)  // signed: the last byte of a word has the sign
      w.of[step] = __builtin_convertvector((Integers)(words << (24 - 8 * step)) >> 24, Lanes);
    return w;
  }
  static inline void add(Lanes& sum, const Weights& w, const T* row) {
    for (int64_t step = 0; step < kWidth; step++) sum += w.of[step] * widened(row[step]);
  }
  static inline void spread(const Weights& w, T* to) {
    for (int64_t step = 0; step < kWidth; step++)
      for (int64_t lane = 0; lane < kLanes; lane++)
        narrow(w.of[step][lane], to + lane * kWidth + step);
  }
};

#if defined(DRAFTSMITH_TABLES)
// A code is a sign and a magnitude below 128, whose two bytes as bfloat16 are looked up.
struct Tables {
  alignas(64) uint8_t high[128], low[128];
  Tables() {
    for (int magnitude = 0; magnitude < 128; magnitude++) {
      Bfloat16 number;
      narrow(float(magnitude), &number);
      high[magnitude] = number.bits >> 8;
      low[magnitude] = number.bits & 0xFF;
    }
  }
};
const Tables kTables;

template <>
struct Step<Bfloat16> {
  struct Weights {
    __m512bh first, last;  // pairs of the first two numbers of the width, and of the last two
  };
  static inline int64_t place(int64_t lane, int64_t step) {
    return lane / 4 * 16 + step / 2 * 8 + lane % 4 * 2 + step % 2;
  }
  static inline uint8_t encoded(int8_t code) {
    return code < 0 ? uint8_t(0x80 - code) : uint8_t(code);
  }
  static inline Weights open(const uint8_t* from) {
    const __m512i codes = _mm512_loadu_si512(from);
    const __m512i magnitudes = _mm512_permutex2var_epi8(_mm512_load_si512(kTables.high), codes,
                                                        _mm512_load_si512(kTables.high + 64));
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kTables.low), codes,
                                                 _mm512_load_si512(kTables.low + 64));
    const __m512i high =  // magnitudes | (codes & sign)
        _mm512_ternarylogic_epi64(magnitudes, codes, _mm512_set1_epi8(char(0x80)), 0xF8);
    return {(__m512bh)_mm512_unpacklo_epi8(low, high), (__m512bh)_mm512_unpackhi_epi8(low, high)};
  }
  static inline void add(Lanes& sum, const Weights& w, const Bfloat16* row) {
    int32_t first, last;
    memcpy(&first, row, sizeof first);
    memcpy(&last, row + 2, sizeof last);
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, w.first, (__m512bh)_mm512_set1_epi32(first));
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, w.last, (__m512bh)_mm512_set1_epi32(last));
  }
  static inline void spread(const Weights& w, Bfloat16* to) {
    uint32_t pairs[2][kLanes];
    memcpy(pairs[0], &w.first, sizeof pairs[0]);
    memcpy(pairs[1], &w.last, sizeof pairs[1]);
    for (int64_t lane = 0; lane < kLanes; lane++)
      for (int64_t half = 0; half < 2; half++)
        memcpy(to + lane * kWidth + half * 2, &pairs[half][lane], sizeof pairs[half][lane]);
  }
};
#endif

// One linear layer; its products stand from `begin` on in each row of the output.
template <typename T>
struct Layer {
  const uint8_t* codes;
  const float* scales;
  const T* bias;
  int64_t begin, num_outputs;
};

// Layers that read the same rows, of which they are the shares of one output.
template <typename T>
struct Layers {
  int64_t count;
  Layer<T> of[1];  // `count` of them
};

template <typename T>
struct Product {
  const T* rows;
  T* out;
  int64_t num_rows, width, stride;  // of rows, and of rows of the output
  Reading reading;
};

// Adds the products of `kRows` rows and one group of outputs over `begin <= d < end` of the width.
template <typename T, Stay kStay, int kRows>
inline void add_rows(const T* rows, const uint8_t* codes, int64_t width, int64_t begin, int64_t end,
                     int64_t ahead, Lanes (*all)[kBlocks]) {
  typedef Step<T> S;
  Lanes sums[kRows][kBlocks] = {};
  for (int64_t d = begin; d < end; d += kWidth) {
    const uint8_t* at = codes + d * kGroup;
#pragma GCC unroll 16
    for (int b = 0; b < kBlocks; b++) {
      ask_for<kStay>(at + b * kWidth * kLanes, ahead);
      const typename S::Weights w = S::open(at + b * kWidth * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) S::add(sums[r][b], w, rows + r * width + d);
    }
  }
  if (begin == 0) {
    memcpy(all, sums, sizeof sums);
    return;
  }
  for (int r = 0; r < kRows; r++)
    for (int b = 0; b < kBlocks; b++) all[r][b] += sums[r][b];
}

// As many rows at once as are given: the number must be known to the compiler.
template <typename T, Stay kStay, int kRows = kTogether>
inline void add(const T* rows, int64_t count, const uint8_t* codes, int64_t width, int64_t begin,
                int64_t end, int64_t ahead, Lanes (*sums)[kBlocks]) {
  if constexpr (kRows > 1) {
    if (count < kRows)
      return add<T, kStay, kRows - 1>(rows, count, codes, width, begin, end, ahead, sums);
  }
  add_rows<T, kStay, kRows>(rows, codes, width, begin, end, ahead, sums);
}

template <typename T, Stay kStay>
inline void sum_near(const Product<T>& p, const uint8_t* codes, Lanes (*sums)[kBlocks]) {
  // Shares of one size: codes that two rows alone meet are opened almost for nothing.
  const int64_t shares = (p.num_rows + kTogether - 1) / kTogether;
  for (int64_t begin = 0; begin < p.width; begin += kPart) {
    const int64_t end = begin + kPart < p.width ? begin + kPart : p.width;
    for (int64_t share = 0; share < shares; share++) {
      const int64_t first = share * p.num_rows / shares;
      const int64_t count = (share + 1) * p.num_rows / shares - first;
      add<T, kStay>(p.rows + first * p.width, count, codes, p.width, begin, end, p.reading.ahead,
                     sums + first);
    }
  }
}

// `num_rows` of `p` is at most `kNear`.
template <typename T>
void multiply_near(const Product<T>& p, const Layer<T>& layer, int64_t group) {
  Lanes sums[kNear][kBlocks];
  const uint8_t* codes = layer.codes + group * p.width * kGroup;
  if (p.reading.stay == kPast)
    sum_near<T, kPast>(p, codes, sums);
  else if (p.reading.stay == kFarther)
    sum_near<T, kFarther>(p, codes, sums);
  else
    sum_near<T, kNearest>(p, codes, sums);
  const int64_t first = group * kGroup, rest = layer.num_outputs - first;
  const int64_t count = rest < kGroup ? rest : kGroup;
  for (int64_t r = 0; r < p.num_rows; r++) {
    float found[kGroup];
    memcpy(found, sums[r], sizeof found);
    T* out = p.out + r * p.stride + layer.begin + first;
    for (int64_t i = 0; i < count; i++) {
      const float scaled = found[i] * layer.scales[first + i];
      narrow(layer.bias ? scaled + widened(layer.bias[first + i]) : scaled, out + i);
    }
  }
}

template <typename T>
void multiply_group(const Product<T>& p, const Layer<T>& layer, int64_t group) {
  for (int64_t row = 0; row < p.num_rows; row += kNear) {
    Product<T> near = p;
    near.rows += row * p.width;
    near.out += row * p.stride;
    near.num_rows = p.num_rows - row < kNear ? p.num_rows - row : kNear;
    multiply_near(near, layer, group);
  }
}

inline int64_t groups_of(int64_t num_outputs) { return (num_outputs + kGroup - 1) / kGroup; }

template <typename T>
void multiply(const Product<T>& p, const Layers<T>& layers, int threads) {
  int64_t all = 0;
  for (int64_t i = 0; i < layers.count; i++) all += groups_of(layers.of[i].num_outputs);
  each(all, threads, [&](int64_t number) {
    int64_t group = number;
    const Layer<T>* layer = layers.of;
    for (; group >= groups_of(layer->num_outputs); layer++) group -= groups_of(layer->num_outputs);
    multiply_group(p, *layer, group);
  });
}

// Where the code of an output of a group and of a number of the width lies in the group's codes.
template <typename T>
inline int64_t place(int64_t output, int64_t d) {
  typedef Step<T> S;
  const int64_t block = output / kLanes * kWidth * kLanes;
  return d / kWidth * kWidth * kGroup + block + S::place(output % kLanes, d % kWidth);
}

// Lays out `codes` [num_outputs, width]; outputs that a last group lacks are zeros.
template <typename T>
void lay_out(const int8_t* codes, uint8_t* out, int64_t width, int64_t num_outputs, int threads) {
  each(groups_of(num_outputs), threads, [=](int64_t group) {
    for (int64_t i = 0; i < kGroup; i++) {
      const int64_t output = group * kGroup + i;
      for (int64_t d = 0; d < width; d++)
        out[group * width * kGroup + place<T>(i, d)] =
            Step<T>::encoded(output < num_outputs ? codes[output * width + d] : 0);
    }
  });
}

// The reverse: codes of some outputs as numbers [num_outputs, width].
template <typename T>
void open(const uint8_t* codes, T* out, int64_t width, int64_t num_outputs, int threads) {
  typedef Step<T> S;
  each(groups_of(num_outputs), threads, [=](int64_t group) {
    for (int64_t b = 0; b < kBlocks; b++) {
      const uint8_t* from = codes + group * width * kGroup + b * kWidth * kLanes;
      const int64_t first = group * kGroup + b * kLanes;
      for (int64_t d = 0; d < width; d += kWidth) {
        T numbers[kLanes * kWidth];
        S::spread(S::open(from + d * kGroup), numbers);
        for (int64_t lane = 0; lane < kLanes && first + lane < num_outputs; lane++)
          memcpy(out + (first + lane) * width + d, numbers + lane * kWidth,
                 kWidth * sizeof(T));
      }
    }
  });
}

}  // namespace

#define PRODUCTS(name, T)                                                                          \
  /* Arguments as few_rows_cpu.cpp has them, for lists of calls. */                                \
  extern "C" void multiply_##name(const T* rows, const void* layers, const T* no_bias, T* out,     \
                                  int64_t num_rows, int64_t width, int64_t stride,                 \
                                  int64_t readings, int threads) {                                 \
    (void)no_bias;                                                                                 \
    multiply<T>({rows, out, num_rows, width, stride, reading_of(readings, num_rows, 1)},           \
                *(const Layers<T>*)layers, threads);                                               \
  }                                                                                                \
  extern "C" void lay_out_##name(const int8_t* codes, uint8_t* out, int64_t width,                 \
                                 int64_t num_outputs, int threads) {                               \
    lay_out<T>(codes, out, width, num_outputs, threads);                                           \
  }                                                                                                \
  extern "C" void open_##name(const uint8_t* codes, T* out, int64_t width, int64_t num_outputs,    \
                              int threads) {                                                       \
    open<T>(codes, out, width, num_outputs, threads);                                              \
  }

PRODUCTS(float32, float)
PRODUCTS(bfloat16, Bfloat16)
