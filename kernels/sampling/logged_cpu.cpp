// Distributions as records hold them, row by row: the likeliest tokens, the mass outside them, the
// drafted token's own logprob and the norm under a temperature. logged.py compiles it and says
// what the arguments are.

#include <algorithm>
#include <functional>

#include "../host_numbers.h"

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kGroups = 128;  // token v is of group v % kGroups
constexpr int64_t kSpan = 1024;   // summed in float32; such sums are added in float64
constexpr int64_t kRoom = 512;    // candidates at once

struct Candidates {
  float values[kRoom];
  int32_t tokens[kRoom];  // ascending
  int64_t count = 0;

  // Leaves the `kept` best, and returns the value of the last of them.
  float prune(int64_t kept) {
    float sorted[kRoom];
    std::copy(values, values + count, sorted);
    std::nth_element(sorted, sorted + kept - 1, sorted + count, std::greater<float>());
    const float last = sorted[kept - 1];
    int64_t equal = kept;
    for (int64_t i = 0; i < count; i++) equal -= values[i] > last;
    const int64_t before = count;
    count = 0;
    for (int64_t i = 0; i < before; i++)
      if (values[i] > last || (values[i] == last && equal-- > 0))
        values[count] = values[i], tokens[count++] = tokens[i];
    return last;
  }

  // Number of candidates that come before each: larger ones, and smaller tokens of its value.
  void order(int32_t* places) const {
    const int32_t number = int32_t(count);
    for (int32_t j = 0; j < number; j++) places[j] = 0;
    for (int32_t i = 0; i < number; i++) {
      const float value = values[i];
      for (int32_t j = 0; j < number; j++)
        places[j] += (value > values[j]) | ((value == values[j]) & (i < j));
    }
  }
};

// The `kept`-th largest of the maxima of all groups: at least `kept` tokens reach it.
template <typename T>
float reached(const T* x, int64_t vocab, int64_t kept, float* largest) {
  float maxima[kGroups];
  for (float& one : maxima) one = -INFINITY;
  int64_t v = 0;
  for (; v + kGroups <= vocab; v += kGroups)
    for (int64_t i = 0; i < kGroups; i++) {
      const float value = widened(x[v + i]);
      maxima[i] = value > maxima[i] ? value : maxima[i];
    }
  for (; v < vocab; v++) {
    const float value = widened(x[v]);
    maxima[v % kGroups] = value > maxima[v % kGroups] ? value : maxima[v % kGroups];
  }
  float found = INFINITY, most = -INFINITY;
  int32_t larger[kGroups] = {};
  for (int64_t i = 0; i < kGroups; i++)
    for (int64_t j = 0; j < kGroups; j++) larger[j] += maxima[i] > maxima[j];
  for (int64_t i = 0; i < kGroups; i++) {
    if (larger[i] < kept && maxima[i] < found) found = maxima[i];
    if (maxima[i] > most) most = maxima[i];
  }
  *largest = most;
  return found;
}

// Sum of e^((x - most) * scale) over all tokens.
template <typename T>
double sum_of_powers(const T* x, int64_t vocab, float most, float scale) {
  double total = 0;
  for (int64_t begin = 0; begin < vocab; begin += kSpan) {
    const int64_t end = std::min(vocab, begin + kSpan);
    float powers[kSpan], sum = 0;
    for (int64_t v = begin; v < end; v++)
      powers[v - begin] = exponential((widened(x[v]) - most) * scale);
    for (int64_t i = 0; i < end - begin; i++) sum += powers[i];
    total += sum;
  }
  return total;
}

// The tokens that reach `least`, the `kept` best of them at least.
template <typename T>
void collect(const T* x, int64_t vocab, int64_t kept, float least, Candidates& found) {
  bool beyond = false;  // of those that equal `least`, no more are wanted
  for (int64_t begin = 0; begin < vocab; begin += kLanes) {
    const int64_t end = std::min(vocab, begin + kLanes);
    int32_t hits = 0;
    for (int64_t v = begin; v < end; v++) hits += widened(x[v]) >= least;
    if (hits == 0) continue;
    for (int64_t v = begin; v < end; v++) {
      const float value = widened(x[v]);
      found.values[found.count] = value, found.tokens[found.count] = int32_t(v);
      found.count += beyond ? value > least : value >= least;
    }
    if (found.count > kRoom - kLanes) least = found.prune(kept), beyond = true;
  }
}

template <typename T>
void reduce(const T* x, int64_t vocab, int64_t kept, int64_t token, float temperature,
            int32_t* ids, float* logprobs, float* rest, int64_t rows) {
  float most;
  const float least = reached(x, vocab, kept, &most);
  const double total = sum_of_powers(x, vocab, most, 1), norm = log(total);
  const bool scaled = temperature != 0 && temperature != 1;
  if (total != total) {
    // A NaN or an infinity: nothing is known of any token.
    for (int64_t i = 0; i < kept; i++) ids[i] = int32_t(i), logprobs[i] = NAN;
    rest[0] = rest[2 * rows] = NAN, rest[rows] = scaled ? NAN : 0;
    return;
  }
  Candidates found;
  collect(x, vocab, kept, least, found);
  int32_t places[kRoom];
  found.order(places);
  for (int64_t i = 0; i < found.count; i++)
    if (places[i] < kept) ids[places[i]] = found.tokens[i], logprobs[places[i]] = found.values[i];
  float powers[kRoom], inside = 0;
  for (int64_t i = 0; i < kept; i++) powers[i] = exponential(logprobs[i] - most);
  for (int64_t i = 0; i < kept; i++) inside += powers[i];
  for (int64_t i = 0; i < kept; i++) logprobs[i] = float(logprobs[i] - most - norm);
  rest[0] = float(std::max(0.0, 1 - inside / total));
  const double under = scaled ? log(sum_of_powers(x, vocab, most, 1 / temperature)) : 0;
  rest[rows] = scaled ? float(under - norm / temperature) : 0;
  rest[2 * rows] = float(widened(x[token]) - most - norm);
}

template <typename T>
void reduce_rows(const T* table, int64_t stride, const int64_t* tokens, const float* temperatures,
                 int64_t rows, int64_t vocab, int64_t kept, int32_t* ids, float* logprobs,
                 float* rest, int threads) {
  each(rows, threads, [=](int64_t row) {
    reduce(table + row * stride, vocab, kept, tokens[row], temperatures ? temperatures[row] : 0,
           ids + row * kept, logprobs + row * kept, rest + row, rows);
  });
}

}  // namespace

#define REDUCE(name, T)                                                                            \
  extern "C" void reduce_##name(const T* table, int64_t stride, const int64_t* tokens,             \
                                const float* temperatures, int64_t rows, int64_t vocab,            \
                                int64_t kept, int32_t* ids, float* logprobs, float* rest,          \
                                int threads) {                                                     \
    reduce_rows<T>(table, stride, tokens, temperatures, rows, vocab, kept, ids, logprobs, rest,    \
                   threads);                                                                       \
  }

REDUCE(float32, float)
REDUCE(bfloat16, Bfloat16)
