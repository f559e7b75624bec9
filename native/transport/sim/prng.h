// Random numbers that are the same on every machine: integers only.
#pragma once

#include <bit>
#include <cstdint>

namespace crossrail::sim {

// xoshiro256**, seeded by splitmix64: both by D. Blackman and S. Vigna, public domain (prng.di.unimi.it).
class Prng {
 public:
  explicit Prng(uint64_t seed) {
    for (uint64_t& word : state_) {
      seed += 0x9e3779b97f4a7c15;
      uint64_t mixed = seed;
      mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
      mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
      word = mixed ^ mixed >> 31;
    }
  }

  uint64_t next() {
    const uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
    const uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

  // In 0..bound-1, bound at least 1. By multiplication: a bias of bound / 2^64 does not matter here.
  uint64_t below(uint64_t bound) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(next()) * bound) >> 64);
  }
  // In 0..limit.
  int64_t up_to(int64_t limit) {
    return limit <= 0 ? 0 : static_cast<int64_t>(below(static_cast<uint64_t>(limit) + 1));
  }
  // True with this many chances in a million.
  bool chance(uint32_t per_million) { return per_million != 0 && below(1'000'000) < per_million; }

 private:
  uint64_t state_[4];
};

}  // namespace crossrail::sim
