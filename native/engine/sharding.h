// How operations are cut over rails, and how a count survives the cutting. Pure functions.
#pragma once

#include <array>
#include <cstdint>

#include "transport/types.h"
#include "transport/wire_imm.h"

namespace crossrail {

// Share codes of a count split in `pieces` (1..16): codes[i] for i < pieces, whose units sum to 48 exactly.
struct Shares {
  std::array<uint8_t, kRailsMax> codes;
};
Shares split_count(uint32_t pieces);

// Code for 2^log2_pages pages in one piece, log2_pages 0..8.
constexpr uint32_t share_code_of_pages(uint32_t log2_pages) { return log2_pages == 0 ? 0 : 7 + log2_pages; }

// --- lengths ---

// Piece i of a range cut in `pieces`: cuts at multiples of `align` from the start, sizes differ by at most `align`, no
// piece is empty while length_bytes > (pieces - 1) * align, and the pieces are exactly the range.
struct Range {
  uint64_t offset;
  uint64_t length_bytes;
};
Range piece_of(uint64_t length_bytes, uint32_t pieces, uint32_t index, uint64_t align);

// Into how many pieces a range is worth cutting when there are `rails`.
uint32_t pieces_for(uint64_t length_bytes, uint32_t rails, uint64_t piece_bytes_min);

// --- rails ---

// The peer's rail that our rail talks to. Every rail of the smaller side serves as near the same number of rails of the
// larger as can be; both sides compute the same.
constexpr uint32_t peer_rail(uint32_t rail, uint32_t rails, uint32_t peer_rails) {
  return rails <= peer_rails ? rail : rail % peer_rails;
}

}  // namespace crossrail
