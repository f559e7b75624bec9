// Counting routes and moving rows of bytes. Plain functions on the caller's thread; all memory is the caller's.
//
// Nothing outside the given spans is read or written. Every table is copied and checked before anything is written, so
// a table in a peer's memory may contain, and change to, anything. Violations throw UsageError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moe/layout.h"

namespace crossrail::moe {

// indices: [tokens * top_k], expert of each route or -1. counts: [experts], becomes the number of routes to each.
// slots: [tokens * top_k], becomes how many earlier routes have the same expert; -1 for -1.
template <typename Index>
void count_routes(std::span<const Index> indices, uint32_t top_k, std::span<int32_t> counts, std::span<int32_t> slots);

// A hash of which token goes to which experts, independent of the order in which it names them. indices: as for
// count_routes.
template <typename Index>
uint64_t hash_routes(std::span<const Index> indices, uint32_t top_k);

// Rows of `bytes` bytes, contiguous; without rows, data may be null.
struct RowsIn {
  const std::byte* data = nullptr;
  size_t rows = 0;
  size_t bytes = 0;
};
struct RowsOut {
  std::byte* data = nullptr;
  size_t rows = 0;
  size_t bytes = 0;
};

// Row i of target becomes x[table[i]] | scales[table[i]] | zeros. Without a table: row i of x, for all rows of x.
// scales.bytes 0: none. target.bytes is at least x.bytes + scales.bytes; target has at least as many rows as are
// written.
void pack_rows(const RowsOut& target, const RowsIn& x, const RowsIn& scales, const std::span<const int32_t>* table);

// For each move, x[to] and scales[to] become what pack_rows put into source[from].
void pull_rows(const RowsOut& x, const RowsOut& scales, const RowsIn& source, std::span<const Move> moves);

}  // namespace crossrail::moe
