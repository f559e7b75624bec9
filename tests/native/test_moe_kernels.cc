#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "moe/floats.h"
#include "moe/rows.h"
#include "moe/simd/row_ops.h"
#include "moe/sums.h"
#include "util/errors.h"

namespace crossrail::moe {

namespace {

// Of a format's code: sign, exponent and fraction by definition, in double.
double value_of(uint32_t code, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const auto fraction = static_cast<double>(code & ((1U << fraction_bits) - 1)) / std::pow(2.0, fraction_bits);
  const auto exponent = static_cast<int>(code >> fraction_bits & ((1U << exponent_bits) - 1));
  const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  return (code >> (exponent_bits + fraction_bits)) != 0 ? -magnitude : magnitude;
}

struct Numbers {
  uint64_t state = 11;
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 32);
  }
};

}  // namespace

TEST_CASE("moe floats: every code of two bytes is what its bits say, and comes back") {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    const float half = from_float16(bits);
    const float brain = from_bfloat16(bits);
    if ((code & 0x7C00) != 0x7C00) REQUIRE(half == value_of(code, 5, 10));
    if ((code & 0x7F80) != 0x7F80) REQUIRE(brain == value_of(code, 8, 7));
    if (!std::isnan(half)) REQUIRE(to_float16(half) == bits);
    if (!std::isnan(brain)) REQUIRE(to_bfloat16(brain) == bits);
    REQUIRE(std::isnan(half) == ((code & 0x7FFF) > 0x7C00));
    REQUIRE(std::isnan(brain) == ((code & 0x7FFF) > 0x7F80));
  }
}

TEST_CASE("moe floats: e4m3 has 448 for all that is larger, and no infinity") {
  for (uint32_t code = 0; code < 0x100; ++code) {
    const float value = from_e4m3(static_cast<uint8_t>(code));
    if ((code & 0x7F) == 0x7F) {
      REQUIRE(std::isnan(value));
    } else {
      REQUIRE(value == value_of(code, 4, 3));
      REQUIRE(to_e4m3(value) == code);
    }
  }
  CHECK(to_e4m3(449) == 0x7E);
  CHECK(to_e4m3(-INFINITY) == 0xFE);
  CHECK(to_e4m3(NAN) == 0x7F);
}

TEST_CASE("moe floats: what lies between two codes goes to the nearer, and halfway to the even one") {
  const auto between = [](auto to, auto from, uint32_t low) {
    const double a = from(static_cast<uint16_t>(low));
    const double b = from(static_cast<uint16_t>(low + 1));
    const auto middle = static_cast<float>((a + b) / 2);
    REQUIRE(middle == (a + b) / 2);
    REQUIRE(to(middle) == low + (low & 1U));
    REQUIRE(to(std::nextafter(middle, 0.0F)) == low);
    REQUIRE(to(std::nextafter(middle, INFINITY)) == low + 1);
    REQUIRE(to(-middle) % 0x80 == (low + (low & 1U)) % 0x80);
  };
  for (uint32_t low = 0; low < 0x7BFF; ++low) between(to_float16, from_float16, low);
  for (uint32_t low = 1; low < 0x7F7F; ++low) between(to_bfloat16, from_bfloat16, low);
  for (uint32_t low = 0; low < 0x7E; ++low) {
    between(to_e4m3, [](uint16_t code) { return from_e4m3(static_cast<uint8_t>(code)); }, low);
  }
  CHECK(to_float16(65520) == 0x7C00);
  CHECK(to_float16(65519.996F) == 0x7BFF);
  CHECK(to_bfloat16(std::bit_cast<float>(0x7F7F8000U)) == 0x7F80);
}

