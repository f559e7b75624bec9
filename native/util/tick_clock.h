// Cheap time stamps in large numbers: a processor counter is read when they are taken, and converted to time when they
// are read.
#pragma once

#include <cstdint>

#include "util/clock.h"

namespace crossrail {

// Counts at a constant rate if the processor guarantees one, and in nanoseconds of now_ns() elsewhere. Measured here:
// 10 against 24 ns per reading. In a simulated engine, nanoseconds of its world.
// Threads: any.
class TickClock {
 public:
  // simulated: null, or a clock to use instead; it outlives this object.
  explicit TickClock(const Clock* simulated);

  int64_t ticks() const {
    if (simulated_ != nullptr) [[unlikely]]
      return simulated_->now_ns();
#if defined(__x86_64__)
    return has_counter_ ? static_cast<int64_t>(__builtin_ia32_rdtsc()) : now_ns();
#elif defined(__aarch64__)
    int64_t count;
    asm volatile("mrs %0, cntvct_el0" : "=r"(count));
    return count;
#else
    return now_ns();
#endif
  }

  // The number of ticks in `ns`, roughly: for deciding what is soon, not for display.
  int64_t ticks_in(int64_t ns) const;

  // From ticks to now_ns(): a straight line through the clock's first reading and the one made here.
  class Scale {
   public:
    int64_t to_ns(int64_t ticks) const {
      return start_ns_ + static_cast<int64_t>(static_cast<double>(ticks - start_ticks_) * ns_per_tick_);
    }

   private:
    friend class TickClock;
    Scale(int64_t start_ticks, int64_t start_ns, double ns_per_tick)
        : start_ticks_(start_ticks), start_ns_(start_ns), ns_per_tick_(ns_per_tick) {}
    int64_t start_ticks_, start_ns_;
    double ns_per_tick_;
  };
  Scale scale() const;

 private:
  const Clock* const simulated_;
  [[maybe_unused]] bool has_counter_;
  int64_t start_ticks_;
  int64_t start_ns_;
};

}  // namespace crossrail
