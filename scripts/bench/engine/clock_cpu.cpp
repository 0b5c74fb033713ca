// The time, as a kernel that stands between others in a list of calls. round_kernels.py compiles it.

#include <chrono>
#include <cstdint>

// The last pointer's number becomes the time in ns.
extern "C" void stamp(const void*, const void*, void* out, int64_t, int64_t, int64_t, int64_t, int) {
  *(int64_t*)out = std::chrono::duration_cast<std::chrono::nanoseconds>(
                       std::chrono::steady_clock::now().time_since_epoch())
                       .count();
}
