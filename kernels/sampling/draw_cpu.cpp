// Draws from a request's distribution, and verification of a chain or a sure tree by it, from raw logits. The
// reference is torch's: filters.py, random_streams.py, chain.py and tree.py say what is computed.
// draw.py, chain.py and random_streams.py compile it.
//
// Sums and logarithms are rounded otherwise than torch rounds them. Wherever that might change which
// token is drawn or kept nothing is decided, and the caller takes torch's way: so tokens are the same.

#include <float.h>
#include <math.h>
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "../host_numbers.h"

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr int64_t kPurposes = 8, kAccept = 1, kResidual = 2, kBonus = 3;
// Bounds of what torch's rounding and this file's differ by: relative for a probability over the
// token's time of arrival, absolute for a logprob, and for a sum of probabilities.
constexpr float kRaceError = 1e-5f, kLogprobError = 1e-5f, kMassError = 5e-6f;
constexpr float kMostError = 1e-2f;  // beyond it bounds say nothing

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t stream_key(int64_t seed, int64_t position, int64_t purpose) {
  const uint64_t counter = uint64_t(position) * kPurposes + uint64_t(purpose);
  return mix(mix(uint64_t(seed) + kGolden) + counter * kGolden);
}

// ln x of normal x > 0.
inline float logarithm(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int32_t shifted = bits - 0x3F3504F3;  // of the square root of a half
  const float exponent = float(shifted >> 23);
  bits = (shifted & 0x7FFFFF) + 0x3F3504F3;
  float m;
  memcpy(&m, &bits, sizeof m);
  m -= 1.0f;
  float y = 7.0376836292e-2f;
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * m * m - 0.5f * m * m;
  return (m + y) + 0.69314718056f * exponent;
}

// Uniform numbers u of a race over the vocabulary.
void uniforms(uint64_t key, float* out, int64_t tokens) {
  for (int64_t v = 0; v < tokens; v++) {
    const uint64_t x = mix(key + uint64_t(v + 1) * kGolden);
    const float u = (float(int64_t(x >> 12)) + 0.5f) * 0x1p-52f;
    out[v] = u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f;
  }
}

// Times of arrival E ~ Exp(1) of every token: -log1p(-u).
void arrivals(uint64_t key, float* out, int64_t tokens) {
  uniforms(key, out, tokens);
  for (int64_t v = 0; v < tokens; v++) {
    const float u = out[v];
    const float series =
        u * (1.0f + u * (0.5f + u * (0.33333334f + u * (0.25f + u * (0.2f + u * 0.16666667f)))));
    out[v] = u < 0x1p-5f ? series : -logarithm(1.0f - u);
  }
}

