#include "transport/tcp/poller.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "util/errors.h"

namespace crossrail::tcp {

namespace {

constexpr int kEventsMax = 64;

void control(int set, int operation, int fd, void* what, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = what;
  if (epoll_ctl(set, operation, fd, &event) != 0) throw_errno("epoll_ctl", "cannot watch a descriptor");
}

}  // namespace

Poller::Poller() : timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (!timer_) throw_errno("timerfd_create", "cannot make a descriptor");
  control(doorbell_.set(), EPOLL_CTL_ADD, timer_.get(), nullptr, EPOLLIN);
}

void Poller::add(int fd, Pollable* what, uint32_t events) {
  control(doorbell_.set(), EPOLL_CTL_ADD, fd, what, events);
  remember(fd, true);
}
void Poller::change(int fd, Pollable* what, uint32_t events) {
  control(doorbell_.set(), EPOLL_CTL_MOD, fd, what, events);
}
void Poller::remove(int fd) {
  remember(fd, false);
  epoll_ctl(doorbell_.set(), EPOLL_CTL_DEL, fd, nullptr);
}

void Poller::pause(int fd) { epoll_ctl(doorbell_.set(), EPOLL_CTL_DEL, fd, nullptr); }

bool Poller::resume(int fd, Pollable* what, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = what;
  return epoll_ctl(doorbell_.set(), EPOLL_CTL_ADD, fd, &event) == 0;
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
  const int count = epoll_wait(doorbell_.set(), events.data(), kEventsMax, 0);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.ptr == nullptr) {
      uint64_t fired;
      [[maybe_unused]] const ssize_t got = ::read(timer_.get(), &fired, sizeof fired);
      timer_ns_ = 0;
    } else {
      static_cast<Pollable*>(event.data.ptr)->on_events(event.events);
    }
  }
  return count < 0 ? 0 : count;
}

void Poller::wake_by(int64_t time_ns) {
  if (timer_ns_ != 0 && timer_ns_ <= time_ns) return;
  timer_ns_ = time_ns;
  itimerspec spec{};
  spec.it_value.tv_sec = time_ns / 1'000'000'000;
  spec.it_value.tv_nsec = time_ns % 1'000'000'000;
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

void Poller::close() {
  doorbell_.close();
  timer_.reset();
}

void Poller::abandon_after_fork() {
  for (int i = 0; i < kRemembered / 64; ++i) {
    for (uint64_t left = ours_[static_cast<size_t>(i)].load(std::memory_order_relaxed); left != 0; left &= left - 1) {
      ::close(64 * i + __builtin_ctzll(left));
    }
  }
  doorbell_.abandon_after_fork();
  timer_.reset();
}

}  // namespace crossrail::tcp
