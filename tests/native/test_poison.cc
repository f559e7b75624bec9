// Memory that nobody should write to any more.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/poison.h"

namespace crossrail {

TEST_CASE("poison finds any changed byte, wherever ranges begin and end") {
  std::vector<std::byte> memory(256);
  const int64_t first = 0;
  for (uint64_t offset = 0; offset < 20; ++offset) {
    for (uint64_t length = 1; length < 40; ++length) {
      std::fill(memory.begin(), memory.end(), std::byte{0});
      Poison poison(memory.data(), memory.size(), offset, 0, length, {.data = &first, .count = 1});
      poison.fill();
      REQUIRE(!poison.find());
      for (size_t i = 0; i < memory.size(); ++i) {
        if (i < offset || i >= offset + length) REQUIRE(memory[i] == std::byte{0});
      }
      const uint64_t hit = offset + length / 2;
      memory[hit] ^= std::byte{1};
      const auto found = poison.find();
      REQUIRE(found);
      CHECK(found->offset == hit);
      CHECK(found->length_bytes == 1);
      CHECK(found->found[0] == static_cast<uint8_t>(memory[hit]));
    }
  }
}

}  // namespace crossrail
