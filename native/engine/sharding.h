// How operations are split over rails, and how a count survives the split. Pure functions.
#pragma once

#include <array>
#include <cstdint>

#include "transport/types.h"
#include "transport/wire_imm.h"

namespace crossrail {

// For each number of pieces 1..16: the first `first_count` pieces take one share code, the rest another. Every row adds
// up to one count.
struct ShareRow {
  uint8_t first_count, first_code, rest_code;
};
inline constexpr std::array<ShareRow, kRailsMax> kShareRows = {{
    {1, 0, 0},   // 1: 48
    {2, 1, 1},   // 2: 24 each
    {3, 2, 2},   // 3
    {4, 3, 3},   // 4
    {3, 3, 5},   // 5: 3*12 + 2*6
    {6, 4, 4},   // 6
    {5, 4, 6},   // 7: 5*8 + 2*4
    {8, 5, 5},   // 8
    {7, 5, 7},   // 9: 7*6 + 2*3
    {6, 5, 7},   // 10: 6*6 + 4*3
    {5, 5, 7},   // 11: 5*6 + 6*3
    {12, 6, 6},  // 12
    {9, 6, 7},   // 13: 9*4 + 4*3
    {2, 5, 7},   // 14: 2*6 + 12*3
    {3, 6, 7},   // 15: 3*4 + 12*3
    {16, 7, 7},  // 16
}};

// Share code of piece `index` of a count split in `pieces` (1..16). The pieces' units sum to 48 exactly.
constexpr uint32_t share_code_of_piece(uint32_t pieces, uint32_t index) {
  const ShareRow& row = kShareRows[pieces - 1];
  return index < row.first_count ? row.first_code : row.rest_code;
}

constexpr bool share_rows_are_whole() {
  for (uint32_t pieces = 1; pieces <= kRailsMax; ++pieces) {
    uint32_t units = 0;
    for (uint32_t i = 0; i < pieces; ++i) units += kShareUnits[share_code_of_piece(pieces, i)];
    if (units != kUnitsPerCount) return false;
  }
  return true;
}
static_assert(share_rows_are_whole());

// Code for 2^log2_pages pages in one piece, log2_pages 0..8.
constexpr uint32_t share_code_of_pages(uint32_t log2_pages) { return log2_pages == 0 ? 0 : 7 + log2_pages; }

// --- lengths ---

inline constexpr uint64_t kCutAlign = 4096;  // pieces begin at multiples of this: whole pages and cache lines

// Piece i of a range that is cut into `pieces`: cuts are at multiples of `align` from the start, sizes differ by at
// most `align`, no piece is empty while length_bytes > (pieces - 1) * align, and together the pieces are exactly the
// range.
struct Range {
  uint64_t offset;
  uint64_t length_bytes;
};
Range piece_of(uint64_t length_bytes, uint32_t pieces, uint32_t index, uint64_t align);

// The number of pieces that a range is worth cutting into, given `rails`.
uint32_t pieces_for(uint64_t length_bytes, uint32_t rails, uint64_t piece_bytes_min);

// --- rails ---

// The peer's rail that our rail talks to. Each rail of the side with fewer serves as nearly the same number of the
// other side's rails as possible; both sides compute the same.
constexpr uint32_t peer_rail(uint32_t rail, uint32_t rails, uint32_t peer_rails) {
  return rails <= peer_rails ? rail : rail % peer_rails;
}

}  // namespace crossrail
