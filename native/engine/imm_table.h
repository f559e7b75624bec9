// The engine's counters, by immediate number.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "engine/imm_counter.h"
#include "util/spinlock.h"

namespace crossrail {

// Invariant: at most `capacity` counters; find_or_add refuses arrivals of further numbers and never drops them
// silently.
// Invariant: a number returned by allocate() had no counter: it was released, or never handed out, and nothing has
// arrived for it since.
// Threads: any. note_arrival, flush_arrivals, end_arrivals: progress holder.
class ImmTable {
 public:
  // Numbers from `first` on are allocated.
  explicit ImmTable(uint32_t capacity, uint32_t first = kFirstAllocated)
      : capacity_(capacity), first_(first), next_(first) {}

  // Null when the table is full.
  Ref<ImmCounter> find_or_add(Engine* engine, uint32_t imm);
  // UsageError: the table is full.
  [[noreturn]] void throw_full() const;
  // A number from the upper half that has no counter. Throws when the table is full, or all numbers are in use.
  Ref<ImmCounter> allocate(Engine* engine);
  // Throws UsageError if counts of it are visibly still expected; forced, drops them instead.
  void release(uint32_t imm, bool force);
  void close_all();

  // For dumps: calls visit(imm, units, needed_units) for each counter that somebody waits for. Gives up after a moment
  // if the table stays locked: the thread that holds it may have crashed.
  template <typename Visit>
  void visit_waiting(Visit&& visit) const {
    if (!lock_.try_lock_for_a_moment()) return;
    std::lock_guard lock(lock_, std::adopt_lock);
    uint64_t needed = 0;
    uint64_t units = 0;
    for (const auto& [imm, counter] : counters_) {
      if (counter->try_waiting(&needed, &units)) visit(imm, units, needed);
    }
  }

  // Gathers consecutive arrivals of the same number, so that a burst costs one look-up and one atomic. False: the table
  // is full and the arrival is lost.
  bool note_arrival(Engine* engine, uint32_t imm, uint64_t units);
  void flush_arrivals();
  // Flushes the last arrivals and drops the remembered counter.
  void end_arrivals();

 private:
  static constexpr uint32_t kFirstAllocated = 1u << (kImmBits - 1);

  // The most released numbers that wait for reuse: beyond that, the oldest is reused.
  static constexpr size_t kRestingMax = size_t{1} << 20;

  Ref<ImmCounter> add(Engine* engine, uint32_t imm);
  uint32_t draw();

  const uint32_t capacity_;
  const uint32_t first_;
  mutable SpinLock lock_;  // guards counters_, next_, released_
  std::unordered_map<uint32_t, Ref<ImmCounter>> counters_;
  uint32_t next_;
  // Reused, oldest first, once all numbers were handed out or kRestingMax of them are waiting. May contain numbers that
  // are in use again, or duplicates.
  std::deque<uint32_t> released_;
  std::atomic<uint64_t> releases_{0};
  bool closed_ = false;
  // Progress holder: counter of the last arrival.
  Ref<ImmCounter> last_;
  uint64_t last_releases_ = 0;
  uint64_t gathered_units_ = 0;
};

}  // namespace crossrail
