// Counting immediates: all synchronisation of the contract.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>

#include "engine/count_flag.h"
#include "engine/notifier.h"
#include "engine/waiting.h"
#include "transport/types.h"
#include "util/clock.h"
#include "util/spinlock.h"

namespace crossrail {

class Engine;

// Arrivals of one immediate number. Credit semantics: a wait of n consumes n, and arrivals before anyone asks are kept.
// Threads: everything from any thread; arrive() from the progress holder.
// Invariant: units_ = 48 * (arrived - consumed) >= 0.
// Invariant: waiters_ not empty, or a flag, implies has_waiters_, and no prefix of waiters_ could be served from units_
// once the thread that last changed either has left serve(); nor, if none waits, a flag be given whole counts.
class ImmCounter : public RefCounted<ImmCounter> {
 public:
  ImmCounter(Ref<Engine> engine, uint32_t imm);
  ~ImmCounter();

  uint32_t imm() const { return imm_; }

  // Whole counts available now, not consumed.
  uint64_t poll() const;
  // The same in 1/48ths: a write split over rails arrives in parts.
  uint64_t poll_units() const { return units_.load(std::memory_order_acquire); }

  // Takes n whole counts if they are there and nobody queues before us.
  bool try_consume(uint64_t count);

  // Blocks until n counts were taken. Drives the engine meanwhile when no worker does. kInterrupted takes none.
  WaitResult wait(uint64_t count, Deadline deadline, const InterruptCheck& interrupted);

  // Once n counts are there, takes them and posts `cookie`; served first come, first served. The ticket is for
  // cancel_notify. If the engine closes first, the cookie is posted all the same, and closed() is true.
  uint64_t notify(uint64_t count, Notifier* notifier, uint64_t cookie);
  // True: withdrawn, nothing was taken and no cookie comes. False: served already, the cookie comes or came.
  bool cancel_notify(uint64_t ticket);
  // From now on every whole count that nobody waited for before it came goes to a flag, and with it to kernels of a
  // GPU. Throws UsageError while another is raised, EngineClosedError once closed.
  Ref<CountFlag> raise();
  // Ends that flag, and takes back what was given and not taken. No kernel waits by it any more. Idempotent.
  void lower(CountFlag* flag);
  const Clock& clock() const;  // that deadlines of wait() are points on
  // Throws UsageError when counts are expected for certain: somebody waits, a flag is raised, or a part of one has
  // arrived.
  void check_settled() const;
  // True once the engine was closed: notified waiters then got nothing.
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  // For dumps: whether anybody waits, for how many 48ths, and how many there are. False also when the counter is being
  // changed and that does not end.
  bool try_waiting(uint64_t* needed_units, uint64_t* units) const;

  // Adds arrivals, or counts that are given back, and serves waiters. Any thread; arrivals: the progress holder.
  void arrive(uint64_t units);
  // Engine::close: serves every waiter with "closed".
  void close();

 private:
  struct Waiter {
    uint64_t ticket;
    uint64_t units;
    Ref<Notifier> notifier;        // or
    std::atomic<uint32_t>* futex;  // of a blocked thread
    uint64_t cookie;
  };
  void serve();
  void tell(std::atomic<uint32_t>* word, uint32_t what);
  // Takes units if there are as many.
  bool take(uint64_t needed);
  // Under the lock, after a change of waiters_ or flag_.
  void note_waiters();

  const Ref<Engine> engine_;
  const uint32_t imm_;
  std::atomic<uint64_t> units_{0};
  std::atomic<bool> has_waiters_{false};
  std::atomic<bool> closed_{false};
  mutable SpinLock lock_;  // guards what follows
  std::deque<Waiter> waiters_;
  Ref<CountFlag> flag_;  // raised, or null
  uint64_t next_ticket_ = 1;
};

}  // namespace crossrail
