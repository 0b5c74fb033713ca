// Calls of other kernels, one after another. call_list.py compiles it, makes the lists and says what
// their numbers are.

#include <algorithm>
#include <vector>

#include "host_numbers.h"

namespace {

struct Place {
  int64_t base, per_token, fixed;  // bytes
};

struct Call {
  int64_t kind;
  const void* function;
  Place places[4];
  int64_t numbers[12];
  float reals[2];
};

enum Kind { kMultiply, kNormalise, kRotate, kGate, kAdd, kCopy, kAttend, kRows, kClear };
enum Outcome { kDone, kNoBlock, kNoRow };

typedef void (*Multiply)(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t,
                         int64_t, int);
typedef void (*Normalise)(const void*, const void*, void*, int64_t, int64_t, float, float, int, int);
typedef void (*Rotate)(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t,
                       int64_t, int64_t, int);
typedef void (*Pairs)(const void*, const void*, void*, int64_t, int64_t, int64_t, int64_t, int);
typedef bool (*Attend)(const void*, const void*, const void*, void*, void*, void*, const Rows*,
                       int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                       int64_t, int64_t, int64_t, int64_t, int64_t, float, int);
typedef char* const Layer[2];  // where the pool's keys and values lie

// Tokens that are not side by side are normalised one by one.
void normalise(const Call& call, char* const* at, int64_t tokens, int threads) {
  const int64_t *n = call.numbers, rows = n[0], width = n[1], stride = n[2], bytes = n[3];
  const Normalise function = (Normalise)call.function;
  const float eps = call.reals[0], offset = call.reals[1];
  const int wide = int(n[4]);
  if (stride == rows * width)
    return function(at[0], at[1], at[2], tokens * rows, width, eps, offset, wide, threads);
  for (int64_t token = 0; token < tokens; token++)
    function(at[0] + token * stride * bytes, at[1], at[2] + token * rows * width * bytes, rows,
             width, eps, offset, wide, threads);
}

bool attend(const Call& call, char* const* at, const Rows* rows, const Layer& layer, int threads) {
  const int64_t* n = call.numbers;
  return ((Attend)call.function)(at[0], at[1], at[2], layer[0], layer[1], at[3], rows,
                                 rows->longest_row, n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8],
                                 n[9], n[10], n[11] >> 1, n[11] & 1, call.reals[0], threads);
}

// Rows of a table by the tokens' numbers; false where it has none of some number.
bool take_rows(const Call& call, char* const* at, int64_t tokens) {
  const int64_t bytes = call.numbers[0], *numbers = (const int64_t*)at[1];
  for (int64_t token = 0; token < tokens; token++) {
    if (numbers[token] < 0 || numbers[token] >= call.numbers[1]) return false;
    memcpy(at[2] + token * bytes, at[0] + numbers[token] * bytes, bytes);
  }
  return true;
}

}  // namespace

// An `Outcome`.
extern "C" int run(const Call* calls, int64_t num_calls, const int64_t* bases, int64_t tokens,
                   const Rows* rows, const Layer* layers, int threads) {
  for (int64_t i = 0; i < num_calls; i++) {
    const Call& call = calls[i];
    const int64_t* n = call.numbers;
    char* at[4];
    for (int j = 0; j < 4; j++) {
      const Place& place = call.places[j];
      at[j] = (char*)(bases[place.base] + place.per_token * tokens + place.fixed);
    }
    switch (call.kind) {
      case kMultiply:
        ((Multiply)call.function)(at[0], at[1], at[2], at[3], tokens, n[0], n[1], n[2],
                                  threads);
        break;
      case kNormalise:
        normalise(call, at, tokens, threads);
        break;
      case kRotate:
        ((Rotate)call.function)(at[0], at[1], at[2], at[3], tokens, n[0], n[1], n[2], n[3],
                                threads);
        break;
      case kGate:
      case kAdd:
        ((Pairs)call.function)(at[0], at[1], at[2], tokens, n[0], n[1], n[2], threads);
        break;
      case kCopy:
        for (int64_t token = 0; token < tokens; token++)
          memcpy(at[1] + token * n[2], at[0] + token * n[1], n[0]);
        break;
      case kAttend:
        if (!attend(call, at, rows, layers[n[0]], threads)) return kNoBlock;
        break;
      case kRows:
        if (!take_rows(call, at, tokens)) return kNoRow;
        break;
      case kClear:
        for (int64_t token = 0; token < tokens; token++)
          if (((const int64_t*)at[1])[token] != 0)
            memcpy(at[2] + token * n[0], at[0] + token * n[1], n[0]);
          else
            memset(at[2] + token * n[0], 0, n[0]);
        break;
    }
  }
  return kDone;
}
