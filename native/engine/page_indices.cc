#include "engine/page_indices.h"

#include <algorithm>
#include <limits>
#include <string>

#include "util/errors.h"

namespace crossrail {

namespace {

template <typename Index>
uint64_t convert_indices(const void* data, uint64_t count, const char* name, uint32_t* out) {
  const auto* indices = static_cast<const Index*>(data);
  // A negative one becomes larger than all that fit.
  const auto fits = [](Index index) { return static_cast<uint64_t>(index) <= std::numeric_limits<uint32_t>::max(); };
  // Copy first, then check the copy: the caller's array may change under us.
  bool all_fit = true;
  uint32_t largest = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const Index index = indices[i];
    all_fit &= fits(index);
    out[i] = static_cast<uint32_t>(index);
    largest = std::max(largest, out[i]);
  }
  if (all_fit) return largest;
  for (uint64_t i = 0; i < count; ++i) {
    const Index index = indices[i];
    if (!fits(index))
      throw UsageError(std::string(name) + "[" + text(i) + "] = " + std::to_string(index) + " is not in 0..2**32-1");
  }
  throw UsageError(std::string(name) + " changed while it was read");
}

}  // namespace

void copy_page_indices(const PageIndices& pages, const char* name, uint64_t offset, uint64_t stride_bytes,
                       uint64_t page_bytes, uint64_t bound_bytes, uint32_t* out) {
  uint64_t largest = 0;
  switch (pages.type) {
    case IndexType::kInt32:
      largest = convert_indices<int32_t>(pages.data, pages.count, name, out);
      break;
    case IndexType::kUint32:
      largest = convert_indices<uint32_t>(pages.data, pages.count, name, out);
      break;
    case IndexType::kInt64:
      largest = convert_indices<int64_t>(pages.data, pages.count, name, out);
      break;
    case IndexType::kUint64:
      largest = convert_indices<uint64_t>(pages.data, pages.count, name, out);
      break;
  }
  // The caller has limited strides and offsets to 2^56, indices are below 2^32: 128 bits hold the product.
  const auto end = static_cast<unsigned __int128>(largest) * stride_bytes + offset + page_bytes;
  if (end <= bound_bytes) return;
  uint64_t at = 0;
  while (out[at] != largest) ++at;
  throw UsageError(std::string(name) + "[" + text(at) + "] = " + text(largest) + ": the page ends past the region's " +
                   text(bound_bytes) + " bytes (stride " + text(stride_bytes) + ", offset " + text(offset) + ", page " +
                   text(page_bytes) + " bytes)");
}

}  // namespace crossrail
