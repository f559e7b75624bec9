#include "util/tick_clock.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>

namespace crossrail {

namespace {

#if defined(__x86_64__)
// The counter runs at one rate in every power state (AMD64 Architecture Programmer's Manual, CPUID 8000_0007, EDX bit
// 8; the same bit on Intel).
bool has_constant_counter() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(0x80000007, &eax, &ebx, &ecx, &edx) != 0 && (edx & (1u << 8)) != 0;
}
#else
bool has_constant_counter() { return true; }
#endif

}  // namespace

TickClock::TickClock(const Clock* simulated)
    : simulated_(simulated),
      has_counter_(has_constant_counter()),
      start_ticks_(ticks()),
      start_ns_(simulated != nullptr ? start_ticks_ : now_ns()) {}

int64_t TickClock::ticks_in(int64_t ns) const {
  if (simulated_ != nullptr || !has_counter_) return ns;
#if defined(__x86_64__)
  return 3 * ns;  // between 2 and 5 GHz on all servers that we know; virtual processors do not report it
#elif defined(__aarch64__)
  int64_t ticks_per_s;
  asm volatile("mrs %0, cntfrq_el0" : "=r"(ticks_per_s));
  return std::max<int64_t>(1, ns * ticks_per_s / 1'000'000'000);
#else
  return ns;
#endif
}

TickClock::Scale TickClock::scale() const {
  if (simulated_ != nullptr) return {0, 0, 1.0};
  const int64_t ticks_passed = ticks() - start_ticks_;
  const int64_t ns_passed = now_ns() - start_ns_;
  const double rate = ticks_passed > 0 ? static_cast<double>(ns_passed) / static_cast<double>(ticks_passed) : 0;
  return {start_ticks_, start_ns_, rate};
}

}  // namespace crossrail
