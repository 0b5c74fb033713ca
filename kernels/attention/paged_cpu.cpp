// Attention of short rows over a paged pool on a CPU: keys and values are read where they lie.
// paged_compiled.py compiles it and says what the arguments are.

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int64_t kSlots = 256;    // of the context that are weighed at once
constexpr int64_t kQueries = 16;   // that share the keys they read
constexpr int64_t kTogether = 16;  // slots that stay near while all queries meet them
constexpr int64_t kMostDim = 256;  // of keys and values

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
  return x < -87.0f ? 0.0f : (x == x ? value : x);
}

template <typename T>
struct Pass {
  const T *query, *keys, *values;
  T* out;
  const int64_t *tables, *positions;
  int64_t table_width, block_size, heads, kv_heads, key_dim, value_dim, query_head, query_token;
  int64_t window;   // 0: none
  int64_t chunked;  // whether `window` is the size of chunks of positions that see themselves alone
  float scaling;
};

// One register of numbers.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(4 * kLanes)));

inline Lanes load(const float* from) {
  Lanes x;
  memcpy(&x, from, sizeof x);
  return x;
}
inline Lanes load(const Bfloat16* from) {
  Lanes x;
  for (int i = 0; i < kLanes; i++) x[i] = widened(from[i]);
  return x;
}
inline float sum_of(Lanes x) {
  float sum = 0;
  for (int i = 0; i < kLanes; i++) sum += x[i];
  return sum;
}

// Asks for a vector that is needed soon: slots lie apart, so that a processor does not foresee them.
template <typename T>
inline void fetch(const T* vector, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(vector + d);
}

// Products of a query and `count` keys. The dimension is a constant where it is not 0.
template <typename T, int kDim>
inline void weigh(const float* query, const T* const* keys, int64_t count, int64_t dim, float* to) {
  for (int64_t j = 0; j < count; j++) {
    if (kDim) {
      fetch(keys[j + kTogether], kDim);
      Lanes sum = {};
      for (int d = 0; d < kDim; d += kLanes) sum += load(query + d) * load(keys[j] + d);
      to[j] = sum_of(sum);
    } else {
      float sum = 0;
      for (int64_t d = 0; d < dim; d++) sum += query[d] * widened(keys[j][d]);
      to[j] = sum;
    }
  }
}

// Adds `count` values times their weights to `sums`.
template <typename T, int kDim>
inline void gather(const float* weights, const T* const* values, int64_t count, int64_t dim,
                   float* sums) {
  if (kDim) {
    Lanes held[kDim / kLanes + 1];
    for (int d = 0; d < kDim / kLanes; d++) held[d] = load(sums + d * kLanes);
    for (int64_t j = 0; j < count; j++) {
      fetch(values[j + kTogether], kDim);
      for (int d = 0; d < kDim / kLanes; d++)
        held[d] += weights[j] * load(values[j] + d * kLanes);
    }
    memcpy(sums, held, kDim * sizeof(float));
  } else {
    for (int64_t j = 0; j < count; j++)
      for (int64_t d = 0; d < dim; d++) sums[d] += weights[j] * widened(values[j][d]);
  }
}

