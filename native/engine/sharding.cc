#include "engine/sharding.h"

#include <algorithm>

#include "util/errors.h"

namespace crossrail {

namespace {

// For each number of pieces: how many take each of two share codes. Every row sums to 48 units (checked below).
struct Row {
  uint8_t code_a, count_a, code_b, count_b;
};
constexpr std::array<Row, kRailsMax> kRows = {{
    {0, 1, 0, 0},   // 1: 48
    {1, 2, 0, 0},   // 2: 24+24
    {2, 3, 0, 0},   // 3
    {3, 4, 0, 0},   // 4
    {3, 3, 5, 2},   // 5: 3*12 + 2*6
    {4, 6, 0, 0},   // 6
    {4, 5, 6, 2},   // 7: 5*8 + 2*4
    {5, 8, 0, 0},   // 8
    {5, 7, 7, 2},   // 9: 7*6 + 2*3
    {5, 6, 7, 4},   // 10
    {5, 5, 7, 6},   // 11
    {6, 12, 0, 0},  // 12
    {6, 9, 7, 4},   // 13: 9*4 + 4*3
    {5, 2, 7, 12},  // 14: 2*6 + 12*3
    {6, 3, 7, 12},  // 15: 3*4 + 12*3
    {7, 16, 0, 0},  // 16
}};

constexpr bool rows_are_whole() {
  for (uint32_t pieces = 1; pieces <= kRailsMax; ++pieces) {
    const Row& row = kRows[pieces - 1];
    if (row.count_a + row.count_b != static_cast<int>(pieces)) return false;
    if (row.count_a * kShareUnits[row.code_a] + row.count_b * kShareUnits[row.code_b] != kUnitsPerCount) return false;
  }
  return true;
}
static_assert(rows_are_whole());

}  // namespace

Shares split_count(uint32_t pieces) {
  CROSSRAIL_ASSERT(pieces >= 1 && pieces <= kRailsMax);
  const Row& row = kRows[pieces - 1];
  Shares shares{};
  std::fill_n(shares.codes.begin(), row.count_a, row.code_a);
  std::fill_n(shares.codes.begin() + row.count_a, row.count_b, row.code_b);
  return shares;
}

Range piece_of(uint64_t length_bytes, uint32_t pieces, uint32_t index, uint64_t align) {
  const uint64_t blocks = (length_bytes + align - 1) / align;
  const uint64_t first = blocks / pieces * index + std::min<uint64_t>(index, blocks % pieces);
  const uint64_t count = blocks / pieces + (index < blocks % pieces ? 1 : 0);
  const uint64_t begin = std::min(first * align, length_bytes);
  const uint64_t end = std::min((first + count) * align, length_bytes);
  return {begin, end - begin};
}

uint32_t pieces_for(uint64_t length_bytes, uint32_t rails, uint64_t piece_bytes_min) {
  const uint64_t worth = std::max<uint64_t>(1, length_bytes / piece_bytes_min);
  return static_cast<uint32_t>(std::min<uint64_t>(worth, rails));
}

}  // namespace crossrail
