// Transfers that wait for a watched word before they begin: triggered operations, as Portals and libfabric call them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/watcher.h"

namespace crossrail {

class Transfer;

// Threads: progress holder.
// Invariant: a held transfer is pending and in no peer's queue. `held_` contains only words that something waits for.
class Triggers {
 public:
  bool empty() const { return held_.empty(); }
  // How many are held; any thread.
  uint64_t size() const { return size_.load(std::memory_order_relaxed); }

  // At the threshold or past it: words count modulo 2**64.
  static bool is_reached(uint64_t value, uint64_t threshold) { return value - threshold < uint64_t{1} << 63; }

  enum class Word : uint8_t { kAwaited, kReached, kClosed };  // kClosed: without having reached it
  // Holds the transfer only if the result is kAwaited.
  Word hold(Transfer* transfer, Ref<Watcher> watcher, uint64_t threshold);
  // Removes and returns transfers that wait no longer, in the order in which they came.
  struct Due {
    Transfer* transfer;
    Word word;
  };
  std::vector<Due> take_due();
  static constexpr size_t kDueMax = 64;  // at a time: call again for more
  // Removes and returns the transfers for which is_wanted() is true.
  std::vector<Transfer*> take(const std::function<bool(const Transfer*)>& is_wanted);

 private:
  struct Waiting {
    Transfer* transfer;
    uint64_t threshold;
  };
  // The transfers that wait for one word; looked through only when that word has changed.
  struct Held {
    Ref<Watcher> watcher;
    uint64_t seen;
    bool is_unseen;  // look even if the word is unchanged: one was added, or the last look did not take all
    std::vector<Waiting> waiting;
  };

  static Word look(const Watcher& watcher, uint64_t threshold);
  // take(waiting): returns whether it has taken it.
  template <typename Take>
  void take_from(Held& held, const Take& take);
  void drop_unused();

  std::vector<Held> held_;
  std::atomic<uint64_t> size_{0};
};

}  // namespace crossrail
