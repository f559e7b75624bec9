// A lock for critical sections of a few instructions, and the pause between attempts.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace crossrail {

// Tells the core that we are spinning, for the benefit of its sibling thread and its power budget.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Invariant: held_ is not 0 exactly while one thread is between lock() and unlock(), and is then the holder's mark.
// Spins, then yields: the holder may be descheduled if there are more threads than cores.
class SpinLock {
 public:
  void lock() {
    for (int spins = 0; !try_lock(); ++spins) {
      if (spins < 64) {
        cpu_relax();
      } else {
        std::this_thread::yield();
      }
    }
  }
  // Pairs with the release in unlock(), so that we see what the last holder wrote. seq_cst, for mark(): if the holder
  // takes the lock and then checks something, and another thread changes that and then checks the mark, at least one
  // sees the other.
  bool try_lock(uint8_t mark = 1) {
    uint8_t free = 0;
    const bool mine = held_.load(std::memory_order_relaxed) == 0 &&
                      held_.compare_exchange_strong(free, mark, std::memory_order_seq_cst, std::memory_order_relaxed);
#ifdef CROSSRAIL_CHECK_HOLDERS
    if (mine) holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
#endif
    return mine;
  }
  // For threads that must not hang if the holder never returns, as in a process that is about to abort: gives up after
  // some milliseconds.
  bool try_lock_for_a_moment() {
    constexpr int kAttempts = 10'000;
    for (int attempts = 0; attempts < kAttempts; ++attempts) {
      if (try_lock()) return true;
      std::this_thread::yield();
    }
    return false;
  }
  // A hint: may be outdated when it returns.
  bool is_locked() const { return held_.load(std::memory_order_relaxed) != 0; }
  // What the holder passed to try_lock(), or 0. Once it no longer is a holder's mark, what that holder did is visible.
  uint8_t mark() const { return held_.load(std::memory_order_seq_cst); }
  void unlock() {
#ifdef CROSSRAIL_CHECK_HOLDERS
    holder_.store(std::thread::id(), std::memory_order_relaxed);
#endif
    held_.store(0, std::memory_order_release);
  }

#ifdef CROSSRAIL_CHECK_HOLDERS
  // relaxed: the holder reads what it wrote itself, and any other thread never reads its own id.
  bool is_mine() const { return holder_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
#endif

 private:
  std::atomic<uint8_t> held_{0};
#ifdef CROSSRAIL_CHECK_HOLDERS
  std::atomic<std::thread::id> holder_{};
#endif
};

}  // namespace crossrail
