// The measured rate of each channel of a link, its bytes in flight, and the share of the waiting work that it should
// take.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

namespace crossrail::tcp {

// What an operation of this length costs a channel: a short one costs more than its bytes.
constexpr uint64_t paced_bytes(uint64_t length) { return length + 1024; }

// The rate and the bytes in flight of one channel, in paced bytes. Only the progress holder uses it.
class Pace {
 public:
  // A new connection, with its round-trip time. It may be faster than the one before.
  void begin(int64_t round_trip_ns) {
    *this = Pace();
    round_trip_ns_ = round_trip_ns;
  }
  // A shorter round-trip time was seen since.
  void set_round_trip(int64_t ns) { round_trip_ns_ = ns; }
  void take(uint64_t bytes, int64_t now) {
    // Nothing is acknowledged before a round trip has passed, however fast the channel is.
    if (ahead_bytes_ == 0) busy_since_ns_ = now + round_trip_ns_;
    ahead_bytes_ += bytes;
  }
  // True: the rate was measured by this.
  bool done(uint64_t bytes, int64_t now) {
    if (ahead_bytes_ == 0) return false;  // of an earlier connection
    ahead_bytes_ -= std::min(bytes, ahead_bytes_);
    if (measures_ > 0 && now - measured_ns_ < kBurstNs) {
      amend(bytes, now);
      return false;
    }
    bytes_ += bytes;
    const int64_t elapsed = busy_ns_ + std::max<int64_t>(now - busy_since_ns_, 0);
    // Acknowledgements come in bursts, so a short window says nothing. A few bytes measure latency, not bandwidth.
    const bool are_few = bytes_ < kFewBytes;
    if (bytes_ < kWindowBytes && (elapsed < kWindowNs || are_few)) {
      if (ahead_bytes_ == 0) busy_ns_ = elapsed;
      if (ahead_bytes_ == 0 && elapsed >= kWindowNs) bytes_ = busy_ns_ = 0;
      return false;
    }
    rate_before_ = is_known() ? rate_ : 0;
    measured_ns_ = now;
    ++measures_;
    window_bytes_ = bytes_;
    window_ns_ = elapsed;
    rate_ = blended_rate();
    bytes_ = 0;
    busy_ns_ = 0;
    busy_since_ns_ = std::max(now, busy_since_ns_);
    return true;
  }
  // Its operations go over other channels.
  void drop() { ahead_bytes_ = 0; }

  uint64_t ahead_bytes() const { return ahead_bytes_; }
  // The first window does not count: it may have waited for a retransmission, or for other connections that began at
  // the same time.
  bool is_known() const { return measures_ >= 2; }
  int64_t round_trip_ns() const { return round_trip_ns_; }
  // Bytes per ns, 0: not known. If bytes have been in flight for long without an acknowledgement, that bounds the rate
  // that was measured before.
  double rate(int64_t now) const {
    const int64_t waited = busy_ns_ + now - busy_since_ns_;
    const double measured = is_known() ? rate_ : 0;
    if (ahead_bytes_ == 0 || waited <= kWindowNs) return measured;
    const double most = static_cast<double>(bytes_ + ahead_bytes_) / static_cast<double>(waited);
    return is_known() ? std::min(measured, most) : most;
  }
  // Whether a slow channel that has nothing in flight should take this many bytes to see if it still is slow. Its last
  // measurement is so old that such trials take a twentieth of the time at most.
  bool is_to_be_tried(double bytes, int64_t now) const {
    if (!is_known() || ahead_bytes_ != 0) return false;
    const auto since = static_cast<double>(now - measured_ns_);
    return since > kBelievedNs && (since > kBelievedMaxNs || since * rate_ > 20 * bytes);
  }

 private:
  // More of the burst that ended the latest window: it belongs to that window, however many bytes it is.
  void amend(uint64_t bytes, int64_t now) {
    window_bytes_ += bytes;
    const int64_t end_ns = std::max(now, busy_since_ns_);
    window_ns_ += end_ns - busy_since_ns_;
    busy_since_ns_ = end_ns;
    rate_ = blended_rate();
  }
  double blended_rate() const {
    const double measured = static_cast<double>(window_bytes_) / static_cast<double>(std::max(window_ns_, kBriefNs));
    return rate_before_ > 0 ? (rate_before_ + measured) / 2 : measured;
  }

  // Shorter windows are not measured: where everything is done sooner, a wrong choice costs little.
  static constexpr int64_t kWindowNs = 5'000'000;
  static constexpr uint64_t kWindowBytes = 8 << 20;
  // No network moves a window's bytes sooner.
  static constexpr int64_t kBriefNs = 20'000;
  static constexpr int64_t kBurstNs = 100'000;
  static constexpr uint64_t kFewBytes = 64 << 10;
  static constexpr double kBelievedNs = 1e9;
  static constexpr double kBelievedMaxNs = 30e9;
  int64_t round_trip_ns_ = 0;
  uint64_t ahead_bytes_ = 0;
  // Since the rate was measured: the bytes acknowledged, and how long bytes were in flight, not counting the time since
  // busy_since_ns_.
  uint64_t bytes_ = 0;
  int64_t busy_ns_ = 0;
  int64_t busy_since_ns_ = 0;
  int64_t measured_ns_ = 0;
  uint32_t measures_ = 0;
  double rate_ = 0;
  // The latest window, and the rate before it (0: not known).
  uint64_t window_bytes_ = 0;
  int64_t window_ns_ = 0;
  double rate_before_ = 0;
};

// A channel that can take work. rate: bytes per ns. ahead_bytes: what it has to deliver first, including the bytes of
// its round trip.
struct Load {
  double rate;
  double ahead_bytes;

  double ns_with(double bytes) const { return (ahead_bytes + bytes) / rate; }
};

// How many of the waiting bytes the channel at `self` should take on, so that all channels finish at the same time
// ("water-filling").
inline double fair_share(std::span<const Load> loads, size_t self, double waiting_bytes) {
  // The time at which all finish. Each round leaves out the channels that finish later with what they already have.
  double level_ns = std::numeric_limits<double>::infinity();
  for (size_t round = 0; round < loads.size(); ++round) {
    double rate = 0;
    double bytes = waiting_bytes;
    for (const Load& load : loads) {
      if (load.ns_with(0) >= level_ns) continue;
      rate += load.rate;
      bytes += load.ahead_bytes;
    }
    if (rate == 0 || bytes / rate >= level_ns) break;
    level_ns = bytes / rate;
  }
  return level_ns * loads[self].rate - loads[self].ahead_bytes;
}

// Whether no other channel would finish `bytes` more sooner.
inline bool would_be_first(std::span<const Load> loads, size_t self, double bytes) {
  const double own_ns = loads[self].ns_with(bytes);
  return std::all_of(loads.begin(), loads.end(), [&](const Load& other) { return own_ns <= other.ns_with(bytes); });
}

}  // namespace crossrail::tcp
