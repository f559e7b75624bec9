// Monotonic time in nanoseconds, and deadlines as points on it.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace crossrail {

// CLOCK_MONOTONIC, nanoseconds.
int64_t now_ns();

using Deadline = int64_t;  // a value of now_ns()
inline constexpr Deadline kNoDeadline = std::numeric_limits<int64_t>::max();

// A deadline `seconds` from now; negative means none.
Deadline deadline_in(double seconds);

// An engine's source of time: the real clock, or that of a simulated world. Deadlines are points on it.
// Threads: any.
class Clock {
 public:
  virtual int64_t now_ns() const = 0;
  // Said in loops that poll until something happens: simulated time moves on to what happens next, real time does so by
  // itself.
  virtual void pass() = 0;
  Deadline deadline_in(double seconds) const;

 protected:
  ~Clock() = default;
};
Clock& real_clock();

// For people: "2.5 s".
std::string seconds_text(int64_t ns);

}  // namespace crossrail
