#include "util/clock.h"

#include <ctime>

namespace crossrail {

namespace {

class RealClock final : public Clock {
 public:
  int64_t now_ns() const override { return crossrail::now_ns(); }
  void pass() override {}
};

}  // namespace

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

Deadline deadline_in(double seconds) { return real_clock().deadline_in(seconds); }

Deadline Clock::deadline_in(double seconds) const {
  if (!(seconds >= 0 && seconds <= 1e9)) return kNoDeadline;  // likewise for NaN
  return now_ns() + static_cast<int64_t>(seconds * 1e9);
}

Clock& real_clock() {
  static RealClock clock;
  return clock;
}

std::string seconds_text(int64_t ns) {
  const int64_t tenths = ns / 100'000'000;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

}  // namespace crossrail
