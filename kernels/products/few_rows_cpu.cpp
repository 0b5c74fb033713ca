// Products of a few rows with weights that were laid out for them, on a CPU: each weight is read from
// memory once, in runs. few_rows.py compiles it and says what the arguments are.
//
// Outputs are taken in groups of three registers, the last ones in as many registers as they need. The
// weights of a group lie together: for each step along the width (one number, or two of bfloat16)
// those of its first output, of its second, and so on.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "../host_lanes.h"

namespace {

// The rows at once: their sums of a group stay in registers, of which there are 32 or 16.
constexpr int64_t kTogether = kLanes == 16 ? 8 : 4;
constexpr int64_t kGroup = 3 * kLanes;  // outputs of a group
constexpr int64_t kNear = 32;  // rows that a part of the width meets in a run
constexpr int64_t kPart = 512;  // of the width, whose products are summed apart
// Of 16 registers, more rows meet pieces of a part, one after the other, whose weights lie in the nearest
// cache for so many bytes of an output; those of bfloat16 are widened there, once for all rows.
constexpr bool kManyInPieces = kLanes < 16;
constexpr int64_t kPieceBytes = 64;

// Where weights that are asked for early wait: in the nearest cache, in a farther one, or in none for
// long, so that these are left to what else a round reads. `kAskedFor`: they were asked for before.
enum Stay { kNearest, kFarther, kPast, kAskedFor };
constexpr int64_t kLine = 64;

// How weights are read, which no sum depends on. readings.py measures what is fastest.
struct Reading {
  Stay stay;
  int64_t ahead;  // bytes that are asked for early
};

// `readings` holds one in 16 bits for 1 row, up to 4, up to 16, and more.
inline Reading reading_of(uint64_t readings, int64_t num_rows) {
  const int shift = num_rows == 1 ? 0 : num_rows <= 4 ? 16 : num_rows <= 16 ? 32 : 48;
  const uint64_t bits = readings >> shift & 0xFFFF;
  return {Stay(bits & 3), int64_t(bits >> 2) * kLine};
}

template <Stay kStay>
inline void ask_for(const void* weights, int64_t ahead) {
  if constexpr (kStay != kAskedFor)
    __builtin_prefetch((const char*)weights + ahead, 0,
                       kStay == kPast ? 0 : kStay == kFarther ? 2 : 3);
}

// Whether more than `kTogether` rows meet weights that are widened first.
template <typename T>
constexpr bool kWidens = kManyInPieces && std::is_same<T, Bfloat16>::value;

// Rows that meet widened weights, widened once for all outputs.
template <typename T>
const float* wide_rows(const T* rows, int64_t num_rows, int64_t width) {
  static thread_local std::vector<float> wide;
  if (!kWidens<T> || num_rows <= kTogether) return nullptr;
  if (int64_t(wide.size()) < num_rows * width) wide.resize(num_rows * width);
  for (int64_t i = 0; i < num_rows * width; i++) wide[i] = widened(rows[i]);
  return wide.data();
}

template <typename T>
struct Product {
  const T *rows, *weights, *bias;
  const float* wide;  // the rows, where they are widened
  T* out;
  int64_t num_rows, width, num_outputs;
  Reading reading;
};

// Outputs of a group of which `rest` are left.
inline int64_t outputs_of(int64_t rest) {
  return rest >= kGroup ? kGroup : (rest + kLanes - 1) / kLanes * kLanes;
}

// Weights of a group, and the rows that meet them, over `begin <= d < end` of the width.
template <typename T>
struct Piece {
  const T *rows, *weights;
  int64_t width, begin, end, ahead;
  bool goes_on;  // its products are added to those of the pieces before it
};

// Sums of the products of `kRows` rows.
template <typename T, int kBlocks, Stay kStay, int kRows>
inline void add_rows(const Piece<T>& p, Lanes (*all)[kBlocks]) {
  constexpr int64_t kStep = Step<T>::kWidth * kLanes;  // numbers of a register
  constexpr int kLines = kLine / (kStep * sizeof(T));  // registers of a line
  Lanes sums[kRows][kBlocks] = {};
  if (p.goes_on)
    for (int r = 0; r < kRows; r++)
      for (int b = 0; b < kBlocks; b++) sums[r][b] = all[r][b];
  const auto step = [&](int64_t d) {
    const T* at = p.weights + d * kBlocks * kLanes;
    typename Step<T>::Weights w[kBlocks];
    for (int b = 0; b < kBlocks; b++) {
      if (b % kLines == 0) ask_for<kStay>(at + b * kStep, p.ahead);
      w[b] = Step<T>::load(at + b * kStep);
    }
    for (int r = 0; r < kRows; r++) {
      const auto x = Step<T>::meet(p.rows + r * p.width + d);
      for (int b = 0; b < kBlocks; b++) Step<T>::add(sums[r][b], w[b], x);
    }
  };
  if constexpr (kManyInPieces && kRows > 2) {
#pragma GCC unroll 4
    for (int64_t d = p.begin; d < p.end; d += Step<T>::kWidth) step(d);
  } else {
    for (int64_t d = p.begin; d < p.end; d += Step<T>::kWidth) step(d);
  }
  for (int r = 0; r < kRows; r++)
    for (int b = 0; b < kBlocks; b++) all[r][b] = sums[r][b];
}

// As many rows at once as there are, at most `kRows`: the number must be known to the compiler.
template <typename T, int kBlocks, Stay kStay, int kRows = kTogether>
inline void add(const Piece<T>& p, int64_t count, Lanes (*sums)[kBlocks]) {
  if constexpr (kRows > 1) {
    if (count < kRows) return add<T, kBlocks, kStay, kRows - 1>(p, count, sums);
  }
  add_rows<T, kBlocks, kStay, kRows>(p, sums);
}

template <typename T, int kBlocks, Stay kStay>
inline void sum_piece(Piece<T> p, int64_t num_rows, Lanes (*sums)[kBlocks]) {
  for (int64_t row = 0; row < num_rows; row += kTogether, p.rows += kTogether * p.width)
    add<T, kBlocks, kStay>(p, num_rows - row, sums + row);
}

// A piece whose weights are in the nearest cache.
template <typename T, int kBlocks>
inline void sum_near_piece(const Product<T>& p, const Piece<T>& piece, Lanes (*sums)[kBlocks]) {
  constexpr int64_t kOutputs = kBlocks * kLanes, kStep = Step<T>::kWidth * kLanes;
  if constexpr (kWidens<T>) {
    if (p.num_rows > kTogether) {
      const int64_t begin = piece.begin, count = piece.end - begin;
      float wide[kPieceBytes / sizeof(T) * kOutputs];
      for (int64_t d = 0; d < count; d += Step<T>::kWidth)
        for (int b = 0; b < kBlocks; b++) {
          const auto w = Step<T>::load(piece.weights + (begin + d) * kOutputs + b * kStep);
          store(w.even, wide + d * kOutputs + b * kLanes);
          store(w.odd, wide + (d + 1) * kOutputs + b * kLanes);
        }
      return sum_piece<float, kBlocks, kAskedFor>(
          {p.wide + begin, wide, p.width, 0, count, 0, piece.goes_on}, p.num_rows, sums);
    }
  }
  sum_piece<T, kBlocks, kAskedFor>(piece, p.num_rows, sums);
}

// A part of the width piece by piece, each of which asks for the weights of a later one first.
template <typename T, int kBlocks, Stay kStay>
inline void sum_pieces(const Product<T>& p, const T* weights, int64_t begin, int64_t end,
                       Lanes (*sums)[kBlocks]) {
  constexpr int64_t kOutputs = kBlocks * kLanes;
  for (int64_t at = begin, next; at < end; at = next) {
    next = std::min(at + kPieceBytes / int64_t(sizeof(T)), end);
    const int64_t lines = (next - at) * kOutputs * sizeof(T) / kLine;
    for (int64_t line = 0; line < lines; line++)
      ask_for<kStay>(weights + at * kOutputs, p.reading.ahead + line * kLine);
    sum_near_piece<T, kBlocks>(p, {p.rows, weights, p.width, at, next, 0, at > begin}, sums);
  }
}

template <typename T, int kBlocks, Stay kStay>
inline void sum_parts(const Product<T>& p, const T* weights, Lanes (*sums)[kBlocks]) {
  Lanes later[kNear][kBlocks];
  for (int64_t begin = 0, end; begin < p.width; begin = end) {
    // A short rest is no part of its own, which a row alone would wait for.
    end = begin + kPart + kPart / 2 < p.width ? begin + kPart : p.width;
    Lanes(*part)[kBlocks] = begin == 0 ? sums : later;
    if (kManyInPieces && p.num_rows > kTogether)
      sum_pieces<T, kBlocks, kStay>(p, weights, begin, end, part);
    else
      sum_piece<T, kBlocks, kStay>({p.rows, weights, p.width, begin, end, p.reading.ahead, false},
                                   p.num_rows, part);
    for (int64_t r = 0; begin > 0 && r < p.num_rows; r++)
      for (int b = 0; b < kBlocks; b++) sums[r][b] += later[r][b];
  }
}

// Sums of a group; `num_rows` of `p` is at most `kNear`.
template <typename T, int kBlocks>
DRAFTSMITH_ONCE void sum_near(const Product<T>& p, const T* weights, Lanes (*sums)[kBlocks]) {
  switch (p.reading.stay) {
    case kPast:
      return sum_parts<T, kBlocks, kPast>(p, weights, sums);
    case kFarther:
      return sum_parts<T, kBlocks, kFarther>(p, weights, sums);
    default:
      return sum_parts<T, kBlocks, kNearest>(p, weights, sums);
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
inline void store_first(Lanes x, T* to, int64_t count) {
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
      store_first(sums[r][b] + bias, p.out + r * p.num_outputs + first, count);
  }
}

// Outputs of a group in `kBlocks` registers.
template <typename T, int kBlocks>
void multiply_group(const Product<T>& p, int64_t group, const T* weights) {
  Lanes sums[kNear][kBlocks];
  for (int64_t row = 0; row < p.num_rows; row += kNear) {
    Product<T> near = p;
    near.rows += row * p.width;
    if (p.wide) near.wide += row * p.width;
    near.out += row * p.num_outputs;
    near.num_rows = p.num_rows - row < kNear ? p.num_rows - row : kNear;
    sum_near<T, kBlocks>(near, weights, sums);
    finish<T, kBlocks>(near, group, sums);
  }
}

template <typename T>
void multiply(const Product<T>& p, int threads) {
  each((p.num_outputs + kGroup - 1) / kGroup, threads, [=](int64_t group) {
    const T* weights = p.weights + group * p.width * kGroup;
    const int64_t outputs = outputs_of(p.num_outputs - group * kGroup);
    if (outputs == kGroup)
      multiply_group<T, 3>(p, group, weights);
    else if (outputs == 2 * kLanes)
      multiply_group<T, 2>(p, group, weights);
    else
      multiply_group<T, 1>(p, group, weights);
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

// All groups.
template <typename T>
void lay_out(const T* weights, T* out, int64_t width, int64_t num_outputs, int threads) {
  each((num_outputs + kGroup - 1) / kGroup, threads, [=](int64_t group) {
    lay_out_group(weights, out + group * width * kGroup, width, num_outputs, group);
  });
}

}  // namespace

#define PRODUCTS(name, T)                                                                          \
  extern "C" void multiply_##name(const T* rows, const T* weights, const T* bias, T* out,          \
                                  int64_t num_rows, int64_t width, int64_t num_outputs,            \
                                  int64_t readings, int threads) {                                 \
    multiply<T>({rows, weights, bias, wide_rows(rows, num_rows, width), out, num_rows, width,      \
                 num_outputs, reading_of(readings, num_rows)},                                     \
                threads);                                                                          \
  }                                                                                                \
  extern "C" void lay_out_##name(const T* weights, T* out, int64_t width, int64_t num_outputs,     \
                                 int threads) {                                                    \
    lay_out<T>(weights, out, width, num_outputs, threads);                                         \
  }

PRODUCTS(float32, float)
PRODUCTS(bfloat16, Bfloat16)