// Queries `first .. first + count - 1` of the tokens and heads that share a key head of a row; a
// query's number is token * group + head. The dimensions are constants where they are known.
template <typename T, int kDim>
void attend_queries(const Pass<T>& p, int64_t row, int64_t begin, int64_t kv_head, int64_t first,
                    int64_t count) {
  const int64_t key_dim = kDim ? kDim : p.key_dim, value_dim = kDim ? kDim : p.value_dim;
  const int64_t group = p.heads / p.kv_heads;
  float query[kQueries][kMostDim], sums[kQueries][kMostDim], weights[kQueries][kSlots];
  float largest[kQueries], total[kQueries];
  int64_t from[kQueries], to[kQueries];  // the slots a query sees
  const T *keys[kSlots + kTogether], *found[kSlots + kTogether];
  int64_t least = INT64_MAX, most = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t token = begin + (first + i) / group, head = kv_head * group + (first + i) % group;
    const T* source = p.query + head * p.query_head + token * p.query_token;
    for (int64_t d = 0; d < key_dim; d++) query[i][d] = widened(source[d]) * p.scaling;
    for (int64_t d = 0; d < value_dim; d++) sums[i][d] = 0;
    largest[i] = -INFINITY, total[i] = 0;
    to[i] = p.positions[token] + 1;
    from[i] = p.window && to[i] > p.window ? to[i] - p.window : 0;
    if (p.chunked) from[i] = (to[i] - 1) / p.window * p.window;
    least = from[i] < least ? from[i] : least, most = to[i] > most ? to[i] : most;
  }
  const int64_t* table = p.tables + row * p.table_width;
  const int64_t key_stride = p.kv_heads * key_dim, value_stride = p.kv_heads * value_dim;
  for (int64_t start = least; start < most; start += kSlots) {
    const int64_t end = start + kSlots < most ? start + kSlots : most;
    for (int64_t at = start; at < end; at++) {
      const int64_t slot = table[at / p.block_size] * p.block_size + at % p.block_size;
      keys[at - start] = p.keys + slot * key_stride + kv_head * key_dim;
      found[at - start] = p.values + slot * value_stride + kv_head * value_dim;
    }
    for (int64_t j = end - start; j < end - start + kTogether; j++)
      keys[j] = keys[j - 1], found[j] = found[j - 1];
    for (int64_t j = 0; j < end - start; j += kTogether) {
      const int64_t near = end - start - j < kTogether ? end - start - j : kTogether;
      for (int64_t i = 0; i < count; i++)
        weigh<T, kDim>(query[i], keys + j, near, key_dim, weights[i] + j);
    }
    for (int64_t i = 0; i < count; i++) {
      const int64_t low = from[i] > start ? from[i] - start : 0;
      const int64_t high = (to[i] < end ? to[i] : end) - start;
      float top = largest[i];
      for (int64_t j = low; j < high; j++) top = weights[i][j] > top ? weights[i][j] : top;
      if (high <= low) continue;
      if (top == -INFINITY) top = 0;  // none has a weight; -inf - -inf would be NaN
      const float kept = exponential(largest[i] - top);
      float sum = 0;
      for (int64_t j = low; j < high; j++) {
        weights[i][j] = exponential(weights[i][j] - top);
        sum += weights[i][j];
      }
      largest[i] = top, total[i] = total[i] * kept + sum;
      for (int64_t d = 0; d < value_dim; d++) sums[i][d] *= kept;
    }
    for (int64_t j = 0; j < end - start; j += kTogether) {
      const int64_t far = j + kTogether < end - start ? j + kTogether : end - start;
      for (int64_t i = 0; i < count; i++) {
        // What a query does not see is not read for it: 0 * NaN is NaN.
        const int64_t low = from[i] - start > j ? from[i] - start : j;
        const int64_t high = to[i] - start < far ? to[i] - start : far;
        if (low < high)
          gather<T, kDim>(weights[i] + low, found + low, high - low, value_dim, sums[i]);
      }
    }
  }
  for (int64_t i = 0; i < count; i++) {
    const int64_t token = begin + (first + i) / group, head = kv_head * group + (first + i) % group;
    T* target = p.out + (token * p.heads + head) * value_dim;
    for (int64_t d = 0; d < value_dim; d++) narrow(sums[i][d] / total[i], target + d);
  }
}

template <typename T>
void attend_row(const Pass<T>& p, int64_t row, int64_t begin, int64_t length, int64_t kv_head) {
  const int64_t queries = length * (p.heads / p.kv_heads);
  const int64_t dim = p.key_dim == p.value_dim ? p.key_dim : 0;
  for (int64_t first = 0; first < queries; first += kQueries) {
    const int64_t count = first + kQueries < queries ? kQueries : queries - first;
    if (dim == 32)
      attend_queries<T, 32>(p, row, begin, kv_head, first, count);
    else if (dim == 64)
      attend_queries<T, 64>(p, row, begin, kv_head, first, count);
    else if (dim == 96)
      attend_queries<T, 96>(p, row, begin, kv_head, first, count);
    else if (dim == 128)
      attend_queries<T, 128>(p, row, begin, kv_head, first, count);
    else
      attend_queries<T, 0>(p, row, begin, kv_head, first, count);
  }
}

template <typename T>
void attend(const Pass<T>& p, const int64_t* lengths, const int64_t* begins, int64_t num_rows,
            int64_t longest, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t item = 0; item < num_rows * p.kv_heads; item++) {
    const int64_t row = item / p.kv_heads;
    if (lengths[row] <= longest)
      attend_row(p, row, begins[row], lengths[row], item % p.kv_heads);
  }
}

}  // namespace

#define ATTEND(name, T)                                                                            \
  extern "C" void name(const T* query, const T* keys, const T* values, T* out,                     \
                       const int64_t* tables, const int64_t* positions, const int64_t* lengths,    \
                       const int64_t* begins, int64_t num_rows, int64_t longest,                   \
                       int64_t table_width, int64_t block_size, int64_t heads, int64_t kv_heads,   \
                       int64_t key_dim, int64_t value_dim, int64_t query_head,                     \
                       int64_t query_token, int64_t window, int64_t chunked, float scaling,        \
                       int threads) {                                                              \
    attend<T>({query, keys, values, out, tables, positions, table_width, block_size, heads,        \
               kv_heads, key_dim, value_dim, query_head, query_token, window, chunked, scaling},   \
              lengths, begins, num_rows, longest, threads);                                        \
  }

ATTEND(attend_float32, float)
ATTEND(attend_bfloat16, Bfloat16)
