// Steps between the products of a layer, row by row: a row's result does not depend on the others.
// row_steps.py compiles it and says what the arguments are.

#include "../host_numbers.h"

namespace {

constexpr int64_t kSums = 16;  // side by side, in an order that no address changes

template <typename T>
inline float sum_of_squares(const T* x, int64_t width) {
  float sums[kSums] = {}, sum = 0;
  int64_t d = 0;
  for (; d + kSums <= width; d += kSums)
    for (int64_t i = 0; i < kSums; i++) sums[i] += widened(x[d + i]) * widened(x[d + i]);
  for (; d < width; d++) sums[d % kSums] += widened(x[d]) * widened(x[d]);
  for (int64_t i = 0; i < kSums; i++) sum += sums[i];
  return sum;
}

template <typename T>
void normalise(const T* x, const T* weight, T* out, int64_t rows, int64_t width, float eps,
               float offset, bool wide, int threads) {
  const float share = float(1.0 / double(width));
  each(rows, threads, [=](int64_t row) {
    const T* from = x + row * width;
    T* to = out + row * width;
    const float scale = 1.0f / sqrtf(sum_of_squares(from, width) * share + eps);
    if (weight && wide)
      for (int64_t d = 0; d < width; d++)
        narrow(widened(from[d]) * scale * (widened(weight[d]) + offset), to + d);
    else if (weight)
      for (int64_t d = 0; d < width; d++)
        narrow(rounded<T>(widened(from[d]) * scale) * widened(weight[d]), to + d);
    else
      for (int64_t d = 0; d < width; d++) narrow(widened(from[d]) * scale, to + d);
  });
}

// `to` lies apart from all that is read: with so many addresses a compiler that has to ask makes no
// vectors.
template <typename T>
inline void rotate_head(const T* x, const T* cosine, const T* sine, T* __restrict to,
                        int64_t half) {
  for (int64_t d = 0; d < half; d++)
    narrow(rounded<T>(widened(x[d]) * widened(cosine[d])) - widened(x[d + half]) * widened(sine[d]),
           to + d);
  x += half, cosine += half, sine += half, to += half;
  for (int64_t d = 0; d < half; d++)
    narrow(rounded<T>(widened(x[d]) * widened(cosine[d])) + widened(x[d - half]) * widened(sine[d]),
           to + d);
}

template <typename T>
void rotate(const T* x, const T* cosine, const T* sine, T* out, int64_t tokens, int64_t heads,
            int64_t dim, int64_t token_stride, int64_t head_stride, int threads) {
  each(tokens, threads, [=](int64_t token) {
    for (int64_t head = 0; head < heads; head++)
      rotate_head(x + token * token_stride + head * head_stride, cosine + token * dim,
                  sine + token * dim, out + (token * heads + head) * dim, dim / 2);
  });
}

template <typename T>
void gate(const T* x, const T* factor, T* out, int64_t rows, int64_t width, int64_t x_stride,
          int64_t factor_stride, int threads) {
  each(rows, threads, [=](int64_t row) {
    for (int64_t d = 0; d < width; d++)
      narrow(gated(x[row * x_stride + d], factor[row * factor_stride + d]), out + row * width + d);
  });
}

template <typename T>
void add(const T* x, const T* y, T* out, int64_t rows, int64_t width, int64_t x_stride,
         int64_t y_stride, int threads) {
  each(rows, threads, [=](int64_t row) {
    for (int64_t d = 0; d < width; d++)
      narrow(widened(x[row * x_stride + d]) + widened(y[row * y_stride + d]),
             out + row * width + d);
  });
}

}  // namespace

#define STEPS(name, T)                                                                             \
  extern "C" void normalise_##name(const T* x, const T* weight, T* out, int64_t rows,              \
                                   int64_t width, float eps, float offset, int wide, int threads) {\
    normalise<T>(x, weight, out, rows, width, eps, offset, wide != 0, threads);                    \
  }                                                                                                \
  extern "C" void rotate_##name(const T* x, const T* cosine, const T* sine, T* out,                \
                                int64_t tokens, int64_t heads, int64_t dim, int64_t token_stride,  \
                                int64_t head_stride, int threads) {                                \
    rotate<T>(x, cosine, sine, out, tokens, heads, dim, token_stride, head_stride, threads);       \
  }                                                                                                \
  extern "C" void gate_##name(const T* x, const T* factor, T* out, int64_t rows, int64_t width,    \
                              int64_t x_stride, int64_t factor_stride, int threads) {              \
    gate<T>(x, factor, out, rows, width, x_stride, factor_stride, threads);                        \
  }                                                                                                \
  extern "C" void add_##name(const T* x, const T* y, T* out, int64_t rows, int64_t width,          \
                             int64_t x_stride, int64_t y_stride, int threads) {                    \
    add<T>(x, y, out, rows, width, x_stride, y_stride, threads);                                   \
  }

STEPS(float32, float)
STEPS(bfloat16, Bfloat16)
