// Uniform numbers of a race over the vocabulary: random_streams.py says what they are, in torch.
// noise_compiled.py compiles it.

#include <stdint.h>

extern "C" void uniforms_float32(const int64_t* keys, const int64_t* offsets, float* out,
                                 int64_t rows, int64_t tokens) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t token = 0; token < tokens; token++) {
      uint64_t x = uint64_t(keys[row]) + uint64_t(offsets[token]);
      x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
      x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
      x ^= x >> 31;
      const float u = (float(int64_t(x >> 12)) + 0.5f) * 0x1p-52f;
      out[row * tokens + token] = u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f;
    }
}
