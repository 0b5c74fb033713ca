// Attention of short rows over a paged pool on a CPU: keys and values are read where they lie.
// paged_compiled.py compiles it and says what the arguments are.

#include <type_traits>
#include <utility>

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

template <int... kFrom>
inline Lanes picked(Lanes x, Lanes y) {
#if defined(__clang__)
  return __builtin_shufflevector(x, y, kFrom...);
#else
  typedef int32_t Places __attribute__((vector_size(4 * kLanes)));
  return __builtin_shuffle(x, y, Places{kFrom...});
#endif
}

// Sums of neighbours `kHalf` lanes apart, those of `x` where a lane's number lacks that bit, else those of `y`.
template <int kHalf, int... kLane>
inline Lanes folded(Lanes x, Lanes y, std::integer_sequence<int, kLane...>) {
  return picked<(kLane & kHalf ? kLanes + (kLane ^ kHalf) : kLane)...>(x, y) +
         picked<(kLane & kHalf ? kLanes + kLane : kLane ^ kHalf)...>(x, y);
}

// The sum of each of `kLanes` registers, in its lane.
template <int kHalf = kLanes / 2>
inline Lanes sums_of(Lanes* x) {
  for (int i = 0; i < kHalf; i++)
    x[i] = folded<kHalf>(x[i], x[i + kHalf], std::make_integer_sequence<int, kLanes>{});
  if constexpr (kHalf > 1) return sums_of<kHalf / 2>(x);
  return x[0];
}

// `count` numbers, in whole registers; slots, in whole runs.
inline int64_t whole(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }
inline int64_t whole_run(int64_t count) { return (count + kTogether - 1) / kTogether * kTogether; }

// Keys or values of `kTogether` slots in float32, for all queries that meet them; behind `dim` numbers zeros up
// to a whole register. The dimension is a constant where `kDim` is not 0.
template <typename T, int kDim>
struct Near {
  static constexpr int kRoom = kDim ? kDim : kMostDim;
  const float* rows[kTogether];
  float wide[kTogether][kRoom];

  // The vectors behind these are asked for: they lie apart, so that a processor does not foresee them.
  void take(const T* const* vectors, int64_t dim) {
    for (int64_t j = 0; j < kTogether; j++) {
      for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T)))
        __builtin_prefetch(vectors[j + kTogether] + d);
      rows[j] = wide[j];
      if constexpr (kDim && std::is_same<T, float>::value) {
        rows[j] = vectors[j];
        continue;
      }
      for (int64_t d = 0; d < dim; d++) wide[j][d] = widened(vectors[j][d]);
      for (int64_t d = dim; d < whole(dim); d++) wide[j][d] = 0;
    }
  }
};

// Products of a query and the keys near by.
template <int kDim>
inline void weigh(const float* query, const float* const* keys, int64_t dim, float* to) {
  for (int64_t j = 0; j < kTogether; j += kLanes) {
    Lanes sums[kLanes] = {};
    for (int i = 0; i < kLanes; i++)
      for (int64_t d = 0; d < (kDim ? kDim : dim); d += kLanes)
        sums[i] += load(query + d) * load(keys[j + i] + d);
    const Lanes found = sums_of(sums);
    memcpy(to + j, &found, sizeof found);
  }
}

// Adds values times their weights to `sums`.
template <int kDim>
inline void gather(const float* weights, const float* const* values, int64_t low, int64_t high, int64_t dim,
                   float* sums) {
  if constexpr (kDim != 0) {
    Lanes held[kDim / kLanes];
    memcpy(held, sums, sizeof held);
    for (int64_t j = low; j < high; j++)
      for (int d = 0; d < kDim / kLanes; d++) held[d] += weights[j] * load(values[j] + d * kLanes);
    memcpy(sums, held, sizeof held);
  } else {
    for (int64_t j = low; j < high; j++)
      for (int64_t d = 0; d < dim; d++) sums[d] += weights[j] * values[j][d];
  }
}

