#include "transport/sleep.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <ctime>

#include "util/errors.h"

namespace crossrail {

void sleep_on(std::span<Transport* const> transports, Deadline deadline) {
  std::array<pollfd, kTransportsMax> items;
  CROSSRAIL_ASSERT(transports.size() <= items.size());
  for (size_t i = 0; i < transports.size(); ++i) {
    items[i] = {.fd = transports[i]->wake_fd(), .events = POLLIN, .revents = 0};
  }
  for (;;) {
    timespec limit{};
    if (deadline != kNoDeadline) {
      const int64_t rest = std::max<int64_t>(0, deadline - now_ns());
      limit = {.tv_sec = rest / 1'000'000'000, .tv_nsec = rest % 1'000'000'000};
    }
    if (ppoll(items.data(), transports.size(), deadline == kNoDeadline ? nullptr : &limit, nullptr) <= 0) return;
    bool news = false;
    for (size_t i = 0; i < transports.size(); ++i) {
      if (items[i].revents != 0) news |= transports[i]->hush();
    }
    if (news) return;
  }
}

}  // namespace crossrail
