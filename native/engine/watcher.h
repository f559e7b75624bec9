// 64-bit words that a GPU kernel or the CPU increments, and a notification when they have changed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "engine/notifier.h"

namespace crossrail {

class Engine;
class WatcherThread;

// One watched word. Intermediate values may be skipped; none is reported twice, and the last one is always reported.
// Changes by add() and store() are announced by the caller. Other changes (by a kernel, or a store through the address)
// can only be found by polling: a thread begins to poll when the address is first asked for, and not before, since
// polling costs part of a core. Transfers may wait for the word (Trigger in engine/engine.h): then the progress holder
// polls it, too.
// Threads: add()/store()/value()/take()/word()/add_on() from any thread.
class Watcher : public RefCounted<Watcher> {
 public:
  ~Watcher();
  // Address of the word, 8-byte aligned, valid while the watcher lives: for kernels and other writers.
  std::atomic<uint64_t>* word();
  uint64_t value() const { return word_->load(std::memory_order_acquire); }
  void store(uint64_t value);
  // announce: if false, the caller takes care of what follows from the change.
  void add(uint64_t delta, bool announce = true);
  // Adds, unless that would take the word past the limit, in the order of a counter that wraps. Returns whether it did.
  // The caller takes care of what follows from the change.
  bool add_up_to(uint64_t limit, uint64_t delta);
  // Adds once all earlier work in that GPU's stream (gpu -1: ask the driver) has ended: by a kernel, which a stream
  // under capture records into its graph. Such a change is found by polling, as with word(). This object must stay
  // alive until the kernel has run, and as long as a graph that contains it may be launched. Throws as
  // device::HostWords::add, and UsageError in a simulated engine.
  void add_on(uint64_t stream, int gpu, uint64_t delta);

  // For use after a notification: the value last taken and the current one; equal if another take came first.
  struct Change {
    uint64_t old_value;
    uint64_t new_value;
  };
  Change take();

  // Stops watching: transfers that wait for the word are cancelled. Idempotent.
  void close();
  // acquire: pairs with the release of whoever ends the watching, so that the word's last value is visible.
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  bool is_of(const WatcherThread* thread) const { return thread_.get() == thread; }

  // How many transfers wait for it. The fence pairs with the one in has_waiting().
  void add_waiting() {
    waiting_.fetch_add(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  // relaxed: a thread that still sees the old count wakes the holder needlessly, once.
  void remove_waiting(uint32_t count) { waiting_.fetch_sub(count, std::memory_order_relaxed); }

 private:
  friend class WatcherThread;
  Watcher(Ref<Engine> engine, std::shared_ptr<WatcherThread> thread, std::atomic<uint64_t>* word, uint32_t slot,
          Ref<Notifier> notifier, uint64_t cookie);
  const Ref<Engine> engine_;  // which a change of the word may have to wake; declared first: dropped last
  std::shared_ptr<WatcherThread> thread_;
  std::atomic<uint64_t>* word_;
  uint32_t slot_;
  Ref<Notifier> notifier_;
  uint64_t cookie_;
  // For whoever has changed the word, or seen it changed: must the holder look? seq_cst: either we see who waits, or
  // the waiter, who announced itself before it looked (add_waiting), sees the word at least as new as we do.
  bool has_waiting() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return waiting_.load(std::memory_order_relaxed) > 0;
  }

  std::atomic<uint32_t> waiting_{0};
  std::atomic<bool> closed_{false};
  // Guarded by the thread's mutex.
  uint64_t seen_ = 0;
  bool is_registered_ = true;
  bool is_exposed_ = false;
  // A notification has been posted and not yet answered by a take().
  std::atomic<bool> is_announced_{false};
  std::atomic<uint64_t> taken_{0};
};

}  // namespace crossrail
