#include "transport/verbs/sleeper.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "util/errors.h"

namespace crossrail::verbs {

namespace {

enum class Source : uint32_t { kCompletions, kDevice, kBell };

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

// A ring is taken from its channel before the queue is armed again: libmlx5 numbers its arming by the rings taken, and
// the NIC takes a second arming with the same number, after it has rung, for a repetition. A ring that comes between
// the two wakes the sleeper, and hush() finds it.
void Sleeper::arm(ibv_cq* sends, ibv_cq* receives) {
  if (std::exchange(may_have_rung_, false)) hush();
  if (has_rung_.exchange(false, std::memory_order_acquire)) drain_channel();
  ibv_req_notify_cq(sends, 0);
  ibv_req_notify_cq(receives, 0);
  is_armed_ = true;
}

void Sleeper::drain_channel() {
  ibv_cq* queue = nullptr;
  void* user = nullptr;
  while (library().get_cq_event(channel_.get(), &queue, &user) == 0) library().ack_cq_events(queue, 1);
}

void Sleeper::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(bell_.get(), &one, sizeof one);
}

// release: pairs with take_device_news() and with arm(): whoever sees a flag looks at the source after the edge was
// consumed. A flag set late only means that the holder, which the sleeper wakes next, sees it.
void Sleeper::hush() {
  std::array<epoll_event, 3> events;
  const int count = ::epoll_wait(set_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const uint32_t source = events[static_cast<size_t>(i)].data.u32;
    if (source == static_cast<uint32_t>(Source::kDevice)) device_news_.store(true, std::memory_order_release);
    if (source == static_cast<uint32_t>(Source::kCompletions)) has_rung_.store(true, std::memory_order_release);
  }
}

void Sleeper::abandon_after_fork() {
  set_.reset();
  bell_.reset();
  ::close(channel_->fd);
}

}  // namespace crossrail::verbs