// Integers in the order of the numbers; both zeros have one.
inline int32_t rank(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits = bits == INT32_MIN ? 0 : bits;
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

float of_rank(int64_t rank) {
  const int32_t bits = int32_t(rank) ^ ((int32_t(rank) >> 31) & 0x7FFFFFFF);
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

struct Options {
  const float* temperature;
  const int64_t* top_k;
  const double* top_p;
  const float* min_p;
};

// A distribution: its filters keep the tokens whose logits are `sure` or more, and none below
// `least`; torch decides on those between.
struct Distribution {
  const float* logits;
  int64_t tokens;
  float top, sure, least;
  double log_mass;
  float error;  // of a logprob
};

struct Scratch {
  std::vector<float> p, e, upper, masses;
  std::vector<int64_t> banned;
  void hold(int64_t tokens) {
    if (int64_t(p.size()) < tokens)
      for (auto* one : {&p, &e, &upper, &masses}) one->resize(tokens);
  }
};

Scratch& scratch(int64_t tokens) {
  static thread_local Scratch own;
  own.hold(tokens);
  return own;
}

void keep_top_k(Distribution* d, int64_t most, Scratch& own) {
  if (most >= d->tokens) return;
  const float* logits = d->logits;
  int64_t tokens = d->tokens, low = rank(-INFINITY), high = int64_t(rank(d->top)) + 1;
  while (high - low > 1) {  // the largest rank that `most` tokens reach
    const int32_t middle = int32_t(low + (high - low) / 2);
    int64_t count = 0;
    for (int64_t v = 0; v < tokens; v++) count += rank(logits[v]) >= middle;
    (count >= most ? low : high) = middle;
    if (count < most || count > tokens / 8) continue;
    float* reaching = own.e.data();  // of the others none counts any more
    count = 0;
    for (int64_t v = 0; v < tokens; v++) {
      const float x = logits[v];
      reaching[count] = x;
      count += rank(x) >= middle;
    }
    logits = reaching;
    tokens = count;
  }
  const float last = of_rank(low);
  d->sure = d->least = last > -FLT_MAX ? last : -FLT_MAX;
}

// Tokens that a nucleus may end at.
struct Likely {
  float *logits, *masses;
  int64_t count;
};

// The smallest rank in (low, high] above whose tokens there is less than `mass`; `high` is one.
int64_t reached(const Likely& likely, double mass, int64_t low, int64_t high) {
  while (high - low > 1) {
    const int32_t middle = int32_t(low + (high - low) / 2);
    double above = 0;
    for (int64_t i = 0; i < likely.count; i++)
      above += rank(likely.logits[i]) > middle ? double(likely.masses[i]) : 0.0;
    (above < mass ? high : low) = middle;
  }
  return high;
}

bool keep_top_p(Distribution* d, double top_p, Scratch& own) {
  double total = 0;
  float* masses = own.masses.data();
  const Distribution known = *d;  // that no write to `masses` may change: else there are no vectors
  for (int64_t v = 0; v < known.tokens; v++) {
    const float x = known.logits[v], mass = exponential(x - known.top);
    masses[v] = x >= known.least ? mass : 0.0f;
  }
  for (int64_t v = 0; v < known.tokens; v++) total += double(masses[v]);
  const double error = kMassError + 5e-10 * double(d->tokens);
  if (top_p <= error) return false;
  // All tokens that are each less likely than an equal share of what is left out are left out.
  const double rest = std::max(1 - top_p - error, 0.0) / double(d->tokens);
  const float unlikely = float(double(d->top) + log(rest) - 1);
  const int64_t low = rest > 0 && unlikely > -FLT_MAX ? rank(unlikely) : rank(-INFINITY) - 1;
  Likely likely = {own.e.data(), own.upper.data(), 0};
  for (int64_t v = 0; v < known.tokens; v++) {
    likely.logits[likely.count] = known.logits[v];
    likely.masses[likely.count] = masses[v];
    likely.count += rank(known.logits[v]) > low;
  }
  int64_t sure = reached(likely, (top_p - error) * total, low, rank(d->top));
  const int64_t least = reached(likely, (top_p + error) * total, low, sure);
  // Of several that are equally likely the order decides.
  int64_t equal = 0;
  for (int64_t i = 0; i < likely.count; i++) equal += rank(likely.logits[i]) == int32_t(sure);
  sure += equal > 1;
  const float sure_logit = of_rank(sure), least_logit = of_rank(least);
  d->sure = sure_logit > d->sure ? sure_logit : d->sure;
  d->least = least_logit > d->least ? least_logit : d->least;
  return true;
}

void keep_min_p(Distribution* d, float min_p) {
  const double last = double(d->top) + log(double(min_p));
  const double error = kLogprobError + 2.4e-7 * (fabs(double(d->top)) + fabs(last));
  float sure = float(last + error);
  const float least = float(last - error);
  sure = sure < d->top ? sure : d->top;  // the likeliest are kept
  d->sure = sure > d->sure ? sure : d->sure;
  d->least = least > d->least ? least : d->least;
}

// Row `row` of raw logits by its options, into `out`. False where torch has to decide.
bool prepare(const float* raw, const Options& options, int64_t row, int64_t tokens, float* out,
             Scratch& own, Distribution* d) {
  const float temperature = options.temperature[row];
  const bool greedy = temperature == 0;
  const float divisor = greedy ? 1.0f : temperature;
  for (int64_t v = 0; v < tokens; v++) {
    float x = raw[v] == raw[v] ? raw[v] : -INFINITY;
    x = (x < FLT_MAX ? x : FLT_MAX) / divisor;
    out[v] = x < FLT_MAX ? x : FLT_MAX;
  }
  *d = {out, tokens, largest(out, tokens), -FLT_MAX, -FLT_MAX, 0, 0};
  if (d->top == -INFINITY) return false;
  if (greedy) {
    d->sure = d->least = d->top;
    int64_t best = 0;  // the first of equal ones
    while (out[best] != d->top) best++;
    for (int64_t v = 0; v < tokens; v++) out[v] = -INFINITY;
    out[best] = d->top = d->sure = d->least = 0;
    return true;
  }
  if (options.top_k[row] > 0) keep_top_k(d, options.top_k[row], own);
  if (options.top_p[row] < 1 && !keep_top_p(d, options.top_p[row], own)) return false;
  if (options.min_p[row] > 0) keep_min_p(d, options.min_p[row]);
  return true;
}

// Its normaliser. False where the bounds say nothing.
bool normalise(Distribution* d) {
  float sure = 0, unsure = 0;
  for (int64_t v = 0; v < d->tokens; v++) {
    const float x = d->logits[v], mass = exponential(x - d->top);
    sure += x >= d->sure ? mass : 0.0f;
    unsure += x >= d->least && x < d->sure ? mass : 0.0f;
  }
  if (!(sure > 0)) return false;
  d->log_mass = double(d->top) + log(double(sure));
  d->error = kLogprobError + 1e-9f * float(d->tokens) + unsure / sure;
  return d->error < kMostError;
}

// The one token whose upper bound reaches the largest lower bound; -1 where there are several.
int64_t winner(const float* upper, float bound, int64_t tokens) {
  if (!(bound > 0)) return -1;
  int64_t count = 0, sum = 0;
  for (int64_t v = 0; v < tokens; v++) {
    const int64_t reaches = upper[v] >= bound;
    count += reaches;
    sum += reaches ? v : 0;
  }
  return count == 1 ? sum : -1;
}

// The token that `d` draws by the stream `key`, without those that are `banned`; -1: not decided.
int64_t race(const Distribution& d, uint64_t key, const std::vector<int64_t>& banned, Scratch& own) {
  const float error = kRaceError + 2.4e-7f * fabsf(d.top);
  if (!(error < kMostError)) return -1;
  arrivals(key, own.e.data(), d.tokens);
  float *upper = own.upper.data(), *lower = own.e.data();
  const float more = 1 + error, less = 1 - error, top = d.top, sure = d.sure, least = d.least;
  for (int64_t v = 0; v < d.tokens; v++) {
    const float x = d.logits[v], first = exponential(x - top) / lower[v];
    upper[v] = x >= least ? first * more : 0.0f;
    lower[v] = x >= sure ? first * less : 0.0f;
  }
  for (const int64_t token : banned) upper[token] = lower[token] = 0;
  return winner(upper, largest(lower, d.tokens), d.tokens);
}

// The same of max(p - q, 0).
int64_t race_of_residual(const Distribution& p, const Distribution& q, uint64_t key, Scratch& own) {
  arrivals(key, own.e.data(), p.tokens);
  float *upper = own.upper.data(), *lower = own.e.data();
  const float error = p.error + q.error + kRaceError, more = 1 + error, less = 1 - error;
  const float p_mass = float(p.log_mass), q_mass = float(q.log_mass), sure = p.sure,
              least = p.least;
  // Rounding of the difference of a logit and the normaliser.
  const float wide = 1.2e-7f * (fabsf(p_mass) + fabsf(q_mass));
  if (!(wide < kMostError)) return -1;
  for (int64_t v = 0; v < p.tokens; v++) {
    const float x = p.logits[v], y = q.logits[v];
    const float a = exponential(x < p_mass ? x - p_mass : 0.0f);
    const float b = y == y ? exponential(y < q_mass ? y - q_mass : 0.0f) : 0.0f;
    const float over = 1 / lower[v];
    const float high = (a * (more + wide) - b * (less - wide)) * more * over;
    const float low = (a * (less - wide) - b * (more + wide)) * less * over;
    upper[v] = x >= least ? high : 0.0f;
    lower[v] = x >= sure ? low : 0.0f;
  }
  return winner(upper, largest(lower, p.tokens), p.tokens);
}

double log_uniform(uint64_t key) { return log((double(mix(key) >> 12) + 0.5) * 0x1p-52); }

// q as it was sampled from: 0 where nothing is to be decided by it.
bool drawn_from(const float* logits, int64_t tokens, Distribution* q) {
  *q = {logits, tokens, largest(logits, tokens), -FLT_MAX, -FLT_MAX, 0, 0};
  return q->top > -INFINITY && q->top < FLT_MAX && normalise(q);
}

// Drafts of a row: node i hangs under node `parents[i]`, -1 the root; without parents they are a chain.
struct Drafted {
  const int64_t *tokens, *parents;
  int64_t length;
  const float* q;  // of a chain [length, V], or null for sure drafts
  int64_t seed, position;

  // The first node from `node` on under node `slot - 1`; `length`: none.
  int64_t child(int64_t slot, int64_t node) const {
    if (!parents) return node == slot ? node : length;
    while (node < length && parents[node] != slot - 1) node++;
    return node;
  }
};

struct Decision {
  int64_t accepted, token;
  int64_t* nodes;  // that were kept
  int64_t slot() const { return accepted ? nodes[accepted - 1] + 1 : 0; }
};

// The first of the likeliest tokens; -1 of a row without mass.
int64_t likeliest(const float* raw, int64_t tokens) {
  const float top = largest(raw, tokens), least = top < FLT_MAX ? top : FLT_MAX;
  if (top == -INFINITY) return -1;
  int64_t best = 0;
  while (!(raw[best] >= least)) best++;
  return best;
}

// `verify` of a greedy row, whose distributions are one-hot.
bool verify_greedy(const float* raw, int64_t stride, int64_t tokens, const Drafted& drafts,
                   Decision* found) {
  for (;;) {
    const int64_t slot = found->slot();
    const int64_t token = found->token = likeliest(raw + slot * stride, tokens);
    if (token < 0) return false;
    int64_t node = drafts.child(slot, slot);
    while (node < drafts.length && drafts.tokens[node] != token) node = drafts.child(slot, node + 1);
    if (node >= drafts.length || (drafts.q && !(drafts.q[node * tokens + token] > -INFINITY))) return true;
    found->nodes[found->accepted++] = node;
  }
}

// False where torch has to decide.
bool verify(const float* raw, int64_t stride, const Options& options, int64_t row, int64_t tokens,
            const Drafted& drafts, Decision* found) {
  if (options.temperature[row] == 0) return verify_greedy(raw, stride, tokens, drafts, found);
  Scratch& own = scratch(tokens);
  Distribution p, q;
  for (;;) {
    const int64_t slot = found->slot(), position = drafts.position + found->accepted;
    if (!prepare(raw + slot * stride, options, row, tokens, own.p.data(), own, &p)) return false;
    own.banned.clear();
    int64_t node = drafts.child(slot, slot), tests = 0;
    if (node < drafts.length && !normalise(&p)) return false;
    double left = 1;  // of the mass, without the siblings that were rejected
    bool keeps = false;
    for (; node < drafts.length; node = drafts.child(slot, node + 1), tests++) {
      const int64_t token = drafts.tokens[node];
      if (token < 0 || token >= tokens) continue;
      double log_q = 0;
      if (drafts.q) {
        if (!drawn_from(drafts.q + node * tokens, tokens, &q)) return false;
        if (!(q.logits[token] > -INFINITY)) continue;
        log_q = double(q.logits[token]) - q.log_mass;
      }
      const float x = p.logits[token];
      if (x >= p.least && x < p.sure) return false;
      const bool again = std::find(own.banned.begin(), own.banned.end(), token) != own.banned.end();
      own.banned.push_back(token);
      if (again || !(x >= p.sure && x > -INFINITY)) continue;
      const uint64_t test = stream_key(drafts.seed, position, kAccept) + uint64_t(tests) * kGolden;
      const double log_p = double(x) - p.log_mass;
      const double gap = log_p - log(left) - (log_uniform(test) + log_q);
      const double error = double(p.error) / left + (drafts.q ? double(q.error) : 0.0) +
                           2.4e-7 * fabs(log_p) + 2.4e-7 * fabs(log_q);
      if (!(fabs(gap) > error)) return false;
      if ((keeps = gap > 0)) break;
      left -= exp(log_p);
      if (drafts.child(slot, node + 1) < drafts.length && !(left > kMostError)) return false;
    }
    if (keeps) {
      found->nodes[found->accepted++] = node;
      continue;
    }
    const uint64_t key = stream_key(drafts.seed, position, tests ? kResidual : kBonus);
    const bool drawn = drafts.q && !own.banned.empty();
    found->token = drawn ? race_of_residual(p, q, key, own) : race(p, key, own.banned, own);
    return found->token >= 0;
  }
}

// The token that a row draws, whose distribution goes into `out`; -1: not decided.
int64_t draw_row(const float* raw, const Options& options, int64_t row, int64_t tokens,
                 uint64_t key, float* out) {
  Scratch& own = scratch(tokens);
  Distribution d;
  if (!prepare(raw, options, row, tokens, out, own, &d)) return -1;
  own.banned.clear();
  const int64_t token = race(d, key, own.banned, own);
  int64_t unsure = 0;
  for (int64_t v = 0; v < tokens; v++) {
    unsure += out[v] >= d.least && out[v] < d.sure;
    out[v] = out[v] >= d.sure ? out[v] : -INFINITY;
  }
  return unsure ? -1 : token;
}

bool all_decided(const int64_t* tokens, int64_t rows) {
  return std::all_of(tokens, tokens + rows, [](int64_t token) { return token >= 0; });
}

}  // namespace

extern "C" void uniforms_float32(const int64_t* keys, float* out, int64_t rows, int64_t tokens) {
  for (int64_t row = 0; row < rows; row++) uniforms(keys[row], out + row * tokens, tokens);
}

// One token of each row; its distribution into `processed`. False where torch has to decide on
// some, whose token is -1.
extern "C" bool draw(const float* logits, int64_t stride, const float* temperature,
                     const int64_t* top_k, const double* top_p, const float* min_p,
                     const int64_t* seeds, const int64_t* positions, int64_t purpose,
                     float* processed, int64_t* drawn, int64_t rows, int64_t tokens, int threads) {
  const Options options = {temperature, top_k, top_p, min_p};
  each(rows, threads, [=](int64_t row) {
    const uint64_t key = stream_key(seeds[row], positions[row], purpose);
    drawn[row] =
        draw_row(logits + row * stride, options, row, tokens, key, processed + row * tokens);
  });
  return all_decided(drawn, rows);
}

// Of each row how many drafts were kept, these, the token after them, then -1, and of trees the nodes
// kept, then -1; the first `num_drafting` have drafts, and own `sizes` rows of logits beside their
// first one. False where torch has to decide on some, which begin with -1.
extern "C" bool verify_drafts(const float* logits, int64_t stride, const float* temperature,
                              const int64_t* top_k, const double* top_p, const float* min_p,
                              const int64_t* tokens, const int64_t* lengths, const int64_t* sizes,
                              const float* q, const int64_t* parents, int64_t num_drafting,
                              int64_t num_draft, const int64_t* seeds, const int64_t* positions,
                              int64_t* verdicts, int64_t rows, int64_t vocab, int threads) {
  const Options options = {temperature, top_k, top_p, min_p};
  std::vector<int64_t> begins(rows, 0);
  for (int64_t row = 1; row < rows; row++)
    begins[row] = begins[row - 1] + 1 + (row <= num_drafting ? sizes[row - 1] : 0);
  std::vector<int64_t> last(rows, -1);
  const int64_t columns = num_draft + 2 + (parents ? num_draft : 0);
  each(rows, threads, [&](int64_t row) {
    Drafted drafts = {nullptr, nullptr, 0, nullptr, seeds[row], positions[row]};
    if (row < num_drafting) {
      drafts.tokens = tokens + row * num_draft;
      drafts.parents = parents ? parents + row * num_draft : nullptr;
      drafts.length = lengths[row];
      drafts.q = q ? q + row * num_draft * vocab : nullptr;
    }
    int64_t* out = verdicts + row * columns;
    std::fill(out, out + columns, -1);
    std::vector<int64_t> nodes(drafts.length);
    Decision found = {0, -1, nodes.data()};
    if (!verify(logits + begins[row] * stride, stride, options, row, vocab, drafts, &found)) return;
    if (parents) std::copy(nodes.data(), nodes.data() + found.accepted, out + num_draft + 2);
    *out++ = found.accepted;
    for (int64_t i = 0; i < found.accepted; i++) *out++ = drafts.tokens[nodes[i]];
    *out = last[row] = found.token;
  });
  return all_decided(last.data(), rows);
}
