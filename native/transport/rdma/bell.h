// Where a sleeper sleeps: one descriptor for a bell and for the descriptors of all NICs.
#pragma once

#include <atomic>
#include <span>

#include "util/memory_map.h"
#include "util/spinlock.h"

namespace crossrail::rdma {

// Two epoll sets: the inner one holds the NICs' descriptors, the outer one the inner one and an eventfd. While a thread
// drives, the inner set is switched off in the outer one: a NIC whose descriptors are readable whenever data arrive
// would wake the sleeping worker for nothing.
// Threads: any.
class Bell {
 public:
  explicit Bell(std::span<const int> nic_fds);  // throws TransportError

  int fd() const { return outer_.get(); }
  void watch();
  void unwatch();
  void ring() const;
  void silence() const;
  // In the child of a fork.
  void abandon();

 private:
  Fd inner_;
  Fd outer_;
  Fd eventfd_;
  SpinLock lock_;  // the flag and what the kernel was told change together
  std::atomic<bool> watching_{false};
};

}  // namespace crossrail::rdma
