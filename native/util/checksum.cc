#include "util/checksum.h"

#include <algorithm>
#include <cstring>

namespace crossrail {

namespace {

constexpr uint64_t kFactor = 0xa3d19e6f2c85b74d;

// Both halves of the product: each bit of the lane and the word affects bits above and below itself. One half alone
// would pass the top bit on unchanged, so that it could cancel with one bit of the lane's next word.
constexpr uint64_t step(uint64_t lane, uint64_t word) {
  const auto product = static_cast<unsigned __int128>(lane ^ word) * kFactor;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64U) ^ lane;
}

}  // namespace

void Checksum::mix(Lanes& lanes, const std::byte* blocks, uint64_t count) {
  Lanes now = lanes;  // in registers
  for (; count > 0; --count, blocks += kBlockBytes) {
    for (size_t i = 0; i < kLanes; ++i) {
      uint64_t word;
      std::memcpy(&word, blocks + i * sizeof word, sizeof word);
      now[i] = step(now[i], word);
    }
  }
  lanes = now;
}

void Checksum::add(const std::byte* data, uint64_t length_bytes) {
  if (length_bytes == 0) return;
  const uint64_t filled = total_bytes_ % kBlockBytes;
  total_bytes_ += length_bytes;
  if (filled > 0) {
    const uint64_t taken = std::min<uint64_t>(length_bytes, kBlockBytes - filled);
    std::memcpy(rest_.data() + filled, data, taken);
    if (filled + taken < kBlockBytes) return;
    mix(lanes_, rest_.data(), 1);
    data += taken;
    length_bytes -= taken;
  }
  mix(lanes_, data, length_bytes / kBlockBytes);
  const uint64_t left = length_bytes % kBlockBytes;
  if (left > 0) std::memcpy(rest_.data(), data + (length_bytes - left), left);
}

uint64_t Checksum::value() const {
  Lanes lanes = lanes_;
  const uint64_t filled = total_bytes_ % kBlockBytes;
  if (filled > 0) {
    std::array<std::byte, kBlockBytes> last{};
    std::memcpy(last.data(), rest_.data(), filled);
    mix(lanes, last.data(), 1);
  }
  uint64_t sum = step(kFactor, total_bytes_);
  for (const uint64_t lane : lanes) sum = step(sum, lane);
  return step(step(sum, kFactor), ~kFactor);  // the last lane's bits affect all bits of the sum
}

}  // namespace crossrail
