// How a blocking wait ends, and how it lets its caller intervene.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>

#include "util/clock.h"

namespace crossrail {

enum class WaitResult : uint8_t {
  kReady,        // what was waited for is there
  kTimeout,      // the deadline passed first
  kInterrupted,  // the interrupt check said stop (Ctrl-C)
  kClosed        // the engine was closed first
};

// How long an idle thread spins before it sleeps: the engine's spin_ns, or up to 16 times that after sleeps that ended
// sooner than it takes to fall asleep. Such sleeps come in series where a provider without a NIC moves bytes whenever
// it is polled, which no round sees. From time to time it tries again whether sleeping pays; otherwise events that
// arrive just in time for a long spinner would keep it spinning for ever.
class Patience {
 public:
  explicit Patience(int64_t spin_ns) : spin_ns_(spin_ns) {}
  // How long to spin this time.
  int64_t spin_ns() {
    const uint32_t doublings = doublings_.load(std::memory_order_relaxed);
    if (doublings == 0) return spin_ns_;
    const uint32_t spins = spins_.load(std::memory_order_relaxed) + 1;
    spins_.store(spins, std::memory_order_relaxed);
    if (spins % kSpinsPerTry == 0) doublings_.store(doublings - 1, std::memory_order_relaxed);
    return spin_ns_ << doublings;
  }
  // True: spinning once more is better than sleeping again.
  bool note_sleep(int64_t slept_ns) {
    const bool was_short = slept_ns < spin_ns_ / 2;
    const uint32_t doublings = doublings_.load(std::memory_order_relaxed);
    doublings_.store(was_short ? std::min(doublings + 1, kDoublingsMax) : 0, std::memory_order_relaxed);
    return was_short;
  }

 private:
  static constexpr uint32_t kDoublingsMax = 4;
  static constexpr uint32_t kSpinsPerTry = 32;
  const int64_t spin_ns_;
  // Relaxed, and changed in two steps: what several threads learn at the same time is a guess in any case.
  std::atomic<uint32_t> doublings_{0};
  std::atomic<uint32_t> spins_{0};
};

// How a blocking wait asks its caller whether to go on (Ctrl-C). Called on the waiting thread about every 50 ms; it may
// take the GIL. One object serves one wait, even one that consists of several shorter waits: the time of the next
// question carries over.
class InterruptCheck {
 public:
  InterruptCheck() = default;  // never interrupts
  template <typename Asked>
    requires std::is_invocable_r_v<bool, Asked&>
  InterruptCheck(Asked asked) : asked_(std::move(asked)) {}

  // When to ask next; counted from the time of the first call.
  int64_t due_ns(int64_t now) const {
    if (due_ns_ == 0) due_ns_ = now + kEveryNs;
    return due_ns_;
  }
  bool is_due(int64_t now) const { return now >= due_ns(now); }
  // True: the wait ends.
  bool ask(int64_t now) const {
    due_ns_ = now + kEveryNs;
    return asked_ && asked_();
  }

 private:
  static constexpr int64_t kEveryNs = 50'000'000;
  std::function<bool()> asked_;
  mutable int64_t due_ns_ = 0;  // used by the waiting thread only; 0: not asked yet
};

}  // namespace crossrail
