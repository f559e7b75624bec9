// An engine in a simulation: no thread of ours drives, the world's turns do.
#include <algorithm>
#include <chrono>
#include <thread>

#include "engine/core.h"
#include "engine/watchdog.h"

namespace crossrail {

// In a simulation, whoever waits drives all engines of the world, including ours; callbacks of the user run here,
// between steps.
WaitResult EngineCore::wait_in_simulation(const std::function<bool()>& ready, Deadline deadline,
                                          const InterruptCheck& interrupted) {
  constexpr uint32_t kStepsPerLook = 256;  // between looks at the real clock
  constexpr auto kNap = std::chrono::microseconds(100);
  if (deadline <= 0) return ready() ? WaitResult::kReady : WaitResult::kTimeout;  // a mere query drives nobody
  Simulation& simulation = *options_.simulation;
  const Simulation::Wait wait(&simulation);
  if (!closed()) simulation.wake(seat_.number);  // for words that were changed without telling us
  const auto is_interrupted = [&] {
    const int64_t now = now_ns();
    return interrupted.is_due(now) && interrupted.ask(now);
  };
  for (uint32_t steps = 1;; ++steps) {
    if (simulation.has_callbacks()) simulation.run_callbacks();
    if (ready()) return WaitResult::kReady;
    if (closed() && drained_.load(std::memory_order_acquire)) return ready() ? WaitResult::kReady : WaitResult::kClosed;
    const Simulation::Step step = closed() ? Simulation::Step::kHeld : simulation.advance(deadline);
    switch (step) {
      case Simulation::Step::kMoved:
        break;
      case Simulation::Step::kReached:
        if (ready()) return WaitResult::kReady;
        // This may be one slice of a longer wait.
        return is_interrupted() ? WaitResult::kInterrupted : WaitResult::kTimeout;
      case Simulation::Step::kIdle:
        if (ready()) return WaitResult::kReady;
        throw SimulationIdleError(
            "the simulation is idle: nothing is left to happen that could end this wait of engine '" + options_.name +
            "', which has no deadline");
      case Simulation::Step::kHeld:
        std::this_thread::sleep_for(kNap);
        break;
    }
    if (steps % kStepsPerLook != 0 && step != Simulation::Step::kHeld) continue;
    if (is_interrupted()) return WaitResult::kInterrupted;
  }
}

bool EngineCore::has_changed_words() const { return watchers_->has_changes(); }

bool EngineCore::is_busy() const { return inflight() > 0 || peers_.is_any_connecting(); }

uint64_t EngineCore::outcomes() const {
  uint64_t sum = finished_.load(std::memory_order_relaxed);
  for (const auto* counter : {&counters_.received, &counters_.imm_units, &counters_.connected, &counters_.lost}) {
    sum += counter->load(std::memory_order_relaxed);
  }
  return sum;
}

bool EngineCore::turn() {
  if (closed()) {
    simulated_timer_ = kNoDeadline;
    return false;
  }
  if (!try_enter()) return true;  // held by a thread that connects, or forgets a peer
  watchers_->look();
  const bool moved = round() > 0;  // retirements may have made room for what round() had already passed over
  const bool more = moved || has_work();
  simulated_timer_ = std::min(next_due(), tend_watchdog());
  progress_lock_.unlock();
  return more;
}

// The watchdog's turn, in engines without a watchdog thread. Once a stall has been reported nothing more will follow
// from it, so the clock need not advance for its sake.
Deadline EngineCore::tend_watchdog() {
  if (!watchdog_) return kNoDeadline;
  const int64_t now = clock().now_ns();
  const uint64_t moves = moves_.load(std::memory_order_relaxed);
  if (moves != watched_moves_) {
    watched_moves_ = moves;
    watched_since_ = now;
  }
  if (now >= watch_at_) {
    watchdog_->look(now);
    watch_at_ = now + watchdog_->pause_ns();
  }
  return inflight() > 0 && now - watched_since_ <= 2 * options_.watchdog_ns ? watch_at_ : kNoDeadline;
}

}  // namespace crossrail
