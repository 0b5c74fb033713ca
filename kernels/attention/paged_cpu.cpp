// Attention of short rows over a paged pool on a CPU: keys and values are read where they lie.
// paged_compiled.py compiles it and says what the arguments are.

#include "../host_numbers.h"

namespace {

constexpr int64_t kSlots = 256;    // of the context that are weighed at once
constexpr int64_t kQueries = 16;   // that share the keys they read
constexpr int64_t kTogether = 16;  // slots that stay near while all queries meet them
constexpr int64_t kMostDim = 256;  // of keys and values

template <typename T>
struct Pass {
  const T *query, *key, *value;  // of the pass; no `key`: the pool holds them already
  T *keys, *values;              // of the pool
  T* out;
  Rows rows;
  int64_t heads, kv_heads, key_dim, value_dim, query_head, query_token;
  int64_t key_head, key_token, value_head, value_token;  // strides, as those of the query
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
    to[i] = p.rows.positions[token] + 1;
    from[i] = p.window && to[i] > p.window ? to[i] - p.window : 0;
    if (p.chunked) from[i] = (to[i] - 1) / p.window * p.window;
    least = from[i] < least ? from[i] : least, most = to[i] > most ? to[i] : most;
  }
  const int64_t* table = p.rows.tables + row * p.rows.table_width;
  const int64_t key_stride = p.kv_heads * key_dim, value_stride = p.kv_heads * value_dim;
  const int64_t size = p.rows.block_size;
  for (int64_t start = least; start < most; start += kSlots) {
    const int64_t end = start + kSlots < most ? start + kSlots : most;
    for (int64_t at = start; at < end;) {  // a division for each block, not for each slot
      const int64_t block = at / size, next = (block + 1) * size, moved = (table[block] - block) * size;
      for (const int64_t stop = next < end ? next : end; at < stop; at++) {
        keys[at - start] = p.keys + (at + moved) * key_stride + kv_head * key_dim;
        found[at - start] = p.values + (at + moved) * value_stride + kv_head * value_dim;
      }
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

// Puts the keys and values of a row's tokens into the pool; false where one has no block.
template <typename T>
bool keep_row(const Pass<T>& p, int64_t row, int64_t begin, int64_t length) {
  const int64_t* table = p.rows.tables + row * p.rows.table_width;
  for (int64_t token = begin; token < begin + length; token++) {
    const int64_t position = p.rows.positions[token], size = p.rows.block_size;
    const int64_t block = position / size;
    if (position < 0 || block >= p.rows.table_width) return false;
    const int64_t slot = table[block] * size + position % size;
    for (int64_t head = 0; head < p.kv_heads; head++) {
      const int64_t to = slot * p.kv_heads + head;
      memcpy(p.keys + to * p.key_dim, p.key + token * p.key_token + head * p.key_head,
             p.key_dim * sizeof(T));
      memcpy(p.values + to * p.value_dim, p.value + token * p.value_token + head * p.value_head,
             p.value_dim * sizeof(T));
    }
  }
  return true;
}

template <typename T>
bool attend(const Pass<T>& p, int64_t longest, int threads) {
  const Rows& rows = p.rows;
  for (int64_t row = 0; p.key && row < rows.num_rows; row++)
    if (!keep_row(p, row, rows.begins[row], rows.lengths[row])) return false;
  each(rows.num_rows * p.kv_heads, threads, [&](int64_t item) {
    const int64_t row = item / p.kv_heads;
    if (rows.lengths[row] <= longest)
      attend_row(p, row, rows.begins[row], rows.lengths[row], item % p.kv_heads);
  });
  return true;
}

}  // namespace

#define ATTEND(name, T)                                                                            \
  extern "C" bool name(const T* query, const T* key, const T* value, T* keys, T* values, T* out,   \
                       const Rows* rows, int64_t longest, int64_t heads, int64_t kv_heads,         \
                       int64_t key_dim, int64_t value_dim, int64_t query_head,                     \
                       int64_t query_token, int64_t key_head, int64_t key_token,                   \
                       int64_t value_head, int64_t value_token, int64_t window, int64_t chunked,   \
                       float scaling, int threads) {                                               \
    return attend<T>({query, key, value, keys, values, out, *rows, heads, kv_heads, key_dim,       \
                      value_dim, query_head, query_token, key_head, key_token, value_head,         \
                      value_token, window, chunked, scaling},                                      \
                     longest, threads);                                                            \
  }

ATTEND(attend_float32, float)
ATTEND(attend_bfloat16, Bfloat16)
