// Copying memory, depending on whether the copy will be read soon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossrail {

// Whether the target begins less than a cache line behind the source, modulo the page. In this case `rep movsb`, which
// C libraries and kernels use to copy, is extremely slow on some processors: 1.4 GB/s instead of 40 on an EPYC 9004, if
// the target is up to 31 bytes behind. Large numpy arrays begin 16 bytes into a page, and our allocations at the start
// of one: every read would be affected.
inline bool lies_behind(const void* target, const void* source) {
  constexpr uintptr_t kPage = 4096;
  constexpr uintptr_t kLine = 64;
  const uintptr_t behind = (reinterpret_cast<uintptr_t>(target) - reinterpret_cast<uintptr_t>(source)) % kPage;
  return behind > 0 && behind < kLine;
}

// The target is read soon, or small: ordinary stores through the caches. The ranges must not overlap.
void copy_cached(void* target, const void* source, size_t bytes);

// For much data, whose target would only evict everything else from the caches: streaming stores that bypass them, if
// the processor has them. Weakly ordered: call copy_fence() before telling anyone. `next_source` (or null) is what will
// be copied next, up to next_bytes: its first lines are prefetched meanwhile.
void copy_streaming(void* target, const void* source, size_t bytes, const void* next_source, size_t next_bytes);

// Orders all streaming stores of this thread before its later stores.
void copy_fence();

}  // namespace crossrail
