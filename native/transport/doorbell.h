// What a network transport's sleeper sleeps on: one descriptor for a bell and for all descriptors that arrivals make
// readable.
#pragma once

#include <atomic>

#include "util/memory_map.h"
#include "util/spinlock.h"
#include "util/wake_event.h"

namespace crossrail {

// Two epoll sets: the inner one holds the transport's descriptors, the outer one holds the inner one and the bell.
// While a thread drives, the inner set is switched off in the outer one: otherwise every arrival would also wake the
// sleeping worker.
// Threads: any, except close() and abandon_after_fork().
class Doorbell {
 public:
  Doorbell();  // throws TransportError

  // Readable: the bell rang, or, while watched, something in the set is ready.
  int sleep_fd() const { return outer_.get(); }
  int set() const { return inner_.get(); }  // the transport adds its descriptors here
  void watch();
  void unwatch();
  void ring() const { bell_.ring(); }
  void silence() const { bell_.silence(); }
  // Drops the set. Sleepers may still be waiting on sleep_fd(), and may be rung.
  void close();
  void abandon_after_fork();

 private:
  Fd inner_;
  Fd outer_;
  WakeEvent bell_ = WakeEvent::create();
  SpinLock lock_;  // the flag and the kernel's state change together
  // relaxed: the lock orders its changes. A reader without the lock may miss that another thread has just switched it
  // off: that thread sleeps no more, and looks itself (TcpTransport::hush).
  std::atomic<bool> watching_{false};
};

}  // namespace crossrail
