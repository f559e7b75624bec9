// A lock for critical sections of a few instructions, and the pause between attempts.
#pragma once

#include <atomic>
#include <thread>

namespace crossrail {

// Tells the core that we spin, so that its sibling and its power budget profit.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Invariant: held_ is true exactly while one thread is between lock() and unlock().
// Spins, then yields: holders may be descheduled when there are more threads than cores.
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
  // acquire: pairs with the release in unlock(), so that we see what the last holder wrote.
  bool try_lock() { return !held_.load(std::memory_order_relaxed) && !held_.exchange(true, std::memory_order_acquire); }
  // A hint: may be outdated when it returns.
  bool is_locked() const { return held_.load(std::memory_order_relaxed); }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> held_{false};
};

}  // namespace crossrail
