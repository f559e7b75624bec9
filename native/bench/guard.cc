#include "bench/guard.h"

#include <cerrno>
#include <string>
#include <utility>

#include "util/errors.h"

namespace crossrail::bench {

Guard::Guard(const char* what, double timeout_s, InterruptCheck interrupted)
    : what_(what), timeout_s_(timeout_s), deadline_(deadline_in(timeout_s)), interrupted_(std::move(interrupted)) {}

void Guard::look() {
  const int64_t now = now_ns();
  if (now > deadline_) check(WaitResult::kTimeout);
  if (interrupted_.is_due(now) && interrupted_.ask(now)) throw Interrupted();
}

void Guard::check(WaitResult result) const {
  switch (result) {
    case WaitResult::kReady:
      return;
    case WaitResult::kInterrupted:
      throw Interrupted();
    case WaitResult::kClosed:
      throw EngineClosedError(std::string("the engine was closed during ") + what_);
    case WaitResult::kTimeout:
      throw TransportError(
          what_, ETIMEDOUT, "did not end within " + std::to_string(timeout_s_) + " s",
          "look whether the other process still runs; over a slow link give it longer (bench run --timeout-s)");
  }
}

}  // namespace crossrail::bench
