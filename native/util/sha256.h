// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for handshakes of a few hundred bytes, and for names of pages (kv/). Our
// own implementation, because the core links nothing beyond libc and libstdc++; the tests compare it with published
// vectors and with Python's hashlib.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace crossrail {

using Digest = std::array<uint8_t, 32>;

using Sha256State = std::array<uint32_t, 8>;
inline constexpr Sha256State kSha256Start = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                             0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// The compression function: a block of 64 bytes into the state. Uses the processor's SHA instructions if available.
void sha256_block(Sha256State& state, const uint8_t* bytes);
void sha256_block_portable(Sha256State& state, const uint8_t* bytes);  // without them, for tests

// The state as bytes, in the order of a digest.
Digest sha256_bytes(const Sha256State& state);

class Sha256 {
 public:
  void update(std::span<const uint8_t> bytes);
  Digest finish();

 private:
  Sha256State state_ = kSha256Start;
  std::array<uint8_t, 64> buffer_{};
  size_t buffered_ = 0;
  uint64_t total_bytes_ = 0;
};

// Over the concatenation of `parts`.
Digest sha256(std::initializer_list<std::span<const uint8_t>> parts);
Digest hmac_sha256(std::span<const uint8_t> key, std::initializer_list<std::span<const uint8_t>> parts);

// Takes the same time wherever the bytes differ.
bool equal_in_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b);

}  // namespace crossrail
