// Threads that the kernels of this process share, on the processor that serves.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

// A pass of a small model has hundreds of parallel loops of some 0.05 ms. OpenMP ends each of them
// when every thread has been there, so that one which has no processor for a moment, as on a busy
// machine, holds up all others, each time; here the caller takes what nobody has begun.
class Team {
 public:
  using Call = void (*)(const void* step, int64_t i);

  // `call(step, i)` of 0 <= i < count, by `threads` threads of which the caller is one. Another
  // thread's loop at the same time has its caller alone.
  void run(int64_t count, int threads, Call call, const void* step) {
    if (taken_.exchange(true, std::memory_order_acquire)) {
      for (int64_t i = 0; i < count; i++) call(step, i);
      return;
    }
    grow(threads);
    count_ = count, threads_ = threads, call_ = call, step_ = step;
    for (int t = 0; t < threads; t++)
      shares_[t].next.store(count * t / threads, std::memory_order_relaxed);
    inside_.store(0, std::memory_order_release);
    turn_.fetch_add(1);
    if (asleep_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      turned_.notify_all();
    }
    work(0);
    for (int tries = 0, nobody = 0; !inside_.compare_exchange_weak(nobody, kClosed); nobody = 0)
      wait_awake(++tries);
    taken_.store(false, std::memory_order_release);
  }

 private:
  static constexpr int kClosed = -(1 << 30);  // of `inside_`: the loop is done
  static constexpr int kPauses = 64;          // before a waiting thread offers its processor
  static constexpr int kAwake = 2000;         // tries after which an idle thread sleeps

  // A thread's share of a loop, from `next` to the next thread's first.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
  };

  static void wait_awake(int tries) {
    if (tries > kPauses) return std::this_thread::yield();
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }

  void grow(int threads) {
    if (threads > room_) shares_.reset(new Share[room_ = threads]);
    for (; started_ < threads - 1; started_++) try {
        std::thread([this, own = started_ + 1] { serve(own); }).detach();
      } catch (const std::system_error&) {
        return;  // The others do its share.
      }
  }

  // Weights of a share lie one behind the other, so a thread ends its own before it helps another.
  void work(int own) {
    for (int k = 0; k < threads_; k++) {
      const int t = (own + k) % threads_;
      const int64_t end = count_ * (t + 1) / threads_;
      std::atomic<int64_t>& next = shares_[t].next;
      for (int64_t i; next.load(std::memory_order_relaxed) < end &&
                      (i = next.fetch_add(1, std::memory_order_relaxed)) < end;)
        call_(step_, i);
    }
  }

  void serve(int own) {
    for (uint32_t seen = 0;;) {
      seen = turn_after(seen);
      int others = inside_.load();
      while (others >= 0 && !inside_.compare_exchange_weak(others, others + 1)) {}
      if (others < 0) continue;
      if (own < threads_) work(own);
      inside_.fetch_sub(1);
    }
  }

  uint32_t turn_after(uint32_t seen) {
    for (int tries = 0; tries < kAwake; wait_awake(++tries))
      if (turn_.load() != seen) return turn_.load();
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.fetch_add(1);
    turned_.wait(lock, [&] { return turn_.load() != seen; });
    asleep_.fetch_sub(1);
    return turn_.load();
  }

  // Of the loop; read by whoever is inside.
  int64_t count_ = 0;
  int threads_ = 0;
  Call call_ = nullptr;
  const void* step_ = nullptr;
  std::unique_ptr<Share[]> shares_;

  std::atomic<bool> taken_{false};
  // Apart from what idle threads look at: all that are at a loop write here.
  alignas(64) std::atomic<int> inside_{kClosed};  // threads but the caller that are at the loop
  alignas(64) std::atomic<uint32_t> turn_{0};
  std::atomic<int> asleep_{0};
  std::mutex mutex_;
  std::condition_variable turned_;
  int started_ = 0, room_ = 0;
};

// One for all libraries of the process where names are unique in it (GNU's linker), else one each.
// Never destroyed: its threads outlive the end of `main`.
inline Team& team() {
  static Team* const shared = new Team;
  return *shared;
}
