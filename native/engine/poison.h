// Fills memory that nobody should write to any more with a pattern, and finds out whether somebody did.
//
// The bytes depend on their address and on a number drawn for each poisoning, so zeros, copies of other poisoned
// memory, and remains of an earlier poisoning are all detected. A write of a single byte goes unnoticed once in 256
// times, a write of eight bytes once in 2^64.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/page_indices.h"

namespace crossrail {

// page_bytes at offset + stride_bytes * index, for each index. Pages may overlap or repeat.
struct PoisonedPages {
  uint64_t offset = 0;
  uint64_t stride_bytes = 0;
  uint64_t page_bytes = 0;
  std::vector<uint32_t> indices;
};

// Owner of the memory: the caller, until its last call of find(). Threads: one at a time; other threads may write to
// the memory meanwhile: finding them is the purpose.
class Poison {
 public:
  // Throws UsageError for pages outside the memory.
  Poison(std::byte* base, uint64_t length_bytes, uint64_t offset, uint64_t stride_bytes, uint64_t page_bytes,
         const PageIndices& pages);

  void fill();

  struct Finding {
    uint64_t offset;                // of the first changed byte
    uint64_t length_bytes;          // from that to the last changed byte in the same page
    std::array<uint8_t, 16> found;  // the first bytes found there now,
    uint32_t found_bytes;           // of which this many are valid
    uint64_t pages;                 // pages with changed bytes, including the one at `offset`
  };
  std::optional<Finding> find() const;

 private:
  std::byte* const base_;
  PoisonedPages pages_;
  uint64_t seed_;
};

}  // namespace crossrail