TEST_CASE("moe rows: a table that points anywhere moves nothing") {
  std::vector<std::byte> source(4 * 32, std::byte{1});
  std::vector<std::byte> x(3 * 24, std::byte{9});
  const auto before = x;
  for (const Move bad : {Move{4, 0}, Move{-1, 0}, Move{0, 3}, Move{0, -1}, Move{INT32_MAX, INT32_MIN}}) {
    const std::vector<Move> moves = {{0, 0}, {1, 1}, bad};
    CHECK_THROWS_AS(pull_rows({x.data(), 3, 24}, {}, {source.data(), 4, 32}, moves), UsageError);
    CHECK(x == before);
  }
  const std::vector<Move> good = {{3, 2}};
  CHECK_THROWS_AS(pull_rows({x.data(), 3, 24}, {x.data(), 3, 9}, {source.data(), 4, 32}, good), UsageError);
  pull_rows({x.data(), 3, 24}, {}, {source.data(), 4, 32}, good);
  CHECK(x[2 * 24] == std::byte{1});
  CHECK(x[2 * 24 - 1] == std::byte{9});
}

TEST_CASE("moe rows: scales with fewer rows than x bound what may be written") {
  std::vector<std::byte> source(32);
  std::vector<std::byte> x(size_t{4} * 16);
  std::vector<std::byte> scales(size_t{2} * 16);
  const std::vector<Move> moves = {{0, 2}};
  CHECK_THROWS_AS(pull_rows({x.data(), 4, 16}, {scales.data(), 2, 16}, {source.data(), 1, 32}, moves), UsageError);
}

TEST_CASE("moe sums: every instruction set gives the bits of the portable one, for any bits") {
  Numbers numbers;
  constexpr size_t kHidden = 333;
  constexpr size_t kRows = 5;
  std::vector<uint32_t> raw(kHidden * kRows);
  for (uint32_t& word : raw) {
    // Halves of both kinds, and float32: no NaN in any of them, whose bits may differ.
    word = numbers.next() & 0xBBFFBBFFU;
  }
  const std::vector<float> weights = {1.5F, -3, 0.1F, 1e-20F, 7};
  for (size_t in = 0; in < kFloats; ++in) {
    std::vector<const void*> rows;
    for (size_t row = 0; row < kRows; ++row) {
      rows.push_back(reinterpret_cast<const std::byte*>(raw.data()) + row * kHidden * bytes_of(static_cast<Float>(in)));
    }
    for (size_t out = 0; out < kFloats; ++out) {
      for (const bool accumulate : {false, true}) {
        std::vector<std::vector<uint32_t>> sums;
        for (const RowOps* ops : row_ops_here()) {
          auto& sum = sums.emplace_back(raw.begin(), raw.begin() + kHidden);
          ops->reduce[in][out](sum.data(), rows.data(), weights.data(), kRows, kHidden, accumulate);
        }
        for (const auto& sum : sums) CHECK(sum == sums.back());
      }
    }
    std::vector<std::vector<uint8_t>> codes;
    std::vector<std::vector<float>> scales;
    for (const RowOps* ops : row_ops_here()) {
      ops->quantize[in](codes.emplace_back(kHidden).data(), scales.emplace_back(4).data(), rows[1], kHidden, 100);
    }
    for (const auto& code : codes) CHECK(code == codes.back());
    for (const auto& scale : scales) CHECK(scale == scales.back());
  }
}

TEST_CASE("moe sums: a place that is none is refused before anything is written") {
  const std::vector<float> rows(8, 1.0F);
  const std::vector<NumberRows> sources = {{rows.data(), 2}};
  for (const Place bad : {Place{1, 0}, Place{-1, 0}, Place{0, 2}, Place{0, -2}, Place{INT32_MIN, INT32_MAX}}) {
    std::vector<float> out(8, 5.0F);
    const std::vector<Place> where = {{0, 0}, bad};
    const Reduction reduction{out.data(), Float::kFloat32, 2, 4, 1, Float::kFloat32, sources, where, {}, false};
    CHECK_THROWS_AS(reduce_rows(*row_ops_here().front(), reduction), UsageError);
    CHECK(out == std::vector<float>(8, 5.0F));
  }
}

TEST_CASE("moe row ops: the processor's own come before the portable one, unknown names are refused") {
  CHECK(&choose_row_ops("auto") == row_ops_here().front());
  CHECK(std::string(row_ops_here().back()->name) == "portable");
  for (const RowOps* ops : row_ops_here()) CHECK(&choose_row_ops(ops->name) == ops);
  CHECK_THROWS_AS(choose_row_ops("abacus"), UsageError);
}

}  // namespace crossrail::moe
