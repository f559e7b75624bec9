#include "transport/sleep.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>

#include "util/errors.h"

namespace crossrail {

namespace {

bool wait_for_any(std::span<pollfd> items, Deadline deadline) {
  timespec limit{};
  if (deadline != kNoDeadline) {
    const int64_t rest = std::max<int64_t>(0, deadline - now_ns());
    limit = {.tv_sec = rest / 1'000'000'000, .tv_nsec = rest % 1'000'000'000};
  }
  return ppoll(items.data(), items.size(), deadline == kNoDeadline ? nullptr : &limit, nullptr) > 0;
}

pollfd readable(int fd) { return {.fd = fd, .events = POLLIN, .revents = 0}; }

// False: Linux refuses epoll sets that are nested too deep (ELOOP), or too many in one descriptor (EINVAL).
bool control(int set, int operation, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  if (epoll_ctl(set, operation, fd, &event) == 0) return true;
  if (errno == ELOOP || errno == EINVAL) return false;
  throw_errno("epoll_ctl", "cannot watch a descriptor");
}

}  // namespace

SleepingPlace::SleepingPlace(std::span<Transport* const> transports)
    : transports_(transports.begin(), transports.end()),
      front_call_(WakeEvent::create()),
      behind_call_(WakeEvent::create()) {
  Fd set(epoll_create1(EPOLL_CLOEXEC));
  if (!set) throw_errno("epoll_create1", "cannot make a descriptor");
  for (const Transport* transport : transports_) {
    if (!control(set.get(), EPOLL_CTL_ADD, transport->wake_fd(), EPOLLIN)) return;
  }
  behind_ = std::move(set);
}

// acquire and release: what the previous one did to the set is complete.
bool SleepingPlace::take_front() {
  if (is_front_taken_.load(std::memory_order_relaxed) || is_front_taken_.exchange(true, std::memory_order_acquire))
    return false;
  let_news_through(false);
  return true;
}

void SleepingPlace::leave_front() {
  let_news_through(true);
  is_front_taken_.store(false, std::memory_order_release);
}

bool SleepingPlace::sleep_in_front(Deadline deadline) { return take_news(front_call_, true, deadline); }

void SleepingPlace::sleep_behind(Deadline deadline) {
  if (!has_front()) {
    take_news(behind_call_, false, deadline);
    return;
  }
  std::array<pollfd, 2> items = {readable(behind_.get()), readable(behind_call_.fd())};
  while (wait_for_any(items, deadline) && !take_news(behind_call_, false, 0)) {
  }
}

// When this is switched on and there is news already, whoever sleeps behind is woken.
void SleepingPlace::let_news_through(bool on) {
  if (!has_front()) return;
  for (const Transport* transport : transports_)
    control(behind_.get(), EPOLL_CTL_MOD, transport->wake_fd(), on ? EPOLLIN : 0u);
}

// Waits for news until the deadline; false: there was none.
bool SleepingPlace::take_news(const WakeEvent& call, bool looks_at_once, Deadline deadline) {
  std::array<pollfd, kTransportsMax + 1> places{};
  const std::span items(places.data(), transports_.size() + 1);
  items.back() = readable(call.fd());
  for (size_t i = 0; i < transports_.size(); ++i) items[i] = readable(transports_[i]->wake_fd());
  bool taken = false;
  while (!taken && wait_for_any(items, deadline)) {
    taken = items.back().revents != 0;
    if (taken) call.silence();
    for (size_t i = 0; i < transports_.size(); ++i)
      taken |= items[i].revents != 0 && transports_[i]->hush(looks_at_once);
  }
  return taken;
}

}  // namespace crossrail
