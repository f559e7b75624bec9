// The loops of RowOps over any vector type. Included once by each file that defines one, after it has enabled its
// processor's instructions: everything is in an anonymous namespace, so that no function compiled for a newer processor
// can replace that of another file.
//
// A vector type V has: kWidth; Floats; zero(), set(float), add, multiply; load<F>(const void* row, size_t i) and
// store<F>(void* row, size_t i, Floats); for e4m3: Words, with magnitudes(Floats) as bits, greater(Words, Words),
// largest(Words) of all, and store_e4m3(uint8_t*, Floats).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "moe/floats.h"
#include "moe/simd/row_ops.h"

namespace crossrail::moe {
namespace {

struct Single {
  static constexpr size_t kWidth = 1;
  using Floats = float;
  using Words = uint32_t;

  static Floats zero() { return 0; }
  static Floats set(float value) { return value; }
  static Floats add(Floats a, Floats b) { return a + b; }
  static Floats multiply(Floats a, Floats b) { return a * b; }

  template <Float F>
  static Floats load(const void* row, size_t i) {
    if constexpr (F == Float::kBfloat16) return from_bfloat16(static_cast<const uint16_t*>(row)[i]);
    if constexpr (F == Float::kFloat16) return from_float16(static_cast<const uint16_t*>(row)[i]);
    if constexpr (F == Float::kFloat32) return static_cast<const float*>(row)[i];
  }
  template <Float F>
  static void store(void* row, size_t i, Floats value) {
    if constexpr (F == Float::kBfloat16) static_cast<uint16_t*>(row)[i] = to_bfloat16(value);
    if constexpr (F == Float::kFloat16) static_cast<uint16_t*>(row)[i] = to_float16(value);
    if constexpr (F == Float::kFloat32) static_cast<float*>(row)[i] = value;
  }

  static Words magnitudes(Floats value) { return std::bit_cast<uint32_t>(value) & ~kSign; }
  static Words greater(Words a, Words b) { return std::max(a, b); }
  static uint32_t largest(Words words) { return words; }
  static void store_e4m3(uint8_t* codes, Floats value) { *codes = to_e4m3(value); }
};

// The processor's own prefetching gives up on as many concurrent rows as a token has routes, at the latest at each
// page's end: a sum that prefetches this many bytes ahead takes a third less (AMD Zen 5, 8 rows of 14 KiB; 512 to 2048
// perform the same).
constexpr size_t kPrefetchAheadBytes = 1024;

// Elements [begin, begin + kVectors * V::kWidth) of a sum: the accumulators stay in registers.
template <typename V, size_t kVectors, Float In, Float Out>
inline void reduce_part(void* out, const void* const* rows, const float* weights, size_t count, size_t begin,
                        bool accumulate, bool prefetch) {
  typename V::Floats sums[kVectors];
  for (size_t v = 0; v < kVectors; ++v) {
    sums[v] = accumulate ? V::template load<Out>(out, begin + v * V::kWidth) : V::zero();
  }
  for (size_t k = 0; k < count; ++k) {
    const typename V::Floats weight = V::set(weights[k]);
    if (prefetch) {
      const char* ahead = static_cast<const char*>(rows[k]) + begin * bytes_of(In) + kPrefetchAheadBytes;
      for (size_t at = 0; at < kVectors * V::kWidth * bytes_of(In); at += 64) __builtin_prefetch(ahead + at);
    }
    for (size_t v = 0; v < kVectors; ++v) {
      sums[v] = V::add(sums[v], V::multiply(weight, V::template load<In>(rows[k], begin + v * V::kWidth)));
    }
  }
  for (size_t v = 0; v < kVectors; ++v) V::template store<Out>(out, begin + v * V::kWidth, sums[v]);
}

template <typename V, Float In, Float Out>
void reduce_row(void* out, const void* const* rows, const float* weights, size_t count, size_t hidden,
                bool accumulate) {
  constexpr size_t kVectors = 4;
  size_t i = 0;
  for (; i + kVectors * V::kWidth <= hidden; i += kVectors * V::kWidth) {
    const bool prefetch = (i + kVectors * V::kWidth) * bytes_of(In) + kPrefetchAheadBytes <= hidden * bytes_of(In);
    reduce_part<V, kVectors, In, Out>(out, rows, weights, count, i, accumulate, prefetch);
  }
  for (; i < hidden; ++i) reduce_part<Single, 1, In, Out>(out, rows, weights, count, i, accumulate, false);
}

constexpr float kMagnitudeMin = 1e-4F;  // DeepEP's: blocks of zeros need a scale, too

template <typename V, Float In>
void quantize_row(uint8_t* codes, float* scales, const void* x, size_t hidden, size_t block) {
  for (size_t begin = 0; begin < hidden; begin += block, ++scales) {
    const size_t end = std::min(hidden, begin + block);
    // Compared as bits: magnitudes in order, infinity above all numbers, NaN above that. So NaN reaches the scale.
    typename V::Words most{};
    size_t i = begin;
    for (; i + V::kWidth <= end; i += V::kWidth) most = V::greater(most, V::magnitudes(V::template load<In>(x, i)));
    uint32_t bits = V::largest(most);
    for (; i < end; ++i) bits = std::max(bits, Single::magnitudes(Single::load<In>(x, i)));
    const auto found = std::bit_cast<float>(bits);
    const float magnitude = found < kMagnitudeMin ? kMagnitudeMin : found;
    *scales = magnitude / kE4m3Largest;
    const float factor = kE4m3Largest / magnitude;
    i = begin;
    for (; i + V::kWidth <= end; i += V::kWidth) {
      V::store_e4m3(codes + i, V::multiply(V::template load<In>(x, i), V::set(factor)));
    }
    for (; i < end; ++i) Single::store_e4m3(codes + i, Single::load<In>(x, i) * factor);
  }
}

template <typename V>
constexpr RowOps make_row_ops(const char* name) {
  constexpr Float kB = Float::kBfloat16;
  constexpr Float kH = Float::kFloat16;
  constexpr Float kS = Float::kFloat32;
  return {name,
          {{reduce_row<V, kB, kB>, reduce_row<V, kB, kH>, reduce_row<V, kB, kS>},
           {reduce_row<V, kH, kB>, reduce_row<V, kH, kH>, reduce_row<V, kH, kS>},
           {reduce_row<V, kS, kB>, reduce_row<V, kS, kH>, reduce_row<V, kS, kS>}},
          {quantize_row<V, kB>, quantize_row<V, kH>, quantize_row<V, kS>}};
}

}  // namespace
}  // namespace crossrail::moe
