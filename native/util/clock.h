// Monotonic time in nanoseconds, and deadlines as points on it.
#pragma once

#include <cstdint>
#include <limits>

namespace crossrail {

// CLOCK_MONOTONIC, nanoseconds.
int64_t now_ns();

using Deadline = int64_t;  // a now_ns() value
inline constexpr Deadline kNoDeadline = std::numeric_limits<int64_t>::max();

// A deadline `seconds` from now; negative means none.
Deadline deadline_in(double seconds);

}  // namespace crossrail
