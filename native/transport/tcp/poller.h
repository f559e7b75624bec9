// epoll, and a descriptor for a sleeper that is readable only when the sleeper wants it to be.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "util/clock.h"
#include "util/memory_map.h"
#include "util/spinlock.h"

namespace crossrail::tcp {

// Something with a descriptor. Progress holder.
class Pollable {
 public:
  virtual ~Pollable() = default;
  // events: EPOLLIN and the like.
  virtual void on_events(uint32_t events) = 0;
};

// Two epoll sets: the inner one holds the sockets and is what poll() asks; the outer one holds the inner one and a
// bell, and is what sleepers sleep on. While a thread drives, the inner set is switched off in the outer one: otherwise
// every packet would also wake the sleeping worker.
// Threads: progress holder, except where marked [any].
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

  int sleep_fd() const { return outer_.get(); }  // [any] readable: sockets have events while watched, or the bell rang
  void watch();                                  // [any]
  void unwatch();                                // [any]
  void ring();                                   // [any]
  // [any] Silences the bell. True if it had rung.
  bool clear_bell();
  // Rings once, at this time or earlier: a pending earlier ring suffices. In a virtual machine, setting a timer takes
  // longer than sending a packet.
  void ring_by(int64_t time_ns);
  // Drops what the sockets were for. Sleepers may still be waiting on sleep_fd(), and may be rung.
  void close();
  // In a forked child: closes everything that is polled without looking at its owner, which may be in the middle of a
  // change.
  void abandon_after_fork();

 private:
  static constexpr int kRemembered = 1 << 18;  // descriptors above this stay open in a forked child
  void remember(int fd, bool is_ours);
  Fd inner_;
  Fd outer_;
  Fd bell_;
  Fd timer_;
  int64_t rings_at_ns_ = 0;  // what the timer is set to, until poll() has seen it ring; 0: not set
  std::unique_ptr<std::atomic<uint64_t>[]> ours_ = std::make_unique<std::atomic<uint64_t>[]>(kRemembered / 64);
  SpinLock watching_lock_;  // the flag and the kernel's state change together
  // relaxed: the lock orders its changes. A reader without the lock may miss that another thread has just switched it
  // off: that thread sleeps no more, and looks itself (TcpTransport::hush).
  std::atomic<bool> watching_{false};
};

}  // namespace crossrail::tcp
