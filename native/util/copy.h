// Copying memory when it is known whether anyone will read the copy soon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossrail {

// Whether the target begins less than a line behind the source, counted within a page. There `rep movsb`, by which C
// libraries and kernels copy, crawls on some processors: 1.4 GB/s instead of 40 on an EPYC 9004, where the target is up
// to 31 bytes behind. Large arrays of numpy begin 16 bytes into a page, what we allocate at its begin: every read
// would.
inline bool lies_behind(const void* target, const void* source) {
  constexpr uintptr_t kPage = 4096;
  constexpr uintptr_t kLine = 64;
  const uintptr_t behind = (reinterpret_cast<uintptr_t>(target) - reinterpret_cast<uintptr_t>(source)) % kPage;
  return behind > 0 && behind < kLine;
}

// The target is read soon, or small: ordinary stores through the caches. Ranges do not overlap.
void copy_cached(void* target, const void* source, size_t bytes);

// Much data whose target would only push other things out of the caches: streaming stores that skip them, where the
// processor has them. Weakly ordered: call copy_fence() before telling anyone. `next_source` (or null) is what will be
// copied next, up to next_bytes: its first lines are prefetched meanwhile.
void copy_streaming(void* target, const void* source, size_t bytes, const void* next_source, size_t next_bytes);

// Orders all streaming stores of this thread before its later stores.
void copy_fence();

}  // namespace crossrail
