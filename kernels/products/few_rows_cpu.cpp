// Products of a few rows with weights that were laid out for them, on a CPU: each weight is read
// once, in the order of memory. few_rows.py compiles it and says what the arguments are.
//
// Outputs are taken in groups of 48, the last ones in a group of as many sixteens as they need. The
// weights of a group lie together: for each step along the width (one number, or two of bfloat16)
// those of its first output, of its second, and so on. Of a gated product each group of the gate's
// weights lies before the group of what it lets through.

#include <memory>
#include <type_traits>
#include <vector>

#include "../host_numbers.h"

#if defined(__FMA__)
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
constexpr int64_t kPart = 512;  // of the width, whose products are summed apart
// Of 16 registers, whole groups of more than two rows would not stay in them: the rows meet tiles of a
// group, one after the other, whose weights lie in the nearest cache for so many bytes of an output.
constexpr bool kTiles = kLanes < 16;
constexpr int64_t kTileBytes = 64;
constexpr int64_t kGateAhead = 768;  // bytes that arrive while a row's gates of a group are computed

// Where weights that are asked for early wait: in the nearest cache, in a farther one, or in none for
// long, so that these are left to what else a round reads.
enum Stay { kNearest, kFarther, kPast };
constexpr int64_t kLine = 64, kMostPanels = 4;

// How weights are read, which no sum depends on. readings.py measures what is fastest.
struct Reading {
  Stay stay = kNearest;
  int64_t panels = 1, ahead = 2048;  // groups of outputs side by side; bytes that are asked for early
};

// `readings` holds one in 16 bits for 1 row, up to 4, up to 16, and more.
inline Reading reading_of(uint64_t readings, int64_t num_rows) {
  const int shift = num_rows == 1 ? 0 : num_rows <= 4 ? 16 : num_rows <= 16 ? 32 : 48;
  const uint64_t bits = readings >> shift & 0xFFFF;
  int64_t panels = int64_t(1) << (bits >> 2 & 3);
  while (panels > 1 && (panels > kMostPanels || panels * num_rows > kTogether)) panels /= 2;
  return {Stay(bits & 3), panels, int64_t(bits >> 4) * kLine};
}

template <Stay kStay>
inline void ask_for(const void* weights, int64_t ahead) {
  __builtin_prefetch((const char*)weights + ahead, 0,
                     kStay == kPast ? 0 : kStay == kFarther ? 2 : 3);
}

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
  return sum + w * x;
#endif
}

// One step along the width: weights of `kLanes` outputs, and the numbers of a row that they meet. Tiles
// take it in one turn or in two, each of which needs fewer registers. `kFewest`: rows from which on
// tiles are faster, `kMany` of them at once with two registers of outputs.
template <typename T>
struct Step;

template <>
struct Step<float> {
  static constexpr int64_t kWidth = 1;
  static constexpr int kFewest = 7, kMany = 6;
  static constexpr bool kAsks = true;
  typedef float Number;
  typedef Lanes Weights;
  typedef void Second;
  static inline Weights load(const float* from) {
    Weights w;
    memcpy(&w, from, sizeof w);
    return w;
  }
  static inline float meet(const float* row) { return *row; }
  static inline void add(Lanes& sum, Lanes w, float x) { sum = multiplied(sum, w, x); }
};

#if !defined(__AVX512BF16__)
// Of two numbers side by side the first (`kOdd` 0) or the second.
template <int kOdd>
struct Half {
  static constexpr bool kAsks = kOdd == 0;
  typedef Lanes Weights;
  static inline Weights load(const Bfloat16* from) {
    Words both;
    memcpy(&both, from, sizeof both);
    return (Lanes)(kOdd ? both & 0xFFFF0000u : both << 16);
  }
  static inline float meet(const float* row) { return row[kOdd]; }
  static inline void add(Lanes& sum, Lanes w, float x) { sum = multiplied(sum, w, x); }
};
#endif

