// Products of a few rows with weights that were laid out for them, on a CPU: each weight is read
// once, in the order of memory. few_rows.py compiles it and says what the arguments are.
//
// Outputs are taken in groups of 48, the last ones in a group of as many sixteens as they need. The
// weights of a group lie together: for each step along the width (one number, or two of bfloat16)
// those of its first output, of its second, and so on. Of a gated product each group of the gate's
// weights lies before the group of what it lets through.

#include <memory>

#include "../host_numbers.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// One register of numbers, and the rows at once: their sums stay in registers.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kTogether = 8;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8, kTogether = 2;
#else
constexpr int64_t kLanes = 4, kTogether = 2;
#endif
constexpr int64_t kGroup = 48, kNarrow = 16;  // outputs of a group, and of the least of groups
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
constexpr int64_t kNear = 32;  // rows that a part of the width meets in a run
// Of the width: its products are summed apart, and its weights stay near until all rows met them.
constexpr int64_t kPart = 512;
constexpr int64_t kAhead = 8192;  // bytes of weights that are asked for early
// Those behind them that arrive while a row's gates of a group are computed.
constexpr int64_t kGateAhead = 768, kLine = 64;
// Weights of so many bytes are gone from the caches before the next pass reads them: they are kept out
// of these, for what else a round reads, such as a draft's weights.
constexpr int64_t kStreamed = 4 << 20;

inline void store(Lanes x, float* to) { memcpy(to, &x, sizeof x); }
inline void store(Lanes x, Bfloat16* to) {  // to nearest, ties to even
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const Halves found = __builtin_convertvector(x == x ? rounded : Words{} + 0x7FC0, Halves);
  memcpy(to, &found, sizeof found);
}

// One step along the width: weights of `kLanes` outputs, and what they meet of a row.
template <typename T>
struct Step;

template <>
struct Step<float> {
  static constexpr int64_t kWidth = 1;
  typedef Lanes Weights;
  typedef float Row;
  static inline Weights load(const float* from) {
    Weights w;
    memcpy(&w, from, sizeof w);
    return w;
  }
  static inline Row meet(const float* row) { return *row; }
  static inline void add(Lanes& sum, const Weights& w, Row x) { sum += w * x; }
};

