// The floating-point formats of rows, one number at a time: the reference that the vector code must match bit by bit.
// All conversions round to nearest, ties to even. They work on the bits only, so that no compiler option changes them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace crossrail::moe {

enum class Float : uint8_t { kBfloat16, kFloat16, kFloat32 };
constexpr size_t kFloats = 3;

constexpr size_t bytes_of(Float format) { return format == Float::kFloat32 ? 4 : 2; }

constexpr uint32_t kSign = 0x80000000;
constexpr uint32_t kInfinity = 0x7F800000;

constexpr float from_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16U); }

// Any NaN becomes 0x7FC0.
constexpr uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & ~kSign) > kInfinity) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16U & 1U)) >> 16U);
}

constexpr float from_float16(uint16_t half) {
  const uint32_t sign = (half & 0x8000U) << 16U;
  const uint32_t bits = half & 0x7FFFU;
  if (bits >= 0x7C00) {  // infinity, NaN: quiet, as processors produce it
    const uint32_t quiet = bits > 0x7C00 ? 0x00400000U : 0;
    return std::bit_cast<float>(sign | kInfinity | quiet | (bits & 0x3FFU) << 13U);
  }
  if (bits >= 0x0400) return std::bit_cast<float>(sign | ((bits << 13U) + (112U << 23U)));
  const float magnitude = static_cast<float>(bits) * 0x1p-24F;  // exact
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

constexpr uint16_t to_float16(float value) {
  const auto all = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(all >> 16U & 0x8000U);
  const uint32_t bits = all & ~kSign;
  if (bits > kInfinity) return static_cast<uint16_t>(sign | 0x7E00U | (bits >> 13U & 0x3FFU));
  if (bits >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00U);  // 65520 and more round to infinity
  if (bits >= 0x38800000) {                                              // 2**-14 and more are normal
    return static_cast<uint16_t>(sign | (bits + 0xFFF + (bits >> 13U & 1U) - (112U << 23U)) >> 13U);
  }
  if (bits < 0x33000000) return sign;  // less than half of 2**-24
  // Steps of 2**-24: float32's fraction with its leading one, shifted into place.
  const uint32_t shift = 126 - (bits >> 23U);
  const uint32_t fraction = (bits & 0x7FFFFFU) | 0x800000U;
  const uint32_t half = 1U << (shift - 1);
  const uint32_t odd = fraction >> shift & 1U;
  return static_cast<uint16_t>(sign | (fraction + half - 1 + odd) >> shift);
}

constexpr float kE4m3Largest = 448;

// float8 e4m3fn. Anything beyond 448, including infinity, becomes 448; NaN becomes 0x7F. Signs are kept.
constexpr uint8_t to_e4m3(float value) {
  const auto all = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>(all >> 24U & 0x80U);
  const uint32_t bits = all & ~kSign;
  if (bits > kInfinity) return static_cast<uint8_t>(sign | 0x7FU);
  if (bits >= 0x43E00000) return static_cast<uint8_t>(sign | 0x7EU);
  if (bits >= 0x3C800000) {  // 2**-6 and more are normal
    return static_cast<uint8_t>(sign | (bits + 0x7FFFF + (bits >> 20U & 1U) - (120U << 23U)) >> 20U);
  }
  if (bits < 0x3A800000) return sign;  // less than half of 2**-9; half itself ties to even below
  const uint32_t shift = 141 - (bits >> 23U);
  const uint32_t fraction = (bits & 0x7FFFFFU) | 0x800000U;
  const uint32_t half = 1U << (shift - 1);
  const uint32_t odd = fraction >> shift & 1U;
  return static_cast<uint8_t>(sign | (fraction + half - 1 + odd) >> shift);
}

constexpr float from_e4m3(uint8_t code) {
  const uint32_t sign = (code & 0x80U) << 24U;
  const uint32_t bits = code & 0x7FU;
  if (bits == 0x7F) return std::bit_cast<float>(sign | 0x7FC00000U);
  if (bits >= 8) return std::bit_cast<float>(sign | ((bits << 20U) + (120U << 23U)));
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(bits) * 0x1p-9F));
}

}  // namespace crossrail::moe