// Queries `first .. first + count - 1` of the tokens and heads that share a key head of a row; a
// query's number is token * group + head. The dimensions are constants where they are known.
template <typename T, int kDim>
void attend_queries(const Pass<T>& p, int64_t row, int64_t begin, int64_t kv_head, int64_t first,
                    int64_t count) {
  const int64_t key_dim = kDim ? kDim : p.key_dim, value_dim = kDim ? kDim : p.value_dim;
  const int64_t group = p.heads / p.kv_heads;
  constexpr int kRoom = Near<T, kDim>::kRoom;
  Near<T, kDim> near;
  float query[kQueries][kRoom] = {}, sums[kQueries][kRoom], weights[kQueries][kSlots];
  float top[kQueries], total[kQueries];
  int64_t from[kQueries], to[kQueries];  // the slots a query sees
  const T *keys[kSlots + kTogether], *found[kSlots + kTogether];
  int64_t least = INT64_MAX, most = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t token = begin + (first + i) / group, head = kv_head * group + (first + i) % group;
    const T* source = p.query + head * p.query_head + token * p.query_token;
    for (int64_t d = 0; d < key_dim; d++) query[i][d] = widened(source[d]) * p.scaling;
    for (int64_t d = 0; d < value_dim; d++) sums[i][d] = 0;
    top[i] = -INFINITY, total[i] = 0;
    to[i] = p.rows.positions[token] + 1;
    from[i] = p.window && to[i] > p.window ? to[i] - p.window : 0;
    if (p.chunked) from[i] = (to[i] - 1) / p.window * p.window;
    least = from[i] < least ? from[i] : least, most = to[i] > most ? to[i] : most;
  }
  const int64_t* table = p.rows.tables + row * p.rows.table_width;
  const int64_t key_stride = p.kv_heads * key_dim, value_stride = p.kv_heads * value_dim;
  const int64_t size = p.rows.block_size;
  // Runs of slots begin where they do for any other queries, so that a query's bits do not depend on these.
  for (int64_t start = least / kSlots * kSlots; start < most; start += kSlots) {
    const int64_t end = start + kSlots < most ? start + kSlots : most;
    const int64_t begun = least > start ? (least - start) / kTogether * kTogether : 0;
    for (int64_t at = start + begun; at < end;) {  // a division for each block, not for each slot
      const int64_t block = at / size, next = (block + 1) * size, moved = (table[block] - block) * size;
      for (const int64_t stop = next < end ? next : end; at < stop; at++) {
        keys[at - start] = p.keys + (at + moved) * key_stride + kv_head * key_dim;
        found[at - start] = p.values + (at + moved) * value_stride + kv_head * value_dim;
      }
    }
    for (int64_t j = end - start; j < whole_run(end - start) + kTogether; j++)
      keys[j] = keys[j - 1], found[j] = found[j - 1];
    for (int64_t j = begun; j < end - start; j += kTogether) {
      near.take(keys + j, key_dim);
      for (int64_t i = 0; i < count; i++) weigh<kDim>(query[i], near.rows, whole(key_dim), weights[i] + j);
    }
    for (int64_t i = 0; i < count; i++) {
      const int64_t low = from[i] > start ? from[i] - start : 0;
      const int64_t high = (to[i] < end ? to[i] : end) - start;
      if (high <= low) continue;
      const float before = top[i], most_here = largest(weights[i] + low, high - low);
      top[i] = most_here > before ? most_here : before;
      if (top[i] == -INFINITY) top[i] = 0;  // none has a weight; -inf - -inf would be NaN
      const float kept = exponential(before - top[i]);
      float sum = 0;
      for (int64_t j = low; j < high; j++) sum += weights[i][j] = exponential(weights[i][j] - top[i]);
      total[i] = total[i] * kept + sum;
      for (int64_t d = 0; d < value_dim; d++) sums[i][d] *= kept;
    }
    for (int64_t j = begun; j < end - start; j += kTogether) {
      near.take(found + j, value_dim);
      for (int64_t i = 0; i < count; i++) {
        // What a query does not see is not read for it: 0 * NaN is NaN.
        const int64_t low = from[i] - start > j ? from[i] - start - j : 0;
        const int64_t high = to[i] - start - j < kTogether ? to[i] - start - j : kTogether;
        gather<kDim>(weights[i] + j, near.rows, low, high, value_dim, sums[i]);
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
