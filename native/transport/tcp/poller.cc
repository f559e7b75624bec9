#include "transport/tcp/poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <mutex>

#include "util/errors.h"

namespace crossrail::tcp {

namespace {

constexpr int kEventsMax = 64;

Fd checked(int fd, const char* call) {
  if (fd < 0) throw_errno(call, "cannot make a descriptor");
  return Fd(fd);
}

void control(int set, int operation, int fd, void* what, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = what;
  if (epoll_ctl(set, operation, fd, &event) != 0) throw_errno("epoll_ctl", "cannot watch a descriptor");
}

}  // namespace

Poller::Poller()
    : inner_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      outer_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      bell_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")),
      timer_(checked(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), "timerfd_create")) {
  control(outer_.get(), EPOLL_CTL_ADD, inner_.get(), nullptr, 0);
  control(outer_.get(), EPOLL_CTL_ADD, bell_.get(), nullptr, EPOLLIN);
  control(inner_.get(), EPOLL_CTL_ADD, timer_.get(), nullptr, EPOLLIN);
}

void Poller::add(int fd, Pollable* what, uint32_t events) {
  control(inner_.get(), EPOLL_CTL_ADD, fd, what, events);
  remember(fd, true);
}
void Poller::change(int fd, Pollable* what, uint32_t events) { control(inner_.get(), EPOLL_CTL_MOD, fd, what, events); }
void Poller::remove(int fd) {
  remember(fd, false);
  epoll_ctl(inner_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

void Poller::pause(int fd) { epoll_ctl(inner_.get(), EPOLL_CTL_DEL, fd, nullptr); }

bool Poller::resume(int fd, Pollable* what, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = what;
  return epoll_ctl(inner_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

// Only the progress holder writes. relaxed: read in a forked child, which has a single thread.
void Poller::remember(int fd, bool is_ours) {
  if (fd >= kRemembered) return;
  auto& word = ours_[static_cast<size_t>(fd / 64)];
  const uint64_t bit = uint64_t{1} << (fd % 64);
  const uint64_t old = word.load(std::memory_order_relaxed);
  word.store(is_ours ? old | bit : old & ~bit, std::memory_order_relaxed);
}

int Poller::poll() {
  std::array<epoll_event, kEventsMax> events;
  const int count = epoll_wait(inner_.get(), events.data(), kEventsMax, 0);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.ptr == nullptr) {
      uint64_t fired;
      [[maybe_unused]] const ssize_t got = ::read(timer_.get(), &fired, sizeof fired);
      rings_at_ns_ = 0;
    } else {
      static_cast<Pollable*>(event.data.ptr)->on_events(event.events);
    }
  }
  return count < 0 ? 0 : count;
}

void Poller::watch() {
  if (watching_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(watching_lock_);
  if (!inner_ || watching_.exchange(true, std::memory_order_relaxed)) return;
  control(outer_.get(), EPOLL_CTL_MOD, inner_.get(), nullptr, EPOLLIN);
}

void Poller::unwatch() {
  if (!watching_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(watching_lock_);
  if (!watching_.exchange(false, std::memory_order_relaxed)) return;
  control(outer_.get(), EPOLL_CTL_MOD, inner_.get(), nullptr, 0);
}

void Poller::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(bell_.get(), &one, sizeof one);  // full means already rung
}

bool Poller::clear_bell() {
  uint64_t rung;
  return ::read(bell_.get(), &rung, sizeof rung) == sizeof rung;
}

void Poller::ring_by(int64_t time_ns) {
  if (rings_at_ns_ != 0 && rings_at_ns_ <= time_ns) return;
  rings_at_ns_ = time_ns;
  itimerspec spec{};
  spec.it_value.tv_sec = time_ns / 1'000'000'000;
  spec.it_value.tv_nsec = time_ns % 1'000'000'000;
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

void Poller::close() {
  std::lock_guard lock(watching_lock_);
  watching_.store(false, std::memory_order_relaxed);
  inner_.reset();
  timer_.reset();
}

void Poller::abandon_after_fork() {
  for (int i = 0; i < kRemembered / 64; ++i) {
    for (uint64_t left = ours_[static_cast<size_t>(i)].load(std::memory_order_relaxed); left != 0; left &= left - 1) {
      ::close(64 * i + __builtin_ctzll(left));
    }
  }
  inner_.reset();
  outer_.reset();
  bell_.reset();
  timer_.reset();
}

}  // namespace crossrail::tcp
