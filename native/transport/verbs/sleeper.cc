#include "transport/verbs/sleeper.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "util/errors.h"

namespace crossrail::verbs {

namespace {

enum class Source : uint32_t { kCompletions, kDevice, kBell };

// The channel keeps an event for each ring that nobody took: at most two a time that it was armed.
constexpr uint32_t kArmsBetweenDrains = 16;

void set_nonblocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
    throw_errno("fcntl", "cannot make a descriptor nonblocking");
}

void watch(int set, int fd, Source source) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u32 = static_cast<uint32_t>(source);
  if (::epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) != 0) throw_errno("epoll_ctl", "cannot watch a descriptor");
}

}  // namespace

Sleeper::Sleeper(ibv_context* context)
    : channel_(library().create_comp_channel(context)),
      set_(::epoll_create1(EPOLL_CLOEXEC)),
      bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (channel_ == nullptr) throw_errno("ibv_create_comp_channel", "cannot make a completion channel");
  if (!set_ || !bell_) throw_errno("epoll_create1", "cannot make a descriptor");
  set_nonblocking(channel_->fd);
  set_nonblocking(context->async_fd);
  watch(set_.get(), channel_->fd, Source::kCompletions);
  watch(set_.get(), context->async_fd, Source::kDevice);
  watch(set_.get(), bell_.get(), Source::kBell);
  fds_.push_back(set_.get());
}

void Sleeper::arm(ibv_cq* sends, ibv_cq* receives) {
  if (may_have_rung_) {
    hush();
    may_have_rung_ = false;
  }
  if (++arms_since_drain_ >= kArmsBetweenDrains) drain_channel();
  ibv_req_notify_cq(sends, 0);
  ibv_req_notify_cq(receives, 0);
  is_armed_ = true;
}

void Sleeper::drain_channel() {
  arms_since_drain_ = 0;
  ibv_cq* queue = nullptr;
  void* user = nullptr;
  while (library().get_cq_event(channel_.get(), &queue, &user) == 0) library().ack_cq_events(queue, 1);
}

void Sleeper::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(bell_.get(), &one, sizeof one);
}

// release: pairs with take_device_news(): who sees the flag looks at the device after the edge was taken. A flag set late only
// means that the holder, which the sleeper wakes next, sees it.
void Sleeper::hush() {
  std::array<epoll_event, 3> events;
  const int count = ::epoll_wait(set_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i)
    if (events[static_cast<size_t>(i)].data.u32 == static_cast<uint32_t>(Source::kDevice))
      device_news_.store(true, std::memory_order_release);
}

void Sleeper::abandon_after_fork() {
  set_.reset();
  bell_.reset();
  ::close(channel_->fd);
}

}  // namespace crossrail::verbs
