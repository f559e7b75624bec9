// How a blocking wait ends, and how it lets its caller intervene.
#pragma once

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
