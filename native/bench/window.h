// How the measured loops wait: for a transfer, for a count, for the oldest of the transfers in flight.
//
// With Polling::kManual the waiting thread drives the engine. All throw when a transfer fails, the time is up or the
// user interrupts. Threads: the loop's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "bench/guard.h"
#include "engine/engine.h"

namespace crossrail::bench {

// Returns once `transfer` is done, or at once if it is null; throws if it failed.
void settle(Engine& engine, const TransferRef& transfer, Guard& guard);

// Returns once `count` has been taken from the counter.
void await_count(Engine& engine, ImmCounter& counter, uint64_t count, Guard& guard);

// The transfers in flight, at most as many as the window's width.
class Window {
 public:
  Window(Engine& engine, uint32_t width, Guard& guard);

  // Returns once the oldest slot of the window is free again.
  void make_room() {
    settle(engine_, ring_[next_], guard_);
    ring_[next_] = nullptr;
  }
  void add(TransferRef transfer) {
    ring_[next_] = std::move(transfer);
    if (++next_ == ring_.size()) next_ = 0;
  }
  void settle_all();

 private:
  Engine& engine_;
  Guard& guard_;
  std::vector<TransferRef> ring_;
  size_t next_ = 0;
};

}  // namespace crossrail::bench
