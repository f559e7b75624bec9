// How fast a channel moves long pieces, and how many bytes of them it has taken on: when it would be done with one more.
#pragma once

#include <algorithm>
#include <cstdint>

namespace crossrail::tcp {

// Shorter ones do not matter.
inline constexpr uint64_t kPacedBytes = 128 << 10;

// Progress holder.
class Pace {
 public:
  void take(uint64_t bytes, int64_t now) {
    if (bytes < kPacedBytes) return;
    if (ahead_bytes_ == 0) begin(now);
    ahead_bytes_ += bytes;
  }
  void done(uint64_t bytes, int64_t now) {
    if (bytes < kPacedBytes) return;
    ahead_bytes_ -= std::min(bytes, ahead_bytes_);
    window_bytes_ += bytes;
    const int64_t elapsed = now - window_since_ns_;
    if (elapsed < kWindowNs) return;
    const double measured = static_cast<double>(window_bytes_) / static_cast<double>(elapsed);
    const double known = rate(now);
    rate_ = known == 0 ? measured : (known + measured) / 2;
    measured_ns_ = now;
    begin(now);
  }
  // What was taken on goes elsewhere.
  void drop() { ahead_bytes_ = 0; }

  uint64_t ahead_bytes() const { return ahead_bytes_; }
  // Bytes per ns, 0: not known, or no longer. One that was slow for a while must not be passed over for good.
  double rate(int64_t now) const { return now - measured_ns_ < kBelievedNs ? rate_ : 0; }
  // When the rate is known.
  double ns_with(uint64_t bytes) const { return static_cast<double>(ahead_bytes_ + bytes) / rate_; }

 private:
  // On networks that are done sooner, a wrong choice costs little.
  static constexpr int64_t kWindowNs = 5'000'000;
  static constexpr int64_t kBelievedNs = 1'000'000'000;
  void begin(int64_t now) {
    window_since_ns_ = now;
    window_bytes_ = 0;
  }
  uint64_t ahead_bytes_ = 0;
  uint64_t window_bytes_ = 0;
  int64_t window_since_ns_ = 0;
  int64_t measured_ns_ = 0;
  double rate_ = 0;
};

}  // namespace crossrail::tcp
