// Two engines in one process, over shm.
#pragma once

#include <doctest/doctest.h>

#include "engine/engine.h"
#include "util/clock.h"

namespace crossrail::test {

inline EngineRef open_engine(const char* name, uint32_t rails = 1, Polling polling = Polling::kAdaptive,
                             PrivatePath path = PrivatePath::kAuto) {
  EngineOptions options;
  options.name = name;
  options.rail_count = rails;
  options.polling = polling;
  options.private_path = path;
  return Engine::open(options);
}

inline void require_done(const TransferRef& transfer) {
  REQUIRE(transfer->wait(deadline_in(20), {}) == WaitResult::kReady);
  const TransferInfo info = transfer->info();
  INFO("status ", status_name(info.status), " ", info.detail);
  REQUIRE(info.status == Status::kDone);
}

inline void require_counted(Engine& engine, uint32_t imm, uint64_t count) {
  REQUIRE(engine.imm_counter(imm)->wait(count, deadline_in(20), {}) == WaitResult::kReady);
}

struct Pair {
  explicit Pair(uint32_t rails_a = 2, uint32_t rails_b = 3, Polling polling = Polling::kAdaptive)
      : a(open_engine("a", rails_a, polling)), b(open_engine("b", rails_b, polling)) {}
  ~Pair() {
    a->close(0);
    b->close(0);
  }
  EngineRef a, b;
};

}  // namespace crossrail::test
