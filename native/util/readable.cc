#include "util/readable.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace crossrail {

bool is_readable(const std::byte* base, uint64_t length_bytes) {
  constexpr uintptr_t kPage = 4096;  // or longer: then some are asked for more than once
  constexpr int kNoSuchHow = -1;
  constexpr size_t kMaskBytes = 8;
  const auto end = reinterpret_cast<uintptr_t>(base) + length_bytes;
  for (uintptr_t page = reinterpret_cast<uintptr_t>(base) / kPage * kPage; page < end; page += kPage) {
    // The kernel reads a mask there before it finds that it is not told what to do with it.
    if (syscall(SYS_rt_sigprocmask, kNoSuchHow, page, nullptr, kMaskBytes) != 0 && errno == EFAULT) return false;
  }
  return true;
}

}  // namespace crossrail
