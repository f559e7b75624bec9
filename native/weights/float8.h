// float8 e4m3 with a scale per block, which trainers make from their weights before they write them. Bit for bit what
// src/crossrail/weights/conversion/float8.py defines and does in numpy, in two passes over memory instead of twenty.
//
// Threads: any; stateless. Matrices: rows of contiguous elements, row_bytes apart, at any address. Sources and targets
// must not overlap.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossrail::weights {

struct MatrixIn {
  const std::byte* data;
  size_t rows;
  size_t columns;
  ptrdiff_t row_bytes;
};

struct MatrixOut {
  std::byte* data;
  ptrdiff_t row_bytes;
};

enum class Source { kFloat32, kBfloat16 };

// scales: float32, one for each block of high x broad elements, the last blocks of a dimension may be smaller; out:
// e4m3, with the shape of values. False if something is not finite: both are then partly filled.
bool quantise(MatrixIn values, Source source, MatrixOut out, MatrixOut scales, size_t high, size_t broad);

}  // namespace crossrail::weights