template <>
struct Step<Bfloat16> {
  static constexpr int64_t kWidth = 2;
  static constexpr int kFewest = 3, kMany = 4;
  static constexpr bool kAsks = true;
#if defined(__AVX512BF16__)
  static_assert(kLanes == 16, "registers of 64 bytes");
  typedef Bfloat16 Number;
  typedef __m512bh Weights;
  typedef void Second;
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
  typedef float Number;
  typedef Half<0> First;
  typedef Half<1> Second;
  struct Weights {
    Lanes even, odd;
  };
  static inline Weights load(const Bfloat16* from) { return {First::load(from), Second::load(from)}; }
  struct Pair {
    float even, odd;
  };
  static inline Pair meet(const Bfloat16* row) { return {widened(row[0]), widened(row[1])}; }
  static inline void add(Lanes& sum, const Weights& w, const Pair& x) {
    First::add(sum, w.even, x.even);
    Second::add(sum, w.odd, x.odd);
  }
#endif
};

// Rows as tiles meet them: those of bfloat16 are widened once for all outputs, where no instruction
// takes them. Without tiles they are read as they are: for one row, which waits for memory, that is faster.
template <typename T, typename Number = typename Step<T>::Number>
struct Rows {
  const Number* numbers;
  Rows(const T* rows, int64_t num_rows, int64_t width) {
    static thread_local std::vector<Number> own;
    const int64_t count = kTiles && num_rows >= Step<T>::kFewest ? num_rows * width : 0;
    if (int64_t(own.size()) < count) own.resize(count);
    for (int64_t i = 0; i < count; i++) own[i] = widened(rows[i]);
    numbers = own.data();
  }
};
template <typename T>
struct Rows<T, T> {
  const T* numbers;
  Rows(const T* rows, int64_t, int64_t) : numbers(rows) {}
};

template <typename T>
struct Product {
  const T *rows, *weights, *bias;
  const typename Step<T>::Number* wide;  // the rows, as tiles meet them
  T* out;
  int64_t num_rows, width, num_outputs;
  Reading reading = {};
};

// Outputs of a group of which `rest` are left.
inline int64_t outputs_of(int64_t rest) {
  return rest >= kGroup ? kGroup : (rest + kNarrow - 1) / kNarrow * kNarrow;
}

// A piece of a part of the width, and the weights of a group that belong to it.
template <typename T>
struct Piece {
  const T* rows;
  const typename Step<T>::Number* wide;
  const T* weights;
  int64_t width, begin, end, ahead;
  bool goes_on;  // its products are added to those of the pieces before it
};

// Registers of outputs that are summed at once: `kTaken` of the `kBlocks` of a group, from `kFirst` on,
// in `kPanels` groups side by side.
template <int kBlocks_, int kPanels_, int kFirst_, int kTaken_>
struct Tile {
  static constexpr int kBlocks = kBlocks_, kPanels = kPanels_, kFirst = kFirst_, kTaken = kTaken_;
};

// Rows as a turn takes their numbers.
template <typename Turn, typename T>
inline auto rows_for(const Piece<T>& p) {
  if constexpr (std::is_same<Turn, Step<T>>::value)
    return p.rows;
  else
    return p.wide;
}

template <typename T, typename A, Stay kStay, int kRows, typename Turn>
inline void add_turn(const Piece<T>& p, int64_t d, Lanes (*sums)[kRows][A::kTaken]) {
  constexpr int64_t kStep = Step<T>::kWidth * kLanes;  // numbers of a register
  constexpr int kLines = kLine / (kStep * sizeof(T));  // registers of a line
  for (int panel = 0; panel < A::kPanels; panel++) {
    const T* at = p.weights + (panel * p.width + d) * A::kBlocks * kLanes + A::kFirst * kStep;
    typename Turn::Weights w[A::kTaken];
    for (int b = 0; b < A::kTaken; b++) {
      if (Turn::kAsks && (A::kFirst + b) % kLines == 0) ask_for<kStay>(at + b * kStep, p.ahead);
      w[b] = Turn::load(at + b * kStep);
    }
    for (int r = 0; r < kRows; r++) {
      const auto x = Turn::meet(rows_for<Turn>(p) + r * p.width + d);
      for (int b = 0; b < A::kTaken; b++) Turn::add(sums[panel][r][b], w[b], x);
    }
  }
}

