// epoll, and a descriptor for a sleeper that is readable only while the sleeper wants it to be.
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
// bell, and is what sleepers sleep on. While a thread drives, the inner set is switched off in the outer one: else
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
  // False: the kernel watches no more of this user's (fs.epoll.max_user_watches), or has no memory.
  bool resume(int fd, Pollable* what, uint32_t events);
  // Calls on_events of what is ready. Never blocks. Returns how many.
  int poll();

  int sleep_fd() const { return outer_.get(); }  // [any] readable: sockets have news while watched, or the bell rang
  void watch();                                  // [any]
  void unwatch();                                // [any]
  void ring();                                   // [any]
  // [any] Silences the bell. True when it had rung.
  bool clear_bell();
  // A ring at this time or before, once: one that is still to come and is earlier will do. To set a timer takes a
  // virtual machine longer than a packet does.
  void ring_by(int64_t time_ns);
  // Gives up what the sockets were for. Sleepers may still be at sleep_fd(), and may be rung.
  void close();
  // In the child of a fork: closes all that is polled, without looking at what it belongs to, which may be in the
  // middle of a change.
  void abandon_after_fork();

 private:
  static constexpr int kRemembered = 1 << 18;  // higher ones stay open in a forked child
  void remember(int fd, bool is_ours);
  Fd inner_;
  Fd outer_;
  Fd bell_;
  Fd timer_;
  int64_t rings_at_ns_ = 0;  // what the timer is set to, until poll() has seen it ring; 0: nothing
  std::unique_ptr<std::atomic<uint64_t>[]> ours_ = std::make_unique<std::atomic<uint64_t>[]>(kRemembered / 64);
  SpinLock watching_lock_;  // the flag and what the kernel was told change together
  // relaxed: the lock orders its changes. Who looks without it may miss that another has just switched off: the one who
  // sleeps no more, and looks himself (TcpTransport::hush).
  std::atomic<bool> watching_{false};
};

}  // namespace crossrail::tcp
