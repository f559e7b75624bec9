// A 64-bit checksum at memory speed, to detect bytes that differ from what was sent. Not against attackers: it is easy
// to make two texts with the same sum.
//
// Eight independent lanes, one widening multiplication per word: plain C++ that every compiler turns into 64 bytes per
// eight or so cycles. CRC32C, half as wide, needs an instruction of newer processors and three interleaved streams to
// come near that.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace crossrail {

// Invariant: the sum depends on the bytes added and their order, not on how they were split into calls.
// Threads: one.
class Checksum {
 public:
  void add(const std::byte* data, uint64_t length_bytes);
  uint64_t value() const;

 private:
  static constexpr size_t kLanes = 8;
  static constexpr size_t kBlockBytes = kLanes * sizeof(uint64_t);
  using Lanes = std::array<uint64_t, kLanes>;
  static void mix(Lanes& lanes, const std::byte* blocks, uint64_t count);

  Lanes lanes_ = {0x8c3f5d1b6a97e203, 0x1d52b7c94ee8a36f, 0xb3a1946e0f7d5c29, 0x47e90c82d5b13fa5,
                  0xe6281fb74c0d93a1, 0x5a9d73e1880b46cf, 0x92c46ba5371fe08d, 0x2fb8d01796a3c54b};
  std::array<std::byte, kBlockBytes> rest_{};  // do not fill a block yet
  uint64_t total_bytes_ = 0;
};

}  // namespace crossrail
