// Divergences of rows of logits with their gradients. rows.py has the formulas, compiles
// this and says what the arguments are. Rows that share a target row follow each other, and its
// distribution is computed once for them.

#include <algorithm>
#include <memory>
#include <vector>

#include "../host_numbers.h"

namespace {

constexpr float kLogZero = -1e30f, kLeastLogP = -100.0f;  // as rows.py has them
constexpr double kLeastAlpha = 1e-30, kLeastDeviation = 1e-4;
constexpr int64_t kSpan = 1024;  // summed in float32; such sums are added in float64

enum Kind { kForwardKl, kReverseKl, kTv, kTvdPlusPlus, kLkAlpha, kLkHybrid, kCe };

// True where b in `Push` is not 0.
constexpr bool has_below(int kind) {
  return kind == kTv || kind == kTvdPlusPlus || kind == kLkAlpha || kind == kLkHybrid;
}

// At least `least`; a NaN stays one.
inline float at_least(float x, float least) { return x < least ? least : x; }

// Logs of a softmax. In float64, since float32 differences of large logits may be taken in any order.
struct Norm {
  float most;
  double log_total;  // of e^x
  float of(float x) const { return at_least(float(x - log_total), kLogZero); }
};

// e^(x - most) of all logits into `powers`, and their sum.
template <typename T>
double powers_of(const T* x, int64_t count, float most, float* powers) {
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += kSpan) {
    const int64_t end = std::min(count, begin + kSpan);
    float sum = 0;
    for (int64_t v = begin; v < end; v++) powers[v] = exponential(widened(x[v]) - most);
    for (int64_t v = begin; v < end; v++) sum += powers[v];
    total += sum;
  }
  return total;
}

// The target's distribution on the draft vocabulary.
struct Target {
  const float *log_p, *p;  // [Vd]
  double mass;
  Norm norm;
};

template <typename U>
Target target_of(const U* x, int64_t vocab, const int64_t* map, int64_t count, float* log_p,
                 float* p) {
  Target target = {log_p, p, 0, {largest(x, vocab), 0}};
  double total = 0;
  for (int64_t begin = 0; begin < vocab; begin += kSpan) {
    const int64_t end = std::min(vocab, begin + kSpan);
    float powers[kSpan];
    total += powers_of(x + begin, end - begin, target.norm.most, powers);
  }
  target.norm.log_total = target.norm.most + log(total);
  for (int64_t begin = 0; begin < count; begin += kSpan) {
    const int64_t end = std::min(count, begin + kSpan);
    float sum = 0;
    for (int64_t v = begin; v < end; v++)
      log_p[v] = target.norm.of(widened(x[map ? map[v] : v])), p[v] = exponential(log_p[v]);
    for (int64_t v = begin; v < end; v++) sum += p[v];
    target.mass += sum;
  }
  return target;
}

struct Sums {
  double alpha = 0;    // sum of min(p, q)
  double below = 0;    // sum of q where q < p
  double above = 0;    // sum of p where q < p
  double against = 0;  // sum of p (log p - log q); for reverse-kl of q (log p - log q)
};

// What reverse-kl holds log q against: a token that the target rules out costs so much.
inline float held(float log_p) { return at_least(log_p, kLeastLogP); }

template <int kKind, typename T>
Sums sums_of(const T* z, const Norm& norm, const float* q, const Target& target, int64_t count) {
  Sums sums;
  for (int64_t begin = 0; begin < count; begin += kSpan) {
    const int64_t end = std::min(count, begin + kSpan);
    float alpha = 0, below = 0, above = 0, against = 0;
    for (int64_t v = begin; v < end; v++) {
      const float p = target.p[v];
      alpha += p < q[v] ? p : q[v];
      if constexpr (has_below(kKind)) below += q[v] < p ? q[v] : 0;
      if constexpr (kKind == kTvdPlusPlus) above += q[v] < p ? p : 0;
      if constexpr (kKind == kForwardKl || kKind == kLkHybrid)
        against += p * (target.log_p[v] - norm.of(widened(z[v])));
      if constexpr (kKind == kReverseKl)
        against += q[v] * (held(target.log_p[v]) - norm.of(widened(z[v])));
    }
    sums.alpha += alpha, sums.below += below, sums.above += above, sums.against += against;
  }
  return sums;
}

// push_v = a p_v + b q_v [q_v < p_v], for reverse-kl q_v (log p_v - log q_v), for ce [v = x]; and
// its sum.
struct Push {
  double loss, a, b, total;
};

template <int kKind>
Push push_of(const Sums& sums, double mass, double outside, double log_q_x, bool has_token,
             double parameter) {
  const double distance = std::max(1 - sums.alpha, 0.0);
  if constexpr (kKind == kForwardKl) return {sums.against, 1, 0, mass};
  if constexpr (kKind == kReverseKl) return {-sums.against, 0, 0, sums.against};
  if constexpr (kKind == kTv) return {distance, 0, 1, sums.below};
  if constexpr (kKind == kTvdPlusPlus) {
    const double q_mass = std::min(sums.below, 1.0), p_mass = std::min(sums.above + outside, 1.0);
    const double b = 1 / std::max(sqrt(q_mass * (1 - q_mass)), kLeastDeviation);
    return {2 * (asin(sqrt(p_mass)) - asin(sqrt(q_mass))), 0, b, b * sums.below};
  }
  if constexpr (kKind == kLkAlpha) {
    const double alpha = std::max(sums.alpha, kLeastAlpha);
    return {-log(alpha), 0, 1 / alpha, sums.below / alpha};
  }
  if constexpr (kKind == kLkHybrid) {
    const double a = exp(-parameter * sums.alpha), b = 1 - a;
    return {a * sums.against + b * distance, a, b, a * mass + b * sums.below};
  }
  return {-log_q_x, 0, 0, has_token ? 1.0 : 0.0};
}

