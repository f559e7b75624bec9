// Cache lines that are asked for before they are needed.
#pragma once

namespace crossrail {

// The line at `at` is to be written in some tens of nanoseconds, and another core has it, or a farther cache. A hint,
// without any other effect.
// The builtin asks for a line to read where the compiler may not assume PREFETCHW, which x86-64 does nothing with where
// it does not know it: the line would then move twice.
inline void prefetch_for_write(const void* at) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, 1);
#endif
}

}  // namespace crossrail
