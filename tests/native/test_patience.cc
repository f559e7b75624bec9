// How long one spins before a sleep: after sleeps that were too short, and where others want the core.
#include <doctest/doctest.h>

#include "engine/patience.h"

namespace crossrail {

TEST_CASE("who wakes at once spins for longer, until a sleep was worth it") {
  Patience patience(1000);
  CHECK(patience.spin_ns(0) == 1000);
  for (const int64_t spin_ns : {2000, 4000, 8000, 16000, 16000}) {
    CHECK(patience.note_sleep(499));
    CHECK(patience.spin_ns(0) == spin_ns);
  }
  CHECK_FALSE(patience.note_sleep(500));
  CHECK(patience.spin_ns(0) == 1000);
}

TEST_CASE("who never sleeps since news come while he spins, tries to after a while") {
  Patience patience(1000);
  for (int i = 0; i < 4; ++i) patience.note_sleep(0);
  int spins = 0;
  while (patience.spin_ns(0) > 1000 && spins < 1000) ++spins;
  CHECK(spins > 4);
  CHECK(spins < 1000);
}

TEST_CASE("who is not to spin does not") {
  Patience patience(0);
  CHECK_FALSE(patience.note_sleep(0));
  CHECK(patience.spin_ns(0) == 0);
}

TEST_CASE("who lost the core for long by yielding sleeps instead of that for a while, and longer each time") {
  constexpr int64_t kMs = 1'000'000;
  Patience patience(50'000);
  CHECK_FALSE(patience.note_yield(0, 100'000));  // a peer on this core that has answered, say
  CHECK(patience.spin_ns(100'000) == 50'000);
  int64_t now = kMs;
  for (const int64_t crowded_ms : {20, 40, 80, 160, 320, 640, 1280, 2000, 2000}) {
    CHECK(patience.note_yield(now, now + 3 * kMs));
    now += 3 * kMs;
    CHECK(patience.spin_ns(now) == Patience::kYieldAfterNs);
    now += crowded_ms * kMs;
    CHECK(patience.spin_ns(now - 1) == Patience::kYieldAfterNs);
    CHECK(patience.spin_ns(now) == 50'000);
  }
  now += 2000 * kMs;
  CHECK(patience.note_yield(now, now + kMs));
  CHECK(patience.spin_ns(now + 21 * kMs) == 50'000);

  Patience hasty(1000);
  CHECK(hasty.note_yield(0, 3 * kMs));
  CHECK(hasty.spin_ns(3 * kMs) == 1000);
}

}  // namespace crossrail
