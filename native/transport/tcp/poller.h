// epoll, with a call for each descriptor that is ready, and a timer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "transport/doorbell.h"
#include "util/clock.h"
#include "util/memory_map.h"

namespace crossrail::tcp {

// Something with a descriptor. Progress holder.
class Pollable {
 public:
  virtual ~Pollable() = default;
  // events: EPOLLIN and the like.
  virtual void on_events(uint32_t events) = 0;
};

// Threads: progress holder.
class Poller {
 public:
  Poller();  // throws TransportError

  void add(int fd, Pollable* what, uint32_t events);
  void change(int fd, Pollable* what, uint32_t events);
  void remove(int fd);
  // No events until resume(); a forked child still closes it.
  void pause(int fd);
  // False: this user's limit of watches (fs.epoll.max_user_watches) is reached, or the kernel is out of memory.
  bool resume(int fd, Pollable* what, uint32_t events);
  // Calls on_events for everything that is ready. Never blocks. Returns how many were.
  int poll();

  Doorbell& doorbell() { return doorbell_; }
  const Doorbell& doorbell() const { return doorbell_; }
  // Wakes the sleeper once, at this time or earlier: a pending earlier time suffices. In a virtual machine, setting a
  // timer takes longer than sending a packet.
  void wake_by(int64_t time_ns);
  void close();
  // In a forked child: closes everything that is polled without looking at its owner, which may be in the middle of a
  // change.
  void abandon_after_fork();

 private:
  static constexpr int kRemembered = 1 << 18;  // descriptors above this stay open in a forked child
  void remember(int fd, bool is_ours);
  Doorbell doorbell_;
  Fd timer_;
  int64_t timer_ns_ = 0;  // what the timer is set to, until poll() has seen it expire; 0: not set
  std::unique_ptr<std::atomic<uint64_t>[]> ours_ = std::make_unique<std::atomic<uint64_t>[]>(kRemembered / 64);
};

}  // namespace crossrail::tcp
