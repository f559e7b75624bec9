// Counters of immediates: all synchronisation of the contract.
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

// Arrivals of one immediate number. Credit semantics: a wait for n consumes n, and counts that arrive before anybody
// asks are kept.
// Threads: everything from any thread; arrive() from the progress holder.
// Invariant: units_ = 48 * (arrived - consumed) >= 0.
// Invariant: if waiters_ is not empty, or there is a flag, has_waiters_ is set; and once the thread that last changed
// waiters_ or units_ has left serve(), units_ does not suffice for the first waiter, nor, if none waits, for a whole
// count to a flag.
class ImmCounter : public RefCounted<ImmCounter> {
 public:
  ImmCounter(Ref<Engine> engine, uint32_t imm);
  ~ImmCounter();

  uint32_t imm() const { return imm_; }

  // Whole counts available now.
  uint64_t poll() const;
  // The same in 1/48ths: a write split over rails arrives in parts.
  uint64_t poll_units() const { return units_.load(std::memory_order_acquire); }

  // Takes n whole counts if they are available and nobody is queued before us.
  bool try_consume(uint64_t count);

  // Blocks until n counts were taken. Drives the engine meanwhile if no worker does. kInterrupted takes none.
  WaitResult wait(uint64_t count, Deadline deadline, const InterruptCheck& interrupted);

  // Takes n counts once they are available and posts `cookie`; first come, first served. The ticket is for
  // cancel_notify. If the engine closes first, the cookie is posted nevertheless, and closed() is true.
  uint64_t notify(uint64_t count, Notifier* notifier, uint64_t cookie);
  // True: withdrawn; nothing was taken and no cookie will be posted. False: already served; the cookie has been or will
  // be posted.
  bool cancel_notify(uint64_t ticket);
  // From now on every whole count that no earlier wait claims goes to a flag, and through it to GPU kernels. Throws
  // UsageError while another flag is raised, EngineClosedError once closed.
  Ref<CountFlag> raise();
  // Ends that flag, and takes back what was given and not consumed. No kernel may wait on it any more. Idempotent.
  void lower(CountFlag* flag);
  const Clock& clock() const;  // the clock of wait()'s deadlines
  // Throws UsageError if counts are certainly still expected: somebody waits, a flag is raised, or part of a count has
  // arrived.
  void check_settled() const;
  // True once the engine was closed: waiters that are notified then got nothing.
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  // For dumps: whether anybody waits, for how many 48ths, and how many are available. Also false if the counter stays
  // locked by another thread.
  bool try_waiting(uint64_t* needed_units, uint64_t* units) const;

  // Adds arrivals, or counts that are handed back, and serves waiters. Any thread; arrivals: the progress holder.
  void arrive(uint64_t units);
  // Engine::close: serves every waiter with "closed".
  void close();

 private:
  struct Waiter {
    uint64_t ticket;
    uint64_t units;
    Ref<Notifier> notifier;        // or
    std::atomic<uint32_t>* futex;  // the word of a blocked thread
    uint64_t cookie;
  };
  void serve();
  // Takes that waiter out of the queue. False: it is not in it.
  bool withdraw(uint64_t ticket);
  void tell(std::atomic<uint32_t>* word, uint32_t what);
  // Takes `needed` units if that many are available.
  bool take(uint64_t needed);
  // With the lock held, after a change of waiters_ or flag_.
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
