// Attention of rows over a paged pool on a CPU: keys and values are read where they lie.
// paged_compiled.py compiles it and says what the arguments are.

#include <type_traits>
#include <utility>

#include "../host_lanes.h"

namespace {

constexpr int64_t kSlots = 256;           // of the context that are weighed at once
constexpr int64_t kFew = 16, kMany = 48;  // queries that share the keys they read
constexpr int64_t kTogether = 16;         // slots that lie near while all queries meet them
constexpr int64_t kMostDim = 256;         // of keys and values
constexpr int64_t kAhead = 32;            // vectors that are asked for before they are read

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
constexpr int64_t whole(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }
inline int64_t whole_run(int64_t count) { return (count + kTogether - 1) / kTogether * kTogether; }

// Asks for a vector, into the cache that has room for many on their way: vectors lie apart, so that a processor
// does not foresee them.
template <typename T>
inline void ask_for(const T* vector, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(vector + d, 0, 2);
}

// Keys or values of `kTogether` slots in float32, for all queries that meet them; behind `dim` numbers zeros up
// to a whole register. The dimension is a constant where `kDim` is not 0.
template <typename T, int kDim>
struct Near {
  static constexpr int kRoom = kDim ? kDim : kMostDim;
  const float* rows[kTogether];
  float wide[kTogether][kRoom];

  void take(const T* const* vectors, int64_t dim) {
    for (int64_t j = 0; j < kTogether; j++) {
      ask_for(vectors[j + kAhead], dim);
      rows[j] = wide[j];
      if constexpr (kDim && std::is_same<T, float>::value) {
        rows[j] = vectors[j];
        continue;
      }
      if constexpr (kDim) {
        for (int64_t d = 0; d < kDim; d += kLanes) store(load(vectors[j] + d), wide[j] + d);
        continue;
      }
      for (int64_t d = 0; d < dim; d++) wide[j][d] = widened(vectors[j][d]);
      for (int64_t d = dim; d < whole(dim); d++) wide[j][d] = 0;
    }
  }
};

// Slots `[from, to)` that queries `first .. count - 1` see; their weights from slot `start` on.
struct Seen {
  const int64_t *from, *to;
  int64_t start, first, count;
  float (*weights)[kSlots];

  // Of `kTogether` slots from weight `j` on, those that query `i` sees.
  int64_t low(int64_t i, int64_t j) const { return from[i] - start > j ? from[i] - start - j : 0; }
  int64_t high(int64_t i, int64_t j) const {
    return to[i] - start - j < kTogether ? to[i] - start - j : kTogether;
  }
  bool all(int64_t i, int64_t j) const { return low(i, j) == 0 && high(i, j) == kTogether; }
};

// Adds values times their weights to the sums of query `i`. What it does not see is not read for it: 0 * NaN is
// NaN.
template <int kDim, typename T>
inline void add_seen(const Seen& seen, int64_t i, int64_t j, const T* const* values, int64_t dim, float* sums) {
  const float* weights = seen.weights[i] + j;
  const int64_t low = seen.low(i, j), high = seen.high(i, j);
  if constexpr (kDim != 0) {
    Lanes held[kDim / kLanes];
    memcpy(held, sums, sizeof held);
    for (int64_t k = low; k < high; k++)
      for (int d = 0; d < kDim / kLanes; d++) held[d] += weights[k] * load(values[k] + d * kLanes);
    memcpy(sums, held, sizeof held);
  } else {
    for (int64_t k = low; k < high; k++)
      for (int64_t d = 0; d < dim; d++) sums[d] += weights[k] * widened(values[k][d]);
  }
}

// A few queries, in float32: each meets keys and values near by alone.
template <typename T, int kDim>
struct Few {
  static constexpr int64_t kQueries = kFew, kRoom = kDim ? kDim : kMostDim;
  const int64_t dim;
  const float scaling;
  float query[kQueries][kRoom];

  Few(int64_t dim, float scaling) : dim(dim), scaling(scaling) {}

  int64_t key_dim() const { return kDim ? kDim : dim; }

  void hold(int64_t i, const T* source) {
    for (int64_t d = 0; d < key_dim(); d++) query[i][d] = widened(source[d]) * scaling;
    for (int64_t d = key_dim(); d < whole(key_dim()); d++) query[i][d] = 0;
  }

