// Prefetching cache lines.
#pragma once

namespace crossrail {

// The line at `at` is to be written within some tens of nanoseconds, and is now in another core's cache, or a farther
// one. A hint, without any other effect.
// Uses PREFETCHW directly, which x86-64 processors that lack it ignore. The builtin would fetch the line for reading
// wherever the compiler may not assume that instruction, and the line would then move twice.
inline void prefetch_for_write(const void* at) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, 1);
#endif
}

}  // namespace crossrail
