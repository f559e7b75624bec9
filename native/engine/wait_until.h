// How a thread waits in the engine: it drives, where no worker does, and sleeps once nothing has moved for a while.
#pragma once

#include <algorithm>
#include <thread>

#include "engine/core.h"

namespace crossrail {

template <typename Ready, typename Sleep>
WaitResult EngineCore::wait_until(Ready&& ready, Sleep&& sleep, Deadline deadline, const InterruptCheck& interrupted) {
  constexpr int64_t kInterruptEveryNs = 50'000'000;
  constexpr int kRoundsPerClock = 32;
  if (forked()) return WaitResult::kClosed;
  if (is_staged()) [[unlikely]]
    return wait_on_stage(ready, deadline, interrupted);
  const bool manual = options_.polling == Polling::kManual;
  const bool assists = options_.polling != Polling::kSpin;
  bool holding = false;
  WaitResult result = WaitResult::kReady;
  int64_t spin_until = 0;
  int64_t next_interrupt = now_ns() + kInterruptEveryNs;
  if (assists) guests_.fetch_add(1, std::memory_order_relaxed);
  for (int rounds = 0;; ++rounds) {
    if (ready()) break;
    if (closed()) {  // close() completes everything: wait for it to have done so, out of its way
      if (holding) leave();
      holding = false;
      if (drained_.load(std::memory_order_acquire)) {
        result = ready() ? WaitResult::kReady : WaitResult::kClosed;
        break;
      }
      std::this_thread::yield();
      continue;
    }
    if (!holding && assists) holding = try_enter();
    if (holding) {
      if (round() > 0) {
        spin_until = 0;
        continue;
      }
    }
    if (holding) {
      cpu_relax();
      if (rounds % kRoundsPerClock != 0) continue;
    } else {
      std::this_thread::yield();  // who drives may need this very core to make way
    }
    const int64_t now = now_ns();
    if (now >= deadline) {
      result = WaitResult::kTimeout;
      break;
    }
    if (now >= next_interrupt) {
      next_interrupt = now + kInterruptEveryNs;
      if (holding) {
        leave();
        holding = false;
      }
      if (interrupted && interrupted()) {
        result = WaitResult::kInterrupted;
        break;
      }
    }
    if (spin_until == 0) spin_until = now + options_.spin_ns;
    if (now < spin_until) continue;
    // Idle for long enough: sleep.
    const Deadline until = std::min(deadline, next_interrupt);
    if (holding) {
      leave();
      holding = false;
    }
    if (assists) guests_.fetch_sub(1, std::memory_order_relaxed);
    if (manual) {
      // Nobody else drives: sleep where the worker would, and look again soon in case another waiter took our ring.
      if (!ready() && !closed()) transports_.sleep(std::min(until, now + 1'000'000));
    } else {
      sleep(until);
    }
    if (assists) guests_.fetch_add(1, std::memory_order_relaxed);
    spin_until = 1;  // after a sleep: look, help once, sleep again
    rounds = -1;
  }
  if (holding) leave();
  if (assists) guests_.fetch_sub(1, std::memory_order_relaxed);
  return result;
}

}  // namespace crossrail
