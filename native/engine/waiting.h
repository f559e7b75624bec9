// How a blocking wait ends, and how it lets its caller in between.
#pragma once

#include <cstdint>
#include <functional>

#include "util/clock.h"

namespace crossrail {

enum class WaitResult : uint8_t {
  kReady,        // what was waited for is there
  kTimeout,      // the deadline passed first
  kInterrupted,  // the interrupt check said stop (Ctrl-C)
  kClosed        // the engine was closed first
};

// Called on the waiting thread at least every 50 ms and after every EINTR; true ends the wait. May take the GIL.
using InterruptCheck = std::function<bool()>;

}  // namespace crossrail
