#include "engine/notifier.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "util/clock.h"
#include "util/errors.h"

namespace crossrail {

Notifier::Notifier() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw_errno("eventfd", "cannot make a notifier");
}

Notifier::~Notifier() {
  collect();
  drop_taken();
  close(fd_);
}

void Notifier::post(uint64_t cookie) {
  Node* below = head_.load(std::memory_order_relaxed);
  auto* node = new Node{below, cookie};
  // release: pairs with the acquire in drain(), so that what happened before the post is visible to whoever drains it.
  // Once pushed, the node belongs to the drainer, who may have deleted it already.
  while (!head_.compare_exchange_weak(below, node, std::memory_order_release, std::memory_order_relaxed))
    node->next = below;
  if (below == nullptr) ring();  // it was empty: the consumer may be asleep
}

void Notifier::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof one);  // cannot fill up: drain() resets it
}

void Notifier::collect() {
  // Reset first: a post that comes later makes the descriptor readable again.
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(fd_, &count, sizeof count);
  Node* newest = head_.exchange(nullptr, std::memory_order_acquire);
  Node* oldest = nullptr;
  while (newest != nullptr) oldest = std::exchange(newest, std::exchange(newest->next, oldest));
  Node** end = &taken_;
  while (*end != nullptr) end = &(*end)->next;
  *end = oldest;
}

void Notifier::drop_taken() {
  while (taken_ != nullptr) delete std::exchange(taken_, taken_->next);
}

bool Notifier::wait(int64_t deadline_ns) {
  pollfd item{.fd = fd_, .events = POLLIN, .revents = 0};
  timespec limit{};
  timespec* limit_pointer = nullptr;
  if (deadline_ns != kNoDeadline) {
    const int64_t rest = std::max<int64_t>(0, deadline_ns - now_ns());
    limit = {.tv_sec = rest / 1'000'000'000, .tv_nsec = rest % 1'000'000'000};
    limit_pointer = &limit;
  }
  return ppoll(&item, 1, limit_pointer, nullptr) > 0;
}

}  // namespace crossrail
