// Page lists as callers pass them: arrays of any integer type, checked once, on a copy.
#pragma once

#include <cstdint>

namespace crossrail {

// An index array: a pointer to the first element, and the element type.
enum class IndexType : uint8_t { kInt32, kUint32, kInt64, kUint64 };
struct PageIndices {
  const void* data = nullptr;
  uint64_t count = 0;
  IndexType type = IndexType::kInt64;
};

// Copies pages.count indices to `out`. Checks that the furthest page, page_bytes at offset + stride * index, ends
// within `bound_bytes`; throws UsageError that names the argument. offset, stride and page_bytes: at most 2^56.
void copy_page_indices(const PageIndices& pages, const char* name, uint64_t offset, uint64_t stride_bytes,
                       uint64_t page_bytes, uint64_t bound_bytes, uint32_t* out);

}  // namespace crossrail