template <>
struct Step<Bfloat16> {
  static constexpr int64_t kWidth = 2;
#if defined(__AVX512BF16__)
  static_assert(kLanes == 16, "registers of 64 bytes");
  typedef __m512bh Weights;
  typedef __m512bh Row;
  static inline Weights load(const Bfloat16* from) {
    return (__m512bh)_mm512_loadu_si512((const void*)from);
  }
  static inline Row meet(const Bfloat16* row) {
    int32_t pair;
    memcpy(&pair, row, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static inline void add(Lanes& sum, const Weights& w, const Row& x) {
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, w, x);
  }
#else
  struct Weights {
    Lanes even, odd;
  };
  struct Row {
    float even, odd;
  };
  static inline Weights load(const Bfloat16* from) {
    Words both;
    memcpy(&both, from, sizeof both);
    return {(Lanes)(both << 16), (Lanes)(both & 0xFFFF0000u)};
  }
  static inline Row meet(const Bfloat16* row) { return {widened(row[0]), widened(row[1])}; }
  static inline void add(Lanes& sum, const Weights& w, const Row& x) {
    sum += w.even * x.even;
    sum += w.odd * x.odd;
  }
#endif
};

template <typename T>
struct Product {
  const T *rows, *weights, *bias;
  T* out;
  int64_t num_rows, width, num_outputs;
  bool streams = false;  // its weights are kept out of the caches
};

// True where each weight is read once, and not again before many others were.
template <typename T>
bool streams(int64_t num_rows, int64_t width, int64_t num_outputs) {
  return num_rows <= kTogether && width * num_outputs * int64_t(sizeof(T)) >= kStreamed;
}

template <bool kStreams>
inline void ask_for(const void* weights) {
  __builtin_prefetch((const char*)weights + kAhead, 0, kStreams ? 0 : 3);
}

// Outputs of a group of which `rest` are left.
inline int64_t outputs_of(int64_t rest) {
  return rest >= kGroup ? kGroup : (rest + kNarrow - 1) / kNarrow * kNarrow;
}

// Adds the products of `kRows` rows and one group of `kBlocks` registers of outputs over
// `begin <= d < end` of the width; the first part of it begins them.
template <typename T, int kBlocks, bool kStreams, int kRows>
inline void add_rows(const T* rows, const T* weights, int64_t width, int64_t begin, int64_t end,
                     Lanes (*all)[kBlocks]) {
  typedef Step<T> S;
  Lanes sums[kRows][kBlocks] = {};
  for (int64_t d = begin; d < end; d += S::kWidth) {
    const T* at = weights + d * kBlocks * kLanes;
    typename S::Weights w[kBlocks];
    for (int b = 0; b < kBlocks; b++) {
      ask_for<kStreams>(at + b * S::kWidth * kLanes);
      w[b] = S::load(at + b * S::kWidth * kLanes);
    }
    for (int r = 0; r < kRows; r++) {
      const typename S::Row x = S::meet(rows + r * width + d);
      for (int b = 0; b < kBlocks; b++) S::add(sums[r][b], w[b], x);
    }
  }
  if (begin == 0) {
    memcpy(all, sums, sizeof sums);
    return;
  }
  for (int r = 0; r < kRows; r++)
    for (int b = 0; b < kBlocks; b++) all[r][b] += sums[r][b];
}

// As many rows at once as there are, `kTogether` at most: the number must be known to the compiler.
template <typename T, int kBlocks, bool kStreams, int kRows = kTogether>
inline void add(const T* rows, int64_t count, const T* weights, int64_t width, int64_t begin,
                int64_t end, Lanes (*sums)[kBlocks]) {
  if constexpr (kRows > 1) {
    if (count < kRows)
      return add<T, kBlocks, kStreams, kRows - 1>(rows, count, weights, width, begin, end, sums);
  }
  add_rows<T, kBlocks, kStreams, kRows>(rows, weights, width, begin, end, sums);
}

// Sums of a group; `num_rows` of `p` is at most `kNear`.
template <typename T, int kBlocks>
inline void sum_near(const Product<T>& p, const T* weights, Lanes (*sums)[kBlocks]) {
  for (int64_t begin = 0; begin < p.width; begin += kPart) {
    const int64_t end = begin + kPart < p.width ? begin + kPart : p.width;
    if (p.streams) {  // Then all rows meet the weights at once.
      add<T, kBlocks, true>(p.rows, p.num_rows, weights, p.width, begin, end, sums);
      continue;
    }
    for (int64_t row = 0; row < p.num_rows; row += kTogether)
      add<T, kBlocks, false>(p.rows + row * p.width, p.num_rows - row, weights, p.width, begin, end,
                             sums + row);
  }
}

// The biases of `count` outputs from `first` on.
template <typename T>
inline Lanes bias_of(const T* bias, int64_t first, int64_t count) {
  Lanes found = {};
  if (bias)
    for (int64_t i = 0; i < count; i++) found[i] = widened(bias[first + i]);
  return found;
}

template <typename T>
inline void store(Lanes x, T* to, int64_t count) {
  if (count == kLanes) return store(x, to);  // A copy whose length is not known here takes a call.
  T found[kLanes];
  store(x, found);
  memcpy(to, found, count * sizeof(T));
}

// `num_rows` of `p` is at most `kNear`.
template <typename T, int kBlocks>
void multiply_near(const Product<T>& p, int64_t group, const T* weights) {
  Lanes sums[kNear][kBlocks];
  sum_near<T, kBlocks>(p, weights, sums);
  for (int b = 0; b < kBlocks; b++) {
    const int64_t first = group * kGroup + b * kLanes, rest = p.num_outputs - first;
    const int64_t count = rest < kLanes ? rest : kLanes;
    if (count <= 0) break;
    const Lanes bias = bias_of(p.bias, first, count);
    for (int64_t r = 0; r < p.num_rows; r++)
      store(sums[r][b] + bias, p.out + r * p.num_outputs + first, count);
  }
}

// silu(x) * factor of rows of `kGroup` numbers, of which `count` are meant; weights from `ahead` on, if
// given, are asked for meanwhile. Apart from the sums: beside them the compiler keeps too little in
// registers.
template <typename T>
DRAFTSMITH_ONCE void gate(const T* x, const T* factor, T* out, int64_t num_rows, int64_t count,
                          int64_t out_stride, const char* ahead) {
  for (int64_t r = 0; r < num_rows; r++) {
    if (ahead)
      for (int64_t i = 0; i < kGateAhead; i += kLine, ahead += kLine) __builtin_prefetch(ahead, 0, 0);
    for (int64_t i = 0; i < count; i++)
      narrow(gated(x[r * kGroup + i], factor[r * kGroup + i]), out + r * out_stride + i);
  }
}

// The same of a gated product, where `weights` of the group's factors lie behind the gate's.
template <typename T, int kBlocks>
void multiply_gated_near(const Product<T>& p, int64_t group, const T* weights) {
  T halves[2][kNear * kGroup];
  const int64_t first = group * kGroup, rest = p.num_outputs - first;
  for (int half = 0; half < 2; half++) {
    Lanes sums[kNear][kBlocks];
    sum_near<T, kBlocks>(p, weights + half * kBlocks * kLanes * p.width, sums);
    const T* biases = p.bias ? p.bias + half * p.num_outputs : nullptr;
    for (int b = 0; b < kBlocks; b++) {
      const int64_t begin = b * kLanes, lanes = rest - begin < kLanes ? rest - begin : kLanes;
      const Lanes bias = bias_of(biases, first + begin, lanes);
      for (int64_t r = 0; r < p.num_rows; r++)
        store(sums[r][b] + bias, halves[half] + r * kGroup + begin);
    }
  }
  const char* ahead = (const char*)(weights + 2 * kBlocks * kLanes * p.width) + kAhead;
  gate(halves[0], halves[1], p.out + first, p.num_rows, rest < kGroup ? rest : kGroup,
       p.num_outputs, p.streams ? ahead : nullptr);
}

template <typename T, bool kGated, int kBlocks>
void multiply_group(const Product<T>& p, int64_t group, const T* weights) {
  for (int64_t row = 0; row < p.num_rows; row += kNear) {
    Product<T> near = p;
    near.rows += row * p.width;
    near.out += row * p.num_outputs;
    near.num_rows = p.num_rows - row < kNear ? p.num_rows - row : kNear;
    if constexpr (kGated)
      multiply_gated_near<T, kBlocks>(near, group, weights);
    else
      multiply_near<T, kBlocks>(near, group, weights);
  }
}

// Outputs of a group, whose weights are laid out in `weights`.
template <typename T, bool kGated = false>
void multiply_outputs(const Product<T>& p, int64_t group, const T* weights) {
  const int64_t outputs = outputs_of(p.num_outputs - group * kGroup);
  if (outputs == kGroup)
    multiply_group<T, kGated, kGroup / kLanes>(p, group, weights);
  else if (outputs == 2 * kNarrow)
    multiply_group<T, kGated, 2 * kNarrow / kLanes>(p, group, weights);
  else
    multiply_group<T, kGated, kNarrow / kLanes>(p, group, weights);
}

template <typename T, bool kGated>
void multiply(const Product<T>& p, int threads) {
  const int64_t groups = (p.num_outputs + kGroup - 1) / kGroup, halves = kGated ? 2 : 1;
  each(groups, threads, [=](int64_t group) {
    multiply_outputs<T, kGated>(p, group, p.weights + group * p.width * kGroup * halves);
  });
}

// Lays out a group of `weights` [num_outputs, width]; outputs that a last group lacks are zeros.
template <typename T>
void lay_out_group(const T* weights, T* to, int64_t width, int64_t num_outputs, int64_t group) {
  constexpr int64_t kStep = Step<T>::kWidth, kRun = 4096 / sizeof(T);  // numbers that are read in one run
  const int64_t outputs = outputs_of(num_outputs - group * kGroup);
  for (int64_t begin = 0; begin < width; begin += kRun)
    for (int64_t i = 0; i < outputs; i++) {
      const int64_t output = group * kGroup + i;
      const int64_t end = begin + kRun < width ? begin + kRun : width;
      for (int64_t d = begin; d < end; d += kStep)
        for (int64_t s = 0; s < kStep; s++)
          to[d * outputs + i * kStep + s] =
              output < num_outputs ? weights[output * width + d + s] : T{};
    }
}

template <typename T>
void lay_out(const T* weights, T* out, int64_t width, int64_t num_outputs, int threads) {
  const int64_t groups = (num_outputs + kGroup - 1) / kGroup;
  each(groups, threads, [=](int64_t group) {
    lay_out_group(weights, out + group * width * kGroup, width, num_outputs, group);
  });
}

// The same of a gated product's `weights` [2 * num_outputs, width], the gate's first.
template <typename T>
void lay_out_gated(const T* weights, T* out, int64_t width, int64_t num_outputs, int threads) {
  const int64_t groups = (num_outputs + kGroup - 1) / kGroup;
  each(groups, threads, [=](int64_t group) {
    T* to = out + group * width * kGroup * 2;
    lay_out_group(weights, to, width, num_outputs, group);
    lay_out_group(weights + num_outputs * width,
                  to + outputs_of(num_outputs - group * kGroup) * width, width, num_outputs, group);
  });
}

// The same of `weights` [width, num_outputs] in float32.
void lay_out_columns(const float* weights, float* to, int64_t width, int64_t num_outputs,
                     int64_t group) {
  const int64_t rest = num_outputs - group * kGroup, outputs = outputs_of(rest);
  for (int64_t d = 0; d < width; d++) {
    const float* from = weights + d * num_outputs + group * kGroup;
    for (int64_t i = 0; i < outputs; i++) to[d * outputs + i] = i < rest ? from[i] : 0;
  }
}

// `weights` as they are, [num_outputs, width] or by columns [width, num_outputs]: a group is laid
// out before all rows meet it.
void multiply_plain(const Product<float>& p, bool by_columns, int threads) {
  const int64_t groups = (p.num_outputs + kGroup - 1) / kGroup;
  each(groups, threads, [=](int64_t group) {
    std::unique_ptr<float[]> panel(new float[kGroup * p.width]);
    (by_columns ? lay_out_columns : lay_out_group<float>)(p.weights, panel.get(), p.width,
                                                          p.num_outputs, group);
    multiply_outputs<float>(p, group, panel.get());
  });
}

}  // namespace

