// Weighted sums of rows, and their 8-bit form: checked here, computed by RowOps. On the caller's thread; memory is the
// caller's. As in rows.h, tables are copied and checked before anything is written, and violations throw UsageError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moe/layout.h"
#include "moe/simd/row_ops.h"

namespace crossrail::moe {

struct NumberRows {
  const void* data = nullptr;
  size_t rows = 0;
};

// out: [tokens, hidden] of out_format. Row t becomes the sum over k = 0 .. top_k - 1, in this order, of weights[t, k]
// times row where[t, k].row of sources[where[t, k].source], in float32, rounded once; places whose row is -1 are left
// out.
// accumulate: the sum starts with the content of out. weights: [tokens * top_k], or empty for ones. All sources: [rows,
// hidden] of the same format; none of them overlaps out.
struct Reduction {
  void* out;
  Float out_format;
  size_t tokens;
  size_t hidden;
  size_t top_k;
  Float format;
  std::span<const NumberRows> sources;
  std::span<const Place> where;
  std::span<const float> weights;
  bool accumulate;
};
void reduce_rows(const RowOps& ops, const Reduction& reduction);

// x: [rows, hidden] of format; codes: [rows, hidden]; scales: [rows, ceil(hidden / block)]. See RowOps::Quantize.
void quantize_rows(const RowOps& ops, uint8_t* codes, float* scales, const void* x, Float format, size_t rows,
                   size_t hidden, size_t block);

// out[i] = e4m3 code * its block's scale in float32, rounded to out's format.
void dequantize_rows(void* out, Float format, const uint8_t* codes, const float* scales, size_t rows, size_t hidden,
                     size_t block);

}  // namespace crossrail::moe
