// What keeps a measuring loop from spinning for ever when the other process is gone.
#pragma once

#include <cstdint>
#include <exception>

#include "engine/waiting.h"
#include "util/clock.h"

namespace crossrail::bench {

// The interrupt check said stop. Whoever provided the check knows why.
class Interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "interrupted"; }
};

// Deadline and interrupt check of one measuring loop.
// Threads: the loop's.
class Guard {
 public:
  // what: the loop's name, for the message when time is up; must outlive the guard.
  Guard(const char* what, double timeout_s, InterruptCheck interrupted);

  // One turn of a spin loop. Reads the clock every 4096th turn, so that it costs nothing compared with what is
  // measured. Throws TransportError past the deadline, and Interrupted if the check says so.
  void tick() {
    if ((++turns_ & kTurnsMask) == 0) look();
  }

  // Throws the error for a wait that ended with `result`; returns for kReady.
  void check(WaitResult result) const;

  // Does at once what every 4096th tick does: for loops with long turns.
  void look();

  Deadline deadline() const { return deadline_; }
  const InterruptCheck& interrupted() const { return interrupted_; }

 private:
  static constexpr uint32_t kTurnsMask = 4095;

  const char* what_;
  double timeout_s_;
  Deadline deadline_;
  InterruptCheck interrupted_;
  uint32_t turns_ = 0;
};

}  // namespace crossrail::bench