extern "C" void multiply_plain_float32(const float* rows, const float* weights, const float* bias,
                                       float* out, int64_t num_rows, int64_t width,
                                       int64_t num_outputs, int by_columns, int threads) {
  multiply_plain({rows, weights, bias, out, num_rows, width, num_outputs}, by_columns != 0, threads);
}

#define PRODUCTS(name, T)                                                                          \
  extern "C" void multiply_##name(const T* rows, const T* weights, const T* bias, T* out,          \
                                  int64_t num_rows, int64_t width, int64_t num_outputs,            \
                                  int threads) {                                                   \
    multiply<T, false>({rows, weights, bias, out, num_rows, width, num_outputs,                    \
                        streams<T>(num_rows, width, num_outputs)},                                 \
                       threads);                                                                   \
  }                                                                                                \
  extern "C" void multiply_gated_##name(const T* rows, const T* weights, const T* bias, T* out,    \
                                        int64_t num_rows, int64_t width, int64_t num_outputs,      \
                                        int threads) {                                             \
    multiply<T, true>({rows, weights, bias, out, num_rows, width, num_outputs,                     \
                       streams<T>(num_rows, width, 2 * num_outputs)},                              \
                      threads);                                                                    \
  }                                                                                                \
  extern "C" void lay_out_##name(const T* weights, T* out, int64_t width, int64_t num_outputs,     \
                                 int threads) {                                                    \
    lay_out<T>(weights, out, width, num_outputs, threads);                                         \
  }                                                                                                \
  extern "C" void lay_out_gated_##name(const T* weights, T* out, int64_t width,                    \
                                       int64_t num_outputs, int threads) {                         \
    lay_out_gated<T>(weights, out, width, num_outputs, threads);                                   \
  }

PRODUCTS(float32, float)
PRODUCTS(bfloat16, Bfloat16)
