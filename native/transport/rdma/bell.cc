#include "transport/rdma/bell.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <mutex>

#include "util/errors.h"

namespace crossrail::rdma {

namespace {

Fd checked(int fd, const char* call) {
  if (fd < 0) throw_errno(call, "cannot make a descriptor");
  return Fd(fd);
}

void control(int set, int operation, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  if (epoll_ctl(set, operation, fd, &event) != 0) throw_errno("epoll_ctl", "cannot watch a descriptor");
}

}  // namespace

Bell::Bell(std::span<const int> nic_fds)
    : inner_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      outer_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      eventfd_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  control(outer_.get(), EPOLL_CTL_ADD, inner_.get(), 0);
  control(outer_.get(), EPOLL_CTL_ADD, eventfd_.get(), EPOLLIN);
  for (const int fd : nic_fds) control(inner_.get(), EPOLL_CTL_ADD, fd, EPOLLIN);
}

void Bell::watch() {
  if (watching_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(lock_);
  if (!watching_.exchange(true, std::memory_order_relaxed)) {
    control(outer_.get(), EPOLL_CTL_MOD, inner_.get(), EPOLLIN);
  }
}

void Bell::unwatch() {
  if (!watching_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(lock_);
  if (watching_.exchange(false, std::memory_order_relaxed)) {
    control(outer_.get(), EPOLL_CTL_MOD, inner_.get(), 0);
  }
}

void Bell::ring() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(eventfd_.get(), &one, sizeof one);  // full means rung already
}

void Bell::silence() const {
  uint64_t rung;
  [[maybe_unused]] const ssize_t got = ::read(eventfd_.get(), &rung, sizeof rung);
}

void Bell::abandon() {
  inner_.reset();
  outer_.reset();
  eventfd_.reset();
}

}  // namespace crossrail::rdma
