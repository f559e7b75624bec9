#include "weights/float8.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

// Loops that compilers turn into vector instructions, compiled for several processors; nothing is fused or reordered,
// so all variants give the same bits.
#define CROSSRAIL_INLINE inline __attribute__((always_inline))

namespace crossrail::weights {

namespace {

constexpr float kLargest = 448.0F;
constexpr float kAmaxMin = 448.0F * 0x1p-126F;  // of a block, so that its scale is a float32 with all its bits
constexpr uint32_t kMagnitude = 0x7FFFFFFF;
constexpr uint32_t kInfinity = 0x7F800000;        // anything above is not a number
constexpr uint32_t kSmallestNormal = 0x3C800000;  // 2**-6: below it e4m3 has steps of 2**-9
constexpr float kSteps = 0x1p14F;                 // float32 has steps of 2**-9 there: adding it rounds to them
constexpr uint32_t kStepsBits = 0x46800000;
constexpr uint32_t kBias = (127 - 7) << 3;  // of float32's exponent over e4m3's, above three fraction bits

struct Float32 {
  static constexpr size_t kBytes = 4;
  static CROSSRAIL_INLINE uint32_t bits(const std::byte* row, size_t i) {
    uint32_t word;
    std::memcpy(&word, row + i * kBytes, sizeof word);
    return word;
  }
};

struct Bfloat16 {
  static constexpr size_t kBytes = 2;
  static CROSSRAIL_INLINE uint32_t bits(const std::byte* row, size_t i) {
    uint16_t half;
    std::memcpy(&half, row + i * kBytes, sizeof half);
    return static_cast<uint32_t>(half) << 16U;
  }
};

// The largest magnitude of some elements in a row, as bits, which are ordered like magnitudes; non-finite ones are
// above all others.
template <typename From>
CROSSRAIL_INLINE uint32_t largest_of(const std::byte* row, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i) largest = std::max(largest, From::bits(row, i) & kMagnitude);
  return largest;
}

// value / scale is at most slightly above 448, which rounds to 448.
template <typename From>
CROSSRAIL_INLINE void round_row(const std::byte* row, std::byte* out, size_t count, float scale) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(From::bits(row, i)) / scale);
    const uint32_t magnitude = bits & kMagnitude;
    // Half a step minus one, plus one if the last remaining bit is set.
    const uint32_t normal = ((magnitude + 0x7FFFF + ((magnitude >> 20U) & 1U)) >> 20U) - kBias;
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kSteps) - kStepsBits;
    // With a mask: given a branch, gcc computes only one of them, one element at a time.
    const uint32_t is_small = 0U - static_cast<uint32_t>(magnitude < kSmallestNormal);
    const uint32_t code = normal ^ ((normal ^ small) & is_small);
    out[i] = static_cast<std::byte>(code | ((bits >> 24U) & 0x80U));
  }
}

template <typename From>
CROSSRAIL_INLINE bool quantise_blocks(const MatrixIn& values, const MatrixOut& out, const MatrixOut& scales,
                                      size_t high, size_t broad) {
  std::byte* scale_row = scales.data;
  for (size_t top = 0; top < values.rows; top += high, scale_row += scales.row_bytes) {
    const size_t rows = std::min(high, values.rows - top);
    const std::byte* const band = values.data + static_cast<ptrdiff_t>(top) * values.row_bytes;
    std::byte* const out_band = out.data + static_cast<ptrdiff_t>(top) * out.row_bytes;
    size_t block = 0;
    for (size_t left = 0; left < values.columns; left += broad, ++block) {
      const size_t columns = std::min(broad, values.columns - left);
      const std::byte* row = band + left * From::kBytes;
      uint32_t largest = 0;
      for (size_t i = 0; i < rows; ++i, row += values.row_bytes)
        largest = std::max(largest, largest_of<From>(row, columns));
      if (largest >= kInfinity) return false;
      const float scale = std::max(std::bit_cast<float>(largest), kAmaxMin) / kLargest;
      std::memcpy(scale_row + block * sizeof scale, &scale, sizeof scale);
      row = band + left * From::kBytes;
      std::byte* out_row = out_band + left;
      for (size_t i = 0; i < rows; ++i, row += values.row_bytes, out_row += out.row_bytes)
        round_row<From>(row, out_row, columns, scale);
    }
  }
  return true;
}

CROSSRAIL_INLINE bool quantise_any(const MatrixIn& values, Source source, const MatrixOut& out, const MatrixOut& scales,
                                   size_t high, size_t broad) {
  switch (source) {
    case Source::kFloat32:
      return quantise_blocks<Float32>(values, out, scales, high, broad);
    case Source::kBfloat16:
      return quantise_blocks<Bfloat16>(values, out, scales, high, broad);
  }
  return false;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) bool quantise_avx2(const MatrixIn& values, Source source, const MatrixOut& out,
                                                   const MatrixOut& scales, size_t high, size_t broad) {
  return quantise_any(values, source, out, scales, high, broad);
}
#endif

}  // namespace

bool quantise(MatrixIn values, Source source, MatrixOut out, MatrixOut scales, size_t high, size_t broad) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return quantise_avx2(values, source, out, scales, high, broad);
#endif
  return quantise_any(values, source, out, scales, high, broad);
}

}  // namespace crossrail::weights
