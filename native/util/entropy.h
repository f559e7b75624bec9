// An engine's source of random bits: the kernel, or the seed of a simulated world.
#pragma once

#include <cstdint>
#include <span>

namespace crossrail {

// Threads: any.
class Entropy {
 public:
  // Throws TransportError if none are available.
  virtual void fill(std::span<uint8_t> bytes) = 0;
  uint64_t draw_u64();
  uint32_t draw_u32() { return static_cast<uint32_t>(draw_u64()); }

 protected:
  ~Entropy() = default;
};

// Bits that others cannot guess.
Entropy& kernel_entropy();

}  // namespace crossrail
