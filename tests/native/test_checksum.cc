#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "util/checksum.h"

namespace crossrail {

namespace {

std::vector<std::byte> numbers(size_t count) {
  std::vector<std::byte> bytes(count);
  uint64_t state = 7;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

uint64_t sum_of(const std::vector<std::byte>& bytes) {
  Checksum sum;
  sum.add(bytes.data(), bytes.size());
  return sum.value();
}

}  // namespace

TEST_CASE("checksum: does not depend on how the bytes are cut") {
  const auto bytes = numbers(1000);
  for (const size_t cut : {1, 7, 63, 64, 65, 128, 500}) {
    Checksum sum;
    for (size_t at = 0; at < bytes.size(); at += cut) sum.add(bytes.data() + at, std::min(cut, bytes.size() - at));
    CHECK(sum.value() == sum_of(bytes));
  }
}

TEST_CASE("checksum: every bit, every length and every order of words makes another sum") {
  auto bytes = numbers(300);
  std::set<uint64_t> sums = {sum_of(bytes)};
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    const auto mask = static_cast<std::byte>(1u << bit % 8);
    bytes[bit / 8] ^= mask;
    CHECK(sums.insert(sum_of(bytes)).second);
    bytes[bit / 8] ^= mask;
  }
  for (size_t a = 0; a < 296; a += 8) {  // also words of one lane, which are 64 bytes apart
    for (size_t b = a + 8; b + 8 <= 300; b += 8) {
      std::swap_ranges(bytes.begin() + static_cast<long>(a), bytes.begin() + static_cast<long>(a) + 8,
                       bytes.begin() + static_cast<long>(b));
      CHECK(sums.insert(sum_of(bytes)).second);
      std::swap_ranges(bytes.begin() + static_cast<long>(a), bytes.begin() + static_cast<long>(a) + 8,
                       bytes.begin() + static_cast<long>(b));
    }
  }
  for (size_t length = 0; length < 200; ++length) {
    CHECK(sums.insert(sum_of(std::vector<std::byte>(length))).second);  // zeros differ by their number
  }
}

// The sum is part of the wire: two releases that compute it otherwise must not talk.
TEST_CASE("checksum: is what it was") {
  CHECK(sum_of({}) == 0x3b673a0d063ac52a);
  CHECK(sum_of(numbers(1000)) == 0x92e7b6b8d944d331);
}

}  // namespace crossrail