// The gradient over the logits of a row.
template <int kKind, typename T>
void write_gradient(T* z, const Norm& norm, const float* q, const Target& target, int64_t count,
                    const Push& push, int64_t column, float weight) {
  const float a = push.a, b = push.b, total = push.total;
  for (int64_t v = 0; v < count; v++) {
    float pushed = 0;
    if constexpr (kKind == kForwardKl || kKind == kLkHybrid) pushed += a * target.p[v];
    if constexpr (has_below(kKind)) pushed += q[v] < target.p[v] ? b * q[v] : 0;
    if constexpr (kKind == kReverseKl)
      pushed += q[v] * (held(target.log_p[v]) - norm.of(widened(z[v])));
    narrow(weight * (q[v] * total - pushed), &z[v]);
  }
  if (kKind == kCe && column >= 0) narrow(weight * (q[column] * total - 1), &z[column]);
}

struct Results {
  float *loss, *alpha, *keep, *outside;  // [t]; `keep` null without tokens
};

template <int kKind, typename T>
void row(T* z, int64_t count, const Target& target, float weight, bool has_map, int64_t column,
         double parameter, float* q, const Results& results, int64_t at) {
  Norm norm = {largest(z, count), 0};
  const double total = powers_of(z, count, norm.most, q);
  norm.log_total = norm.most + log(total);
  const float scale = float(1 / total);
  for (int64_t v = 0; v < count; v++) q[v] *= scale;
  Sums sums = sums_of<kKind>(z, norm, q, target, count);
  // Comparisons pass a NaN over.
  if (target.mass != target.mass || total != total) sums.alpha = sums.below = sums.above = NAN;
  const double outside = has_map ? std::max(1 - target.mass, 0.0) : 0;
  const float log_q_x = column < 0 ? 0 : norm.of(widened(z[column]));
  const Push push =
      push_of<kKind>(sums, target.mass, outside, log_q_x, column >= 0, parameter);
  if (results.keep) {
    const float apart = column < 0 ? 0 : log_q_x - target.log_p[column];
    results.keep[at] = column < 0 ? 0 : expf(apart > 0 ? 0 : apart);
  }
  results.loss[at] = weight != 0 ? float(push.loss) : 0;
  results.alpha[at] = float(sums.alpha), results.outside[at] = float(outside);
  if (weight != 0)
    write_gradient<kKind>(z, norm, q, target, count, push, column, weight);
  else
    for (int64_t v = 0; v < count; v++) narrow(0, &z[v]);
}

template <int kKind, typename T, typename U>
void rows(T* draft, int64_t draft_stride, const U* target, int64_t target_stride,
          const int64_t* which, const float* weights, const int64_t* map, const int64_t* columns,
          double parameter, int64_t count, int64_t num_draft, int64_t distinct, int64_t vocab,
          const Results& results, int threads) {
  // Rows first[d] to first[d + 1] have target row d.
  std::vector<int64_t> first(distinct + 1, 0);
  for (int64_t i = 0; i < count; i++) first[(which ? which[i] : i) + 1]++;
  for (int64_t d = 0; d < distinct; d++) first[d + 1] += first[d];
  each(distinct, threads, [&](int64_t d) {
    std::unique_ptr<float[]> room(new float[3 * num_draft]);
    float *log_p = room.get(), *p = log_p + num_draft, *q = p + num_draft;
    const Target known =
        target_of(target + d * target_stride, vocab, map, num_draft, log_p, p);
    for (int64_t i = first[d]; i < first[d + 1]; i++)
      row<kKind>(draft + i * draft_stride, num_draft, known, weights[i], map != nullptr,
                 columns ? columns[i] : -1, parameter, q, results, i);
  });
}

}  // namespace

#define OF_KIND(KIND)                                                                              \
  case KIND:                                                                                       \
    return rows<KIND>(draft, draft_stride, target, target_stride, which, weights, map, columns,    \
                      parameter, count, num_draft, distinct, vocab, results, threads);

#define DIVERGE(NAME, T, U)                                                                        \
  extern "C" void diverge_##NAME(                                                                  \
      int kind, T* draft, int64_t draft_stride, const U* target, int64_t target_stride,            \
      const int64_t* which, const float* weights, const int64_t* map, const int64_t* columns,      \
      double parameter, int64_t count, int64_t num_draft, int64_t distinct, int64_t vocab,         \
      float* loss, float* alpha, float* keep, float* outside, int threads) {                       \
    const Results results = {loss, alpha, keep, outside};                                          \
    switch (kind) {                                                                                \
      OF_KIND(kForwardKl)                                                                          \
      OF_KIND(kReverseKl)                                                                          \
      OF_KIND(kTv)                                                                                 \
      OF_KIND(kTvdPlusPlus)                                                                        \
      OF_KIND(kLkAlpha)                                                                            \
      OF_KIND(kLkHybrid)                                                                           \
      OF_KIND(kCe)                                                                                 \
    }                                                                                              \
  }

DIVERGE(float32_float32, float, float)
DIVERGE(float32_bfloat16, float, Bfloat16)
DIVERGE(bfloat16_float32, Bfloat16, float)
DIVERGE(bfloat16_bfloat16, Bfloat16, Bfloat16)
