// How a blocking wait ends, and how it lets its caller in between.
#pragma once

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

// How a blocking wait asks its caller whether to go on: Ctrl-C. Asked on the waiting thread about every 50 ms; may take
// the GIL. One object is one wait, of however many shorter ones that is made: when it is asked next outlives each.
class InterruptCheck {
 public:
  InterruptCheck() = default;  // goes on
  template <typename Asked>
    requires std::is_invocable_r_v<bool, Asked&>
  InterruptCheck(Asked asked) : asked_(std::move(asked)) {}

  // When it is to be asked next; the first call says from when on.
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
  mutable int64_t due_ns_ = 0;  // the waiting thread's; 0: not asked yet
};

}  // namespace crossrail
