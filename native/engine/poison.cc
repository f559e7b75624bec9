#include "engine/poison.h"

#include <algorithm>
#include <cstring>

#include "util/entropy.h"

namespace crossrail {

namespace {

constexpr uint64_t kWordBytes = sizeof(uint64_t);

// The pattern's word at an offset that is a multiple of 8: the mixing function of splitmix64 (Steele, Lea, Flood: "Fast
// splittable pseudorandom number generators", 2014).
uint64_t word_at(uint64_t seed, uint64_t offset) {
  uint64_t mixed = seed + offset * 0x9e3779b97f4a7c15;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 31);
}

// Calls visit(offset, pattern word, first byte of interest in it, how many) for the words that cover [offset, end).
template <typename Visit>
void for_each_word(uint64_t seed, uint64_t offset, uint64_t end, Visit&& visit) {
  while (offset < end) {
    const uint64_t word_offset = offset & ~(kWordBytes - 1);
    const uint64_t skipped = offset - word_offset;
    const uint64_t count = std::min(end, word_offset + kWordBytes) - offset;
    visit(offset, word_at(seed, word_offset) >> (8 * skipped), count);
    offset += count;
  }
}

}  // namespace

Poison::Poison(std::byte* base, uint64_t length_bytes, uint64_t offset, uint64_t stride_bytes, uint64_t page_bytes,
               const PageIndices& pages)
    : base_(base),
      pages_{.offset = offset, .stride_bytes = stride_bytes, .page_bytes = page_bytes, .indices = {}},
      seed_(kernel_entropy().draw_u64()) {
  pages_.indices.resize(pages.count);
  if (pages.count > 0) {
    copy_page_indices(pages, "pages", offset, stride_bytes, page_bytes, length_bytes, pages_.indices.data());
  }
}

void Poison::fill() {
  for (const uint32_t index : pages_.indices) {
    const uint64_t start = pages_.offset + index * pages_.stride_bytes;
    for_each_word(seed_, start, start + pages_.page_bytes, [&](uint64_t offset, uint64_t word, uint64_t count) {
      if (count == kWordBytes) {
        std::memcpy(base_ + offset, &word, kWordBytes);
      } else {
        std::memcpy(base_ + offset, &word, count);
      }
    });
  }
}

std::optional<Poison::Finding> Poison::find() const {
  std::optional<Finding> finding;
  for (const uint32_t index : pages_.indices) {
    const uint64_t start = pages_.offset + index * pages_.stride_bytes;
    uint64_t first = ~uint64_t{0};
    uint64_t last = 0;
    for_each_word(seed_, start, start + pages_.page_bytes, [&](uint64_t offset, uint64_t word, uint64_t count) {
      uint64_t there = 0;
      if (count == kWordBytes) {
        std::memcpy(&there, base_ + offset, kWordBytes);
      } else {
        std::memcpy(&there, base_ + offset, count);
        word &= (uint64_t{1} << (8 * count)) - 1;
      }
      if (there == word) return;
      const uint64_t differing = there ^ word;
      first = std::min(first, offset + static_cast<uint64_t>(__builtin_ctzll(differing)) / 8);
      last = offset + (63 - static_cast<uint64_t>(__builtin_clzll(differing))) / 8;
    });
    if (first > last) continue;
    if (finding) {
      ++finding->pages;
      continue;
    }
    finding = {.offset = first, .length_bytes = last - first + 1, .found = {}, .found_bytes = 0, .pages = 1};
    finding->found_bytes = static_cast<uint32_t>(std::min<uint64_t>(finding->found.size(), finding->length_bytes));
    std::memcpy(finding->found.data(), base_ + first, finding->found_bytes);
  }
  return finding;
}

}  // namespace crossrail
