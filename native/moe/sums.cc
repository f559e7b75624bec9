#include "moe/sums.h"

#include <array>
#include <string>
#include <vector>

#include "util/errors.h"

namespace crossrail::moe {

namespace {

[[noreturn]] void refuse_place(const Reduction& reduction, size_t entry, Place place) {
  const std::string at =
      "where[" + std::to_string(entry / reduction.top_k) + ", " + std::to_string(entry % reduction.top_k) + "]";
  const size_t sources = reduction.sources.size();
  if (place.source < 0 || static_cast<size_t>(place.source) >= sources) {
    throw UsageError(at + " is of source " + std::to_string(place.source) + ", must be in [0, " +
                     std::to_string(sources) + ")");
  }
  const size_t rows = reduction.sources[static_cast<size_t>(place.source)].rows;
  throw UsageError(at + " is row " + std::to_string(place.row) + " of source " + std::to_string(place.source) +
                   ", must be in [0, " + std::to_string(rows) + "), or -1 for none");
}

bool valid(const Reduction& reduction, Place place) {
  return place.source >= 0 && static_cast<size_t>(place.source) < reduction.sources.size() && place.row >= 0 &&
         static_cast<size_t>(place.row) < reduction.sources[static_cast<size_t>(place.source)].rows;
}

std::array<float, 256> make_e4m3_values() {
  std::array<float, 256> values;
  for (size_t code = 0; code < values.size(); ++code) values[code] = from_e4m3(static_cast<uint8_t>(code));
  return values;
}

void store(void* out, Float format, size_t i, float value) {
  switch (format) {
    case Float::kBfloat16:
      static_cast<uint16_t*>(out)[i] = to_bfloat16(value);
      return;
    case Float::kFloat16:
      static_cast<uint16_t*>(out)[i] = to_float16(value);
      return;
    case Float::kFloat32:
      static_cast<float*>(out)[i] = value;
      return;
  }
}

}  // namespace

void reduce_rows(const RowOps& ops, const Reduction& reduction) {
  const std::vector<Place> where(reduction.where.begin(), reduction.where.end());
  for (size_t i = 0; i < where.size(); ++i) {
    if (where[i].row != -1 && !valid(reduction, where[i])) refuse_place(reduction, i, where[i]);
  }
  const RowOps::Reduce reduce =
      ops.reduce[static_cast<size_t>(reduction.format)][static_cast<size_t>(reduction.out_format)];
  const size_t row_bytes = reduction.hidden * bytes_of(reduction.format);
  const size_t out_bytes = reduction.hidden * bytes_of(reduction.out_format);
  std::vector<const void*> rows(reduction.top_k);
  std::vector<float> weights(reduction.top_k);
  for (size_t token = 0; token < reduction.tokens; ++token) {
    size_t count = 0;
    for (size_t k = 0; k < reduction.top_k; ++k) {
      const size_t entry = token * reduction.top_k + k;
      if (where[entry].row == -1) continue;
      const NumberRows& source = reduction.sources[static_cast<size_t>(where[entry].source)];
      rows[count] = static_cast<const std::byte*>(source.data) + static_cast<size_t>(where[entry].row) * row_bytes;
      weights[count++] = reduction.weights.empty() ? 1.0F : reduction.weights[entry];
    }
    reduce(static_cast<std::byte*>(reduction.out) + token * out_bytes, rows.data(), weights.data(), count,
           reduction.hidden, reduction.accumulate);
  }
}

void quantize_rows(const RowOps& ops, uint8_t* codes, float* scales, const void* x, Float format, size_t rows,
                   size_t hidden, size_t block) {
  const size_t blocks = (hidden + block - 1) / block;
  for (size_t row = 0; row < rows; ++row) {
    ops.quantize[static_cast<size_t>(format)](codes + row * hidden, scales + row * blocks,
                                              static_cast<const std::byte*>(x) + row * hidden * bytes_of(format),
                                              hidden, block);
  }
}

void dequantize_rows(void* out, Float format, const uint8_t* codes, const float* scales, size_t rows, size_t hidden,
                     size_t block) {
  static const std::array<float, 256> values = make_e4m3_values();
  const size_t blocks = (hidden + block - 1) / block;
  for (size_t row = 0; row < rows; ++row) {
    for (size_t i = 0; i < hidden; ++i) {
      store(out, format, row * hidden + i, values[codes[row * hidden + i]] * scales[row * blocks + i / block]);
    }
  }
}

}  // namespace crossrail::moe
