#include "util/wake_event.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "util/errors.h"

namespace crossrail {

WakeEvent WakeEvent::create() {
  Fd fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw_errno("eventfd", "cannot make a descriptor to sleep on");
  return WakeEvent(std::move(fd));
}

WakeEvent WakeEvent::adopt(Fd fd) {
  char target[64] = {};
  const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), target, sizeof target - 1);
  if (length < 0 && errno == ENOENT) {
    throw UsageError(
        "this process sees no /proc, which it needs to check that the descriptor to ring is an "
        "eventfd: mount it (container runtimes do), or use transport='tcp'");
  }
  if (length < 0 || std::string_view(target, static_cast<size_t>(length)) != "anon_inode:[eventfd]") {
    throw UsageError("the descriptor to ring is not an eventfd but '" + std::string(target) + "'");
  }
  if ((fcntl(fd.get(), F_GETFL) & O_NONBLOCK) == 0) throw UsageError("the eventfd to ring is a blocking one");
  return WakeEvent(std::move(fd));
}

void WakeEvent::ring() const {
  const uint64_t one = 1;
  // Fails only when 2^64 - 2 rings are pending: then it is readable anyway.
  [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof one);
}

void WakeEvent::silence() const {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof count);
}

}  // namespace crossrail
