#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "engine/sharding.h"

namespace crossrail {

TEST_CASE("a count split in 1..16 pieces sums to one count") {
  for (uint32_t pieces = 1; pieces <= kRailsMax; ++pieces) {
    uint32_t units = 0;
    for (uint32_t i = 0; i < pieces; ++i) units += units_of_wire(wire_imm(7, share_code_of_piece(pieces, i)));
    CHECK(units == kUnitsPerCount);
  }
}

TEST_CASE("page shares are powers of two of whole counts") {
  for (uint32_t log2 = 0; log2 <= 8; ++log2) {
    CHECK(units_of_wire(wire_imm(1, share_code_of_pages(log2))) == kUnitsPerCount << log2);
  }
}

TEST_CASE("the wire immediate keeps all 28 bits beside every share code") {
  for (uint32_t code = 0; code < 16; ++code) {
    for (const uint32_t imm : {0u, 1u, 0x5555555u, kImmMax}) {
      CHECK(imm_of_wire(wire_imm(imm, code)) == imm);
      CHECK(units_of_wire(wire_imm(imm, code)) == kShareUnits[code]);
    }
  }
}

TEST_CASE("pieces of a range are exactly the range, in order, none empty") {
  std::mt19937_64 random(20510);
  std::vector<uint64_t> lengths = {1, 2, 3, 8191, 8192, 8193, 16385, 32769, 65537, 1u << 20, (1u << 20) + 1};
  for (int i = 0; i < 2000; ++i) lengths.push_back(random() % (uint64_t{1} << (random() % 40)) + 1);
  lengths.push_back((uint64_t{1} << 35) + 4097);  // past 32 bits
  for (const uint64_t length : lengths) {
    for (uint32_t rails = 1; rails <= kRailsMax; ++rails) {
      const uint32_t pieces = pieces_for(length, rails, 16384);
      REQUIRE(pieces >= 1);
      REQUIRE(pieces <= rails);
      uint64_t at = 0;
      uint64_t longest = 0;
      uint64_t shortest = ~uint64_t{0};
      for (uint32_t i = 0; i < pieces; ++i) {
        const Range range = piece_of(length, pieces, i, 4096);
        REQUIRE(range.offset == at);
        REQUIRE(range.length_bytes > 0);
        at += range.length_bytes;
        longest = std::max(longest, range.length_bytes);
        shortest = std::min(shortest, range.length_bytes);
      }
      REQUIRE(at == length);
      REQUIRE(longest == piece_of(length, pieces, 0, 4096).length_bytes);
      REQUIRE(longest - shortest < 2 * 4096);
    }
  }
}

TEST_CASE("a zero length is one empty piece") {
  CHECK(pieces_for(0, 16, 16384) == 1);
  CHECK(piece_of(0, 1, 0, 4096).length_bytes == 0);
}

TEST_CASE("rails of unequal counts spread evenly over each other") {
  for (uint32_t ours = 1; ours <= kRailsMax; ++ours) {
    for (uint32_t theirs = 1; theirs <= kRailsMax; ++theirs) {
      std::vector<uint32_t> served(theirs, 0);
      for (uint32_t rail = 0; rail < ours; ++rail) {
        REQUIRE(peer_rail(rail, ours, theirs) < theirs);
        ++served[peer_rail(rail, ours, theirs)];
      }
      const auto [least, most] = std::minmax_element(served.begin(), served.end());
      CHECK(*most - *least <= 1);
    }
  }
}

}  // namespace crossrail
