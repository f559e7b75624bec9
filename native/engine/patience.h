// How long an idle thread spins before it sleeps, and when it lets others have the core.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "util/clock.h"

namespace crossrail {

// The engine's spin_ns, or up to 16 times that after sleeps that ended sooner than it takes to fall asleep. Such sleeps
// come in series where a provider without a NIC moves bytes whenever it is polled, which no round sees. From time to
// time it tries again whether sleeping pays; otherwise events that arrive just in time for a long spinner would keep it
// spinning for ever.
// Who spins for longer than kYieldAfterNs yields in between: a thread that was woken for this, or by this thread, may
// need the core. But where threads that compute want it, a yield costs milliseconds, their share of time, while a
// sleeper that is woken gets the core back at once. So after such a yield nobody yields for a while: they sleep. The
// next such yield soon after that makes it twice as long.
class Patience {
 public:
  static constexpr int64_t kYieldAfterNs = 2'000;

  // crowded_ns: how long to spin, without yielding, while others want the core.
  explicit Patience(int64_t spin_ns, int64_t crowded_ns = kYieldAfterNs)
      : spin_ns_(spin_ns), crowded_spin_ns_(std::min(spin_ns, crowded_ns)) {}
  bool is_crowded(int64_t now) const { return now < crowded_until_.load(std::memory_order_relaxed); }
  // How long to spin this time.
  int64_t spin_ns(int64_t now) {
    if (is_crowded(now)) return crowded_spin_ns_;
    const uint32_t doublings = doublings_.load(std::memory_order_relaxed);
    if (doublings == 0) return spin_ns_;
    const uint32_t spins = spins_.load(std::memory_order_relaxed) + 1;
    spins_.store(spins, std::memory_order_relaxed);
    if (spins % kSpinsPerTry == 0) doublings_.store(doublings - 1, std::memory_order_relaxed);
    return spin_ns_ << doublings;
  }
  // True: others kept the core for long. Sleep now. moves: goes up when others do what this thread would do; then they
  // had better keep the core.
  bool yield(const std::atomic<uint64_t>* moves = nullptr) {
    const uint64_t moves_before = moves == nullptr ? 0 : moves->load(std::memory_order_relaxed);
    const int64_t begun = now_ns();
    std::this_thread::yield();
    if (moves != nullptr && moves->load(std::memory_order_relaxed) != moves_before) return false;
    return note_yield(begun, now_ns());
  }
  bool note_yield(int64_t begun, int64_t ended) {
    if (ended - begun < kLongNs) return false;
    const int64_t last = crowded_ns_.load(std::memory_order_relaxed);
    const bool is_again = begun - crowded_until_.load(std::memory_order_relaxed) < last;
    const int64_t next = is_again ? std::min(2 * last, kCrowdedNsMax) : kCrowdedNs;
    crowded_ns_.store(next, std::memory_order_relaxed);
    crowded_until_.store(ended + next, std::memory_order_relaxed);
    return true;
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
  static constexpr int64_t kLongNs = 200'000;  // a peer on this core that only answers is done sooner
  static constexpr int64_t kCrowdedNs = 20'000'000;
  static constexpr int64_t kCrowdedNsMax = 2'000'000'000;
  const int64_t spin_ns_;
  const int64_t crowded_spin_ns_;
  // Relaxed, and changed in two steps: what several threads learn at the same time is a guess in any case.
  std::atomic<uint32_t> doublings_{0};
  std::atomic<uint32_t> spins_{0};
  std::atomic<int64_t> crowded_until_{0};
  std::atomic<int64_t> crowded_ns_{0};
};

}  // namespace crossrail
