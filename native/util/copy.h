// Copying memory when it is known whether anyone will read the copy soon.
#pragma once

#include <cstddef>

namespace crossrail {

// The target is read soon, or small: ordinary stores through the caches. Ranges do not overlap.
void copy_cached(void* target, const void* source, size_t bytes);

// Much data whose target would only push other things out of the caches: streaming stores that skip them, where the
// processor has them. Weakly ordered: call copy_fence() before telling anyone. `next_source` (or null) is what will be
// copied next, up to next_bytes: its first lines are prefetched meanwhile.
void copy_streaming(void* target, const void* source, size_t bytes, const void* next_source, size_t next_bytes);

// Orders all streaming stores of this thread before its later stores.
void copy_fence();

}  // namespace crossrail
