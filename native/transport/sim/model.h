// What simulated rails can do, and how long operations take on them. Integers only, so that every machine computes the
// same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

namespace crossrail::sim {

// One rail. Both ends of a wire are occupied while a work's bytes pass.
struct NicModel {
  std::string name;
  uint64_t bytes_per_s = 0;
  uint64_t works_per_s = 0;   // that it can start; 0: unlimited
  int64_t latency_ns = 0;     // from the post to the arrival of the bytes at the peer, on an empty wire
  int64_t completion_ns = 0;  // from there until the sender knows
  int64_t jitter_ns = 0;      // up to this much additional latency
  int64_t overhead_ns = 0;    // time on the wire per work, in addition to its bytes
  bool is_ordered = false;    // works of one path land in the order of posting
  bool names_imm_paths = true;
  uint32_t works_max = 0;  // in flight on one path
  uint64_t work_bytes_max = 0;

  uint32_t speed_mbps() const { return static_cast<uint32_t>(std::min<uint64_t>(bytes_per_s / 125'000, ~uint32_t{0})); }
};

// The connection between engines on one host.
struct LocalModel {
  uint64_t bytes_per_s = 0;
  int64_t latency_ns = 0;
};

// A resource that serves one request after another. Picoseconds: a short work takes less than a nanosecond.
class Wire {
 public:
  using Time = __int128;  // picoseconds: 64 bits would overflow after 106 days
  static constexpr Time kPerNs = 1000;

  // Rounded up. 64-bit arithmetic where it suffices: a 128-bit division is a library call.
  static int64_t ns(Time time) {
    const Time rounded = time + kPerNs - 1;
    if (rounded < Time{std::numeric_limits<int64_t>::max()}) return static_cast<int64_t>(rounded) / int64_t{kPerNs};
    return static_cast<int64_t>(rounded / kPerNs);
  }
  // The time for `bytes` at that rate.
  static Time duration(uint64_t bytes, uint64_t bytes_per_s) {
    if (bytes < (uint64_t{1} << 24)) return static_cast<Time>(bytes * 1'000'000'000'000 / bytes_per_s);  // no overflow
    return static_cast<Time>(bytes) * 1'000'000'000'000 / bytes_per_s;
  }
  // Occupies it for `duration`, from `from` or from when it is free. Returns when that begins.
  Time take(Time from, Time duration) {
    const Time start = std::max(from, free_at_);
    free_at_ = start + duration;
    return start;
  }

 private:
  Time free_at_ = 0;
};

}  // namespace crossrail::sim