  void hold_none(int64_t) {}

  void weigh(const T* const* keys, const Seen& seen, int64_t j) {
    Near<T, kDim> near;
    near.take(keys, key_dim());
    for (int64_t i = seen.first; i < seen.count; i++)
      for (int64_t at = 0; at < kTogether; at += kLanes) {
        Lanes sums[kLanes] = {};
        for (int k = 0; k < kLanes; k++)
          for (int64_t d = 0; d < whole(key_dim()); d += kLanes)
            sums[k] += load(query[i] + d) * load(near.rows[at + k] + d);
        store(sums_of(sums), seen.weights[i] + j + at);
      }
  }

  void gather(const T* const* values, int64_t value_dim, const Seen& seen, int64_t j, float (*sums)[kRoom]) {
    Near<T, kDim> near;
    near.take(values, value_dim);
    for (int64_t i = seen.first; i < seen.count; i++)
      add_seen<kDim>(seen, i, j, near.rows, value_dim, sums[i]);
  }
};

// Halves of `kHalf` lanes of two registers, crossed over.
template <int kHalf, int... kLane>
inline void cross(Lanes& x, Lanes& y, std::integer_sequence<int, kLane...>) {
  const Lanes low = picked<(kLane & kHalf ? kLanes + (kLane ^ kHalf) : kLane)...>(x, y);
  y = picked<(kLane & kHalf ? kLanes + kLane : kLane ^ kHalf)...>(x, y);
  x = low;
}

// Lane i of register j becomes lane j of register i.
template <int kHalf = kLanes / 2>
inline void transpose(Lanes* x) {
  for (int i = 0; i < kLanes; i++)
    if (!(i & kHalf)) cross<kHalf>(x[i], x[i + kHalf], std::make_integer_sequence<int, kLanes>{});
  if constexpr (kHalf > 1) transpose<kHalf / 2>(x);
}

// Products of some rows with what lies in registers, `steps` of them, `stride` numbers apart: those of row k and
// register r are added to `begin(k, r)` and given to `end(k, r, sum)`.
template <typename T, int64_t kRows, int64_t kRegisters, typename Begin, typename End>
inline void meet(const T* rows, int64_t row_stride, const T* near, int64_t stride, int64_t steps, Begin begin,
                 End end) {
  constexpr int64_t kWidth = Step<T>::kWidth;
  Lanes sums[kRows][kRegisters];
  for (int64_t k = 0; k < kRows; k++)
    for (int64_t r = 0; r < kRegisters; r++) sums[k][r] = begin(k, r);
  for (int64_t d = 0; d < steps; d++, near += stride, rows += kWidth) {
    typename Step<T>::Weights w[kRegisters];
    for (int64_t r = 0; r < kRegisters; r++) w[r] = Step<T>::load(near + r * kLanes * kWidth);
#pragma GCC unroll 8
    for (int64_t k = 0; k < kRows; k++) {
      const auto x = Step<T>::meet(rows + k * row_stride);
      for (int64_t r = 0; r < kRegisters; r++) Step<T>::add(sums[k][r], w[r], x);
    }
  }
  for (int64_t k = 0; k < kRows; k++)
    for (int64_t r = 0; r < kRegisters; r++) end(k, r, sums[k][r]);
}

// Numbers `d .. d + kLanes - 1` of as many vectors as a step has.
inline void lay(const float* const* from, int64_t d, float* to) { store(load(from[0] + d), to); }
inline void lay(const Bfloat16* const* from, int64_t d, Bfloat16* to) {
  const Words both = words_of(from[0] + d) | words_of(from[1] + d) << 16;
  memcpy(to, &both, sizeof both);
}

// Many queries, as they are. Keys near by lie across: a register has the same step along the dimension of as
// many keys as it has lanes, and stays there while several queries meet it. So does one of values, of which a
// step has those of neighbouring slots; weights are rounded as values are, but for slots of a run that is not
// seen whole. What a query finds does not depend on the others.
template <typename T, int kDim>
struct Many {
  static constexpr int64_t kQueries = kMany, kWidth = Step<T>::kWidth, kRoom = kDim ? kDim : kMostDim;
  static constexpr int64_t kBytes = 4 * kLanes, kSlotsAcross = kTogether / kLanes;
  // Registers of a value at once, and the queries whose sums are in registers then.
  static constexpr int64_t kValue = kDim % (4 * kLanes) == 0 ? 4 : kDim % (3 * kLanes) == 0 ? 3 : 2;
  static constexpr int64_t kSums = kLanes == 16 ? 4 : 2;
  const int64_t dim;
  const float scaling;
  T query[kQueries][kRoom];

