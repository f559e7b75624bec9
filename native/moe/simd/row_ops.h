// Operations on one row of numbers, implemented once per instruction set. All give the same bits (except for the
// payload of NaNs): products and sums are rounded one by one, never fused, and the order of a sum does not depend on
// the vector width.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moe/floats.h"

namespace crossrail::moe {

struct RowOps {
  const char* name;

  // out[i] = (accumulate ? out[i] : 0) + weights[0] * rows[0][i] + ... + weights[count - 1] * rows[count - 1][i] in
  // float32, from left to right, then rounded to out's format. By the format of the rows, then that of out.
  using Reduce = void (*)(void* out, const void* const* rows, const float* weights, size_t count, size_t hidden,
                          bool accumulate);
  Reduce reduce[kFloats][kFloats];

  // For each `block` of x, the last may be short: scale = max(largest magnitude, 1e-4) / 448, and each code is e4m3 of
  // x * (448 / that maximum). By the format of x. (DeepEP's convention for activations.)
  using Quantize = void (*)(uint8_t* codes, float* scales, const void* x, size_t hidden, size_t block);
  Quantize quantize[kFloats];
};

// The implementations that this processor supports, fastest first; the last is always "portable".
std::span<const RowOps* const> row_ops_here();

// Throws UsageError for a name that is not among them; "auto" is the first one.
const RowOps& choose_row_ops(const char* name);

// Each in a file of its own; row_ops_here() says which may be used. All are constants: no code from such a file may run
// when the module is loaded on a processor that lacks its instructions.
extern const RowOps kPortableRowOps;
#if defined(__x86_64__)
extern const RowOps kAvx2RowOps;
extern const RowOps kAvx512RowOps;
#endif

}  // namespace crossrail::moe
