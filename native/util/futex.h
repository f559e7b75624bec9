// futex(2) on a 32-bit atomic, within the process or across processes that map the word.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

#include "util/clock.h"

namespace crossrail {

enum class FutexScope : int { kProcess = FUTEX_PRIVATE_FLAG, kShared = 0 };

// Sleeps while *word == expected, until woken, the deadline (now_ns clock), or a signal. False for a signal.
inline bool futex_wait(std::atomic<uint32_t>* word, uint32_t expected, Deadline deadline, FutexScope scope) {
  // FUTEX_WAIT_BITSET takes an absolute CLOCK_MONOTONIC time: no drift if called in a loop.
  timespec time{};
  timespec* limit = nullptr;
  if (deadline != kNoDeadline) {
    const int64_t at = deadline < 0 ? 0 : deadline;
    time.tv_sec = at / 1'000'000'000;
    time.tv_nsec = at % 1'000'000'000;
    limit = &time;
  }
  const long result = syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_BITSET | static_cast<int>(scope),
                              expected, limit, nullptr, FUTEX_BITSET_MATCH_ANY);
  return !(result < 0 && errno == EINTR);
}

inline void futex_wake(std::atomic<uint32_t>* word, int count, FutexScope scope) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE | static_cast<int>(scope), count, nullptr, nullptr,
          0);
}

inline void futex_wake_all(std::atomic<uint32_t>* word, FutexScope scope) { futex_wake(word, INT_MAX, scope); }

}  // namespace crossrail