  Many(int64_t dim, float scaling) : dim(dim), scaling(scaling) {}

  int64_t bytes() const { return (kDim ? kDim : dim) * int64_t(sizeof(T)); }

  void hold(int64_t i, const T* source) {
    memcpy(query[i], source, bytes());
    if (bytes() % 4) query[i][dim] = T{};  // the rest of a pair
  }
  // Zeros in place of queries from `i` on that others are met with.
  void hold_none(int64_t i) { memset(query[i], 0, (kQueries - i) % 8 * sizeof query[i]); }

  void weigh(const T* const* keys, const Seen& seen, int64_t j) {
    T near[kRoom * kTogether];
    for (int64_t k = 0; k < kTogether; k++) ask_for(keys[k + kAhead], kDim ? kDim : dim);
    for (int64_t group = 0; group < kSlotsAcross; group++)
      for (int64_t at = 0; at < bytes(); at += kBytes) {
        Lanes x[kLanes] = {};
        const int64_t here = bytes() - at < kBytes ? bytes() - at : kBytes;
        for (int k = 0; k < kLanes; k++) memcpy(&x[k], (const char*)keys[group * kLanes + k] + at, here);
        transpose(x);
        for (int k = 0; k < kLanes; k++)
          memcpy(near + ((at / 4 + k) * kSlotsAcross + group) * kLanes * kWidth, &x[k], sizeof x[k]);
      }
    for (int64_t i = seen.first; i < seen.count;) {
      const int64_t left = seen.count - i;
      if (left > 4 && kLanes == 16)
        meet_keys<8>(near, i, seen.weights, j), i += 8;
      else if (left > 1)
        meet_keys<4>(near, i, seen.weights, j), i += 4;
      else
        meet_keys<1>(near, i, seen.weights, j), i++;
    }
  }

  template <int64_t kRows>
  void meet_keys(const T* near, int64_t i, float (*to)[kSlots], int64_t j) const {
    meet<T, kRows, kSlotsAcross>(
        query[i], kRoom, near, kSlotsAcross * kLanes * kWidth, (bytes() + 3) / 4,
        [](int64_t, int64_t) { return Lanes{}; },
        [&](int64_t k, int64_t r, Lanes sum) { store(sum * scaling, to[i + k] + j + r * kLanes); });
  }

  void gather(const T* const* values, int64_t value_dim, const Seen& seen, int64_t j, float (*sums)[kRoom]) {
    T near[kRoom * kTogether];
    for (int64_t k = 0; k < kTogether; k++) ask_for(values[k + kAhead], value_dim);
    for (int64_t k = 0; k < kTogether; k += kWidth)
      for (int64_t d = 0; d < kDim; d += kLanes) lay(values + k, d, near + k * kDim + d * kWidth);
    for (int64_t i = seen.first; i < seen.count;) {
      int64_t all = 0;
      while (kDim && all < kSums && i + all < seen.count && seen.all(i + all, j)) all++;
      if (all == kSums)
        meet_values<kSums>(near, seen.weights + i, j, sums + i), i += kSums;
      else if (all > 0)
        meet_values<1>(near, seen.weights + i, j, sums + i), i++;
      else
        add_seen<kDim>(seen, i, j, values, value_dim, sums[i]), i++;
    }
  }

  template <int64_t kRows>
  void meet_values(const T* near, const float (*weights)[kSlots], int64_t j, float (*sums)[kRoom]) const {
    T narrowed[kRows][kTogether];
    for (int64_t k = 0; k < kRows; k++)
      for (int64_t at = 0; at < kTogether; at += kLanes) store(load(weights[k] + j + at), narrowed[k] + at);
    for (int64_t d = 0; d < kDim; d += kValue * kLanes) {
      const auto sums_at = [&](int64_t k, int64_t r) { return sums[k] + d + r * kLanes; };
      meet<T, kRows, kValue>(
          narrowed[0], kTogether, near + d * kWidth, kDim * kWidth, kTogether / kWidth,
          [&](int64_t k, int64_t r) { return load(sums_at(k, r)); },
          [&](int64_t k, int64_t r, Lanes sum) { store(sum, sums_at(k, r)); });
    }
  }
};

// A token's slots: one behind the other, but for those of a tree from `fork` on, of which it has the nodes of its
// path, in their order.
struct Path {
  int64_t fork, bits;

