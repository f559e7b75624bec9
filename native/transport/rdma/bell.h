// Where a thread sleeps: one descriptor for a bell and for the descriptors of all NICs.
#pragma once

#include <atomic>
#include <span>

#include "util/memory_map.h"
#include "util/spinlock.h"

namespace crossrail::rdma {

// Two epoll sets: the inner one holds the NICs' descriptors, the outer one holds the inner one and an eventfd. While a
// thread drives, the inner set is switched off in the outer one: otherwise a NIC whose descriptors become readable with
// every arrival would wake the sleeping worker for nothing.
// Threads: any.
class Bell {
 public:
  explicit Bell(std::span<const int> nic_fds);  // throws TransportError

  int fd() const { return outer_.get(); }
  void watch();
  void unwatch();
  void ring() const;
  void silence() const;
  // In a forked child.
  void abandon();

 private:
  Fd inner_;
  Fd outer_;
  Fd eventfd_;
  SpinLock lock_;  // the flag and the kernel's state change together
  std::atomic<bool> watching_{false};
};

}  // namespace crossrail::rdma