// Sums of the products of `kRows` rows over `begin <= d < end` of the width. Those of a group stand
// `kNear` rows behind those of the one before.
template <typename T, typename A, Stay kStay, int kRows>
inline void add_rows(const Piece<T>& p, Lanes (*all)[A::kBlocks]) {
  Lanes sums[A::kPanels][kRows][A::kTaken] = {};
  if (p.goes_on)
    for (int panel = 0; panel < A::kPanels; panel++)
      for (int r = 0; r < kRows; r++)
        for (int b = 0; b < A::kTaken; b++) sums[panel][r][b] = all[panel * kNear + r][A::kFirst + b];
  typedef typename Step<T>::Second Second;
  if constexpr (A::kTaken == A::kBlocks) {
    for (int64_t d = p.begin; d < p.end; d += Step<T>::kWidth)
      add_turn<T, A, kStay, kRows, Step<T>>(p, d, sums);
  } else if constexpr (std::is_void<Second>::value) {
#pragma GCC unroll 4
    for (int64_t d = p.begin; d < p.end; d += Step<T>::kWidth)
      add_turn<T, A, kStay, kRows, Step<T>>(p, d, sums);
  } else {
    for (int64_t d = p.begin; d < p.end; d += Step<T>::kWidth) {
      add_turn<T, A, kStay, kRows, typename Step<T>::First>(p, d, sums);
      add_turn<T, A, kStay, kRows, Second>(p, d, sums);
    }
  }
  for (int panel = 0; panel < A::kPanels; panel++)
    for (int r = 0; r < kRows; r++)
      for (int b = 0; b < A::kTaken; b++) all[panel * kNear + r][A::kFirst + b] = sums[panel][r][b];
}

// As many rows at once as there are, at most `kRows`: the number must be known to the compiler.
template <typename T, typename A, Stay kStay, int kRows>
inline void add(const Piece<T>& p, int64_t count, Lanes (*sums)[A::kBlocks]) {
  if constexpr (kRows > 1) {
    if (count < kRows) return add<T, A, kStay, kRows - 1>(p, count, sums);
  }
  add_rows<T, A, kStay, kRows>(p, sums);
}

// All outputs of a piece of which no row was met, tile after tile.
template <typename T, typename A, Stay kStay, int kRows>
inline void sum_piece(const Piece<T>& first, int64_t num_rows, Lanes (*sums)[A::kBlocks]) {
  Piece<T> p = first;
  for (int64_t row = 0; row < num_rows; row += kRows, p.rows += kRows * p.width, p.wide += kRows * p.width)
    add<T, A, kStay, kRows>(p, num_rows - row, sums + row);
  constexpr int kNext = A::kFirst + A::kTaken;
  if constexpr (kNext < A::kBlocks)
    sum_piece<T, Tile<A::kBlocks, A::kPanels, kNext, A::kTaken>, kStay, kRows>(first, num_rows, sums);
}

// All pieces of a part. What a tile meets next is asked for while it meets what lies there.
template <typename T, typename A, Stay kStay, int kRows>
inline void sum_pieces(const Product<T>& p, const T* weights, int64_t begin, int64_t end,
                       Lanes (*sums)[A::kBlocks]) {
  constexpr int64_t kSize = kTileBytes / sizeof(T);
  for (int64_t at = begin; at < end; at += kSize)
    sum_piece<T, A, kStay, kRows>({p.rows, p.wide, weights, p.width, at, at + kSize < end ? at + kSize : end,
                                   kTileBytes * A::kBlocks * kLanes, at > begin},
                                  p.num_rows, sums);
}

template <typename T, int kBlocks, Stay kStay, int kPanels>
inline void sum_rows(const Product<T>& p, const T* weights, Lanes (*sums)[kBlocks]) {
  constexpr int kThird = kBlocks % 3 == 0 ? 3 : 2;
  Lanes later[kPanels * kNear][kBlocks];
  for (int64_t begin = 0, end; begin < p.width; begin = end) {
    // A short rest is no part of its own, which a row alone would wait for.
    end = begin + kPart + kPart / 2 < p.width ? begin + kPart : p.width;
    Lanes(*part)[kBlocks] = begin == 0 ? sums : later;
    const bool in_tiles = kTiles && kPanels == 1 && p.num_rows >= Step<T>::kFewest;
    if (in_tiles && p.num_rows > 3)
      sum_pieces<T, Tile<kBlocks, 1, 0, 2>, kStay, Step<T>::kMany>(p, weights, begin, end, part);
    else if (in_tiles)
      sum_pieces<T, Tile<kBlocks, 1, 0, kThird>, kStay, 3>(p, weights, begin, end, part);
    else
      sum_piece<T, Tile<kBlocks, kPanels, 0, kBlocks>, kStay, kTogether / kPanels>(
          {p.rows, p.wide, weights, p.width, begin, end, p.reading.ahead, false}, p.num_rows, part);
    for (int panel = 0; begin > 0 && panel < kPanels; panel++)
      for (int64_t r = panel * kNear; r < panel * kNear + p.num_rows; r++)
        for (int b = 0; b < kBlocks; b++) sums[r][b] += later[r][b];
  }
}

