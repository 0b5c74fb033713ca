// Searches of suffix decoding over the index of drafters/text/suffix.py and the table of answers.py, which have
// the same in Python, with the same constants, for a machine without a compiler. suffix_search.py says what the
// arguments are.

#include <cstdint>

namespace {

constexpr int64_t kOrders[] = {1, 2, 4, 8};
constexpr int kNumOrders = 4, kTableOrders = 4;
constexpr int64_t kLongest = 16;  // context
constexpr int64_t kSeen = 4, kMostSteps = 128;
constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15, kMix = 0xD6E8FEB86659FD93;
constexpr int32_t kSeparator = -1;

struct Index {
  int32_t* text;
  int64_t *heads[kNumOrders], *previous[kNumOrders];  // positions plus one; 0: none
  int64_t mask, shift, oldest, end, begin;            // `begin`: of the newest text

  int64_t slot(uint64_t key) const { return int64_t(key * kMix >> shift); }
};

struct Table {
  const uint64_t* keys;
  const int32_t* tokens;
  const double* shares;
  int64_t count;
};

struct Offer {
  int32_t token = kSeparator;
  double chance = 0;

  void take(const Offer& other) {
    if (other.chance > chance) *this = other;
  }
};

// Hashes of the last 1, 2 .. `most` tokens, which `token(back)` gives.
template <typename Token>
void hash(uint64_t* keys, int64_t most, Token token) {
  uint64_t key = 0, power = 1;
  for (int64_t back = 0; back < most; back++, power *= kMultiplier)
    keys[back] = key += uint64_t(token(back) + 1) * power;
}

// The offer of the newest places of one order that end as the `count` tokens before `context` do.
Offer offer_of(const Index& x, int order, uint64_t key, const int64_t* context, int64_t count, double caution) {
  int64_t longest = 0, found = 0, place = x.heads[order][x.slot(key)] - 1;
  int32_t tokens[kSeen], best = kSeparator;
  for (int64_t step = 0; step < kMostSteps && place >= x.oldest && found < kSeen; step++) {
    const int32_t token = place == x.end - 1 ? kSeparator : x.text[(place + 1) & x.mask];
    if (token != kSeparator) {
      const int64_t most = count < place - x.oldest + 1 ? count : place - x.oldest + 1;
      int64_t length = 0;
      while (length < most && x.text[(place - length) & x.mask] == context[-1 - length]) length++;
      if (length >= kOrders[order]) {  // not merely the same hash
        if (length > longest) longest = length, best = token;
        tokens[found++] = token;
      }
    }
    place = x.previous[order][place & x.mask] - 1;
  }
  int64_t agreeing = 0;
  for (int64_t i = 0; i < found; i++) agreeing += tokens[i] == best;
  return {best, found ? agreeing / (found + caution / longest) : 0.0};
}

Offer likeliest(const Index& x, const uint64_t* keys, const int64_t* context, int64_t count, double caution) {
  Offer best;
  for (int order = kNumOrders - 1; order >= 0; order--)
    if (kOrders[order] <= count) best.take(offer_of(x, order, keys[kOrders[order] - 1], context, count, caution));
  return best;
}

Offer likeliest(const Table& table, const uint64_t* keys, int64_t count) {
  Offer best;
  for (int64_t back = 0; back < count && back < kTableOrders; back++) {
    int64_t low = 0, high = table.count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (table.keys[middle] < keys[back]) low = middle + 1;
      else high = middle;
    }
    if (low < table.count && table.keys[low] == keys[back]) best.take({table.tokens[low], table.shares[low]});
  }
  return best;
}

}  // namespace

extern "C" void extend(Index* index, const int64_t* tokens, int64_t count) {
  Index& x = *index;
  for (int64_t i = 0; i < count; i++) {
    const int64_t place = x.end++;
    x.text[place & x.mask] = int32_t(tokens[i]);
    const int64_t known = x.end - x.begin < kOrders[kNumOrders - 1] ? x.end - x.begin : kOrders[kNumOrders - 1];
    uint64_t keys[kOrders[kNumOrders - 1]];
    hash(keys, known, [&](int64_t back) { return x.text[(place - back) & x.mask]; });
    for (int order = 0; order < kNumOrders && kOrders[order] <= known; order++) {
      int64_t& head = x.heads[order][x.slot(keys[kOrders[order] - 1])];
      x.previous[order][place & x.mask] = head;
      head = place + 1;
    }
  }
}

extern "C" int64_t draft(const Index* own, const Index* shared, const Table* table, int64_t* text, int64_t count,
                         int64_t k, double own_caution, double caution, double least, double* score) {
  double survival = 1;
  for (int64_t drafted = 0; drafted < k; drafted++) {
    const int64_t* context = text + count + drafted;
    const int64_t known = count + drafted < kLongest ? count + drafted : kLongest;
    uint64_t keys[kOrders[kNumOrders - 1]];
    hash(keys, known < kOrders[kNumOrders - 1] ? known : kOrders[kNumOrders - 1],
         [&](int64_t back) { return context[-1 - back]; });
    Offer best = likeliest(*own, keys, context, known, own_caution);
    if (shared) best.take(likeliest(*shared, keys, context, known, caution));
    if (table) best.take(likeliest(*table, keys, known));
    survival *= best.chance;
    if (survival < least) return drafted;
    text[count + drafted] = best.token;
    *score += survival;
  }
  return k;
}
