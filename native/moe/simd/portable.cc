// For any processor: loops over a few numbers at a time, which compilers turn into whatever vector instructions it has.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "moe/simd/row_loops.h"
#include "moe/simd/row_ops.h"

namespace crossrail::moe {
namespace {

struct Several {
  static constexpr size_t kWidth = 8;
  using Floats = std::array<float, kWidth>;
  using Words = std::array<uint32_t, kWidth>;

  template <typename Result, typename Function>
  static Result each(Function function) {
    Result result;
    for (size_t lane = 0; lane < kWidth; ++lane) result[lane] = function(lane);
    return result;
  }

  static Floats zero() { return {}; }
  static Floats set(float value) {
    return each<Floats>([=](size_t) { return value; });
  }
  static Floats add(const Floats& a, const Floats& b) {
    return each<Floats>([&](size_t lane) { return a[lane] + b[lane]; });
  }
  static Floats multiply(const Floats& a, const Floats& b) {
    return each<Floats>([&](size_t lane) { return a[lane] * b[lane]; });
  }

  template <Float F>
  static Floats load(const void* row, size_t i) {
    return each<Floats>([=](size_t lane) { return Single::load<F>(row, i + lane); });
  }
  template <Float F>
  static void store(void* row, size_t i, const Floats& values) {
    for (size_t lane = 0; lane < kWidth; ++lane) Single::store<F>(row, i + lane, values[lane]);
  }

  static Words magnitudes(const Floats& values) {
    return each<Words>([&](size_t lane) { return Single::magnitudes(values[lane]); });
  }
  static Words greater(const Words& a, const Words& b) {
    return each<Words>([&](size_t lane) { return std::max(a[lane], b[lane]); });
  }
  static uint32_t largest(const Words& words) { return *std::max_element(words.begin(), words.end()); }
  static void store_e4m3(uint8_t* codes, const Floats& values) {
    for (size_t lane = 0; lane < kWidth; ++lane) codes[lane] = to_e4m3(values[lane]);
  }
};

}  // namespace

constinit const RowOps kPortableRowOps = make_row_ops<Several>("portable");

}  // namespace crossrail::moe
