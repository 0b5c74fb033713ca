// Calls of other kernels, one after another, and the drafting of chains by such lists. call_list.py
// compiles it, makes the lists and says what their numbers are; draft_chain.py drafts.

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

// Rows of the pass and where the pool's keys and values lie.
struct Rows {
  const int64_t *tables, *positions, *lengths, *begins;
  int64_t num_rows, longest_row, table_width, block_size;
  char* const (*layers)[2];
};

enum Kind { kMultiply, kNormalise, kRotate, kGate, kAdd, kCopy, kAttend, kRows, kClear };
enum Outcome { kDone, kNoBlock, kNoRow };

typedef void (*Multiply)(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t,
                         int64_t, int);
typedef void (*Normalise)(const void*, const void*, void*, int64_t, int64_t, float, float, int);
typedef void (*Rotate)(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t,
                       int64_t, int64_t, int);
typedef void (*Pairs)(const void*, const void*, void*, int64_t, int64_t, int64_t, int64_t, int);
typedef bool (*Attend)(const void*, const void*, const void*, void*, void*, void*, const int64_t*,
                       const int64_t*, const int64_t*, const int64_t*, int64_t, int64_t, int64_t,
                       int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                       int64_t, int64_t, int64_t, int64_t, int64_t, float, int);

// Tokens that are not side by side are normalised one by one.
void normalise(const Call& call, char* const* at, int64_t tokens, int threads) {
  const int64_t *n = call.numbers, rows = n[0], width = n[1], stride = n[2], bytes = n[3];
  const Normalise function = (Normalise)call.function;
  if (stride == rows * width)
    return function(at[0], at[1], at[2], tokens * rows, width, call.reals[0], call.reals[1],
                    threads);
  for (int64_t token = 0; token < tokens; token++)
    function(at[0] + token * stride * bytes, at[1], at[2] + token * rows * width * bytes, rows,
             width, call.reals[0], call.reals[1], threads);
}

