// A 64-bit checksum at the speed of memory, to find bytes that are not what was sent. Not against people: who wants to
// can make two texts of one sum.
//
// Eight independent lanes, a widening multiplication per word: plain C++ that every compiler turns into 64 bytes in
// some eight cycles, where CRC32C, half as wide, needs an instruction of the newer processors and three interleaved
// streams to come near.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace crossrail {

// Invariant: the sum depends on the bytes added, in their order, and not on how they were cut into calls.
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
  std::array<std::byte, kBlockBytes> rest_{};  // that fills no block yet
  uint64_t total_bytes_ = 0;
};

}  // namespace crossrail
