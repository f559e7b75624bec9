// float8 e4m3 with a scale for each block, which trainers make of their weights before they are written. Bit for bit
// what src/crossrail/weights/conversion/float8.py defines and does in numpy, in two passes over memory instead of
// twenty.
//
// Threads: any; nothing is kept. Matrices: rows of elements without gaps, row_bytes apart, at any address. Sources and
// targets do not overlap.
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

// scales: float32, one for each block of high x broad elements, the last ones of a dimension may be short; out: e4m3,
// of the shape of values. False when something is not finite: both are then partly filled.
bool quantise(MatrixIn values, Source source, MatrixOut out, MatrixOut scales, size_t high, size_t broad);

}  // namespace crossrail::weights