bool attend(const Call& call, char* const* at, const Rows& rows, int threads) {
  const int64_t* n = call.numbers;
  char* const* layer = rows.layers[n[0]];
  return ((Attend)call.function)(at[0], at[1], at[2], layer[0], layer[1], at[3], rows.tables,
                                 rows.positions, rows.lengths, rows.begins, rows.num_rows,
                                 rows.longest_row, rows.table_width, rows.block_size, n[1], n[2],
                                 n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11] >> 1,
                                 n[11] & 1, call.reals[0], threads);
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
                   const Rows* rows, int threads) {
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
        if (!attend(call, at, *rows, threads)) return kNoBlock;
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

namespace {

struct Part {
  const Call* calls;  // none: the part does nothing
  int64_t num_calls;
  int64_t* bases;
};

typedef bool (*Draw)(const float*, int64_t, const float*, const int64_t*, const double*,
                     const float*, const int64_t*, const int64_t*, int64_t, float*, int64_t*,
                     int64_t, int64_t, int);

// A draft and the memory of its parts, of `most_tokens` each; widths in bytes.
struct Chain {
  // ids -> embeddings; taps -> states; these and positions -> `stepped`; `heads` -> `logits`
  Part embed, fuse, step, head;
  Draw draw;
  int64_t *ids, *positions;
  char *hidden, *stepped, *heads, *logits;
  float *wide, *processed;        // [most_tokens, draft_vocab]; `wide` may be `logits`
  int64_t next, head_input;       // which of the step's outputs
  int64_t width;                  // of a state
  int64_t taps_base;              // of `fuse`, where it finds the taps; without it they are states
  int64_t draft_vocab, logits_width;  // the latter of a number
  int64_t ahead, most_tokens, most_in_row;
};

// Rows to draft; `interface.py` has their shapes.
struct Round {
  const int64_t *tokens, *starts, *lengths, *budgets, *tables, *seeds;
  const char* taps;
  const float* temperature;
  const int64_t* top_k;
  const double* top_p;
  const float* min_p;
  const int64_t* vocab_map;
  char* const (*layers)[2];
  int64_t *drafted, *drafted_lengths;
  float *best, *q;  // the first for greedy rows alone, else the second
  int64_t taps_width, num_rows, depth, vocab, table_width, block_size;
};

constexpr int64_t kNotTaken = -3;  // beside an `Outcome`, negated

// Rows of a batch that go on, with what their attention is told.
struct Alive {
  std::vector<int64_t> rows, tables, lengths, begins;

  Rows of(const Round& r, size_t first, size_t count) {
    const int64_t* at = r.tables + rows[first] * r.table_width;
    const bool together = rows[first + count - 1] - rows[first] + 1 == int64_t(count);
    if (!together) {
      tables.resize(count * r.table_width);
      for (size_t i = 0; i < count; i++)
        memcpy(&tables[i * r.table_width], r.tables + rows[first + i] * r.table_width,
               r.table_width * sizeof(int64_t));
      at = tables.data();
    }
    begins.assign(1, 0);
    int64_t longest = 0;
    for (size_t i = 0; i < count; i++) {
      begins.push_back(begins.back() + lengths[i]);
      longest = std::max(longest, lengths[i]);
    }
    return {at, nullptr, lengths.data(), begins.data(), int64_t(count), longest, r.table_width,
            r.block_size, r.layers};
  }
};

int run_part(const Part& part, int64_t tokens, const Rows& rows, int threads) {
  return part.num_calls ? run(part.calls, part.num_calls, part.bases, tokens, &rows, threads)
                        : kDone;
}

// Embeddings of `ids` and the step over `hidden`.
int step_over(const Chain& c, int64_t tokens, Rows rows, int threads) {
  rows.positions = c.positions;
  const int outcome = run_part(c.embed, tokens, rows, threads);
  return outcome == kDone ? run_part(c.step, tokens, rows, threads) : outcome;
}

// Token `from` of the step becomes row `to` of those that draft.
void keep(const Chain& c, int64_t tokens, int64_t from, char* hidden, int64_t to) {
  const char *next = c.stepped + c.next * tokens * c.width,
             *input = c.stepped + c.head_input * tokens * c.width;
  memcpy(hidden + to * c.width, next + from * c.width, c.width);
  memcpy(c.heads + to * c.width, input + from * c.width, c.width);
}

// Reads the committed tokens of all rows that have any, whole rows together. Afterwards `hidden`,
// `heads` and `positions` are their newest.
int64_t catch_up(const Chain& c, const Round& r, Alive* alive, int threads) {
  const int64_t without = c.ahead - 1;  // tokens of a row that have no state of their own
  std::vector<int64_t> counts, begins, newest;
  for (int64_t row = 0, begin = 0; row < r.num_rows; begin += r.lengths[row++]) {
    const int64_t count = r.lengths[row] - without;
    if (count <= 0) continue;
    if (count > c.most_in_row) return kNotTaken;
    alive->rows.push_back(row);
    counts.push_back(count), begins.push_back(begin + without);
    newest.push_back(r.starts[row] + count - 1);
  }
  const size_t num_rows = counts.size();
  if (int64_t(num_rows) > c.most_tokens) return kNotTaken;
  std::vector<char> hidden(num_rows * c.width);
  const char* taps = r.taps;
  for (size_t first = 0, last; first < num_rows; first = last) {
    int64_t tokens = 0;
    alive->lengths.clear();
    for (last = first; last < num_rows && tokens + counts[last] <= c.most_tokens; last++) {
      for (int64_t i = 0; i < counts[last]; i++) {
        c.ids[tokens + i] = r.tokens[begins[last] + i];
        c.positions[tokens + i] = r.starts[alive->rows[last]] + i;
      }
      tokens += counts[last];
      alive->lengths.push_back(counts[last]);
    }
    const Rows rows = alive->of(r, first, last - first);
    if (c.fuse.num_calls)
      c.fuse.bases[c.taps_base] = int64_t(taps);
    else if (taps)
      memcpy(c.hidden, taps, tokens * r.taps_width);
    if (taps) taps += tokens * r.taps_width;
    int outcome = run_part(c.fuse, tokens, rows, threads);
    if (outcome == kDone) outcome = step_over(c, tokens, rows, threads);
    if (outcome != kDone) return -outcome;
    for (size_t i = first; i < last; i++)
      keep(c, tokens, rows.begins[i - first + 1] - 1, hidden.data(), i);
  }
  memcpy(c.hidden, hidden.data(), hidden.size());
  std::copy(newest.begin(), newest.end(), c.positions);
  return kDone;
}

// Drops the rows that draft no more than `depth` tokens.
void drop_ended(const Chain& c, const Round& r, int64_t depth, Alive* alive) {
  size_t kept = 0;
  for (size_t i = 0; i < alive->rows.size(); i++) {
    if (r.budgets[alive->rows[i]] <= depth) continue;
    if (kept < i) {
      memcpy(c.hidden + kept * c.width, c.hidden + i * c.width, c.width);
      memcpy(c.heads + kept * c.width, c.heads + i * c.width, c.width);
      c.positions[kept] = c.positions[i], c.ids[kept] = c.ids[i];
      alive->rows[kept] = alive->rows[i];
    }
    kept++;
  }
  alive->rows.resize(kept);
}

// The first of the largest numbers, of those that are none if there are any, as torch's `max`.
int64_t first_largest(const float* x, int64_t count) {
  float most = x[0];
  bool number = true;
  for (int64_t v = 0; v < count; v++) {
    most = x[v] > most ? x[v] : most;
    number &= x[v] == x[v];
  }
  int64_t at = 0;
  while (number ? x[at] != most : x[at] == x[at]) at++;
  return at;
}

// Tokens of the rows at `depth` from their logits; false where torch has to draw them.
bool draw_tokens(const Chain& c, const Round& r, int64_t depth, const Alive& alive, int threads) {
  const size_t count = alive.rows.size();
  const int64_t draft_vocab = c.draft_vocab;
  std::vector<int64_t> drawn(count);
  each(count, threads, [&](int64_t i) {
    float* wide = c.wide + i * draft_vocab;
    const Bfloat16* narrow = (const Bfloat16*)c.logits + i * draft_vocab;
    for (int64_t v = 0; c.logits_width == 2 && v < draft_vocab; v++) wide[v] = widened(narrow[v]);
    if (r.best) drawn[i] = first_largest(wide, draft_vocab);
  });
  std::vector<int64_t> top_k(count), seeds(count), positions(count);
  std::vector<float> temperature(count), min_p(count);
  std::vector<double> top_p(count);
  for (size_t i = 0; i < count; i++) {
    const int64_t row = alive.rows[i];
    temperature[i] = r.temperature[row], top_k[i] = r.top_k[row], top_p[i] = r.top_p[row];
    min_p[i] = r.min_p[row], seeds[i] = r.seeds[row], positions[i] = c.positions[i] + c.ahead;
  }
  if (!r.best && !c.draw(c.wide, draft_vocab, temperature.data(), top_k.data(), top_p.data(),
                         min_p.data(), seeds.data(), positions.data(), 0, c.processed,
                         drawn.data(), count, draft_vocab, threads))
    return false;
  for (size_t i = 0; i < count; i++) {
    const int64_t at = alive.rows[i] * r.depth + depth;
    c.ids[i] = r.vocab_map ? r.vocab_map[drawn[i]] : drawn[i];
    r.drafted[at] = c.ids[i], r.drafted_lengths[alive.rows[i]] = depth + 1;
    if (r.best) {
      r.best[at] = c.wide[i * draft_vocab + drawn[i]];
      continue;
    }
    const float* from = c.processed + i * draft_vocab;
    float* to = r.q + at * r.vocab;
    if (!r.vocab_map) memcpy(to, from, draft_vocab * sizeof(float));
    for (int64_t v = 0; r.vocab_map && v < draft_vocab; v++) to[r.vocab_map[v]] = from[v];
  }
  return true;
}

}  // namespace

// Reads what the draft has not and drafts as many tokens as each row may. The number of depths that
// were drawn, `round->depth` where all were: torch has to draw the next one, of `logits`, from the
// states in `hidden`. Else `kNotTaken`, and nothing was done, or an `Outcome`, negated.
extern "C" int64_t draft(const Chain* chain, const Round* round, int threads) {
  const Chain& c = *chain;
  const Round& r = *round;
  Alive alive;
  const int64_t outcome = catch_up(c, r, &alive, threads);
  if (outcome < 0) return outcome;
  for (int64_t depth = 0; depth < r.depth; depth++) {
    drop_ended(c, r, depth, &alive);
    const int64_t count = alive.rows.size();
    if (count == 0) break;
    alive.lengths.assign(count, 1);
    const Rows rows = alive.of(r, 0, count);
    if (depth > 0) {
      for (int64_t i = 0; i < count; i++) c.positions[i]++;
      const int stepped = step_over(c, count, rows, threads);
      if (stepped != kDone) return -stepped;
      for (int64_t i = 0; i < count; i++) keep(c, count, i, c.hidden, i);
    }
    run_part(c.head, count, rows, threads);
    if (!draw_tokens(c, r, depth, alive, threads)) return depth;
  }
  return r.depth;
}
