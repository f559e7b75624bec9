#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "util/copy.h"

namespace crossrail {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMargin = 128;  // what lies around a target, and is to stay
constexpr size_t kLongest = 3 * kPage + 1;

struct Copied {
  std::vector<uint8_t> source = std::vector<uint8_t>(2 * kPage + kLongest);
  std::vector<uint8_t> target = std::vector<uint8_t>(3 * kPage + kLongest);

  Copied() {
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(1 + i % 251);
  }

  // The first address of a page in `bytes`, and `offset` on.
  static uint8_t* place(std::vector<uint8_t>& bytes, size_t offset) {
    const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
    return bytes.data() + (kPage - begin % kPage) % kPage + offset;
  }

  // Whether a copy to `behind` bytes behind the source, modulo a page, is the source, and nothing else has changed.
  template <class Copy>
  bool is_exact(size_t source_at, size_t behind, size_t bytes, Copy copy) {
    std::fill(target.begin(), target.end(), uint8_t{0});
    const uint8_t* from = place(source, source_at);
    uint8_t* to = place(target, kMargin + source_at + behind);
    copy(to, from, bytes);
    const auto before = static_cast<size_t>(to - target.data());
    for (size_t i = 0; i < target.size(); ++i) {
      const bool is_within = i >= before && i < before + bytes;
      if (target[i] != (is_within ? from[i - before] : 0)) return false;
    }
    return true;
  }
};

}  // namespace

TEST_CASE("copies are exact wherever source and target lie in their pages, and touch nothing else") {
  Copied copied;
  for (const size_t source_at : {0, 1, 16, 63}) {
    // kMargin is added: 4096 - 128 + x is x behind.
    for (const size_t behind : {0, 1, 16, 31, 64, 65, 3968, 3969, 3984, 4000, 4031, 4032}) {
      for (const size_t bytes : {0, 1, 63, 64, 255, 2047, 2048, 2049, 4095, 4096, 4097, 12289}) {
        CAPTURE(source_at);
        CAPTURE(behind);
        CAPTURE(bytes);
        CHECK(copied.is_exact(source_at, behind, bytes, copy_cached));
        CHECK(copied.is_exact(source_at, behind, bytes, [](void* to, const void* from, size_t count) {
          copy_streaming(to, from, count, nullptr, 0);
          copy_fence();
        }));
      }
    }
  }
}

}  // namespace crossrail