template <typename T, int kBlocks, int kPanels>
inline void sum_panels(const Product<T>& p, const T* weights, Lanes (*sums)[kBlocks]) {
  // A narrow group is the last one.
  if constexpr (kPanels == 1 || (kPanels <= kTogether && kBlocks * kLanes == kGroup)) {
    switch (p.reading.stay) {
      case kPast:
        return sum_rows<T, kBlocks, kPast, kPanels>(p, weights, sums);
      case kFarther:
        return sum_rows<T, kBlocks, kFarther, kPanels>(p, weights, sums);
      default:
        return sum_rows<T, kBlocks, kNearest, kPanels>(p, weights, sums);
    }
  }
}

// Sums of `panels` groups; `num_rows` of `p` is at most `kNear`.
template <typename T, int kBlocks>
DRAFTSMITH_ONCE void sum_near(const Product<T>& p, const T* weights, int64_t panels, Lanes (*sums)[kBlocks]) {
  while (panels > 0) {
    int64_t count = kBlocks * kLanes == kGroup ? p.reading.panels : 1;
    while (count > panels) count /= 2;
    if (count == 4)
      sum_panels<T, kBlocks, 4>(p, weights, sums);
    else if (count == 2)
      sum_panels<T, kBlocks, 2>(p, weights, sums);
    else
      sum_panels<T, kBlocks, 1>(p, weights, sums);
    weights += count * kBlocks * kLanes * p.width;
    sums += count * kNear;
    panels -= count;
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

// Products of a group out of their sums.
template <typename T, int kBlocks>
void finish(const Product<T>& p, int64_t group, const Lanes (*sums)[kBlocks]) {
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

// The same of a gated product, where the sums of the group's factors stand behind the gate's; `next`:
// weights that are read next.
template <typename T, int kBlocks>
void finish_gated(const Product<T>& p, int64_t group, const Lanes (*sums)[kBlocks], const T* next) {
  T halves[2][kNear * kGroup];
  const int64_t first = group * kGroup, rest = p.num_outputs - first;
  for (int half = 0; half < 2; half++, sums += kNear) {
    const T* biases = p.bias ? p.bias + half * p.num_outputs : nullptr;
    for (int b = 0; b < kBlocks; b++) {
      const int64_t begin = b * kLanes, lanes = rest - begin < kLanes ? rest - begin : kLanes;
      const Lanes bias = bias_of(biases, first + begin, lanes);
      for (int64_t r = 0; r < p.num_rows; r++)
        store(sums[r][b] + bias, halves[half] + r * kGroup + begin);
    }
  }
  const char* ahead = p.reading.stay == kPast ? (const char*)next + p.reading.ahead : nullptr;
  gate(halves[0], halves[1], p.out + first, p.num_rows, rest < kGroup ? rest : kGroup,
       p.num_outputs, ahead);
}

// Outputs of `groups` groups of one size.
template <typename T, bool kGated, int kBlocks>
void multiply_groups(const Product<T>& p, int64_t group, int64_t groups, const T* weights) {
  constexpr int64_t kHalves = kGated ? 2 : 1;
  Lanes sums[kMostPanels * kNear][kBlocks];
  for (int64_t row = 0; row < p.num_rows; row += kNear) {
    Product<T> near = p;
    near.rows += row * p.width;
    near.wide += row * p.width;
    near.out += row * p.num_outputs;
    near.num_rows = p.num_rows - row < kNear ? p.num_rows - row : kNear;
    sum_near<T, kBlocks>(near, weights, groups * kHalves, sums);
    for (int64_t i = 0; i < groups; i++) {
      if constexpr (kGated)
        finish_gated<T, kBlocks>(near, group + i, sums + i * kHalves * kNear,
                                 weights + groups * kHalves * kBlocks * kLanes * p.width);
      else
        finish<T, kBlocks>(near, group + i, sums + i * kNear);
    }
  }
}

// Outputs of a group, whose weights are laid out in `weights`.
template <typename T, bool kGated = false>
void multiply_outputs(const Product<T>& p, int64_t group, const T* weights) {
  const int64_t outputs = outputs_of(p.num_outputs - group * kGroup);
  if (outputs == kGroup)
    multiply_groups<T, kGated, kGroup / kLanes>(p, group, 1, weights);
  else if (outputs == 2 * kNarrow)
    multiply_groups<T, kGated, 2 * kNarrow / kLanes>(p, group, 1, weights);
  else
    multiply_groups<T, kGated, kNarrow / kLanes>(p, group, 1, weights);
}

template <typename T, bool kGated>
void multiply(const Product<T>& p, int threads) {
  const int64_t groups = (p.num_outputs + kGroup - 1) / kGroup, halves = kGated ? 2 : 1;
  // Groups that a step takes, all of them whole.
  const int64_t taken = p.reading.panels > halves ? p.reading.panels / halves : 1;
  each((groups + taken - 1) / taken, threads, [=](int64_t step) {
    const int64_t first = step * taken;
    const T* weights = p.weights + first * p.width * kGroup * halves;
    if ((first + taken) * kGroup <= p.num_outputs)
      return multiply_groups<T, kGated, kGroup / kLanes>(p, first, taken, weights);
    for (int64_t group = first; group < groups; group++, weights += p.width * kGroup * halves)
      multiply_outputs<T, kGated>(p, group, weights);
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

// All groups; of a gated product `weights` are [2 * num_outputs, width], the gate's first.
template <typename T, bool kGated>
void lay_out(const T* weights, T* out, int64_t width, int64_t num_outputs, int threads) {
  const int64_t groups = (num_outputs + kGroup - 1) / kGroup;
  each(groups, threads, [=](int64_t group) {
    T* to = out + group * width * kGroup * (kGated ? 2 : 1);
    lay_out_group(weights, to, width, num_outputs, group);
    if (kGated)
      lay_out_group(weights + num_outputs * width,
                    to + outputs_of(num_outputs - group * kGroup) * width, width, num_outputs, group);
  });
}

// A group of `weights` [width, num_outputs] in float32.
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

// Rows of a group of outputs whose sums fill the registers, as do fewer rows of several groups.
extern "C" int64_t rows_together() { return kTogether; }

extern "C" void multiply_plain_float32(const float* rows, const float* weights, const float* bias,
                                       float* out, int64_t num_rows, int64_t width,
                                       int64_t num_outputs, int by_columns, int threads) {
  multiply_plain({rows, weights, bias, rows, out, num_rows, width, num_outputs}, by_columns != 0, threads);
}

#define PRODUCTS(name, T)                                                                          \
  extern "C" void multiply_##name(const T* rows, const T* weights, const T* bias, T* out,          \
                                  int64_t num_rows, int64_t width, int64_t num_outputs,            \
                                  int64_t readings, int threads) {                                 \
    const Rows<T> met(rows, num_rows, width);                                                      \
    multiply<T, false>({rows, weights, bias, met.numbers, out, num_rows, width, num_outputs,       \
                        reading_of(readings, num_rows)},                                           \
                       threads);                                                                   \
  }                                                                                                \
  extern "C" void multiply_gated_##name(const T* rows, const T* weights, const T* bias, T* out,    \
                                        int64_t num_rows, int64_t width, int64_t num_outputs,      \
                                        int64_t readings, int threads) {                           \
    const Rows<T> met(rows, num_rows, width);                                                      \
    multiply<T, true>({rows, weights, bias, met.numbers, out, num_rows, width, num_outputs,        \
                       reading_of(readings, num_rows)},                                            \
                      threads);                                                                    \
  }                                                                                                \
  extern "C" void lay_out_##name(const T* weights, T* out, int64_t width, int64_t num_outputs,     \
                                 int threads) {                                                    \
    lay_out<T, false>(weights, out, width, num_outputs, threads);                                  \
  }                                                                                                \
  extern "C" void lay_out_gated_##name(const T* weights, T* out, int64_t width,                    \
                                       int64_t num_outputs, int threads) {                         \
    lay_out<T, true>(weights, out, width, num_outputs, threads);                                   \
  }

PRODUCTS(float32, float)
PRODUCTS(bfloat16, Bfloat16)