  int64_t slot(int64_t number) const {
    if (number < fork) return number;
    uint64_t left = bits;
    for (int64_t skipped = number - fork; skipped > 0; skipped--) left &= left - 1;
    return fork + __builtin_ctzll(left);
  }
};

inline Path path_of(const Rows& rows, int64_t token) {
  const bool is_node = rows.ancestors && rows.ancestors[token] >= 0;
  return is_node ? Path{rows.first[token], rows.ancestors[token]} : Path{rows.places[token] + 1, 0};
}

// Queries `first .. first + count - 1` of the tokens and heads that share a key head of a row; a
// query's number is token * group + head. The dimensions are constants where they are known.
template <typename T, int kDim, template <typename, int> class Queries>
void attend_queries(const Pass<T>& p, int64_t row, int64_t begin, int64_t kv_head, int64_t first,
                    int64_t count) {
  const int64_t key_dim = kDim ? kDim : p.key_dim, value_dim = kDim ? kDim : p.value_dim;
  const int64_t group = p.heads / p.kv_heads;
  constexpr int64_t kQueries = Queries<T, kDim>::kQueries;
  Queries<T, kDim> queries(key_dim, p.scaling);
  float sums[kQueries][Queries<T, kDim>::kRoom], weights[kQueries][kSlots];
  float top[kQueries], total[kQueries];
  int64_t from[kQueries], to[kQueries];  // the slots a query sees
  // Vectors in the order in which they are read: keys of a run, its values, the keys of the next one.
  const T* vectors[2 * kSlots + kAhead];
  int64_t least = INT64_MAX, most = 0, fork = INT64_MAX;
  for (int64_t i = 0; i < count; i++) {
    const int64_t token = begin + (first + i) / group, head = kv_head * group + (first + i) % group;
    const T* source = p.query + head * p.query_head + token * p.query_token;
    queries.hold(i, source);
    for (int64_t d = 0; d < value_dim; d++) sums[i][d] = 0;
    top[i] = -INFINITY, total[i] = 0;
    const Path path = path_of(p.rows, token);
    to[i] = path.fork + __builtin_popcountll(path.bits);
    if (path.bits && path.fork < fork) fork = path.fork;
    from[i] = p.window && to[i] > p.window ? to[i] - p.window : 0;
    if (p.chunked) from[i] = (to[i] - 1) / p.window * p.window;
    least = from[i] < least ? from[i] : least, most = to[i] > most ? to[i] : most;
  }
  queries.hold_none(count);
  const int64_t* table = p.rows.tables + row * p.rows.table_width;
  const int64_t key_stride = p.kv_heads * key_dim, value_stride = p.kv_heads * value_dim;
  const int64_t size = p.rows.block_size;
  // Runs of slots begin where they do for any other queries, so that a query's bits do not depend on these.
  for (int64_t start = least / kSlots * kSlots; start < most; start += kSlots) {
    const int64_t end = start + kSlots < most ? start + kSlots : most;
    const int64_t begun = least > start ? (least - start) / kTogether * kTogether : 0;
    const int64_t slots = whole_run(end - start) - begun, first_slot = start + begun;
    const T **keys = vectors, **found = vectors + slots, **next = found + slots;
    const int64_t known = most - first_slot < slots + kAhead ? most - first_slot : slots + kAhead;
    for (int64_t at = 0; at < known;) {  // a division for each block, not for each slot
      const int64_t slot = first_slot + at, block = slot / size, moved = (table[block] - block) * size;
      const int64_t rest = (block + 1) * size - slot, stop = rest < known - at ? at + rest : known;
      for (; at < stop; at++) {
        const int64_t place = first_slot + at + moved;
        (at < slots ? keys : next - slots)[at] = p.keys + place * key_stride + kv_head * key_dim;
        if (at < slots) found[at] = p.values + place * value_stride + kv_head * value_dim;
      }
    }
    for (int64_t j = known; j < slots; j++) keys[j] = keys[j - 1], found[j] = found[j - 1];
    for (int64_t j = known > slots ? known - slots : 0; j < kAhead; j++) next[j] = found[slots - 1];
    const Seen seen{from, to, start, 0, count, weights};
    // Of slots that hold nodes, each token's queries meet those of its path.
    const int64_t shared = fork < end ? (fork > start ? (fork - start) / kTogether * kTogether : 0) : end - start;
    const auto apart = [&](const T* pool, int64_t stride, int64_t dim, auto met_by) {
      for (int64_t j = begun > shared ? begun : shared; j < end - start; j += kTogether)
        for (int64_t i = 0, next; i < count; i = next) {
          const int64_t token = begin + (first + i) / group;
          const Path path = path_of(p.rows, token);
          const T* own[kTogether + kAhead];
          for (int64_t k = 0; k < kTogether; k++) {
            const int64_t last = to[i] - 1, slot = path.slot(start + j + k < last ? start + j + k : last);
            own[k] = pool + (table[slot / size] * size + slot % size) * stride + kv_head * dim;
          }
          for (int64_t k = 0; k < kAhead; k++) own[kTogether + k] = own[0];
          next = (token - begin + 1) * group - first;
          next = next < count ? next : count;
          met_by(own, Seen{from, to, start, i, next, weights}, j);
        }
    };
    for (int64_t j = begun; j < shared; j += kTogether) queries.weigh(keys + j - begun, seen, j);
    apart(p.keys, key_stride, key_dim, [&](const T* const* own, const Seen& few, int64_t j) { queries.weigh(own, few, j); });
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
    for (int64_t j = begun; j < shared; j += kTogether) queries.gather(found + j - begun, value_dim, seen, j, sums);
    apart(p.values, value_stride, value_dim,
          [&](const T* const* own, const Seen& few, int64_t j) { queries.gather(own, value_dim, few, j, sums); });
  }
  for (int64_t i = 0; i < count; i++) {
    const int64_t token = begin + (first + i) / group, head = kv_head * group + (first + i) % group;
    T* target = p.out + (token * p.heads + head) * value_dim;
    for (int64_t d = 0; d < value_dim; d++) narrow(sums[i][d] / total[i], target + d);
  }
}

// Block `block` of the queries of a row's tokens, if it has one.
template <typename T, template <typename, int> class Queries>
void attend_block(const Pass<T>& p, int64_t row, int64_t kv_head, int64_t block) {
  constexpr int64_t kQueries = Queries<T, 0>::kQueries;
  const int64_t first = block * kQueries, left = p.rows.lengths[row] * (p.heads / p.kv_heads) - first;
  if (left <= 0) return;
  const int64_t begin = p.rows.begins[row], count = left < kQueries ? left : kQueries;
  const int64_t dim = p.key_dim == p.value_dim ? p.key_dim : 0;
  if (dim == 32)
    attend_queries<T, 32, Queries>(p, row, begin, kv_head, first, count);
  else if (dim == 64)
    attend_queries<T, 64, Queries>(p, row, begin, kv_head, first, count);
  else if (dim == 96)
    attend_queries<T, 96, Queries>(p, row, begin, kv_head, first, count);
  else if (dim == 128)
    attend_queries<T, 128, Queries>(p, row, begin, kv_head, first, count);
  else
    attend_queries<T, 0, Queries>(p, row, begin, kv_head, first, count);
}

// Puts the keys and values of a row's tokens into the pool; false where one has no block.
template <typename T>
bool keep_row(const Pass<T>& p, int64_t row, int64_t begin, int64_t length) {
  const int64_t* table = p.rows.tables + row * p.rows.table_width;
  for (int64_t token = begin; token < begin + length; token++) {
    const int64_t position = p.rows.places[token], size = p.rows.block_size;
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
  const int64_t queries = rows.longest_row * (p.heads / p.kv_heads);
  const int64_t shares = rows.num_rows * p.kv_heads;
  each((queries + kFew - 1) / kFew * shares, threads, [&](int64_t item) {
    const int64_t row = item / p.kv_heads % rows.num_rows, kv_head = item % p.kv_heads, block = item / shares;
    // For one query keys that lie across pay where the processor multiplies pairs alone.
    if (Step<T>::kPairs || rows.lengths[row] > longest)
      attend_block<T, Many>(p, row, kv_head, block);
    else
      attend_block<T, Few>(p, row, kv_head, block);
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
