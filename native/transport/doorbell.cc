#include "transport/doorbell.h"

#include <sys/epoll.h>

#include <mutex>

#include "util/errors.h"

namespace crossrail {

namespace {

void set_events(int set, int operation, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  if (epoll_ctl(set, operation, fd, &event) != 0) throw_errno("epoll_ctl", "cannot watch a descriptor");
}

}  // namespace

Doorbell::Doorbell() : inner_(epoll_create1(EPOLL_CLOEXEC)), outer_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!inner_ || !outer_) throw_errno("epoll_create1", "cannot make a descriptor");
  set_events(outer_.get(), EPOLL_CTL_ADD, inner_.get(), 0);
  set_events(outer_.get(), EPOLL_CTL_ADD, bell_.fd(), EPOLLIN);
}

void Doorbell::watch() {
  if (watching_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(lock_);
  if (!inner_ || watching_.exchange(true, std::memory_order_relaxed)) return;
  set_events(outer_.get(), EPOLL_CTL_MOD, inner_.get(), EPOLLIN);
}

void Doorbell::unwatch() {
  if (!watching_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(lock_);
  if (!watching_.exchange(false, std::memory_order_relaxed)) return;
  set_events(outer_.get(), EPOLL_CTL_MOD, inner_.get(), 0);
}

void Doorbell::close() {
  std::lock_guard lock(lock_);
  watching_.store(false, std::memory_order_relaxed);
  inner_.reset();
}

void Doorbell::abandon_after_fork() {
  inner_.reset();
  outer_.reset();
  bell_ = {};
}

}  // namespace crossrail
