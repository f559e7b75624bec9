// From the worker to a waiting thread or loop: a lock-free stack of cookies, and an eventfd that becomes readable when
// it fills.
#pragma once

#include <atomic>
#include <cstdint>

#include "util/ref.h"

namespace crossrail {

// One consumer: an asyncio loop (add_reader on fd()) or a thread (wait()).
// Threads: post() from any; drain() and wait() from one thread at a time.
// Invariant: while the stack or taken_ is not empty the eventfd is readable or a drain is running.
class Notifier : public RefCounted<Notifier> {
 public:
  Notifier();
  ~Notifier();

  // Readable (POLLIN) when there is something to drain. Owned by the notifier.
  int fd() const { return fd_; }

  // Never blocks, allocates at most one node, loses nothing.
  void post(uint64_t cookie);

  // [any] relaxed: to see what happened before a post, drain it.
  bool has_posts() const { return head_.load(std::memory_order_relaxed) != nullptr; }

  // Calls take(cookie) for all that were posted so far, oldest first. If it throws, the next drain begins with the
  // same.
  template <typename Take>
  void drain(Take take) {
    collect();
    try {
      for (const Node* node = taken_; node != nullptr; node = node->next) take(node->cookie);
    } catch (...) {
      ring();
      throw;
    }
    drop_taken();
  }

  // Blocks until readable or the deadline (now_ns clock); true if readable. EINTR returns false early.
  bool wait(int64_t deadline_ns);

 private:
  struct Node {
    Node* next;
    uint64_t cookie;
  };
  void collect();  // moves what was posted to the end of taken_
  void drop_taken();
  void ring();  // makes the eventfd readable
  std::atomic<Node*> head_{nullptr};
  Node* taken_ = nullptr;  // [the consumer] oldest first
  int fd_ = -1;
};

}  // namespace crossrail
