// How a thread waits in the engine: it drives if no worker does, and sleeps once nothing has moved for a while.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "engine/core.h"

namespace crossrail {

inline void take_nap(Deadline until) {
  constexpr int64_t kLookEveryNs = 200'000;
  std::this_thread::sleep_for(std::chrono::nanoseconds(std::clamp<int64_t>(until - now_ns(), 0, kLookEveryNs)));
}

// For wait_until() where nobody announces that ready() may have become true: looks again soon.
inline void nap(EngineCore::Guest& /*guest*/, Deadline until) { take_nap(until); }

// A thread's stay in the engine as a guest: it is counted, so that the worker makes way, and becomes the progress
// holder whenever it can.
class EngineCore::Visit {
 public:
  explicit Visit(EngineCore& core) : core_(core), assists_(core.options_.polling != Polling::kSpin) { step_in(); }

  void step_in() {
    if (assists_) core_.guests_.fetch_add(1, std::memory_order_relaxed);
  }
  void step_out() {
    // The current holder will see in leave() that the news has been taken and that nobody is on the way to it.
    if (std::exchange(guest_.has_news, false) && !holding_ && core_.try_enter_open()) {
      holding_ = true;
      core_.round();
    }
    if (std::exchange(guest_.is_in_front, false)) core_.transports_.sleeping_place().leave_front();
    let_go();
    if (assists_) core_.guests_.fetch_sub(1, std::memory_order_relaxed);
  }

  bool is_in_front() const { return guest_.is_in_front; }
  bool is_holding() const { return holding_; }
  // Becomes the holder if nobody is, unless close() was faster.
  void enter() {
    if (!holding_ && assists_) holding_ = core_.try_enter_open();
    if (holding_) is_aside_ = false;
  }
  void let_go() {
    // Whoever has entered since arms the bells as it leaves; if nobody has, it is for us to do.
    if (std::exchange(is_aside_, false) && !holding_) holding_ = core_.try_enter_open();
    if (std::exchange(holding_, false)) core_.leave();
  }
  // Lets other threads have this core, and leaves the bells off: we come back, and are still counted as a guest, as a
  // worker on this core would drive in our place otherwise, and have to wake us. As Patience::yield().
  bool yield() {
    if (std::exchange(holding_, false)) {
      core_.progress_lock_.unlock();
      is_aside_ = true;
    }
    return core_.guests_patience_.yield(&core_.moves_);
  }
  // As the holder. Returns whether anything moved.
  bool drive() {
    guest_.has_news = false;
    return core_.round() > 0;
  }
  // Sleeps: still a guest, but in nobody's way.
  template <typename Sleep>
  void sleep(Sleep& how, Deadline until) {
    let_go();
    if (assists_) core_.guests_.fetch_sub(1, std::memory_order_relaxed);
    how(guest_, until);
    if (assists_) core_.guests_.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  EngineCore& core_;
  const bool assists_;
  bool holding_ = false;
  bool is_aside_ = false;  // it has let go without arming the bells
  Guest guest_;
};

template <typename Ready, typename Sleep>
WaitResult EngineCore::wait_until(Ready&& ready, Sleep&& sleep, Deadline deadline, const InterruptCheck& interrupted) {
  constexpr int kRoundsPerClock = 32;
  constexpr uint32_t kMovingRoundsPerClock = 16;  // these rounds are longer: each moves a MiB or so
  if (forked()) return WaitResult::kClosed;
  if (is_simulated()) [[unlikely]]
    return wait_in_simulation(ready, deadline, interrupted);
  const bool manual = options_.polling == Polling::kManual;
  WaitResult result = WaitResult::kReady;
  int64_t spin_until = 0;
  int64_t yield_from = 0;
  const int64_t begin = now_ns();
  // Without time left, one round, however much is left to move: a caller that polls repeatedly drives this way, too.
  uint32_t moving_rounds = begin >= deadline ? kMovingRoundsPerClock - 1 : 0;
  Visit visit(*this);
  for (int rounds = 0;; ++rounds) {
    if (ready()) break;
    if (closed()) {  // close() completes everything: stay out of its way and wait until it has done so
      visit.let_go();
      if (drained_.load(std::memory_order_acquire)) {
        result = ready() ? WaitResult::kReady : WaitResult::kClosed;
        break;
      }
      std::this_thread::yield();
      continue;
    }
    visit.enter();
    const bool moved = visit.is_holding() && visit.drive();
    bool lost_core = false;
    if (moved) {
      spin_until = 0;
      rounds = -1;  // the first idle round looks at the clock
      // Look now and then in moving rounds, too: there is no idle one while somebody keeps submitting.
      if (++moving_rounds % kMovingRoundsPerClock != 0) continue;
      if (ready()) break;  // checked before the deadline
    } else if (visit.is_holding()) {
      cpu_relax();
      if (rounds % kRoundsPerClock != 0) continue;
    } else {
      lost_core = visit.yield();  // the driving thread may need this very core to make way
    }
    const int64_t now = now_ns();
    if (interrupted.is_due(now)) {  // checked before the deadline: this may be one slice of a longer wait
      // Asking takes as long as others keep the GIL, and as long as signal handlers take: let the worker drive.
      visit.step_out();
      const bool ends = interrupted.ask(now);
      visit.step_in();
      if (ends) {
        result = WaitResult::kInterrupted;
        break;
      }
    }
    if (now >= deadline) {
      result = WaitResult::kTimeout;
      break;
    }
    if (moved) continue;
    if (spin_until == 0) {
      spin_until = now + guests_patience_.spin_ns(now);
      yield_from = guests_patience_.is_crowded(now) ? spin_until : now + Patience::kYieldAfterNs;
    }
    if (now < spin_until && !lost_core) {
      if (now >= yield_from && visit.is_holding() && visit.yield()) spin_until = now;
      continue;
    }
    // Idle for long enough: sleep.
    const Deadline until = std::min(deadline, interrupted.due_ns(now));
    // If nobody else drives, look again soon: the waiter in front may never come back.
    visit.sleep(sleep, manual ? std::min(until, now + 1'000'000) : until);
    // After a sleep that was worth it: look, help once, sleep again.
    const bool was_short = visit.is_in_front() && guests_patience_.note_sleep(now_ns() - now);
    spin_until = was_short ? 0 : 1;
    rounds = -1;
  }
  visit.step_out();
  return result;
}

}  // namespace crossrail
