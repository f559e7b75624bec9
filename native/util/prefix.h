// Comparing addresses by their prefixes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace crossrail {

// Whether the first `bits` bits are the same; both have as many.
inline bool share_bits(std::span<const uint8_t> a, std::span<const uint8_t> b, size_t bits) {
  const size_t whole = bits / 8;
  if (!std::ranges::equal(a.first(whole), b.first(whole))) return false;
  const auto mask = static_cast<uint8_t>(0xff00u >> (bits % 8));
  return bits % 8 == 0 || (a[whole] & mask) == (b[whole] & mask);
}

}  // namespace crossrail
